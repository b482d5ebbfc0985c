//! Invalidation by the host (rule 7), against a fault and against a look-up.

use std::sync::Arc;

use loom::sync::atomic::{AtomicBool, Ordering};
use slat::{Gpa, Hpa};
use slat_vm::sabotage::Skip;
use slat_vm::{Access, FaultKind, Worker};

use crate::machine::Tables;
use crate::world::{Model, World, host, range};

/// The host moves page 0 from its page 0 to its page 2.
fn move_page(world: World, worker: &mut Worker<'static, Tables>) {
    let guard = world.vm.invalidate_begin(worker, &[range(0, 1)]).unwrap();
    let stale = world.machine.caches(Gpa(0), |_| true);
    world.expect(!stale, "invalidated, and a TLB still translates");
    world.vm.host().move_first(host(2));
    guard.end();
}

fn no_stale_page(world: World, worker: &Worker<'static, Tables>) {
    let stale = world.mapped(worker).is_some_and(|(output, _)| output != host(2));
    world.expect(!stale, "a stale page is installed");
}

/// A fault asks for a page while the host moves it.
fn move_against_a_fault(world: World) {
    let guest = world.guest().spawn(|guest| {
        guest.fault(Access::Write, FaultKind::Translation);
    });
    let mut worker = world.worker();
    move_page(world, &mut worker);
    guest.join();
    no_stale_page(world, &worker);
}

#[test]
fn a_fault_never_installs_a_page_that_has_moved() {
    Model::new().preemptions(3).explore(move_against_a_fault);
}

#[test]
#[should_panic(expected = "a stale page is installed")]
fn a_stale_page_is_installed_if_nobody_asks_what_the_host_takes_back() {
    Model::without(Skip::Untouched).explore(move_against_a_fault);
}

#[test]
#[should_panic(expected = "a stale page is installed")]
fn a_stale_page_is_installed_by_a_fault_that_an_unmap_did_not_wait_for() {
    Model::without(Skip::InvalidationGrace).explore(move_against_a_fault);
}

#[test]
#[should_panic(expected = "a stale page is installed")]
fn a_stale_page_is_installed_if_a_range_leaves_the_list_before_it_is_counted() {
    Model::without(Skip::CountFirst).explore(move_against_a_fault);
}

#[test]
#[should_panic(expected = "a stale page is installed")]
fn a_stale_page_is_installed_if_the_count_is_looked_at_before_the_list() {
    Model::without(Skip::ListFirst).explore(move_against_a_fault);
}

/// The same with two ends, of which the fault may remember one.
fn two_moves_against_a_fault(world: World) {
    let guest = world.guest().spawn(|guest| {
        guest.fault(Access::Write, FaultKind::Translation);
    });
    let mut worker = world.worker();
    move_page(world, &mut worker);
    drop(world.vm.invalidate_begin(&mut worker, &[range(1, 1)]).unwrap());
    guest.join();
    no_stale_page(world, &worker);
}

#[test]
fn a_fault_that_is_too_far_behind_installs_nothing() {
    Model::new().explore(two_moves_against_a_fault);
}

/// An invalidation of the other page: the fault must get through at its first try.
fn an_invalidation_elsewhere(world: World) {
    let guest = world.guest().spawn(|guest| {
        guest.fault(Access::Write, FaultKind::Translation);
        guest.vcpu.statistics().retried
    });
    let mut worker = world.worker();
    drop(world.vm.invalidate_begin(&mut worker, &[range(1, 1)]).unwrap());
    let (_, retried) = guest.join();
    world.expect(retried == 0, "an invalidation elsewhere sends a fault back");
}

#[test]
fn an_invalidation_elsewhere_sends_no_fault_back() {
    Model::new().explore(an_invalidation_elsewhere);
}

/// A look-up uses the page while the host takes it back.
fn move_against_a_look_up(world: World) {
    let mut worker = world.worker();
    world.guest().write(|_| {});
    let gone = Arc::new(AtomicBool::new(false));
    let looker = world.worker();
    let look = loom::thread::spawn({
        let gone = gone.clone();
        move || {
            let looker = looker;
            let _ = world.vm.look_up(looker.participant(), Gpa(0), |output: Hpa, _| {
                // Whoever has the page gives it to somebody else only after this.
                let stale = output == host(0) && gone.load(Ordering::SeqCst);
                world.expect(!stale, "a page is used after it was taken back");
            });
        }
    });
    let guard = world.vm.invalidate_begin(&mut worker, &[range(0, 1)]).unwrap();
    gone.store(true, Ordering::SeqCst);
    drop(guard);
    look.join().unwrap();
}

#[test]
fn a_look_up_never_hands_out_a_page_that_is_taken_back() {
    Model::new().preemptions(3).explore(move_against_a_look_up);
}

#[test]
#[should_panic(expected = "a page is used after it was taken back")]
fn a_look_up_that_does_not_ask_hands_out_a_page_that_is_taken_back() {
    Model::without(Skip::LookUp).explore(move_against_a_look_up);
}

#[test]
#[should_panic(expected = "a page is used after it was taken back")]
fn a_look_up_that_an_unmap_did_not_wait_for_hands_out_a_page() {
    Model::without(Skip::InvalidationGrace).explore(move_against_a_look_up);
}
