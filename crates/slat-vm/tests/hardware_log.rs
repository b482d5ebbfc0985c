//! A log of the dirty state that hardware keeps: no write faults, and no write is lost.

mod guest;

use std::sync::atomic::{AtomicBool, Ordering};

use guest::*;
use slat::{Event, Gpa};
use slat_model::Backing;
use slat_vm::{Hva, LogError, LogMode, SlotChange, SlotConfig, VmOptions};

/// FEAT_HAFDBS.
fn dbm() -> Arm {
    arm().with_hardware_dirty(true)
}

fn pages_vm(
    machine: &Watched,
    size: u64,
    backing: Backing,
) -> (TestVm<'_>, slat_vm::Worker<'_, Watched>) {
    let vm = vm_of(machine, dbm(), size, backing, eager(BLOCK));
    let mut worker = vm.worker().unwrap();
    vm.create_slot(&mut worker, 0, SlotConfig::new(Gpa(0), size, Hva(0))).unwrap();
    (vm, worker)
}

#[test]
fn writes_do_not_fault_while_the_log_is_on_and_each_collection_has_those_since_the_last() {
    let machine = Watched::new(1);
    let (vm, mut worker) = pages_vm(&machine, 2 * BLOCK, HUGE_2M);
    let mut guest = Guest::new(&vm, 0);
    guest.write(0, 1);
    guest.read(BLOCK);
    vm.enable_log(&mut worker, 0, LogMode::Hardware).unwrap();
    assert_eq!(collect(&vm, &mut worker, 0, 1024), NONE);
    for page in [0, 1, 63, 64, 511, 512, 1023] {
        assert_eq!(guest.write(page * PAGE, 2), 0, "page {page}");
    }
    assert_eq!(collect(&vm, &mut worker, 0, 1024), [0, 1, 63, 64, 511, 512, 1023]);
    assert_eq!(collect(&vm, &mut worker, 0, 1024), NONE);
    assert_eq!(guest.write(64 * PAGE, 3), 0);
    assert_eq!(collect(&vm, &mut worker, 0, 1024), [64]);
    assert_eq!(guest.vcpu.statistics().marked, 0);
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn a_page_that_is_first_read_under_the_log_is_written_without_another_fault() {
    let machine = Watched::new(1);
    let (vm, mut worker) = pages_vm(&machine, BLOCK, HUGE_2M);
    vm.enable_log(&mut worker, 0, LogMode::Hardware).unwrap();
    let mut guest = Guest::new(&vm, 0);
    guest.read(3 * PAGE);
    assert_eq!(level(&vm, &worker, 3 * PAGE), Some(LAST), "a page, though the host has a block");
    assert_eq!(guest.write(3 * PAGE, 1), 0);
    assert_eq!(collect(&vm, &mut worker, 0, 512), [3]);
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn pages_that_another_log_has_left_read_only_do_not_fault_either() {
    let machine = Watched::new(1);
    let (vm, mut worker) = pages_vm(&machine, BLOCK, HUGE_2M);
    let mut guest = Guest::new(&vm, 0);
    guest.write(0, 1);
    vm.enable_log(&mut worker, 0, LogMode::Protect).unwrap();
    vm.disable_log(&mut worker, 0).unwrap();
    vm.enable_log(&mut worker, 0, LogMode::Hardware).unwrap();
    // This CPU still has a read-only translation cached, which costs a fault at most.
    assert!(guest.write(5 * PAGE, 1) <= 1);
    guest.read(6 * PAGE);
    assert_eq!(guest.write(7 * PAGE, 1), 0);
    assert_eq!(collect(&vm, &mut worker, 0, 512), [5, 7]);
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn a_block_that_was_not_split_counts_as_written_as_a_whole_but_not_beyond_its_slot() {
    let machine = Watched::new(1);
    let vm = vm_of(&machine, dbm(), BLOCK, HUGE_2M, VmOptions::default());
    let mut worker = vm.worker().unwrap();
    vm.create_slot(&mut worker, 0, SlotConfig::new(Gpa(0), BLOCK, Hva(0))).unwrap();
    let mut guest = Guest::new(&vm, 0);
    guest.write(0, 1);
    vm.enable_log(&mut worker, 0, LogMode::Hardware).unwrap();
    guest.write(5 * PAGE, 1);
    assert_eq!(collect(&vm, &mut worker, 0, 512).len(), 512);
    assert_eq!(collect(&vm, &mut worker, 0, 512), NONE);
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn what_hardware_marked_is_in_the_log_when_the_host_has_taken_the_page_back() {
    let machine = Watched::new(1);
    let (vm, mut worker) = pages_vm(&machine, 2 * BLOCK, HUGE_2M);
    let mut guest = Guest::new(&vm, 0);
    guest.read(0);
    guest.read(BLOCK);
    vm.enable_log(&mut worker, 0, LogMode::Hardware).unwrap();
    for page in [2, 3, 700] {
        guest.write(page * PAGE, 1);
    }
    vm.invalidate_begin(&mut worker, &[range(0, 2 * BLOCK)]).unwrap().end();
    assert_eq!(level(&vm, &worker, 2 * PAGE), None);
    assert_eq!(collect(&vm, &mut worker, 0, 1024), [2, 3, 700]);
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn a_collection_at_any_moment_of_an_unmap_does_not_return_without_what_the_unmap_took() {
    let machine = Watched::new(1);
    let mut n = 0;
    loop {
        let (vm, mut worker) = pages_vm(&machine, BLOCK, Backing::Anonymous);
        let mut other = vm.worker().unwrap();
        let mut guest = Guest::new(&vm, 0);
        guest.read(4 * PAGE);
        vm.enable_log(&mut worker, 0, LogMode::Hardware).unwrap();
        guest.write(4 * PAGE, 1);
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
        // The collection waits for the unmap, so it runs beside it, and may finish after it.
        let collected = AtomicBool::new(false);
        let found = std::thread::scope(|scope| {
            let (started, start) = std::sync::mpsc::channel();
            let (vm, collected, worker) = (&vm, &collected, &mut worker);
            let collection = scope.spawn(move || {
                let _ = start.recv();
                let dirty = collect(vm, worker, 0, 512);
                collected.store(true, Ordering::SeqCst);
                dirty
            });
            machine.interrupt(when, move || {
                started.send(()).unwrap();
                // Long enough to finish if it did not wait.
                for _ in 0..200 {
                    if collected.load(Ordering::SeqCst) {
                        break;
                    }
                    std::thread::sleep(std::time::Duration::from_micros(50));
                }
            });
            vm.invalidate_begin(&mut other, &[range(0, BLOCK)]).unwrap().end();
            let happened = machine.calm();
            (collection.join().unwrap(), happened)
        });
        let (mut dirty, happened) = found;
        if !happened {
            dirty.extend(collect(&vm, &mut worker, 0, 512));
        }
        assert!(dirty.contains(&4), "moment {n}: {dirty:?}");
        drop(guest);
        finish(vm, vec![worker, other]);
        if !happened {
            assert!(n > 4, "{n}");
            return;
        }
        n += 1;
    }
}

#[test]
fn the_state_of_a_slot_that_moves_or_becomes_read_only_is_in_its_log() {
    let machine = Watched::new(1);
    let (vm, mut worker) = pages_vm(&machine, BLOCK, HUGE_2M);
    let mut guest = Guest::new(&vm, 0);
    guest.read(0);
    vm.enable_log(&mut worker, 0, LogMode::Hardware).unwrap();
    guest.write(4 * PAGE, 1);
    let moved = SlotConfig::new(Gpa(BLOCK), BLOCK, Hva(0));
    assert_eq!(vm.change_slot(&mut worker, 0, moved), Ok(SlotChange::Moved));
    guest.write(BLOCK + 6 * PAGE, 1);
    let rom = SlotConfig { read_only: true, ..moved };
    assert_eq!(vm.change_slot(&mut worker, 0, rom), Ok(SlotChange::Flags));
    assert_eq!(collect(&vm, &mut worker, 0, 512), [4, 6]);
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn other_logs_on_such_a_machine_notice_every_write_by_its_fault() {
    let machine = Watched::new(1);
    for mode in [LogMode::Protect, LogMode::Manual { initially_all_set: false }] {
        let (vm, mut worker) = pages_vm(&machine, BLOCK, HUGE_2M);
        let mut guest = Guest::new(&vm, 0);
        guest.write(0, 1);
        vm.enable_log(&mut worker, 0, mode).unwrap();
        assert_eq!(guest.write(7 * PAGE, 1), 1);
        assert_eq!(collect(&vm, &mut worker, 0, 512), [7]);
        drop(guest);
        finish(vm, vec![worker]);
    }
}

#[test]
fn without_hardware_that_keeps_dirty_state_there_is_no_such_log_and_nothing_is_cleared_in_it() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, BLOCK, HUGE_2M, VmOptions::default());
    assert_eq!(vm.enable_log(&mut worker, 0, LogMode::Hardware), Err(LogError::NoHardware));
    let (other, mut second) = pages_vm(&machine, BLOCK, HUGE_2M);
    other.enable_log(&mut second, 0, LogMode::Hardware).unwrap();
    let clear = other.clear_dirty_log(&mut second, 0, 0, 512, &[0; 8]);
    assert_eq!(clear, Err(LogError::NotManual));
    drop((other, second));
    finish(vm, vec![worker]);
}

#[test]
fn no_write_is_lost_while_the_state_is_collected_and_the_host_takes_pages_back() {
    let machine = Watched::new(2);
    let (vm, mut worker) = pages_vm(&machine, 2 * BLOCK, HUGE_2M);
    vm.enable_log(&mut worker, 0, LogMode::Hardware).unwrap();
    let running = AtomicBool::new(true);
    let word = |page| vm.host().memory.word(page * PAGE).unwrap().load(Ordering::Relaxed);
    let mut copy = vec![0_u64; 1024];
    std::thread::scope(|scope| {
        let guests: Vec<_> = (0..2)
            .map(|index| {
                let vm = &vm;
                scope.spawn(move || {
                    let mut guest = Guest::new(vm, index);
                    let mut random = index as u64 + 1;
                    for value in 1..4000 {
                        random = random.wrapping_mul(6364136223846793005).wrapping_add(1);
                        guest.write((random >> 33) % 1024 * PAGE, value << 8 | index as u64);
                    }
                })
            })
            .collect();
        let (vm, running) = (&vm, &running);
        scope.spawn(move || {
            let mut host = vm.worker().unwrap();
            let mut n = 0;
            while running.load(Ordering::Relaxed) {
                n += 1;
                let start = n * 37 % 960 * PAGE;
                vm.invalidate_begin(&mut host, &[range(start, 64 * PAGE)]).unwrap().end();
            }
        });
        let mut last = false;
        loop {
            for page in collect(vm, &mut worker, 0, 1024) {
                copy[page as usize] = word(page);
            }
            if last {
                break;
            }
            last = guests.iter().all(|guest| guest.is_finished());
        }
        running.store(false, Ordering::Relaxed);
    });
    for (page, copy) in (0..).zip(copy) {
        assert_eq!(word(page), copy, "page {page}");
    }
    finish(vm, vec![worker]);
}
