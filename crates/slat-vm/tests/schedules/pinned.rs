//! Pinned slots (rule 7): from when one is there, all of it is mapped, whatever else happens.

use slat_vm::sabotage::Skip;
use slat_vm::{Access, InvalidateError, PrivateError, Worker};

use crate::explorer::thread;
use crate::guest::Guest;
use crate::machine::Tables;
use crate::schedules::Schedules;
use crate::tables::{collapses, trims};
use crate::world::{COMES, CPUS, PAGES, SLOT_PAGES, World, behind, draw, draw_range};

/// Expects every page of the pinned slot to be there.
fn is_whole(world: World<'_, '_>, worker: &Worker<'_, Tables>) {
    for page in SLOT_PAGES..PAGES {
        let there = world.mapped(worker, page).is_some_and(|(_, write)| write);
        world.expect(there, "a pinned page vanishes");
    }
}

/// Moves drawn pages, but for those of the pinned slot.
fn moves_what_is_not_pinned(world: World<'_, '_>, times: usize) {
    let mut worker = world.worker();
    for _ in 0..times {
        let moved = draw_range(if draw(4) == 0 { 0 } else { SLOT_PAGES });
        let begun = if draw(2) == 0 {
            world.vm.invalidate_begin(&mut worker, &[moved])
        } else {
            world.vm.invalidate_host_begin(&mut worker, &behind(moved))
        };
        match begun {
            Ok(guard) => {
                world.take(moved);
                world.move_and_give(moved);
                guard.end();
            }
            Err(InvalidateError::Pinned { slot }) => {
                let pinned = slot == COMES.into() && moved.start().0 != 0;
                world.expect(pinned, "a slot counts as pinned that is not");
            }
            Err(error) => world.expect(false, &format!("an invalidation gets: {error}")),
        }
    }
}

/// Accesses, while everything is tried that could take a pinned page away.
fn a_pinned_slot_stays(world: World<'_, '_>) {
    let mut worker = world.worker();
    world.delete(&mut worker);
    world
        .expect(world.create_pinned(&mut worker), "a slot is not pinned when nobody is in the way");
    thread::scope(|scope| {
        for cpu in 0..CPUS {
            scope.spawn(move || Guest::new(world, cpu).run(3, PAGES));
        }
        scope.spawn(move || moves_what_is_not_pinned(world, 3));
        scope.spawn(move || {
            collapses(world, 2);
            trims(world, 2);
        });
        for _ in 0..2 {
            is_whole(world, &worker);
        }
    });
    is_whole(world, &world.worker());
}

/// A slot becomes pinned while its pages are taken back: either it is there and whole, or it is not.
fn a_slot_is_pinned_meanwhile(world: World<'_, '_>) {
    let mut worker = world.worker();
    world.delete(&mut worker);
    thread::scope(|scope| {
        scope.spawn(move || moves_what_is_not_pinned(world, 2));
        if world.create_pinned(&mut worker) {
            is_whole(world, &worker);
            is_whole(world, &worker);
        }
    });
    let worker = world.worker();
    if world.vm.slot(&worker, COMES).is_some() {
        is_whole(world, &worker);
        Guest::new(world, 0).all(Access::Write);
    }
}

/// A slot becomes pinned in the place of one whose pages are being made private.
fn a_slot_is_pinned_where_pages_are_converted(world: World<'_, '_>) {
    let mut worker = world.worker();
    world.delete(&mut worker);
    world.create_private(&mut worker);
    thread::scope(|scope| {
        scope.spawn(move || {
            let range = draw_range(SLOT_PAGES);
            match world.vm.set_private(&mut world.worker(), COMES, range, true) {
                Ok(()) | Err(PrivateError::NoSlot | PrivateError::NoPrivateMemory) => {}
                Err(error) => world.expect(false, &format!("a conversion gets: {error}")),
            }
        });
        world.delete(&mut worker);
        if world.create_pinned(&mut worker) {
            is_whole(world, &worker);
        }
    });
    let worker = world.worker();
    if world.vm.slot(&worker, COMES).is_some() {
        is_whole(world, &worker);
        Guest::new(world, 0).all(Access::Write);
    }
}

#[test]
fn no_page_of_a_pinned_slot_vanishes() {
    Schedules::new().explore(a_pinned_slot_stays);
}

#[test]
fn a_slot_that_is_pinned_while_its_pages_are_taken_back_is_whole_or_not_there() {
    Schedules::new().explore(a_slot_is_pinned_meanwhile);
}

#[test]
#[should_panic(expected = "a pinned page vanishes")]
fn a_pinned_page_vanishes_if_an_invalidation_looks_only_once() {
    Schedules::without(Skip::SecondLook).explore(a_slot_is_pinned_meanwhile);
}

#[test]
#[should_panic(expected = "a pinned page vanishes")]
fn a_pinned_page_vanishes_if_nobody_waits_for_an_unmap_of_the_slot_before() {
    Schedules::without(Skip::Transit).explore(a_slot_is_pinned_meanwhile);
}

#[test]
fn a_slot_that_is_pinned_where_pages_are_converted_is_whole_or_not_there() {
    Schedules::new().explore(a_slot_is_pinned_where_pages_are_converted);
}

#[test]
#[should_panic(expected = "a pinned page vanishes")]
fn a_pinned_page_vanishes_if_nobody_waits_for_a_conversion_in_the_slot_before() {
    Schedules::without(Skip::Transit).explore(a_slot_is_pinned_where_pages_are_converted);
}
