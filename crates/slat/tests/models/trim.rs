//! Trim against map (rule 5).

use slat::sabotage::Skip;
use slat::{Attributes, Installed, Level};

use crate::world::{Model, World, host, range};

const RW: Attributes = Attributes::RW;

/// A table that an unmap has left empty is trimmed while a fault comes back to it.
fn fault_in_a_table_being_trimmed(world: World) {
    let mut worker = world.worker(1);
    worker.map(0, 1, host(0), RW);
    worker.unmap(0, 1);
    let fault = world.vcpu(0, 1).spawn(|vcpu| {
        vcpu.run_cpu();
        let done = vcpu.fault(0, Level::LAST, host(0), RW);
        vcpu.world.expect(done == Installed::New, "a fault finds a page that nobody installed");
        let written = vcpu.access(0, true, |_| {});
        vcpu.world.expect(written, "an installed page is gone");
    });
    world.tree.trim(&mut worker.who, range(0, 2)).unwrap();
    world.tree.reclaim(&mut worker.who);
    fault.join();
    world.expect(worker.mapped(0) == Some((host(0), true)), "an installed page is gone");
}

/// The same between a trim and a call of `map`.
fn map_in_a_table_being_trimmed(world: World) {
    let mut worker = world.worker(1);
    worker.map(0, 1, host(0), RW);
    worker.unmap(0, 1);
    let other = world.worker(1).spawn(|worker| worker.map(0, 2, host(0), RW));
    world.tree.trim(&mut worker.who, range(0, 2)).unwrap();
    world.tree.reclaim(&mut worker.who);
    other.join();
    let both = [worker.mapped(0), worker.mapped(1)];
    let right = [Some((host(0), true)), Some((host(1), true))];
    world.expect(both == right, "an installed page is gone");
}

/// `map` links an empty table on its way down, and a trim finds it empty.
fn map_below_a_table_being_trimmed(world: World) {
    let other = world.worker(4).spawn(|worker| worker.map(0, 1, host(0), RW));
    let mut worker = world.worker(0);
    world.tree.trim(&mut worker.who, range(0, 4)).unwrap();
    other.join();
    world.expect(worker.mapped(0) == Some((host(0), true)), "an installed page is gone");
}

#[test]
fn a_mapping_outlives_a_trim_of_the_table_it_has_linked() {
    Model::new().preemptions(3).levels(3).explore(map_below_a_table_being_trimmed);
}

#[test]
fn a_fault_outlives_a_trim() {
    Model::new().explore(fault_in_a_table_being_trimmed);
}

#[test]
fn a_mapping_outlives_a_trim() {
    Model::new().explore(map_in_a_table_being_trimmed);
}

#[test]
#[should_panic(expected = "an installed page is gone")]
fn a_fault_is_lost_in_a_table_that_is_trimmed_without_freezing() {
    Model::without(Skip::Freeze).explore(fault_in_a_table_being_trimmed);
}

#[test]
#[should_panic(expected = "an installed page is gone")]
fn a_fault_is_lost_in_a_trimmed_table_that_is_not_dead() {
    Model::without(Skip::Dead).explore(fault_in_a_table_being_trimmed);
}

#[test]
#[should_panic(expected = "an installed page is gone")]
fn a_mapping_is_lost_in_a_table_that_is_trimmed_without_freezing() {
    Model::without(Skip::Freeze).explore(map_in_a_table_being_trimmed);
}

#[test]
#[should_panic(expected = "use after free")]
fn a_table_trimmed_without_a_grace_period_is_installed_into() {
    Model::without(Skip::GracePeriod).explore(fault_in_a_table_being_trimmed);
}
