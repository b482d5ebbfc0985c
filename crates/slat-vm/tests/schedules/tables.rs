//! What changes tables and flags and no translation: splitting, collapse, trim, aging.

use slat_vm::{Access, LogError};

use crate::explorer::thread;
use crate::guest::Guest;
use crate::host::moves;
use crate::schedules::Schedules;
use crate::world::{COMES, CPUS, PAGES, SLOT_PAGES, STAYS, World, behind, draw, draw_range};

/// Splits the blocks of drawn ranges.
pub(crate) fn splits(world: World<'_, '_>, times: usize) {
    let mut worker = world.worker();
    for _ in 0..times {
        world.vm.split(&mut worker, draw_range(draw(2) * SLOT_PAGES)).unwrap();
    }
}

/// Puts the pages of drawn slots together.
pub(crate) fn collapses(world: World<'_, '_>, times: usize) {
    let mut worker = world.worker();
    for _ in 0..times {
        match world.vm.collapse(&mut worker, [STAYS, COMES][draw(2) as usize]) {
            Ok(_) | Err(LogError::NoSlot | LogError::Enabled) => {}
            Err(error) => world.expect(false, &format!("a collapse gets: {error}")),
        }
    }
}

/// Frees the empty tables of drawn ranges.
pub(crate) fn trims(world: World<'_, '_>, times: usize) {
    let mut worker = world.worker();
    for _ in 0..times {
        world.vm.trim(&mut worker, draw_range(draw(2) * SLOT_PAGES)).unwrap();
    }
}

/// Makes leaves of drawn ranges old, by guest address or by host address, and some invalid in TLBs.
fn ages(world: World<'_, '_>, times: usize) {
    let mut worker = world.worker();
    for _ in 0..times {
        let range = draw_range(draw(2) * SLOT_PAGES);
        let young = match draw(4) {
            0 => world.vm.test_young(&mut worker, range),
            1 => world.vm.clear_young(&mut worker, range),
            2 => world.vm.clear_flush_young(&mut worker, range),
            _ => {
                let clear = |range| world.vm.clear_host_young(&mut worker, range);
                behind(range).into_iter().map(clear).sum()
            }
        };
        world.expect(young.is_ok_and(|young| young <= 2 * PAGES), "more is young than there is");
    }
}

/// Accesses, while tables come and go and pages move.
fn tables_come_and_go(world: World<'_, '_>) {
    thread::scope(|scope| {
        for cpu in 0..CPUS {
            scope.spawn(move || Guest::new(world, cpu).run(4, PAGES));
        }
        scope.spawn(move || moves(world, 2));
        scope.spawn(move || {
            splits(world, 2);
            ages(world, 3);
        });
        collapses(world, 2);
        trims(world, 2);
        collapses(world, 1);
    });
    for cpu in 0..CPUS {
        Guest::new(world, cpu).all(Access::Write);
    }
}

#[test]
fn no_page_is_lost_or_stale_while_tables_come_and_go() {
    Schedules::new().explore(tables_come_and_go);
}
