//! The host takes pages back at any moment: no stale page is ever installed or handed out, and nobody else is disturbed.

mod guest;

use std::sync::atomic::Ordering;

use guest::*;
use slat::{Event, Gpa, GpaRange, Hpa};
use slat_model::Backing;
use slat_vm::{Access, Exit, Hva, LookUpError, SlotConfig, VmOptions, Worker};

/// From now on, the host backs the page at `hva` with the page that was at `with`.
fn move_page(vm: &TestVm<'_>, hva: u64, with: u64) -> Hpa {
    let page = vm.host().natural(Hva(with)).unwrap();
    vm.host().answer(hva, Ok(page));
    page.output
}

#[test]
fn a_page_taken_back_between_the_hosts_answer_and_the_install_is_never_visible() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, BLOCK, Backing::Anonymous, VmOptions::default());
    let mut guest = Guest::new(&vm, 0);
    vm.host().once(|| {
        let guard = vm.invalidate_begin(&mut worker, &[range(PAGE, PAGE)]).unwrap();
        move_page(&vm, PAGE, 100 * PAGE);
        guard.end();
    });
    assert_eq!(guest.fault(PAGE, Access::Write), Exit::Retry);
    assert_eq!(found(&vm, &worker, PAGE), None);
    let output = vm.host().natural(Hva(100 * PAGE)).unwrap().output.0;
    guest.write(PAGE, 1);
    assert_eq!(found(&vm, &worker, PAGE).unwrap().output, output);
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn an_answer_from_during_an_invalidation_is_not_used_after_its_end() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, BLOCK, Backing::Anonymous, VmOptions::default());
    let mut guest = Guest::new(&vm, 0);
    let guard = vm.invalidate_begin(&mut worker, &[range(PAGE, PAGE)]).unwrap();
    // The fault samples now, the host answers the old page, and then the invalidation ends.
    vm.host().once(|| {
        move_page(&vm, PAGE, 100 * PAGE);
        drop(guard);
    });
    assert_eq!(guest.fault(PAGE, Access::Write), Exit::Retry);
    assert_eq!(found(&vm, &worker, PAGE), None);
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn faults_in_a_range_in_progress_retry_and_all_others_go_on() {
    let machine = Watched::new(1);
    let (vm, mut worker) =
        vm_with_slot(&machine, 4 * BLOCK, Backing::Anonymous, VmOptions::default());
    let mut guest = Guest::new(&vm, 0);
    guest.write(10 * PAGE, 5);
    let ranges = [range(10 * PAGE, 2 * PAGE), range(BLOCK + 8, 16)];
    let guard = vm.invalidate_begin(&mut worker, &ranges).unwrap();
    assert!(guest.cpu.read(Gpa(10 * PAGE)).is_err());
    for (page, expected) in [
        (9, Exit::Resume),
        (10, Exit::Retry),
        (11, Exit::Retry),
        (12, Exit::Resume),
        (511, Exit::Resume),
        // Ranges are widened to whole pages.
        (512, Exit::Retry),
        (513, Exit::Resume),
    ] {
        assert_eq!(guest.fault(page * PAGE, Access::Write), expected, "{page}");
    }
    drop(guard);
    assert_eq!(guest.read(10 * PAGE), 5);
    assert_eq!(guest.vcpu.statistics().retried, 3);
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn invalidations_nest_and_overlap_and_end_in_any_order() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, BLOCK, Backing::Anonymous, VmOptions::default());
    let mut guest = Guest::new(&vm, 0);
    let mut exits = |pages: &[u64]| -> Vec<bool> {
        let resumes = |&page: &u64| guest.fault(page * PAGE, Access::Read) == Exit::Resume;
        pages.iter().map(resumes).collect()
    };
    let first = vm.invalidate_begin(&mut worker, &[range(0, 4 * PAGE)]).unwrap();
    let second = vm.invalidate_begin(&mut worker, &[range(2 * PAGE, 4 * PAGE)]).unwrap();
    let third = vm.invalidate_begin(&mut worker, &[range(3 * PAGE, PAGE)]).unwrap();
    let empty = vm.invalidate_begin(&mut worker, &[]).unwrap();
    assert_eq!(exits(&[0, 2, 3, 5, 6]), [false, false, false, false, true]);
    drop(first);
    assert_eq!(exits(&[0, 2, 3, 5]), [true, false, false, false]);
    drop(empty);
    drop(second);
    assert_eq!(exits(&[2, 3, 5]), [true, false, true]);
    drop(third);
    assert_eq!(exits(&[3]), [true]);
    drop(guest);
    finish(vm, vec![worker]);
}

fn storm<'m>(vm: &TestVm<'m>, worker: &mut Worker<'m, Watched>, times: u64) {
    for _ in 0..times {
        vm.invalidate_begin(worker, &[range(100 * PAGE, PAGE)]).unwrap().end();
    }
}

#[test]
fn a_storm_of_invalidations_elsewhere_neither_retries_nor_starves_a_fault() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, BLOCK, Backing::Anonymous, VmOptions::default());
    let mut guest = Guest::new(&vm, 0);
    for page in 0..50 {
        vm.host().once(|| storm(&vm, &mut worker, 32));
        assert_eq!(guest.fault(page * PAGE, Access::Write), Exit::Resume);
    }
    // More than are remembered: once more, and no more than that.
    vm.host().once(|| storm(&vm, &mut worker, 33));
    assert_eq!(guest.fault(50 * PAGE, Access::Write), Exit::Retry);
    assert_eq!(guest.fault(50 * PAGE, Access::Write), Exit::Resume);
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn many_ranges_at_once_and_many_invalidations_at_once_miss_nothing() {
    let machine = Watched::new(1);
    let (vm, mut worker) =
        vm_with_slot(&machine, 4 * BLOCK, Backing::Anonymous, VmOptions::default());
    let mut guest = Guest::new(&vm, 0);
    for page in 0..200 {
        guest.write(page * PAGE, page);
    }
    // Every second page, more of them than are listed one by one.
    let ranges: Vec<GpaRange> = (0..50).map(|n| range(2 * n * PAGE, PAGE)).collect();
    let guard = vm.invalidate_begin(&mut worker, &ranges).unwrap();
    for page in 0..100 {
        assert_eq!(guest.cpu.read(Gpa(page * PAGE)).is_ok(), page % 2 == 1);
        if page % 2 == 0 {
            assert_eq!(guest.fault(page * PAGE, Access::Read), Exit::Retry);
        }
    }
    assert_eq!(guest.fault(300 * PAGE, Access::Read), Exit::Resume);
    vm.host().once(|| drop(guard));
    assert_eq!(guest.fault(98 * PAGE, Access::Read), Exit::Retry);
    assert_eq!(guest.fault(98 * PAGE, Access::Read), Exit::Resume);

    // More invalidations than have a place in the list.
    let guards: Vec<_> = (100..170)
        .map(|page| vm.invalidate_begin(&mut worker, &[range(page * PAGE, PAGE)]).unwrap())
        .collect();
    for page in 100..170 {
        assert_eq!(guest.fault(page * PAGE, Access::Read), Exit::Retry);
    }
    vm.host().once(|| drop(guards));
    assert_eq!(guest.fault(169 * PAGE, Access::Read), Exit::Retry);
    for page in 100..170 {
        assert_eq!(guest.read(page * PAGE), page);
    }
    assert_eq!(guest.fault(301 * PAGE, Access::Read), Exit::Resume);
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn an_invalidation_of_two_gibibytes_needs_no_memory() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, 2 * GIB, HUGE_1G, VmOptions::default());
    let mut guest = Guest::new(&vm, 0);
    guest.write(0, 1);
    guest.write(GIB, 1);
    machine.model.fail_after(0);
    let before = machine.model.counters().tables_allocated;
    drop(vm.invalidate_begin(&mut worker, &[range(0, 2 * GIB)]).unwrap());
    guest.write(0, 1);
    // One page of a block: the block goes as a whole, and faults back.
    let guard = vm.invalidate_begin(&mut worker, &[range(5 * PAGE, PAGE)]).unwrap();
    assert_eq!(machine.model.counters().tables_allocated, before);
    machine.model.stop_failing();
    assert_eq!(level(&vm, &worker, 0), None);
    // While that page is in progress, the others of the host's page are mapped one by one.
    assert_eq!(guest.write(6 * PAGE, 1), 1);
    assert_eq!(level(&vm, &worker, 6 * PAGE), Some(LAST));
    assert_eq!(guest.fault(5 * PAGE, Access::Read), Exit::Retry);
    drop(guard);
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn ranges_beyond_the_guests_addresses_are_cut() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, BLOCK, HUGE_2M, VmOptions::default());
    let limit = 1 << 40;
    for range in [
        GpaRange::new(Gpa(limit), PAGE).unwrap(),
        GpaRange::new(Gpa(limit - 1), u64::MAX - limit).unwrap(),
        GpaRange::new(Gpa(u64::MAX - 1), 1).unwrap(),
        GpaRange::new(Gpa(0), u64::MAX).unwrap(),
    ] {
        drop(vm.invalidate_begin(&mut worker, &[range]).unwrap());
    }
    finish(vm, vec![worker]);
}

#[test]
fn a_look_up_between_the_grace_period_and_the_unmap_hands_out_nothing() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, BLOCK, Backing::Anonymous, VmOptions::default());
    let other = vm.worker().unwrap();
    let mut guest = Guest::new(&vm, 0);
    guest.write(PAGE, 77);
    let who = other.participant();
    let look = |gpa| vm.look_up(who, Gpa(gpa), |output, write| (output, write));
    let output = vm.host().natural(Hva(PAGE)).unwrap().output;
    assert_eq!(look(PAGE + 24), Ok((Hpa(output.0 + 24), true)));
    let word = machine.model.host_word(output).unwrap();
    assert_eq!(word.load(Ordering::Relaxed), 77);
    let seen = std::sync::Mutex::new(None);
    let (vm_ref, seen_ref, other_ref) = (&vm, &seen, std::sync::Mutex::new(vm.worker().unwrap()));
    machine.interrupt(
        |event| event == Event::GracePeriod,
        || {
            let other = other_ref.lock().unwrap();
            let mapped = found(vm_ref, &other, PAGE).is_some();
            let result = vm_ref.look_up(other.participant(), Gpa(PAGE), |_, _| ());
            *seen_ref.lock().unwrap() = Some((mapped, result));
        },
    );
    let guard = vm.invalidate_begin(&mut worker, &[range(PAGE, PAGE)]).unwrap();
    assert!(machine.calm());
    assert_eq!(*seen.lock().unwrap(), Some((true, Err(LookUpError::Retry))));
    assert_eq!(look(PAGE), Err(LookUpError::NotMapped));
    drop(guard);
    assert_eq!(look(1 << 40), Err(LookUpError::OutOfRange { limit: Gpa(1 << 40) }));
    drop((guest, other_ref));
    finish(vm, vec![worker, other]);
}

#[test]
fn a_fault_between_the_grace_period_and_the_unmap_installs_nothing() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, BLOCK, Backing::Anonymous, VmOptions::default());
    let mut guest = Guest::new(&vm, 0);
    machine.interrupt(
        |event| event == Event::GracePeriod,
        || assert_eq!(guest.fault(PAGE, Access::Write), Exit::Retry),
    );
    let guard = vm.invalidate_begin(&mut worker, &[range(PAGE, PAGE)]).unwrap();
    assert!(machine.calm());
    assert_eq!(found(&vm, &worker, PAGE), None);
    drop(guard);
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn unmapping_one_page_of_a_block_exactly_keeps_the_other_511() {
    // As a device that was handed the block needs it. The host's own invalidations take whole blocks.
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, BLOCK, HUGE_2M, VmOptions::default());
    let mut guest = Guest::new(&vm, 0);
    guest.write(0, 1);
    let (who, reserve) = worker.parts();
    reserve.top_up(1).unwrap();
    vm.tree().unmap(who, reserve, range(5 * PAGE, PAGE), slat::Edges::Exact, |_| {}).unwrap();
    for page in 0..512 {
        assert_eq!(guest.cpu.read(Gpa(page * PAGE)).is_ok(), page != 5);
    }
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn two_slots_with_the_same_memory_see_each_others_writes() {
    let machine = Watched::new(1);
    let vm = vm(&machine, BLOCK, HUGE_2M, VmOptions::default());
    let mut worker = vm.worker().unwrap();
    for id in 0..2 {
        let gpa = Gpa(u64::from(id) * GIB);
        vm.create_slot(&mut worker, id, SlotConfig::new(gpa, BLOCK, Hva(0))).unwrap();
    }
    let mut guest = Guest::new(&vm, 0);
    guest.write(8, 3);
    assert_eq!(guest.read(GIB + 8), 3);
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn without_coherent_data_unmapping_a_normal_page_cleans_exactly_that_page() {
    let machine = Watched::new(1);
    for coherent_data in [false, true] {
        let options = VmOptions { coherent_data, ..VmOptions::default() };
        let (vm, mut worker) = vm_with_slot(&machine, 4 * BLOCK, Backing::Anonymous, options);
        vm.host().alter(6 * PAGE, |page| page.device = true);
        let mut guest = Guest::new(&vm, 0);
        for page in [5, 6, 7] {
            guest.write(page * PAGE, 1);
        }
        let outputs: Vec<_> =
            [5, 7].map(|page| found(&vm, &worker, page * PAGE).unwrap().output).into();
        machine.cleaned.lock().unwrap().clear();
        vm.invalidate_begin(&mut worker, &[range(5 * PAGE, PAGE)]).unwrap().end();
        let cleaned = || std::mem::take(&mut *machine.cleaned.lock().unwrap());
        let page = |output| vec![(Hpa(output), PAGE)];
        let expected = |output| if coherent_data { vec![] } else { page(output) };
        assert_eq!(cleaned(), expected(outputs[0]));
        vm.invalidate_begin(&mut worker, &[range(6 * PAGE, PAGE)]).unwrap().end();
        assert_eq!(cleaned(), [], "device registers have no cache lines");
        vm.delete_slot(&mut worker, 0).unwrap();
        assert_eq!(cleaned(), expected(outputs[1]));
        drop(guest);
        finish(vm, vec![worker]);
    }
}
