//! Everything at once.

use slat_vm::Access;

use crate::explorer::thread;
use crate::guest::Guest;
use crate::host::{looks_up, moves};
use crate::log::{Migration, collects_what_comes_and_goes};
use crate::schedules::Schedules;
use crate::slots::comes_and_goes;
use crate::tables::splits;
use crate::world::{CPUS, PAGES, World, draw};

fn everything(world: World<'_, '_>) {
    let migration = thread::scope(|scope| {
        for cpu in 0..CPUS {
            scope.spawn(move || Guest::new(world, cpu).run(8, PAGES));
        }
        scope.spawn(move || moves(world, 3));
        scope.spawn(move || comes_and_goes(world, 2));
        scope.spawn(move || {
            splits(world, 2);
            looks_up(world, 2);
            collects_what_comes_and_goes(world, 2);
        });
        let mut migration = Migration::begin(world);
        for _ in 0..3 {
            migration.round(draw(16));
        }
        migration
    });
    migration.end();
    // Nothing changes any more: both CPUs see all memory as it is.
    for cpu in 0..CPUS {
        Guest::new(world, cpu).all(Access::Write);
    }
}

#[test]
fn nothing_is_lost_stale_or_left_over_when_everything_happens_at_once() {
    Schedules::new().each(50_000).explore(everything);
}
