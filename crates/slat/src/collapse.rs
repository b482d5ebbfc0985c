//! Collapse: a table whose leaves translate one contiguous, aligned piece of memory becomes a block.
//!
//! The child's entries are frozen first, each exchanged to a LOCKED value that still carries it, then the parent entry
//! is locked. Whatever a concurrent operation did to a child before it was frozen is in the value that was read;
//! whatever comes later meets LOCKED and walks again. When the block stands, the old table's entries become DEAD, so
//! that whoever still stands in it walks again from the root instead of waiting there (rules 4 and 5).

use crate::backlog::Claim;
use crate::batch::Batch;
use crate::entry::{DEAD, LOCK_BIT};
use crate::install::{Installed, Leaf};
use crate::lookup::Place;
use crate::machine::Machine;
use crate::rcu::{Counters, bump};
use crate::sabotage::{Skip, skips};
use crate::table::Table;
use crate::walk::{Flow, Visit, Visitor, Wants};
use crate::{Error, Format, Gpa, GpaRange, Hpa, Level, Owner, Participant, Pin, Tree};

/// A table whose first entries are frozen by this thread.
pub(crate) struct Frozen<'p, M> {
    table: Table<'p, M>,
    level: Level,
    frozen: usize,
}

impl<'p, M: Machine> Frozen<'p, M> {
    /// Freezes every entry of `table`, the entries of which are at `level`, as long as `judge` agrees to its value.
    /// `None`: it did not, or another thread holds an entry; all is as it was.
    pub(crate) fn freeze<F: Format>(
        tree: &Tree<'_, F, M>,
        table: Table<'p, M>,
        level: Level,
        mut judge: impl FnMut(usize, u64) -> bool,
    ) -> Option<Self> {
        let mut frozen = Self { table, level, frozen: 0 };
        while frozen.frozen < tree.geometry().entries() {
            let old = table.load(frozen.frozen);
            if old & LOCK_BIT != 0 || !judge(frozen.frozen, old) {
                frozen.thaw::<F>();
                return None;
            }
            if skips(Skip::Freeze) || table.exchange(frozen.frozen, old, F::freeze(old)).is_ok() {
                frozen.frozen += 1;
            } else if table.entry(frozen.frozen).read() & LOCK_BIT == 0 {
                // Hardware or a fault changed it: judge the new value. A judge that sums up sees the entry twice,
                // which changes neither an intersection nor a union.
                continue;
            }
        }
        Some(frozen)
    }

    /// Backs out: every entry gets its value back.
    pub(crate) fn thaw<F: Format>(self) {
        for index in 0..self.frozen {
            self.table.settle(index, F::thaw(self.table.load(index)));
        }
    }

    /// Puts `new` into the parent entry, which pointed to this table by `entry`, and lets the table go.
    ///
    /// # Errors
    /// The frozen table, if another thread changed the parent entry meanwhile.
    pub(crate) fn replace<F: Format>(
        self,
        tree: &Tree<'_, F, M>,
        counters: &Counters,
        claim: &mut Claim,
        parent: (Table<'p, M>, usize, u64, Gpa),
        new: u64,
    ) -> Result<(), Self> {
        let (table, index, entry, at) = parent;
        if table.exchange(index, entry, F::LOCKED).is_err() {
            return Err(self);
        }
        let above = Level::new(self.level.number() - 1).unwrap_or(Level::TOP);
        tree.invalidate(counters, tree.table_at(at, above));
        self.commit(tree, counters, claim, (table, index), new);
        Ok(())
    }

    /// When the parent entry is LOCKED and what it translated was invalidated: lets the table go.
    fn commit<F: Format>(
        self,
        tree: &Tree<'_, F, M>,
        counters: &Counters,
        claim: &mut Claim,
        (table, index): (Table<'p, M>, usize),
        new: u64,
    ) {
        for index in 0..self.frozen {
            let dead = match skips(Skip::Dead) {
                true => F::thaw(self.table.load(index)),
                false => DEAD | F::ABSENT,
            };
            self.table.settle(index, dead);
        }
        table.settle(index, new);
        tree.retire(claim, self.table.base(), self.level);
        bump(&counters.exchanged, self.frozen as u64 + 1);
        bump(&counters.detached, 1);
    }
}

/// How many tables of one parent are frozen, and then replaced with one invalidation.
const AT_ONCE: usize = if cfg!(any(loom, shuttle)) { 2 } else { 8 };

/// A frozen table whose parent entry is LOCKED, until it is invalidated.
struct Pending {
    child: Hpa,
    index: usize,
    block: u64,
    claim: Claim,
}

struct Collapser<'t, 'm, F: Format, M: Machine> {
    tree: &'t Tree<'m, F, M>,
    counters: &'t Counters,
    range: GpaRange,
    largest: Level,
    collapsed: u64,
    /// The table whose entries are pending, and their level.
    parent: Option<(Hpa, Level)>,
    pending: [Option<Pending>; AT_ONCE],
    /// What the pending entries could have translated.
    batch: Batch,
}

impl<F: Format, M: Machine> Collapser<'_, '_, F, M> {
    /// The block at `level` that takes the place of `table`, if its entries agree.
    fn block_of(&self, table: Table<'_, M>, level: Level) -> Option<u64> {
        let first = table.load(0);
        let below = level.below();
        if !F::is_valid(first) || F::is_table(first, below) {
            return None;
        }
        let output = self.tree.format.output(first, below);
        let aligned = output.0 & (self.tree.geometry().size(level) - 1) == 0;
        aligned.then(|| {
            let template = self.tree.format.template_of(first, below);
            self.tree.format.leaf(level, output, template)
        })
    }

    fn collapse(&mut self, visit: &Visit<'_, M>) -> Flow {
        let Visit { table, index, level, entry, .. } = *visit;
        let here = Some((table.base(), level));
        let Some(place) = self.pending.iter().position(Option::is_none) else { return Flow::Pause };
        if self.parent.is_some() && self.parent != here {
            return Flow::Pause;
        }
        let child = self.tree.child(table, entry);
        let Some(mut block) = self.block_of(child, level) else { return Flow::Next };
        let tree = self.tree;
        let below = level.below();
        let output = tree.format.output(block, level);
        let size = tree.geometry().size(below);
        let mut dirty = false;
        let mut judge = |index: usize, old: u64| {
            if !F::is_valid(old)
                || F::is_table(old, below)
                || tree.format.output(old, below).0 != output.0 + index as u64 * size
            {
                return false;
            }
            let template = tree.format.template_of(old, below);
            let mut leaf = tree.format.leaf(level, output, template);
            if skips(Skip::Intersection) {
                leaf = F::relaxed(leaf, block);
            }
            let both = F::intersect(block, leaf);
            let agree = F::essence(both) == F::essence(F::intersect(leaf, block));
            block = F::absorb(both, leaf);
            dirty |= F::is_dirty(leaf);
            agree
        };
        // Look before freezing: most tables that cannot collapse are found out without an exchange.
        if !(0..tree.geometry().entries()).all(|index| judge(index, child.load(index))) {
            return Flow::Next;
        }
        let Ok(claim) = tree.claim_one() else { return Flow::Stop(Error::Backlog) };
        // A block that may not be written has no place for the dirty state of a child.
        let frozen = Frozen::freeze(tree, child, below, judge).and_then(|frozen| {
            let keeps = !dirty || F::is_dirty(block);
            if keeps && table.exchange(index, entry, F::LOCKED).is_ok() {
                return Some(frozen);
            }
            frozen.thaw::<F>();
            None
        });
        match frozen {
            Some(frozen) => {
                let start = visit.start & !(tree.geometry().size(level) - 1);
                self.batch.add(start, start + tree.geometry().size(level), None);
                let child = frozen.table.base();
                self.pending[place] = Some(Pending { child, index, block, claim });
                self.parent = here;
            }
            None => tree.unclaim(claim),
        }
        Flow::Next
    }
}

impl<F: Format, M: Machine> Visitor<M> for Collapser<'_, '_, F, M> {
    const TABLES: usize = AT_ONCE;

    #[inline(always)]
    fn wants(&self, level: Level) -> Wants {
        // Afterwards, so that what collapsed below can collapse again above.
        if self.tree.format.leaf_allowed(level) && level < Level::LAST && level >= self.largest {
            Wants::AFTER
        } else {
            Wants::NOTHING
        }
    }

    fn after(&mut self, visit: &Visit<'_, M>) -> Flow {
        let size = self.tree.geometry().size(visit.level);
        let start = visit.start & !(size - 1);
        let inside = self.range.start().0 <= start && start + size <= self.range.end().0;
        if inside { self.collapse(visit) } else { Flow::Next }
    }

    fn settle(&mut self, pin: &Pin<'_, M>) {
        let Some((base, level)) = self.parent.take() else { return };
        let (tree, parent) = (self.tree, self.tree.found(pin, base));
        if let Some(what) = self.batch.invalidation() {
            tree.invalidate(self.counters, what);
        }
        for pending in &mut self.pending {
            let Some(Pending { child, index, block, mut claim }) = pending.take() else { continue };
            let table = tree.found(pin, child);
            let frozen = Frozen { table, level: level.below(), frozen: tree.geometry().entries() };
            frozen.commit(tree, self.counters, &mut claim, (parent, index), block);
            tree.unclaim(claim);
            self.collapsed += 1;
            bump(&self.counters.collapses, 1);
        }
        self.batch = Batch::EMPTY;
    }
}

impl<'m, F: Format, M: Machine> Tree<'m, F, M> {
    /// Turns every table that lies wholly inside `range` and whose leaves agree (contiguous, aligned, same memory type
    /// and software bits) into a block, from the last level upwards, as far as to level `largest`. The block gets the permissions that all of them
    /// had and the access flag and dirty state that any of them had. Returns how many tables became blocks.
    ///
    /// Best effort: a table in which another thread is at work is left alone. Costs an exchange and a store an entry
    /// and one invalidation for up to 8 neighbouring blocks, whose tables are frozen together, under one pin. Note that one read-only page makes its whole block read-only.
    ///
    /// # Errors
    /// [`Error::OutOfRange`], [`Error::Misaligned`], [`Error::OtherMachine`].
    pub fn collapse(
        &self,
        who: &mut Participant<'_, M>,
        range: GpaRange,
        largest: Level,
    ) -> Result<u64, Error> {
        self.check(range)?;
        let mut total = 0;
        loop {
            let counters = &who.counters;
            let mut collapser = Collapser {
                tree: self,
                counters,
                range,
                largest,
                collapsed: 0,
                parent: None,
                pending: core::array::from_fn(|_| None),
                batch: Batch::EMPTY,
            };
            let result = self.walk_checked(who, range, &mut collapser);
            total += collapser.collapsed;
            match result {
                Err(Error::Backlog) => self.reclaim(who),
                result => {
                    if total > 0 {
                        self.publish(&who.counters);
                    }
                    return result.map(|()| total);
                }
            }
        }
    }

    /// [`install`](Self::install) of a block where a table stands.
    pub(crate) fn install_over_table(
        &self,
        pin: &Pin<'_, M>,
        leaf: &Leaf,
        place: &Place<'_, M>,
    ) -> Result<Option<Installed>, Error> {
        let below = leaf.level.below();
        let child = self.child(place.table, place.entry);
        let mut claim = self.claim_one()?;
        let mut block = self.format.leaf(leaf.level, leaf.output, leaf.template.0);
        let mut dirty = false;
        let mut refused = Error::Retry;
        let frozen = Frozen::freeze(self, child, below, |_, old| {
            if F::is_table(old, below) {
                refused = Error::Level(leaf.level);
            } else if let (false, Some(owner)) = (F::is_valid(old), Owner::of(old)) {
                refused = Error::Owned { at: leaf.gpa, owner };
            } else {
                if F::is_valid(old) {
                    dirty |= F::is_dirty(old);
                    block = F::absorb(block, old);
                }
                return true;
            }
            false
        });
        let parent = (place.table, place.index, place.entry, leaf.gpa);
        let done = match frozen {
            None => Err(refused),
            Some(frozen) => match frozen.replace(self, pin.counters(), &mut claim, parent, block) {
                Ok(()) => Ok(Some(Installed::Collapsed { dirty })),
                Err(frozen) => {
                    frozen.thaw::<F>();
                    Err(Error::Retry)
                }
            },
        };
        self.unclaim(claim);
        done
    }

    /// Frees the empty tables that lie wholly inside `range`, from the last level upwards, and returns how many left
    /// the tree. Best effort, as [`collapse`](Self::collapse); a table that holds an owner's note is not empty.
    ///
    /// # Errors
    /// [`Error::OutOfRange`], [`Error::Misaligned`], [`Error::OtherMachine`].
    pub fn trim(&self, who: &mut Participant<'_, M>, range: GpaRange) -> Result<u64, Error> {
        self.check(range)?;
        let mut total = 0;
        loop {
            let mut trimmer = Trimmer { tree: self, counters: &who.counters, range, trimmed: 0 };
            let result = self.walk_checked(who, range, &mut trimmer);
            total += trimmer.trimmed;
            match result {
                Err(Error::Backlog) => self.reclaim(who),
                result => {
                    if total > 0 {
                        self.publish(&who.counters);
                    }
                    return result.map(|()| total);
                }
            }
        }
    }
}

struct Trimmer<'t, 'm, F: Format, M: Machine> {
    tree: &'t Tree<'m, F, M>,
    counters: &'t Counters,
    range: GpaRange,
    trimmed: u64,
}

impl<F: Format, M: Machine> Visitor<M> for Trimmer<'_, '_, F, M> {
    #[inline(always)]
    fn wants(&self, level: Level) -> Wants {
        if level < Level::LAST { Wants::AFTER } else { Wants::NOTHING }
    }

    fn after(&mut self, visit: &Visit<'_, M>) -> Flow {
        let Visit { table, index, level, entry, .. } = *visit;
        let tree = self.tree;
        let size = tree.geometry().size(level);
        let start = visit.start & !(size - 1);
        if start < self.range.start().0 || start + size > self.range.end().0 {
            return Flow::Next;
        }
        let child = tree.child(table, entry);
        if !(0..tree.geometry().entries()).all(|index| child.load(index) == F::EMPTY) {
            return Flow::Next;
        }
        let Ok(mut claim) = tree.claim_one() else { return Flow::Stop(Error::Backlog) };
        let parent = (table, index, entry, Gpa(start));
        let frozen = Frozen::freeze(tree, child, level.below(), |_, old| old == F::EMPTY);
        match frozen.map(|f| f.replace(tree, self.counters, &mut claim, parent, F::EMPTY)) {
            Some(Ok(())) => self.trimmed += 1,
            Some(Err(frozen)) => frozen.thaw::<F>(),
            None => {}
        }
        tree.unclaim(claim);
        Flow::Next
    }
}
