//! Dirty rings: every write is in the ring of the vCPU that makes it, once for each time the page was protected.

mod guest;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use guest::*;
use slat::Gpa;
use slat_model::Backing;
use slat_vm::{
    Access, DirtyPage, DirtyRing, Exit, Hva, LogError, LogMode, SlotConfig, SpaceError, Vcpu,
    VmOptions, Worker,
};

const RING: LogMode = LogMode::Ring { backup: false };
const BACKUP: LogMode = LogMode::Ring { backup: true };

fn rings(entries: u32) -> VmOptions {
    VmOptions { dirty_ring: Some(entries), ..VmOptions::default() }
}

fn harvest(ring: &DirtyRing) -> Vec<u64> {
    let mut pages = Vec::new();
    let count = ring.harvest(|DirtyPage { slot, page }| {
        assert_eq!(slot, 0.into());
        pages.push(page);
    });
    assert_eq!(count, pages.len() as u64);
    pages
}

#[test]
fn each_vcpu_reports_its_own_writes_in_order_and_again_after_a_reset() {
    let machine = Watched::new(2);
    let (vm, mut worker) = vm_with_slot(&machine, 2 * BLOCK, HUGE_2M, rings(256));
    let (mut one, mut two) = (Guest::new(&vm, 0), Guest::new(&vm, 1));
    one.write(0, 1);
    vm.enable_log(&mut worker, 0, RING).unwrap();
    let ring = |guest: &Guest<'_, '_>| guest.vcpu.dirty_ring().unwrap();
    let (first, second) = (ring(&one), ring(&two));
    for page in [7, 3, 700] {
        assert_eq!(one.write(page * PAGE, page), 1);
        assert_eq!(one.write(page * PAGE, page), 0);
    }
    one.read(9 * PAGE);
    // Another vCPU writes to a page that is writable already: it was reported.
    two.write(3 * PAGE, 1);
    two.write(8 * PAGE, 1);
    assert_eq!((harvest(&first), harvest(&second)), (vec![7, 3, 700], vec![8]));
    assert_eq!((harvest(&first), first.used()), (vec![], 3));
    // Harvested and not reset: still writable, and reported already.
    assert_eq!(one.write(7 * PAGE, 2), 0);
    let protected = worker.statistics().protected;
    assert_eq!(vm.reset_dirty_ring(&mut worker, &first), Ok(3));
    assert_eq!(worker.statistics().protected - protected, 3);
    assert_eq!(vm.reset_dirty_ring(&mut worker, &second), Ok(1));
    assert_eq!(vm.reset_dirty_ring(&mut worker, &second), Ok(0));
    assert_eq!(one.write(7 * PAGE, 3), 1);
    assert_eq!((harvest(&first), first.used()), (vec![7], 1));
    drop((one, two));
    finish(vm, vec![worker]);
}

#[test]
fn neighbours_are_reset_with_one_invalidation() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, 9 * BLOCK, Backing::Anonymous, rings(256));
    vm.enable_log(&mut worker, 0, RING).unwrap();
    let mut guest = Guest::new(&vm, 0);
    for page in [2100, 2101, 2163, 2110, 100, 4000, 4095, 4200] {
        guest.write(page * PAGE, 1);
    }
    let ring = guest.vcpu.dirty_ring().unwrap();
    assert_eq!(harvest(&ring).len(), 8);
    let before = worker.participant().counters.invalidations.get();
    assert_eq!(vm.reset_dirty_ring(&mut worker, &ring), Ok(8));
    // 100 to 4095, as far as 2048 from the first of them; then the last, which is farther.
    assert_eq!(worker.participant().counters.invalidations.get() - before, 2);
    for page in [2100, 2101, 2163, 2110, 100, 4000, 4095, 4200] {
        assert!(!writable(&vm, &worker, page * PAGE), "page {page}");
    }
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn a_full_ring_keeps_its_vcpu_out_of_the_guest_until_it_is_reset_and_nothing_is_lost() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, 2 * BLOCK, Backing::Anonymous, rings(256));
    vm.enable_log(&mut worker, 0, RING).unwrap();
    let mut guest = Guest::new(&vm, 0);
    let ring = guest.vcpu.dirty_ring().unwrap();
    let mut written = 0;
    while !guest.vcpu.is_ring_full() {
        let fault = guest.cpu.write(Gpa(written * PAGE), 1).unwrap_err();
        let exit = guest.handle(fault);
        written += 1;
        let full = written == 256 - 64;
        assert_eq!(exit, if full { Exit::DirtyRingFull } else { Exit::Resume });
    }
    // An embedder that does not listen: what has no place is not made writable.
    for page in written..256 {
        assert_eq!(guest.fault(page * PAGE, Access::Write), Exit::DirtyRingFull);
        assert!(writable(&vm, &worker, page * PAGE));
    }
    assert_eq!(guest.fault(256 * PAGE, Access::Write), Exit::DirtyRingFull);
    assert_eq!(level(&vm, &worker, 256 * PAGE), None);
    assert_eq!(guest.fault(256 * PAGE, Access::Read), Exit::DirtyRingFull);
    let fault = guest.cpu.write(Gpa(256 * PAGE), 1).unwrap_err();
    assert_eq!(guest.handle(fault), Exit::DirtyRingFull);
    assert!(!writable(&vm, &worker, 256 * PAGE));
    assert_eq!(guest.vcpu.statistics().ring_full, 2);
    assert_eq!(vm.reset_dirty_ring(&mut worker, &ring), Ok(0), "nothing was harvested");
    assert_eq!(harvest(&ring), (0..256).collect::<Vec<_>>());
    assert!(guest.vcpu.is_ring_full());
    assert_eq!(vm.reset_dirty_ring(&mut worker, &ring), Ok(256));
    assert!(!guest.vcpu.is_ring_full());
    guest.write(256 * PAGE, 1);
    assert_eq!(harvest(&ring), [256]);
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn what_no_vcpu_has_written_is_in_the_backup_bitmap_and_only_there() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, BLOCK, Backing::Anonymous, rings(256));
    let mut bitmap = [0; 8];
    vm.enable_log(&mut worker, 0, RING).unwrap();
    assert_eq!(vm.mark_dirty(&worker, 0, range(0, 8)), Err(LogError::Ring));
    assert_eq!(vm.dirty_log(&mut worker, 0, &mut bitmap), Err(LogError::Ring));
    assert_eq!(vm.clear_dirty_log(&mut worker, 0, 0, 512, &bitmap), Err(LogError::Ring));
    vm.disable_log(&mut worker, 0).unwrap();
    vm.enable_log(&mut worker, 0, BACKUP).unwrap();
    let mut guest = Guest::new(&vm, 0);
    guest.write(PAGE, 1);
    vm.mark_dirty(&worker, 0, range(5 * PAGE + 8, PAGE)).unwrap();
    guest.vcpu.mark_dirty(&vm, Gpa(9 * PAGE)).unwrap();
    assert_eq!(collect(&vm, &mut worker, 0, 512), [5, 6]);
    assert_eq!(collect(&vm, &mut worker, 0, 512), NONE);
    assert_eq!(harvest(&guest.vcpu.dirty_ring().unwrap()), [1, 9]);
    let nowhere = LogError::NotLogged { gpa: Gpa(BLOCK) };
    assert_eq!(vm.mark_dirty(&worker, 0, range(BLOCK - PAGE, 2 * PAGE)), Err(nowhere));
    assert_eq!(guest.vcpu.mark_dirty(&vm, Gpa(BLOCK)), Err(nowhere));
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn without_rings_there_is_no_ring_log() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, BLOCK, HUGE_2M, VmOptions::default());
    assert_eq!(vm.enable_log(&mut worker, 0, RING), Err(LogError::NoRing));
    assert!(vm.vcpu().unwrap().dirty_ring().is_none());
    finish(vm, vec![worker]);
}

#[test]
fn entries_of_a_slot_that_is_gone_or_smaller_are_given_back_and_nothing_else_is_protected() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, 2 * BLOCK, Backing::Anonymous, rings(256));
    vm.enable_log(&mut worker, 0, RING).unwrap();
    let mut guest = Guest::new(&vm, 0);
    for page in [0, 500, 700] {
        guest.write(page * PAGE, 1);
    }
    let ring = guest.vcpu.dirty_ring().unwrap();
    harvest(&ring);
    vm.delete_slot(&mut worker, 0).unwrap();
    vm.create_slot(&mut worker, 0, SlotConfig::new(Gpa(0), BLOCK, Hva(0))).unwrap();
    vm.create_slot(&mut worker, 1, SlotConfig::new(Gpa(BLOCK), BLOCK, Hva(BLOCK))).unwrap();
    vm.enable_log(&mut worker, 0, RING).unwrap();
    for page in [0, 500, 700] {
        guest.write(page * PAGE, 2);
    }
    assert_eq!(vm.reset_dirty_ring(&mut worker, &ring), Ok(3));
    let writable = |page: u64| writable(&vm, &worker, page * PAGE);
    assert_eq!([writable(0), writable(500), writable(700)], [false, false, true]);
    drop(guest);
    finish(vm, vec![worker]);
}

/// Pages that a vCPU has written, collected and reset by another thread while it runs.
fn run<'m>(vcpu: Vcpu<'m, Watched>, guest: &mut Guest<'_, 'm>, seed: u64) {
    guest.vcpu = vcpu;
    let mut random = seed;
    for value in 1..4000_u64 {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let gpa = (random >> 33) % 1024 * PAGE;
        while let Err(fault) = guest.cpu.write(Gpa(gpa), value) {
            while guest.handle(fault) == Exit::DirtyRingFull {
                std::thread::yield_now();
                if !guest.vcpu.is_ring_full() {
                    break;
                }
            }
        }
        while guest.vcpu.is_ring_full() {
            std::thread::yield_now();
        }
    }
}

#[test]
fn no_write_is_lost_while_rings_are_collected_and_reset() {
    let machine = Watched::new(2);
    let (vm, mut worker) = vm_with_slot(&machine, 2 * BLOCK, HUGE_2M, rings(256));
    vm.enable_log(&mut worker, 0, RING).unwrap();
    let vcpus = [vm.vcpu().unwrap(), vm.vcpu().unwrap()];
    let rings: Vec<_> = vcpus.iter().map(|vcpu| vcpu.dirty_ring().unwrap()).collect();
    let mut copy = vec![0_u64; 1024];
    let word = |page| vm.host().memory.word(page * PAGE).unwrap().load(Ordering::Relaxed);
    std::thread::scope(|scope| {
        let guests = (0..).zip(vcpus).map(|(index, vcpu)| {
            let vm = &vm;
            scope.spawn(move || run(vcpu, &mut Guest::new(vm, index), index as u64))
        });
        let guests: Vec<_> = guests.collect();
        let mut last = false;
        loop {
            let mut pages = Vec::new();
            for ring in &rings {
                pages.extend(harvest(ring));
                vm.reset_dirty_ring(&mut worker, ring).unwrap();
            }
            for page in pages {
                copy[page as usize] = word(page);
            }
            if last {
                break;
            }
            last = guests.iter().all(|guest| guest.is_finished());
        }
    });
    for (page, copy) in (0..).zip(copy) {
        assert_eq!(word(page), copy, "page {page}");
    }
    drop(rings);
    finish(vm, vec![worker]);
}

/// Harvests and resets, and adds up which pages that were.
fn take<'m>(
    vm: &TestVm<'m>,
    worker: &mut Worker<'m, Watched>,
    ring: &DirtyRing,
    reported: &AtomicU64,
) {
    ring.harvest(|dirty| _ = reported.fetch_add(dirty.page + 1, Ordering::Relaxed));
    vm.reset_dirty_ring(worker, ring).unwrap();
}

#[test]
fn several_threads_that_harvest_and_reset_report_each_entry_once() {
    const WRITES: u64 = 50_000;
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, 2 * BLOCK, Backing::Anonymous, rings(256));
    vm.enable_log(&mut worker, 0, RING).unwrap();
    let mut vcpu = vm.vcpu().unwrap();
    let ring = vcpu.dirty_ring().unwrap();
    let (reported, done) = (AtomicU64::new(0), AtomicBool::new(false));
    let mut workers = [vm.worker().unwrap(), vm.worker().unwrap()];
    let sum: u64 = std::thread::scope(|scope| {
        let (vm, ring, reported, done) = (&vm, &ring, &reported, &done);
        for worker in &mut workers {
            scope.spawn(move || {
                while !done.load(Ordering::Relaxed) {
                    take(vm, worker, ring, reported);
                }
            });
        }
        let pages = (0..WRITES).map(|n| n * 7 % 1021);
        for page in pages.clone() {
            while vcpu.is_ring_full() {
                std::thread::yield_now();
            }
            vcpu.mark_dirty(vm, Gpa(page * PAGE)).unwrap();
        }
        done.store(true, Ordering::Relaxed);
        pages.map(|page| page + 1).sum()
    });
    take(&vm, &mut worker, &ring, &reported);
    assert_eq!((reported.load(Ordering::Relaxed), ring.used()), (sum, 0));
    drop((vcpu, workers));
    finish(vm, vec![worker]);
}

#[test]
fn a_sink_that_panics_loses_the_page_it_was_given_and_no_other() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, BLOCK, Backing::Anonymous, rings(256));
    vm.enable_log(&mut worker, 0, RING).unwrap();
    let mut guest = Guest::new(&vm, 0);
    for page in 0..10 {
        guest.write(page * PAGE, 1);
    }
    let ring = guest.vcpu.dirty_ring().unwrap();
    let third = |dirty: DirtyPage| assert!(dirty.page < 2, "the sink's own panic");
    let harvest_all = std::panic::AssertUnwindSafe(|| ring.harvest(third));
    assert!(std::panic::catch_unwind(harvest_all).is_err());
    assert_eq!(vm.reset_dirty_ring(&mut worker, &ring), Ok(3));
    assert_eq!(harvest(&ring), (3..10).collect::<Vec<_>>());
    drop(guest);
    finish(vm, vec![worker]);
}

/// A reset while a slot changes, at a moment when the new slots are published and the old entries still stand.
fn reset_during(change: SlotConfig) {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, BLOCK, Backing::Anonymous, rings(256));
    let mut second = vm.worker().unwrap();
    vm.enable_log(&mut worker, 0, RING).unwrap();
    let mut guest = Guest::new(&vm, 0);
    guest.write(5 * PAGE, 1);
    let ring = guest.vcpu.dirty_ring().unwrap();
    assert_eq!(harvest(&ring), [5]);
    let (vm_ref, who, cpu) = (&vm, &mut second, &mut guest.cpu);
    machine.interrupt(
        |event| matches!(event, slat::Event::GracePeriod),
        move || {
            assert_eq!(vm_ref.reset_dirty_ring(who, &ring), Ok(1));
            assert!(cpu.write(Gpa(5 * PAGE), 2).is_err(), "reset, and written without a fault");
        },
    );
    vm.change_slot(&mut worker, 0, change).unwrap();
    assert!(machine.calm());
    drop(guest);
    finish(vm, vec![worker, second]);
}

#[test]
fn a_reset_protects_what_it_gives_back_also_while_its_slot_changes() {
    let slot = SlotConfig::new(Gpa(0), BLOCK, Hva(0));
    reset_during(SlotConfig { read_only: true, ..slot });
    reset_during(SlotConfig { gpa: Gpa(GIB), ..slot });
}

#[test]
fn rings_and_vcpus_of_another_vm_are_refused() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, BLOCK, Backing::Anonymous, rings(256));
    let (other, second) = vm_with_slot(&machine, BLOCK, Backing::Anonymous, rings(256));
    let mut vcpu = other.vcpu().unwrap();
    let ring = vcpu.dirty_ring().unwrap();
    assert_eq!(vm.reset_dirty_ring(&mut worker, &ring), Err(LogError::OtherMachine));
    assert_eq!(vcpu.mark_dirty(&vm, Gpa(0)), Err(LogError::OtherMachine));
    let fault = slat_vm::Fault {
        gpa: Gpa(0),
        access: Access::Write,
        kind: slat_vm::FaultKind::Translation,
    };
    assert_eq!(vcpu.fault(&vm, fault), Err(slat_vm::FaultError::OtherMachine));
    assert!(vcpu.pre_fault(&vm, range(0, PAGE), || true).rest.is_some());
    assert_eq!(vcpu.switch_space(&vm, 0), Err(SpaceError::OtherMachine));
    assert_eq!(vcpu.switch_space(&other, 1), Err(SpaceError::NoSpace { spaces: 1 }));
    assert_eq!(vcpu.fault(&other, fault), Ok(Exit::Resume));
    drop((vcpu, ring, second, other));
    finish(vm, vec![worker]);
}

#[test]
fn an_exhausted_ring_refuses_marks_and_loses_none_that_it_took() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, BLOCK, Backing::Anonymous, rings(256));
    vm.enable_log(&mut worker, 0, RING).unwrap();
    let mut vcpu = vm.vcpu().unwrap();
    let ring = vcpu.dirty_ring().unwrap();
    for page in 0..256 {
        assert_eq!(ring.is_full(), page >= 256 - 64, "with {page} entries");
        assert_eq!(vcpu.mark_dirty(&vm, Gpa(page * PAGE)), Ok(()));
    }
    for _ in 0..2 {
        assert_eq!(vcpu.mark_dirty(&vm, Gpa(300 * PAGE)), Err(LogError::RingFull));
        assert_eq!(ring.used(), 256);
    }
    assert_eq!(harvest(&ring), (0..256).collect::<Vec<_>>());
    // Harvested is not given back.
    assert_eq!(vcpu.mark_dirty(&vm, Gpa(300 * PAGE)), Err(LogError::RingFull));
    assert_eq!(vm.reset_dirty_ring(&mut worker, &ring), Ok(256));
    assert_eq!(vcpu.mark_dirty(&vm, Gpa(300 * PAGE)), Ok(()));
    assert_eq!(harvest(&ring), [300]);
    drop(vcpu);
    finish(vm, vec![worker]);
}
