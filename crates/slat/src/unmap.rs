//! Unmap: after it, nothing in the range is translated.
//!
//! The entries of one table that must go are turned to LOCKED values that still carry them, invalidated with one range,
//! and then emptied (rule 9): nobody can install anything new where a TLB may still hold the old. A table that the
//! range covers is taken out as one entry, with everything below it, and freed after a grace period (rule 5).

use crate::backlog::Claim;
use crate::batch::Batch;
use crate::entry::LOCK_BIT;
use crate::machine::{Event, Machine, Promise};
use crate::rcu::{Counters, bump};
use crate::sabotage::{Skip, skips};
use crate::walk::{Flow, Run, Visit, Visitor, Wants};
use crate::{
    Error, Format, Gpa, GpaRange, Hpa, Level, Owner, Participant, Pin, Reserve, Template, Tree,
};

/// What happens to a block that reaches beyond the range.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Edges {
    /// It is split first: what lies outside stays mapped. Takes tables from the reserve.
    #[default]
    Exact,
    /// It goes as a whole: what lies outside will fault back. An owner's note that reaches beyond the range stays.
    Whole,
}

/// A leaf that an unmap has removed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Removed {
    /// What it covered.
    pub range: GpaRange,
    /// What it translated to.
    pub output: Hpa,
    /// What it permitted and remembered.
    pub template: Template,
    /// Whether hardware had marked it dirty.
    pub dirty: bool,
}

/// What the caller of an unmap wants to hear.
trait Hear {
    /// Of every leaf, so that each is taken by itself.
    const EACH: bool;
    /// A leaf was locked that hardware had marked dirty.
    fn dirty(&mut self, _: GpaRange) {}
    /// A leaf is gone from the tree and from every CPU.
    fn gone(&mut self, _: Removed) {}
}

struct Dirty<S>(S);

impl<S: FnMut(GpaRange)> Hear for Dirty<S> {
    const EACH: bool = false;

    fn dirty(&mut self, range: GpaRange) {
        (self.0)(range);
    }
}

struct Each<S>(S);

impl<S: FnMut(Removed)> Hear for Each<S> {
    const EACH: bool = true;

    fn gone(&mut self, leaf: Removed) {
        (self.0)(leaf);
    }
}

impl<D: Hear> Hear for &mut D {
    const EACH: bool = D::EACH;

    fn dirty(&mut self, range: GpaRange) {
        (**self).dirty(range);
    }

    fn gone(&mut self, leaf: Removed) {
        (**self).gone(leaf);
    }
}

/// The largest table has 8192 entries (64K granule).
const WORDS: usize = 8192 / 64;

/// The visitor that replaces everything in a range by `last`: nothing, or an owner's note.
struct Sweep<'t, 'm, F: Format, M: Machine, D> {
    tree: &'t Tree<'m, F, M>,
    counters: &'t Counters,
    reserve: &'t mut Reserve<'m, M>,
    last: u64,
    edges: Edges,
    hear: D,
    claim: Claim,
    /// Where the walk stopped.
    at: u64,
    end: u64,
    held: Held,
    /// What the held entries could have translated.
    batch: Batch,
    changed: u64,
    /// Whether tables were linked at the edges.
    opened: bool,
}

/// Entries of one table that this thread holds LOCKED.
struct Held {
    table: Option<Hpa>,
    level: Level,
    first: usize,
    /// Where the first of them begins.
    start: u64,
    end: usize,
    tables: usize,
    which: [u64; WORDS],
}

impl<F: Format, M: Machine, D: Hear> Sweep<'_, '_, F, M, D> {
    /// Locks the entry `old`, a leaf or a table. `Ok(None)`: done. `Ok(Some(now))`: it changed.
    fn lock(&mut self, visit: &Visit<'_, M>, old: u64) -> Result<Option<u64>, Flow> {
        let Visit { table, index, level, .. } = *visit;
        if self.held.table.is_some_and(|held| held != table.base()) {
            return Err(Flow::Pause);
        }
        let is_table = F::is_table(old, level);
        let size = self.tree.geometry().size(level);
        let start = visit.start & !(size - 1);
        if is_table && self.claim.left() == self.held.tables {
            if self.held.tables > 0 {
                return Err(Flow::Pause);
            }
            // As many as this table can still need.
            let rest = (self.end - start).div_ceil(size) as usize;
            let rest = rest.min(self.tree.geometry().entries().saturating_sub(index).max(1));
            self.claim = self.tree.claim(rest);
            if self.claim.left() == 0 {
                self.at = visit.start;
                return Err(Flow::Stop(Error::Backlog));
            }
        }
        let locked = if skips(Skip::UnmapLock) { self.last } else { F::freeze(old) };
        if let Err(now) = table.exchange(index, old, locked) {
            return Ok(Some(now));
        }
        self.held.add(table.base(), level, index, start);
        self.held.tables += usize::from(is_table);
        self.batch.add(start, start + size, (!is_table).then_some(level));
        if !is_table
            && F::is_dirty(old)
            && let Some(range) = GpaRange::new(Gpa(start), size)
        {
            self.hear.dirty(range);
        }
        self.changed += 1;
        Ok(None)
    }

    /// The leaf that was at `index` among the held entries.
    fn removed(&self, index: usize, entry: u64) -> Option<Removed> {
        let (format, level) = (&self.tree.format, self.held.level);
        let size = self.tree.geometry().size(level);
        let start = self.held.start + (index - self.held.first) as u64 * size;
        F::is_valid(entry).then_some(())?;
        Some(Removed {
            range: GpaRange::new(Gpa(start), size)?,
            output: format.output(entry, level),
            template: Template(format.template_of(entry, level)),
            dirty: F::is_dirty(entry),
        })
    }

    /// A block, empty entry or note that the range covers in part. `Ok`: there may be a table now.
    fn open_up(&mut self, visit: &Visit<'_, M>, old: u64) -> Result<(), Error> {
        let Visit { table, index, level, .. } = *visit;
        let (at, below) = (Gpa(visit.start), level.below());
        if F::is_valid(old) {
            let entry = (index, old, level);
            self.tree.split_entry(self.reserve, self.counters, table, entry, at, below)?;
            self.opened = true;
            return Ok(());
        }
        let new = self.tree.repeat(self.reserve, old).ok_or(Error::NeedTables { at, tables: 1 })?;
        if table.exchange(index, old, self.tree.format.table(new)).is_err() {
            self.tree.take_apart(self.reserve, new, below);
            return Err(Error::Retry);
        }
        bump(&self.counters.linked, 1);
        self.opened = true;
        Ok(())
    }

    #[inline]
    fn one(&mut self, visit: &Visit<'_, M>) -> Flow {
        let level = visit.level;
        let mut old = visit.entry;
        loop {
            if old & LOCK_BIT != 0 {
                return Flow::Again;
            }
            if F::is_table(old, level) {
                return Flow::Pause;
            }
            if old == self.last {
                return Flow::Next;
            }
            let valid = F::is_valid(old);
            let covered = visit.end - visit.start == self.tree.geometry().size(level);
            let whole = covered || valid && self.edges == Edges::Whole;
            if !whole && self.edges == Edges::Whole {
                // A note, or nothing: no translation to remove, and what lies outside is none of this range's.
                return Flow::Next;
            }
            if !whole {
                return match self.open_up(visit, old) {
                    // The table can be a leaf again (collapse, trim) before a walk gets into it: look again.
                    Ok(()) => Flow::Pause,
                    Err(Error::Retry) => Flow::Again,
                    Err(error) => {
                        self.at = visit.start;
                        Flow::Stop(error)
                    }
                };
            }
            let outcome = if valid {
                self.lock(visit, old)
            } else {
                self.changed += 1;
                Ok(visit.table.exchange(visit.index, old, self.last).err())
            };
            match outcome {
                Ok(None) => return Flow::Next,
                Ok(Some(now)) => old = now,
                Err(flow) => return flow,
            }
        }
    }
}

impl Held {
    #[inline(always)]
    fn add(&mut self, table: Hpa, level: Level, index: usize, start: u64) {
        if self.table.is_none() {
            (self.table, self.level, self.first) = (Some(table), level, index);
            self.start = start;
        }
        self.end = index + 1;
        self.which[index / 64 % WORDS] |= 1 << (index % 64);
    }
}

impl<F: Format, M: Machine, D: Hear> Visitor<M> for Sweep<'_, '_, F, M, D> {
    #[inline(always)]
    fn wants(&self, level: Level) -> Wants {
        if level < Level::LAST { Wants::LEAVES.and(Wants::BEFORE) } else { Wants::LEAVES }
    }

    fn leaf(&mut self, visit: &Visit<'_, M>) -> Flow {
        self.one(visit)
    }

    #[inline]
    fn run(&mut self, run: &Run<'_, M>) -> Result<(), (Gpa, Flow)> {
        for index in run.from..run.to {
            if run.table.load(index) == self.last {
                continue;
            }
            let visit = run.visit(index);
            match self.one(&visit) {
                Flow::Next | Flow::Skip => {}
                flow => return Err((visit.gpa(), flow)),
            }
        }
        Ok(())
    }

    fn before(&mut self, visit: &Visit<'_, M>) -> Flow {
        // Rule 8: where hardware keeps dirty state, leaves are taken one by one, each with its exact last value.
        let covered = visit.end - visit.start == self.tree.geometry().size(visit.level);
        let one_by_one = D::EACH || self.tree.format.tracks_dirty() && !skips(Skip::LeafByLeaf);
        if !covered || one_by_one {
            return Flow::Next;
        }
        match self.lock(visit, visit.entry) {
            Ok(None) => Flow::Skip,
            Ok(Some(_)) => Flow::Pause,
            Err(flow) => flow,
        }
    }

    fn settle(&mut self, pin: &Pin<'_, M>) {
        let Some(base) = self.held.table.take() else { return };
        let table = self.tree.found(pin, base);
        if let Some(what) = self.batch.invalidation() {
            self.tree.invalidate(self.counters, what);
        }
        let level = self.held.level;
        for index in self.held.first..self.held.end {
            let held = self.held.which[index / 64 % WORDS] & 1 << (index % 64) != 0;
            if !held || skips(Skip::UnmapLock) {
                continue;
            }
            let entry = F::thaw(table.load(index));
            table.settle(index, self.last);
            if F::is_table(entry, level) {
                self.tree.retire(&mut self.claim, self.tree.format.next(entry), level.below());
                bump(&self.counters.detached, 1);
            } else if D::EACH
                && let Some(leaf) = self.removed(index, entry)
            {
                self.hear.gone(leaf);
            }
        }
        self.held.which[self.held.first / 64 % WORDS..=(self.held.end - 1) / 64 % WORDS].fill(0);
        self.held.tables = 0;
        self.batch = Batch::EMPTY;
    }
}

impl<'m, F: Format, M: Machine> Tree<'m, F, M> {
    /// Unmaps `range`: mappings and owner notes alike. Returns how many entries (leaves and whole tables) went.
    ///
    /// `dirty` hears of each removed leaf that hardware had marked dirty; it runs with entries locked, so it must neither
    /// panic nor use the tree. When it returns, no CPU translates anything
    /// in the range. Costs, where tables are covered, one exchange and one store a table, one invalidation for all of a
    /// table's entries, and a share of a grace period; otherwise an exchange and a store a page.
    ///
    /// # Errors
    /// [`Error::NeedTables`] with [`Edges::Exact`], if a block must be split and the reserve is empty: everything
    /// before `at` is unmapped, top up and call again. [`Error::OutOfRange`], [`Error::Misaligned`].
    pub fn unmap(
        &self,
        who: &mut Participant<'_, M>,
        reserve: &mut Reserve<'m, M>,
        range: GpaRange,
        edges: Edges,
        dirty: impl FnMut(GpaRange),
    ) -> Result<u64, Error> {
        self.remove(who, reserve, range, edges, Dirty(dirty))
    }

    /// [`unmap`](Self::unmap), where every leaf is taken by itself and `removed` hears of each, when no CPU translates it
    /// any more: for cleaning the data caches of what it translated to, where a guest can bypass them. It runs with
    /// entries of the same table locked, so it must neither panic nor use the tree. Costs an exchange and a store a leaf,
    /// and one invalidation for those of a table.
    ///
    /// # Errors
    /// As [`unmap`](Self::unmap).
    pub fn unmap_leaves(
        &self,
        who: &mut Participant<'_, M>,
        reserve: &mut Reserve<'m, M>,
        range: GpaRange,
        edges: Edges,
        removed: impl FnMut(Removed),
    ) -> Result<u64, Error> {
        self.remove(who, reserve, range, edges, Each(removed))
    }

    fn remove<D: Hear>(
        &self,
        who: &mut Participant<'_, M>,
        reserve: &mut Reserve<'m, M>,
        range: GpaRange,
        edges: Edges,
        hear: D,
    ) -> Result<u64, Error> {
        self.check(range)?;
        self.machine.observe(Event::Begin);
        let result = self.sweep(who, reserve, range, F::EMPTY, edges, hear);
        let promise = if result.is_ok() { Promise::Gone(range) } else { Promise::Nothing };
        self.machine.observe(Event::End(promise));
        if result.is_ok() && (D::EACH || self.format.tracks_dirty()) {
            self.trim(who, range)?;
        }
        self.reclaim_if_many(who);
        result
    }

    /// Unmaps `range` and notes on every frame of it who owns it. Returns how many entries changed.
    ///
    /// # Errors
    /// As [`unmap`](Self::unmap).
    pub fn set_owner(
        &self,
        who: &mut Participant<'_, M>,
        reserve: &mut Reserve<'m, M>,
        range: GpaRange,
        owner: Owner,
        dirty: impl FnMut(GpaRange),
    ) -> Result<u64, Error> {
        self.check(range)?;
        self.machine.observe(Event::Begin);
        let result =
            self.sweep(who, reserve, range, owner.entry() | F::ABSENT, Edges::Exact, Dirty(dirty));
        let promise = if result.is_ok() { Promise::Gone(range) } else { Promise::Nothing };
        self.machine.observe(Event::End(promise));
        self.reclaim_if_many(who);
        result
    }

    fn sweep(
        &self,
        who: &mut Participant<'_, M>,
        reserve: &mut Reserve<'m, M>,
        range: GpaRange,
        last: u64,
        edges: Edges,
        mut hear: impl Hear,
    ) -> Result<u64, Error> {
        self.check_machine(reserve.machine())?;
        let mut rest = range;
        let mut total = 0;
        let mut stored = false;
        loop {
            let held = Held {
                table: None,
                level: Level::LAST,
                first: 0,
                start: 0,
                end: 0,
                tables: 0,
                which: [0; WORDS],
            };
            let mut sweep = Sweep {
                tree: self,
                counters: &who.counters,
                reserve,
                last,
                edges,
                hear: &mut hear,
                claim: self.claim(0),
                at: rest.start().0,
                end: rest.end().0,
                held,
                batch: Batch::EMPTY,
                changed: 0,
                opened: false,
            };
            let result = self.walk_checked(who, rest, &mut sweep);
            let Sweep { claim, at, changed, opened, .. } = sweep;
            stored |= opened || changed > 0;
            self.unclaim(claim);
            bump(&who.counters.exchanged, changed);
            total += changed;
            match (result, GpaRange::new(Gpa(at), rest.end().0 - at)) {
                (Err(Error::Backlog), Some(left)) => {
                    rest = left;
                    self.reclaim(who);
                }
                (result, _) => {
                    if stored {
                        self.publish(&who.counters);
                    }
                    return result.map(|()| total);
                }
            }
        }
    }
}
