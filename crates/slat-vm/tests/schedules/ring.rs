//! Dirty rings (rule 8): what vCPUs report is harvested, reset and copied while they write.

use slat::Machine;
use slat_vm::sabotage::Skip;
use slat_vm::{DirtyRing, LogMode, Worker};

use crate::explorer::thread;
use crate::guest::Guest;
use crate::host::moves_by_host_address;
use crate::machine::Tables;
use crate::schedules::Schedules;
use crate::world::{CPUS, SLOT_PAGES, STAYS, World, draw};

/// A migration by the rings of all vCPUs, and sometimes a backup bitmap.
struct Collector<'v, 'm> {
    world: World<'v, 'm>,
    worker: Worker<'m, Tables>,
    rings: [DirtyRing; CPUS],
    backup: bool,
}

impl<'v, 'm> Collector<'v, 'm> {
    /// Enables the log of the slot that stays, and copies all pages.
    fn begin(world: World<'v, 'm>, rings: [DirtyRing; CPUS]) -> Self {
        let (mut worker, backup) = (world.worker(), draw(2) == 0);
        world.vm.enable_log(&mut worker, STAYS, LogMode::Ring { backup }).unwrap();
        world.truth().copy(u64::MAX);
        Self { world, worker, rings, backup }
    }

    /// Harvests and resets every ring, and copies what was in it. What was written before is there, once the faults
    /// that were in flight have finished.
    fn round(&mut self) {
        let Self { world, worker, rings, backup } = self;
        let changed = world.truth().changed();
        worker.parts().0.synchronize();
        let mut reported = [0];
        for ring in rings.iter() {
            ring.harvest(|dirty| {
                let is_one = dirty.slot == STAYS.into() && dirty.page < SLOT_PAGES;
                world.expect(is_one, "a page that nobody reported");
                reported[0] |= 1 << dirty.page;
            });
            world.vm.reset_dirty_ring(worker, ring).unwrap();
        }
        if *backup {
            let mut rest = [0];
            world.vm.dirty_log(worker, STAYS, &mut rest).unwrap();
            reported[0] |= rest[0];
        }
        world.expect(changed & !reported[0] == 0, "lost: a write is in no ring");
        world.truth().copy(reported[0]);
    }

    /// When nobody writes any more.
    fn end(mut self) {
        self.round();
        let Self { world, worker, rings, .. } = &self;
        world.expect(world.truth().changed() == 0, "lost: a write is in no ring");
        let writable = world.writable(worker);
        world.expect(writable == 0, "lost: reset, and writable without a fault");
        world.expect(rings.iter().all(|ring| ring.used() == 0), "an entry is left");
    }
}

/// Writes, while a log in rings is enabled, and collected, and pages move.
fn rings_against_writes(world: World<'_, '_>) {
    let guests: [_; CPUS] = std::array::from_fn(|cpu| Guest::new(world, cpu));
    let rings = guests.each_ref().map(Guest::ring);
    world.truth().running = CPUS;
    let collector = thread::scope(|scope| {
        for mut guest in guests {
            scope.spawn(move || {
                guest.run(5, SLOT_PAGES);
                world.truth().running -= 1;
            });
        }
        scope.spawn(move || moves_by_host_address(world, 2));
        let mut collector = Collector::begin(world, rings);
        while world.truth().running > 0 {
            collector.round();
            world.machine.relax();
        }
        collector
    });
    collector.end();
}

#[test]
fn every_write_is_in_a_ring_before_or_after_a_reset() {
    Schedules::new().each(10_000).explore(rings_against_writes);
}

#[test]
#[should_panic(expected = "lost: ")]
fn a_write_is_lost_if_it_is_reported_before_its_entry_is_writable() {
    Schedules::without(Skip::MarkLast).explore(rings_against_writes);
}

#[test]
#[should_panic(expected = "lost: ")]
fn a_fault_escapes_rings_that_are_enabled_without_a_grace_period() {
    Schedules::without(Skip::SlotGrace).explore(rings_against_writes);
}
