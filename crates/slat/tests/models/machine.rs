//! A machine for loom and shuttle: tables made of their atomics, and CPUs with the worst TLBs that Arm permits.
//!
//! A violation does not panic where it is seen, since half of an operation would then be unwound outside of the explorer's
//! control. It is remembered, the execution goes on to its end (freed tables stay readable until then), and
//! [`World`](crate::world::World) reports it there.
#![expect(unsafe_code, reason = "a machine promises that its tables are what it says")]

use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};

use slat::maintenance::{Features, Instruction};
use slat::{Entry, Event, Format, Gpa, Hpa, Machine, Slot, sabotage};

use crate::explorer::{self, Life, PATIENCE, thread, turn};
use crate::format::{PAGE, Tiny};
use crate::tlb::{Cached, Cover, Tlb};

const ENTRIES: usize = 1 << Tiny::INDEX_BITS;

/// One table.
struct Table {
    entries: Box<[Entry]>,
    freed: bool,
    life: Life,
}

/// One CPU of the guest.
struct Cpu {
    tlb: Mutex<Tlb>,
    /// Held during a walk and the access that it is for: an invalidation waits for them, as `dsb` does.
    walking: explorer::Mutex<()>,
}

impl Cpu {
    fn new() -> Self {
        Self { tlb: Mutex::new(Tlb::default()), walking: explorer::Mutex::new(()) }
    }

    fn exclude_walks(&self) -> explorer::MutexGuard<'_, ()> {
        turn();
        self.walking.lock().unwrap()
    }

    fn tlb(&self) -> std::sync::MutexGuard<'_, Tlb> {
        self.tlb.lock().unwrap()
    }
}

/// Table memory, CPUs, and what has gone wrong.
///
/// The locks of `std` are never held across an operation of the explorer, so they are never contended.
pub(crate) struct Tables {
    format: Tiny,
    slots: Vec<Slot>,
    memory: Mutex<Vec<Table>>,
    root: OnceLock<Hpa>,
    cpus: Vec<Cpu>,
    /// Which thread is which CPU.
    running: Mutex<Vec<(thread::ThreadId, usize)>>,
    /// Invalidations that no barrier has completed yet.
    pending: Mutex<Vec<(thread::ThreadId, Cover)>>,
    waits: AtomicUsize,
    violation: Mutex<Option<String>>,
    features: Features,
    /// Whether to print what happens.
    trace: bool,
}

impl Tables {
    /// A machine with so many CPUs, and slots for so many participants.
    pub(crate) fn new(format: Tiny, slots: usize, cpus: usize) -> Self {
        Self {
            format,
            slots: (0..slots).map(|_| Slot::new()).collect(),
            memory: Mutex::new(Vec::new()),
            root: OnceLock::new(),
            cpus: (0..cpus).map(|_| Cpu::new()).collect(),
            running: Mutex::new(Vec::new()),
            pending: Mutex::new(Vec::new()),
            waits: AtomicUsize::new(0),
            violation: Mutex::new(None),
            features: Features { ttl: true, ..Features::default() },
            trace: false,
        }
    }

    /// With CPUs that tolerate a change of block size as well as this (FEAT_BBM).
    pub(crate) fn bbm_level(mut self, bbm_level: u8) -> Self {
        self.features.bbm_level = bbm_level;
        self
    }

    /// Prints what happens.
    pub(crate) fn traced(mut self, trace: bool) -> Self {
        self.trace = trace;
        self
    }

    /// Where the CPUs' walks begin.
    pub(crate) fn set_root(&self, root: Hpa) {
        self.root.set(root).unwrap();
    }

    /// The calling thread runs this CPU from now on: what is invalidated locally is invalidated there.
    pub(crate) fn run_cpu(&self, cpu: usize) {
        let me = thread::current().id();
        let mut running = self.running.lock().unwrap();
        running.retain(|&(thread, _)| thread != me);
        running.push((me, cpu));
    }

    fn trace(&self, what: &dyn std::fmt::Debug) {
        if self.trace {
            println!("{:?}: {what:x?}", thread::current().id());
        }
    }

    /// Remembers what went wrong first.
    pub(crate) fn violation(&self, what: &str) {
        self.trace(&what);
        self.violation.lock().unwrap().get_or_insert_with(|| what.to_owned());
    }

    /// What went wrong first, if anything did. Tables that were not freed are a violation too.
    pub(crate) fn verdict(&self) -> Option<String> {
        if self.memory.lock().unwrap().iter().any(|table| !table.freed) {
            self.violation("a table was never freed");
        }
        self.violation.lock().unwrap().clone()
    }

    fn failed(&self) -> bool {
        self.violation.lock().unwrap().is_some()
    }

    fn index(address: Hpa) -> usize {
        (address.0 / PAGE - 1) as usize
    }

    /// The table at `address` is used.
    fn used(&self, address: Hpa) {
        if self.failed() {
            return;
        }
        let memory = self.memory.lock().unwrap();
        let table = &memory[Self::index(address)];
        let ordered = table.life.used();
        let freed = table.freed;
        drop(memory);
        if freed || !ordered {
            self.violation("use after free: a freed table was used");
        }
    }

    /// The table at `address` ends.
    fn ends(&self, address: Hpa) {
        if self.failed() {
            return;
        }
        let mut memory = self.memory.lock().unwrap();
        let table = &mut memory[Self::index(address)];
        let twice = std::mem::replace(&mut table.freed, true);
        let ordered = table.life.ends();
        drop(memory);
        if twice {
            self.violation("a table was freed twice");
        }
        if !ordered {
            self.violation("use after free: a table was freed while it could be used");
        }
        if self.cpus.iter().any(|cpu| cpu.tlb().reaches(address)) {
            self.violation("a table was freed while a TLB could still reach it");
        }
    }

    fn entry(&self, table: Hpa, index: usize) -> &Entry {
        self.used(table);
        // SAFETY: tables are kept until the machine is dropped, and have `ENTRIES` entries.
        unsafe { self.entries(table).add(index).as_ref() }
    }

    /// Clears what `covers` covers, on one CPU or on all.
    fn invalidate(&self, cpu: Option<usize>, covers: &[Cover]) {
        for (_, cpu) in
            self.cpus.iter().enumerate().filter(|&(n, _)| cpu.is_none_or(|cpu| cpu == n))
        {
            let walks = cpu.exclude_walks();
            covers.iter().for_each(|cover| cpu.tlb().invalidate(cover));
            drop(walks);
        }
    }

    fn later(&self, cover: Cover) {
        self.pending.lock().unwrap().push((thread::current().id(), cover));
    }

    /// A barrier completes this thread's invalidations.
    fn complete(&self, cpu: Option<usize>) {
        let me = thread::current().id();
        let mut pending = self.pending.lock().unwrap();
        let mine = pending.extract_if(.., |(thread, _)| *thread == me);
        let covers: Vec<Cover> = mine.map(|(_, cover)| cover).collect();
        drop(pending);
        if !covers.is_empty() {
            self.invalidate(cpu, &covers);
        }
    }

    /// One walk of the hardware, from the root or from what a walk cache remembers. Hardware may walk at any time for
    /// any address, also for one that the TLB translates.
    fn walk(&self, cpu: &Cpu, gpa: Gpa) {
        let geometry = self.format.geometry();
        let mut table = *self.root.get().unwrap();
        let mut level = geometry.start();
        loop {
            let size = geometry.size(level);
            let start = gpa.0 & !(size - 1);
            let index = (gpa.0 / size) as usize % ENTRIES;
            let entry = self.entry(table, index).read();
            let remembered = cpu.tlb().table(level, gpa);
            let next = if Tiny::is_table(entry, level) {
                let next = self.format.next(entry);
                let another_size = self.features.bbm_level < 2 && cpu.tlb().covers(gpa, level);
                if remembered.is_some_and(|table| table != next) || another_size {
                    self.violation("break-before-make: a table meets another translation in a TLB");
                }
                cpu.tlb().remember(level, start, size, next);
                remembered.unwrap_or(next)
            } else if Tiny::is_valid(entry) {
                let output = self.format.output(entry, level);
                let new = Cached { start, size, level, output, entry, table, index };
                if remembered.is_some() || cpu.tlb().conflicts(&new, self.features.bbm_level) {
                    self.violation("break-before-make: a leaf meets another translation in a TLB");
                }
                return cpu.tlb().add(new);
            } else if let Some(next) = remembered {
                next
            } else {
                return;
            };
            table = next;
            level = level.below();
        }
    }

    /// CPU `cpu` walks ahead of any use.
    pub(crate) fn speculate(&self, cpu: usize, gpa: Gpa) {
        let cpu = &self.cpus[cpu];
        let walks = cpu.exclude_walks();
        self.walk(cpu, gpa);
        drop(walks);
    }

    /// A load or store by the guest. If its CPU translates it, `with` is called with the host address before any
    /// invalidation can be complete. Whether it did; otherwise the access faults.
    pub(crate) fn access(&self, cpu: usize, gpa: Gpa, write: bool, with: impl FnOnce(Hpa)) -> bool {
        let cpu = &self.cpus[cpu];
        let _walks = cpu.exclude_walks();
        self.walk(cpu, gpa);
        // What was cached first is used, although a walk would find another by now.
        let Some(cached) = cpu.tlb().leaf(gpa) else { return false };
        if write && !cached.writes() {
            if !cached.writes_after_dirtying() {
                return false;
            }
            let place = self.entry(cached.table, cached.index);
            let dirty = cached.dirtied();
            if place.update(cached.entry, dirty.entry).is_err() {
                cpu.tlb().forget(gpa);
                return false;
            }
            cpu.tlb().replace(dirty);
        }
        with(cached.translate(gpa));
        true
    }

    /// An instruction fetch by the guest, as [`access`](Self::access).
    #[cfg(shuttle)]
    pub(crate) fn fetch(&self, cpu: usize, gpa: Gpa, with: impl FnOnce(Hpa)) -> bool {
        let cpu = &self.cpus[cpu];
        let _walks = cpu.exclude_walks();
        self.walk(cpu, gpa);
        let Some(cached) = cpu.tlb().leaf(gpa).filter(Cached::executes) else { return false };
        with(cached.translate(gpa));
        true
    }

    /// Whether any CPU's TLB translates `gpa` in a way that `bad` says it must not, or did until an invalidation of
    /// which the calling thread cannot know that it is complete.
    pub(crate) fn caches(&self, gpa: Gpa, bad: impl Fn(&Cached) -> bool) -> bool {
        turn();
        self.cpus.iter().any(|cpu| {
            let tlb = cpu.tlb();
            tlb.leaf(gpa).is_some_and(|leaf| bad(&leaf)) || tlb.may_still_cache(gpa, &bad)
        })
    }
}

// SAFETY: each table is a heap allocation of its own, is read and written through `entries` only, and stays until the
// machine is dropped.
unsafe impl Machine for Tables {
    fn allocate(&self, tables: usize) -> Option<Hpa> {
        assert_eq!(tables, 1);
        let entries = (0..ENTRIES).map(|_| Entry::new()).collect();
        let mut memory = self.memory.lock().unwrap();
        memory.push(Table { entries, freed: false, life: Life::new() });
        Some(Hpa(memory.len() as u64 * PAGE))
    }

    unsafe fn free(&self, first: Hpa, _: usize) {
        self.ends(first);
    }

    fn entries(&self, table: Hpa) -> NonNull<Entry> {
        NonNull::from(&self.memory.lock().unwrap()[Self::index(table)].entries[0])
    }

    fn features(&self) -> Features {
        self.features
    }

    fn slots(&self) -> &[Slot] {
        &self.slots
    }

    fn execute(&self, instruction: Instruction) {
        self.trace(&instruction);
        match instruction {
            Instruction::TlbiIpas2e1is { ipa, level, .. }
            | Instruction::TlbiIpas2e1 { ipa, level, .. } => {
                self.later(Cover { start: ipa.0, size: PAGE, level });
            }
            Instruction::TlbiVmalls12e1is => {
                self.later(Cover { start: 0, size: u64::MAX, level: None });
            }
            Instruction::DsbIsh => self.complete(None),
            Instruction::DsbNsh => {
                let me = thread::current().id();
                let running = self.running.lock().unwrap();
                let cpu = running.iter().find(|(thread, _)| *thread == me).map(|&(_, cpu)| cpu);
                drop(running);
                // A thread that is no vCPU has no translations of the guest's.
                self.complete(Some(cpu.unwrap_or(usize::MAX)));
            }
            _ => {}
        }
    }

    fn relax(&self) {
        if self.waits.fetch_add(1, Ordering::Relaxed) == PATIENCE {
            self.violation("somebody waits for ever");
            // So that the execution can end.
            sabotage::leave_out(None);
        }
        thread::yield_now();
    }

    fn observe(&self, event: Event) {
        self.trace(&event);
        match event {
            Event::Load { entry } | Event::Store { entry, .. } | Event::Exchange { entry, .. } => {
                self.used(Hpa(entry.0 & !(PAGE - 1)));
            }
            Event::Fill { table } => self.used(table),
            _ => {}
        }
    }
}
