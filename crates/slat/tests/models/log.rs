//! Enabling the dirty log against a fault (rule 10), with the engine's pins, grace periods and write-protect.
//!
//! Whether the log is on, and the bit, are the engine's caller's; the models of `slat-vm` run its slots.

use std::sync::Arc;

use slat::sync::{AtomicBool, Ordering};
use slat::{Attributes, Level};

use crate::world::{Actor, Model, World, host};

/// What the caller leaves out.
#[derive(Clone, Copy, PartialEq)]
enum Without {
    Nothing,
    /// No grace period between the flag and the write-protect.
    Grace,
    /// The fault does not look at the flag again in the pin of its exchange.
    SecondLook,
}

struct Slot {
    without: Without,
    logged: AtomicBool,
    bit: AtomicBool,
}

impl Slot {
    /// One try of a fault that began with a look at the slot.
    fn fault(&self, vcpu: &mut Actor) {
        let logged = self.logged.load(Ordering::Acquire);
        let world = vcpu.world;
        let leaf = world.leaf(0, Level::LAST, host(0), Attributes::RW);
        let pin = vcpu.who.pin();
        let same = self.logged.load(Ordering::Acquire) == logged;
        if !same && self.without != Without::SecondLook {
            return;
        }
        let done = world.tree.install(&pin, &mut vcpu.reserve, &leaf);
        if done.is_ok() && logged {
            self.bit.swap(true, Ordering::AcqRel);
        }
    }

    fn enable_log(&self, worker: &mut Actor) {
        self.logged.store(true, Ordering::Release);
        if self.without != Without::Grace {
            worker.who.synchronize();
        }
        worker.write_protect(0, 1);
    }
}

/// A fault has read "log off" when the log is enabled.
fn enable_against_a_fault(without: Without) -> impl Fn(World) + Send + Sync {
    move |world| {
        let slot = Slot { without, logged: AtomicBool::new(false), bit: AtomicBool::new(false) };
        let slot = Arc::new(slot);
        let fault = world.vcpu(0, 1).spawn({
            let slot = slot.clone();
            move |vcpu| slot.fault(vcpu)
        });
        let mut worker = world.worker(0);
        slot.enable_log(&mut worker);
        fault.join();
        let writable = worker.mapped(0).is_some_and(|(_, write)| write);
        let marked = slot.bit.load(Ordering::Acquire);
        world.expect(!writable || marked, "logged, and writable without a mark");
    }
}

#[test]
fn no_page_is_writable_without_a_mark_once_the_log_is_on() {
    Model::new().preemptions(3).explore(enable_against_a_fault(Without::Nothing));
}

#[test]
#[should_panic(expected = "logged, and writable without a mark")]
fn a_fault_escapes_a_log_that_is_enabled_without_a_grace_period() {
    Model::new().explore(enable_against_a_fault(Without::Grace));
}

#[test]
#[should_panic(expected = "logged, and writable without a mark")]
fn a_fault_that_looks_at_its_slot_only_once_escapes_the_log() {
    Model::new().explore(enable_against_a_fault(Without::SecondLook));
}
