//! What the gate promises to those who ask and to the vCPU behind it (rule 11), with real threads. The orderings are
//! checked by the models in the module itself.
#![cfg(not(loom))]
#![expect(unsafe_code, reason = "implements Machine")]

use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use slat::gate::{Requests, request_everywhere};
use slat::maintenance::Instruction;
use slat::{Entry, Hpa, Machine, Participant, Slot};

/// A machine of gates: no tables, and a flag for each vCPU that was kicked.
struct Gates {
    slots: Vec<Slot>,
    kicked: Vec<AtomicBool>,
    kicks: AtomicUsize,
}

impl Gates {
    fn new(slots: usize) -> Self {
        Self {
            slots: (0..slots).map(|_| Slot::new()).collect(),
            kicked: (0..slots).map(|_| AtomicBool::new(false)).collect(),
            kicks: AtomicUsize::new(0),
        }
    }

    fn kicks(&self) -> usize {
        self.kicks.load(Ordering::Relaxed)
    }

    /// A guest that runs until it is kicked.
    fn guest(&self, vcpu: usize) {
        while !self.kicked[vcpu].swap(false, Ordering::Acquire) {
            thread::yield_now();
        }
    }
}

// SAFETY: it has no tables.
unsafe impl Machine for Gates {
    fn allocate(&self, _: usize) -> Option<Hpa> {
        None
    }

    unsafe fn free(&self, _: Hpa, _: usize) {}

    fn entries(&self, _: Hpa) -> NonNull<Entry> {
        NonNull::dangling()
    }

    fn slots(&self) -> &[Slot] {
        &self.slots
    }

    fn execute(&self, _: Instruction) {}

    fn kick(&self, index: usize) {
        self.kicks.fetch_add(1, Ordering::Relaxed);
        self.kicked[index].store(true, Ordering::Release);
    }

    fn relax(&self) {
        thread::yield_now();
    }
}

/// Takes what is asked and then goes through the gate once.
fn pass(vcpu: &mut Participant<'_, Gates>) -> Requests {
    let mut asked = Requests::NONE;
    loop {
        match vcpu.enter() {
            Ok(_inside) => return asked,
            Err(requests) => asked = asked | requests,
        }
    }
}

#[test]
fn a_vcpu_outside_is_not_waited_for_and_finds_all_requests_once() {
    let machine = Gates::new(1);
    let mut vcpu = Participant::register(&machine).unwrap();
    let mine = Requests::embedder(3).unwrap();
    vcpu.gate().request_and_wait(&machine, 0, Requests::KICK);
    vcpu.gate().request_and_wait(&machine, 0, mine);
    assert!(!vcpu.gate().request(Requests::DRAIN));
    let all = Requests::KICK | Requests::DRAIN | mine;
    assert_eq!(vcpu.gate().pending(), all);
    assert_eq!(vcpu.enter().err(), Some(all));
    assert!(!vcpu.gate().is_inside());
    assert!(vcpu.gate().pending().is_empty());
    assert!(vcpu.enter().is_ok());
    assert_eq!(machine.kicks(), 0);
}

#[test]
fn a_vcpu_inside_is_kicked_and_waited_for_until_it_leaves() {
    let machine = Gates::new(1);
    let left = AtomicBool::new(false);
    let inside = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut vcpu = Participant::register(&machine).unwrap();
            let guard = vcpu.enter().unwrap();
            inside.store(true, Ordering::Release);
            machine.guest(0);
            left.store(true, Ordering::Relaxed);
            drop(guard);
            assert_eq!(pass(&mut vcpu), Requests::INVALIDATE);
        });
        while !inside.load(Ordering::Acquire) {
            thread::yield_now();
        }
        machine.slots[0].gate.request_and_wait(&machine, 0, Requests::INVALIDATE);
        assert!(left.load(Ordering::Relaxed));
        assert_eq!(machine.kicks(), 1);
    });
}

#[test]
fn a_vcpu_that_spins_outside_on_its_asker_does_not_delay_it() {
    let machine = Gates::new(1);
    let locked = AtomicBool::new(true);
    let inside = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut vcpu = Participant::register(&machine).unwrap();
            let guard = vcpu.enter().unwrap();
            inside.store(true, Ordering::Release);
            machine.guest(0);
            drop(guard);
            // With interrupts off, never looking at its gate: the fault meets an entry that the asker has locked.
            while locked.load(Ordering::Acquire) {
                thread::yield_now();
            }
        });
        while !inside.load(Ordering::Acquire) {
            thread::yield_now();
        }
        machine.slots[0].gate.request_and_wait(&machine, 0, Requests::INVALIDATE);
        locked.store(false, Ordering::Release);
    });
}

#[test]
fn one_that_enters_again_at_once_does_not_starve_its_askers() {
    let machine = Gates::new(1);
    let stop = AtomicBool::new(false);
    let taken = AtomicUsize::new(0);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut vcpu = Participant::register(&machine).unwrap();
            while !stop.load(Ordering::Relaxed) {
                if !pass(&mut vcpu).is_empty() {
                    taken.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..5_000 {
                        machine.slots[0].gate.request_and_wait(&machine, 0, Requests::KICK);
                    }
                });
            }
        });
        stop.store(true, Ordering::Relaxed);
    });
    assert!(taken.load(Ordering::Relaxed) <= 10_000);
}

#[test]
fn a_leaked_guard_counts_as_left_at_the_next_entry() {
    let machine = Gates::new(1);
    let mut vcpu = Participant::register(&machine).unwrap();
    std::mem::forget(vcpu.enter().unwrap());
    assert!(vcpu.gate().is_inside());
    drop(vcpu.enter().unwrap());
    assert!(!vcpu.gate().is_inside());
}

#[test]
fn a_vcpu_that_comes_to_another_tree_or_cpu_invalidates_before_it_enters() {
    let machine = Gates::new(1);
    let mut vcpu = Participant::register(&machine).unwrap();
    vcpu.switch(Hpa(0x1000));
    assert_eq!(pass(&mut vcpu), Requests::INVALIDATE);
    vcpu.switch(Hpa(0x1000));
    assert_eq!(pass(&mut vcpu), Requests::NONE);
    vcpu.moved();
    assert_eq!(pass(&mut vcpu), Requests::INVALIDATE);
    vcpu.switch(Hpa(0x2000));
    assert_eq!(pass(&mut vcpu), Requests::INVALIDATE);
}

#[test]
fn only_vcpus_that_may_run_the_tree_are_asked() {
    let machine = Gates::new(4);
    let mut vcpus: Vec<_> = (0..3).map(|_| Participant::register(&machine).unwrap()).collect();
    vcpus[0].switch(Hpa(0x1000));
    vcpus[1].switch(Hpa(0x2000));
    // The third has not said what it runs; the last slot belongs to nobody.
    for vcpu in &mut vcpus {
        let _ = pass(vcpu);
    }
    // The second is inside all the time and is not waited for.
    let (second, others) = vcpus.split_at_mut(2);
    let inside = second[1].enter().unwrap();
    request_everywhere(&machine, Some(Hpa(0x1000)), Requests::INVALIDATE);
    drop(inside);
    assert_eq!(pass(&mut second[0]), Requests::INVALIDATE);
    assert_eq!(pass(&mut second[1]), Requests::NONE);
    assert_eq!(pass(&mut others[0]), Requests::INVALIDATE);
    assert_eq!(machine.kicks(), 0);
    request_everywhere(&machine, None, Requests::KICK);
    assert!(vcpus.iter_mut().all(|vcpu| pass(vcpu) == Requests::KICK));
}

#[test]
fn everybody_inside_is_kicked_once_and_waited_for() {
    const VCPUS: usize = 4;
    let machine = Gates::new(VCPUS + 1);
    let inside = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..VCPUS {
            scope.spawn(|| {
                let mut vcpu = Participant::register(&machine).unwrap();
                let index = vcpu.index();
                let guard = vcpu.enter().unwrap();
                inside.fetch_add(1, Ordering::AcqRel);
                machine.guest(index);
                inside.fetch_sub(1, Ordering::AcqRel);
                drop(guard);
            });
        }
        while inside.load(Ordering::Acquire) < VCPUS {
            thread::yield_now();
        }
        request_everywhere(&machine, None, Requests::DRAIN);
        assert_eq!(inside.load(Ordering::Acquire), 0);
        assert_eq!(machine.kicks(), VCPUS);
    });
}

#[test]
fn the_embedder_has_32_requests_of_its_own() {
    let ours = [
        Requests::INVALIDATE,
        Requests::KICK,
        Requests::DRAIN,
        Requests::DIRTY_RING,
        Requests::RENEW,
    ];
    let mut all = Requests::NONE;
    for requests in (0..32).map(|n| Requests::embedder(n).unwrap()).chain(ours) {
        assert!(!all.contains(requests));
        all = all | requests;
    }
    assert_eq!(Requests::embedder(32), None);
}
