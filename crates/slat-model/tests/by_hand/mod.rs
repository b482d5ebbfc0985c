//! Trees built by hand, bit by bit, and the steps of an engine one at a time, so that a test can leave one out.
#![allow(dead_code, reason = "each test file uses its part")]

use slat::maintenance::Instruction;
use slat::{Event, Gpa, GpaRange, Hpa, Machine, Promise};
use slat_model::{Backing, Builder, Cpu, HostMemory, Model, OnViolation, Registers, Violation};
use std::sync::Arc;

pub(crate) const EMPTY: u64 = 0;
pub(crate) const LOCKED: u64 = 1 << 62;
pub(crate) const DEAD: u64 = 0b11 << 61;

/// Bits 1 and 0: a table, or a page at level 3.
pub(crate) const TABLE: u64 = 0b11;
pub(crate) const BLOCK: u64 = 0b01;
/// Readable, inner shareable, access flag, write-back without FWB.
pub(crate) const RO: u64 = 1 << 10 | 0b11 << 8 | 0b01 << 6 | 0b1111 << 2;
pub(crate) const W: u64 = 1 << 7;
pub(crate) const RW: u64 = RO | W;
pub(crate) const AF: u64 = 1 << 10;
pub(crate) const DBM: u64 = 1 << 51;

/// VTCR_EL2: RES1, 16-bit VMIDs, walks write-back and inner shareable.
pub(crate) const VTCR: u64 = 1 << 31 | 1 << 19 | 0b11 << 12 | 0b01 << 10 | 0b01 << 8;
/// 4K granule, 40-bit addresses in and out, start at level 1 with two root tables.
pub(crate) const VTCR_4K: u64 = VTCR | 0b010 << 16 | 0b01 << 6 | (64 - 40);
pub(crate) const HA: u64 = 1 << 21;
pub(crate) const HD: u64 = 1 << 22;

pub(crate) const VMID: u64 = 7;
pub(crate) const MIB: u64 = 1 << 20;

/// A model, some memory and an empty tree.
pub(crate) struct Hand {
    pub(crate) model: Model,
    pub(crate) memory: Arc<HostMemory>,
    pub(crate) root: Hpa,
    pub(crate) vtcr: u64,
}

impl Hand {
    /// 4K granule, two CPUs, 8 MiB in 2 MiB pages; violations are recorded.
    pub(crate) fn new() -> Self {
        Self::with(Model::builder(), VTCR_4K, 2)
    }

    pub(crate) fn with(builder: Builder, vtcr: u64, roots: usize) -> Self {
        let model = builder.cpus(2).on_violation(OnViolation::Record).build().unwrap();
        let page_size = 1 << (2 * model.page_shift() - 3);
        let size = 4 * page_size;
        let memory = model.host_memory(size, Backing::AnonymousHugetlb { page_size }).unwrap();
        let root = model.allocate(roots).unwrap();
        Self { model, memory, root, vtcr }
    }

    pub(crate) fn registers(&self) -> Registers {
        let wide = self.root.0 >> 48;
        let root = self.root.0 & ((1 << 48) - 1);
        Registers { vttbr: root | wide << 2 | VMID << 48, vtcr: self.vtcr }
    }

    pub(crate) fn cpu(&self, index: usize) -> Cpu<'_> {
        self.model.cpu(index, self.registers()).unwrap()
    }

    /// The host-physical address of a byte of the memory.
    pub(crate) fn hpa(&self, offset: u64) -> u64 {
        self.memory.page(offset).unwrap().hpa.0
    }

    pub(crate) fn table(&self) -> u64 {
        self.model.allocate(1).unwrap().0
    }

    #[expect(unsafe_code, reason = "writes the test's own tables")]
    fn entry(&self, table: u64, index: u64) -> &slat::Entry {
        // SAFETY: the tests own all tables and write them as atomics only.
        unsafe { self.model.entry(Hpa(table + 8 * index)) }.unwrap()
    }

    pub(crate) fn get(&self, table: u64, index: u64) -> u64 {
        self.entry(table, index).read()
    }

    /// Sets an entry without telling anybody.
    pub(crate) fn put(&self, table: u64, index: u64, value: u64) {
        let entry = self.entry(table, index);
        while entry.update(entry.read(), value).is_err() {}
    }

    /// Sets bits of an entry without telling anybody.
    pub(crate) fn put_bits(&self, table: u64, index: u64, bits: u64) {
        let entry = self.entry(table, index);
        loop {
            let old = entry.read();
            if entry.update(old, old | bits).is_ok() {
                break;
            }
        }
    }

    /// Exchanges an entry as an engine does, and returns the old value.
    pub(crate) fn exchange(&self, table: u64, index: u64, new: u64) -> u64 {
        let old = self.get(table, index);
        let done = self.entry(table, index).update(old, new).is_ok();
        let entry = Hpa(table + 8 * index);
        self.model.observe(Event::Exchange { entry, old, new, done });
        assert!(done);
        old
    }

    /// Reads an entry as an engine does.
    pub(crate) fn load(&self, table: u64, index: u64) -> u64 {
        self.model.observe(Event::Load { entry: Hpa(table + 8 * index) });
        self.get(table, index)
    }

    /// Tables from the root down to level 3 for the 2 MiB at address 0 (4K granule): the level-2 and level-3 tables.
    pub(crate) fn tables(&self) -> (u64, u64) {
        let (second, third) = (self.table(), self.table());
        self.put(self.root.0, 0, second | TABLE);
        self.put(second, 0, third | TABLE);
        (second, third)
    }

    /// An operation begins by reading the root.
    pub(crate) fn begin(&self) {
        self.model.observe(Event::Begin);
        self.load(self.root.0, 0);
    }

    pub(crate) fn end(&self, promise: Promise) {
        self.model.observe(Event::End(promise));
    }

    pub(crate) fn execute(&self, instructions: &[Instruction]) {
        instructions.iter().for_each(|&instruction| self.model.execute(instruction));
    }

    pub(crate) fn publish(&self) {
        self.execute(&[Instruction::DsbIshst]);
    }

    pub(crate) fn enter(&self) -> Instruction {
        Instruction::EnterContext(self.registers().vttbr)
    }

    /// The whole sequence for one address on every CPU.
    pub(crate) fn invalidate(&self, gpa: u64) {
        self.execute(&[
            Instruction::DsbIshst,
            self.enter(),
            self.ipa(gpa),
            Instruction::DsbIsh,
            Instruction::TlbiVmalle1is,
            Instruction::DsbIsh,
            Instruction::Isb,
            Instruction::LeaveContext,
        ]);
    }

    /// The whole sequence for a VMID on every CPU.
    pub(crate) fn invalidate_all(&self) {
        self.execute(&[
            Instruction::DsbIshst,
            self.enter(),
            Instruction::TlbiVmalls12e1is,
            Instruction::DsbIsh,
            Instruction::Isb,
            Instruction::LeaveContext,
        ]);
    }

    pub(crate) fn ipa(&self, gpa: u64) -> Instruction {
        let page_shift = self.model.page_shift();
        Instruction::TlbiIpas2e1is { ipa: Gpa(gpa), page_shift, level: None }
    }

    /// The first violation so far, which is taken.
    pub(crate) fn violation(&self) -> Option<Violation> {
        self.model.take_violation().map(|report| report.violation)
    }

    /// Frees a table that the test owns.
    #[expect(unsafe_code, reason = "frees the test's own tables")]
    pub(crate) fn free(&self, table: u64) {
        // SAFETY: nothing but the model's walkers reads it, and the model keeps table memory mapped.
        unsafe { self.model.free(Hpa(table), 1) }
    }

    /// Nothing was violated, and everything cached agrees with the tables.
    pub(crate) fn assert_clean(&self) {
        self.model.check_quiet(self.registers());
        self.model.check_freed();
        if let Some(report) = self.model.violation() {
            panic!("{report}");
        }
    }
}

pub(crate) fn range(start: u64, size: u64) -> GpaRange {
    GpaRange::new(Gpa(start), size).unwrap()
}
