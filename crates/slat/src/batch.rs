//! Invalidations of one operation, gathered into one (rule 9).

use crate::machine::Machine;
use crate::maintenance::Invalidation;
use crate::rcu::Counters;
use crate::sabotage::{Skip, skips};
use crate::sync::Ordering;
use crate::{Format, Gpa, GpaRange, Level, Tree};

/// What the entries that an operation changed could have translated: one range, and their level if they all have the
/// same.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Batch {
    start: u64,
    end: u64,
    level: Option<Level>,
}

impl Batch {
    pub(crate) const EMPTY: Self = Self { start: u64::MAX, end: 0, level: None };

    #[inline(always)]
    pub(crate) fn is_empty(&self) -> bool {
        self.end == 0
    }

    /// Adds `start..end`, translated at `level`; `None` where a table was among it.
    #[inline(always)]
    pub(crate) fn add(&mut self, start: u64, end: u64, level: Option<Level>) {
        self.level = if self.is_empty() || self.level == level { level } else { None };
        self.start = self.start.min(start);
        self.end = self.end.max(end);
    }

    pub(crate) fn invalidation(&self) -> Option<Invalidation> {
        let range = GpaRange::new(Gpa(self.start), self.end.checked_sub(self.start)?)?;
        Some(Invalidation { range: Some(range), level: self.level })
    }
}

impl<F: Format, M: Machine> Tree<'_, F, M> {
    /// Rule 9: before the first exchange of an operation that defers its invalidation.
    #[inline(always)]
    pub(crate) fn raise_open(&self) {
        // The exchange that follows releases this: who finds the entry changed also finds `open` raised.
        self.open.fetch_add(1, Ordering::Relaxed);
    }

    /// Ends an operation on `range` that defers its invalidation: `raised` says whether it has raised `open`, `changed`
    /// is what it changed since. Entries that it found as it wanted them may have been changed by another operation
    /// that has not invalidated yet; then it invalidates for itself.
    pub(crate) fn close(&self, counters: &Counters, raised: bool, changed: Batch, range: GpaRange) {
        // Acquire, after every entry was read: no other count means that whoever changed them has invalidated.
        let others = self.open.load(Ordering::Acquire) > usize::from(raised) && !skips(Skip::Open);
        if others {
            self.invalidate(counters, Invalidation { range: Some(range), level: None });
        } else if let Some(what) = changed.invalidation() {
            self.invalidate(counters, what);
        }
        if raised {
            // Release: the invalidation comes before whoever reads the lower count.
            self.open.fetch_sub(1, Ordering::Release);
        }
    }
}
