//! Promise: an embedder that leaves a step out is caught by the rule that the step serves. The engine is the real one.
#![expect(unsafe_code, reason = "a machine around the model forwards its contract")]

use std::ptr::NonNull;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};

use slat::format::arm::{K4, Stage2};
use slat::maintenance::Instruction;
use slat::walk::{Flow, Visit, Visitor, Wants};
use slat::{
    Attributes, Edges, Entry, Event, Gpa, GpaRange, Hpa, Leaf, Level, Machine, Participant,
    Reserve, Slot, Tree,
};
use slat_model::{Backing, Before, Model, OnViolation, Reach, Registers, Violation};

/// The model without some of its instructions, and at will without its participants.
struct Broken {
    model: Model,
    drops: fn(Instruction) -> bool,
    hides_slots: AtomicBool,
}

// SAFETY: everything about memory is the model's.
unsafe impl Machine for Broken {
    fn allocate(&self, tables: usize) -> Option<Hpa> {
        self.model.allocate(tables)
    }

    unsafe fn free(&self, first: Hpa, tables: usize) {
        // SAFETY: the caller promises what the model asks.
        unsafe { self.model.free(first, tables) }
    }

    fn entries(&self, table: Hpa) -> NonNull<Entry> {
        self.model.entries(table)
    }

    fn slots(&self) -> &[Slot] {
        if self.hides_slots.load(Ordering::Relaxed) { &[] } else { self.model.slots() }
    }

    fn execute(&self, instruction: Instruction) {
        if !(self.drops)(instruction) {
            self.model.execute(instruction);
        }
    }

    fn observe(&self, event: Event) {
        self.model.observe(event);
    }
}

type Operation = fn(&Tree<'_, Stage2<K4>, Broken>, &mut Participant<'_, Broken>, Hpa);

const PAGE: u64 = 4096;
const BLOCK: u64 = 2 << 20;

fn range(start: u64, size: u64) -> GpaRange {
    GpaRange::new(Gpa(start), size).unwrap()
}

/// Runs `operation` on a tree that maps 2 MiB in pages and 2 MiB as a block, both cached by two CPUs; then lets a guest
/// run on a third, and answers the violation.
fn violation(drops: fn(Instruction) -> bool, operation: Operation) -> Option<Violation> {
    let model = Model::builder().cpus(3).on_violation(OnViolation::Record).build().unwrap();
    let backing = Backing::AnonymousHugetlb { page_size: BLOCK };
    let memory = model.host_memory(4 * BLOCK, backing).unwrap();
    let output = memory.page(0).unwrap().hpa;
    let machine = Broken { model, drops, hides_slots: AtomicBool::new(false) };
    // What is set up is published and waited for.
    let honest = &machine.model;
    let format = Stage2::<K4>::new(40).unwrap();
    let tree = Tree::new(&machine, format, 3).unwrap();
    let mut who = Participant::register(&machine).unwrap();
    let mut reserve = Reserve::new(&machine);
    reserve.top_up(8).unwrap();
    let template = tree.template(Attributes::RWX).unwrap();
    tree.map(&who, &mut reserve, range(0, BLOCK), output, template, Level::LAST).unwrap();
    let (second, level) = (Hpa(output.0 + BLOCK), Level::new(2).unwrap());
    tree.map(&who, &mut reserve, range(BLOCK, BLOCK), second, template, level).unwrap();
    honest.execute(Instruction::DsbIsh);
    let registers = Registers { vttbr: tree.root_register(), vtcr: format.vtcr() };
    for index in 0..2 {
        let mut cpu = honest.cpu(index, registers).unwrap();
        for gpa in [0, PAGE, BLOCK, BLOCK + PAGE] {
            cpu.write(Gpa(gpa), 1).unwrap();
        }
    }
    assert_eq!(honest.violation().map(|report| report.violation), None);
    operation(&tree, &mut who, output);
    // A CPU that has nothing cached sees what the tables say now.
    let mut cpu = honest.cpu(2, registers).unwrap();
    for gpa in [0, PAGE, 2 * PAGE, BLOCK, BLOCK + 2 * PAGE] {
        let _ = cpu.write(Gpa(gpa), 2);
    }
    honest.violation().map(|report| report.violation)
}

fn unmap(tree: &Tree<'_, Stage2<K4>, Broken>, who: &mut Participant<'_, Broken>, _: Hpa) {
    let mut reserve = Reserve::new(who.machine());
    tree.unmap(who, &mut reserve, range(0, PAGE), Edges::Exact, |_| {}).unwrap();
}

fn unmap_table(tree: &Tree<'_, Stage2<K4>, Broken>, who: &mut Participant<'_, Broken>, _: Hpa) {
    let mut reserve = Reserve::new(who.machine());
    tree.unmap(who, &mut reserve, range(0, BLOCK), Edges::Exact, |_| {}).unwrap();
    tree.reclaim(who);
}

fn write_protect(tree: &Tree<'_, Stage2<K4>, Broken>, who: &mut Participant<'_, Broken>, _: Hpa) {
    tree.write_protect(who, range(0, 2 * BLOCK), |_| {}).unwrap();
}

fn split(tree: &Tree<'_, Stage2<K4>, Broken>, who: &mut Participant<'_, Broken>, _: Hpa) {
    let mut reserve = Reserve::new(who.machine());
    reserve.top_up(1).unwrap();
    tree.split(who, &mut reserve, range(BLOCK, BLOCK), Level::LAST).unwrap();
}

fn install(tree: &Tree<'_, Stage2<K4>, Broken>, who: &mut Participant<'_, Broken>, output: Hpa) {
    let template = tree.template(Attributes::RWX).unwrap();
    let mut reserve = Reserve::new(who.machine());
    reserve.top_up(2).unwrap();
    let (gpa, level) = (Gpa(2 * BLOCK), Level::new(2).unwrap());
    let leaf = Leaf { gpa, level, output, template };
    tree.install(&who.pin(), &mut reserve, &leaf).unwrap();
}

fn nothing(_: Instruction) -> bool {
    false
}

fn publishes(instruction: Instruction) -> bool {
    instruction == Instruction::DsbIshst
}

fn waits(instruction: Instruction) -> bool {
    instruction == Instruction::DsbIsh
}

fn combined(instruction: Instruction) -> bool {
    instruction == Instruction::TlbiVmalle1is
}

fn invalidations(instruction: Instruction) -> bool {
    matches!(
        instruction,
        Instruction::TlbiIpas2e1is { .. }
            | Instruction::TlbiRipas2e1is { .. }
            | Instruction::TlbiVmalls12e1is
    )
}

fn is_stale(violation: Option<Violation>) {
    assert!(matches!(violation, Some(Violation::StaleTranslation { .. })), "{violation:?}");
}

fn is_break_before_make(violation: Option<Violation>) {
    assert!(matches!(violation, Some(Violation::BreakBeforeMake { .. })), "{violation:?}");
}

#[test]
fn with_every_instruction_no_rule_is_broken() {
    for operation in [unmap, unmap_table, write_protect, split, install] {
        assert_eq!(violation(nothing, operation), None);
    }
}

#[test]
fn without_invalidations_promises_are_not_kept() {
    for drops in [invalidations, waits] {
        for operation in [unmap, unmap_table, write_protect] {
            is_stale(violation(drops, operation));
        }
    }
    is_stale(violation(combined, unmap));
}

#[test]
fn without_invalidations_a_split_is_no_break_before_make() {
    for drops in [invalidations, waits] {
        is_break_before_make(violation(drops, split));
    }
}

#[test]
fn without_publishes_nobody_knows_what_walkers_see() {
    for (operation, before) in [
        (
            unmap as fn(&Tree<'_, _, _>, &mut Participant<'_, _>, Hpa),
            Before::Invalidation { local: false },
        ),
        (split, Before::Invalidation { local: false }),
        (write_protect, Before::Invalidation { local: false }),
        (install, Before::Guest),
    ] {
        match violation(publishes, operation) {
            Some(Violation::NeverPublished { before: found, .. }) => assert_eq!(found, before),
            other => panic!("{other:?}"),
        }
    }
}

/// Stops at its first leaf until another thread has been at work.
struct Waits<'b>(Option<&'b Barrier>);

impl Visitor<Broken> for Waits<'_> {
    fn wants(&self, level: Level) -> Wants {
        if level == Level::LAST { Wants::LEAVES } else { Wants::NOTHING }
    }

    fn leaf(&mut self, _: &Visit<'_, Broken>) -> Flow {
        if let Some(barrier) = self.0.take() {
            barrier.wait();
            barrier.wait();
        }
        Flow::Next
    }
}

#[test]
fn without_participants_a_table_is_freed_under_a_walk() {
    let model = Model::builder().on_violation(OnViolation::Record).build().unwrap();
    let memory = model.host_memory(BLOCK, Backing::Anonymous).unwrap();
    let machine = Broken { model, drops: nothing, hides_slots: AtomicBool::new(false) };
    let tree = Tree::new(&machine, Stage2::<K4>::new(40).unwrap(), 3).unwrap();
    let mut who = Participant::register(&machine).unwrap();
    let walker = Participant::register(&machine).unwrap();
    let mut reserve = Reserve::new(&machine);
    reserve.top_up(4).unwrap();
    let template = tree.template(Attributes::RWX).unwrap();
    let output = memory.page(0).unwrap().hpa;
    tree.map(&who, &mut reserve, range(0, PAGE), output, template, Level::LAST).unwrap();
    let barrier = Barrier::new(2);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let walker = walker;
            tree.walk(&walker, range(0, BLOCK), &mut Waits(Some(&barrier))).unwrap();
        });
        barrier.wait();
        machine.hides_slots.store(true, Ordering::Relaxed);
        tree.unmap(&mut who, &mut reserve, range(0, BLOCK), Edges::Exact, |_| {}).unwrap();
        tree.reclaim(&mut who);
        machine.hides_slots.store(false, Ordering::Relaxed);
        barrier.wait();
    });
    match machine.model.violation().map(|report| report.violation) {
        Some(Violation::FreedWhileReachable { by: Reach::Engine { .. }, .. }) => {}
        other => panic!("{other:?}"),
    }
}
