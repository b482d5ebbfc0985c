//! The dirty log (rules 8 and 10): enabling it and collecting from it, against faults and each other.

use std::sync::Arc;

use loom::sync::atomic::{AtomicU64, Ordering};
use slat_vm::sabotage::Skip;
use slat_vm::{FaultKind, LogMode, Worker};

use crate::machine::Tables;
use crate::world::{Guest, Model, SLOT, World};

/// Page 0, and what a migration has sent of it.
struct Page {
    /// How often the guest has written to it.
    written: AtomicU64,
    /// What that was when it was copied.
    copied: AtomicU64,
}

impl Page {
    fn new() -> Arc<Self> {
        Arc::new(Self { written: AtomicU64::new(0), copied: AtomicU64::new(0) })
    }

    fn write(&self, guest: &mut Guest) {
        let through = |_| {
            self.written.fetch_add(1, Ordering::Relaxed);
        };
        guest.write(through);
    }

    fn copy(&self) {
        self.copied.store(self.written.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// Collects, and copies the page if it was written.
    fn collect(&self, world: World, worker: &mut Worker<'static, Tables>) {
        let mut bitmap = [0];
        world.vm.dirty_log(worker, SLOT, &mut bitmap).unwrap();
        if bitmap[0] & 1 != 0 {
            self.copy();
        }
    }

    /// When nobody writes any more, a last collection brings the copy up to date and leaves nothing writable.
    fn finish(&self, world: World, worker: &mut Worker<'static, Tables>) {
        self.collect(world, worker);
        let same = self.written.load(Ordering::Relaxed) == self.copied.load(Ordering::Relaxed);
        world.expect(same, "a write is lost");
        let writable = world.mapped(worker).is_some_and(|(_, write)| write);
        let writable = writable || world.writes_through();
        world.expect(!writable, "collected, and writable without a fault");
    }
}

/// A page is written for the first time while the log is enabled.
fn enable_against_a_fault(world: World) {
    let page = Page::new();
    let guest = world.guest().spawn({
        let page = page.clone();
        move |guest| page.write(guest)
    });
    let mut worker = world.worker();
    world.vm.enable_log(&mut worker, SLOT, LogMode::Protect).unwrap();
    page.copy();
    guest.join();
    page.finish(world, &mut worker);
}

#[test]
fn a_write_after_the_log_was_enabled_is_in_it() {
    Model::new().preemptions(3).explore(enable_against_a_fault);
}

#[test]
#[should_panic(expected = "a write is lost")]
fn a_fault_that_does_not_check_the_version_escapes_the_log() {
    Model::without(Skip::Version).explore(enable_against_a_fault);
}

#[test]
#[should_panic(expected = "a write is lost")]
fn a_fault_escapes_a_log_that_is_enabled_without_a_grace_period() {
    Model::without(Skip::SlotGrace).explore(enable_against_a_fault);
}

/// A page that is in the log is written to during a collection.
fn collection_against_writes(world: World) {
    let page = Page::new();
    let mut worker = world.worker();
    world.vm.enable_log(&mut worker, SLOT, LogMode::Protect).unwrap();
    let mut guest = world.guest();
    page.write(&mut guest);
    let guest = guest.spawn({
        let page = page.clone();
        move |guest| page.write(guest)
    });
    page.collect(world, &mut worker);
    guest.join();
    page.finish(world, &mut worker);
}

#[test]
fn every_write_during_a_collection_is_in_it_or_in_the_next() {
    Model::new().preemptions(3).explore(collection_against_writes);
}

#[test]
#[should_panic(expected = "a write is lost")]
fn a_write_is_lost_if_pages_are_protected_before_their_bits_are_taken() {
    Model::without(Skip::TakeFirst).explore(collection_against_writes);
}

/// The same with a page that was collected before.
fn collection_against_a_first_write(world: World) {
    let page = Page::new();
    let mut worker = world.worker();
    world.vm.enable_log(&mut worker, SLOT, LogMode::Protect).unwrap();
    let guest = world.guest().spawn({
        let page = page.clone();
        move |guest| page.write(guest)
    });
    page.collect(world, &mut worker);
    guest.join();
    page.finish(world, &mut worker);
}

#[test]
fn every_first_write_during_a_collection_is_in_it_or_in_the_next() {
    Model::new().preemptions(3).explore(collection_against_a_first_write);
}

#[test]
#[should_panic(expected = "a write is lost")]
fn a_write_is_lost_if_the_bit_is_set_before_the_entry_is_writable() {
    Model::without(Skip::MarkLast).preemptions(3).explore(collection_against_a_first_write);
}

/// The same where the write takes the short way: the page is mapped, and only the log is in its way.
fn collection_against_a_fast_write(world: World) {
    let page = Page::new();
    let mut worker = world.worker();
    world.vm.enable_log(&mut worker, SLOT, LogMode::Protect).unwrap();
    let mut guest = world.guest();
    guest.kind = FaultKind::Permission;
    page.write(&mut guest);
    page.collect(world, &mut worker);
    let guest = guest.spawn({
        let page = page.clone();
        move |guest| {
            page.write(guest);
            guest.vcpu.statistics().fast
        }
    });
    page.collect(world, &mut worker);
    let (_, fast) = guest.join();
    world.expect(fast > 0, "the write did not take the short way");
    page.finish(world, &mut worker);
}

#[test]
fn every_fast_write_during_a_collection_is_in_it_or_in_the_next() {
    Model::new().preemptions(3).explore(collection_against_a_fast_write);
}

#[test]
#[should_panic(expected = "a write is lost")]
fn a_fast_write_is_lost_if_its_bit_is_set_before_the_entry_is_writable() {
    Model::without(Skip::MarkLast).preemptions(3).explore(collection_against_a_fast_write);
}

/// Two threads collect a page that was written.
fn two_collections(world: World) {
    let mut worker = world.worker();
    world.vm.enable_log(&mut worker, SLOT, LogMode::Protect).unwrap();
    world.guest().write(|_| {});
    let collect = |world: World, worker: &mut Worker<'static, Tables>| {
        let mut bitmap = [0];
        world.vm.dirty_log(worker, SLOT, &mut bitmap).unwrap();
        world.expect(!world.writes_through(), "collected, and writable without a fault");
        bitmap[0]
    };
    let other = world.worker();
    let other = loom::thread::spawn(move || {
        let mut other = other;
        collect(world, &mut other)
    });
    let mine = collect(world, &mut worker);
    let theirs = other.join().unwrap();
    world.expect(mine ^ theirs == 1, "a write was reported twice or never");
}

#[test]
fn neither_of_two_collections_returns_before_what_either_took_is_protected() {
    Model::new().explore(two_collections);
}

#[test]
#[should_panic(expected = "collected, and writable without a fault")]
fn a_collection_that_finds_nothing_returns_early_if_nobody_counts_the_open_ones() {
    Model::without(Skip::OpenCollections).explore(two_collections);
}
