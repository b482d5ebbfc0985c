//! x86 hardware does what its manuals say (Intel SDM vol. 3C, 29.3 and 29.4; AMD APM vol. 2, 15.16 and 15.25), and whoever
//! relies on more is caught. Trees are built by hand, bit by bit.

use std::sync::Arc;

use slat::format::ept::Ept;
use slat::format::npt::Npt;
use slat::gate::Requests;
use slat::maintenance::Instruction;
use slat::{
    Attributes, Edges, Event, Gpa, GpaRange, Hpa, Level, Machine, Participant, Promise, Reserve,
    Tree,
};
use slat_model::{
    Access, Architecture, Backing, Control, Cpu, EptRegisters, FaultKind, HostMemory, MemoryType,
    Model, Modelled, NptRegisters, OnViolation, Violation,
};

const BLOCK: u64 = 2 << 20;
const R: u64 = 1;
const W: u64 = 2;
const X: u64 = 4;
const RWX: u64 = R | W | X;
const WRITE_BACK: u64 = 6 << 3;
const PS: u64 = 1 << 7;
const EPT_A: u64 = 1 << 8;
const EPT_D: u64 = 1 << 9;
const XU: u64 = 1 << 10;
const P: u64 = 1;
const USER: u64 = 4;
const NPT_A: u64 = 1 << 5;
const NPT_D: u64 = 1 << 6;
const NX: u64 = 1 << 63;

/// Write-back, four tables, accessed and dirty flags.
const EPTP: u64 = 6 | 3 << 3 | 1 << 6;
const ASID: u16 = 7;

/// A model, memory in 2 MiB pages, and tables from the root down to one of pages for address 0.
struct Hand {
    model: Model,
    memory: Arc<HostMemory>,
    /// From the root to the last level.
    tables: [u64; 5],
    levels: usize,
}

impl Hand {
    fn new(architecture: Architecture, levels: usize) -> Self {
        let builder = Model::builder().architecture(architecture).cpus(2).slots(2);
        let model = builder.on_violation(OnViolation::Record).build().unwrap();
        let backing = Backing::AnonymousHugetlb { page_size: BLOCK };
        let memory = model.host_memory(4 * BLOCK, backing).unwrap();
        let tables = [(); 5].map(|()| model.allocate(1).unwrap().0);
        let hand = Self { model, memory, tables, levels };
        let link =
            if architecture == Architecture::Ept { RWX | EPT_A } else { P | W | USER | NPT_A };
        for at in 0..levels - 1 {
            hand.put(at, 0, hand.tables[at + 1] | link);
        }
        hand
    }

    fn ept() -> Self {
        Self::new(Architecture::Ept, 4)
    }

    fn npt() -> Self {
        Self::new(Architecture::Npt, 4)
    }

    fn control(&self) -> Control {
        let root = self.tables[0];
        if self.model.architecture() == Architecture::Ept {
            let walk = ((self.levels - 1) << 3) as u64;
            EptRegisters { eptp: root | EPTP & !(7 << 3) | walk, mode_based: false }.into()
        } else {
            let five_levels = self.levels == 5;
            NptRegisters { ncr3: root, asid: ASID, five_levels }.into()
        }
    }

    fn cpu(&self, index: usize) -> Cpu<'_> {
        self.model.cpu(index, self.control()).unwrap()
    }

    /// The host-physical address of a byte of the memory.
    fn hpa(&self, offset: u64) -> u64 {
        self.memory.page(offset).unwrap().hpa.0
    }

    #[expect(unsafe_code, reason = "writes the test's own tables")]
    fn entry(&self, table: usize, index: u64) -> &slat::Entry {
        // SAFETY: the tests own all tables and write them as atomics only.
        unsafe { self.model.entry(Hpa(self.tables[table] + 8 * index)) }.unwrap()
    }

    fn get(&self, table: usize, index: u64) -> u64 {
        self.entry(table, index).read()
    }

    fn put(&self, table: usize, index: u64, value: u64) {
        let entry = self.entry(table, index);
        while entry.update(entry.read(), value).is_err() {}
    }

    /// The entry of page `index`, in the last table.
    fn page(&self, index: u64, value: u64) {
        self.put(self.levels - 1, index, value);
    }

    fn page_of(&self, index: u64) -> u64 {
        self.get(self.levels - 1, index)
    }

    fn invalidate(&self) -> Instruction {
        match self.control() {
            Control::Ept(registers) => Instruction::InveptSingle(registers.eptp),
            _ => Instruction::FlushAsid(ASID),
        }
    }

    fn violation(&self) -> Option<Violation> {
        self.model.take_violation().map(|report| report.violation)
    }

    fn assert_clean(&self) {
        self.model.check_quiet(self.control());
        assert_eq!(self.violation(), None);
    }
}

/// A page of the format with these permissions, accessed and dirty.
fn leaf(hand: &Hand, write: bool) -> u64 {
    match hand.model.architecture() {
        Architecture::Ept => R | WRITE_BACK | EPT_A | if write { W | EPT_D } else { 0 },
        _ => P | USER | NPT_A | if write { W | NPT_D } else { 0 },
    }
}

#[test]
fn four_and_five_tables_lead_to_pages_and_blocks() {
    for architecture in [Architecture::Ept, Architecture::Npt] {
        for levels in [4, 5] {
            let hand = Hand::new(architecture, levels);
            let plain = leaf(&hand, true);
            hand.page(3, hand.hpa(0x5000) | plain);
            hand.put(levels - 2, 2, hand.hpa(BLOCK) | plain | PS);
            let mut cpu = hand.cpu(0);
            let page = cpu.translate(Access::Read, Gpa(0x3008)).unwrap();
            assert_eq!((page.hpa, page.level), (Hpa(hand.hpa(0x5008)), Level::LAST));
            assert_eq!(page.memory, MemoryType::WriteBack);
            let block = cpu.translate(Access::Write, Gpa(2 * BLOCK + 0x7010)).unwrap();
            assert_eq!(block.hpa, Hpa(hand.hpa(BLOCK + 0x7010)));
            assert_eq!(block.level.number(), 2);
            let fault = cpu.read(Gpa(0x4000)).unwrap_err();
            assert_eq!(fault.kind, FaultKind::Translation { level: Level::LAST });
            let limit = if levels == 5 { 1 << 52 } else { 1 << 48 };
            assert!(cpu.read(Gpa(limit)).is_err());
            drop(cpu);
            hand.assert_clean();
        }
    }
}

#[test]
fn what_any_table_forbids_is_forbidden_below() {
    let hand = Hand::ept();
    hand.page(0, hand.hpa(0) | leaf(&hand, true) | X);
    for at in 0..3 {
        let whole = hand.get(at, 0);
        hand.put(at, 0, whole & !W);
        let mut cpu = hand.cpu(0);
        assert!(cpu.read(Gpa(0)).is_ok() && cpu.fetch(Gpa(0)).is_ok());
        let fault = cpu.write(Gpa(0), 1).unwrap_err();
        assert_eq!(fault.kind, FaultKind::Permission { level: Level::LAST });
        // A write; the entries together permit reading and executing.
        assert_eq!(cpu.qualification(&fault), Some(0b1_1010_1010 | 1 << 1));
        hand.put(at, 0, whole);
        assert!(cpu.write(Gpa(0), 1).is_ok());
        hand.model.execute(hand.invalidate());
    }
    let hand = Hand::npt();
    hand.page(0, hand.hpa(0) | leaf(&hand, true));
    for (at, lost) in [(0, USER), (1, W)] {
        let whole = hand.get(at, 0);
        hand.put(at, 0, whole & !lost);
        let mut cpu = hand.cpu(0);
        assert_eq!(cpu.read(Gpa(0)).is_ok(), lost == W);
        assert!(cpu.write(Gpa(0), 1).is_err());
        hand.put(at, 0, whole);
        hand.model.execute(hand.invalidate());
    }
    hand.put(1, 0, hand.get(1, 0) | NX);
    let mut cpu = hand.cpu(0);
    assert!(cpu.write(Gpa(0), 1).is_ok());
    let fault = cpu.fetch(Gpa(0)).unwrap_err();
    assert_eq!(cpu.qualification(&fault), Some(1 << 32 | 1 << 4 | 1 << 2 | 1));
}

#[test]
fn faults_say_what_was_tried_and_what_was_there() {
    let hand = Hand::ept();
    hand.page(0, hand.hpa(0) | X | WRITE_BACK | EPT_A);
    let mut cpu = hand.cpu(0);
    assert!(cpu.fetch(Gpa(0)).is_ok());
    let fault = cpu.read(Gpa(0)).unwrap_err();
    assert_eq!(cpu.qualification(&fault), Some(0b11 << 7 | 1 << 5 | 1));
    let fault = cpu.write(Gpa(0x1000), 1).unwrap_err();
    assert_eq!(cpu.qualification(&fault), Some(0b11 << 7 | 1 << 1));
    drop(cpu);
    let hand = Hand::npt();
    let mut cpu = hand.cpu(0);
    let fault = cpu.write(Gpa(0x1000), 1).unwrap_err();
    assert_eq!(cpu.qualification(&fault), Some(1 << 32 | 1 << 2 | 1 << 1));
}

#[test]
fn mode_based_execute_control_tells_who_executes() {
    let hand = Hand::ept();
    let Control::Ept(registers) = hand.control() else { panic!() };
    for at in 0..3 {
        hand.put(at, 0, hand.get(at, 0) | XU);
    }
    hand.page(0, hand.hpa(0) | R | X | WRITE_BACK | EPT_A);
    hand.page(1, hand.hpa(0x1000) | XU | WRITE_BACK | EPT_A);
    let mut cpu = hand.model.cpu(0, EptRegisters { mode_based: true, ..registers }).unwrap();
    assert!(cpu.fetch(Gpa(0)).is_ok() && cpu.fetch_user(Gpa(0)).is_err());
    assert!(cpu.fetch(Gpa(0x1000)).is_err() && cpu.fetch_user(Gpa(0x1000)).is_ok());
    drop(cpu);
    hand.model.execute(hand.invalidate());
    // Without the control bit 10 is ignored, and an entry with it alone is not present.
    let mut cpu = hand.cpu(0);
    assert!(cpu.fetch_user(Gpa(0)).is_ok());
    let fault = cpu.fetch_user(Gpa(0x1000)).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Translation { level: Level::LAST });
}

#[test]
fn misconfigured_and_reserved_entries_are_reported() {
    let ept = |table: usize, value: u64| {
        let hand = Hand::ept();
        hand.put(table, 0, value | if table == 3 { hand.hpa(0) } else { 0 });
        let fault = hand.cpu(0).read(Gpa(0)).unwrap_err();
        let wrong = hand.violation();
        (matches!(fault.kind, FaultKind::Reserved { .. }), wrong)
    };
    for (table, value) in [
        (3, W | WRITE_BACK),
        (3, W | X | WRITE_BACK),
        (3, R | 2 << 3),
        (3, R | 7 << 3),
        (2, RWX | WRITE_BACK | PS | 1 << 12),
        (2, RWX | 1 << 3),
        (0, RWX | PS),
    ] {
        let (reserved, violation) = ept(table, value);
        assert!(reserved, "{table} {value:#x}");
        assert!(matches!(violation, Some(Violation::ReservedBits { .. })), "{violation:?}");
    }
    let hand = Hand::npt();
    hand.put(2, 0, hand.hpa(0) | leaf(&hand, true) | PS | 1 << 13);
    let mut cpu = hand.cpu(0);
    let fault = cpu.read(Gpa(0)).unwrap_err();
    assert_eq!(cpu.qualification(&fault), Some(1 << 32 | 1 << 3 | 1 << 2 | 1));
    assert!(matches!(hand.violation(), Some(Violation::ReservedBits { .. })));
}

#[test]
fn hardware_notes_accesses_and_first_writes() {
    for (hand, accessed, dirty) in [(Hand::ept(), EPT_A, EPT_D), (Hand::npt(), NPT_A, NPT_D)] {
        let writable = leaf(&hand, true) & !(accessed | dirty);
        hand.page(0, hand.hpa(0) | writable);
        let first = hand.get(0, 0);
        hand.put(0, 0, first & !accessed);
        let mut cpu = hand.cpu(0);
        cpu.read(Gpa(0)).unwrap();
        assert_eq!(hand.page_of(0) & (accessed | dirty), accessed);
        assert_eq!(hand.get(0, 0), first);
        cpu.write(Gpa(0), 1).unwrap();
        assert_eq!(hand.page_of(0) & (accessed | dirty), accessed | dirty);
        // A write that is not permitted notes nothing.
        hand.page(1, hand.hpa(0x1000) | leaf(&hand, false) & !accessed);
        assert!(cpu.write(Gpa(0x1000), 1).is_err());
        assert_eq!(hand.page_of(1) & (accessed | dirty), 0);
        drop(cpu);
        hand.assert_clean();
    }
}

#[test]
fn without_the_flags_in_the_eptp_nothing_is_noted() {
    let hand = Hand::ept();
    hand.page(0, hand.hpa(0) | RWX | WRITE_BACK);
    let eptp = hand.tables[0] | EPTP & !(1 << 6);
    let mut cpu = hand.model.cpu(0, EptRegisters { eptp, mode_based: false }).unwrap();
    cpu.write(Gpa(0), 1).unwrap();
    assert_eq!(hand.page_of(0) & (EPT_A | EPT_D), 0);
}

#[test]
fn translations_stay_until_this_cpu_invalidates_them() {
    for hand in [Hand::ept(), Hand::npt()] {
        hand.page(0, hand.hpa(0) | leaf(&hand, true));
        let (mut first, mut second) = (hand.cpu(0), hand.cpu(1));
        first.write(Gpa(0), 1).unwrap();
        second.write(Gpa(0), 2).unwrap();
        hand.page(0, 0);
        assert_eq!(first.read(Gpa(0)), Ok(2));
        // It acts on the CPU that executes it, and on nothing of another root or ASID.
        hand.model.execute(Instruction::InveptSingle(0x7000 | EPTP));
        hand.model.execute(Instruction::FlushAsid(ASID + 1));
        assert_eq!(first.read(Gpa(0)), Ok(2));
        hand.model.execute(hand.invalidate());
        assert!(first.read(Gpa(0)).is_err());
        assert_eq!(second.read(Gpa(0)), Ok(2));
        hand.model.execute(Instruction::InveptAll);
        assert!(second.read(Gpa(0)).is_err());
    }
}

#[test]
fn an_ept_violation_forgets_what_caused_it_and_a_nested_page_fault_does_not() {
    for (hand, forgets) in [(Hand::ept(), true), (Hand::npt(), false)] {
        hand.page(0, hand.hpa(0) | leaf(&hand, false));
        let mut cpu = hand.cpu(0);
        cpu.read(Gpa(0)).unwrap();
        hand.page(0, hand.hpa(0) | leaf(&hand, true));
        assert!(cpu.write(Gpa(0), 1).is_err());
        assert_eq!(cpu.write(Gpa(0), 1).is_ok(), forgets);
        hand.model.execute(hand.invalidate());
        assert!(cpu.write(Gpa(0), 1).is_ok());
    }
}

/// One operation that takes page 0 away and promises so, with or without asking the vCPUs.
fn unmap(hand: &Hand, ask: bool) {
    hand.model.observe(Event::Begin);
    let entry = Hpa(hand.tables[0]);
    hand.model.observe(Event::Load { entry });
    let entry = Hpa(hand.tables[3]);
    let old = hand.page_of(0);
    hand.page(0, 0);
    hand.model.observe(Event::Exchange { entry, old, new: 0, done: true });
    if ask {
        let tree = Some(Hpa(hand.tables[0]));
        slat::gate::request_everywhere(&hand.model, tree, Requests::INVALIDATE);
    }
    hand.model.observe(Event::End(Promise::Gone(range(0, 4096))));
}

#[test]
fn a_vcpu_outside_may_keep_what_is_gone_until_it_enters() {
    for answers in [true, false] {
        for hand in [Hand::ept(), Hand::npt()] {
            hand.page(0, hand.hpa(0) | leaf(&hand, true));
            let mut vcpu = Participant::register(&hand.model).unwrap();
            vcpu.switch(Hpa(hand.tables[0]));
            let mut cpu = hand.cpu(0);
            cpu.attend(vcpu.index());
            assert!(vcpu.enter().err().unwrap().contains(Requests::INVALIDATE));
            hand.model.execute(hand.invalidate());
            let inside = vcpu.enter().unwrap();
            cpu.write(Gpa(0), 1).unwrap();
            drop(inside);
            assert_eq!(hand.violation(), None);
            unmap(&hand, true);
            assert_eq!(hand.violation(), None);
            assert_eq!(vcpu.enter().err(), Some(Requests::INVALIDATE));
            if answers {
                hand.model.execute(hand.invalidate());
            }
            let inside = vcpu.enter().unwrap();
            assert_eq!(cpu.read(Gpa(0)).is_err(), answers);
            let found = hand.violation();
            assert_eq!(found.is_none(), answers, "{found:?}");
            assert!(answers || matches!(found, Some(Violation::NotInvalidated { cpu: 0, .. })));
            drop(inside);
        }
    }
}

#[test]
fn a_vcpu_inside_that_was_not_asked_holds_a_stale_translation() {
    let hand = Hand::ept();
    hand.page(0, hand.hpa(0) | leaf(&hand, true));
    let mut vcpu = Participant::register(&hand.model).unwrap();
    vcpu.switch(Hpa(hand.tables[0]));
    let mut cpu = hand.cpu(0);
    cpu.attend(vcpu.index());
    let _ = vcpu.enter().err();
    hand.model.execute(hand.invalidate());
    let inside = vcpu.enter().unwrap();
    cpu.write(Gpa(0), 1).unwrap();
    unmap(&hand, false);
    assert!(matches!(hand.violation(), Some(Violation::StaleTranslation { cpu: 0, .. })));
    drop(inside);
}

#[test]
fn a_guest_runs_inside_its_gate_only() {
    let hand = Hand::npt();
    hand.page(0, hand.hpa(0) | leaf(&hand, true));
    let vcpu = Participant::register(&hand.model).unwrap();
    let mut cpu = hand.cpu(0);
    cpu.attend(vcpu.index());
    let _ = cpu.read(Gpa(0));
    assert!(matches!(hand.violation(), Some(Violation::OutsideGate { cpu: 0, .. })));
}

#[test]
fn registers_that_make_no_sense_are_named() {
    let hand = Hand::ept();
    let root = hand.tables[0];
    for eptp in [root | 3 << 3 | 1, root | 2 << 3 | 6, root | EPTP | 1 << 8] {
        drop(hand.model.cpu(0, EptRegisters { eptp, mode_based: false }));
        assert!(matches!(hand.violation(), Some(Violation::BadRegisters { .. })), "{eptp:#x}");
    }
    let npt = NptRegisters { ncr3: root, asid: ASID, five_levels: false };
    drop(hand.model.cpu(0, npt));
    assert!(matches!(hand.violation(), Some(Violation::BadRegisters { .. })), "another machine");
    let hand = Hand::npt();
    drop(hand.model.cpu(0, NptRegisters { asid: 0, ..npt }));
    assert!(matches!(hand.violation(), Some(Violation::BadRegisters { .. })));
}

/// A page of a real tree, used by a vCPU that then enters without doing what it was asked after `change`.
fn unanswered<F: Modelled>(
    format: F,
    change: impl for<'m> FnOnce(
        &Tree<'m, F, Model>,
        &mut Participant<'m, Model>,
        &mut Reserve<'m, Model>,
    ),
) -> Option<Violation> {
    let builder = Model::builder().architecture(F::ARCHITECTURE).cpus(1).slots(2);
    let model = builder.on_violation(OnViolation::Record).build().unwrap();
    let memory = model.host_memory(BLOCK, Backing::AnonymousHugetlb { page_size: BLOCK }).unwrap();
    {
        let tree = Tree::new(&model, format, 3).unwrap();
        let mut who = Participant::register(&model).unwrap();
        let mut reserve = Reserve::new(&model);
        reserve.top_up(8).unwrap();
        let rw = tree.template(Attributes::RW).unwrap();
        let (all, output) = (range(0, BLOCK), memory.page(0).unwrap().hpa);
        tree.map(&who, &mut reserve, all, output, rw, Level::LAST).unwrap();
        let mut vcpu = Participant::register(&model).unwrap();
        let mut cpu = model.cpu(0, F::control_of(&tree)).unwrap();
        vcpu.switch(tree.root());
        cpu.attend(vcpu.index());
        assert!(vcpu.enter().is_err());
        tree.answer();
        {
            let _inside = vcpu.enter().unwrap();
            cpu.write(Gpa(0), 1).unwrap();
        }
        change(&tree, &mut who, &mut reserve);
        assert!(model.violation().is_none());
        assert_eq!(vcpu.enter().err(), Some(Requests::INVALIDATE));
        let _inside = vcpu.enter().unwrap();
        let _ = cpu.write(Gpa(0), 2);
    }
    model.take_violation().map(|report| report.violation)
}

#[test]
fn whatever_the_engine_takes_away_a_vcpu_that_does_not_answer_is_caught() {
    let page = range(0, 4096);
    let all = range(0, BLOCK);
    for unanswered in [
        unanswered(<Ept>::new(48).unwrap(), |tree, who, reserve| {
            tree.unmap(who, reserve, page, Edges::Exact, |_| {}).unwrap();
        }),
        unanswered(Npt::new(48).unwrap(), |tree, who, _| {
            tree.write_protect(who, page, |_| {}).unwrap();
        }),
        unanswered(<Ept>::new(48).unwrap(), |tree, who, _| {
            // The tables of pages are freed, which its walk cache points to.
            assert_eq!(tree.collapse(who, all, Level::TOP), Ok(1));
            tree.reclaim(who);
        }),
        unanswered(Npt::new(52).unwrap(), |tree, who, reserve| {
            tree.unmap(who, reserve, all, Edges::Exact, |_| {}).unwrap();
            tree.reclaim(who);
        }),
    ] {
        assert!(
            matches!(unanswered, Some(Violation::NotInvalidated { cpu: 0, .. })),
            "{unanswered:?}"
        );
    }
}

fn range(start: u64, size: u64) -> GpaRange {
    GpaRange::new(Gpa(start), size).unwrap()
}
