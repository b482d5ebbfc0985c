//! Resetting dirty rings: harvested pages are protected again, and their entries given back.
//!
//! Entries of one slot that lie near each other, in either direction, are protected in one walk.

use slat::{Format, Gpa, Machine};

use crate::bitmap::SECTION;
use crate::log::{Log, LogError, LogMode};
use crate::ring::{DirtyPage, DirtyRing};
use crate::shared::Shared;
use crate::{Host, SlotId, Vm, Worker};

/// Words of pages that are protected in one walk.
const WORDS: usize = 64;
/// Pages on either side of the first one that go with it.
const AROUND: u64 = WORDS as u64 * SECTION / 2;

/// Pages of one slot that lie near each other.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Near {
    slot: SlotId,
    /// The page of bit 0.
    first: u64,
    masks: [u64; WORDS],
}

impl Near {
    fn new(page: DirtyPage) -> Self {
        // So that bits lie as in the bitmap of the slot.
        let first = page.page.saturating_sub(AROUND) & !(SECTION - 1);
        let mut near = Self { slot: page.slot, first, masks: [0; WORDS] };
        near.add(page);
        near
    }

    /// Takes `page` in, if it is near enough.
    fn add(&mut self, DirtyPage { slot, page }: DirtyPage) -> bool {
        let ahead = page.checked_sub(self.first).filter(|_| slot == self.slot);
        let word =
            ahead.and_then(|ahead| self.masks.get_mut(usize::try_from(ahead / SECTION).ok()?));
        let Some(word) = word else { return false };
        *word |= 1 << (page % SECTION);
        true
    }

    /// Leaves out what is not below `pages`.
    fn clip(&mut self, pages: u64) {
        for (word, mask) in (0..).zip(&mut self.masks) {
            let first = self.first.saturating_add(word * SECTION);
            *mask &= match pages.saturating_sub(first) {
                0 => 0,
                inside @ 1..SECTION => (1 << inside) - 1,
                _ => u64::MAX,
            };
        }
    }
}

impl<'m, F: Format, M: Machine, H: Host> Vm<'m, F, M, H> {
    /// Protects the pages of a dirty ring that were [harvested](DirtyRing::harvest), so that the next write to each is
    /// reported again, and gives their entries back to the vCPU (`KVM_RESET_DIRTY_RINGS`, for one ring). Returns how
    /// many entries that were. When it returns, the pages can be copied: every later write to them is in the ring of the
    /// vCPU that makes them writable again. Waits while another thread resets the same ring.
    ///
    /// Costs a walk and an invalidation for each stretch of entries that lie within 2048 pages of the first of them.
    ///
    /// # Errors
    /// [`LogError::OtherMachine`], also for a ring of another VM: nothing was done. [`LogError::Tree`]: some entries were not given back.
    pub fn reset_dirty_ring(
        &self,
        worker: &mut Worker<'m, M>,
        ring: &DirtyRing,
    ) -> Result<u64, LogError> {
        self.admit(worker.hands.participant.machine())?;
        let ring = &ring.0;
        if ring.vm != self.number {
            return Err(LogError::OtherMachine);
        }
        let held = ring.resetting.lock(self.machine());
        let first = ring.first();
        let mut at = first;
        while let Some(page) = ring.harvested(at) {
            let mut near = Near::new(page);
            at += 1;
            while ring.harvested(at).is_some_and(|page| near.add(page)) {
                at += 1;
            }
            self.protect_near(worker, near)?;
            ring.give_back(at);
        }
        drop(held);
        worker.statistics.collected += at - first;
        Ok(at - first)
    }

    fn protect_near(&self, worker: &mut Worker<'m, M>, mut near: Near) -> Result<(), LogError> {
        // As when a collection protects.
        let _aiming = self.aimed.enter();
        let Some(first) = self.place(worker, &mut near)? else { return Ok(()) };
        for tree in self.trees(near.slot.space) {
            let Worker { hands, statistics } = &mut *worker;
            let done = tree.write_protect_pages(&hands.participant, first, &near.masks, |_| {});
            statistics.protected += done?;
        }
        Ok(())
    }

    /// Where the pages begin, if their slot still reports to rings; those beyond its end are left out.
    fn place(&self, worker: &Worker<'m, M>, near: &mut Near) -> Result<Option<Gpa>, LogError> {
        let pin = worker.hands.participant.pin();
        let map = self.slots.read(&pin)?;
        // Also if it has become read-only, or is moving, and its entries are writable yet.
        let there = map.get(near.slot).map(|slot| (slot.range, slot.log.as_ref()));
        let leaving = || map.leaving().filter(|slot| slot.id == near.slot);
        let slot = there.or_else(|| leaving().map(|slot| (slot.range, slot.log.as_ref())));
        let logged = |log: &Shared<Log>| matches!(log.mode, LogMode::Ring { .. });
        let Some((range, _)) = slot.filter(|(_, log)| log.is_some_and(logged)) else {
            return Ok(None);
        };
        let pages = range.size() >> F::PAGE_SHIFT;
        near.clip(pages);
        Ok(Some(Gpa(range.start().0 + (near.first.min(pages) << F::PAGE_SHIFT))))
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    fn page(page: u64) -> DirtyPage {
        DirtyPage { slot: SlotId::from(1), page }
    }

    /// Whether these go together, and which pages are protected then.
    fn near(pages: &[u64]) -> Option<Vec<u64>> {
        let mut near = Near::new(page(pages[0]));
        let all = pages[1..].iter().all(|&n| near.add(page(n)));
        all.then(|| pages_of(&near))
    }

    fn pages_of(near: &Near) -> Vec<u64> {
        let bits = 0..WORDS as u64 * SECTION;
        let set = |bit: &u64| near.masks[(bit / SECTION) as usize] >> (bit % SECTION) & 1 == 1;
        bits.filter(set).map(|bit| near.first + bit).collect()
    }

    #[test]
    fn near_pages_go_together_in_both_directions() {
        assert_eq!(near(&[100, 101, 163]), Some(vec![100, 101, 163]));
        assert_eq!(near(&[100, 99, 37, 0, 100 + AROUND]), Some(vec![0, 37, 99, 100, 100 + AROUND]));
        let page = 1 << 40;
        assert_eq!(
            near(&[page, page - AROUND, page + AROUND - SECTION]),
            Some(vec![page - AROUND, page, page + AROUND - SECTION])
        );
        assert_eq!(near(&[page, page - AROUND - SECTION]), None);
        assert_eq!(near(&[page, page + AROUND]), None);
        assert_eq!(near(&[5, 5]), Some(vec![5]));
    }

    #[test]
    fn distances_that_only_look_near_when_they_wrap_do_not_go_together() {
        for pair in [[0xffff_ffff_ffff_ffc1, 0], [0, 0xffff_ffff_ffff_ffc1], [u64::MAX, 0]] {
            assert_eq!(near(&pair), None);
        }
        let other = DirtyPage { slot: SlotId { space: 1, number: 1 }, page: 101 };
        assert!(!Near::new(page(100)).add(other));
    }

    #[test]
    fn pages_beyond_the_end_of_the_slot_are_left_out() {
        for (end, left) in [(0, 0), (100, 0), (101, 1), (150, 1), (151, 2), (u64::MAX, 3)] {
            let mut all = Near::new(page(100));
            assert!(all.add(page(150)) && all.add(page(200)));
            all.clip(end);
            assert_eq!(pages_of(&all), [100, 150, 200][..left], "{end}");
        }
        let mut last = Near::new(page(u64::MAX));
        last.clip(u64::MAX);
        assert_eq!(pages_of(&last), [0; 0]);
    }
}
