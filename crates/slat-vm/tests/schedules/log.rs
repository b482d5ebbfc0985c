//! What a migration does (rules 8 and 10): enables the log of the slot that stays, collects, copies what was reported.

use slat::Format;
use slat_vm::sabotage::Skip;
use slat_vm::{Access, LogError, LogMode, Worker};

use crate::explorer::thread;
use crate::guest::Guest;
use crate::machine::Tables;
use crate::schedules::Schedules;
use crate::world::{COMES, CPUS, SLOT_PAGES, STAYS, World, draw};

/// A migration, from when the log is on.
pub(crate) struct Migration<'v, 'm> {
    world: World<'v, 'm>,
    worker: Worker<'m, Tables>,
    mode: LogMode,
    /// Pages that a collection had taken when its log moved away: they are in the next one.
    taken: u64,
}

impl<'v, 'm> Migration<'v, 'm> {
    /// Enables the log in a drawn mode, and copies all pages unless all count as written.
    pub(crate) fn begin(world: World<'v, 'm>) -> Self {
        let modes = [
            LogMode::Protect,
            LogMode::Manual { initially_all_set: false },
            LogMode::Manual { initially_all_set: true },
            LogMode::Hardware,
        ];
        let hardware = world.vm.tree().format().tracks_dirty();
        Self::begin_as(world, modes[draw(if hardware { 4 } else { 3 }) as usize])
    }

    fn begin_as(world: World<'v, 'm>, mode: LogMode) -> Self {
        let mut worker = world.worker();
        world.vm.enable_log(&mut worker, STAYS, mode).unwrap();
        if mode != (LogMode::Manual { initially_all_set: true }) {
            world.truth().copy(u64::MAX);
        }
        Self { world, worker, mode, taken: 0 }
    }

    /// One round: collects, clears those of `mask`, and copies them. What was written before is reported, once the
    /// faults that were in flight have finished.
    pub(crate) fn round(&mut self, mask: u64) {
        let Self { world, worker, mode, taken } = self;
        let changed = world.truth().changed();
        worker.parts().0.synchronize();
        let mut bitmap = [0];
        let moved = |error| matches!(error, LogError::Gone | LogError::NoSlot);
        let collected = world.vm.dirty_log(worker, STAYS, &mut bitmap);
        if matches!(mode, LogMode::Protect | LogMode::Hardware) {
            *taken |= bitmap[0];
        }
        match collected {
            Err(error) if moved(error) => return,
            collected => collected.unwrap(),
        };
        let reported = bitmap[0] | *taken;
        world.expect(changed & !reported == 0, "lost: a write is not in the collection after it");
        let mut copied = reported;
        if matches!(mode, LogMode::Manual { .. }) {
            copied &= mask;
            match world.vm.clear_dirty_log(worker, STAYS, 0, SLOT_PAGES, &[copied]) {
                // What was cleared is reported again.
                Err(error) if moved(error) => return,
                cleared => cleared.unwrap(),
            };
        }
        *taken &= !copied;
        world.truth().copy(copied);
    }

    /// When nobody writes any more: a last round brings the copy up to date and leaves nothing writable.
    pub(crate) fn end(mut self) {
        self.round(u64::MAX);
        let Self { world, mut worker, mode, .. } = self;
        world.expect(world.truth().changed() == 0, "lost: a write is in no collection");
        let writable = world.writable(&worker);
        let protected = writable == 0 || mode == LogMode::Hardware;
        world.expect(protected, "lost: collected, and writable without a fault");
        world.vm.disable_log(&mut worker, STAYS).unwrap();
    }
}

/// Collects from the slot that comes and goes, which may have a log, or none, or lose it meanwhile.
pub(crate) fn collects_what_comes_and_goes(world: World<'_, '_>, times: usize) {
    let mut worker = world.worker();
    for _ in 0..times {
        let mut bitmap = [0];
        match world.vm.dirty_log(&mut worker, COMES, &mut bitmap) {
            Ok(_) | Err(LogError::NoSlot | LogError::NotEnabled | LogError::Gone) => {}
            Err(error) => world.expect(false, &format!("a collection gets: {error}")),
        }
    }
}

/// Writes, while a log is enabled, and collected.
fn collections_against_writes(world: World<'_, '_>) {
    let migration = thread::scope(|scope| {
        for cpu in 0..CPUS {
            scope.spawn(move || Guest::new(world, cpu).run(4, SLOT_PAGES));
        }
        let mut migration = Migration::begin(world);
        for _ in 0..3 {
            migration.round(draw(16));
        }
        migration
    });
    migration.end();
    Guest::new(world, 0).all(Access::Write);
}

#[test]
fn every_write_is_in_a_collection_that_comes_after_it() {
    Schedules::new().explore(collections_against_writes);
}

#[test]
#[should_panic(expected = "lost: ")]
fn a_write_is_lost_if_pages_are_protected_before_their_bits_are_taken() {
    Schedules::without(Skip::TakeFirst).explore(collections_against_writes);
}

#[test]
#[should_panic(expected = "lost: ")]
fn a_write_is_lost_if_the_bit_is_set_before_the_entry_is_writable() {
    Schedules::without(Skip::MarkLast).explore(collections_against_writes);
}

#[test]
#[should_panic(expected = "lost: ")]
fn a_fault_that_does_not_check_the_version_escapes_the_log() {
    Schedules::without(Skip::Version).explore(collections_against_writes);
}

#[test]
#[should_panic(expected = "lost: ")]
fn a_fault_escapes_a_log_that_is_enabled_without_a_grace_period() {
    Schedules::without(Skip::SlotGrace).explore(collections_against_writes);
}

/// Writes, while pages are protected for a log in whose place one of hardware's dirty state comes, which is collected.
fn protection_for_a_log_that_goes(world: World<'_, '_>) {
    if !world.vm.tree().format().tracks_dirty() {
        return collections_against_writes(world);
    }
    let mut worker = world.worker();
    let manual = LogMode::Manual { initially_all_set: draw(2) == 0 };
    world.vm.enable_log(&mut worker, STAYS, manual).unwrap();
    let migration = thread::scope(|scope| {
        for cpu in 0..CPUS {
            scope.spawn(move || Guest::new(world, cpu).run(4, SLOT_PAGES));
        }
        scope.spawn(move || {
            let mut worker = world.worker();
            let cleared = world.vm.clear_dirty_log(&mut worker, STAYS, 0, SLOT_PAGES, &[u64::MAX]);
            let gone = [LogError::Gone, LogError::NotEnabled, LogError::NotManual];
            let done = cleared.map_or_else(|why| gone.contains(&why), |_| true);
            world.expect(done, "a log cannot be cleared");
        });
        world.vm.disable_log(&mut worker, STAYS).unwrap();
        let mut migration = Migration::begin_as(world, LogMode::Hardware);
        migration.round(0);
        migration
    });
    migration.end();
}

#[test]
fn a_log_of_hardware_loses_no_mark_to_the_log_before_it() {
    Schedules::new().explore(protection_for_a_log_that_goes);
}

#[test]
#[should_panic(expected = "lost: ")]
fn a_log_of_hardware_loses_marks_if_it_does_not_wait_for_who_protects_for_another() {
    Schedules::without(Skip::Transit).explore(protection_for_a_log_that_goes);
}

/// Writes, while a log of hardware's dirty state that has just begun goes, and another comes in its place.
fn a_log_of_hardware_in_the_place_of_another(world: World<'_, '_>) {
    if !world.vm.tree().format().tracks_dirty() {
        return collections_against_writes(world);
    }
    let migration = thread::scope(|scope| {
        for cpu in 0..CPUS {
            scope.spawn(move || Guest::new(world, cpu).run(4, SLOT_PAGES));
        }
        scope.spawn(move || {
            let mut worker = world.worker();
            world.vm.enable_log(&mut worker, STAYS, LogMode::Hardware).unwrap();
        });
        let mut worker = world.worker();
        while world.vm.disable_log(&mut worker, STAYS).is_err() {
            thread::yield_now();
        }
        let mut migration = Migration::begin_as(world, LogMode::Hardware);
        migration.round(0);
        migration
    });
    migration.end();
}

#[test]
fn a_log_of_hardware_loses_no_mark_to_one_that_has_gone_as_it_began() {
    Schedules::new().explore(a_log_of_hardware_in_the_place_of_another);
}

#[test]
#[should_panic(expected = "lost: ")]
fn a_log_of_hardware_loses_marks_if_one_that_has_gone_marks_them_clean() {
    Schedules::without(Skip::OwnMarks).explore(a_log_of_hardware_in_the_place_of_another);
}
