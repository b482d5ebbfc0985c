//! A slot that comes and goes (rule 10).

use slat_vm::sabotage::Skip;
use slat_vm::{Access, LogMode};

use crate::explorer::thread;
use crate::guest::Guest;
use crate::host::moves_by_host_address;
use crate::log::Migration;
use crate::schedules::Schedules;
use crate::world::{COMES, CPUS, PAGES, SLOT_PAGES, World, draw, gpa};

/// Deletes the slot, looks whether it is gone, and creates it anew, sometimes with a log.
pub(crate) fn comes_and_goes(world: World<'_, '_>, times: usize) {
    let mut worker = world.worker();
    for _ in 0..times {
        world.delete(&mut worker);
        for page in SLOT_PAGES..PAGES {
            let cached = world.machine.caches(gpa(page), |_| true);
            world.expect(!cached, "stale: a page of a slot that is gone is cached");
            let mapped = world.mapped(&worker, page).is_some();
            world.expect(!mapped, "stale: a page is installed in a slot that is gone");
        }
        world.create(&mut worker);
        if draw(2) == 0 {
            world.vm.enable_log(&mut worker, COMES, LogMode::Protect).unwrap();
        }
    }
}

/// Accesses, while the slot comes and goes.
fn changes_against_faults(world: World<'_, '_>) {
    thread::scope(|scope| {
        for cpu in 0..CPUS {
            scope.spawn(move || Guest::new(world, cpu).run(4, PAGES));
        }
        comes_and_goes(world, 2);
    });
    Guest::new(world, 0).all(Access::Write);
}

/// The slot that stays moves there and back, while its pages move too and a migration collects.
fn a_slot_moves(world: World<'_, '_>) {
    world.delete(&mut world.worker());
    let migration = thread::scope(|scope| {
        for cpu in 0..CPUS {
            scope.spawn(move || Guest::new(world, cpu).run(6, PAGES));
        }
        scope.spawn(move || moves_by_host_address(world, 3));
        scope.spawn(move || {
            let mut worker = world.worker();
            world.move_slot(&mut worker, SLOT_PAGES);
            world.move_slot(&mut worker, 0);
        });
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
fn no_write_is_lost_and_no_page_stale_while_a_slot_moves() {
    Schedules::new().explore(a_slot_moves);
}

#[test]
fn nothing_is_installed_in_a_slot_that_is_gone() {
    Schedules::new().explore(changes_against_faults);
}

#[test]
#[should_panic(expected = "stale: ")]
fn a_page_is_reached_in_a_slot_that_is_gone_if_nobody_waited_for_its_faults() {
    Schedules::without(Skip::SlotGrace).explore(changes_against_faults);
}

#[test]
#[should_panic(expected = "stale: ")]
fn a_page_of_the_slot_before_is_reached_if_nobody_checks_the_version() {
    Schedules::without(Skip::Version).explore(changes_against_faults);
}
