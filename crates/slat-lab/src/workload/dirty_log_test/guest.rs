//! What the guests do: each writes the number of the round into its share of all pages, and from then on into any page at
//! random.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use slat_vm::Exit;

use crate::arch::Tables;
use crate::crew::{Guest, RunOn};
use crate::guest::{GuestMemory, Watch};
use crate::model::{Broken, ModelVcpu};
use crate::random::Dice;

/// Writes from one look whether to stop to the next.
const LOOP: u64 = 1024;

/// A write that a vCPU was about to make when it had to leave the guest. Its value is that of the round in which it was
/// begun, in a register of the vCPU.
#[derive(Clone, Copy, Debug)]
struct Pending {
    gpa: u64,
    value: u64,
}

/// One vCPU's guest.
#[derive(Debug)]
pub(super) struct Dirtier {
    /// Where guest memory begins.
    gpa: u64,
    /// Bytes from one page that is written to the next.
    page: u64,
    /// All pages.
    pages: u64,
    /// Those of its share that it has not written yet.
    share: Range<u64>,
    round: Arc<AtomicU64>,
    dice: Dice,
    pending: Option<Pending>,
    pub(super) writes: u64,
    /// Times that it had to wait until its dirty ring was reset.
    pub(super) ring_full: u64,
}

impl Dirtier {
    pub(super) fn new(
        (gpa, page, pages): (u64, u64, u64),
        share: Range<u64>,
        round: Arc<AtomicU64>,
        dice: Dice,
    ) -> Self {
        Self { gpa, page, pages, share, round, dice, pending: None, writes: 0, ring_full: 0 }
    }

    /// Writes until it is stopped, and at least so much that it is asked to.
    fn dirty<T: Tables>(
        &mut self,
        vcpu: &mut ModelVcpu<'_, '_, T>,
        watch: Watch<'_>,
    ) -> Result<(), Broken> {
        loop {
            if !self.share.is_empty() {
                for page in self.share.clone() {
                    if !self.write(vcpu, page, watch)? {
                        return Ok(());
                    }
                    self.share.start = page + 1;
                }
            }
            for _ in 0..LOOP {
                let page = self.dice.below(self.pages);
                if !self.write(vcpu, page, watch)? {
                    return Ok(());
                }
            }
            if watch.stopped() {
                return Ok(());
            }
        }
    }

    /// One write, and before it the one that is pending; `false` if it is to stop before this one is done.
    fn write<T: Tables>(
        &mut self,
        vcpu: &mut ModelVcpu<'_, '_, T>,
        page: u64,
        watch: Watch<'_>,
    ) -> Result<bool, Broken> {
        if !self.complete(vcpu, watch)? {
            return Ok(false);
        }
        let (gpa, value) = (self.gpa + page * self.page, self.round.load(Ordering::Relaxed));
        self.pending = Some(Pending { gpa, value });
        self.complete(vcpu, watch)
    }

    /// Makes the write that is pending; `false` if it is to stop before that is done.
    fn complete<T: Tables>(
        &mut self,
        vcpu: &mut ModelVcpu<'_, '_, T>,
        watch: Watch<'_>,
    ) -> Result<bool, Broken> {
        let Some(Pending { gpa, value }) = self.pending else { return Ok(true) };
        loop {
            match vcpu.store(gpa, value) {
                Ok(()) => break,
                Err(Broken::Exit(Exit::DirtyRingFull)) => {
                    self.ring_full += 1;
                    while vcpu.is_ring_full() {
                        if watch.stopped() {
                            return Ok(false);
                        }
                        std::thread::yield_now();
                    }
                }
                Err(broken) => return Err(broken),
            }
        }
        self.pending = None;
        self.writes += 1;
        watch.beat();
        Ok(true)
    }
}

impl Guest for Dirtier {
    type Order = ();

    fn accesses(&self) -> u64 {
        0
    }
}

impl<T: Tables> RunOn<ModelVcpu<'_, '_, T>> for Dirtier {
    fn run(
        &mut self,
        vcpu: &mut ModelVcpu<'_, '_, T>,
        (): (),
        watch: Watch<'_>,
    ) -> Result<(), String> {
        self.dirty(vcpu, watch).map_err(|broken| broken.to_string())
    }
}
