//! Pages that become private, and shared again (rule 7).

use slat_vm::Access;
use slat_vm::sabotage::Skip;

use crate::explorer::thread;
use crate::guest::Guest;
use crate::host::moves;
use crate::schedules::Schedules;
use crate::world::{CPUS, PAGES, SLOT_PAGES, World, draw, draw_range};

/// Converts drawn pages of the slot that comes and goes, which has private memory.
fn converts(world: World<'_, '_>, times: usize) {
    let mut worker = world.worker();
    for _ in 0..times {
        world.convert(&mut worker, draw_range(SLOT_PAGES), draw(3) > 0);
    }
}

/// Accesses, while pages are converted and others move.
fn conversions_against_faults(world: World<'_, '_>) {
    let mut worker = world.worker();
    world.delete(&mut worker);
    world.create_private(&mut worker);
    drop(worker);
    thread::scope(|scope| {
        for cpu in 0..CPUS {
            scope.spawn(move || Guest::new(world, cpu).run(4, PAGES));
        }
        scope.spawn(move || moves(world, 2));
        converts(world, 3);
    });
    Guest::new(world, 0).all(Access::Write);
}

#[test]
fn no_page_is_reached_where_it_was_before_it_was_converted() {
    Schedules::new().each(10_000).explore(conversions_against_faults);
}

#[test]
#[should_panic(expected = "stale: ")]
fn a_page_of_the_kind_before_is_reached_if_faults_do_not_ask_what_is_converted() {
    Schedules::without(Skip::Untouched).explore(conversions_against_faults);
}
