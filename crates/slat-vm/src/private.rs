//! Which pages of a slot are private: memory that the guest has taken out of what it shares with its host.
//!
//! One bit a page, changed between the begin and the end of an invalidation of the page (rule 7): a fault that has read
//! the old bit retries, one that samples after the end reads the new one.

use core::fmt;

use slat::{Format, Gpa, GpaRange, Machine};

use crate::bitmap::Bitmap;
use crate::chunks::At;
use crate::progress::Interval;
use crate::{Guard, Host, InvalidateError, OtherMachine, SlotId, Vm, Worker};

/// The attributes of one slot's pages.
#[derive(Debug)]
pub(crate) struct Private(pub(crate) Bitmap);

impl Private {
    /// Whether the page is private, and the largest naturally aligned piece round it, of a power of two pages and at
    /// most `limit`, that is all like it. Pieces are aligned by `frame`, the page's place among all guest pages; where
    /// the slot ends is for the caller to look at.
    pub(crate) fn around(&self, page: u64, frame: u64, limit: u64) -> (bool, u64) {
        let private = self.0.get(page);
        let mut pages = 1;
        while pages < limit {
            let wider = pages * 2;
            let Some(first) = page.checked_sub(frame & (wider - 1)) else { break };
            if self.0.run(first, first + wider) != (private, wider) {
                break;
            }
            pages = wider;
        }
        (private, pages)
    }
}

/// Why pages cannot be made private or shared. Nothing was changed then.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum PrivateError {
    /// There is no slot with this number.
    NoSlot,
    /// The slot has no private memory: say where it is when the slot is created.
    NoPrivateMemory,
    /// The pages do not all lie in the slot.
    OutsideSlot {
        /// The slot.
        slot: GpaRange,
    },
    /// The range must consist of whole granules.
    Misaligned {
        /// The granule in bytes.
        to: u64,
    },
    /// The worker belongs to another machine than this VM.
    OtherMachine,
    /// The tree refused.
    Tree(slat::Error),
}

impl fmt::Display for PrivateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoSlot => f.write_str("there is no memslot with this number"),
            Self::NoPrivateMemory => {
                f.write_str("the memslot has no private memory: name it when the slot is created")
            }
            Self::OutsideSlot { slot } => {
                write!(f, "the pages must lie in the memslot, {} to {}", slot.start(), slot.end())
            }
            Self::Misaligned { to } => write!(f, "the range must be a multiple of {to:#x}"),
            Self::OtherMachine => OtherMachine.fmt(f),
            Self::Tree(error) => error.fmt(f),
        }
    }
}

impl core::error::Error for PrivateError {}

impl From<OtherMachine> for PrivateError {
    fn from(_: OtherMachine) -> Self {
        Self::OtherMachine
    }
}

impl<'m, F: Format, M: Machine, H: Host> Vm<'m, F, M, H> {
    /// Makes pages of a slot private, or shared again (`KVM_SET_MEMORY_ATTRIBUTES`): what backs them is the slot's
    /// [private memory](crate::SlotConfig::private), or its shared one. When it returns, nobody translates the pages to
    /// what backed them before, and faults map them anew; no leaf covers pages of both kinds. All pages are shared when
    /// the slot is created.
    ///
    /// Costs a grace period and an unmap; a block that reaches beyond the range faults back.
    ///
    /// # Errors
    /// [`PrivateError`].
    pub fn set_private(
        &self,
        worker: &mut Worker<'m, M>,
        id: impl Into<SlotId>,
        range: GpaRange,
        private: bool,
    ) -> Result<(), PrivateError> {
        let id = id.into();
        // The slot that is found may be gone, and a pinned one in its place, before its pages are unmapped.
        let aiming = self.aimed.enter();
        let (pages, first) = {
            let pin = worker.hands.participant.pin();
            let slot = self.slots.read(&pin)?.get(id).ok_or(PrivateError::NoSlot)?;
            let pages = slot.private.clone().ok_or(PrivateError::NoPrivateMemory)?;
            let (start, end) = (range.start(), range.end());
            if start < slot.range.start() || slot.range.end() < end {
                return Err(PrivateError::OutsideSlot { slot: slot.range });
            }
            let to = 1 << F::PAGE_SHIFT;
            if (start.0 | end.0) & (to - 1) != 0 {
                return Err(PrivateError::Misaligned { to });
            }
            (pages, slot.page_of(start, F::PAGE_SHIFT))
        };
        let begun = self.progress.begin([Interval::guest(range)].into_iter());
        let guard = Guard::new(&self.progress, self.machine(), begun);
        worker.hands.participant.synchronize();
        self.unmap_whole(worker, id.space, range).map_err(|error| match error {
            InvalidateError::Tree(error) => PrivateError::Tree(error),
            _ => PrivateError::OtherMachine,
        })?;
        pages.0.assign(first, first + (range.size() >> F::PAGE_SHIFT), private);
        guard.end();
        drop(aiming);
        Ok(())
    }

    /// Whether the page of a slot at `gpa` is private; `None` where there is no slot that can have any.
    pub fn is_private(&self, worker: &Worker<'m, M>, space: u16, gpa: Gpa) -> Option<bool> {
        let pin = worker.hands.participant.pin();
        let slot = self.slots.read(&pin).ok()?.find(space, gpa, &mut At::default())?;
        let page = slot.page_of(gpa, F::PAGE_SHIFT);
        slot.private.as_ref().map(|pages| pages.0.get(page))
    }
}
