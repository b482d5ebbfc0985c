//! The dirty log: no write is lost, and nothing is asked of the guest that is not needed.

mod guest;

use guest::*;
use slat::{Event, Gpa};
use slat_model::Backing;
use slat_vm::{Access, Exit, Hva, LogError, LogMode, SlotConfig, VmOptions};

const ALL_SET: LogMode = LogMode::Manual { initially_all_set: true };
const MANUAL: LogMode = LogMode::Manual { initially_all_set: false };

#[test]
fn protect_mode_reports_each_written_page_once_and_protects_it_again() {
    let machine = Watched::new(1);
    let (vm, mut worker) =
        vm_with_slot(&machine, 4 * BLOCK, Backing::Anonymous, VmOptions::default());
    let mut guest = Guest::new(&vm, 0);
    let pages = 4 * BLOCK / PAGE;
    for page in 0..pages {
        guest.write(page * PAGE, page);
    }
    vm.enable_log(&mut worker, 0, LogMode::Protect).unwrap();
    assert_eq!(collect(&vm, &mut worker, 0, pages), NONE);
    let written = [0, 1, 63, 64, 511, 512, 1000, pages - 1];
    for page in written {
        assert_eq!(guest.write(page * PAGE, 7), 1);
        assert_eq!(guest.write(page * PAGE, 8), 0);
        guest.read((page ^ 2) * PAGE);
    }
    assert_eq!(guest.vcpu.statistics().marked, 8);
    assert_eq!(collect(&vm, &mut worker, 0, pages), written);
    assert_eq!(collect(&vm, &mut worker, 0, pages), NONE);
    assert_eq!(guest.write(0, 9), 1);
    assert_eq!(collect(&vm, &mut worker, 0, pages), [0]);
    vm.disable_log(&mut worker, 0).unwrap();
    assert_eq!(vm.dirty_log(&mut worker, 0, &mut []), Err(LogError::NotEnabled));
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn a_page_that_is_only_read_under_a_log_stays_read_only_and_clean() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, BLOCK, HUGE_2M, VmOptions::default());
    vm.enable_log(&mut worker, 0, LogMode::Protect).unwrap();
    let mut guest = Guest::new(&vm, 0);
    guest.read(3 * PAGE);
    guest.execute(4 * PAGE);
    assert_eq!(found(&vm, &worker, 3 * PAGE).map(|f| (f.level, f.write)), Some((LAST, false)));
    assert!(!writable(&vm, &worker, 4 * PAGE));
    assert_eq!(collect(&vm, &mut worker, 0, 512), NONE);
    guest.write(3 * PAGE, 1);
    assert_eq!(collect(&vm, &mut worker, 0, 512), [3]);
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn one_write_to_a_read_only_block_makes_one_page_writable_in_one_fault() {
    let machine = Watched::new(1);
    for (backing, level) in [(HUGE_2M, 2), (HUGE_1G, 1)] {
        let (vm, mut worker) = vm_with_slot(&machine, GIB, backing, VmOptions::default());
        let mut guest = Guest::new(&vm, 0);
        guest.write(0, 1);
        vm.enable_log(&mut worker, 0, LogMode::Protect).unwrap();
        assert_eq!(found(&vm, &worker, 0).map(|f| (f.level, f.write)), Some((level, false)));
        assert_eq!(guest.write(5 * PAGE, 1), 1);
        for page in 0..512 {
            let at = found(&vm, &worker, page * PAGE).unwrap();
            assert_eq!((at.level, at.write), (LAST, page == 5));
        }
        assert_eq!(collect(&vm, &mut worker, 0, GIB / PAGE), [5]);
        drop(guest);
        finish(vm, vec![worker]);
    }
}

#[test]
fn a_fault_that_finds_the_page_writable_marks_it_too() {
    let machine = Watched::new(2);
    let (vm, mut worker) = vm_with_slot(&machine, BLOCK, Backing::Anonymous, VmOptions::default());
    let (mut first, mut second) = (Guest::new(&vm, 0), Guest::new(&vm, 1));
    vm.enable_log(&mut worker, 0, LogMode::Protect).unwrap();
    second.read(PAGE);
    let (vm_ref, worker_ref, second_ref) = (&vm, &mut worker, &mut second);
    // The first has just made the entry writable, and not marked it yet.
    machine.interrupt(
        |event| matches!(event, Event::Exchange { done: true, .. }),
        move || {
            second_ref.write(PAGE, 2);
            assert_eq!(collect(vm_ref, worker_ref, 0, 512), [1]);
        },
    );
    first.write(PAGE, 1);
    assert!(machine.calm());
    assert_eq!(collect(&vm, &mut worker, 0, 512), [1]);
    drop((first, second));
    finish(vm, vec![worker]);
}

#[test]
fn eager_split_at_enable_leaves_no_block_and_changes_no_translation() {
    let machine = Watched::new(1);
    for chunk in [BLOCK, GIB] {
        let (vm, mut worker) = vm_with_slot(&machine, GIB, HUGE_2M, eager(chunk));
        let mut guest = Guest::new(&vm, 0);
        for block in 0..64 {
            guest.write(block * BLOCK + 8 * block, block + 1);
        }
        vm.enable_log(&mut worker, 0, LogMode::Protect).unwrap();
        assert_eq!(worker.statistics().eager_splits, 64);
        for block in 0..64 {
            let at = found(&vm, &worker, block * BLOCK).unwrap();
            assert_eq!((at.level, at.write), (LAST, false));
            assert_eq!(guest.cpu.read(Gpa(block * BLOCK + 8 * block)), Ok(block + 1));
        }
        drop(guest);
        finish(vm, vec![worker]);
    }
}

#[test]
fn one_stretch_of_written_pages_costs_one_invalidation() {
    let machine = Watched::new(1);
    let (vm, mut worker) =
        vm_with_slot(&machine, 16 * BLOCK, Backing::Anonymous, VmOptions::default());
    let mut guest = Guest::new(&vm, 0);
    let pages = 16 * BLOCK / PAGE;
    vm.enable_log(&mut worker, 0, LogMode::Protect).unwrap();
    for page in 0..pages {
        guest.write(page * PAGE, page);
    }
    let before = worker.participant().counters.invalidations.get();
    assert_eq!(collect(&vm, &mut worker, 0, pages).len() as u64, pages);
    assert_eq!(worker.participant().counters.invalidations.get(), before + 1);
    // Two pages far from each other: two stretches. Near each other: one.
    guest.write(0, 1);
    guest.write((pages - 1) * PAGE, 1);
    assert_eq!(collect(&vm, &mut worker, 0, pages), [0, pages - 1]);
    assert_eq!(worker.participant().counters.invalidations.get(), before + 3);
    guest.write(0, 1);
    guest.write(1000 * PAGE, 1);
    assert_eq!(collect(&vm, &mut worker, 0, pages), [0, 1000]);
    assert_eq!(worker.participant().counters.invalidations.get(), before + 4);
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn a_slot_that_stops_logging_collapses_again_but_never_beyond_its_ends() {
    let machine = Watched::new(1);
    let vm = vm(&machine, 8 * BLOCK, HUGE_2M, VmOptions::default());
    let mut worker = vm.worker().unwrap();
    let (start, size) = (BLOCK / 2, 2 * BLOCK);
    vm.create_slot(&mut worker, 0, SlotConfig::new(Gpa(start), size, Hva(start))).unwrap();
    let mut guest = Guest::new(&vm, 0);
    let tables = |round| {
        let _ = round;
        machine.model.counters().tables_in_use
    };
    guest.write(BLOCK, 1);
    guest.write(start, 1);
    guest.write(start + size - PAGE, 1);
    let mut before = None;
    for round in 0..100 {
        vm.enable_log(&mut worker, 0, LogMode::Protect).unwrap();
        guest.write(BLOCK + 9 * PAGE, round);
        guest.write(start, round);
        assert_eq!(level(&vm, &worker, BLOCK), Some(LAST));
        vm.disable_log(&mut worker, 0).unwrap();
        guest.write(BLOCK + 11 * PAGE, round);
        guest.write(start + PAGE, round);
        guest.write(start + size - PAGE, round);
        assert_eq!(found(&vm, &worker, BLOCK).map(|f| (f.level, f.write)), Some((2, true)));
        for gpa in [start, start + PAGE, start + size - PAGE] {
            assert_eq!(level(&vm, &worker, gpa), Some(LAST));
        }
        assert_eq!(level(&vm, &worker, start - PAGE), None);
        vm.tree().reclaim(worker.parts().0);
        let now = tables(round);
        assert_eq!(*before.get_or_insert(now), now, "round {round}");
    }
    assert!(guest.vcpu.statistics().collapsed >= 100);
    assert_eq!(guest.cpu.read(Gpa(BLOCK + 9 * PAGE)), Ok(99));
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn an_executable_page_becomes_part_of_a_block_that_is_not_executable_until_it_is_synced() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, 2 * BLOCK, HUGE_2M, VmOptions::default());
    let mut guest = Guest::new(&vm, 0);
    vm.enable_log(&mut worker, 0, LogMode::Protect).unwrap();
    guest.execute(3 * PAGE);
    let page = found(&vm, &worker, 3 * PAGE).unwrap();
    assert!(page.execute && page.level == LAST);
    assert_eq!(*machine.synced.lock().unwrap(), [(slat::Hpa(page.output), PAGE)]);
    vm.disable_log(&mut worker, 0).unwrap();
    guest.write(4 * PAGE, 1);
    let block = found(&vm, &worker, 0).unwrap();
    assert_eq!((block.level, block.execute), (2, false));
    // The rest of the block became visible to the guest: cleaned as a whole.
    assert_eq!(machine.cleaned.lock().unwrap().last(), Some(&(slat::Hpa(block.output), BLOCK)));
    assert_eq!(machine.synced.lock().unwrap().len(), 1);
    guest.execute(3 * PAGE);
    assert!(found(&vm, &worker, 0).unwrap().execute);
    assert_eq!(machine.synced.lock().unwrap().last(), Some(&(slat::Hpa(block.output), BLOCK)));
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn a_read_only_slot_has_a_log_that_stays_empty_and_keeps_its_blocks() {
    let machine = Watched::new(1);
    let vm = vm(&machine, BLOCK, HUGE_2M, VmOptions::default());
    let mut worker = vm.worker().unwrap();
    let config = SlotConfig { read_only: true, ..SlotConfig::new(Gpa(0), BLOCK, Hva(0)) };
    vm.create_slot(&mut worker, 0, config).unwrap();
    let mut guest = Guest::new(&vm, 0);
    vm.enable_log(&mut worker, 0, ALL_SET).unwrap();
    guest.read(0);
    assert_eq!(level(&vm, &worker, 0), Some(2));
    assert!(matches!(guest.fault(0, Access::Write), Exit::Mmio(_)));
    assert_eq!(collect(&vm, &mut worker, 0, 512), NONE);
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn what_cannot_be_asked_of_a_log_is_refused() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, BLOCK, HUGE_2M, VmOptions::default());
    assert_eq!(vm.enable_log(&mut worker, 1, LogMode::Protect), Err(LogError::NoSlot));
    assert_eq!(vm.disable_log(&mut worker, 1), Err(LogError::NoSlot));
    assert_eq!(vm.disable_log(&mut worker, 0), Err(LogError::NotEnabled));
    assert_eq!(vm.dirty_log(&mut worker, 1, &mut [0; 8]), Err(LogError::NoSlot));
    assert_eq!(vm.clear_dirty_log(&mut worker, 0, 0, 64, &[1]), Err(LogError::NotEnabled));
    vm.enable_log(&mut worker, 0, LogMode::Protect).unwrap();
    assert_eq!(vm.enable_log(&mut worker, 0, MANUAL), Err(LogError::Enabled));
    assert_eq!(vm.slot(&worker, 0).map(|slot| slot.logged), Some(true));
    vm.delete_slot(&mut worker, 0).unwrap();
    assert_eq!(vm.dirty_log(&mut worker, 0, &mut [0; 8]), Err(LogError::NoSlot));
    finish(vm, vec![worker]);
}

#[test]
fn a_write_between_taking_the_bits_and_protecting_the_pages_is_not_lost() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, BLOCK, Backing::Anonymous, VmOptions::default());
    let mut guest = Guest::new(&vm, 0);
    vm.enable_log(&mut worker, 0, LogMode::Protect).unwrap();
    guest.write(PAGE, 1);
    // The first write-protecting operation begins after the bits were taken.
    let when = |event| event == Event::Begin;
    let guest_ref = &mut guest;
    machine.interrupt(when, move || {
        // To a page that is still writable: the content of the page that is copied after the collection.
        guest_ref.cpu.write(Gpa(PAGE), 2).unwrap();
        // To a page that is not.
        guest_ref.write(2 * PAGE, 2);
    });
    let first = collect(&vm, &mut worker, 0, 512);
    assert!(machine.calm());
    assert_eq!(first, [1]);
    assert!(!writable(&vm, &worker, PAGE));
    assert_eq!(guest.write(PAGE, 3), 1);
    let second = collect(&vm, &mut worker, 0, 512);
    assert!(second.contains(&1) && second.contains(&2));
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn a_collection_protects_what_another_has_taken_and_not_yet_protected() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, BLOCK, Backing::Anonymous, VmOptions::default());
    let mut other = vm.worker().unwrap();
    let mut guest = Guest::new(&vm, 0);
    vm.enable_log(&mut worker, 0, LogMode::Protect).unwrap();
    guest.write(PAGE, 1);
    let (vm_ref, other_ref) = (&vm, &mut other);
    machine.interrupt(
        |event| event == Event::Begin,
        move || {
            assert_eq!(collect(vm_ref, other_ref, 0, 512), NONE);
            // It has returned: the page has no bit, so it must not be writable.
            assert!(!writable(vm_ref, other_ref, PAGE));
        },
    );
    assert_eq!(collect(&vm, &mut worker, 0, 512), [1]);
    assert!(machine.calm());
    drop(guest);
    finish(vm, vec![worker, other]);
}

#[test]
fn a_fault_that_read_log_off_installs_nothing_once_the_log_is_on() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, BLOCK, HUGE_2M, VmOptions::default());
    let mut guest = Guest::new(&vm, 0);
    vm.host().once(|| vm.enable_log(&mut worker, 0, LogMode::Protect).unwrap());
    assert_eq!(guest.fault(PAGE, Access::Write), Exit::Retry);
    assert_eq!(level(&vm, &worker, PAGE), None);
    assert_eq!(collect(&vm, &mut worker, 0, 512), NONE);
    guest.write(PAGE, 1);
    assert_eq!(level(&vm, &worker, PAGE), Some(LAST));
    assert_eq!(collect(&vm, &mut worker, 0, 512), [1]);
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn a_fault_that_fails_or_retries_marks_nothing() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, BLOCK, Backing::Anonymous, VmOptions::default());
    let mut guest = Guest::new(&vm, 0);
    vm.enable_log(&mut worker, 0, LogMode::Protect).unwrap();
    machine.model.fail_after(0);
    let fault = guest.cpu.write(Gpa(PAGE), 1).unwrap_err();
    let result = guest.vcpu.fault(&vm, translate(fault));
    assert!(matches!(result, Err(slat_vm::FaultError::NoMemory(_))), "{result:?}");
    machine.model.stop_failing();
    let mut other = vm.worker().unwrap();
    vm.host().once(|| drop(vm.invalidate_begin(&mut other, &[range(PAGE, PAGE)]).unwrap()));
    assert_eq!(guest.fault(PAGE, Access::Write), Exit::Retry);
    assert_eq!(collect(&vm, &mut worker, 0, 512), NONE);
    guest.write(PAGE, 1);
    assert_eq!(collect(&vm, &mut worker, 0, 512), [1]);
    drop(guest);
    finish(vm, vec![worker, other]);
}

#[test]
fn a_log_that_goes_away_during_a_collection_is_said_to_be_gone() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, BLOCK, Backing::Anonymous, VmOptions::default());
    let mut other = vm.worker().unwrap();
    let mut guest = Guest::new(&vm, 0);
    vm.enable_log(&mut worker, 0, LogMode::Protect).unwrap();
    guest.write(PAGE, 1);
    let (vm_ref, other_ref) = (&vm, &mut other);
    machine.interrupt(
        |event| event == Event::Begin,
        move || {
            vm_ref.disable_log(other_ref, 0).unwrap();
            vm_ref.enable_log(other_ref, 0, LogMode::Protect).unwrap();
        },
    );
    assert_eq!(vm.dirty_log(&mut worker, 0, &mut [0; 8]), Err(LogError::Gone));
    assert!(machine.calm());
    assert_eq!(collect(&vm, &mut worker, 0, 512), NONE);
    drop(guest);
    finish(vm, vec![worker, other]);
}

#[test]
fn a_write_that_only_the_log_forbids_does_not_ask_the_host() {
    let machine = Watched::new(1);
    for options in [VmOptions::default(), eager(BLOCK)] {
        let (vm, mut worker) = vm_with_slot(&machine, BLOCK, HUGE_2M, options);
        let mut guest = Guest::new(&vm, 0);
        guest.write(0, 1);
        vm.enable_log(&mut worker, 0, LogMode::Protect).unwrap();
        // Without eager split, the first write splits the block, and asks.
        guest.write(0, 2);
        vm.host().asked.lock().unwrap().clear();
        for page in 1..512 {
            assert_eq!(guest.write(page * PAGE, 3), 1);
        }
        assert_eq!(*vm.host().asked.lock().unwrap(), []);
        let fast = guest.vcpu.statistics().fast;
        assert_eq!(fast, 511 + u64::from(options.eager_split.is_some()));
        assert_eq!(collect(&vm, &mut worker, 0, 512).len(), 512);
        drop(guest);
        finish(vm, vec![worker]);
    }
}

#[test]
fn a_page_that_the_host_has_not_made_writable_is_asked_for_also_under_a_log() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, BLOCK, Backing::Anonymous, VmOptions::default());
    vm.host().alter(5 * PAGE, |page| page.writable = false);
    vm.enable_log(&mut worker, 0, LogMode::Protect).unwrap();
    let mut guest = Guest::new(&vm, 0);
    guest.read(5 * PAGE);
    vm.host().answers.lock().unwrap().clear();
    vm.host().asked.lock().unwrap().clear();
    guest.write(5 * PAGE, 1);
    assert_eq!(*vm.host().asked.lock().unwrap(), [(Hva(5 * PAGE), Access::Write)]);
    assert_eq!(guest.vcpu.statistics().fast, 0);
    assert_eq!(collect(&vm, &mut worker, 0, 512), [5]);
    drop(guest);
    finish(vm, vec![worker]);
}
