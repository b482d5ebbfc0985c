//! Taking the permission to write: a dirty log begins, or was collected.

use slat::{GpaRange, Machine};

use crate::guest::GuestMemory;
use crate::memory::{Frames, SIZES};
use crate::pte::{PAGE_SHIFT, WRITE};
use crate::rmap::ReverseMaps;
use crate::shadow::Shadow;

impl<M: Machine, R: ReverseMaps> Shadow<'_, M, R> {
    /// No CPU writes to any of this without a fault when it returns. Called after the second level no longer permits it.
    pub fn write_protect(&mut self, memory: &impl GuestMemory, range: GpaRange) {
        self.protect_frames(Frames::of(range));
        self.settle(memory);
    }

    /// [`write_protect`](Self::write_protect) for the pages from `first` on whose bits are set in `bitmap`: one flush
    /// for all. Called with what a collection of the dirty log took, before anybody uses it.
    pub fn write_protect_pages(
        &mut self,
        memory: &impl GuestMemory,
        first: slat::Gpa,
        bitmap: &[u64],
    ) {
        let first = first.0 >> PAGE_SHIFT;
        for (number, &word) in (0..).zip(bitmap) {
            let mut rest = word;
            while rest != 0 {
                let frame = first + 64 * number + u64::from(rest.trailing_zeros());
                self.protect_frames(Frames { first: frame, end: frame + 1 });
                rest &= rest - 1;
            }
        }
        self.settle(memory);
    }

    fn protect_frames(&mut self, frames: Frames) {
        for height in 0..SIZES {
            self.each_head(frames, height, |shadow, frame| {
                let Some(area) = shadow.areas.of(frame) else { return };
                shadow.maps.for_each(area.head(height, frame), |entry| {
                    let page = shadow.pages.get(entry.page());
                    shadow.stale |= page.clear(shadow.machine, entry.index(), WRITE);
                });
            });
        }
    }

    /// Takes the permission to write from every entry that maps the frame.
    pub(crate) fn protect_frame(&mut self, frame: u64) {
        self.protect_frames(Frames { first: frame, end: frame + 1 });
    }
}
