//! Turning a slot's dirty log on and off.

use core::fmt;

use slat::{Format, Gpa, GpaRange, Installed, Machine};

use crate::bitmap::Bitmap;
use crate::chunks::At;
use crate::heap::OutOfMemory;
use crate::ring::Ring;
use crate::shared::Shared;
use crate::slot::{SlotId, Version};
use crate::split::SplitJob;
use crate::sync::AtomicUsize;
use crate::template::{HOST_WRITABLE, LeafKind};
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
    /// Hardware keeps dirty state in the tree's entries (Arm: FEAT_HAFDBS, with
    /// [`with_hardware_dirty`](slat::format::arm::Stage2::with_hardware_dirty)). Writes do not fault at all while the
    /// log is on; each collection takes the state out of the entries by a walk. A block counts as written as a whole:
    /// with [`VmOptions::eager_split`](crate::VmOptions) blocks are split when the log is enabled.
    Hardware,
    /// Each vCPU reports the pages that it makes writable in its [dirty ring](crate::DirtyRing), which is read and
    /// [reset](Vm::reset_dirty_ring) instead of the bitmap. All pages are protected when the log is enabled.
    Ring {
        /// There is a bitmap too, for what no vCPU has written: [`Vm::mark_dirty`], the monitor, dirty state that
        /// hardware kept. Without one, such writes are refused or lost.
        backup: bool,
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
    /// That of the first of the logs that went on as this one when their slot moved.
    pub(crate) origin: u64,
    pub(crate) mode: LogMode,
    /// Of no pages, for rings without backup.
    pub(crate) bitmap: Bitmap,
    /// How many collections have taken bits and not yet protected their pages.
    pub(crate) open: AtomicUsize,
}

impl Log {
    /// A log whose bits are as the mode wants them at first.
    fn new(number: u64, mode: LogMode, pages: u64, read_only: bool) -> Result<Self, OutOfMemory> {
        let pages = if mode == (LogMode::Ring { backup: false }) { 0 } else { pages };
        let bitmap = Bitmap::new(pages, mode.all_set() && !read_only)?;
        Ok(Self { number, origin: number, mode, bitmap, open: AtomicUsize::new(0) })
    }

    /// An empty log of the same mode, for when its slot has moved.
    pub(crate) fn successor(&self, number: u64, pages: u64) -> Result<Self, OutOfMemory> {
        Ok(Self { origin: self.origin, ..Self::new(number, self.mode, pages, true)? })
    }
}

/// One page of a log, and where a vCPU reports it.
pub(crate) struct Mark<'a> {
    log: &'a Log,
    id: SlotId,
    page: u64,
    ring: Option<&'a Ring>,
}

impl<'a> Mark<'a> {
    pub(crate) fn new(
        log: &'a Log,
        version: &Version,
        gpa: Gpa,
        page_shift: u32,
        ring: &'a Option<Shared<Ring>>,
    ) -> Self {
        let to_ring = matches!(log.mode, LogMode::Ring { .. });
        let ring = ring.as_deref().filter(|_| to_ring);
        Self { log, id: version.id, page: version.page_of(gpa, page_shift), ring }
    }

    /// Whether a report has a place.
    pub(crate) fn has_room(&self) -> bool {
        self.ring.is_none_or(|ring| !ring.is_exhausted())
    }

    /// After a fault has made the page writable for a write. Whether it was clean in the log.
    pub(crate) fn written(&self, installed: Installed) -> bool {
        match (self.log.mode, self.ring) {
            // Hardware marks the entry when the write goes through.
            (LogMode::Hardware, _) => false,
            // Whoever made it writable reports it, before the vCPU that did so resumes.
            (LogMode::Ring { .. }, Some(ring)) if installed != Installed::Present => {
                ring.push(self.id, self.page);
                true
            }
            (LogMode::Ring { .. }, Some(_)) => false,
            _ => self.log.bitmap.mark(self.page),
        }
    }

    /// After the vCPU has written to the page by other ways than its translation.
    pub(crate) fn emulated(&self) {
        match self.ring {
            Some(ring) => ring.push(self.id, self.page),
            None => {
                self.log.bitmap.mark(self.page);
            }
        }
    }

    /// After a fault has put another leaf in the place of one that hardware may have marked dirty.
    pub(crate) fn taken(&self, installed: Installed) -> bool {
        match installed {
            Installed::Replaced { dirty: true } | Installed::Collapsed { dirty: true } => {
                self.log.bitmap.mark(self.page)
            }
            _ => false,
        }
    }
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
    /// The format's hardware keeps no dirty state, or it is not turned on in the format.
    NoHardware,
    /// The VM was made without dirty rings.
    NoRing,
    /// The slot's log is in the dirty rings, and it has no backup bitmap.
    Ring,
    /// The vCPU's dirty ring has no place: reset it, and call again.
    RingFull,
    /// The monitor's bitmap is not one for the slot's pages.
    Monitor {
        /// How many pages the slot has.
        pages: u64,
        /// log2 of the bytes of one.
        page_shift: u32,
    },
    /// Another slot reports what is in the monitor's bitmap, and would take it away.
    MonitorTaken {
        /// Which.
        by: SlotId,
    },
    /// The log has nothing to clear: its collections take what they return.
    NotManual,
    /// A slot with private memory has no log.
    Private,
    /// The pages do not all lie in slots with a log.
    NotLogged {
        /// The first address that does not.
        gpa: Gpa,
    },
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
            Self::NoHardware => {
                f.write_str("the format's hardware keeps no dirty state: turn it on in the format")
            }
            Self::NoRing => {
                f.write_str("the VM has no dirty rings: VmOptions::dirty_ring gives it some")
            }
            Self::Ring => f.write_str(
                "the log of the memslot is in the dirty rings: it has a bitmap only as a backup, if enabled so",
            ),
            Self::RingFull => f.write_str("the dirty ring of the vCPU is full: reset it"),
            Self::Monitor { pages, page_shift } => {
                write!(f, "the monitor's bitmap must be one for {pages} pages of 2^{page_shift} bytes")
            }
            Self::MonitorTaken { by } => {
                write!(f, "{by} reports the monitor's bitmap: make one for each memslot, and mark both")
            }
            Self::NotManual => {
                f.write_str("the log of the memslot is not cleared: collections take what they return")
            }
            Self::Private => f.write_str("a memslot with private memory has no dirty log"),
            Self::NotLogged { gpa } => write!(f, "no memslot with a dirty log of writes at {gpa}"),
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
    /// sets it, or is reported as the mode says. A read-only slot has a log that stays empty.
    ///
    /// Costs a bit a page and a grace period; unless all pages count as written at first, also the write protection of
    /// the slot (with [`LogMode::Hardware`], a walk that marks all clean), after blocks were split if
    /// [`VmOptions::eager_split`](crate::VmOptions) says so. Splitting ends early without memory
    /// ([`WorkerStatistics`](crate::WorkerStatistics) counts it): blocks are then protected as a whole and split by the
    /// first write to each.
    ///
    /// # Errors
    /// [`LogError::NoSlot`], [`LogError::Enabled`], [`LogError::Private`], [`LogError::NoHardware`],
    /// [`LogError::NoRing`], [`LogError::OutOfMemory`], [`LogError::OtherMachine`]: nothing was changed.
    pub fn enable_log(
        &self,
        worker: &mut Worker<'m, M>,
        id: impl Into<SlotId>,
        mode: LogMode,
    ) -> Result<(), LogError> {
        self.enable_log_by(worker, id, mode, |worker, job| job.run(self, worker))
    }

    /// As [`enable_log`](Self::enable_log), but `crew` splits, where blocks are split at all: it may have any number of
    /// threads [run](SplitJob::run) the job, each with its worker. What it leaves is split by faults. It must not panic:
    /// the log would be on, and nothing protected.
    ///
    /// # Errors
    /// As [`enable_log`](Self::enable_log).
    pub fn enable_log_by(
        &self,
        worker: &mut Worker<'m, M>,
        id: impl Into<SlotId>,
        mode: LogMode,
        crew: impl FnOnce(&mut Worker<'m, M>, &SplitJob),
    ) -> Result<(), LogError> {
        let id = id.into();
        self.check_mode(mode)?;
        let page_size = self.tree().geometry().page_size();
        let mut change = self.slots.lock(&mut worker.hands.participant)?;
        let number = change.next_number();
        let old = change.map().get(id).ok_or(LogError::NoSlot)?;
        if old.log.is_some() {
            return Err(LogError::Enabled);
        }
        if old.private.is_some() {
            return Err(LogError::Private);
        }
        let (range, read_only) = (old.range, old.config.read_only);
        let (hva, monitor) = (old.config.hva, old.monitor.clone());
        let log = Log::new(number, mode, range.size() / page_size, read_only)?;
        let version = Version { number, log: Some(Shared::new(log)?), ..old.clone() };
        // Rule 10: once this has returned, no fault that read "no log" is left.
        change.publish(Some(id), Some(version))?;
        if let Some(monitor) = monitor {
            // What the monitor wrote before is not for this log.
            monitor.assign(0, range.size() / page_size, false);
        }
        if mode == LogMode::Hardware {
            // Rule 8: who found another log here and protects for it drops the marks that are to be this one's.
            self.aimed.wait(self.machine());
        }
        if mode == LogMode::Hardware && !read_only {
            // Nothing that may be written is to fault: what another log has left read-only becomes writable, as far as
            // its leaf says that the host lets it. Before the lock is given up, so that no log begins meanwhile that
            // protects pages.
            let writable =
                LeafKind { write: true, host_writable: true, old: true, ..LeafKind::default() };
            let mut relaxed = 0;
            for tree in self.trees(id.space) {
                relaxed +=
                    tree.relax(change.who(), range, HOST_WRITABLE, self.template(writable))?;
            }
            if relaxed > 0 {
                self.host.dirtied(hva, range.size());
            }
        }
        drop(change);
        if mode.all_set() || read_only {
            return Ok(());
        }
        if let Some(chunk) = self.options.eager_split {
            let job = SplitJob::new(id.space, (range.start().0, range.end().0), chunk);
            crew(worker, &job);
        }
        match mode {
            LogMode::Hardware => self.mark_clean(worker, id, number),
            _ => self.protect_for(worker, id, number, range),
        }
    }

    /// Protects the slot, unless the log `number` has gone: then its pages have gone too, or another log may have begun,
    /// whose marks these are.
    fn protect_for(
        &self,
        worker: &mut Worker<'m, M>,
        id: SlotId,
        number: u64,
        range: GpaRange,
    ) -> Result<(), LogError> {
        // A slot that is on its way elsewhere is waited for: until then its pages may be writable.
        let change = self.slots.lock(&mut worker.hands.participant)?;
        let log = change.map().get(id).and_then(|slot| slot.log.as_ref());
        if log.is_none_or(|log| log.number != number) {
            return Ok(());
        }
        let _aiming = self.aimed.enter();
        drop(change);
        Ok(self.protect(worker, id.space, range)?)
    }

    fn check_mode(&self, mode: LogMode) -> Result<(), LogError> {
        match mode {
            LogMode::Hardware if !self.tree().format().tracks_dirty() => Err(LogError::NoHardware),
            LogMode::Ring { .. } if self.options.dirty_ring.is_none() => Err(LogError::NoRing),
            _ => Ok(()),
        }
    }

    /// Ends the log of a slot. What it holds is lost: collect it before, with the guest stopped if nothing may be
    /// missed.
    ///
    /// Costs a grace period. Pages stay write-protected and small until a fault makes them writable, or puts a block
    /// in their place; [`collapse`](Vm::collapse) does that ahead.
    ///
    /// # Errors
    /// [`LogError::NoSlot`], [`LogError::NotEnabled`], [`LogError::OutOfMemory`], [`LogError::OtherMachine`]: nothing
    /// was changed.
    pub fn disable_log(
        &self,
        worker: &mut Worker<'m, M>,
        id: impl Into<SlotId>,
    ) -> Result<(), LogError> {
        let id = id.into();
        let mut change = self.slots.lock(&mut worker.hands.participant)?;
        let number = change.next_number();
        let old = change.map().get(id).ok_or(LogError::NoSlot)?;
        if old.log.is_none() {
            return Err(LogError::NotEnabled);
        }
        let version = Version { number, log: None, ..old.clone() };
        Ok(change.publish(Some(id), Some(version))?)
    }

    /// Says that pages were written by somebody other than the guest, in address space `space`: a device's model, or
    /// the monitor. For what a vCPU writes, [`Vcpu::mark_dirty`](crate::Vcpu::mark_dirty). Call it after the write.
    /// Costs a pin and an exchange a page.
    ///
    /// # Errors
    /// [`LogError::NotLogged`] where no slot with a log lies, [`LogError::Ring`] where the log has no backup bitmap:
    /// the pages before are marked. [`LogError::OtherMachine`].
    pub fn mark_dirty(
        &self,
        worker: &Worker<'m, M>,
        space: u16,
        range: GpaRange,
    ) -> Result<(), LogError> {
        let mut hit = At::default();
        let mut at = range.start().0 & !((1 << F::PAGE_SHIFT) - 1);
        while at < range.end().0 {
            let pin = worker.hands.participant.pin();
            let version = self.slots.read(&pin)?.find(space, Gpa(at), &mut hit);
            let logged = version.and_then(|version| Some((version, version.writes()?)));
            let (version, log) = logged.ok_or(LogError::NotLogged { gpa: Gpa(at) })?;
            if log.mode == (LogMode::Ring { backup: false }) {
                return Err(LogError::Ring);
            }
            // Not more in one pin than a walk would visit.
            let end = version.range.end().0.min(range.end().0);
            for _ in 0..1 << F::INDEX_BITS {
                if at >= end {
                    break;
                }
                log.bitmap.mark(version.page_of(Gpa(at), F::PAGE_SHIFT));
                at += 1 << F::PAGE_SHIFT;
            }
        }
        Ok(())
    }
}
