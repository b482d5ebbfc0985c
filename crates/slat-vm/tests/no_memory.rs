//! Exhausted memory: an error or a slower way, never a loss, and the retry succeeds.

mod guest;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use guest::*;
use slat::Gpa;
use slat_model::Backing;
use slat_vm::{
    Access, Exit, Fault, FaultError, FaultKind, Hva, LogError, LogMode, MonitorLog, PreFaultError,
    Slot, SlotConfig, SlotError, VcpuError, Vm, VmError, VmOptions, Worker,
};

/// The allocator of this test program: on a thread that asks for it, the n-th allocation from now fails, and all later
/// ones unless it is to be the only one.
struct Failing;

#[derive(Clone, Copy)]
struct Countdown {
    left: u64,
    once: bool,
    refused: bool,
}

thread_local! {
    static COUNTDOWN: Cell<Option<Countdown>> = const { Cell::new(None) };
    /// Allocations of this thread, and those of them that are not freed.
    static COUNTED: Cell<(u64, i64)> = const { Cell::new((0, 0)) };
}

fn refused() -> bool {
    COUNTDOWN
        .try_with(|countdown| {
            let Some(mut state) = countdown.get().filter(|_| !in_model()) else { return false };
            let refuse = state.left == 0 && !(state.once && state.refused);
            state.refused |= refuse;
            state.left = state.left.saturating_sub(1);
            countdown.set(Some(state));
            refuse
        })
        .unwrap_or(false)
}

fn count(allocations: u64, live: i64) {
    let _ = COUNTED.try_with(|counted| {
        let (all, now) = counted.get();
        let ours = if in_model() { 0 } else { allocations };
        counted.set((all + ours, now + live));
    });
}

// SAFETY: either the system's allocator or a refusal.
#[expect(unsafe_code, reason = "an allocator that can be told to refuse")]
unsafe impl GlobalAlloc for Failing {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if refused() {
            return std::ptr::null_mut();
        }
        count(1, 1);
        // SAFETY: as the caller promised.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        count(0, -1);
        // SAFETY: as the caller promised.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Failing = Failing;

/// Which allocations fail.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Refuse {
    Nothing,
    /// This one of the heap and all later ones.
    HeapFrom(u64),
    /// This one of the heap.
    HeapOnce(u64),
    /// This table and all later ones.
    TablesFrom(u64),
}

/// Runs `f` with these allocations of this thread refused.
fn refusing<R>(machine: &Watched, refuse: Refuse, f: impl FnOnce() -> R) -> R {
    let countdown = |left, once| Some(Countdown { left, once, refused: false });
    match refuse {
        Refuse::Nothing => {}
        Refuse::HeapFrom(n) => COUNTDOWN.set(countdown(n, false)),
        Refuse::HeapOnce(n) => COUNTDOWN.set(countdown(n, true)),
        Refuse::TablesFrom(n) => machine.model.fail_after(n),
    }
    let result = f();
    COUNTDOWN.set(None);
    machine.model.stop_failing();
    result
}

/// Runs `f` with the n-th table and all later ones refused.
fn without_tables<R>(machine: &Watched, n: u64, f: impl FnOnce() -> R) -> R {
    refusing(machine, Refuse::TablesFrom(n), f)
}

/// Guest memory on which one operation is tried.
struct World<'v, 'm> {
    vm: &'v TestVm<'m>,
    worker: Worker<'m, Watched>,
    guest: Guest<'v, 'm>,
}

/// How an operation ended that may have been refused memory.
#[derive(PartialEq, Debug)]
enum Ended {
    Done,
    /// With the error that says so.
    NoMemory,
}

/// One operation.
struct Row {
    name: &'static str,
    eager_split: bool,
    /// Whether hardware keeps dirty state.
    hardware: bool,
    /// What is done before, with all the memory there is. The slot 0 is there: 4 blocks at address 0.
    prepare: fn(&mut World<'_, '_>),
    attempt: fn(&mut World<'_, '_>) -> Ended,
    /// Whether it takes memory from the heap, and tables.
    takes: (bool, bool),
    /// Whether it is done without tables too, with more pages protected than was asked for.
    protects_more: bool,
}

const ROW: Row = Row {
    name: "",
    eager_split: false,
    hardware: false,
    prepare: |_| {},
    attempt: |_| Ended::Done,
    takes: (false, false),
    protects_more: false,
};

const RING: LogMode = LogMode::Ring { backup: true };
const ALL_SET: LogMode = LogMode::Manual { initially_all_set: true };

impl World<'_, '_> {
    fn populate(&mut self) {
        (0..4).for_each(|block| _ = self.guest.write(block * BLOCK, block + 1));
    }

    fn log(&mut self, mode: LogMode) {
        self.vm.enable_log(&mut self.worker, 0, mode).unwrap();
    }

    fn fault(&mut self, gpa: u64, access: Access) -> Ended {
        let fault = Fault { gpa: Gpa(gpa), access, kind: FaultKind::Translation };
        match self.guest.vcpu.fault(self.vm, fault) {
            Ok(Exit::Resume) => Ended::Done,
            Err(FaultError::NoMemory(_)) => Ended::NoMemory,
            other => panic!("{other:?}"),
        }
    }
}

fn slot_ended(result: Result<(), SlotError>) -> Ended {
    match result {
        Ok(()) => Ended::Done,
        Err(SlotError::OutOfMemory | SlotError::NotMapped { error: None, .. }) => Ended::NoMemory,
        Err(other) => panic!("{other}"),
    }
}

fn log_ended<T>(result: Result<T, LogError>) -> Ended {
    match result {
        Ok(_) => Ended::Done,
        Err(LogError::OutOfMemory) => Ended::NoMemory,
        Err(other) => panic!("{other}"),
    }
}

/// Every operation. A new one joins with a line here.
const ROWS: &[Row] = &[
    Row {
        name: "create a slot",
        attempt: |w| {
            let config = SlotConfig::new(Gpa(GIB), PAGE, Hva(0));
            slot_ended(w.vm.create_slot(&mut w.worker, 1, config))
        },
        takes: (true, false),
        ..ROW
    },
    Row {
        name: "create a pinned slot",
        attempt: |w| {
            let config = SlotConfig::new(Gpa(GIB), 2 * PAGE, Hva(0));
            let config = SlotConfig { pinned: true, ..config };
            slot_ended(w.vm.create_slot(&mut w.worker, 1, config))
        },
        takes: (true, true),
        ..ROW
    },
    Row {
        name: "move a slot",
        prepare: |w| {
            w.populate();
            w.log(ALL_SET);
        },
        attempt: |w| {
            let config = SlotConfig::new(Gpa(GIB), 4 * BLOCK, Hva(0));
            slot_ended(w.vm.change_slot(&mut w.worker, 0, config).map(|_| ()))
        },
        takes: (true, false),
        ..ROW
    },
    Row {
        name: "make a slot read-only",
        prepare: |w| w.populate(),
        attempt: |w| {
            let config = SlotConfig::new(Gpa(0), 4 * BLOCK, Hva(0));
            let config = SlotConfig { read_only: true, ..config };
            slot_ended(w.vm.change_slot(&mut w.worker, 0, config).map(|_| ()))
        },
        takes: (true, false),
        ..ROW
    },
    Row {
        name: "delete a slot",
        prepare: |w| w.populate(),
        attempt: |w| slot_ended(w.vm.delete_slot(&mut w.worker, 0)),
        takes: (true, false),
        ..ROW
    },
    Row {
        name: "enable a log",
        prepare: |w| w.populate(),
        attempt: |w| log_ended(w.vm.enable_log(&mut w.worker, 0, LogMode::Protect)),
        takes: (true, false),
        ..ROW
    },
    Row {
        name: "enable a log, and split",
        eager_split: true,
        prepare: |w| w.populate(),
        attempt: |w| log_ended(w.vm.enable_log(&mut w.worker, 0, LogMode::Protect)),
        takes: (true, true),
        ..ROW
    },
    Row {
        name: "enable a log with all bits set",
        eager_split: true,
        prepare: |w| w.populate(),
        attempt: |w| log_ended(w.vm.enable_log(&mut w.worker, 0, ALL_SET)),
        takes: (true, false),
        ..ROW
    },
    Row {
        name: "enable a log of hardware's dirty state, and split",
        eager_split: true,
        hardware: true,
        prepare: |w| w.populate(),
        attempt: |w| log_ended(w.vm.enable_log(&mut w.worker, 0, LogMode::Hardware)),
        takes: (true, true),
        ..ROW
    },
    Row {
        name: "write to blocks and collect what hardware says",
        hardware: true,
        prepare: |w| {
            w.populate();
            w.log(LogMode::Hardware);
        },
        attempt: |w| {
            // No write faults, so that the model alone allocates.
            let mut write = |block: u64| w.guest.cpu.write(Gpa(block * BLOCK), 7).unwrap();
            inside(|| (0..4).for_each(&mut write));
            assert_eq!(w.vm.dirty_log(&mut w.worker, 0, &mut [0; 32]), Ok(2048));
            Ended::Done
        },
        ..ROW
    },
    Row {
        name: "enable a log in rings",
        prepare: |w| w.populate(),
        attempt: |w| log_ended(w.vm.enable_log(&mut w.worker, 0, RING)),
        takes: (true, false),
        ..ROW
    },
    Row {
        name: "make a vCPU with a ring",
        attempt: |w| match w.vm.vcpu() {
            Ok(_) => Ended::Done,
            Err(VcpuError::OutOfMemory) => Ended::NoMemory,
            Err(other) => panic!("{other}"),
        },
        takes: (true, false),
        ..ROW
    },
    Row {
        name: "reset a ring",
        prepare: |w| {
            w.log(RING);
            w.populate();
        },
        attempt: |w| {
            let ring = w.guest.vcpu.dirty_ring().unwrap();
            let pages = ring.harvest(|_| {});
            assert_eq!(w.vm.reset_dirty_ring(&mut w.worker, &ring), Ok(pages));
            Ended::Done
        },
        ..ROW
    },
    Row {
        name: "mark pages dirty",
        prepare: |w| w.log(LogMode::Manual { initially_all_set: false }),
        attempt: |w| log_ended(w.vm.mark_dirty(&w.worker, 0, range(PAGE, BLOCK))),
        ..ROW
    },
    Row {
        name: "listen to a monitor",
        prepare: |w| w.log(ALL_SET),
        attempt: |w| {
            let Ok(monitor) = MonitorLog::new(4 * BLOCK, 12) else { return Ended::NoMemory };
            log_ended(w.vm.attach_monitor(&mut w.worker, 0, Some(&monitor)))
        },
        takes: (true, false),
        ..ROW
    },
    Row {
        name: "disable a log",
        prepare: |w| w.log(ALL_SET),
        attempt: |w| log_ended(w.vm.disable_log(&mut w.worker, 0)),
        takes: (true, false),
        ..ROW
    },
    Row {
        name: "collect a log",
        prepare: |w| {
            w.log(LogMode::Protect);
            w.populate();
        },
        attempt: |w| log_ended(w.vm.dirty_log(&mut w.worker, 0, &mut [0; 32])),
        ..ROW
    },
    Row {
        name: "clear a part of a log",
        prepare: |w| {
            w.populate();
            w.log(ALL_SET);
        },
        attempt: |w| log_ended(w.vm.clear_dirty_log(&mut w.worker, 0, 0, 2048, &[2; 32])),
        takes: (false, true),
        protects_more: true,
        ..ROW
    },
    Row {
        name: "clear a part of a log, and split",
        eager_split: true,
        prepare: |w| {
            w.populate();
            w.log(ALL_SET);
        },
        attempt: |w| log_ended(w.vm.clear_dirty_log(&mut w.worker, 0, 64, 128, &[!0; 2])),
        takes: (false, true),
        protects_more: true,
        ..ROW
    },
    Row {
        name: "split",
        prepare: |w| w.populate(),
        attempt: |w| match w.vm.split(&mut w.worker, range(0, 4 * BLOCK)).unwrap() {
            true => Ended::Done,
            false => Ended::NoMemory,
        },
        takes: (false, true),
        ..ROW
    },
    Row {
        name: "put pages together to blocks",
        prepare: |w| {
            w.log(LogMode::Protect);
            (0..512).for_each(|page| _ = w.guest.write(page * PAGE, page));
            w.vm.disable_log(&mut w.worker, 0).unwrap();
        },
        attempt: |w| {
            assert_eq!(w.vm.collapse(&mut w.worker, 0), Ok(1));
            Ended::Done
        },
        ..ROW
    },
    Row {
        name: "trim",
        prepare: |w| {
            w.log(LogMode::Protect);
            w.populate();
            w.vm.invalidate_begin(&mut w.worker, &[range(0, PAGE)]).unwrap().end();
        },
        attempt: |w| {
            assert_eq!(w.vm.trim(&mut w.worker, range(0, GIB)), Ok(1));
            Ended::Done
        },
        ..ROW
    },
    Row {
        name: "map ahead",
        attempt: |w| match w.guest.vcpu.pre_fault(w.vm, range(0, 4 * BLOCK), || true).stopped {
            None => Ended::Done,
            Some(PreFaultError::Fault(FaultError::NoMemory(_))) => Ended::NoMemory,
            other => panic!("{other:?}"),
        },
        takes: (false, true),
        ..ROW
    },
    Row {
        name: "clear access flags",
        prepare: |w| w.populate(),
        attempt: |w| {
            assert_eq!(w.vm.clear_young(&mut w.worker, range(0, GIB)), Ok(4));
            Ended::Done
        },
        ..ROW
    },
    Row {
        name: "create a slot with private memory",
        attempt: |w| {
            let config = SlotConfig::new(Gpa(GIB), 2 * PAGE, Hva(0));
            let config = SlotConfig { private: Some(Hva(BLOCK)), ..config };
            slot_ended(w.vm.create_slot(&mut w.worker, 1, config))
        },
        takes: (true, false),
        ..ROW
    },
    Row {
        name: "make pages private",
        prepare: |w| {
            let config = SlotConfig::new(Gpa(GIB), 2 * PAGE, Hva(0));
            let config = SlotConfig { private: Some(Hva(BLOCK)), ..config };
            w.vm.create_slot(&mut w.worker, 1, config).unwrap();
            w.guest.write(GIB, 1);
        },
        attempt: |w| {
            assert_eq!(w.vm.set_private(&mut w.worker, 1, range(GIB, PAGE), true), Ok(()));
            Ended::Done
        },
        ..ROW
    },
    Row {
        name: "invalidate a part of a block",
        prepare: |w| w.populate(),
        attempt: |w| {
            w.vm.invalidate_begin(&mut w.worker, &[range(PAGE, BLOCK)]).unwrap().end();
            Ended::Done
        },
        ..ROW
    },
    Row {
        name: "map the first page",
        prepare: |w| w.log(LogMode::Protect),
        attempt: |w| w.fault(5 * PAGE, Access::Write),
        takes: (false, true),
        ..ROW
    },
    Row {
        name: "map the first block",
        attempt: |w| w.fault(BLOCK, Access::Execute),
        takes: (false, true),
        ..ROW
    },
    Row {
        name: "write to a block under a log",
        prepare: |w| {
            w.populate();
            // Nothing is left in the hand of the vCPU.
            w.guest.vcpu = w.vm.vcpu().unwrap();
            w.log(LogMode::Protect);
        },
        attempt: |w| w.fault(7 * PAGE, Access::Write),
        takes: (false, true),
        ..ROW
    },
    Row {
        name: "put a block in the place of pages",
        prepare: |w| {
            w.log(LogMode::Protect);
            w.populate();
            w.vm.disable_log(&mut w.worker, 0).unwrap();
        },
        attempt: |w| w.fault(PAGE, Access::Write),
        // For the next fault: this one is as well off without.
        takes: (false, true),
        ..ROW
    },
    Row {
        name: "look up",
        prepare: |w| w.populate(),
        attempt: |w| {
            w.vm.look_up(w.worker.participant(), Gpa(PAGE), |_, _| ()).unwrap();
            Ended::Done
        },
        ..ROW
    },
];

/// Everything that a guest and its hypervisor can notice.
#[derive(PartialEq, Debug)]
struct Seen {
    /// Of each page: where it is, and whether it can be written and executed.
    pages: Vec<Option<(u64, bool, bool)>>,
    slots: Vec<Option<Slot>>,
    /// The log of slot 0, if it can be read without a change.
    log: Option<Vec<u64>>,
}

fn look(w: &mut World<'_, '_>, mode: Option<LogMode>) -> Seen {
    let places = (0..2048).map(|page| page * PAGE).chain((0..64).map(|page| GIB + page * PAGE));
    let pages = places
        .map(|gpa| found(w.vm, &w.worker, gpa))
        .map(|f| f.map(|f| (f.output, f.write, f.execute)))
        .collect();
    let slots = (0..2).map(|id| w.vm.slot(&w.worker, id)).collect();
    let mut log = vec![0; 32];
    let logged = mode == Some(ALL_SET) && w.vm.dirty_log(&mut w.worker, 0, &mut log).is_ok();
    Seen { pages, slots, log: logged.then_some(log) }
}

/// What one run of an operation took and left: allocations, tables, and what can be seen in the end.
fn run(row: &Row, refuse: Refuse) -> (u64, u64, Seen) {
    let machine = Watched::new(1);
    let eager_split = row.eager_split.then_some(BLOCK);
    let options = VmOptions { eager_split, dirty_ring: Some(256), ..VmOptions::default() };
    let format = arm().with_hardware_dirty(row.hardware);
    let vm = vm_of(&machine, format, 4 * BLOCK, HUGE_2M, options);
    let mut worker = vm.worker().unwrap();
    vm.create_slot(&mut worker, 0, SlotConfig::new(Gpa(0), 4 * BLOCK, Hva(0))).unwrap();
    let mut world = World { vm: &vm, worker, guest: Guest::new(&vm, 0) };
    (row.prepare)(&mut world);
    // In the manual mode a look at the log changes nothing.
    let mode = Some(ALL_SET);
    let before = look(&mut world, mode);
    let tables = machine.model.counters().tables_allocated;
    let heap = COUNTED.get().0;
    let ended = refusing(&machine, refuse, || (row.attempt)(&mut world));
    let heap = COUNTED.get().0 - heap;
    let tables = machine.model.counters().tables_allocated - tables;
    if ended == Ended::NoMemory {
        assert_ne!(refuse, Refuse::Nothing, "{}", row.name);
        assert_eq!(look(&mut world, mode), before, "{} {refuse:?}: changed something", row.name);
        assert_eq!((row.attempt)(&mut world), Ended::Done, "{} {refuse:?}: again", row.name);
    }
    let after = look(&mut world, mode);
    let World { worker, guest, .. } = world;
    drop(guest);
    finish(vm, vec![worker]);
    (heap, tables, after)
}

fn compare(row: &Row, seen: &Seen, expected: &Seen) {
    if !row.protects_more {
        return assert_eq!(seen, expected, "{}", row.name);
    }
    assert_eq!((&seen.slots, &seen.log), (&expected.slots, &expected.log), "{}", row.name);
    let both = seen.pages.iter().zip(&expected.pages);
    for (seen, expected) in both.filter_map(|(&seen, &expected)| Some((seen?, expected?))) {
        let (output, write, execute) = seen;
        assert_eq!((output, execute), (expected.0, expected.2), "{}", row.name);
        assert!(!write || expected.1, "{}: writable", row.name);
    }
    let mapped = |seen: &Seen| seen.pages.iter().flatten().count();
    assert_eq!(mapped(seen), mapped(expected), "{}", row.name);
}

#[test]
fn every_operation_without_memory_is_an_error_that_loses_and_leaks_nothing_and_can_be_repeated() {
    for row in ROWS {
        let name = row.name;
        let (heap, tables, expected) = run(row, Refuse::Nothing);
        assert_eq!((heap > 0, tables > 0), row.takes, "{name}: {heap} and {tables} tables");
        let heap = (0..heap).flat_map(|n| [Refuse::HeapFrom(n), Refuse::HeapOnce(n)]);
        for refuse in heap.chain((0..tables).map(Refuse::TablesFrom)) {
            let live = COUNTED.get().1;
            compare(row, &run(row, refuse).2, &expected);
            assert_eq!(COUNTED.get().1, live, "{name} {refuse:?}: leaks");
        }
    }
}

#[test]
fn a_fault_that_needs_no_table_needs_no_memory() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, BLOCK, Backing::Anonymous, VmOptions::default());
    let mut guest = Guest::new(&vm, 0);
    guest.write(PAGE, 1);
    vm.enable_log(&mut worker, 0, LogMode::Protect).unwrap();
    without_tables(&machine, 0, || {
        assert_eq!(guest.write(PAGE, 2), 1);
        assert_eq!(guest.write(2 * PAGE, 2), 1);
    });
    assert_eq!(collect(&vm, &mut worker, 0, 512), [1, 2]);
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn a_write_to_a_block_under_a_log_tops_up_and_the_guest_sees_no_error() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, 600 * BLOCK, HUGE_2M, VmOptions::default());
    let mut guest = Guest::new(&vm, 0);
    for block in 0..300 {
        guest.write(block * BLOCK, 1);
    }
    vm.enable_log(&mut worker, 0, LogMode::Protect).unwrap();
    for block in 0..300 {
        // However few tables are in hand.
        assert_eq!(guest.write(block * BLOCK, 2), 1);
    }
    assert_eq!(guest.vcpu.statistics().failed, 0);
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn enabling_a_log_without_memory_for_tables_protects_blocks_as_they_are() {
    for n in [0, 1, 2, 5] {
        let machine = Watched::new(1);
        let (vm, mut worker) = vm_with_slot(&machine, 8 * BLOCK, HUGE_2M, eager(BLOCK));
        let mut guest = Guest::new(&vm, 0);
        for block in 0..8 {
            guest.write(block * BLOCK, block);
        }
        without_tables(&machine, n, || vm.enable_log(&mut worker, 0, LogMode::Protect)).unwrap();
        assert_eq!(worker.statistics().eager_splits_ended, 1);
        for block in 0..8 {
            assert!(!writable(&vm, &worker, block * BLOCK));
            assert_eq!(guest.cpu.read(Gpa(block * BLOCK)), Ok(block));
            assert_eq!(guest.write(block * BLOCK, block), 1);
        }
        assert_eq!(collect(&vm, &mut worker, 0, 4096).len(), 8);
        drop(guest);
        finish(vm, vec![worker]);
    }
}

#[test]
fn clearing_without_memory_for_tables_protects_more_than_was_asked_and_loses_nothing() {
    for options in [VmOptions::default(), eager(BLOCK)] {
        for n in [0, 1] {
            let machine = Watched::new(1);
            let (vm, mut worker) = vm_with_slot(&machine, 2 * BLOCK, HUGE_2M, options);
            let mut guest = Guest::new(&vm, 0);
            guest.write(0, 1);
            guest.write(BLOCK, 1);
            vm.enable_log(&mut worker, 0, LogMode::Manual { initially_all_set: true }).unwrap();
            let mask = [1 << 5, 0, 0, 0, 0, 0, 0, 0, 1 << 9, 0, 0, 0, 0, 0, 0, 0];
            let cleared =
                without_tables(&machine, n, || vm.clear_dirty_log(&mut worker, 0, 0, 1024, &mask));
            assert_eq!(cleared, Ok(2));
            for page in [5, 512 + 9] {
                assert!(!writable(&vm, &worker, page * PAGE));
                assert_eq!(guest.write(page * PAGE, 2), 1);
            }
            assert_eq!(collect(&vm, &mut worker, 0, 1024).len(), 1024);
            drop(guest);
            finish(vm, vec![worker]);
        }
    }
}

#[test]
fn making_a_vm_without_memory_leaks_nothing() {
    let machine = Watched::new(1);
    let memory = machine.model.host_memory(BLOCK, Backing::Anonymous).unwrap();
    let make = || Vm::new(&machine, TestHost::new(memory.clone()), arm(), 1, VmOptions::default());
    for n in 0..2 {
        let result = without_tables(&machine, n, make);
        assert!(matches!(result, Err(VmError::NoMemory(_))));
    }
    for n in 0..2 {
        let result = refusing(&machine, Refuse::HeapFrom(n), make);
        assert!(matches!(result, Err(VmError::OutOfMemory)), "{n}");
    }
    assert_eq!(machine.model.counters().tables_in_use, 0);
    assert!(make().is_ok());
}
