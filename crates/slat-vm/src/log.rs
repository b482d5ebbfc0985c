//! Turning a slot's dirty log on and off.

use core::fmt;

use slat::{Format, GpaRange, Machine};

use crate::bitmap::Bitmap;
use crate::heap::OutOfMemory;
use crate::slot::{SlotId, Version};
use crate::sync::AtomicUsize;
use crate::{Host, OtherMachine, Vm, Worker};

/// Who protects collected pages again.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum LogMode {
    /// Each collection does, at once. All pages are protected when the log is enabled.
    Protect,
    /// The caller does, section by section, with [`Vm::clear_dirty_log`], when it is about to copy the pages. A page
    /// that is written again before is then copied once.
    Manual {
        /// Every page counts as written at first, and nothing is protected when the log is enabled; otherwise no page
        /// does, and all are protected.
        initially_all_set: bool,
    },
}

impl LogMode {
    /// Whether every bit is set, and so no page protected, when the log begins.
    fn all_set(self) -> bool {
        self == Self::Manual { initially_all_set: true }
    }
}

/// One log, from when it is enabled until it is disabled.
#[derive(Debug)]
pub(crate) struct Log {
    /// Different for every log of a VM.
    pub(crate) number: u64,
    pub(crate) mode: LogMode,
    pub(crate) bitmap: Bitmap,
    /// How many collections have taken bits and not yet protected their pages.
    pub(crate) open: AtomicUsize,
}

/// Why an operation on a dirty log was refused. Nothing was changed then, unless it says so.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum LogError {
    /// There is no slot with this number.
    NoSlot,
    /// The slot has no log: enable one.
    NotEnabled,
    /// The slot has a log already: disable it first.
    Enabled,
    /// The slot or its log went away during the call. What the bitmap says up to there is true.
    Gone,
    /// The bitmap must have exactly this many words of 64 pages.
    BitmapLength {
        /// How many.
        words: usize,
    },
    /// The first page must be a multiple of 64.
    FirstPage,
    /// The pages reach beyond the slot.
    BeyondEnd {
        /// How many pages the slot has.
        pages: u64,
    },
    /// The number of pages must be a multiple of 64, or end with the slot.
    PageCount,
    /// The allocator has no memory for the bitmap.
    OutOfMemory,
    /// The worker belongs to another machine than this VM.
    OtherMachine,
    /// The tree refused the slot's addresses.
    Tree(slat::Error),
}

impl fmt::Display for LogError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoSlot => f.write_str("there is no memslot with this number"),
            Self::NotEnabled => f.write_str("the memslot has no dirty log: enable it first"),
            Self::Enabled => f.write_str("the memslot has a dirty log: disable it first"),
            Self::Gone => f.write_str("the memslot or its dirty log went away meanwhile"),
            Self::BitmapLength { words } => {
                write!(f, "the bitmap must have exactly {words} words of 64 pages")
            }
            Self::FirstPage => f.write_str("the first page must be a multiple of 64"),
            Self::BeyondEnd { pages } => write!(f, "the memslot ends after {pages} pages"),
            Self::PageCount => f.write_str(
                "the number of pages must be a multiple of 64, unless they end with the memslot",
            ),
            Self::OutOfMemory => OutOfMemory.fmt(f),
            Self::OtherMachine => OtherMachine.fmt(f),
            Self::Tree(error) => error.fmt(f),
        }
    }
}

impl core::error::Error for LogError {}

impl From<OutOfMemory> for LogError {
    fn from(_: OutOfMemory) -> Self {
        Self::OutOfMemory
    }
}

impl From<OtherMachine> for LogError {
    fn from(_: OtherMachine) -> Self {
        Self::OtherMachine
    }
}

impl From<slat::Error> for LogError {
    fn from(error: slat::Error) -> Self {
        Self::Tree(error)
    }
}

impl<'m, F: Format, M: Machine, H: Host> Vm<'m, F, M, H> {
    /// Begins to log which pages of a slot are written. From the return on, every write to a page whose bit is clear
    /// sets it. A read-only slot has a log that stays empty.
    ///
    /// Costs a bit a page and a grace period; unless all pages count as written at first, also the write protection of
    /// the slot, after blocks were split if [`VmOptions::eager_split`](crate::VmOptions) says so. Splitting ends early
    /// without memory ([`WorkerStatistics`](crate::WorkerStatistics) counts it): blocks are then protected as a whole
    /// and split by the first write to each.
    ///
    /// # Errors
    /// [`LogError::NoSlot`], [`LogError::Enabled`], [`LogError::OutOfMemory`], [`LogError::OtherMachine`]: nothing was
    /// changed.
    pub fn enable_log(
        &self,
        worker: &mut Worker<'m, M>,
        id: SlotId,
        mode: LogMode,
    ) -> Result<(), LogError> {
        let page_size = self.tree().geometry().page_size();
        let mut change = self.slots.lock(&mut worker.participant)?;
        let number = change.map().next_number();
        let old = change.map().get(id).ok_or(LogError::NoSlot)?;
        if old.log.is_some() {
            return Err(LogError::Enabled);
        }
        let (range, read_only) = (old.range, old.read_only);
        let bitmap = Bitmap::new(range.size() / page_size, mode.all_set() && !read_only)?;
        let log = Log { number, mode, bitmap, open: AtomicUsize::new(0) };
        let version = old.with_log(number, Some(log));
        // Rule 10: once this has returned, no fault that read "no log" is left.
        change.publish(Some(id), Some(version))?;
        drop(change);
        if mode.all_set() || read_only {
            return Ok(());
        }
        self.protect_slot(worker, range)
    }

    fn protect_slot(&self, worker: &mut Worker<'m, M>, range: GpaRange) -> Result<(), LogError> {
        if let Some(chunk) = self.options.eager_split {
            self.split_in_chunks(worker, (range.start().0, range.end().0), chunk);
        }
        Ok(self.protect(worker, range)?)
    }

    /// Ends the log of a slot. What it holds is lost: collect it before, with the guest stopped if nothing may be
    /// missed.
    ///
    /// Costs a grace period. Pages stay write-protected and small until a fault makes them writable, or puts a block
    /// in their place.
    ///
    /// # Errors
    /// [`LogError::NoSlot`], [`LogError::NotEnabled`], [`LogError::OutOfMemory`], [`LogError::OtherMachine`]: nothing
    /// was changed.
    pub fn disable_log(&self, worker: &mut Worker<'m, M>, id: SlotId) -> Result<(), LogError> {
        let mut change = self.slots.lock(&mut worker.participant)?;
        let number = change.map().next_number();
        let old = change.map().get(id).ok_or(LogError::NoSlot)?;
        if old.log.is_none() {
            return Err(LogError::NotEnabled);
        }
        let version = old.with_log(number, None);
        Ok(change.publish(Some(id), Some(version))?)
    }
}

impl Version {
    /// The next version of the same slot.
    fn with_log(&self, number: u64, log: Option<Log>) -> Self {
        let &Self { id, range, hva, read_only, max_page_size, .. } = self;
        Self { number, id, range, hva, read_only, max_page_size, log }
    }
}
