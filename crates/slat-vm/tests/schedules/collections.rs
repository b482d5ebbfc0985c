//! Two collections at once (rule 8): neither returns before what either took is protected.

use slat_vm::sabotage::Skip;
use slat_vm::{Access, LogMode};

use crate::explorer::thread;
use crate::guest::Guest;
use crate::schedules::Schedules;
use crate::world::{STAYS, World, draw};

/// Two threads collect pages that were written.
fn two_collections(world: World<'_, '_>) {
    let mut worker = world.worker();
    world.vm.enable_log(&mut worker, STAYS, LogMode::Protect).unwrap();
    let mut guest = Guest::new(world, 0);
    world.machine.run_cpu(0);
    let written = draw(15) + 1;
    for page in (0..4).filter(|page| written >> page & 1 == 1) {
        guest.access(page, Access::Write);
    }
    let collect = || {
        let mut worker = world.worker();
        let mut bitmap = [0];
        world.vm.dirty_log(&mut worker, STAYS, &mut bitmap).unwrap();
        let writable = world.writable(&worker);
        world.expect(writable == 0, "lost: collected, and writable without a fault");
        bitmap[0]
    };
    let (one, other) = thread::scope(|scope| {
        let other = scope.spawn(collect);
        (collect(), other.join().unwrap())
    });
    world.expect(one | other == written && one & other == 0, "a write is reported twice or never");
}

#[test]
fn neither_of_two_collections_returns_before_what_either_took_is_protected() {
    Schedules::new().explore(two_collections);
}

#[test]
#[should_panic(expected = "lost: ")]
fn a_collection_that_finds_nothing_returns_early_if_nobody_counts_the_open_ones() {
    Schedules::without(Skip::OpenCollections).explore(two_collections);
}
