//! One participant's operation, interrupted at each of its steps by another's: whatever the moment, no promise breaks.
//!
//! What interrupts runs as on another CPU while the first stands still, pinned or not. It must not wait for the first,
//! so it asks for no grace period.

mod guest;

use std::sync::{Arc, Mutex};

use guest::*;
use slat::{Event, Gpa};
use slat_model::Backing;
use slat_vm::{Exit, LogMode, VmOptions, Worker};

/// The n-th event.
fn at(n: u64) -> impl FnMut(Event) -> bool + Send {
    let mut left = n;
    move |_| {
        let now = left == 0;
        left = left.saturating_sub(1);
        now
    }
}

/// Runs `scene` for each of the first events of the operation in it, and for ever fewer of those that follow, which are
/// one entry like the other: `scene(n)` interrupts at the n-th, and says whether there was one.
fn at_each_moment(mut scene: impl FnMut(u64) -> bool) {
    let mut n = 0;
    while scene(n) {
        n += 1 + n / 40;
    }
    assert!(n > 5, "{n}");
}

/// What the memory says, and what the guest is told that it says, must agree.
fn check_reported(
    vm: &TestVm<'_>,
    worker: &Worker<'_, Watched>,
    page: u64,
    taken: &[u64],
    marked: &[u64],
) {
    let reported = taken.contains(&page) || marked.contains(&page);
    assert!(reported, "page {page} was written and never reported");
    assert!(marked.contains(&page) || !writable(vm, worker, page * PAGE), "page {page}");
}

#[test]
fn a_collection_at_any_moment_of_a_fault_loses_no_write() {
    for (backing, warm) in
        [(Backing::Anonymous, false), (Backing::Anonymous, true), (HUGE_2M, true)]
    {
        at_each_moment(|n| {
            let machine = Watched::new(1);
            let (vm, mut worker) = vm_with_slot(&machine, BLOCK, backing, VmOptions::default());
            let mut guest = Guest::new(&vm, 0);
            if warm {
                guest.write(PAGE, 1);
            }
            vm.enable_log(&mut worker, 0, LogMode::Protect).unwrap();
            let collected = Arc::new(Mutex::new(None));
            let fault = guest.cpu.write(Gpa(PAGE), 2).unwrap_err();
            let (vm_ref, worker_ref, result) = (&vm, &mut worker, collected.clone());
            machine.interrupt(at(n), move || {
                *result.lock().unwrap() = Some(collect(vm_ref, worker_ref, 0, 512));
            });
            let exit = guest.handle(fault);
            let happened = machine.calm();
            assert!(matches!(exit, Exit::Resume | Exit::Retry));
            guest.write(PAGE, 2);
            let first = collected.lock().unwrap().take().unwrap_or_default();
            let left = collect(&vm, &mut worker, 0, 512);
            // The write came after the first collection: the second has it.
            assert_eq!(left, [1], "moment {n}, the first had {first:?}");
            assert!(!writable(&vm, &worker, PAGE));
            drop(guest);
            finish(vm, vec![worker]);
            happened
        });
    }
}

#[test]
fn a_write_at_any_moment_of_a_collection_is_in_this_one_or_the_next() {
    for (mode, backing) in [
        (LogMode::Protect, Backing::Anonymous),
        (LogMode::Manual { initially_all_set: false }, Backing::Anonymous),
        (LogMode::Manual { initially_all_set: true }, HUGE_2M),
    ] {
        at_each_moment(|n| {
            let machine = Watched::new(1);
            let (vm, mut worker) = vm_with_slot(&machine, BLOCK, backing, VmOptions::default());
            let mut guest = Guest::new(&vm, 0);
            guest.write(8, 1);
            vm.enable_log(&mut worker, 0, mode).unwrap();
            // One page that is written before and during, one that is written during.
            guest.write(PAGE, 1);
            let guest_ref = &mut guest;
            let written = Arc::new(Mutex::new(Vec::new()));
            let result = written.clone();
            machine.interrupt(at(n), move || {
                for page in [1, 70] {
                    // What is being split retries; it need not get through.
                    for _ in 0..4 {
                        match guest_ref.cpu.write(Gpa(page * PAGE), 2) {
                            Ok(()) => {
                                result.lock().unwrap().push(page);
                                break;
                            }
                            Err(fault) => drop(guest_ref.handle(fault)),
                        }
                    }
                }
            });
            let mut taken = collect(&vm, &mut worker, 0, 512);
            if mode != LogMode::Protect {
                // Only what was reported may be cleared.
                taken.retain(|page| [1, 70].contains(page));
                let mut mask = [0; 8];
                taken.iter().for_each(|page| mask[(page / 64) as usize] |= 1 << (page % 64));
                vm.clear_dirty_log(&mut worker, 0, 0, 512, &mask).unwrap();
            }
            let happened = machine.calm();
            let marked = {
                let mut bitmap = vec![0; 8];
                // Without taking: what is in the bitmap now.
                if mode == LogMode::Protect {
                    let before = writable(&vm, &worker, PAGE);
                    let marked = collect(&vm, &mut worker, 0, 512);
                    assert!(!before || marked.contains(&1));
                    marked
                } else {
                    vm.dirty_log(&mut worker, 0, &mut bitmap).unwrap();
                    (0..512)
                        .filter(|page| bitmap[page / 64] >> (page % 64) & 1 == 1)
                        .map(|p| p as u64)
                        .collect()
                }
            };
            for &page in written.lock().unwrap().iter() {
                check_reported(&vm, &worker, page, &taken, &marked);
            }
            drop(guest);
            finish(vm, vec![worker]);
            happened
        });
    }
}

#[test]
fn a_write_at_any_moment_of_enabling_a_log_is_seen_from_its_return_on() {
    for (backing, options) in [
        (Backing::Anonymous, VmOptions::default()),
        (HUGE_2M, VmOptions::default()),
        (HUGE_2M, eager(BLOCK)),
    ] {
        at_each_moment(|n| {
            let machine = Watched::new(1);
            let (vm, mut worker) = vm_with_slot(&machine, BLOCK, backing, options);
            let mut guest = Guest::new(&vm, 0);
            guest.write(PAGE, 1);
            let guest_ref = &mut guest;
            machine.interrupt(at(n), move || {
                for page in [1, 2] {
                    for _ in 0..4 {
                        match guest_ref.cpu.write(Gpa(page * PAGE), 2) {
                            Ok(()) => break,
                            Err(fault) => drop(guest_ref.handle(fault)),
                        }
                    }
                }
            });
            vm.enable_log(&mut worker, 0, LogMode::Protect).unwrap();
            let happened = machine.calm();
            let free = |page: &u64| writable(&vm, &worker, page * PAGE);
            let free: Vec<u64> = (0..512).filter(free).collect();
            let marked = collect(&vm, &mut worker, 0, 512);
            assert!(free.iter().all(|page| marked.contains(page)), "moment {n}");
            guest.write(PAGE, 3);
            guest.write(2 * PAGE, 3);
            assert_eq!(collect(&vm, &mut worker, 0, 512), [1, 2]);
            drop(guest);
            finish(vm, vec![worker]);
            happened
        });
    }
}

#[test]
fn a_fault_at_any_moment_of_an_invalidation_leaves_no_stale_page() {
    for backing in [Backing::Anonymous, HUGE_2M] {
        at_each_moment(|n| {
            let machine = Watched::new(1);
            let (vm, mut worker) = vm_with_slot(&machine, BLOCK, backing, VmOptions::default());
            let mut guest = Guest::new(&vm, 0);
            guest.write(PAGE, 1);
            let guest_ref = &mut guest;
            machine.interrupt(at(n), move || {
                for page in [1, 2] {
                    for _ in 0..4 {
                        match guest_ref.cpu.write(Gpa(page * PAGE), 2) {
                            Ok(()) => break,
                            Err(fault) => drop(guest_ref.handle(fault)),
                        }
                    }
                }
            });
            let guard = vm.invalidate_begin(&mut worker, &[range(PAGE, PAGE)]).unwrap();
            let happened = machine.calm();
            assert_eq!(found(&vm, &worker, PAGE), None, "moment {n}");
            assert!(guest.cpu.read(Gpa(PAGE)).is_err(), "moment {n}");
            drop(guard);
            drop(guest);
            finish(vm, vec![worker]);
            happened
        });
    }
}

#[test]
fn a_fault_at_any_moment_of_deleting_a_slot_leaves_nothing_behind() {
    at_each_moment(|n| {
        let machine = Watched::new(1);
        let (vm, mut worker) = vm_with_slot(&machine, BLOCK, HUGE_2M, VmOptions::default());
        let mut guest = Guest::new(&vm, 0);
        guest.write(PAGE, 1);
        let guest_ref = &mut guest;
        machine.interrupt(at(n), move || {
            for _ in 0..3 {
                match guest_ref.cpu.write(Gpa(PAGE), 2) {
                    Ok(()) => break,
                    Err(fault) => drop(guest_ref.handle(fault)),
                }
            }
        });
        vm.delete_slot(&mut worker, 0).unwrap();
        let happened = machine.calm();
        assert_eq!(found(&vm, &worker, PAGE), None, "moment {n}");
        assert!(guest.cpu.read(Gpa(PAGE)).is_err());
        drop(guest);
        finish(vm, vec![worker]);
        happened
    });
}
