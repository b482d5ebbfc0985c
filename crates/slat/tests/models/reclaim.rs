//! Reclamation against a walk (rules 1 and 5), and against itself.

use slat::sabotage::Skip;
use slat::{Attributes, Error, Installed, Level, Lookup};

use crate::world::{Actor, Model, World, host, range};

const RW: Attributes = Attributes::RW;

fn detach_and_free(worker: &mut Actor, page: u64, pages: u64) {
    worker.unmap(page, pages);
    worker.world.tree.reclaim(&mut worker.who);
}

fn look(actor: &Actor) {
    let right = match actor.look_up(0) {
        Ok(Lookup::Mapped { output, .. }) => output == host(0),
        Ok(Lookup::Empty { .. }) | Err(Error::Retry) => true,
        _ => false,
    };
    actor.world.expect(right, "a look-up finds what was never mapped");
}

/// A table is detached and freed while a look-up stands in it.
fn look_up_in_a_table_being_freed(world: World) {
    let mut worker = world.worker(1);
    worker.map(0, 1, host(0), RW);
    let reader = world.vcpu(0, 0).spawn(|vcpu| look(vcpu));
    detach_and_free(&mut worker, 0, 2);
    world.expect(world.tree.waiting() == 0, "a detached table is not freed");
    reader.join();
}

#[test]
fn a_table_is_freed_when_nobody_can_stand_in_it() {
    Model::new().preemptions(3).explore(look_up_in_a_table_being_freed);
}

#[test]
#[should_panic(expected = "use after free")]
fn a_table_freed_without_a_grace_period_is_looked_at() {
    Model::without(Skip::GracePeriod).explore(look_up_in_a_table_being_freed);
}

#[test]
#[should_panic(expected = "use after free")]
fn a_pin_without_a_fence_does_not_keep_a_table() {
    Model::without(Skip::PinFence).explore(look_up_in_a_table_being_freed);
}

#[test]
#[should_panic(expected = "a look-up finds what was never mapped")]
fn a_link_inside_a_detached_table_is_read_as_an_entry() {
    Model::without(Skip::RecordOutside).explore(look_up_in_a_table_being_freed);
}

/// The same while the reader pins again and again: the grace period may see its later pin only.
fn look_ups_in_a_table_being_freed(world: World) {
    let mut worker = world.worker(1);
    worker.map(0, 1, host(0), RW);
    let reader = world.vcpu(0, 0).spawn(|vcpu| {
        look(vcpu);
        look(vcpu);
    });
    detach_and_free(&mut worker, 0, 2);
    reader.join();
}

#[test]
fn a_later_pin_of_the_reader_ends_the_wait_for_its_earlier_one() {
    Model::new().explore(look_ups_in_a_table_being_freed);
}

#[test]
#[should_panic(expected = "use after free")]
fn a_later_pin_says_nothing_of_the_earlier_one_unless_it_releases() {
    Model::without(Skip::PinRelease).explore(look_ups_in_a_table_being_freed);
}

/// The same while readers come and go in one slot.
fn readers_of_a_table_being_freed(world: World) {
    let mut worker = world.worker(1);
    worker.map(0, 1, host(0), RW);
    let readers = loom::thread::spawn(move || {
        look(&world.worker(0));
        look(&world.worker(0));
    });
    detach_and_free(&mut worker, 0, 2);
    readers.join().unwrap();
}

#[test]
fn a_later_reader_in_the_same_slot_ends_the_wait_for_the_earlier_one() {
    Model::new().explore(readers_of_a_table_being_freed);
}

/// A page is installed below a table that has just been detached with everything in it: whatever is linked there goes
/// with it, and goes once.
fn install_below_a_detached_table(world: World) {
    let mut worker = world.worker(2);
    worker.map(2, 1, host(2), RW);
    let fault = world.vcpu(0, 2).spawn(|vcpu| {
        vcpu.run_cpu();
        let done = vcpu.fault(0, Level::LAST, host(0), RW);
        vcpu.world.expect(done == Installed::New, "a fault finds a page that nobody installed");
    });
    detach_and_free(&mut worker, 0, 4);
    fault.join();
    let there = worker.mapped(0).is_none_or(|leaf| leaf == (host(0), true));
    world.expect(there && worker.mapped(2).is_none(), "an unmapped page is back");
}

#[test]
fn what_was_linked_below_a_detached_table_is_freed_with_it() {
    Model::new().levels(3).explore(install_below_a_detached_table);
}

#[test]
#[should_panic(expected = "use after free")]
fn what_was_linked_below_a_table_freed_early_is_lost() {
    Model::without(Skip::GracePeriod).levels(3).explore(install_below_a_detached_table);
}

/// One thread has claimed every place of the backlog when another needs one: it waits so that the first can go on.
fn detach_when_every_place_is_claimed(world: World) {
    let mut worker = world.worker(2);
    worker.map(0, 1, host(0), RW);
    worker.map(2, 1, host(2), RW);
    let other = world.worker(0).spawn(|worker| detach_and_free(worker, 0, 2));
    detach_and_free(&mut worker, 0, 4);
    other.join();
    world.tree.reclaim(&mut worker.who);
    world.expect(world.tree.waiting() == 0, "a detached table is not freed");
}

#[test]
fn who_finds_every_place_claimed_lets_their_owner_go_on() {
    Model::new().explore(detach_when_every_place_is_claimed);
}

/// Two threads detach a table each and free what they find, while both fill and drain the backlog of two places.
fn two_detach_and_free(world: World) {
    let mut worker = world.worker(2);
    worker.map(0, 1, host(0), RW);
    worker.map(2, 1, host(2), RW);
    let other = world.worker(0).spawn(|worker| detach_and_free(worker, 0, 2));
    detach_and_free(&mut worker, 2, 2);
    other.join();
    world.tree.reclaim(&mut worker.who);
    world.expect(world.tree.waiting() == 0, "a detached table is not freed");
    let range = range(0, 4);
    let mapped = (0..4).any(|page| worker.mapped(page).is_some());
    world.expect(!mapped && range.size() > 0, "an unmapped page is back");
}

#[test]
fn two_threads_that_detach_and_free_free_each_table_once() {
    Model::new().explore(two_detach_and_free);
}

/// Three tables go through the two places, so that one place is used again.
fn the_backlog_goes_round(world: World) {
    let mut worker = world.worker(6);
    (0..3).for_each(|table| worker.map(2 * table, 1, host(0), RW));
    let other = world.worker(0).spawn(|worker| {
        detach_and_free(worker, 0, 2);
    });
    detach_and_free(&mut worker, 2, 2);
    detach_and_free(&mut worker, 4, 2);
    other.join();
    world.tree.reclaim(&mut worker.who);
    world.expect(world.tree.waiting() == 0, "a detached table is not freed");
}

#[test]
fn a_place_of_the_backlog_is_empty_before_it_is_used_again() {
    Model::new().levels(3).explore(the_backlog_goes_round);
}
