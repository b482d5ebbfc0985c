//! What lies below some frames is taken back: no entry maps them any more.

use slat::{GpaRange, Machine};

use crate::guest::GuestMemory;
use crate::memory::{Frames, SIZES};
use crate::pte::INDEX_BITS;
use crate::rmap::ReverseMaps;
use crate::shadow::{Shadow, ShadowError};

impl<M: Machine, R: ReverseMaps> Shadow<'_, M, R> {
    /// No CPU has a translation to any of this when it returns. Called after the second level no longer gives it.
    pub fn zap(&mut self, memory: &impl GuestMemory, range: GpaRange) {
        self.zap_frames(Frames::of(range));
        self.settle(memory);
    }

    /// The slot goes: no CPU has a translation to it, and no page shadows a table in it. Called after the second level
    /// no longer has it. Roots whose table lay in it must be loaded again.
    ///
    /// # Errors
    /// [`ShadowError::NoSuchSlot`]: the range is not that of a slot.
    pub fn delete_slot(
        &mut self,
        memory: &impl GuestMemory,
        range: GpaRange,
    ) -> Result<(), ShadowError> {
        let frames = Frames::of(range);
        if self.areas.overlap(frames).is_none_or(|area| area.frames != frames) {
            return Err(ShadowError::NoSuchSlot(range));
        }
        self.zap_frames(frames);
        for id in 0..self.pages.end() {
            if self.pages.is_listed(id) && frames.contains(self.pages.get(id).frame) {
                self.zap_page(id);
            }
        }
        self.areas.remove(frames);
        self.settle(memory);
        Ok(())
    }

    fn zap_frames(&mut self, range: Frames) {
        for height in 0..SIZES {
            self.each_head(range, height, |shadow, frame| shadow.zap_head(height, frame));
        }
    }

    /// Empties every entry that maps the frame of this height.
    pub(crate) fn zap_head(&mut self, height: usize, frame: u64) {
        while let Some(entry) =
            self.areas.of(frame).and_then(|area| self.maps.last(area.head(height, frame)))
        {
            self.drop_entry(entry.page(), entry.index());
        }
    }

    /// Calls `f` with one frame of each reverse map of this height that has to do with the range.
    pub(crate) fn each_head(
        &mut self,
        range: Frames,
        height: usize,
        mut f: impl FnMut(&mut Self, u64),
    ) {
        let shift = INDEX_BITS * height as u32;
        let mut next = range.first;
        while let Some(area) = self.areas.overlap(Frames { first: next, end: range.end }) {
            let Some(common) = area.frames.common(Frames { first: next, end: range.end }) else {
                break;
            };
            next = common.end;
            let mut frame = common.first;
            while frame < common.end {
                f(self, frame);
                frame = ((frame >> shift) + 1) << shift;
            }
            if next >= range.end {
                break;
            }
        }
    }
}
