//! The host takes pages back: begin, change, end (rule 7).

use core::fmt;

use slat::{Format, Gpa, GpaRange, Machine};

use crate::progress::{Begun, Interval, Progress};
use crate::sabotage::{Skip, skips};
use crate::slot::Version;
use crate::{Host, Hva, HvaRange, OtherMachine, SlotId, Vm, Worker};

/// Why an invalidation did not begin. Nothing is in progress then; some of it may be unmapped already, and will fault
/// back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum InvalidateError {
    /// The worker belongs to another machine than this VM.
    OtherMachine,
    /// A pinned slot has some of these pages: delete it first. Nothing was unmapped.
    Pinned {
        /// Which.
        slot: SlotId,
    },
    /// The VM has no such address space.
    NoSpace {
        /// How many it has.
        spaces: u16,
    },
    /// The tree refused.
    Tree(slat::Error),
}

impl fmt::Display for InvalidateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OtherMachine => OtherMachine.fmt(f),
            Self::Pinned { slot } => {
                write!(f, "memslot {slot} is pinned: the host cannot take its pages back")
            }
            Self::NoSpace { spaces } => write!(f, "the VM has {spaces} address spaces"),
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
/// back to try again. Change the host's mapping, then end it, by [`end`](Self::end) or by dropping it. Forgotten, it never ends.
#[derive(Debug)]
#[must_use = "the invalidation ends when this is dropped: change the host's mapping before"]
pub struct Guard<'v, M: Machine> {
    progress: &'v Progress,
    machine: &'v M,
    begun: Begun,
}

impl<'v, M: Machine> Guard<'v, M> {
    pub(crate) fn new(progress: &'v Progress, machine: &'v M, begun: Begun) -> Self {
        Self { progress, machine, begun }
    }

    /// Ends the invalidation: faults may install what the host says from now on.
    pub fn end(self) {}
}

impl<M: Machine> Drop for Guard<'_, M> {
    fn drop(&mut self) {
        self.progress.end(self.machine, core::mem::take(&mut self.begun));
    }
}

impl<'m, F: Format, M: Machine, H: Host> Vm<'m, F, M, H> {
    /// Begins to take pages back from the guest: when it returns, no CPU translates anything in `ranges`, in any address
    /// space, and nobody who looked one of their pages up still uses it. Then change the host's mapping, and drop the
    /// guard.
    ///
    /// Ranges are widened to whole granules and cut where guest addresses end. A block that reaches beyond them goes as
    /// a whole, and the rest of it faults back: nothing is allocated, and it never blocks but for one bounded grace
    /// period, however large the ranges are. Invalidations nest and overlap freely; of very many ranges, those beyond the
    /// first few count as one range around them. Faults elsewhere are not delayed while at most 64 ranges are in progress,
    /// unless the host takes longer to answer one than some thirty ranges take to end: then they are retried. Owner notes
    /// that lie wholly inside go too: what must keep its owner is not given to the host to take back.
    ///
    /// # Errors
    /// [`InvalidateError`].
    pub fn invalidate_begin<'v>(
        &'v self,
        worker: &mut Worker<'m, M>,
        ranges: &[GpaRange],
    ) -> Result<Guard<'v, M>, InvalidateError> {
        self.admit(worker.hands.participant.machine())?;
        let ranges = ranges.iter().filter_map(|&range| self.whole_pages(range));
        for range in ranges.clone() {
            self.refuse_pinned(worker, |slot| slot.range.overlaps(&range))?;
        }
        let guard = self.begin(worker, ranges.clone().map(Interval::guest));
        // Nothing is mapped there any more: a slot that was pinned since the first look is there now, or is never mapped.
        for range in ranges.clone().filter(|_| !skips(Skip::SecondLook)) {
            self.refuse_pinned(worker, |slot| slot.range.overlaps(&range))?;
        }
        for range in ranges {
            for space in 0..self.options.address_spaces {
                self.unmap_whole(worker, space, range)?;
            }
        }
        Ok(guard)
    }

    /// Begins to take back what lies behind host addresses, wherever in the guest that is mapped, as a host does that
    /// does not know its guests' addresses. What it promises is what [`invalidate_begin`](Self::invalidate_begin)
    /// promises, for every slot that has some of `ranges` behind it, those created meanwhile included. Of a slot with
    /// [private memory](crate::SlotConfig::private) only the pages go that are backed from there now.
    ///
    /// Costs also a look at every slot.
    ///
    /// # Errors
    /// [`InvalidateError`].
    pub fn invalidate_host_begin<'v>(
        &'v self,
        worker: &mut Worker<'m, M>,
        ranges: &[HvaRange],
    ) -> Result<Guard<'v, M>, InvalidateError> {
        self.admit(worker.hands.participant.machine())?;
        let ranges = ranges.iter().filter_map(|&range| self.whole_host_pages(range));
        for range in ranges.clone() {
            self.refuse_pinned(worker, |slot| slot.backed_by(slot.config.hva, range).is_some())?;
        }
        let guard = self.begin(worker, ranges.clone().map(Interval::host));
        for range in ranges.clone().filter(|_| !skips(Skip::SecondLook)) {
            self.refuse_pinned(worker, |slot| slot.backed_by(slot.config.hva, range).is_some())?;
        }
        // The slots that are found may be gone, and a pinned one in their place, before their pages are unmapped.
        let aiming = self.aimed.enter();
        for range in ranges {
            self.each_backed(worker, range, |worker, space, range| {
                self.unmap_whole(worker, space, range)
            })?;
        }
        drop(aiming);
        Ok(guard)
    }

    fn begin(
        &self,
        worker: &mut Worker<'m, M>,
        ranges: impl Iterator<Item = Interval> + Clone,
    ) -> Guard<'_, M> {
        let begun = self.progress.begin(ranges);
        let guard = Guard::new(&self.progress, self.machine(), begun);
        // A full fence, and then every pin that may have missed the list has been given up.
        if !skips(Skip::InvalidationGrace) {
            worker.hands.participant.synchronize();
        }
        guard
    }

    fn refuse_pinned(
        &self,
        worker: &Worker<'m, M>,
        meant: impl Fn(&Version) -> bool,
    ) -> Result<(), InvalidateError> {
        let pin = worker.hands.participant.pin();
        let map = self.slots.read(&pin)?;
        match map.pinned().find(|slot| meant(slot)) {
            Some(slot) => Err(InvalidateError::Pinned { slot: slot.id }),
            None => Ok(()),
        }
    }

    /// Calls `each` for every piece of guest addresses that `range` is behind, not pinned, one address space after the
    /// other; also for a whole slot that is being deleted or moved, since it may still be translated. A slot that appears
    /// meanwhile may be left out.
    pub(crate) fn each_backed<E: From<OtherMachine>>(
        &self,
        worker: &mut Worker<'m, M>,
        range: HvaRange,
        mut each: impl FnMut(&mut Worker<'m, M>, u16, GpaRange) -> Result<(), E>,
    ) -> Result<(), E> {
        let (mut space, mut at) = (0, 0);
        let mut left = None;
        loop {
            let found = {
                let pin = worker.hands.participant.pin();
                let map = self.slots.read(&pin)?;
                // One at a time: when another one leaves, the translations of the one before are gone.
                let leaving = map.leaving().filter(|slot| left != Some(slot.number));
                if let Some(slot) = leaving.filter(|slot| slot.backing.is_in(range)) {
                    left = Some(slot.number);
                    let (space, range) = (slot.id.space, slot.range);
                    drop(pin);
                    each(worker, space, range)?;
                    continue;
                }
                map.backed_after(range, space, at).find_map(|slot| {
                    let from = if slot.id.space == space { at } else { 0 };
                    Some((slot.id.space, slot.next_backed(range, from, F::PAGE_SHIFT)?))
                })
            };
            let Some((found_space, piece)) = found else { return Ok(()) };
            each(worker, found_space, piece)?;
            (space, at) = (found_space, piece.end().0);
        }
    }

    /// The granules that `range` touches, as far as the tree has addresses.
    pub(crate) fn whole_pages(&self, range: GpaRange) -> Option<GpaRange> {
        let geometry = self.tree().geometry();
        let mask = geometry.page_size() - 1;
        let limit = geometry.limit().0;
        let start = range.start().0 & !mask;
        let end = range.end().0.min(limit).checked_add(mask)? & !mask;
        GpaRange::new(Gpa(start), end.checked_sub(start)?)
    }

    /// The granules of host memory that `range` touches.
    pub(crate) fn whole_host_pages(&self, range: HvaRange) -> Option<HvaRange> {
        let mask = self.tree().geometry().page_size() - 1;
        let start = range.start().0 & !mask;
        let end = range.end().0.saturating_add(mask) & !mask;
        HvaRange::new(Hva(start), end.checked_sub(start)?)
    }
}

impl Version {
    /// The part of the slot behind which `range` lies, if what backs it begins at `base`.
    fn backed_by(&self, base: Hva, range: HvaRange) -> Option<GpaRange> {
        let start = range.start().0.max(base.0);
        let end = range.end().0.min(base.0.saturating_add(self.range.size()));
        let first = self.range.start().0 + start.saturating_sub(base.0);
        GpaRange::new(Gpa(first), end.checked_sub(start)?)
    }

    /// The first piece at or after `from` behind which `range` lies.
    fn next_backed(&self, range: HvaRange, from: u64, page_shift: u32) -> Option<GpaRange> {
        let after = |piece: GpaRange| {
            let start = piece.start().0.max(from);
            GpaRange::new(Gpa(start), piece.end().0.checked_sub(start)?)
        };
        let shared = self.backed_by(self.config.hva, range).and_then(after);
        let Some(pages) = &self.private else { return shared };
        let private = self.config.private.and_then(|base| self.backed_by(base, range));
        // The first run of pages that are of the kind that is meant.
        let first_run = |piece: GpaRange, kind: bool| {
            let mut page = self.page_of(piece.start(), page_shift);
            let end = self.page_of(piece.end(), page_shift);
            loop {
                let (private, pages) = pages.0.run(page, end);
                if pages == 0 {
                    return None;
                }
                if private == kind {
                    let start = self.range.start().0 + (page << page_shift);
                    return GpaRange::new(Gpa(start), pages << page_shift);
                }
                page += pages;
            }
        };
        let shared = shared.and_then(|piece| first_run(piece, false));
        let private = private.and_then(after).and_then(|piece| first_run(piece, true));
        match (shared, private) {
            (Some(a), Some(b)) if b.start() < a.start() => Some(b),
            (Some(a), _) => Some(a),
            (None, b) => b,
        }
    }
}
