//! Which frames the guest uses, for the host's reclaim.

use slat::{GpaRange, Machine};

use crate::memory::{Frames, SIZES};
use crate::pte::ACCESSED;
use crate::rmap::ReverseMaps;
use crate::shadow::Shadow;

impl<M: Machine, R: ReverseMaps> Shadow<'_, M, R> {
    /// Whether any of this was used since [`clear_young`](Self::clear_young), through an entry that is there.
    pub fn test_young(&mut self, range: GpaRange) -> bool {
        self.age(range, false)
    }

    /// [`test_young`](Self::test_young), and forgets it. A use through a translation that a TLB still has is not noticed
    /// again: nothing is flushed for this.
    pub fn clear_young(&mut self, range: GpaRange) -> bool {
        self.age(range, true)
    }

    fn age(&mut self, range: GpaRange, clear: bool) -> bool {
        let mut young = false;
        for height in 0..SIZES {
            self.each_head(Frames::of(range), height, |shadow, frame| {
                let Some(area) = shadow.areas.of(frame) else { return };
                shadow.maps.for_each(area.head(height, frame), |entry| {
                    let page = shadow.pages.get(entry.page());
                    young |= if clear {
                        page.clear(shadow.machine, entry.index(), ACCESSED)
                    } else {
                        page.entry(shadow.machine, entry.index()).read() & ACCESSED != 0
                    };
                });
            });
        }
        young
    }
}
