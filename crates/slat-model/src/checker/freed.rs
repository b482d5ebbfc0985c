//! When a table may be used: its state, and the quarantine that freed tables wait in, poisoned, so that whoever still
//! reaches one is caught.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;

use slat::Hpa;

use crate::checker::{Checker, Order, Reach, Violation};
use crate::model::Model;
use crate::tables::Taken;

/// In a table's state: allocated, and not freed.
const ALLOCATED: u32 = 1;
/// In a table's state: freed, and not available again.
const QUARANTINED: u32 = 1 << 1;
/// In a table's state: an entry has pointed to it, or a CPU has loaded it as its root, since it was allocated.
pub(crate) const LINKED: u32 = 1 << 2;
/// In a table's state: which table of its allocation it is, and how many that has.
const INDEX_SHIFT: u32 = 8;
const COUNT_SHIFT: u32 = 16;

/// What a freed table holds: invalid to hardware, neither LOCKED nor a note to the engine.
pub(crate) const POISON: u64 = 0x0bad_7ab1_e0f0_e0d0;
/// Freed allocations that wait until they are reused.
const WAITING: usize = 1024;

pub(crate) fn is_allocated(state: u32) -> bool {
    state & ALLOCATED != 0
}

pub(crate) fn is_linked(state: u32) -> bool {
    state & LINKED != 0
}

/// Which table of its allocation it is.
pub(crate) fn index_in_root(state: u32) -> u32 {
    (state >> INDEX_SHIFT) & 0xff
}

/// Freed tables, the oldest first.
#[derive(Debug, Default)]
pub(crate) struct Quarantine {
    waiting: VecDeque<(u32, usize)>,
}

impl Checker {
    fn set_states(&self, first: u32, tables: usize, state: u32) {
        for index in 0..tables as u32 {
            let state = state | index << INDEX_SHIFT | (tables as u32) << COUNT_SHIFT;
            self.states.of(first + index).store(state, Ordering::Release);
        }
    }

    /// One walk cache or root register less holds the table at `table`.
    pub(crate) fn release(&self, model: &Model, table: u64) {
        if self.is_on()
            && let Some(number) = model.tables.number(Hpa(table))
        {
            self.held.of(number).fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// One walk cache or root register more holds the table at `table`.
    pub(crate) fn hold(&self, model: &Model, table: u64) {
        if self.is_on()
            && let Some(number) = model.tables.number(Hpa(table))
        {
            self.held.of(number).fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Table `first` and its neighbours are the root that a CPU loads.
    pub(crate) fn hold_root(&self, model: &Model, root: u64, tables: u32) {
        self.hold(model, root);
        if self.is_on()
            && let Some(first) = model.tables.number(Hpa(root))
        {
            for index in 0..tables {
                if model.tables.number(Hpa(root + (u64::from(index) << model.page_shift))).is_some()
                {
                    self.states.of(first + index).fetch_or(LINKED, Ordering::Relaxed);
                }
            }
        }
    }
}

impl Model {
    /// Allocates while rules are checked.
    pub(crate) fn take_checked(&self, tables: usize) -> Option<u32> {
        let mut order = self.checker.order()?;
        let mut taken = self.tables.take(tables);
        while taken.is_none() && self.reuse_oldest(&mut order) {
            taken = self.tables.take(tables);
        }
        let Taken { first, recycled } = taken?;
        if recycled {
            // Atomic stores: an engine that breaks the rules may still look.
            let words = self.tables.words(first, tables);
            words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        }
        self.checker.set_states(first, tables, ALLOCATED);
        Some(first)
    }

    /// Frees while rules are checked.
    pub(crate) fn put_checked(&self, first: Hpa, tables: usize) {
        let Some(mut order) = self.checker.order() else { return };
        let bad = Violation::BadFree { first, tables };
        let Some(number) = self.tables.number(first).filter(|&n| self.tables.address(n) == first)
        else {
            return self.raise(bad);
        };
        let state = self.checker.states.of(number).load(Ordering::Acquire);
        let count = (state >> COUNT_SHIFT) as usize;
        if !is_allocated(state) || index_in_root(state) != 0 || count != tables {
            return self.raise(bad);
        }
        for number in number..number + tables as u32 {
            if self.checker.held.of(number).load(Ordering::Relaxed) > 0
                && let Some(by) = self.who_reaches(self.tables.address(number))
            {
                let table = self.tables.address(number);
                self.raise(Violation::FreedWhileReachable { table, by });
            }
        }
        self.checker.set_states(number, tables, QUARANTINED);
        let words = self.tables.words(number, tables);
        words.iter().for_each(|word| word.store(POISON, Ordering::Relaxed));
        self.tables.count_freed(tables);
        order.quarantine.waiting.push_back((number, tables));
        if order.quarantine.waiting.len() > WAITING {
            self.reuse_oldest(&mut order);
        }
    }

    /// Ends the quarantine of the table that was freed first.
    fn reuse_oldest(&self, order: &mut Order) -> bool {
        let Some((first, tables)) = order.quarantine.waiting.pop_front() else { return false };
        self.check_poison(first, tables);
        self.checker.set_states(first, tables, 0);
        self.tables.put(first, tables);
        true
    }

    fn check_poison(&self, first: u32, tables: usize) {
        for (index, word) in self.tables.words(first, tables).iter().enumerate() {
            let found = word.load(Ordering::Relaxed);
            if found != POISON {
                let entry = Hpa(self.tables.address(first).0 + 8 * index as u64);
                return self.raise(Violation::WrittenAfterFree { entry, found });
            }
        }
    }

    /// Checks that nothing was written into the tables that are in quarantine now. Called by tests at their end.
    pub fn check_freed(&self) {
        if let Some(order) = self.checker.order() {
            for &(first, tables) in &order.quarantine.waiting {
                self.check_poison(first, tables);
            }
        }
    }

    /// How hardware could get to a table that is held: by a root that is loaded, or by a walk cache of a VMID under
    /// which a CPU runs. What is cached under other VMIDs is not used before it is loaded again; then
    /// [`Violation::VmidReused`] is looked for.
    fn who_reaches(&self, table: Hpa) -> Option<Reach> {
        let loaded = |vmid| self.cores.iter().any(|core| core.vmid() == Some(vmid));
        for (cpu, core) in self.cores.iter().enumerate() {
            if core.root() == Some(table.0) {
                return Some(Reach::Root { cpu });
            }
            let tlb = core.tlb.lock();
            for space in tlb.spaces().iter().filter(|space| loaded(space.vmid)) {
                let found = space.levels().find_map(|level| {
                    space.any_pointer(level, crate::tlb::Span::ALL, |_, to| to == table.0)
                });
                if let Some((gpa, _)) = found
                    && !self.excuses(core, space.vmid)
                {
                    return Some(Reach::WalkCache { cpu, gpa: slat::Gpa(gpa) });
                }
            }
        }
        None
    }
}
