//! What a monitor has written to guest memory itself, through its own mapping of it: the other half of a dirty log.
//!
//! A monitor marks its writes in a bitmap of its own, without a pin and without knowing about slots; collections of the
//! slot that the bitmap is attached to report what is in it. With the feature `vm-memory` the bitmap is one that
//! rust-vmm's regions mark by themselves.

use slat::{Format, Machine};

use crate::bitmap::Bitmap;
use crate::heap::OutOfMemory;
use crate::shared::Shared;
use crate::slot::Version;
use crate::{Host, LogError, SlotId, Vm, Worker};

/// Which pages of a region of host memory the monitor has written. Clones are the same bitmap.
#[derive(Clone, Debug)]
pub struct MonitorLog {
    bits: Shared<Bitmap>,
    pages: u64,
    page_shift: u32,
}

impl MonitorLog {
    /// For a region of `size` bytes, in pages of the guest's granule, `1 << page_shift` bytes.
    ///
    /// # Errors
    /// [`OutOfMemory`]: a bit a page.
    pub fn new(size: u64, page_shift: u32) -> Result<Self, OutOfMemory> {
        let page_shift = page_shift.min(63);
        let pages = size.div_ceil(1 << page_shift);
        Ok(Self { bits: Shared::new(Bitmap::new(pages, false)?)?, pages, page_shift })
    }

    /// Marks the pages of `len` bytes from `offset` of the region; call it after the write. What lies beyond the end is
    /// left out. Costs an exchange for each 64 pages and waits for nobody.
    pub fn mark(&self, offset: u64, len: u64) {
        let Some(last) = len.checked_sub(1).map(|more| offset.saturating_add(more)) else { return };
        let first = offset >> self.page_shift;
        self.bits.assign(first, (last >> self.page_shift).saturating_add(1).min(self.pages), true);
    }

    /// Whether the page at `offset` is marked.
    pub fn is_marked(&self, offset: u64) -> bool {
        self.bits.get(offset >> self.page_shift)
    }
}

impl<'m, F: Format, M: Machine, H: Host> Vm<'m, F, M, H> {
    /// From now on collections of the slot's logs report what is marked in `monitor`, and take or clear it as the mode
    /// says; `None`: no more. What was marked before a log is enabled is not reported. A log of
    /// [`LogMode::Ring`](crate::LogMode) needs a backup bitmap for it.
    ///
    /// Costs a grace period and a copy of the list of slots, and a look at each.
    ///
    /// # Errors
    /// [`LogError::Monitor`] if the bitmap is not one for the pages that the slot has; [`LogError::MonitorTaken`] if another
    /// slot of this VM has it; [`LogError::NoSlot`],
    /// [`LogError::OutOfMemory`], [`LogError::OtherMachine`]: nothing was changed.
    pub fn attach_monitor(
        &self,
        worker: &mut Worker<'m, M>,
        id: impl Into<SlotId>,
        monitor: Option<&MonitorLog>,
    ) -> Result<(), LogError> {
        let id = id.into();
        let mut change = self.slots.lock(&mut worker.hands.participant)?;
        let number = change.next_number();
        let old = change.map().get(id).ok_or(LogError::NoSlot)?;
        let pages = old.range.size() >> F::PAGE_SHIFT;
        if monitor.is_some_and(|log| log.pages != pages || log.page_shift != F::PAGE_SHIFT) {
            return Err(LogError::Monitor { pages, page_shift: F::PAGE_SHIFT });
        }
        let taken = monitor.and_then(|log| change.map().reporting(&log.bits));
        if let Some(by) = taken.filter(|&by| by != id) {
            return Err(LogError::MonitorTaken { by });
        }
        let monitor = monitor.map(|log| log.bits.clone());
        let version = Version { number, monitor, ..old.clone() };
        Ok(change.publish(Some(id), Some(version))?)
    }
}

#[cfg(feature = "vm-memory")]
mod vm_memory {
    use ::vm_memory::bitmap::{Bitmap, BitmapSlice, WithBitmapSlice};

    use super::MonitorLog;

    /// A [`MonitorLog`] from some offset on.
    #[derive(Clone, Copy, Debug)]
    pub struct MonitorSlice<'a> {
        log: &'a MonitorLog,
        base: usize,
    }

    impl<'a> WithBitmapSlice<'a> for MonitorLog {
        type S = MonitorSlice<'a>;
    }

    impl Bitmap for MonitorLog {
        fn mark_dirty(&self, offset: usize, len: usize) {
            self.mark(offset as u64, len as u64);
        }

        fn dirty_at(&self, offset: usize) -> bool {
            self.is_marked(offset as u64)
        }

        fn slice_at(&self, offset: usize) -> MonitorSlice<'_> {
            MonitorSlice { log: self, base: offset }
        }
    }

    impl<'a> WithBitmapSlice<'_> for MonitorSlice<'a> {
        type S = MonitorSlice<'a>;
    }

    impl BitmapSlice for MonitorSlice<'_> {}

    impl<'a> Bitmap for MonitorSlice<'a> {
        fn mark_dirty(&self, offset: usize, len: usize) {
            self.log.mark_dirty(self.base.saturating_add(offset), len);
        }

        fn dirty_at(&self, offset: usize) -> bool {
            self.log.dirty_at(self.base.saturating_add(offset))
        }

        fn slice_at(&self, offset: usize) -> MonitorSlice<'a> {
            MonitorSlice { log: self.log, base: self.base.saturating_add(offset) }
        }
    }
}

#[cfg(feature = "vm-memory")]
pub use vm_memory::MonitorSlice;
