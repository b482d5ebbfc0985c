//! Resetting dirty rings: harvested pages are protected again, and their entries given back.
//!
//! Entries of one slot that lie within 64 pages of each other, in either direction, are protected in one walk.

use slat::{Format, Gpa, Machine};

use crate::bitmap::SECTION;
use crate::log::{LogError, LogMode};
use crate::ring::{DirtyPage, DirtyRing};
use crate::{Host, SlotId, Vm, Worker};

/// Pages of one slot within 64 of each other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Near {
    slot: SlotId,
    first: u64,
    mask: u64,
}

impl Near {
    fn new(page: DirtyPage) -> Self {
        Self { slot: page.slot, first: page.page, mask: 1 }
    }

    /// With `page`, if it is near enough.
    fn with(self, DirtyPage { slot, page }: DirtyPage) -> Option<Self> {
        if slot != self.slot {
            return None;
        }
        if let Some(ahead) = page.checked_sub(self.first) {
            return (ahead < SECTION).then(|| Self { mask: self.mask | 1 << ahead, ..self });
        }
        let behind = self.first - page;
        // The last page must still be within the section that begins earlier now.
        (behind < SECTION && behind <= u64::from(self.mask.leading_zeros())).then(|| Self {
            first: page,
            mask: self.mask << behind | 1,
            ..self
        })
    }
}

impl<'m, F: Format, M: Machine, H: Host> Vm<'m, F, M, H> {
    /// Protects the pages of a dirty ring that were [harvested](DirtyRing::harvest), so that the next write to each is
    /// reported again, and gives their entries back to the vCPU (`KVM_RESET_DIRTY_RINGS`, for one ring). Returns how
    /// many entries that were. When it returns, the pages can be copied: every later write to them is in the ring of the
    /// vCPU that makes it. Waits while another thread resets the same ring.
    ///
    /// Costs a walk and an invalidation for each stretch of entries that lie within 64 pages of each other.
    ///
    /// # Errors
    /// [`LogError::OtherMachine`]: nothing was done. [`LogError::Tree`]: some entries were not given back.
    pub fn reset_dirty_ring(
        &self,
        worker: &mut Worker<'m, M>,
        ring: &DirtyRing,
    ) -> Result<u64, LogError> {
        self.admit(worker.hands.participant.machine())?;
        let ring = &ring.0;
        let held = ring.resetting.lock(self.machine());
        let first = ring.first();
        let mut at = first;
        while let Some(page) = ring.harvested(at) {
            let mut near = Near::new(page);
            at += 1;
            while let Some(with) = ring.harvested(at).and_then(|page| near.with(page)) {
                near = with;
                at += 1;
            }
            self.protect_near(worker, near)?;
            ring.give_back(at);
        }
        drop(held);
        worker.statistics.collected += at - first;
        Ok(at - first)
    }

    fn protect_near(&self, worker: &mut Worker<'m, M>, near: Near) -> Result<(), LogError> {
        let Some((first, mask)) = self.pages_of(worker, near)? else { return Ok(()) };
        for tree in self.trees(near.slot.space) {
            let Worker { hands, statistics } = &mut *worker;
            let done = tree.write_protect_mask(&hands.participant, first, mask, |_| {});
            statistics.protected += done?;
        }
        Ok(())
    }

    /// Where the pages are, if their slot still reports to rings; those beyond its end are left out.
    fn pages_of(&self, worker: &Worker<'m, M>, near: Near) -> Result<Option<(Gpa, u64)>, LogError> {
        let pin = worker.hands.participant.pin();
        let slot = self.slots.read(&pin)?.get(near.slot);
        let logged = |mode| matches!(mode, LogMode::Ring { .. });
        let Some(slot) = slot.filter(|slot| slot.writes().is_some_and(|log| logged(log.mode)))
        else {
            return Ok(None);
        };
        let pages = slot.range.size() >> F::PAGE_SHIFT;
        let inside = match pages.saturating_sub(near.first) {
            0 => 0,
            inside @ 1..SECTION => (1 << inside) - 1,
            _ => u64::MAX,
        };
        let first = Gpa(slot.range.start().0 + (near.first.min(pages) << F::PAGE_SHIFT));
        let mask = near.mask & inside;
        Ok((mask != 0).then_some((first, mask)))
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    fn page(page: u64) -> DirtyPage {
        DirtyPage { slot: SlotId::from(1), page }
    }

    fn near(pages: &[u64]) -> Option<(u64, u64)> {
        let mut pages = pages.iter().copied().map(page);
        let first = Near::new(pages.next()?);
        pages.try_fold(first, Near::with).map(|near| (near.first, near.mask))
    }

    #[test]
    fn pages_within_sixty_four_of_each_other_go_together_in_both_directions() {
        assert_eq!(near(&[100, 101, 163]), Some((100, 1 << 63 | 3)));
        assert_eq!(near(&[100, 164]), None);
        assert_eq!(near(&[100, 99, 37]), Some((37, 1 << 63 | 1 << 62 | 1)));
        assert_eq!(near(&[100, 36]), None);
        assert_eq!(near(&[100, 140, 77]), Some((77, 1 << 63 | 1 << 23 | 1)));
        assert_eq!(near(&[100, 140, 76]), None);
        assert_eq!(near(&[5, 5]), Some((5, 1)));
    }

    #[test]
    fn distances_that_only_look_near_when_they_wrap_do_not_go_together() {
        for pair in [[0xffff_ffff_ffff_ffc1, 0], [0, 0xffff_ffff_ffff_ffc1], [u64::MAX, 0]] {
            assert_eq!(near(&pair), None);
        }
        let other = DirtyPage { slot: SlotId { space: 1, number: 1 }, page: 101 };
        assert_eq!(Near::new(page(100)).with(other), None);
    }
}
