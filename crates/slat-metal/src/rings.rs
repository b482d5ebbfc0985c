//! Dirty rings: who empties them. A vCPU whose ring is full does so itself; the first CPU takes the rest of all of them.
//!
//! A page is in the log of a collection once it was taken out of a ring and protected again. Both happen under one lock,
//! and so does handing the log over: whatever is written to a page after its log was handed over is in a ring again.

use alloc::vec::Vec;

use slat_metal::audit::Log;
use slat_vm::{DirtyRing, LogError, Worker};

use crate::guest::MetalVm;
use crate::machine::Metal;

/// All rings of a guest.
pub(crate) struct Rings {
    pub(crate) worker: Worker<'static, Metal>,
    pub(crate) rings: Vec<DirtyRing>,
    /// What was taken out since the log was handed over.
    pub(crate) log: Log,
    /// Entries that were taken and are still to be reset.
    pub(crate) open: u64,
    /// Entries that named no page, or were reset or taken but not both.
    pub(crate) broken: u64,
}

impl Rings {
    /// Takes everything out of all rings.
    pub(crate) fn harvest(&mut self) {
        for ring in &self.rings {
            self.open += take(ring, &mut self.log, &mut self.broken);
        }
    }

    /// Takes everything out of one ring and has its pages protected again.
    ///
    /// # Errors
    /// What the engine refuses.
    pub(crate) fn empty(&mut self, vm: &MetalVm, ring: &DirtyRing) -> Result<(), LogError> {
        let taken = take(ring, &mut self.log, &mut self.broken);
        let reset = vm.reset_dirty_ring(&mut self.worker, ring)?;
        self.broken += taken.abs_diff(reset);
        Ok(())
    }

    /// Empties all, and hands over what was taken since the last time: `log` is replaced.
    ///
    /// # Errors
    /// What the engine refuses.
    pub(crate) fn collect(&mut self, vm: &MetalVm, log: &mut Log) -> Result<(), LogError> {
        self.harvest();
        let (taken, mut reset) = (core::mem::take(&mut self.open), 0);
        for ring in &self.rings {
            reset += vm.reset_dirty_ring(&mut self.worker, ring)?;
        }
        self.broken += taken.abs_diff(reset);
        core::mem::swap(&mut self.log, log);
        self.log.clear();
        Ok(())
    }
}

fn take(ring: &DirtyRing, log: &mut Log, broken: &mut u64) -> u64 {
    ring.harvest(|entry| {
        let known = entry.slot.space == 0 && log.add(entry.slot.number, entry.page);
        *broken += u64::from(!known);
    })
}
