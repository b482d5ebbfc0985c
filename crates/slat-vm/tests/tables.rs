//! The memory that tables take is known and comes back: split by a crew, collapsed, trimmed.

mod guest;

use guest::*;
use slat::{Gpa, Level};
use slat_model::Backing;
use slat_vm::{Hva, LogError, LogMode, SlotConfig, Tables, Vm, VmOptions, Worker};

fn tables(vm: &TestVm<'_>, worker: &Worker<'_, Watched>) -> Tables {
    vm.tables(worker, 0).unwrap()
}

fn linked(vm: &TestVm<'_>, worker: &Worker<'_, Watched>) -> [u64; 3] {
    let tables = tables(vm, worker);
    [1, 2, 3].map(|level| tables.linked_at(Level::new(level).unwrap()))
}

#[test]
fn tables_are_counted_by_level_and_by_state() {
    let machine = Watched::new(1);
    let (vm, mut worker) =
        vm_with_slot(&machine, 4 * GIB, Backing::AnonymousThp, VmOptions::default());
    let mut guest = Guest::new(&vm, 0);
    assert_eq!(linked(&vm, &worker), [2, 0, 0], "40 bits: two tables make the root");
    guest.write(0, 1);
    guest.write(3 * GIB, 1);
    assert_eq!(linked(&vm, &worker), [2, 2, 0]);
    vm.split(&mut worker, range(0, BLOCK)).unwrap();
    assert_eq!(linked(&vm, &worker), [2, 2, 1]);
    vm.delete_slot(&mut worker, 0).unwrap();
    let left = tables(&vm, &worker);
    assert_eq!(left.total(), 2 + left.waiting);
    vm.trim(&mut worker, range(0, 4 * GIB)).unwrap();
    assert_eq!(tables(&vm, &worker).total(), 2);
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn trim_gives_back_empty_tables_and_nothing_that_is_mapped() {
    let machine = Watched::new(1);
    let (vm, mut worker) =
        vm_with_slot(&machine, 4 * BLOCK, Backing::Anonymous, VmOptions::default());
    let mut guest = Guest::new(&vm, 0);
    for block in 0..4 {
        guest.write(block * BLOCK, 1);
    }
    for block in [0, 2, 3] {
        vm.invalidate_begin(&mut worker, &[range(block * BLOCK, PAGE)]).unwrap().end();
    }
    assert_eq!(linked(&vm, &worker), [2, 1, 4]);
    assert_eq!(vm.trim(&mut worker, range(0, 3 * BLOCK)), Ok(2));
    assert_eq!(linked(&vm, &worker), [2, 1, 2]);
    assert_eq!(tables(&vm, &worker).waiting, 0);
    assert_eq!(guest.write(BLOCK, 2), 0);
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn a_slot_becomes_blocks_again_on_request_and_stays_writable() {
    let machine = Watched::new(1);
    for backing in [HUGE_2M, HUGE_1G] {
        let (vm, mut worker) = vm_with_slot(&machine, 2 * GIB, backing, eager(BLOCK));
        let mut guest = Guest::new(&vm, 0);
        let step = match backing {
            HUGE_1G => GIB,
            _ => BLOCK,
        };
        for gpa in (0..2 * GIB).step_by(step as usize) {
            guest.write(gpa, gpa);
        }
        let before = tables(&vm, &worker);
        vm.enable_log(&mut worker, 0, LogMode::Protect).unwrap();
        guest.write(5 * PAGE, 5);
        assert_eq!(vm.collapse(&mut worker, 0), Err(LogError::Enabled));
        vm.disable_log(&mut worker, 0).unwrap();
        let counters = &worker.participant().counters;
        let invalidations = counters.invalidations.get();
        let blocks = 2 * GIB / BLOCK;
        let more = if backing == HUGE_1G { 2 } else { 0 };
        assert_eq!(vm.collapse(&mut worker, 0), Ok(blocks + more));
        let invalidations = worker.participant().counters.invalidations.get() - invalidations;
        assert!(invalidations <= blocks / 8 + 4, "{invalidations} for {blocks} blocks");
        vm.trim(&mut worker, range(0, 4 * GIB)).unwrap();
        assert_eq!(tables(&vm, &worker), before);
        for gpa in (0..2 * GIB).step_by(step as usize) {
            assert_eq!(guest.write(gpa + 8, 1), 0, "writable, without a fault");
        }
        assert_eq!(guest.read(5 * PAGE), 5);
        assert_eq!(vm.collapse(&mut worker, 0), Ok(0));
        drop(guest);
        finish(vm, vec![worker]);
    }
}

#[test]
fn collapse_makes_no_block_of_several_host_pages_nor_of_what_the_host_protects() {
    let machine = Watched::new(1);
    // Contiguous, but each page by itself.
    let (vm, mut worker) =
        vm_with_slot(&machine, 2 * BLOCK, Backing::Anonymous, VmOptions::default());
    let mut guest = Guest::new(&vm, 0);
    for page in 0..1024 {
        guest.write(page * PAGE, 1);
    }
    assert_eq!(vm.collapse(&mut worker, 0), Ok(0));
    drop(guest);
    drop(worker);
    drop(vm);
    let (vm, mut worker) = vm_with_slot(&machine, BLOCK, HUGE_2M, eager(BLOCK));
    vm.host().alter(0, |page| page.writable = false);
    let mut guest = Guest::new(&vm, 0);
    guest.read(0);
    vm.enable_log(&mut worker, 0, LogMode::Protect).unwrap();
    vm.disable_log(&mut worker, 0).unwrap();
    assert_eq!(vm.collapse(&mut worker, 0), Ok(1));
    let block = found(&vm, &worker, 0).unwrap();
    assert_eq!((block.level, block.write), (2, false));
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn a_hundred_logs_leave_as_many_tables_as_there_were() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, 2 * BLOCK, HUGE_2M, VmOptions::default());
    let mut guest = Guest::new(&vm, 0);
    guest.write(0, 1);
    let before = tables(&vm, &worker).linked;
    for round in 0..100 {
        vm.enable_log(&mut worker, 0, LogMode::Protect).unwrap();
        guest.write(round * PAGE, round);
        vm.disable_log(&mut worker, 0).unwrap();
        guest.write((round + 300) * PAGE, round);
        assert_eq!(level(&vm, &worker, 0), Some(2), "round {round}");
    }
    vm.trim(&mut worker, range(0, GIB)).unwrap();
    let after = tables(&vm, &worker);
    assert_eq!((after.linked, after.waiting), (before, 0));
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn a_crew_splits_a_slot_together() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, GIB, HUGE_2M, eager(BLOCK));
    let mut guest = Guest::new(&vm, 0);
    for block in 0..512 {
        guest.write(block * BLOCK, 1);
    }
    let mut crew: Vec<_> = (0..3).map(|_| vm.worker().unwrap()).collect();
    vm.enable_log_by(&mut worker, 0, LogMode::Protect, |_, job| {
        std::thread::scope(|scope| {
            for worker in &mut crew {
                scope.spawn(|| job.run(&vm, worker));
            }
        });
        assert!(job.is_complete());
    })
    .unwrap();
    let splits: Vec<_> = crew.iter().map(|worker| worker.statistics().eager_splits).collect();
    assert_eq!(splits.iter().sum::<u64>(), 512, "{splits:?}");
    assert_eq!(linked(&vm, &worker), [2, 1, 512]);
    assert!((0..512).all(|block| !writable(&vm, &worker, block * BLOCK)));
    crew.push(worker);
    drop(guest);
    finish(vm, crew);
}

#[test]
fn a_job_of_another_vm_does_nothing() {
    let (machine, other) = (Watched::new(1), Watched::new(1));
    let (vm, worker) = vm_with_slot(&machine, BLOCK, HUGE_2M, VmOptions::default());
    let memory = other.model.host_memory(BLOCK, HUGE_2M).unwrap();
    let second = Vm::new(&other, TestHost::new(memory), arm(), 7, VmOptions::default()).unwrap();
    let mut stranger = second.worker().unwrap();
    let config = SlotConfig::new(Gpa(0), BLOCK, Hva(0));
    second.create_slot(&mut stranger, 0, config).unwrap();
    let mut guest = Guest::new(&vm, 0);
    guest.write(0, 1);
    vm.split_job(0, range(0, BLOCK)).run(&vm, &mut stranger);
    assert_eq!(level(&vm, &worker, 0), Some(2));
    drop((guest, stranger, second));
    finish(vm, vec![worker]);
}
