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
        self.each_shadowing(Frames::of(range), |shadow, frame, id| {
            let first = (frame << PAGE_SHIFT).max(range.start().0);
            let last = ((frame + 1) << PAGE_SHIFT).min(range.end().0) - 1;
            let (first, last) = (first as usize / 8 % ENTRIES, last as usize / 8 % ENTRIES);
            for index in first..=last {
                shadow.drop_entry(id, index);
            }
        });
        self.settle(memory);
    }

    /// No longer follows the guest's table at this frame, if there is one: it can be written to, and is shadowed anew
    /// when it is used.
    pub fn unprotect(&mut self, memory: &impl GuestMemory, range: GpaRange) {
        self.each_shadowing(Frames::of(range), |shadow, _, id| shadow.zap_page(id));
        self.settle(memory);
    }

    /// Calls `f` with each page that shadows a table in these frames; it may take that page out. Looks at the frames or at
    /// the pages, whichever are fewer.
    fn each_shadowing(&mut self, frames: Frames, mut f: impl FnMut(&mut Self, u64, PageId)) {
        if frames.end - frames.first > u64::from(self.pages.end()) {
            for id in 0..self.pages.end() {
                if self.pages.is_listed(id) {
                    let page = self.pages.get(id);
                    let frame = page.frame;
                    if !page.role.direct && frames.contains(frame) {
                        f(self, frame, id);
                    }
                }
            }
            return;
        }
        for frame in frames.first..frames.end {
            let mut next = self.pages.shadowing(frame).next();
            while let Some(id) = next {
                next = self.pages.shadowing(frame).skip_while(|&other| other != id).nth(1);
                f(self, frame, id);
            }
        }
    }
}
