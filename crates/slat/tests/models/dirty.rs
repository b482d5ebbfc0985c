//! The dirty log (rule 8): write-protect against a fault that makes a page writable and marks it.
//!
//! The bits are the model's own, the order in which they and the entries change is what is shown.

use std::sync::Arc;

use slat::sabotage::Skip;
use slat::sync::{AtomicBool, AtomicU64, Ordering};
use slat::{Attributes, Dirty, Gpa, Installed, Level};

use crate::format::BLOCK;
use crate::world::{Actor, Model, World, gpa, host, range};

/// What a fault does first.
#[derive(Clone, Copy, PartialEq)]
enum Fault {
    MakesWritable,
    Marks,
}

/// What a collection does first.
#[derive(Clone, Copy, PartialEq)]
enum Collection {
    Takes,
    Protects,
}

/// Page 0, its bit, and what a migration has sent of it.
struct Log {
    bit: AtomicBool,
    /// How often the guest has written to the page.
    written: AtomicU64,
    /// What that was when the page was copied.
    copied: AtomicU64,
}

impl Log {
    fn new(bit: bool, written: u64) -> Arc<Self> {
        let (bit, written) = (AtomicBool::new(bit), AtomicU64::new(written));
        Arc::new(Self { bit, written, copied: AtomicU64::new(0) })
    }

    /// The guest writes; each fault is one pin, in which the entry and the bit change.
    fn write(&self, vcpu: &mut Actor, order: Fault) {
        let mut tries = 0;
        let through = |_| {
            self.written.fetch_add(1, Ordering::Relaxed);
        };
        while !vcpu.access(0, true, through) {
            tries += 1;
            if tries > 20 {
                return vcpu.world.machine.violation("a page faults for ever");
            }
            let world = vcpu.world;
            let leaf = world.leaf(0, Level::LAST, host(0), Attributes::RW);
            let pin = vcpu.who.pin();
            if order == Fault::Marks {
                self.bit.store(true, Ordering::Release);
            }
            let done = world.tree.install(&pin, &mut vcpu.reserve, &leaf);
            if order == Fault::MakesWritable
                && matches!(done, Ok(Installed::New | Installed::Relaxed | Installed::Present))
            {
                self.bit.swap(true, Ordering::AcqRel);
            }
            drop(pin);
            if done.is_err() {
                slat::Machine::relax(world.machine);
            }
        }
    }

    fn collect(&self, worker: &mut Actor, order: Collection) {
        let mut dirty = false;
        if order == Collection::Takes {
            dirty = self.bit.swap(false, Ordering::AcqRel);
        }
        if dirty || order == Collection::Protects && self.bit.load(Ordering::Acquire) {
            let world = worker.world;
            world.tree.write_protect_mask(&worker.who, Gpa(0), 1, |_| {}).unwrap();
            let through = world.machine.caches(gpa(0), |cached| cached.writes());
            // The bit as it is now: an exchange reads no older one.
            let marked = self.bit.fetch_or(false, Ordering::AcqRel);
            world.expect(!through || marked, "collected, and writable without a fault");
        }
        if order == Collection::Protects {
            dirty = self.bit.swap(false, Ordering::AcqRel);
        }
        if dirty {
            self.copied.store(self.written.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }

    /// When nobody writes any more: a page that is not in the log has been copied as it is.
    fn lost(&self) -> bool {
        let (written, copied) = (&self.written, &self.copied);
        !self.bit.load(Ordering::Relaxed)
            && written.load(Ordering::Relaxed) != copied.load(Ordering::Relaxed)
    }
}

/// A page that was collected before is written to twice, during another collection.
fn collection_of_a_page(fault: Fault, collection: Collection) -> impl Fn(World) + Send + Sync {
    move |world| {
        let mut worker = world.worker(1);
        worker.map(0, 1, host(0), Attributes::RO);
        written_while_collected(world, worker, Log::new(false, 0), fault, collection);
    }
}

/// A page that is writable and in the log.
fn collection_of_a_dirty_page(
    fault: Fault,
    collection: Collection,
) -> impl Fn(World) + Send + Sync {
    move |world| {
        let mut worker = world.worker(1);
        worker.map(0, 1, host(0), Attributes::RW);
        written_while_collected(world, worker, Log::new(true, 1), fault, collection);
    }
}

/// The same in a block that its first fault has to split.
fn collection_of_a_block(fault: Fault, collection: Collection) -> impl Fn(World) + Send + Sync {
    move |world| {
        let mut worker = world.worker(0);
        worker.map_as(0, 2, host(0), Attributes::RO, BLOCK);
        written_while_collected(world, worker, Log::new(false, 0), fault, collection);
    }
}

fn written_while_collected(
    world: World,
    mut worker: Actor,
    log: Arc<Log>,
    fault: Fault,
    collection: Collection,
) {
    let guest = world.vcpu(0, 1).spawn({
        let log = log.clone();
        move |vcpu| {
            log.write(vcpu, fault);
            log.write(vcpu, fault);
        }
    });
    log.collect(&mut worker, collection);
    guest.join();
    world.expect(!log.lost(), "a write is lost");
    log.collect(&mut worker, collection);
    world.expect(!log.lost(), "a write is lost");
    let writable = worker.mapped(0).unwrap().1;
    world.expect(!writable, "collected, and writable without a fault");
}

/// The same while a third thread splits the block.
fn collection_of_a_block_being_split(
    fault: Fault,
    collection: Collection,
) -> impl Fn(World) + Send + Sync {
    move |world| {
        let mut worker = world.worker(0);
        worker.map_as(0, 2, host(0), Attributes::RW, BLOCK);
        let log = Log::new(true, 1);
        let split = world.worker(1).spawn(|worker| {
            let (tree, who) = (worker.world.tree, &worker.who);
            tree.split(who, &mut worker.reserve, range(0, 2), Level::LAST).unwrap();
        });
        let guest = world.vcpu(0, 1).spawn({
            let log = log.clone();
            move |vcpu| log.write(vcpu, fault)
        });
        log.collect(&mut worker, collection);
        guest.join();
        split.join();
        world.expect(!log.lost(), "a write is lost");
    }
}

#[test]
fn every_write_to_a_block_being_split_is_in_this_collection_or_the_next() {
    let model = collection_of_a_block_being_split(Fault::MakesWritable, Collection::Takes);
    Model::new().explore(model);
}

#[test]
fn every_write_to_a_page_is_in_this_collection_or_the_next() {
    Model::new()
        .preemptions(3)
        .explore(collection_of_a_page(Fault::MakesWritable, Collection::Takes));
}

#[test]
fn every_write_to_a_dirty_page_is_in_this_collection_or_the_next() {
    Model::new()
        .preemptions(3)
        .explore(collection_of_a_dirty_page(Fault::MakesWritable, Collection::Takes));
}

#[test]
fn every_write_to_a_block_is_in_this_collection_or_the_next() {
    Model::new()
        .preemptions(3)
        .explore(collection_of_a_block(Fault::MakesWritable, Collection::Takes));
}

#[test]
#[should_panic(expected = "a write is lost")]
fn a_write_is_lost_if_the_bit_is_set_before_the_entry_is_writable() {
    Model::new().explore(collection_of_a_page(Fault::Marks, Collection::Takes));
}

#[test]
#[should_panic(expected = "a write is lost")]
fn a_write_is_lost_if_pages_are_protected_before_their_bits_are_taken() {
    Model::new().explore(collection_of_a_dirty_page(Fault::MakesWritable, Collection::Protects));
}

/// Hardware marks the page (DBM), the log reads the mark: two writes during a harvest.
fn harvest_against_hardware_writes(world: World) {
    let worker = {
        let mut worker = world.worker(1);
        worker.map(0, 1, host(0), Attributes { dirty: Dirty::Clean, ..Attributes::RW });
        worker
    };
    let log = Log::new(false, 0);
    let guest = world.vcpu(0, 0).spawn({
        let log = log.clone();
        move |vcpu| {
            for _ in 0..2 {
                vcpu.access(0, true, |_| {
                    log.written.fetch_add(1, Ordering::Relaxed);
                });
            }
        }
    });
    let harvest = || {
        let mut dirty = false;
        world.tree.harvest_dirty(&worker.who, range(0, 1), |_| dirty = true).unwrap();
        if dirty {
            log.copied.store(log.written.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    };
    harvest();
    guest.join();
    harvest();
    world.expect(!log.lost(), "a write is lost");
}

#[test]
fn every_hardware_write_is_in_this_harvest_or_the_next() {
    Model::new().hardware_dirty().preemptions(3).explore(harvest_against_hardware_writes);
}

#[test]
#[should_panic(expected = "a write is lost")]
fn a_hardware_write_is_lost_if_marks_are_taken_without_invalidation() {
    let model = Model::without(Skip::Invalidation).hardware_dirty();
    model.explore(harvest_against_hardware_writes);
}

/// A page that hardware marks is write-protected: the mark goes with the permission, and is reported.
fn protect_against_a_hardware_write(world: World) {
    let mut worker = world.worker(1);
    worker.map(0, 1, host(0), Attributes { dirty: Dirty::Clean, ..Attributes::RW });
    let guest = world.vcpu(0, 0).spawn(|vcpu| vcpu.access(0, true, |_| {}));
    let mut reported = false;
    world.tree.write_protect(&worker.who, range(0, 1), |_| reported = true).unwrap();
    let (_, written) = guest.join();
    world.expect(written == reported, "a write is lost");
}

#[test]
fn a_write_protect_hears_of_every_write_that_hardware_has_marked() {
    Model::new().hardware_dirty().preemptions(3).explore(protect_against_a_hardware_write);
}

#[test]
#[should_panic(expected = "a write is lost")]
fn a_write_protect_that_stores_entries_loses_a_write() {
    Model::without(Skip::Compare).hardware_dirty().explore(protect_against_a_hardware_write);
}
