//! Exhausted memory: an error or a slower way, never a loss, and the retry succeeds.

mod guest;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use guest::*;
use slat::Gpa;
use slat_model::Backing;
use slat_vm::{
    Access, Exit, FaultError, Hva, LogError, LogMode, SlotConfig, SlotError, Vm, VmError, VmOptions,
};

/// The allocator of this test program: on a thread that asks for it, the n-th allocation from now fails.
struct Failing;

thread_local! {
    static COUNTDOWN: Cell<Option<u64>> = const { Cell::new(None) };
}

fn refused() -> bool {
    COUNTDOWN
        .try_with(|countdown| match countdown.get() {
            Some(_) if in_model() => false,
            Some(0) => true,
            Some(n) => {
                countdown.set(Some(n - 1));
                false
            }
            None => false,
        })
        .unwrap_or(false)
}

// SAFETY: either the system's allocator or a refusal.
#[expect(unsafe_code, reason = "an allocator that can be told to refuse")]
unsafe impl GlobalAlloc for Failing {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as the caller promised.
        if refused() { std::ptr::null_mut() } else { unsafe { System.alloc(layout) } }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as the caller promised.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Failing = Failing;

/// Runs `f` with the n-th allocation and all later ones of this thread refused.
fn refusing<R>(n: u64, f: impl FnOnce() -> R) -> R {
    COUNTDOWN.set(Some(n));
    let result = f();
    COUNTDOWN.set(None);
    result
}

/// Runs `f` with the n-th table and all later ones refused.
fn without_tables<R>(machine: &Watched, n: u64, f: impl FnOnce() -> R) -> R {
    machine.model.fail_after(n);
    let result = f();
    machine.model.stop_failing();
    result
}

#[test]
fn a_fault_without_memory_is_an_error_and_its_retry_succeeds() {
    for n in 0..3 {
        let machine = Watched::new(1);
        let (vm, worker) = vm_with_slot(&machine, BLOCK, Backing::Anonymous, VmOptions::default());
        let mut guest = Guest::new(&vm, 0);
        let fault = guest.cpu.write(Gpa(PAGE), 1).unwrap_err();
        let result = without_tables(&machine, n, || guest.vcpu.fault(&vm, translate(fault)));
        if n < 2 {
            assert!(matches!(result, Err(FaultError::NoMemory(_))), "{n}: {result:?}");
            assert_eq!(found(&vm, &worker, PAGE), None);
        } else {
            assert_eq!(result, Ok(Exit::Resume));
        }
        assert!(guest.write(PAGE, 1) <= 1);
        drop(guest);
        finish(vm, vec![worker]);
    }
}

#[test]
fn a_fault_that_needs_no_table_needs_no_memory() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, BLOCK, Backing::Anonymous, VmOptions::default());
    let mut guest = Guest::new(&vm, 0);
    guest.write(PAGE, 1);
    vm.enable_log(&mut worker, 0, LogMode::Protect).unwrap();
    without_tables(&machine, 0, || {
        assert_eq!(guest.write(PAGE, 2), 1);
        assert_eq!(guest.write(2 * PAGE, 2), 1);
    });
    assert_eq!(collect(&vm, &mut worker, 0, 512), [1, 2]);
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn a_write_to_a_block_under_a_log_tops_up_and_the_guest_sees_no_error() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, 600 * BLOCK, HUGE_2M, VmOptions::default());
    let mut guest = Guest::new(&vm, 0);
    for block in 0..300 {
        guest.write(block * BLOCK, 1);
    }
    vm.enable_log(&mut worker, 0, LogMode::Protect).unwrap();
    for block in 0..300 {
        // However few tables are in hand.
        assert_eq!(guest.write(block * BLOCK, 2), 1);
    }
    assert_eq!(guest.vcpu.statistics().failed, 0);
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn enabling_a_log_without_memory_for_tables_protects_blocks_as_they_are() {
    for n in [0, 1, 2, 5] {
        let machine = Watched::new(1);
        let (vm, mut worker) = vm_with_slot(&machine, 8 * BLOCK, HUGE_2M, eager(BLOCK));
        let mut guest = Guest::new(&vm, 0);
        for block in 0..8 {
            guest.write(block * BLOCK, block);
        }
        without_tables(&machine, n, || vm.enable_log(&mut worker, 0, LogMode::Protect)).unwrap();
        assert_eq!(worker.statistics().eager_splits_ended, 1);
        for block in 0..8 {
            assert!(!writable(&vm, &worker, block * BLOCK));
            assert_eq!(guest.cpu.read(Gpa(block * BLOCK)), Ok(block));
            assert_eq!(guest.write(block * BLOCK, block), 1);
        }
        assert_eq!(collect(&vm, &mut worker, 0, 4096).len(), 8);
        drop(guest);
        finish(vm, vec![worker]);
    }
}

#[test]
fn clearing_without_memory_for_tables_protects_more_than_was_asked_and_loses_nothing() {
    for options in [VmOptions::default(), eager(BLOCK)] {
        for n in [0, 1] {
            let machine = Watched::new(1);
            let (vm, mut worker) = vm_with_slot(&machine, 2 * BLOCK, HUGE_2M, options);
            let mut guest = Guest::new(&vm, 0);
            guest.write(0, 1);
            guest.write(BLOCK, 1);
            vm.enable_log(&mut worker, 0, LogMode::Manual { initially_all_set: true }).unwrap();
            let mask = [1 << 5, 0, 0, 0, 0, 0, 0, 0, 1 << 9, 0, 0, 0, 0, 0, 0, 0];
            let cleared =
                without_tables(&machine, n, || vm.clear_dirty_log(&mut worker, 0, 0, 1024, &mask));
            assert_eq!(cleared, Ok(2));
            for page in [5, 512 + 9] {
                assert!(!writable(&vm, &worker, page * PAGE));
                assert_eq!(guest.write(page * PAGE, 2), 1);
            }
            assert_eq!(collect(&vm, &mut worker, 0, 1024).len(), 1024);
            drop(guest);
            finish(vm, vec![worker]);
        }
    }
}

#[test]
fn making_a_vm_without_memory_leaks_nothing() {
    let machine = Watched::new(1);
    let memory = machine.model.host_memory(BLOCK, Backing::Anonymous).unwrap();
    let make = || Vm::new(&machine, TestHost::new(memory.clone()), arm(), 1, VmOptions::default());
    for n in 0..2 {
        let result = without_tables(&machine, n, make);
        assert!(matches!(result, Err(VmError::NoMemory(_))));
    }
    for n in 0..2 {
        let result = refusing(n, make);
        assert!(matches!(result, Err(VmError::OutOfMemory)), "{n}");
    }
    assert_eq!(machine.model.counters().tables_in_use, 0);
    assert!(make().is_ok());
}

#[test]
fn changes_of_slots_and_logs_without_memory_change_nothing() {
    let machine = Watched::new(1);
    let (vm, mut worker) =
        vm_with_slot(&machine, 2 * BLOCK, Backing::Anonymous, VmOptions::default());
    let mut guest = Guest::new(&vm, 0);
    guest.write(PAGE, 7);
    let config = SlotConfig::new(Gpa(GIB), PAGE, Hva(0));
    let mut tries = 0;
    let mut until_ok = |mut attempt: Box<dyn FnMut(u64) -> bool + '_>| {
        let n = (0..20).find(|&n| attempt(n)).unwrap();
        assert!(n > 0);
        tries += n;
    };
    until_ok(Box::new(|n| {
        let result = refusing(n, || vm.create_slot(&mut worker, 1, config));
        assert_eq!(vm.slot(&worker, 1).is_some(), result.is_ok());
        assert!(matches!(result, Ok(()) | Err(SlotError::OutOfMemory)), "{result:?}");
        result.is_ok()
    }));
    for mode in [LogMode::Protect, LogMode::Manual { initially_all_set: true }] {
        until_ok(Box::new(|n| {
            let result = refusing(n, || vm.enable_log(&mut worker, 0, mode));
            assert_eq!(vm.slot(&worker, 0).unwrap().logged, result.is_ok());
            assert!(matches!(result, Ok(()) | Err(LogError::OutOfMemory)), "{result:?}");
            result.is_ok()
        }));
        assert_eq!(guest.write(PAGE, 8) == 1, mode == LogMode::Protect);
        until_ok(Box::new(|n| {
            let result = refusing(n, || vm.disable_log(&mut worker, 0));
            assert_eq!(vm.slot(&worker, 0).unwrap().logged, result.is_err());
            result.is_ok()
        }));
    }
    until_ok(Box::new(|n| {
        let result = refusing(n, || vm.delete_slot(&mut worker, 0));
        assert_eq!(vm.slot(&worker, 0).is_none(), result.is_ok());
        assert_eq!(guest.cpu.read(Gpa(PAGE)).is_err(), result.is_ok());
        result.is_ok()
    }));
    assert!(matches!(guest.fault(PAGE, Access::Read), Exit::Mmio(_)));
    assert!(tries >= 10, "{tries}");
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn collecting_and_faulting_allocate_nothing_but_tables() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, 4 * BLOCK, HUGE_2M, eager(BLOCK));
    let mut guest = Guest::new(&vm, 0);
    guest.write(0, 1);
    vm.enable_log(&mut worker, 0, LogMode::Manual { initially_all_set: true }).unwrap();
    let mut bitmap = vec![0; 2048 / 64];
    // The model and the test host allocate where they like, so this counts by itself: the calls that are this crate's.
    let before = machine.model.counters().tables_allocated;
    vm.dirty_log(&mut worker, 0, &mut bitmap).unwrap();
    assert_eq!(machine.model.counters().tables_allocated, before);
    vm.clear_dirty_log(&mut worker, 0, 0, 2048, &bitmap).unwrap();
    assert!(machine.model.counters().tables_allocated <= before + 4);
    drop(guest);
    finish(vm, vec![worker]);
}
