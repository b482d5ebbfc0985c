//! The host takes pages back: begin, change, end (rule 7).

use core::fmt;

use slat::{Edges, Format, Gpa, GpaRange, Machine};

use crate::progress::{Begun, Progress};
use crate::sabotage::{Skip, skips};
use crate::{Host, OtherMachine, Vm, Worker};

/// Why an invalidation did not begin. Nothing is in progress then; some of it may be unmapped already, and will fault
/// back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum InvalidateError {
    /// The worker belongs to another machine than this VM.
    OtherMachine,
    /// The tree refused.
    Tree(slat::Error),
}

impl fmt::Display for InvalidateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OtherMachine => OtherMachine.fmt(f),
            Self::Tree(error) => error.fmt(f),
        }
    }
}

impl core::error::Error for InvalidateError {}

impl From<OtherMachine> for InvalidateError {
    fn from(_: OtherMachine) -> Self {
        Self::OtherMachine
    }
}

/// An invalidation in progress. While it lives, no fault installs a page of its ranges; faults there send the guest
/// back to try again. Change the host's mapping, then end it, by [`end`](Self::end) or by dropping it.
#[derive(Debug)]
#[must_use = "the invalidation ends when this is dropped: change the host's mapping before"]
pub struct Guard<'v, M: Machine> {
    progress: &'v Progress,
    machine: &'v M,
    begun: Begun,
}

impl<M: Machine> Guard<'_, M> {
    /// Ends the invalidation: faults may install what the host says from now on.
    pub fn end(self) {}
}

impl<M: Machine> Drop for Guard<'_, M> {
    fn drop(&mut self) {
        self.progress.end(self.machine, core::mem::take(&mut self.begun));
    }
}

impl<'m, F: Format, M: Machine, H: Host> Vm<'m, F, M, H> {
    /// Begins to take pages back from the guest: when it returns, no CPU translates anything in `ranges`, and nobody
    /// who looked one of their pages up still uses it. Then change the host's mapping, and drop the guard.
    ///
    /// Ranges are widened to whole granules and cut where guest addresses end. A block that reaches beyond them goes as
    /// a whole, and the rest of it faults back: nothing is allocated, and it never blocks but for one bounded grace
    /// period, however large the ranges are. Invalidations nest and overlap freely. Faults elsewhere are not delayed;
    /// of very many ranges, those beyond the first few count as one range around them. Owner notes that lie wholly inside
    /// go too: what must keep its owner is not given to the host to take back.
    ///
    /// # Errors
    /// [`InvalidateError`].
    pub fn invalidate_begin<'v>(
        &'v self,
        worker: &mut Worker<'m, M>,
        ranges: &[GpaRange],
    ) -> Result<Guard<'v, M>, InvalidateError> {
        self.admit(worker.participant.machine())?;
        let ranges = ranges.iter().filter_map(|&range| self.whole_pages(range));
        let begun = self.progress.begin(ranges.clone());
        let guard = Guard { progress: &self.progress, machine: self.machine(), begun };
        // A full fence, and then every pin that may have missed the list has been given up.
        if !skips(Skip::InvalidationGrace) {
            worker.participant.synchronize();
        }
        for range in ranges {
            for tree in self.trees() {
                let Worker { participant, reserve, .. } = worker;
                tree.unmap(participant, reserve, range, Edges::Whole, |_| {})
                    .map_err(InvalidateError::Tree)?;
            }
        }
        Ok(guard)
    }

    /// The granules that `range` touches, as far as the tree has addresses.
    fn whole_pages(&self, range: GpaRange) -> Option<GpaRange> {
        let geometry = self.tree().geometry();
        let mask = geometry.page_size() - 1;
        let limit = geometry.limit().0;
        let start = range.start().0 & !mask;
        let end = range.end().0.min(limit).checked_add(mask)? & !mask;
        GpaRange::new(Gpa(start), end.checked_sub(start)?)
    }
}
