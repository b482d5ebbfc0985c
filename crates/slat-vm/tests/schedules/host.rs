//! What the host does, and who looks up what it backs (rule 7).

use slat_vm::sabotage::Skip;
use slat_vm::{Access, LookUpError};

use crate::explorer::thread;
use crate::guest::Guest;
use crate::schedules::Schedules;
use crate::world::{CPUS, SLOT_PAGES, World, behind, draw, draw_range, gpa, range};

/// Moves drawn pages, one range at a time, one in another.
pub(crate) fn moves(world: World<'_, '_>, times: usize) {
    let mut worker = world.worker();
    for _ in 0..times {
        let moved = draw_range(draw(2) * SLOT_PAGES);
        let guard = if draw(2) == 0 {
            world.vm.invalidate_begin(&mut worker, &[moved]).unwrap()
        } else {
            world.vm.invalidate_host_begin(&mut worker, &behind(moved)).unwrap()
        };
        world.take(moved);
        if draw(3) == 0 {
            drop(world.vm.invalidate_begin(&mut worker, &[draw_range(0)]).unwrap());
        }
        world.move_and_give(moved);
        guard.end();
    }
}

/// Moves drawn pages of the slot that stays, wherever that is.
pub(crate) fn moves_by_host_address(world: World<'_, '_>, times: usize) {
    let mut worker = world.worker();
    for _ in 0..times {
        let moved = draw_range(0);
        let guard = world.vm.invalidate_host_begin(&mut worker, &behind(moved)).unwrap();
        world.take(moved);
        world.move_and_give(moved);
        guard.end();
    }
}

/// Looks up drawn pages of the slot that stays.
pub(crate) fn looks_up(world: World<'_, '_>, times: usize) {
    let worker = world.worker();
    for _ in 0..times {
        let page = draw(SLOT_PAGES);
        let used = |output, _| world.reach(page, output, Access::Read);
        match world.vm.look_up(worker.participant(), gpa(page), used) {
            Ok(()) | Err(LookUpError::NotMapped | LookUpError::Retry) => {}
            Err(error) => world.expect(false, &format!("a look-up gets: {error}")),
        }
    }
}

/// Faults and look-ups, while one thread moves pages and another takes some back.
fn moves_against_faults(world: World<'_, '_>) {
    thread::scope(|scope| {
        for cpu in 0..CPUS {
            scope.spawn(move || Guest::new(world, cpu).run(3, SLOT_PAGES));
        }
        scope.spawn(move || looks_up(world, 4));
        scope.spawn(move || moves(world, 2));
        takes_back(world);
    });
    let mut guest = Guest::new(world, 0);
    guest.all(Access::Read);
}

/// Takes a page of each slot back, and gives it again as it was: faults fall further behind than is remembered.
fn takes_back(world: World<'_, '_>) {
    let mut worker = world.worker();
    for page in [SLOT_PAGES, 0] {
        drop(world.vm.invalidate_begin(&mut worker, &[range(page, 1)]).unwrap());
    }
}

#[test]
fn no_page_is_reached_after_it_was_taken_back() {
    Schedules::new().explore(moves_against_faults);
}

#[test]
#[should_panic(expected = "stale: ")]
fn a_stale_page_is_reached_if_nobody_asks_what_the_host_takes_back() {
    Schedules::without(Skip::Untouched).explore(moves_against_faults);
}

#[test]
#[should_panic(expected = "stale: ")]
fn a_stale_page_is_reached_by_a_fault_that_an_unmap_did_not_wait_for() {
    Schedules::without(Skip::InvalidationGrace).explore(moves_against_faults);
}

#[test]
#[should_panic(expected = "stale: ")]
fn a_stale_page_is_reached_if_a_range_leaves_the_list_before_it_is_counted() {
    Schedules::without(Skip::CountFirst).explore(moves_against_faults);
}

#[test]
#[should_panic(expected = "stale: ")]
fn a_stale_page_is_reached_if_the_count_is_looked_at_before_the_list() {
    Schedules::without(Skip::ListFirst).explore(moves_against_faults);
}

#[test]
#[should_panic(expected = "stale: ")]
fn a_look_up_that_does_not_ask_reaches_a_page_that_was_taken_back() {
    Schedules::without(Skip::LookUp).explore(moves_against_faults);
}
