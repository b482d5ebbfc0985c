//! Memory that is mapped before it is used: as a fault would map it, and no further than promised.

mod guest;

use std::sync::atomic::Ordering;

use guest::*;
use slat::{Gpa, Lookup};
use slat_model::Backing;
use slat_vm::{
    Access, Exit, FaultError, HostError, Hva, LogMode, PreFault, PreFaultError, SlotConfig,
    VmOptions,
};

fn around(fault_around: u32) -> VmOptions {
    VmOptions { fault_around, ..VmOptions::default() }
}

/// The same, with pages at hand.
fn vm_around(machine: &Watched, size: u64, options: VmOptions) -> TestVm<'_> {
    let vm = vm(machine, size, Backing::Anonymous, options);
    vm.host().at_hand.store(true, Ordering::Relaxed);
    vm
}

fn vm_with_slot_around(
    machine: &Watched,
    size: u64,
    options: VmOptions,
) -> (TestVm<'_>, slat_vm::Worker<'_, Watched>) {
    let vm = vm_around(machine, size, options);
    let mut worker = vm.worker().unwrap();
    vm.create_slot(&mut worker, 0, SlotConfig::new(Gpa(0), size, Hva(0))).unwrap();
    (vm, worker)
}

/// Which pages from 0 on are mapped.
fn mapped(vm: &TestVm<'_>, worker: &slat_vm::Worker<'_, Watched>, pages: u64) -> Vec<u64> {
    (0..pages).filter(|page| level(vm, worker, page * PAGE).is_some()).collect()
}

fn accessed(vm: &TestVm<'_>, worker: &slat_vm::Worker<'_, Watched>, gpa: u64) -> bool {
    let pin = worker.participant().pin();
    match vm.tree().look_up(&pin, Gpa(gpa)).unwrap() {
        Lookup::Mapped { template, .. } => vm.tree().attributes(template).accessed,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_range_is_mapped_as_far_as_slots_reach_and_the_rest_is_returned() {
    let machine = Watched::new(1);
    let vm = vm(&machine, BLOCK + PAGE, Backing::Anonymous, VmOptions::default());
    let mut worker = vm.worker().unwrap();
    let base = 4 * BLOCK;
    vm.create_slot(&mut worker, 0, SlotConfig::new(Gpa(base), BLOCK + PAGE, Hva(0))).unwrap();
    let mut guest = Guest::new(&vm, 0);
    let mut ahead = |start, size| guest.vcpu.pre_fault(&vm, range(start, size), || true);
    assert_eq!(ahead(base, BLOCK), PreFault { done: BLOCK, rest: None, stopped: None });
    let rest = PreFault {
        done: PAGE,
        rest: Some(range(base + BLOCK + PAGE, PAGE)),
        stopped: Some(PreFaultError::NoSlot),
    };
    assert_eq!(ahead(base + BLOCK, 2 * PAGE), rest);
    assert_eq!(ahead(base + BLOCK + PAGE, PAGE), PreFault { done: 0, ..rest });
    let wrong = PreFaultError::Range { granule: PAGE, limit: Gpa(1 << 40) };
    assert_eq!(ahead(base + 1, PAGE).stopped, Some(wrong));
    assert_eq!(ahead((1 << 40) - PAGE, 2 * PAGE).stopped, Some(wrong));
    for page in 0..513 {
        guest.read(base + page * PAGE);
    }
    assert_eq!(guest.faults, 0);
    assert_eq!(guest.vcpu.statistics().ahead, 513);
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn it_goes_on_where_it_was_interrupted() {
    let machine = Watched::new(1);
    let (vm, worker) = vm_with_slot(&machine, 8 * BLOCK, HUGE_2M, VmOptions::default());
    let mut guest = Guest::new(&vm, 0);
    let mut left = Some(range(PAGE, 8 * BLOCK - PAGE));
    let mut calls = 0;
    while let Some(range) = left {
        let mut asked = 0;
        let step = guest.vcpu.pre_fault(&vm, range, || {
            asked += 1;
            asked < 3
        });
        assert_eq!(step.stopped, None);
        left = step.rest;
        calls += 1;
    }
    // Three blocks a call.
    assert_eq!(calls, 3);
    assert!((0..8).all(|block| level(&vm, &worker, block * BLOCK) == Some(2)));
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn what_the_host_refuses_ends_it_there() {
    let machine = Watched::new(1);
    let (vm, worker) = vm_with_slot(&machine, BLOCK, Backing::Anonymous, VmOptions::default());
    vm.host().answer(9 * PAGE, Err(HostError::Poisoned));
    let mut guest = Guest::new(&vm, 0);
    let step = guest.vcpu.pre_fault(&vm, range(0, BLOCK), || true);
    let error =
        FaultError::Host { gpa: Gpa(9 * PAGE), hva: Hva(9 * PAGE), error: HostError::Poisoned };
    assert_eq!((step.done, step.stopped), (9 * PAGE, Some(PreFaultError::Fault(error))));
    assert_eq!(step.rest, Some(range(9 * PAGE, BLOCK - 9 * PAGE)));
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn a_page_ahead_under_a_log_is_read_only_and_clean() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, BLOCK, HUGE_2M, VmOptions::default());
    vm.enable_log(&mut worker, 0, LogMode::Protect).unwrap();
    let mut guest = Guest::new(&vm, 0);
    assert_eq!(guest.vcpu.pre_fault(&vm, range(0, 8 * PAGE), || true).rest, None);
    assert!(!writable(&vm, &worker, 0));
    assert_eq!(collect(&vm, &mut worker, 0, 512), NONE);
    guest.write(3 * PAGE, 1);
    assert_eq!(collect(&vm, &mut worker, 0, 512), [3]);
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn the_access_flag_of_pages_ahead_is_clear_where_hardware_sets_it_and_set_where_not() {
    let machine = Watched::new(1);
    for hardware in [false, true] {
        let format = arm().with_hardware_access(hardware);
        let vm = vm_of(&machine, format, BLOCK, Backing::Anonymous, around(8));
        vm.host().at_hand.store(true, Ordering::Relaxed);
        let mut worker = vm.worker().unwrap();
        vm.create_slot(&mut worker, 0, SlotConfig::new(Gpa(0), BLOCK, Hva(0))).unwrap();
        let mut guest = Guest::new(&vm, 0);
        assert_eq!(guest.vcpu.pre_fault(&vm, range(64 * PAGE, PAGE), || true).rest, None);
        guest.read(0);
        let flags = [0, 1, 64].map(|page| accessed(&vm, &worker, page * PAGE));
        assert_eq!(flags, [true, !hardware, !hardware]);
        guest.read(PAGE);
        assert!(accessed(&vm, &worker, PAGE));
        assert_eq!(guest.faults, 1);
        drop(guest);
        finish(vm, vec![worker]);
    }
}

#[test]
fn the_whole_window_is_mapped_before_and_after_what_is_there() {
    let machine = Watched::new(1);
    let (vm, worker) = vm_with_slot_around(&machine, BLOCK, around(8));
    let mut guest = Guest::new(&vm, 0);
    // The first page of a window and the next seven empty: all eight are there afterwards.
    guest.write(8 * PAGE, 1);
    assert_eq!(mapped(&vm, &worker, 32), (8..16).collect::<Vec<_>>());
    assert_eq!(guest.vcpu.statistics().ahead, 7);
    // In the middle of a window, round a page that is there.
    vm.host().answer(27 * PAGE, Err(HostError::Again));
    guest.write(29 * PAGE, 1);
    assert_eq!(mapped(&vm, &worker, 32), [8, 9, 10, 11, 12, 13, 14, 15, 28, 29, 30, 31]);
    for page in [9, 15, 28, 31] {
        assert_eq!(guest.write(page * PAGE, 2), 0);
    }
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn a_window_ends_with_its_slot_and_a_large_one_fills_a_table() {
    let machine = Watched::new(1);
    let vm = vm_around(&machine, 4 * BLOCK, around(512));
    let mut worker = vm.worker().unwrap();
    let slot = SlotConfig::new(Gpa(3 * PAGE), 3 * BLOCK, Hva(0));
    vm.create_slot(&mut worker, 0, slot).unwrap();
    let mut guest = Guest::new(&vm, 0);
    guest.read(100 * PAGE);
    assert_eq!(mapped(&vm, &worker, 1024), (3..512).collect::<Vec<_>>());
    guest.read(BLOCK + 511 * PAGE);
    assert_eq!(mapped(&vm, &worker, 1024), (3..1024).collect::<Vec<_>>());
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn a_write_under_a_log_maps_one_page_and_a_read_maps_its_window_read_only() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot_around(&machine, BLOCK, around(8));
    vm.enable_log(&mut worker, 0, LogMode::Protect).unwrap();
    let mut guest = Guest::new(&vm, 0);
    guest.write(0, 1);
    guest.read(8 * PAGE);
    assert_eq!(mapped(&vm, &worker, 24), [0, 8, 9, 10, 11, 12, 13, 14, 15]);
    assert!((8..16).all(|page| !writable(&vm, &worker, page * PAGE)));
    guest.write(9 * PAGE, 1);
    assert_eq!(collect(&vm, &mut worker, 0, 512), [0, 9]);
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn nothing_is_mapped_round_a_page_that_the_host_takes_back_meanwhile() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot_around(&machine, BLOCK, around(8));
    let mut other = vm.worker().unwrap();
    let mut guest = Guest::new(&vm, 0);
    let guard = vm.invalidate_begin(&mut other, &[range(3 * PAGE, PAGE)]).unwrap();
    assert_eq!(guest.fault(0, Access::Read), Exit::Resume);
    assert_eq!(mapped(&vm, &worker, 8), [0]);
    guard.end();
    worker.parts();
    drop(guest);
    finish(vm, vec![worker, other]);
}

#[test]
fn eight_pages_are_mapped_unless_something_else_is_asked_for_and_one_where_none_is_at_hand() {
    let machine = Watched::new(1);
    let (vm, worker) = vm_with_slot_around(&machine, BLOCK, VmOptions::default());
    let mut guest = Guest::new(&vm, 0);
    guest.read(5 * PAGE);
    assert_eq!(mapped(&vm, &worker, 16), (0..8).collect::<Vec<_>>());
    vm.host().at_hand.store(false, Ordering::Relaxed);
    guest.read(12 * PAGE);
    assert_eq!(mapped(&vm, &worker, 16), [0, 1, 2, 3, 4, 5, 6, 7, 12]);
    drop(guest);
    finish(vm, vec![worker]);
}

fn adaptive(fault_around: u32, most: u32) -> VmOptions {
    VmOptions { fault_around, adaptive_around: Some(most), ..VmOptions::default() }
}

/// A VM whose hardware sets access flags, with pages at hand.
fn vm_adaptive(
    machine: &Watched,
    blocks: u64,
    options: VmOptions,
) -> (TestVm<'_>, slat_vm::Worker<'_, Watched>) {
    let format = arm().with_hardware_access(true);
    let vm = vm_of(machine, format, blocks * BLOCK, Backing::Anonymous, options);
    vm.host().at_hand.store(true, Ordering::Relaxed);
    let mut worker = vm.worker().unwrap();
    vm.create_slot(&mut worker, 0, SlotConfig::new(Gpa(0), blocks * BLOCK, Hva(0))).unwrap();
    (vm, worker)
}

#[test]
fn a_window_grows_to_the_most_while_its_guesses_are_used() {
    let machine = Watched::new(1);
    let (vm, worker) = vm_adaptive(&machine, 8, adaptive(8, 64));
    let mut guest = Guest::new(&vm, 0);
    assert_eq!(guest.vcpu.fault_around(&vm), 8);
    for page in 0..8 * 512 {
        guest.write(page * PAGE, 1);
    }
    assert_eq!(guest.vcpu.fault_around(&vm), 64);
    // With a window of eight there would be 512.
    assert!((64..90).contains(&guest.faults), "{}", guest.faults);
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn a_window_shrinks_to_one_page_where_guesses_are_not_used_and_comes_back_when_they_would_be() {
    let machine = Watched::new(1);
    let (vm, worker) = vm_adaptive(&machine, 16, adaptive(8, 64));
    let mut guest = Guest::new(&vm, 0);
    // One page of every 64: nothing beside it is ever used.
    for page in (0..8 * 512).step_by(64) {
        guest.read(page * PAGE);
    }
    assert_eq!(guest.vcpu.fault_around(&vm), 1);
    let ahead = guest.vcpu.statistics().ahead;
    assert!(ahead < 64, "{ahead} pages for nothing; 448 with a window that stays");
    for page in 8 * 512..16 * 512 {
        guest.read(page * PAGE);
    }
    assert_eq!(guest.vcpu.fault_around(&vm), 64);
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn each_vcpu_judges_its_own_guesses() {
    let machine = Watched::new(2);
    let (vm, worker) = vm_adaptive(&machine, 8, adaptive(4, 32));
    let (mut first, mut second) = (Guest::new(&vm, 0), Guest::new(&vm, 1));
    for page in 0..1024 {
        first.read(page * PAGE);
        second.read((4 * 512 + page % 32 * 64 + page / 32) * PAGE);
    }
    assert_eq!(first.vcpu.fault_around(&vm), 32);
    assert_eq!(second.vcpu.fault_around(&vm), 1);
    drop((first, second));
    finish(vm, vec![worker]);
}

#[test]
fn a_window_stays_where_hardware_sets_no_access_flags() {
    let machine = Watched::new(1);
    let (vm, worker) = vm_with_slot_around(&machine, BLOCK, adaptive(8, 64));
    let mut guest = Guest::new(&vm, 0);
    for page in (0..512).step_by(32) {
        guest.read(page * PAGE);
    }
    assert_eq!((guest.vcpu.fault_around(&vm), guest.vcpu.statistics().ahead), (8, 7 * 16));
    drop(guest);
    finish(vm, vec![worker]);
}
