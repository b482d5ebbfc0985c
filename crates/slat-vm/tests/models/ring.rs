//! Dirty rings (rule 8): a vCPU that writes and reports, against a thread that harvests and resets.

use std::sync::Arc;

use loom::sync::atomic::{AtomicU64, Ordering};
use slat_vm::sabotage::Skip;
use slat_vm::{DirtyRing, LogMode, Worker};

use crate::machine::Tables;
use crate::world::{Model, SLOT, World};

/// How often page 0 was written, and what that was when it was copied.
struct Page {
    written: AtomicU64,
    copied: AtomicU64,
}

impl Page {
    /// Harvests and resets, and copies the page if it was reported.
    fn collect(&self, world: World, worker: &mut Worker<'static, Tables>, ring: &DirtyRing) {
        let mut reported = false;
        ring.harvest(|dirty| {
            world.expect(dirty.slot.number == SLOT, "a slot that nobody reported");
            world.expect(dirty.page == 0, "a page that nobody reported");
            reported = true;
        });
        world.vm.reset_dirty_ring(worker, ring).unwrap();
        if reported {
            self.copied.store(self.written.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }
}

fn ring_against_writes(world: World) {
    let page = Arc::new(Page { written: AtomicU64::new(0), copied: AtomicU64::new(0) });
    let mut worker = world.worker();
    world.vm.enable_log(&mut worker, SLOT, LogMode::Ring { backup: false }).unwrap();
    let mut guest = world.guest();
    let ring = guest.vcpu.dirty_ring().unwrap();
    let through = |page: &Arc<Page>| {
        let page = page.clone();
        move |_| {
            page.written.fetch_add(1, Ordering::Relaxed);
        }
    };
    guest.write(through(&page));
    let guest = guest.spawn({
        let through = through(&page);
        move |guest| guest.write(through)
    });
    page.collect(world, &mut worker, &ring);
    guest.join();
    page.collect(world, &mut worker, &ring);
    let same = page.written.load(Ordering::Relaxed) == page.copied.load(Ordering::Relaxed);
    world.expect(same, "a write is lost");
    let writable = world.mapped(&worker).is_some_and(|(_, write)| write);
    let writable = writable || world.writes_through();
    world.expect(!writable, "reset, and writable without a fault");
    world.expect(ring.used() == 0, "an entry is left");
}

#[test]
fn every_write_is_in_the_ring_before_or_after_a_reset() {
    Model::new().preemptions(3).explore(ring_against_writes);
}

/// The guest writes for the first time while the ring is harvested.
fn ring_against_a_first_write(world: World) {
    let mut worker = world.worker();
    world.vm.enable_log(&mut worker, SLOT, LogMode::Ring { backup: false }).unwrap();
    let guest = world.guest();
    let ring = guest.vcpu.dirty_ring().unwrap();
    let page = Arc::new(Page { written: AtomicU64::new(0), copied: AtomicU64::new(0) });
    let guest = guest.spawn({
        let page = page.clone();
        move |guest| {
            guest.write(move |_| {
                page.written.fetch_add(1, Ordering::Relaxed);
            })
        }
    });
    page.collect(world, &mut worker, &ring);
    guest.join();
    page.collect(world, &mut worker, &ring);
    let same = page.written.load(Ordering::Relaxed) == page.copied.load(Ordering::Relaxed);
    world.expect(same, "a write is lost");
}

#[test]
fn a_first_write_during_a_harvest_is_in_the_ring() {
    Model::new().preemptions(3).explore(ring_against_a_first_write);
}

#[test]
#[should_panic(expected = "a write is lost")]
fn a_write_is_lost_if_it_is_reported_before_the_entry_is_writable() {
    Model::without(Skip::MarkLast).preemptions(3).explore(ring_against_a_first_write);
}

#[test]
#[should_panic(expected = "that nobody reported")]
fn a_page_is_misread_if_the_entry_is_dirty_before_the_page_is_in_it() {
    Model::without(Skip::PageFirst).preemptions(3).explore(ring_against_a_first_write);
}
