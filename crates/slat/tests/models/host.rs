//! Host invalidation against fault and against look-up (rule 7), with the engine's pins, grace periods and unmap.
//!
//! Who keeps the list of ranges and the count is the engine's caller; here both are for the one page that the host
//! moves. The models of `slat-vm` run its own.

use std::sync::Arc;

use slat::sabotage::Skip;
use slat::sync::{AtomicBool, AtomicU64, Ordering};
use slat::{Attributes, Hpa, Level, Lookup};

use crate::world::{Actor, Model, World, host};

/// What the caller leaves out, or does in another order.
#[derive(Clone, Copy, PartialEq)]
enum Variant {
    Right,
    /// The count goes up when the invalidation begins, not when it ends.
    CountedAtBegin,
    /// No grace period between the listing and the unmap.
    NoGrace,
    /// Nobody asks what is in progress.
    NotAsked,
}

/// The host's page 0, which becomes its page 2.
struct Host {
    variant: Variant,
    in_progress: AtomicBool,
    ended: AtomicU64,
    /// What the host answers.
    answer: AtomicU64,
    /// Whether the old page belongs to somebody else.
    gone: AtomicBool,
}

impl Host {
    fn new(variant: Variant) -> Arc<Self> {
        Arc::new(Self {
            variant,
            in_progress: AtomicBool::new(false),
            ended: AtomicU64::new(0),
            answer: AtomicU64::new(host(0).0),
            gone: AtomicBool::new(false),
        })
    }

    fn asked(&self) -> bool {
        self.variant != Variant::NotAsked
    }

    fn count(&self) {
        self.ended.fetch_add(1, Ordering::Release);
    }

    fn moves_the_page(&self, worker: &mut Actor) {
        self.in_progress.store(true, Ordering::Release);
        if self.variant == Variant::CountedAtBegin {
            self.count();
        }
        if self.variant != Variant::NoGrace {
            worker.who.synchronize();
        }
        worker.unmap(0, 1);
        self.gone.store(true, Ordering::Release);
        self.answer.store(host(2).0, Ordering::Release);
        if self.variant != Variant::CountedAtBegin {
            self.count();
        }
        self.in_progress.store(false, Ordering::Release);
    }

    /// One try of a fault.
    fn fault(&self, vcpu: &mut Actor) {
        let sample = self.ended.load(Ordering::Acquire);
        let output = Hpa(self.answer.load(Ordering::Acquire));
        let world = vcpu.world;
        let leaf = world.leaf(0, Level::LAST, output, Attributes::RW);
        let pin = vcpu.who.pin();
        let untouched = !self.in_progress.load(Ordering::Acquire)
            && self.ended.load(Ordering::Acquire) == sample;
        if untouched || !self.asked() {
            let _ = world.tree.install(&pin, &mut vcpu.reserve, &leaf);
        }
    }

    /// Uses the page while it is pinned.
    fn look_up(&self, vcpu: &mut Actor) {
        let pin = vcpu.who.pin();
        if self.asked() && self.in_progress.load(Ordering::Acquire) {
            return;
        }
        let found = vcpu.world.tree.look_up(&pin, crate::world::gpa(0));
        let old = matches!(found, Ok(Lookup::Mapped { output, .. }) if output == host(0));
        let stale = old && self.gone.load(Ordering::Acquire);
        vcpu.world.expect(!stale, "a page is used after it was taken back");
    }
}

/// The host moves a page while a fault asks for it.
fn move_against_a_fault(variant: Variant) -> impl Fn(World) + Send + Sync {
    move |world| {
        let host_memory = Host::new(variant);
        let fault = world.vcpu(0, 1).spawn({
            let host_memory = host_memory.clone();
            move |vcpu| host_memory.fault(vcpu)
        });
        let mut worker = world.worker(1);
        host_memory.moves_the_page(&mut worker);
        fault.join();
        let stale = worker.mapped(0).is_some_and(|(output, _)| output == host(0));
        world.expect(!stale, "a stale page is installed");
    }
}

#[test]
fn a_fault_never_installs_a_page_that_has_moved() {
    Model::new().preemptions(3).explore(move_against_a_fault(Variant::Right));
}

#[test]
#[should_panic(expected = "a stale page is installed")]
fn a_stale_page_is_installed_if_nobody_asks_what_is_in_progress() {
    Model::new().explore(move_against_a_fault(Variant::NotAsked));
}

#[test]
#[should_panic(expected = "a stale page is installed")]
fn a_stale_page_is_installed_if_invalidations_are_counted_when_they_begin() {
    Model::new().explore(move_against_a_fault(Variant::CountedAtBegin));
}

#[test]
#[should_panic(expected = "a stale page is installed")]
fn a_stale_page_is_installed_by_a_fault_that_the_unmap_did_not_wait_for() {
    Model::new().explore(move_against_a_fault(Variant::NoGrace));
}

#[test]
#[should_panic(expected = "a stale page is installed")]
fn a_stale_page_is_installed_if_a_pin_has_no_fence() {
    Model::without(Skip::PinFence).explore(move_against_a_fault(Variant::Right));
}

/// The host moves a page while a look-up uses it.
fn move_against_a_look_up(variant: Variant) -> impl Fn(World) + Send + Sync {
    move |world| {
        let mut worker = world.worker(1);
        worker.map(0, 1, host(0), Attributes::RW);
        let host_memory = Host::new(variant);
        let look_up = world.vcpu(0, 0).spawn({
            let host_memory = host_memory.clone();
            move |vcpu| host_memory.look_up(vcpu)
        });
        host_memory.moves_the_page(&mut worker);
        look_up.join();
    }
}

#[test]
fn a_look_up_never_hands_out_a_page_that_is_taken_back() {
    Model::new().preemptions(3).explore(move_against_a_look_up(Variant::Right));
}

#[test]
#[should_panic(expected = "a page is used after it was taken back")]
fn a_look_up_that_does_not_ask_hands_out_a_page_that_is_taken_back() {
    Model::new().explore(move_against_a_look_up(Variant::NotAsked));
}

#[test]
#[should_panic(expected = "a page is used after it was taken back")]
fn a_look_up_that_the_unmap_did_not_wait_for_hands_out_a_page() {
    Model::new().explore(move_against_a_look_up(Variant::NoGrace));
}

#[test]
#[should_panic(expected = "a page is used after it was taken back")]
fn a_look_up_whose_pin_has_no_fence_hands_out_a_page() {
    Model::without(Skip::PinFence).explore(move_against_a_look_up(Variant::Right));
}
