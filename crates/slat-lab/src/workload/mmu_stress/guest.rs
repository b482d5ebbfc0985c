//! What a vCPU does to its part of memory: writes, reads, and writes that must fail.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use slat_vm::{Exit, FaultError, HostError, Mmio};

use super::Window;
use crate::arch::Tables;
use crate::crew::{Guest, RunOn};
use crate::guest::{GuestMemory, Watch};
use crate::model::{Broken, ModelVcpu};

/// The run that writes while memory becomes read-only.
const READ_ONLY: u64 = 3;
/// The run after memory has become writable again.
pub(super) const REWRITE: u64 = 4;
/// Bits of a value that say in which run it was stored; the others are the guest address, which is a page's.
const RUN_MASK: u64 = 0xfff;

/// The run in which a value was stored.
pub(super) fn run_of(value: u64) -> u64 {
    value & RUN_MASK
}

/// Whether the slot is deleted at the end.
pub(super) fn is_deleted(id: u32) -> bool {
    id.is_multiple_of(2)
}

/// Where guest memory is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Region {
    pub(super) gpa: u64,
    /// Bytes of a guest page.
    pub(super) page: u64,
    /// Bytes of a slot. All slots have the same host memory behind them.
    pub(super) slot_size: u64,
    /// Bytes at the beginning of that memory that are unmapped at the end.
    pub(super) unmapped: u64,
}

impl Region {
    /// Whether a value was stored, in any run and through any slot, at this offset into host memory.
    pub(super) fn is_of(&self, value: u64, offset: u64) -> bool {
        let gpa = value & !RUN_MASK;
        gpa.checked_sub(self.gpa).is_some_and(|distance| distance % self.slot_size == offset)
    }

    /// The slot and the offset into host memory.
    fn place(&self, gpa: u64) -> (u32, u64) {
        let distance = gpa - self.gpa;
        (1 + (distance / self.slot_size) as u32, distance % self.slot_size)
    }
}

/// What a vCPU is told.
#[derive(Clone, Copy, Debug)]
pub(super) enum Order {
    /// Write everything, as this run.
    Write(u64),
    /// Load the registers anew.
    Reset,
    /// Read everything, then write until everything is read-only, and once more.
    ReadOnly,
    /// Write everything as soon as it can be written.
    Rewrite,
    /// Read everything, where half of it is gone.
    Probe,
}

/// One vCPU, and what it saw.
#[derive(Debug)]
pub(super) struct Writer {
    region: Region,
    /// Its guest pages.
    part: Range<u64>,
    window: Arc<Window>,
    /// Whether it also reads pages just before it writes them while they are read-only, so that translations exist that
    /// do not permit the write.
    check: bool,
    pub(super) refused: u64,
    pub(super) passed: u64,
    pub(super) wrong_loads: u64,
    pub(super) misled: u64,
}

impl Writer {
    pub(super) fn new(region: Region, part: Range<u64>, window: Arc<Window>, check: bool) -> Self {
        Self { region, part, window, check, refused: 0, passed: 0, wrong_loads: 0, misled: 0 }
    }

    fn addresses(&self) -> impl Iterator<Item = u64> + use<> {
        let Region { gpa, page, .. } = self.region;
        self.part.clone().map(move |index| gpa + index * page)
    }

    fn obey<T: Tables>(
        &mut self,
        vcpu: &mut ModelVcpu<'_, '_, T>,
        order: Order,
        watch: Watch<'_>,
    ) -> Result<(), Broken> {
        match order {
            Order::Reset => vcpu.reload(),
            Order::ReadOnly => self.read_only(vcpu, watch)?,
            Order::Write(run) => {
                for gpa in self.addresses() {
                    vcpu.store(gpa, gpa | run)?;
                    watch.beat();
                }
            }
            Order::Rewrite => {
                for gpa in self.addresses() {
                    while !try_store(vcpu, gpa, REWRITE)? {
                        std::thread::yield_now();
                    }
                    watch.beat();
                }
            }
            Order::Probe => {
                for gpa in self.addresses() {
                    self.probe(vcpu, gpa)?;
                    watch.beat();
                }
            }
        }
        Ok(())
    }

    fn read_only<T: Tables>(
        &mut self,
        vcpu: &mut ModelVcpu<'_, '_, T>,
        watch: Watch<'_>,
    ) -> Result<(), Broken> {
        for gpa in self.addresses() {
            self.load(vcpu, gpa)?;
            watch.beat();
        }
        self.window.writing.fetch_add(1, Ordering::Relaxed);
        // After one write has failed, all must.
        let mut failed = false;
        loop {
            let closed = self.window.closed.load(Ordering::Acquire);
            for gpa in self.addresses() {
                if closed && self.check {
                    self.load(vcpu, gpa)?;
                }
                let stored = try_store(vcpu, gpa, READ_ONLY)?;
                failed |= !stored;
                self.refused += u64::from(!stored);
                self.passed += u64::from(stored && (failed || closed));
                watch.beat();
            }
            if closed {
                return Ok(());
            }
        }
    }

    fn load<T: Tables>(&mut self, vcpu: &mut ModelVcpu<'_, '_, T>, gpa: u64) -> Result<(), Broken> {
        let value = vcpu.load(gpa)?;
        let (_, offset) = self.region.place(gpa);
        self.wrong_loads += u64::from(!self.region.is_of(value, offset));
        Ok(())
    }

    fn probe<T: Tables>(
        &mut self,
        vcpu: &mut ModelVcpu<'_, '_, T>,
        gpa: u64,
    ) -> Result<(), Broken> {
        let (slot, offset) = self.region.place(gpa);
        let right = match vcpu.load(gpa) {
            Ok(value) => {
                !is_deleted(slot)
                    && offset >= self.region.unmapped
                    && self.region.is_of(value, offset)
                    && run_of(value) == REWRITE
            }
            Err(Broken::Exit(Exit::Mmio(Mmio { slot: None, .. }))) => is_deleted(slot),
            Err(Broken::Fault(FaultError::Host { error: HostError::NotMapped, .. })) => {
                !is_deleted(slot) && offset < self.region.unmapped
            }
            Err(broken) => return Err(broken),
        };
        self.misled += u64::from(!right);
        Ok(())
    }
}

/// Stores; `false` if the host does not let this memory be written.
fn try_store<T: Tables>(
    vcpu: &mut ModelVcpu<'_, '_, T>,
    gpa: u64,
    run: u64,
) -> Result<bool, Broken> {
    match vcpu.store(gpa, gpa | run) {
        Ok(()) => Ok(true),
        Err(Broken::Fault(FaultError::Host { error: HostError::NotWritable, .. })) => Ok(false),
        Err(broken) => Err(broken),
    }
}

impl Guest for Writer {
    type Order = Order;

    fn accesses(&self) -> u64 {
        self.part.end - self.part.start
    }
}

impl<T: Tables> RunOn<ModelVcpu<'_, '_, T>> for Writer {
    fn run(
        &mut self,
        vcpu: &mut ModelVcpu<'_, '_, T>,
        order: Order,
        watch: Watch<'_>,
    ) -> Result<(), String> {
        self.obey(vcpu, order, watch).map_err(|broken| broken.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_belongs_to_the_offset_at_which_any_slot_could_have_stored_it() {
        let region = Region { gpa: 4 << 30, page: 4096, slot_size: 1 << 20, unmapped: 1 << 19 };
        let gpa = region.gpa + 3 * region.slot_size + 0x5000;
        assert_eq!(region.place(gpa), (4, 0x5000));
        assert!(region.is_of(gpa | REWRITE, 0x5000));
        assert!(!region.is_of(gpa | REWRITE, 0x6000));
        assert!(!region.is_of(REWRITE, 0));
        assert_eq!(run_of(gpa | READ_ONLY), READ_ONLY);
    }
}
