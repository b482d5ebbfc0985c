//! A guest's table changes while it is followed write by write.

use slat::{GpaRange, Machine};

use crate::guest::GuestMemory;
use crate::memory::Frames;
use crate::page::PageId;
use crate::pte::{ENTRIES, PAGE_SHIFT};
use crate::rmap::ReverseMaps;
use crate::shadow::Shadow;

impl<M: Machine, R: ReverseMaps> Shadow<'_, M, R> {
    /// Memory of the guest was written to other than by its own mapped stores: by emulation, or by the host, which must
    /// say so of its own writes. The entries of the guest's tables there are looked at again when they are used.
    pub fn written(&mut self, memory: &impl GuestMemory, range: GpaRange) {
        let frames = Frames::of(range);
        for frame in frames.first..frames.end {
            let first = (frame << PAGE_SHIFT).max(range.start().0);
            let last = ((frame + 1) << PAGE_SHIFT).min(range.end().0) - 1;
            let (first, last) = (first as usize / 8 % ENTRIES, last as usize / 8 % ENTRIES);
            // Dropping entries takes no page out of its bucket.
            let mut next = self.pages.shadowing(frame).next();
            while let Some(id) = next {
                for index in first..=last {
                    self.drop_entry(id, index);
                }
                next = self.after(frame, id);
            }
        }
        self.settle(memory);
    }

    /// No longer follows the guest's table at this frame, if there is one: it can be written to, and is shadowed anew
    /// when it is used.
    pub fn unprotect(&mut self, memory: &impl GuestMemory, range: GpaRange) {
        let frames = Frames::of(range);
        for frame in frames.first..frames.end {
            loop {
                let first = self.pages.shadowing(frame).next();
                let Some(id) = first else { break };
                self.zap_page(id);
            }
        }
        self.settle(memory);
    }

    fn after(&self, frame: u64, id: PageId) -> Option<PageId> {
        self.pages.shadowing(frame).skip_while(|&other| other != id).nth(1)
    }
}
