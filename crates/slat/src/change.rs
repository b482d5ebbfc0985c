//! Changing bits of leaves that stay what they are: the loop that write-protect, aging, harvesting and relaxing share.

use crate::batch::Batch;
use crate::entry::LOCK_BIT;
use crate::machine::Machine;
use crate::rcu::bump;
use crate::walk::{Flow, Run, Visit, Visitor, Wants};
use crate::{Error, Format, Gpa, GpaRange, Level, Participant, Tree};

/// A change of single leaves.
pub(crate) trait Change {
    /// Whether a stale translation must be invalidated afterwards (it lets through what the entry no longer does).
    const INVALIDATES: bool;
    /// Whether an entry that another thread is changing must be changed too (rule 4), or may be passed over.
    const EXACT: bool;
    /// A leaf with none of these bits needs no change.
    fn interest(&self) -> u64;
    /// The leaf after the change; the same if it needs none.
    fn apply(&self, leaf: u64) -> u64;
    /// Whether any page of `start..end` is to be changed.
    #[inline(always)]
    fn covers(&self, start: u64, end: u64) -> bool {
        let _ = (start, end);
        true
    }
    /// `leaf`, found at `start`, covers up to `end`, was changed or (`INTEREST` bits, but no change) seen.
    #[inline(always)]
    fn seen(&mut self, leaf: u64, start: u64, end: u64) {
        let _ = (leaf, start, end);
    }
}

/// The visitor that applies a change to each leaf of a range.
pub(crate) struct Changer<'t, 'm, F: Format, M: Machine, C> {
    tree: &'t Tree<'m, F, M>,
    pub(crate) change: C,
    pub(crate) changed: Batch,
    pub(crate) exchanged: u64,
    raised: bool,
}

impl<F: Format, M: Machine, C: Change> Changer<'_, '_, F, M, C> {
    #[inline(always)]
    fn before_exchange(&mut self) {
        if C::INVALIDATES && !self.raised {
            self.raised = true;
            self.tree.raise_open();
        }
    }

    #[inline(always)]
    fn note(&mut self, old: u64, start: u64, end: u64, level: Level) {
        self.exchanged += 1;
        self.changed.add(start, end, Some(level));
        self.change.seen(old, start, end);
    }

    /// One entry until it is as wanted; hardware may set its bits meanwhile (rule 2).
    #[inline]
    fn one(&mut self, visit: &Visit<'_, M>) -> Flow {
        let mut old = visit.entry;
        if !self.change.covers(visit.start, visit.end) {
            return Flow::Next;
        }
        loop {
            if old & LOCK_BIT != 0 {
                return if C::EXACT { Flow::Again } else { Flow::Next };
            }
            if !F::is_valid(old) || F::is_table(old, visit.level) {
                // A table that a racing thread linked here is walked into after this visit.
                return Flow::Next;
            }
            let new = self.change.apply(old);
            if new == old {
                if old & self.change.interest() != 0 {
                    self.change.seen(old, visit.start, visit.end);
                }
                return Flow::Next;
            }
            self.before_exchange();
            match visit.table.exchange(visit.index, old, new) {
                Ok(()) => {
                    let size = self.tree.geometry().size(visit.level);
                    let start = visit.start & !(size - 1);
                    self.note(old, start, start + size, visit.level);
                    return Flow::Next;
                }
                Err(now) => old = now,
            }
        }
    }

    /// Entries `pair` and `pair + 1`, both of interest as `old`, in one exchange. `false`: take them singly.
    #[inline(always)]
    fn pair(&mut self, run: &Run<'_, M>, index: usize, old: [u64; 2]) -> bool {
        let start = run.address(index);
        let middle = start + run.page_size;
        let end = middle + run.page_size;
        let new = [self.change.apply(old[0]), self.change.apply(old[1])];
        if !self.change.covers(start, middle) || !self.change.covers(middle, end) {
            return false;
        }
        if new[0] == old[0] || new[1] == old[1] {
            return false;
        }
        self.before_exchange();
        if !run.table.exchange_pair(index, old, new) {
            return false;
        }
        self.note(old[0], start, middle, Level::LAST);
        self.note(old[1], middle, end, Level::LAST);
        true
    }

    #[inline(always)]
    fn single(&mut self, run: &Run<'_, M>, index: usize) -> Result<(), (Gpa, Flow)> {
        let visit = run.visit(index);
        match self.one(&visit) {
            Flow::Next | Flow::Skip => Ok(()),
            flow => Err((visit.gpa(), flow)),
        }
    }
}

const CHUNK: usize = 8;

impl<F: Format, M: Machine, C: Change> Visitor<M> for Changer<'_, '_, F, M, C> {
    #[inline(always)]
    fn wants(&self, _: Level) -> Wants {
        Wants::LEAVES
    }

    #[inline]
    fn leaf(&mut self, visit: &Visit<'_, M>) -> Flow {
        self.one(visit)
    }

    /// Chunks of which no entry is of interest are passed over with a load and an `or` for each entry; neighbours
    /// that both change are exchanged together.
    #[inline]
    fn run(&mut self, run: &Run<'_, M>) -> Result<(), (Gpa, Flow)> {
        let interest = self.change.interest() | LOCK_BIT;
        let mut index = run.from;
        while index < run.to {
            if index % CHUNK != 0 || run.to - index < CHUNK {
                self.single(run, index)?;
                index += 1;
                continue;
            }
            let mut old = [0; CHUNK];
            let mut any = 0;
            for (n, slot) in old.iter_mut().enumerate() {
                *slot = run.table.load(index + n);
                any |= *slot;
            }
            if any & interest != 0 {
                for n in (0..CHUNK).step_by(2) {
                    let pair = [old[n], old[n + 1]];
                    let both = F::is_valid(pair[0] & pair[1])
                        && pair[0] & pair[1] & self.change.interest() != 0
                        && (pair[0] | pair[1]) & LOCK_BIT == 0;
                    if both && self.tree.pairs && self.pair(run, index + n, pair) {
                        continue;
                    }
                    for (n, old) in [(n, pair[0]), (n + 1, pair[1])] {
                        if old & interest != 0 {
                            self.single(run, index + n)?;
                        }
                    }
                }
            }
            index += CHUNK;
        }
        Ok(())
    }
}

impl<'m, F: Format, M: Machine> Tree<'m, F, M> {
    /// Applies `change` to each leaf of a checked range, and invalidates once if it must. The change and how many
    /// leaves were exchanged come back.
    #[inline(always)]
    pub(crate) fn change<C: Change>(
        &self,
        who: &Participant<'_, M>,
        range: GpaRange,
        change: C,
    ) -> Result<(C, u64), Error> {
        let mut changer =
            Changer { tree: self, change, changed: Batch::EMPTY, exchanged: 0, raised: false };
        let result = self.walk_checked(who, range, &mut changer);
        self.finish_change(who, changer, range, result)
    }

    fn finish_change<C: Change>(
        &self,
        who: &Participant<'_, M>,
        changer: Changer<'_, 'm, F, M, C>,
        range: GpaRange,
        result: Result<(), Error>,
    ) -> Result<(C, u64), Error> {
        bump(&who.counters.exchanged, changer.exchanged);
        if C::INVALIDATES {
            self.close(&who.counters, changer.raised, changer.changed, range);
        } else if !changer.changed.is_empty() {
            self.publish(&who.counters);
        }
        result.map(|()| (changer.change, changer.exchanged))
    }
}
