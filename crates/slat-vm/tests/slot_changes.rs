//! Slots that move or change, in one address space or several: the guest sees the new slot or the old, and nothing of
//! both.

mod guest;

use guest::*;
use slat::{Event, Gpa};
use slat_model::Backing;
use slat_vm::{
    Access, Exit, Hva, LogError, LogMode, SlotChange, SlotConfig, SlotError, SlotId, VmError,
    VmOptions,
};

const MANUAL: LogMode = LogMode::Manual { initially_all_set: false };

fn at(gpa: u64, size: u64) -> SlotConfig {
    SlotConfig::new(Gpa(gpa), size, Hva(0))
}

#[test]
fn a_moved_slot_is_found_at_its_new_place_and_nowhere_else() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, 2 * BLOCK, HUGE_2M, VmOptions::default());
    let mut guest = Guest::new(&vm, 0);
    guest.write(5 * PAGE, 55);
    let moved = at(BLOCK, 2 * BLOCK);
    assert_eq!(vm.change_slot(&mut worker, 0, moved), Ok(SlotChange::Moved));
    assert!(matches!(guest.fault(5 * PAGE, Access::Read), Exit::Mmio(_)));
    assert_eq!(level(&vm, &worker, 5 * PAGE), None);
    assert_eq!(guest.read(BLOCK + 5 * PAGE), 55);
    assert_eq!(vm.change_slot(&mut worker, 0, moved), Ok(SlotChange::Nothing));
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn what_cannot_change_is_refused_and_the_slot_stays_as_it_was() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, BLOCK, Backing::Anonymous, VmOptions::default());
    vm.create_slot(&mut worker, 1, at(2 * BLOCK, BLOCK)).unwrap();
    let mut guest = Guest::new(&vm, 0);
    guest.write(0, 1);
    let mut refuse = |config, error| {
        assert_eq!(vm.change_slot(&mut worker, 0, config), Err(error));
        assert_eq!(level(&vm, &worker, 0), Some(LAST), "nothing was unmapped");
    };
    refuse(at(0, 2 * BLOCK), SlotError::Fixed);
    refuse(SlotConfig { hva: Hva(PAGE), ..at(0, BLOCK) }, SlotError::Fixed);
    refuse(SlotConfig { private: Some(Hva(0)), ..at(0, BLOCK) }, SlotError::Fixed);
    refuse(SlotConfig { pinned: true, ..at(0, BLOCK) }, SlotError::Pinned);
    refuse(at(BLOCK + PAGE, BLOCK), SlotError::Overlaps { other: 1.into() });
    refuse(at(3, BLOCK), SlotError::Misaligned { to: PAGE });
    refuse(at(1 << 40, BLOCK), SlotError::OutOfRange { limit: Gpa(1 << 40) });
    assert_eq!(vm.change_slot(&mut worker, 9, at(0, BLOCK)), Err(SlotError::NotFound));
    // A slot may move to where it overlaps with itself.
    assert_eq!(vm.change_slot(&mut worker, 0, at(PAGE, BLOCK)), Ok(SlotChange::Moved));
    assert_eq!(guest.read(PAGE), 1);
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn a_slot_that_becomes_read_only_lets_no_write_through_and_lets_them_through_again() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, BLOCK, HUGE_2M, VmOptions::default());
    let mut guest = Guest::new(&vm, 0);
    guest.write(0, 1);
    let rom = SlotConfig { read_only: true, ..at(0, BLOCK) };
    assert_eq!(vm.change_slot(&mut worker, 0, rom), Ok(SlotChange::Flags));
    let fault = guest.cpu.write(Gpa(0), 2).unwrap_err();
    assert!(matches!(guest.handle(fault), Exit::Mmio(_)));
    assert_eq!(guest.read(0), 1);
    assert_eq!(vm.change_slot(&mut worker, 0, at(0, BLOCK)), Ok(SlotChange::Flags));
    guest.write(0, 3);
    assert_eq!(guest.read(0), 3);
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn smaller_leaves_are_wanted_from_the_next_fault_on() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, 2 * BLOCK, HUGE_2M, VmOptions::default());
    let mut guest = Guest::new(&vm, 0);
    guest.write(0, 1);
    let pages = SlotConfig { max_page_size: Some(PAGE), ..at(0, 2 * BLOCK) };
    assert_eq!(vm.change_slot(&mut worker, 0, pages), Ok(SlotChange::Flags));
    guest.write(BLOCK, 1);
    assert_eq!(level(&vm, &worker, 0), Some(2));
    assert_eq!(level(&vm, &worker, BLOCK), Some(LAST));
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn the_log_of_a_slot_moves_with_it() {
    let machine = Watched::new(1);
    for mode in [LogMode::Protect, MANUAL] {
        let (vm, mut worker) =
            vm_with_slot(&machine, 2 * BLOCK, Backing::Anonymous, VmOptions::default());
        vm.enable_log(&mut worker, 0, mode).unwrap();
        let mut guest = Guest::new(&vm, 0);
        guest.write(3 * PAGE, 1);
        assert_eq!(vm.change_slot(&mut worker, 0, at(4 * BLOCK, 2 * BLOCK)), Ok(SlotChange::Moved));
        guest.write(4 * BLOCK + 5 * PAGE, 2);
        assert_eq!(collect(&vm, &mut worker, 0, 1024), [3, 5]);
        assert!(vm.slot(&worker, 0).unwrap().logged);
        drop(guest);
        finish(vm, vec![worker]);
    }
}

#[test]
fn a_fault_that_looked_a_slot_up_before_it_moved_installs_nothing() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, BLOCK, Backing::Anonymous, VmOptions::default());
    let mut guest = Guest::new(&vm, 0);
    vm.host().once(|| {
        vm.change_slot(&mut worker, 0, at(BLOCK, BLOCK)).unwrap();
    });
    assert_eq!(guest.fault(0, Access::Write), Exit::Retry);
    assert!(matches!(guest.fault(0, Access::Write), Exit::Mmio(_)));
    assert_eq!(level(&vm, &worker, 0), None);
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn a_write_at_any_moment_of_a_move_is_in_the_log() {
    let machine = Watched::new(1);
    let mut n = 0;
    loop {
        let (vm, mut worker) =
            vm_with_slot(&machine, BLOCK, Backing::Anonymous, VmOptions::default());
        vm.enable_log(&mut worker, 0, LogMode::Protect).unwrap();
        let mut guest = Guest::new(&vm, 0);
        guest.write(0, 1);
        collect(&vm, &mut worker, 0, 512);
        let mut events: i64 = n;
        let when = move |event| {
            let counts = match event {
                // Of the empty entries of its table, which are trimmed, each is as the other.
                Event::Exchange { old, .. } => old & 1 == 1,
                Event::Pinned | Event::Unpinned | Event::GracePeriod => true,
                _ => false,
            };
            events -= i64::from(counts);
            events < 0
        };
        let mut place = None;
        machine.interrupt(when, || {
            // Wherever the slot is at this moment, if it is anywhere.
            place = [0, 4 * BLOCK].into_iter().find(|&gpa| {
                loop {
                    match guest.cpu.write(Gpa(gpa + 7 * PAGE), 7) {
                        Ok(()) => break true,
                        Err(fault) => match guest.handle(fault) {
                            Exit::Resume | Exit::Retry => {}
                            _ => break false,
                        },
                    }
                }
            });
        });
        vm.change_slot(&mut worker, 0, at(4 * BLOCK, BLOCK)).unwrap();
        let happened = machine.calm();
        let dirty = collect(&vm, &mut worker, 0, 512);
        assert!(place.is_none() || dirty.contains(&7), "moment {n}: {place:?} {dirty:?}");
        drop(guest);
        finish(vm, vec![worker]);
        if !happened {
            assert!(n > 3, "{n}");
            return;
        }
        n += 1;
    }
}

#[test]
fn address_spaces_have_slots_trees_and_translations_of_their_own() {
    let machine = Watched::new(2);
    let options = VmOptions { address_spaces: 2, ..VmOptions::default() };
    let (vm, mut worker) = vm_with_slot(&machine, 2 * BLOCK, HUGE_2M, options);
    let id = SlotId { space: 1, number: 0 };
    let other = SlotConfig { hva: Hva(BLOCK), ..at(0, BLOCK) };
    vm.create_slot(&mut worker, id, other).unwrap();
    let mut first = Guest::new(&vm, 0);
    let mut second = Guest::in_space(&vm, 1, 1);
    first.write(0, 1);
    second.write(0, 2);
    assert_eq!((first.read(0), second.read(0)), (1, 2));
    assert_eq!((first.read(BLOCK), vm.slot(&worker, id).unwrap().range), (2, range(0, BLOCK)));
    assert!(matches!(second.fault(BLOCK, Access::Read), Exit::Mmio(_)));
    // A log in one space neither protects nor reports what is written in the other.
    vm.enable_log(&mut worker, id, LogMode::Protect).unwrap();
    assert_eq!((first.write(8, 3), second.write(8, 4)), (0, 1));
    let mut bitmap = [0; 8];
    assert_eq!(vm.dirty_log(&mut worker, id, &mut bitmap), Ok(1));
    assert_eq!(vm.dirty_log(&mut worker, 0, &mut bitmap), Err(LogError::NotEnabled));
    let hpa = |space, gpa| vm.look_up_in(worker.participant(), space, Gpa(gpa), |hpa, _| hpa);
    assert_eq!(hpa(1, 0).unwrap(), hpa(0, BLOCK).unwrap());
    vm.delete_slot(&mut worker, id).unwrap();
    assert_eq!((first.read(0), level(&vm, &worker, 0)), (1, Some(2)));
    assert!(matches!(second.fault(0, Access::Read), Exit::Mmio(_)));
    let no_space = Err(SlotError::NoSpace { spaces: 2 });
    assert_eq!(vm.create_slot(&mut worker, SlotId { space: 2, number: 0 }, other), no_space);
    drop((first, second));
    finish(vm, vec![worker]);
}

#[test]
fn a_vm_that_cannot_be_so_is_refused() {
    let machine = Watched::new(1);
    let make = |identifier, options| {
        let memory = machine.model.host_memory(BLOCK, Backing::Anonymous).unwrap();
        let vm = slat_vm::Vm::new(&machine, TestHost::new(memory), arm(), identifier, options);
        vm.map(|_| ()).unwrap_err()
    };
    let spaces = |address_spaces| VmOptions { address_spaces, ..VmOptions::default() };
    assert_eq!(make(1, spaces(0)), VmError::AddressSpaces(0));
    assert_eq!(make(1, spaces(65)), VmError::AddressSpaces(65));
    assert_eq!(make(u16::MAX, spaces(2)), VmError::AddressSpaces(2));
    let around = |fault_around| VmOptions { fault_around, ..VmOptions::default() };
    for pages in [0, 3, 1024] {
        let refused = VmError::FaultAround { pages, largest: 512 };
        assert_eq!(make(1, around(pages)), refused);
    }
    for entries in [0, 255, 300, 1 << 17] {
        let options = VmOptions { dirty_ring: Some(entries), ..VmOptions::default() };
        assert_eq!(make(1, options), VmError::DirtyRing(entries));
    }
}

#[test]
fn what_a_collection_took_of_a_log_that_moved_meanwhile_is_reported_again() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, BLOCK, Backing::Anonymous, VmOptions::default());
    let mut other = vm.worker().unwrap();
    vm.enable_log(&mut worker, 0, LogMode::Protect).unwrap();
    let mut guest = Guest::new(&vm, 0);
    guest.write(PAGE, 1);
    let (vm_ref, who) = (&vm, &mut other);
    machine.interrupt(
        |event| event == Event::Begin,
        move || _ = vm_ref.change_slot(who, 0, at(BLOCK, BLOCK)).unwrap(),
    );
    // What the caller had in its bitmap before is not taken for dirty pages.
    assert_eq!(vm.dirty_log(&mut worker, 0, &mut [u64::MAX; 8]), Err(LogError::Gone));
    assert!(machine.calm());
    assert_eq!(collect(&vm, &mut worker, 0, 512), [1]);
    drop(guest);
    finish(vm, vec![worker, other]);
}
