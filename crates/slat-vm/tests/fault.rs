//! Faults end in the largest leaf that is right, or in the exit that says what is wrong.

mod guest;

use guest::*;
use slat::{Gpa, Machine};
use slat_model::Backing;
use slat_vm::{
    Abort, Access, Exit, Fault, FaultError, FaultKind, HostError, HostPage, Hva, Mmio, ReadOnly,
    SlotConfig, VmOptions,
};

#[test]
fn a_leaf_is_as_large_as_the_hosts_page_and_the_slot_allow() {
    let machine = Watched::new(1);
    for (backing, size, expected) in [
        (Backing::Anonymous, 4 * BLOCK, 3),
        (HUGE_2M, 4 * BLOCK, 2),
        (Backing::AnonymousThp, 4 * BLOCK, 2),
        (HUGE_1G, GIB, 1),
        // A page of a size that no leaf has.
        (Backing::AnonymousHugetlb { page_size: 64 << 10 }, 4 * BLOCK, 3),
    ] {
        let (vm, worker) = vm_with_slot(&machine, size, backing, VmOptions::default());
        let mut guest = Guest::new(&vm, 0);
        assert_eq!(guest.write(BLOCK + 5 * PAGE + 8, 42), 1);
        let found = found(&vm, &worker, BLOCK + 5 * PAGE).unwrap();
        assert_eq!((found.level, found.write), (expected, true), "{backing:?}");
        let word = vm.host().memory.word(BLOCK + 5 * PAGE + 8).unwrap();
        assert_eq!(word.load(std::sync::atomic::Ordering::Relaxed), 42);
        drop(guest);
        finish(vm, vec![worker]);
    }
}

#[test]
fn guest_and_host_addresses_that_are_not_congruent_get_pages_only() {
    let machine = Watched::new(1);
    for (backing, size) in [(HUGE_2M, 8 * BLOCK), (HUGE_1G, 2 * GIB)] {
        let vm = vm(&machine, size, backing, VmOptions::default());
        let mut worker = vm.worker().unwrap();
        let config = SlotConfig::new(Gpa(0), size - BLOCK, Hva(PAGE));
        vm.create_slot(&mut worker, 0, config).unwrap();
        let mut guest = Guest::new(&vm, 0);
        guest.write(BLOCK, 1);
        assert_eq!(level(&vm, &worker, BLOCK), Some(LAST));
        assert_eq!(found(&vm, &worker, BLOCK).unwrap().output % BLOCK, PAGE);
        drop(guest);
        finish(vm, vec![worker]);
    }
}

#[test]
fn host_pages_of_a_gibibyte_that_are_congruent_by_less_get_smaller_blocks() {
    let machine = Watched::new(1);
    let vm = vm(&machine, 2 * GIB, HUGE_1G, VmOptions::default());
    let mut worker = vm.worker().unwrap();
    let config = SlotConfig::new(Gpa(0), GIB, Hva(BLOCK));
    vm.create_slot(&mut worker, 0, config).unwrap();
    let mut guest = Guest::new(&vm, 0);
    guest.write(5 * BLOCK, 1);
    assert_eq!(found(&vm, &worker, 5 * BLOCK).unwrap().level, 2);
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn a_block_lies_wholly_inside_its_slot() {
    let machine = Watched::new(1);
    let vm = vm(&machine, 8 * BLOCK, HUGE_2M, VmOptions::default());
    let mut worker = vm.worker().unwrap();
    let (first, size) = (BLOCK + PAGE, 3 * BLOCK + 2 * PAGE);
    let config = SlotConfig::new(Gpa(first), size, Hva(first));
    vm.create_slot(&mut worker, 0, config).unwrap();
    let mut guest = Guest::new(&vm, 0);
    for (gpa, expected) in [
        (first, LAST),
        (2 * BLOCK - PAGE, LAST),
        (2 * BLOCK, 2),
        (3 * BLOCK + 7 * PAGE, 2),
        (4 * BLOCK, LAST),
        (first + size - PAGE, LAST),
    ] {
        guest.write(gpa, gpa);
        assert_eq!(level(&vm, &worker, gpa), Some(expected), "{gpa:#x}");
    }
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn a_slots_largest_page_size_holds() {
    let machine = Watched::new(1);
    let vm = vm(&machine, GIB, HUGE_1G, VmOptions::default());
    let mut worker = vm.worker().unwrap();
    for (id, max, expected) in [(0, PAGE, LAST), (1, BLOCK, 2), (2, BLOCK + PAGE, 2)] {
        let start = u64::from(id) * 4 * BLOCK;
        let config = SlotConfig {
            max_page_size: Some(max),
            ..SlotConfig::new(Gpa(start), 4 * BLOCK, Hva(start))
        };
        vm.create_slot(&mut worker, id, config).unwrap();
        let mut guest = Guest::new(&vm, 0);
        guest.write(start, 1);
        assert_eq!(level(&vm, &worker, start), Some(expected));
    }
    finish(vm, vec![worker]);
}

#[test]
fn outside_of_every_slot_is_an_exit_that_says_what_was_tried() {
    let machine = Watched::new(1);
    let vm = vm(&machine, BLOCK, Backing::Anonymous, VmOptions::default());
    let mut worker = vm.worker().unwrap();
    vm.create_slot(&mut worker, 3, SlotConfig::new(Gpa(BLOCK), BLOCK, Hva(0))).unwrap();
    let mut guest = Guest::new(&vm, 0);
    for gpa in [0, BLOCK - 8, 2 * BLOCK, (1 << 40) - 8] {
        for access in [Access::Read, Access::Write, Access::Execute] {
            let exit = Exit::Mmio(Mmio { gpa: Gpa(gpa), access, slot: None });
            assert_eq!(guest.fault(gpa, access), exit);
        }
    }
    assert_eq!(guest.vcpu.statistics().mmio, 12);
    let limit = Gpa(1 << 40);
    assert_eq!(guest.fault(1 << 40, Access::Read), Exit::Abort(Abort::AddressSize { limit }));
    assert_eq!(guest.fault(u64::MAX, Access::Write), Exit::Abort(Abort::AddressSize { limit }));
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn a_read_only_slot_is_read_through_its_mapping_and_written_to_through_exits() {
    let machine = Watched::new(1);
    let vm = vm(&machine, BLOCK, HUGE_2M, VmOptions::default());
    let mut worker = vm.worker().unwrap();
    let config = SlotConfig { read_only: true, ..SlotConfig::new(Gpa(4 * BLOCK), BLOCK, Hva(0)) };
    vm.create_slot(&mut worker, 9, config).unwrap();
    let mut guest = Guest::new(&vm, 0);
    let gpa = 4 * BLOCK + 2 * PAGE + 16;
    let exit = Exit::Mmio(Mmio {
        gpa: Gpa(gpa),
        access: Access::Write,
        slot: Some(ReadOnly { id: 9.into(), hva: Hva(2 * PAGE + 16) }),
    });
    // Both before anything is mapped and after.
    let fault = guest.cpu.write(Gpa(gpa), 1).unwrap_err();
    assert_eq!(guest.handle(fault), exit);
    assert_eq!(guest.read(gpa), 0);
    assert_eq!(found(&vm, &worker, gpa).map(|f| (f.level, f.write)), Some((2, false)));
    let fault = guest.cpu.write(Gpa(gpa), 1).unwrap_err();
    assert_eq!(guest.handle(fault), exit);
    assert!(vm.host().asked.lock().unwrap().iter().all(|&(_, access)| access == Access::Read));
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn device_pages_are_single_uncached_and_never_executed() {
    let machine = Watched::new(1);
    let (vm, worker) = vm_with_slot(&machine, 4 * BLOCK, HUGE_2M, VmOptions::default());
    vm.host().alter(BLOCK, |page| page.device = true);
    let mut guest = Guest::new(&vm, 0);
    assert_eq!(guest.fault(BLOCK, Access::Execute), Exit::Abort(Abort::ExecuteDevice));
    guest.write(BLOCK, 1);
    let found = found(&vm, &worker, BLOCK).unwrap();
    assert_eq!((found.level, found.write, found.execute), (LAST, true, false));
    assert_eq!(level(&vm, &worker, BLOCK + PAGE), None);
    assert!(machine.cleaned.lock().unwrap().is_empty());
    let fault = guest.cpu.fetch(Gpa(BLOCK)).unwrap_err();
    assert_eq!(guest.handle(fault), Exit::Abort(Abort::ExecuteDevice));
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn memory_is_executable_only_after_its_instruction_cache_work() {
    let machine = Watched::new(1);
    let (vm, worker) = vm_with_slot(&machine, 4 * BLOCK, HUGE_2M, VmOptions::default());
    let mut guest = Guest::new(&vm, 0);
    guest.write(8, 1);
    let at = found(&vm, &worker, 0).unwrap();
    assert!(!at.execute && at.write);
    assert!(machine.synced.lock().unwrap().is_empty());
    guest.execute(0);
    let at = found(&vm, &worker, 0).unwrap();
    assert!(at.execute && at.write && at.level == 2);
    assert_eq!(*machine.synced.lock().unwrap(), [(slat::Hpa(at.output), BLOCK)]);
    // Cleaned when it was mapped, and not again when a permission was added.
    assert_eq!(*machine.cleaned.lock().unwrap(), [(slat::Hpa(at.output), BLOCK)]);
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn a_coherent_machine_is_asked_for_no_cache_work() {
    let machine = Watched::new(1);
    let options =
        VmOptions { coherent_data: true, coherent_instructions: true, ..VmOptions::default() };
    let (vm, worker) = vm_with_slot(&machine, 4 * BLOCK, HUGE_2M, options);
    let mut guest = Guest::new(&vm, 0);
    guest.write(8, 1);
    guest.execute(0);
    assert_eq!(guest.faults, 1);
    assert!(
        machine.synced.lock().unwrap().is_empty() && machine.cleaned.lock().unwrap().is_empty()
    );
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn a_page_that_the_host_lets_be_read_only_is_mapped_so_until_it_is_written() {
    let machine = Watched::new(1);
    let (vm, worker) = vm_with_slot(&machine, BLOCK, Backing::Anonymous, VmOptions::default());
    vm.host().alter(PAGE, |page| page.writable = false);
    let mut guest = Guest::new(&vm, 0);
    assert_eq!(guest.read(PAGE), 0);
    assert!(!writable(&vm, &worker, PAGE));
    // Asked for a write, the host must not answer a read-only page.
    let fault = Fault { gpa: Gpa(PAGE), access: Access::Write, kind: FaultKind::Permission };
    assert!(matches!(guest.vcpu.fault(&vm, fault), Err(FaultError::HostPage(_))));
    vm.host().answers.lock().unwrap().clear();
    assert_eq!(guest.write(PAGE, 3), 1);
    assert_eq!(guest.read(PAGE), 3);
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn what_the_host_refuses_is_an_error_that_changes_nothing() {
    let machine = Watched::new(1);
    let (vm, worker) = vm_with_slot(&machine, BLOCK, Backing::Anonymous, VmOptions::default());
    let mut guest = Guest::new(&vm, 0);
    let fault = Fault { gpa: Gpa(PAGE), access: Access::Write, kind: FaultKind::Translation };
    for error in [HostError::NotMapped, HostError::Poisoned, HostError::NoMemory] {
        vm.host().answer(PAGE, Err(error));
        let expected = FaultError::Host { gpa: Gpa(PAGE), hva: Hva(PAGE), error };
        assert_eq!(guest.vcpu.fault(&vm, fault), Err(expected));
    }
    vm.host().answer(PAGE, Err(HostError::Again));
    assert_eq!(guest.vcpu.fault(&vm, fault), Ok(Exit::Retry));
    let natural = vm.host().natural(Hva(PAGE)).unwrap();
    for size in [0, 512, 2048, 3 * PAGE, u64::MAX] {
        let page = HostPage { size, ..natural };
        vm.host().answer(PAGE, Ok(page));
        assert_eq!(guest.vcpu.fault(&vm, fault), Err(FaultError::HostPage(page)), "{size:#x}");
    }
    let page = HostPage { output: slat::Hpa(natural.output.0 + 8), ..natural };
    vm.host().answer(PAGE, Ok(page));
    assert_eq!(guest.vcpu.fault(&vm, fault), Err(FaultError::HostPage(page)));
    assert_eq!(found(&vm, &worker, PAGE), None);
    let statistics = *guest.vcpu.statistics();
    assert_eq!((statistics.faults, statistics.failed, statistics.retried), (10, 9, 1));
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn a_stale_read_only_translation_costs_one_fault_not_faults_for_ever() {
    let machine = Watched::new(2);
    let (vm, mut worker) = vm_with_slot(&machine, BLOCK, Backing::Anonymous, VmOptions::default());
    vm.enable_log(&mut worker, 0, slat_vm::LogMode::Protect).unwrap();
    let (mut first, mut second) = (Guest::new(&vm, 0), Guest::new(&vm, 1));
    second.read(PAGE);
    first.write(PAGE, 1);
    // The second CPU's TLB still holds the read-only translation.
    assert_eq!(second.write(PAGE, 2), 1);
    assert_eq!(second.vcpu.statistics().spurious, 1);
    assert_eq!(first.read(PAGE), 2);
    drop((first, second));
    finish(vm, vec![worker]);
}

#[test]
fn an_access_flag_fault_only_sets_the_flag() {
    let machine = Watched::new(1);
    let (vm, worker) = vm_with_slot(&machine, BLOCK, HUGE_2M, VmOptions::default());
    let mut guest = Guest::new(&vm, 0);
    guest.read(0);
    assert_eq!(vm.tree().age(worker.participant(), range(0, BLOCK), true), Ok(1));
    // The model's TLB never forgets; a real one would by now.
    machine.execute(slat::maintenance::Instruction::EnterContext(vm.tree().root_register()));
    machine.execute(slat::maintenance::Instruction::TlbiVmalls12e1is);
    machine.execute(slat::maintenance::Instruction::DsbIsh);
    machine.execute(slat::maintenance::Instruction::LeaveContext);
    let asked = vm.host().asked.lock().unwrap().len();
    guest.read(8);
    assert_eq!(vm.host().asked.lock().unwrap().len(), asked);
    assert_eq!(guest.vcpu.statistics().young, 1);
    assert_eq!(vm.tree().age(worker.participant(), range(0, BLOCK), false), Ok(1));
    // Where nothing is mapped any more, it is a translation fault.
    let fault = Fault { gpa: Gpa(8), access: Access::Read, kind: FaultKind::AccessFlag };
    let mut worker = worker;
    drop(vm.invalidate_begin(&mut worker, &[range(0, BLOCK)]).unwrap());
    assert_eq!(guest.vcpu.fault(&vm, fault), Ok(Exit::Resume));
    assert_eq!(level(&vm, &worker, 0), Some(2));
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn a_vcpu_of_another_machine_is_refused() {
    let (machine, other) = (Watched::new(1), Watched::new(1));
    let (vm, mut worker) = vm_with_slot(&machine, BLOCK, HUGE_2M, VmOptions::default());
    let (stranger, mut strange_worker) = vm_with_slot(&other, BLOCK, HUGE_2M, VmOptions::default());
    let mut vcpu = stranger.vcpu().unwrap();
    let fault = Fault { gpa: Gpa(0), access: Access::Read, kind: FaultKind::Translation };
    assert_eq!(vcpu.fault(&vm, fault), Err(FaultError::OtherMachine));
    let error = vm.dirty_log(&mut strange_worker, 0, &mut [0; 8]).unwrap_err();
    assert_eq!(error, slat_vm::LogError::OtherMachine);
    assert!(vm.invalidate_begin(&mut strange_worker, &[range(0, BLOCK)]).is_err());
    assert_eq!(vm.delete_slot(&mut strange_worker, 0), Err(slat_vm::SlotError::OtherMachine));
    assert!(vm.split(&mut strange_worker, range(0, BLOCK)).is_err());
    assert!(vm.split(&mut worker, range(0, BLOCK)).is_ok());
    drop(vcpu);
    finish(vm, vec![worker]);
    finish(stranger, vec![strange_worker]);
}
