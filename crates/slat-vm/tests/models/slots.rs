//! Deleting a slot (rule 10), against a fault.

use slat::Gpa;
use slat_vm::sabotage::Skip;

use crate::world::{Model, SLOT, World};

/// A slot is deleted while a fault has looked it up.
fn delete_against_a_fault(world: World) {
    let guest = world.guest().spawn(|guest| guest.write(|_| {}));
    let mut worker = world.worker();
    world.vm.delete_slot(&mut worker, SLOT).unwrap();
    let stale = world.machine.caches(Gpa(0), |_| true);
    world.expect(!stale, "deleted, and a TLB still translates");
    guest.join();
    world.expect(world.mapped(&worker).is_none(), "a page is installed in a slot that is gone");
}

#[test]
fn nothing_is_installed_in_a_slot_that_is_gone() {
    Model::new().preemptions(3).explore(delete_against_a_fault);
}

#[test]
#[should_panic(expected = "deleted, and a TLB still translates")]
fn a_deleted_slot_is_still_translated_if_nobody_waited_for_its_faults() {
    Model::without(Skip::SlotGrace).explore(delete_against_a_fault);
}
