//! Map against map.

use slat::sabotage::Skip;
use slat::{Attributes, Installed, Level};

use crate::world::{Model, World, gpa, host};

const RW: Attributes = Attributes::RW;

/// Two vCPUs fault on one page, and the host gives both the same.
fn one_page_for_two(world: World) {
    let other = world.vcpu(0, 1).spawn(|vcpu| vcpu.fault(0, Level::LAST, host(0), RW));
    let mut vcpu = world.vcpu(1, 1);
    vcpu.run_cpu();
    let mine = vcpu.fault(0, Level::LAST, host(0), RW);
    let (other, theirs) = other.join();
    let outcome = [mine, theirs];
    let new = outcome.iter().filter(|&&done| done == Installed::New).count();
    world.expect(new == 1 && outcome.contains(&Installed::Present), "installed twice");
    let invalidations = [&vcpu, &other].map(|actor| actor.who.counters.invalidations.get());
    world.expect(invalidations == [0, 0], "an invalidation for nothing");
    world.expect(vcpu.mapped(0) == Some((host(0), true)), "an installed page is gone");
}

#[test]
fn one_page_for_two_vcpus_is_installed_once() {
    Model::new().preemptions(3).cpus(2).explore(one_page_for_two);
}

#[test]
#[should_panic(expected = "installed twice")]
fn one_page_for_two_vcpus_is_installed_twice_by_stores() {
    Model::without(Skip::Compare).cpus(2).explore(one_page_for_two);
}

/// Rule 3: the host gives them different pages, and one that was installed is in use when the other comes.
fn two_host_pages_for_one(world: World) {
    let other = world.vcpu(0, 1).spawn(|vcpu| {
        vcpu.fault(0, Level::LAST, host(0), RW);
        vcpu.access(0, true, |_| {});
        vcpu.world.machine.speculate(0, gpa(0));
    });
    let mut worker = world.worker(1);
    worker.fault(0, Level::LAST, host(2), RW);
    other.join();
    world.machine.speculate(0, gpa(0));
}

#[test]
fn two_host_pages_for_one_are_never_both_translated() {
    Model::new().preemptions(3).explore(two_host_pages_for_one);
}

#[test]
#[should_panic(expected = "break-before-make")]
fn a_page_replaced_without_invalidation_meets_the_new_one() {
    Model::without(Skip::Invalidation).explore(two_host_pages_for_one);
}

/// Two pages next to each other need one new table: a fault's chain of tables, and one that `map` has filled.
fn neighbours_need_one_table(world: World) {
    let other = world.vcpu(0, 1).spawn(|vcpu| vcpu.fault(0, Level::LAST, host(0), RW));
    let mut worker = world.worker(1);
    worker.map(1, 1, host(1), RW);
    let (other, done) = other.join();
    world.expect(done == Installed::New, "a fault finds a page that nobody installed");
    let both = [worker.mapped(0), worker.mapped(1)];
    world.expect(
        both == [Some((host(0), true)), Some((host(1), true))],
        "an installed page is gone",
    );
    world.expect(other.reserve.len() + worker.reserve.len() == 1, "a table is lost");
}

#[test]
fn neighbours_that_need_one_table_share_it() {
    Model::new().preemptions(3).explore(neighbours_need_one_table);
}

#[test]
#[should_panic(expected = "an installed page is gone")]
fn neighbours_that_store_their_tables_lose_a_page() {
    Model::without(Skip::Compare).explore(neighbours_need_one_table);
}

/// The same between two calls of `map`, two levels down at once.
fn maps_need_two_tables(world: World) {
    let other = world.worker(2).spawn(|worker| worker.map(0, 1, host(0), RW));
    let mut worker = world.worker(2);
    worker.map(1, 1, host(1), RW);
    let (other, ()) = other.join();
    let both = [worker.mapped(0), worker.mapped(1)];
    world.expect(
        both == [Some((host(0), true)), Some((host(1), true))],
        "an installed page is gone",
    );
    world.expect(other.reserve.len() + worker.reserve.len() == 2, "a table is lost");
}

#[test]
fn neighbours_that_need_two_levels_of_tables_share_them() {
    Model::new().preemptions(3).levels(3).explore(maps_need_two_tables);
}

#[test]
#[should_panic(expected = "an installed page is gone")]
fn neighbours_that_store_two_levels_of_tables_lose_a_page() {
    Model::without(Skip::Compare).levels(3).explore(maps_need_two_tables);
}
