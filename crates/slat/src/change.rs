//! Changing bits of leaves that stay what they are: the loop that write-protect, aging, harvesting and relaxing share.

use crate::batch::Batch;
use crate::entry::LOCK_BIT;
use crate::machine::Machine;
use crate::rcu::bump;
use crate::sabotage::{Skip, skips};
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
    /// Whether [`selected`](Self::selected) and [`covers`](Self::covers) leave any page of the range out.
    const SELECTS: bool = false;
    /// How many pages from `start` on, as far as it looks, are not to be changed.
    #[inline(always)]
    fn skipped(&self, start: u64) -> usize {
        let _ = start;
        0
    }
    /// Which of the eight pages from `start` on are to be changed, bit 0 the first.
    #[inline(always)]
    fn selected(&self, start: u64) -> u32 {
        let _ = start;
        WHOLE
    }
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
                if skips(Skip::Rewalk) {
                    self.tree.machine.relax();
                    old = visit.table.load(visit.index);
                    continue;
                }
                return if C::EXACT { Flow::Again } else { Flow::Next };
            }
            if F::is_table(old, visit.level) {
                // A racing thread has split the leaf. It can be a leaf again before a walk gets into the table.
                return Flow::Pause;
            }
            if !F::is_valid(old) {
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

    /// Entries `index` and `index + 1`, both valid and of interest as `old`, in one exchange. `false`: take them singly.
    #[inline(always)]
    fn pair(&mut self, run: &Run<'_, M>, index: usize, old: [u64; 2]) -> bool {
        let new = [self.change.apply(old[0]), self.change.apply(old[1])];
        if new[0] == old[0] || new[1] == old[1] || !run.table.exchange_pair(index, old, new) {
            return false;
        }
        let (start, middle) = (run.address(index), run.address(index + 1));
        self.change.seen(old[0], start, middle);
        self.change.seen(old[1], middle, middle + run.page_size());
        true
    }

    /// The entries of one chunk of which a bit is set in `selected`; some of the chunk are of interest.
    ///
    /// All together go in pairs. Where only some are of interest, they go one by one, in the order of their bits: a
    /// branch for each entry that is as often taken as not costs more than an exchange.
    #[inline(always)]
    fn chunk(&mut self, run: &Run<'_, M>, index: usize, selected: u32) -> Result<(), (Gpa, Flow)> {
        let wanted = self.change.interest();
        let old: [u64; CHUNK] = core::array::from_fn(|n| run.table.load(index + n));
        let (all, any) = old.iter().fold((u64::MAX, 0), |(all, any), &e| (all & e, any | e));
        let dense = F::is_valid(all) && all & wanted != 0 && any & LOCK_BIT == 0;
        let paired = if self.tree.pairs && selected == WHOLE && dense {
            self.pairs(run, index, &old)
        } else {
            0
        };
        if paired == WHOLE {
            return Ok(());
        }
        let interest = wanted | LOCK_BIT;
        let bits = |bits, n: usize| bits | u32::from(old[n] & interest != 0) << n;
        let mut rest = (0..CHUNK).fold(0, bits) & selected & !paired;
        while rest != 0 {
            let n = rest.trailing_zeros() as usize;
            rest &= rest - 1;
            self.chosen(run, index + n, old[n])?;
        }
        Ok(())
    }

    /// Reads an entry of each chunk that is to be changed, so that the caches fetch all of them at once: they lie apart, and
    /// an exchange waits for its own.
    #[inline(always)]
    fn touch(&self, run: &Run<'_, M>) {
        let mut index = self.next(run, run.from.next_multiple_of(CHUNK));
        while index < run.to {
            run.table.load(index);
            index = self.next(run, index + CHUNK);
        }
    }

    /// The first chunk from the one at `index` on of which a page is to be changed, or the end of the run.
    #[inline(always)]
    fn next(&self, run: &Run<'_, M>, mut index: usize) -> usize {
        while C::SELECTS && index < run.to {
            let skipped = self.change.skipped(run.address(index));
            if skipped < CHUNK {
                return index;
            }
            index += skipped - skipped % CHUNK;
        }
        index
    }

    /// A chunk of entries that are all of interest, two at a time. Which of them were changed so, a bit each.
    #[inline(always)]
    fn pairs(&mut self, run: &Run<'_, M>, index: usize, old: &[u64; CHUNK]) -> u32 {
        self.before_exchange();
        let mut paired = 0u32;
        for n in (0..CHUNK).step_by(2) {
            if self.pair(run, index + n, [old[n], old[n + 1]]) {
                paired |= 0b11 << n;
            }
        }
        if paired != 0 {
            let (first, last) = (paired.trailing_zeros(), 31 - paired.leading_zeros());
            let start = run.address(index + first as usize);
            let end = run.address(index + last as usize) + run.page_size();
            self.changed.add(start, end, Some(Level::LAST));
            self.exchanged += u64::from(paired.count_ones());
        }
        paired
    }

    /// One entry of the last level, read as `old`.
    #[inline(always)]
    fn single(&mut self, run: &Run<'_, M>, index: usize, old: u64) -> Result<(), (Gpa, Flow)> {
        let start = run.address(index);
        if self.change.covers(start, start + run.page_size()) {
            self.chosen(run, index, old)
        } else {
            Ok(())
        }
    }

    /// One entry of the last level that is to be changed, read as `old`.
    #[inline(always)]
    fn chosen(&mut self, run: &Run<'_, M>, index: usize, old: u64) -> Result<(), (Gpa, Flow)> {
        let start = run.address(index);
        let end = start + run.page_size();
        if F::is_valid(old) {
            let new = self.change.apply(old);
            if new == old {
                if old & self.change.interest() != 0 {
                    self.change.seen(old, start, end);
                }
                return Ok(());
            }
            self.before_exchange();
            if run.table.exchange(index, old, new).is_ok() {
                self.note(old, start, end, Level::LAST);
                return Ok(());
            }
        }
        let visit = run.visit(index);
        match self.one(&visit) {
            Flow::Next | Flow::Skip => Ok(()),
            flow => Err((visit.gpa(), flow)),
        }
    }
}

/// Entries that are looked at together.
const CHUNK: usize = 8;
/// All of a chunk, a bit each.
const WHOLE: u32 = (1 << CHUNK) - 1;

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
        if C::SELECTS {
            self.touch(run);
        }
        let mut index = run.from;
        while index < run.to {
            if !index.is_multiple_of(CHUNK) || run.to - index < CHUNK {
                self.single(run, index, run.table.load(index))?;
                index += 1;
                continue;
            }
            let any = (0..CHUNK).fold(0, |any, n| any | run.table.load(index + n));
            if any & interest != 0 {
                let selected = self.change.selected(run.address(index));
                self.chunk(run, index, selected)?;
            }
            index = self.next(run, index + CHUNK);
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
