//! Private and shared pages: each is backed by what it says, and no leaf covers both kinds.

mod guest;

use guest::*;
use slat::Gpa;
use slat_model::Backing;
use slat_vm::{
    Access, Exit, Fault, FaultKind, Hva, HvaRange, LogError, LogMode, PrivateError, SlotChange,
    SlotConfig, SlotError, VmOptions,
};

/// 2 GiB at guest address 0, shared memory behind it and private memory after that.
const SIZE: u64 = 4 * BLOCK;

fn config() -> SlotConfig {
    SlotConfig { private: Some(Hva(SIZE)), ..SlotConfig::new(Gpa(0), SIZE, Hva(0)) }
}

fn private_vm(machine: &Watched, backing: Backing) -> (TestVm<'_>, slat_vm::Worker<'_, Watched>) {
    let vm = vm(machine, 2 * SIZE, backing, VmOptions::default());
    let mut worker = vm.worker().unwrap();
    vm.create_slot(&mut worker, 0, config()).unwrap();
    (vm, worker)
}

fn value(vm: &TestVm<'_>, hva: u64) -> u64 {
    vm.host().memory.word(hva).unwrap().load(std::sync::atomic::Ordering::Relaxed)
}

#[test]
fn a_page_is_backed_by_the_memory_of_its_kind() {
    let machine = Watched::new(1);
    let (vm, mut worker) = private_vm(&machine, Backing::Anonymous);
    let mut guest = Guest::new(&vm, 0);
    guest.write(5 * PAGE, 1);
    vm.set_private(&mut worker, 0, range(5 * PAGE, PAGE), true).unwrap();
    assert_eq!(vm.is_private(&worker, 0, Gpa(5 * PAGE)), Some(true));
    assert_eq!(vm.is_private(&worker, 0, Gpa(6 * PAGE)), Some(false));
    assert_eq!(guest.read(5 * PAGE), 0, "what was shared is not seen");
    guest.write(5 * PAGE, 2);
    assert_eq!((value(&vm, 5 * PAGE), value(&vm, SIZE + 5 * PAGE)), (1, 2));
    vm.set_private(&mut worker, 0, range(5 * PAGE, PAGE), false).unwrap();
    assert_eq!(guest.read(5 * PAGE), 1);
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn no_block_covers_pages_of_both_kinds() {
    let machine = Watched::new(1);
    let (vm, mut worker) = private_vm(&machine, HUGE_2M);
    let mut guest = Guest::new(&vm, 0);
    guest.write(0, 1);
    assert_eq!(level(&vm, &worker, 0), Some(2));
    vm.set_private(&mut worker, 0, range(7 * PAGE, PAGE), true).unwrap();
    vm.set_private(&mut worker, 0, range(BLOCK, BLOCK), true).unwrap();
    for page in [0, 7, 8, 512, 1024] {
        guest.write(page * PAGE, page + 1);
    }
    let levels = [0, 7, 8, 512, 1024].map(|page| level(&vm, &worker, page * PAGE).unwrap());
    assert_eq!(levels, [LAST, LAST, LAST, 2, 2]);
    vm.set_private(&mut worker, 0, range(7 * PAGE, PAGE), false).unwrap();
    guest.write(6 * PAGE, 1);
    assert_eq!(level(&vm, &worker, 6 * PAGE), Some(2), "all of it is shared again");
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn an_access_that_takes_the_page_for_the_other_kind_is_an_exit() {
    let machine = Watched::new(1);
    let (vm, mut worker) = private_vm(&machine, Backing::Anonymous);
    let mut guest = Guest::new(&vm, 0);
    let gpa = Gpa(5 * PAGE);
    let fault = Fault { gpa, access: Access::Write, kind: FaultKind::Translation };
    let convert = |private| Exit::Convert { gpa, private };
    assert_eq!(guest.vcpu.fault_in(&vm, fault, true), Ok(convert(true)));
    assert_eq!(level(&vm, &worker, 5 * PAGE), None);
    vm.set_private(&mut worker, 0, range(5 * PAGE, PAGE), true).unwrap();
    assert_eq!(guest.vcpu.fault_in(&vm, fault, false), Ok(convert(false)));
    assert_eq!(guest.vcpu.fault_in(&vm, fault, true), Ok(Exit::Resume));
    let statistics = guest.vcpu.statistics();
    assert_eq!((statistics.converted, statistics.faults), (2, 3));
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn an_old_page_that_is_taken_for_the_other_kind_is_an_exit_too() {
    let machine = Watched::new(1);
    let (vm, mut worker) = private_vm(&machine, Backing::Anonymous);
    let mut guest = Guest::new(&vm, 0);
    guest.write(5 * PAGE, 1);
    vm.clear_young(&mut worker, range(0, SIZE)).unwrap();
    let gpa = Gpa(5 * PAGE);
    let fault = Fault { gpa, access: Access::Read, kind: FaultKind::AccessFlag };
    let convert = Exit::Convert { gpa, private: true };
    assert_eq!(guest.vcpu.fault_in(&vm, fault, true), Ok(convert));
    assert_eq!(vm.test_young(&mut worker, range(0, SIZE)), Ok(0));
    assert_eq!(guest.vcpu.fault_in(&vm, fault, false), Ok(Exit::Resume));
    assert_eq!(vm.test_young(&mut worker, range(0, SIZE)), Ok(1));
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn a_conversion_between_the_hosts_answer_and_the_install_wins() {
    let machine = Watched::new(1);
    let (vm, mut worker) = private_vm(&machine, Backing::Anonymous);
    let mut guest = Guest::new(&vm, 0);
    vm.host().once(|| vm.set_private(&mut worker, 0, range(0, PAGE), true).unwrap());
    assert_eq!(guest.fault(0, Access::Write), Exit::Retry);
    guest.write(0, 9);
    assert_eq!((value(&vm, 0), value(&vm, SIZE)), (0, 9));
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn the_host_takes_back_only_pages_that_are_backed_from_there_now() {
    let machine = Watched::new(1);
    let (vm, mut worker) = private_vm(&machine, Backing::Anonymous);
    vm.set_private(&mut worker, 0, range(4 * PAGE, 2 * PAGE), true).unwrap();
    let mut guest = Guest::new(&vm, 0);
    let touch = |guest: &mut Guest<'_, '_>| {
        for page in 2..8 {
            guest.read(page * PAGE);
        }
    };
    let mapped = |worker: &slat_vm::Worker<'_, Watched>| {
        (2..8).filter(|page| level(&vm, worker, page * PAGE).is_some()).collect::<Vec<_>>()
    };
    touch(&mut guest);
    let host = |start| HvaRange::new(Hva(start + 3 * PAGE), 4 * PAGE).unwrap();
    vm.invalidate_host_begin(&mut worker, &[host(0)]).unwrap().end();
    assert_eq!(mapped(&worker), [2, 4, 5, 7]);
    touch(&mut guest);
    vm.invalidate_host_begin(&mut worker, &[host(SIZE)]).unwrap().end();
    assert_eq!(mapped(&worker), [2, 3, 6, 7]);
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn what_cannot_be_asked_of_private_memory_is_refused() {
    let machine = Watched::new(1);
    let (vm, mut worker) = private_vm(&machine, Backing::Anonymous);
    let ordinary = SlotConfig::new(Gpa(SIZE), BLOCK, Hva(0));
    vm.create_slot(&mut worker, 1, ordinary).unwrap();
    let slot = range(0, SIZE);
    let mut refuse = |id: u32, range, error| {
        assert_eq!(vm.set_private(&mut worker, id, range, true), Err(error));
    };
    refuse(7, range(0, PAGE), PrivateError::NoSlot);
    refuse(1, range(SIZE, PAGE), PrivateError::NoPrivateMemory);
    refuse(0, range(SIZE - PAGE, 2 * PAGE), PrivateError::OutsideSlot { slot });
    refuse(0, range(8, PAGE), PrivateError::Misaligned { to: PAGE });
    assert_eq!(vm.enable_log(&mut worker, 0, LogMode::Protect), Err(LogError::Private));
    let moved = SlotConfig { gpa: Gpa(2 * SIZE), ..config() };
    assert_eq!(vm.change_slot(&mut worker, 0, moved), Err(SlotError::Private));
    assert_eq!(vm.change_slot(&mut worker, 0, config()), Ok(SlotChange::Nothing));
    for wrong in [
        SlotConfig { read_only: true, gpa: Gpa(2 * SIZE), ..config() },
        SlotConfig { pinned: true, gpa: Gpa(2 * SIZE), ..config() },
    ] {
        assert_eq!(vm.create_slot(&mut worker, 2, wrong), Err(SlotError::Private));
    }
    finish(vm, vec![worker]);
}

#[test]
fn a_host_range_behind_both_memories_takes_the_pages_of_both_kinds_whichever_comes_first() {
    for private in [0, 2] {
        let machine = Watched::new(1);
        let (vm, mut worker) = private_vm(&machine, Backing::Anonymous);
        vm.set_private(&mut worker, 0, range(private * PAGE, 2 * PAGE), true).unwrap();
        let mut guest = Guest::new(&vm, 0);
        for page in 0..6 {
            guest.write(page * PAGE, page);
        }
        let both = HvaRange::new(Hva(0), 2 * SIZE).unwrap();
        assert_eq!(vm.test_host_young(&mut worker, both), Ok(6));
        vm.invalidate_host_begin(&mut worker, &[both]).unwrap().end();
        assert_eq!([0, 1, 2, 3, 4, 5].map(|page| level(&vm, &worker, page * PAGE)), [None; 6]);
        drop(guest);
        finish(vm, vec![worker]);
    }
}
