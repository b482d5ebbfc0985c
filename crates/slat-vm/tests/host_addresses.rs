//! What the host knows by its own addresses is found wherever the guest sees it.

mod guest;

use guest::*;
use slat::Gpa;
use slat_model::Backing;
use slat_vm::{Access, Exit, Hva, HvaRange, InvalidateError, SlotConfig, SlotId, VmOptions};

fn host(start: u64, size: u64) -> HvaRange {
    HvaRange::new(Hva(start), size).unwrap()
}

fn spaces(address_spaces: u16) -> VmOptions {
    VmOptions { address_spaces, ..VmOptions::default() }
}

#[test]
fn a_page_is_taken_back_from_every_slot_and_address_space_that_maps_it() {
    let machine = Watched::new(1);
    let vm = vm(&machine, 2 * BLOCK, Backing::Anonymous, spaces(2));
    let mut worker = vm.worker().unwrap();
    let slots = [(0, 0, 0), (0, 1, 8 * BLOCK), (1, 0, BLOCK)];
    for (space, number, gpa) in slots {
        let id = SlotId { space, number };
        let config = SlotConfig::new(Gpa(gpa), 2 * BLOCK, Hva(0));
        vm.create_slot(&mut worker, id, config).unwrap();
    }
    let mut vcpu = vm.vcpu().unwrap();
    let mut touch = |space, gpa| {
        vcpu.switch_space(&vm, space).unwrap();
        let fault = slat_vm::Fault {
            gpa: Gpa(gpa),
            access: Access::Write,
            kind: slat_vm::FaultKind::Translation,
        };
        vcpu.fault(&vm, fault).unwrap()
    };
    for (space, _, gpa) in slots {
        for page in [4, 5, 6] {
            assert_eq!(touch(space, gpa + page * PAGE), Exit::Resume);
        }
    }
    let mapped = |space, gpa| {
        let pin = worker.participant().pin();
        let found = vm.tree_of(space).unwrap().look_up(&pin, Gpa(gpa)).unwrap();
        matches!(found, slat::Lookup::Mapped { .. })
    };
    let mut other = vm.worker().unwrap();
    let guard = vm.invalidate_host_begin(&mut other, &[host(5 * PAGE + 1, 1)]).unwrap();
    for (space, _, gpa) in slots {
        let found = [4, 5, 6].map(|page| mapped(space, gpa + page * PAGE));
        assert_eq!(found, [true, false, true]);
        assert_eq!(touch(space, gpa + 5 * PAGE), Exit::Retry);
        assert_eq!(touch(space, gpa + 7 * PAGE), Exit::Resume);
    }
    guard.end();
    assert_eq!(touch(1, BLOCK + 5 * PAGE), Exit::Resume);
    drop(vcpu);
    finish(vm, vec![worker, other]);
}

#[test]
fn a_slot_that_appears_during_the_invalidation_gets_no_page_from_before() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, BLOCK, Backing::Anonymous, VmOptions::default());
    let mut other = vm.worker().unwrap();
    let guard = vm.invalidate_host_begin(&mut other, &[host(0, BLOCK)]).unwrap();
    vm.create_slot(&mut worker, 1, SlotConfig::new(Gpa(BLOCK), BLOCK, Hva(0))).unwrap();
    let mut guest = Guest::new(&vm, 0);
    assert_eq!(guest.fault(BLOCK + PAGE, Access::Read), Exit::Retry);
    guard.end();
    assert_eq!(guest.fault(BLOCK + PAGE, Access::Read), Exit::Resume);
    drop(guest);
    finish(vm, vec![worker, other]);
}

#[test]
fn a_look_up_hands_out_no_page_that_is_being_taken_back_by_its_host_address() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, BLOCK, Backing::Anonymous, VmOptions::default());
    let mut guest = Guest::new(&vm, 0);
    guest.write(5 * PAGE, 1);
    guest.write(6 * PAGE, 1);
    let mut other = vm.worker().unwrap();
    let answers = std::sync::Mutex::new(Vec::new());
    let (looker, found) = (&mut guest, &answers);
    let vm_ref = &vm;
    // Between the list and the unmap, when the grace period begins.
    let when = |event| matches!(event, slat::Event::GracePeriod);
    machine.interrupt(when, move || {
        let who = looker.vcpu.participant();
        let look = |page| vm_ref.look_up(who, Gpa(page * PAGE), |_, _| ()).is_ok();
        found.lock().unwrap().extend([look(5), look(6)]);
    });
    vm.invalidate_host_begin(&mut other, &[host(5 * PAGE, PAGE)]).unwrap().end();
    assert!(machine.calm());
    assert_eq!(*answers.lock().unwrap(), [false, true]);
    drop(guest);
    worker.parts();
    finish(vm, vec![worker, other]);
}

#[test]
fn used_pages_are_counted_and_their_flags_cleared_by_guest_and_by_host_address() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, BLOCK, Backing::Anonymous, VmOptions::default());
    vm.create_slot(&mut worker, 1, SlotConfig::new(Gpa(4 * BLOCK), BLOCK, Hva(0))).unwrap();
    let mut guest = Guest::new(&vm, 0);
    for page in 0..8 {
        guest.write(page * PAGE, 1);
        guest.read(4 * BLOCK + page * PAGE);
    }
    let all = range(0, 8 * BLOCK);
    assert_eq!(vm.test_young(&mut worker, all), Ok(16));
    assert_eq!(vm.test_host_young(&mut worker, host(0, 4 * PAGE)), Ok(8));
    assert_eq!(vm.clear_host_young(&mut worker, host(2 * PAGE, PAGE)), Ok(2));
    assert_eq!(vm.clear_host_young(&mut worker, host(2 * PAGE, PAGE)), Ok(0));
    assert_eq!(vm.clear_young(&mut worker, range(0, BLOCK)), Ok(7));
    assert_eq!(vm.test_young(&mut worker, all), Ok(7));
    // The next use sets the flag again, once the translation is not cached any more.
    vm.invalidate_begin(&mut worker, &[range(PAGE, PAGE)]).unwrap().end();
    guest.write(PAGE, 2);
    assert_eq!(vm.test_young(&mut worker, all), Ok(8));
    // Cleared with its translation, the flag is set by the very next use.
    assert_eq!(vm.clear_flush_young(&mut worker, all), Ok(8));
    guest.write(PAGE, 3);
    assert_eq!(vm.test_young(&mut worker, all), Ok(1));
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn a_pinned_slot_is_mapped_at_once_and_nothing_takes_it_away() {
    let machine = Watched::new(1);
    let vm = vm(&machine, 4 * BLOCK, HUGE_2M, VmOptions::default());
    let mut worker = vm.worker().unwrap();
    let pinned = SlotConfig { pinned: true, ..SlotConfig::new(Gpa(0), 2 * BLOCK, Hva(0)) };
    vm.create_slot(&mut worker, 0, pinned).unwrap();
    vm.create_slot(&mut worker, 1, SlotConfig::new(Gpa(2 * BLOCK), 2 * BLOCK, Hva(2 * BLOCK)))
        .unwrap();
    let whole = |worker: &slat_vm::Worker<'_, Watched>| {
        (0..1024).all(|page| writable(&vm, worker, page * PAGE))
    };
    assert!(whole(&worker));
    assert_eq!(level(&vm, &worker, 0), Some(2));
    let mut guest = Guest::new(&vm, 0);
    assert_eq!((guest.write(5 * PAGE, 1), guest.write(2 * BLOCK, 1)), (0, 1));
    // The neighbour goes, is taken back, logged and trimmed.
    vm.invalidate_begin(&mut worker, &[range(2 * BLOCK, PAGE)]).unwrap().end();
    vm.delete_slot(&mut worker, 1).unwrap();
    vm.trim(&mut worker, range(0, GIB)).unwrap();
    assert!(whole(&worker));
    let refused = Err(InvalidateError::Pinned { slot: 0.into() });
    assert_eq!(vm.invalidate_begin(&mut worker, &[range(BLOCK, PAGE)]).map(drop), refused);
    assert_eq!(vm.invalidate_host_begin(&mut worker, &[host(0, PAGE)]).map(drop), refused);
    vm.invalidate_host_begin(&mut worker, &[host(2 * BLOCK, BLOCK)]).unwrap().end();
    // A log makes pages of it, and every page stays.
    vm.enable_log(&mut worker, 0, slat_vm::LogMode::Protect).unwrap();
    guest.write(5 * PAGE, 2);
    vm.disable_log(&mut worker, 0).unwrap();
    vm.collapse(&mut worker, 0).unwrap();
    vm.trim(&mut worker, range(0, GIB)).unwrap();
    assert!((0..1024).all(|page| level(&vm, &worker, page * PAGE).is_some()));
    vm.delete_slot(&mut worker, 0).unwrap();
    assert_eq!(level(&vm, &worker, 0), None);
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn a_pinned_slot_that_cannot_be_mapped_is_not_created() {
    let machine = Watched::new(1);
    let vm = vm(&machine, BLOCK, Backing::Anonymous, VmOptions::default());
    let mut worker = vm.worker().unwrap();
    vm.host().answer(5 * PAGE, Err(slat_vm::HostError::Poisoned));
    let pinned = SlotConfig { pinned: true, ..SlotConfig::new(Gpa(BLOCK), BLOCK, Hva(0)) };
    let refused = slat_vm::SlotError::NotMapped {
        gpa: Gpa(BLOCK + 5 * PAGE),
        error: Some(slat_vm::HostError::Poisoned),
    };
    assert_eq!(vm.create_slot(&mut worker, 0, pinned), Err(refused));
    assert!(vm.slot(&worker, 0).is_none());
    assert_eq!(level(&vm, &worker, BLOCK), None);
    finish(vm, vec![worker]);
}

#[test]
fn what_is_mapped_ahead_does_not_wait_for_ever_for_what_the_host_takes_back() {
    let machine = Watched::new(1);
    let vm = vm(&machine, BLOCK, Backing::Anonymous, VmOptions::default());
    let mut worker = vm.worker().unwrap();
    let mut other = vm.worker().unwrap();
    let guard = vm.invalidate_host_begin(&mut other, &[host(5 * PAGE, PAGE)]).unwrap();
    let config = SlotConfig::new(Gpa(0), BLOCK, Hva(0));
    let pinned = SlotConfig { pinned: true, ..config };
    let again = Some(slat_vm::HostError::Again);
    let refused = slat_vm::SlotError::NotMapped { gpa: Gpa(5 * PAGE), error: again };
    assert_eq!(vm.create_slot(&mut worker, 0, pinned), Err(refused));
    assert_eq!(level(&vm, &worker, 0), None);
    vm.create_slot(&mut worker, 0, config).unwrap();
    let mut guest = Guest::new(&vm, 0);
    let step = guest.vcpu.pre_fault(&vm, range(0, BLOCK), || true);
    assert_eq!((step.done, step.stopped), (5 * PAGE, Some(slat_vm::PreFaultError::Busy)));
    guard.end();
    assert_eq!(guest.vcpu.pre_fault(&vm, step.rest.unwrap(), || true).rest, None);
    drop(guest);
    finish(vm, vec![worker, other]);
}

#[test]
fn a_flag_cleared_with_its_translation_is_set_by_the_very_next_use_in_every_address_space() {
    let machine = Watched::new(2);
    let vm = vm(&machine, BLOCK, Backing::Anonymous, spaces(2));
    let mut worker = vm.worker().unwrap();
    for space in [0, 1] {
        let id = SlotId { space, number: 0 };
        vm.create_slot(&mut worker, id, SlotConfig::new(Gpa(0), BLOCK, Hva(0))).unwrap();
    }
    let mut guests = [0, 1].map(|space| Guest::in_space(&vm, usize::from(space), space));
    for guest in &mut guests {
        guest.write(0, 1);
    }
    assert_eq!(vm.clear_flush_young(&mut worker, range(0, PAGE)), Ok(2));
    for (guest, used) in guests.iter_mut().zip([1, 2]) {
        guest.write(0, 2);
        assert_eq!(vm.test_young(&mut worker, range(0, PAGE)), Ok(used));
    }
    drop(guests);
    finish(vm, vec![worker]);
}
