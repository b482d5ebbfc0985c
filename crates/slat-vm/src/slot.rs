//! What a memslot is: a range of guest addresses, and the host memory behind it.

use core::fmt;

use slat::{Geometry, Gpa, GpaRange};

use crate::bitmap::Bitmap;
use crate::heap::OutOfMemory;
use crate::log::{Log, LogMode};
use crate::private::Private;
use crate::shared::Shared;
use crate::{HostError, Hva, OtherMachine};

/// The name of a memslot: a number that the embedder chooses, in one of the VM's address spaces.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct SlotId {
    /// Which address space, from 0.
    pub space: u16,
    /// Which slot of it.
    pub number: u32,
}

impl From<u32> for SlotId {
    /// The slot with this number in address space 0.
    fn from(number: u32) -> Self {
        Self { space: 0, number }
    }
}

impl fmt::Display for SlotId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.space {
            0 => self.number.fmt(f),
            space => write!(f, "{} of address space {space}", self.number),
        }
    }
}

/// The most pages of one slot, as many as KVM admits.
const MAX_PAGES: u64 = (1 << 31) - 1;

/// What a memslot is made from.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SlotConfig {
    /// The first guest-physical address, a multiple of the granule.
    pub gpa: Gpa,
    /// Bytes, a multiple of the granule.
    pub size: u64,
    /// The host address behind `gpa`, a multiple of the granule; the rest follows in order.
    pub hva: Hva,
    /// Whether a write by the guest is an [`Exit::Mmio`](crate::Exit::Mmio), for ROMs and the like.
    pub read_only: bool,
    /// The largest leaf in bytes; `None` leaves it to slot, host and format.
    pub max_page_size: Option<u64>,
    /// Whether everything is mapped when the slot is created and stays so until it is deleted, for memory that a
    /// device is given or that must never fault. The host must not take its pages back; if it ages them, and hardware sets
    /// no access flag, each faults once more. A device reaches the pages through tables of its own (an IOMMU's), never
    /// through the guest's: those change while it works.
    pub pinned: bool,
    /// The host address of the memory behind `gpa` for pages that the guest has made
    /// [private](crate::Vm::set_private); `None` if none can be. Such a slot has no dirty log and cannot be read-only
    /// or pinned, and it is not changed until it is deleted.
    pub private: Option<Hva>,
}

impl SlotConfig {
    /// A writable slot with leaves of any size.
    pub const fn new(gpa: Gpa, size: u64, hva: Hva) -> Self {
        Self { gpa, size, hva, read_only: false, max_page_size: None, pinned: false, private: None }
    }

    /// The range of guest addresses, if the slot can be one of this shape.
    pub(crate) fn check(&self, geometry: &Geometry) -> Result<GpaRange, SlotError> {
        let page_size = geometry.page_size();
        let private = self.private.unwrap_or_default();
        if self.size == 0 {
            return Err(SlotError::Empty);
        }
        if (self.gpa.0 | self.size | self.hva.0 | private.0) & (page_size - 1) != 0 {
            return Err(SlotError::Misaligned { to: page_size });
        }
        let range = GpaRange::new(self.gpa, self.size).ok_or(SlotError::Wraps)?;
        self.hva.0.checked_add(self.size).ok_or(SlotError::Wraps)?;
        private.0.checked_add(self.size).ok_or(SlotError::Wraps)?;
        let limit = geometry.limit();
        if range.end() > limit {
            return Err(SlotError::OutOfRange { limit });
        }
        if self.size / page_size > MAX_PAGES {
            return Err(SlotError::TooLarge { max: MAX_PAGES * page_size });
        }
        if self.max_page_size.is_some_and(|max| max < page_size) {
            return Err(SlotError::MaxPageSize { granule: page_size });
        }
        if self.private.is_some() && (self.read_only || self.pinned) {
            return Err(SlotError::Private);
        }
        Ok(range)
    }
}

/// Why a slot cannot be created, changed or deleted. Nothing was changed, but where a variant says otherwise.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum SlotError {
    /// A slot needs a size.
    Empty,
    /// Guest address, host address and size must be multiples of the granule.
    Misaligned {
        /// The granule in bytes.
        to: u64,
    },
    /// The guest or host range would wrap round.
    Wraps,
    /// The slot reaches beyond the guest's addresses.
    OutOfRange {
        /// The first address that is too large.
        limit: Gpa,
    },
    /// More pages than a slot can have.
    TooLarge {
        /// The largest size in bytes.
        max: u64,
    },
    /// The largest leaf must have at least one granule.
    MaxPageSize {
        /// The granule in bytes.
        granule: u64,
    },
    /// The VM has no such address space.
    NoSpace {
        /// How many it has.
        spaces: u16,
    },
    /// A slot with private memory cannot be read-only or pinned, and cannot be changed.
    Private,
    /// Size and host address of a slot cannot be changed.
    Fixed,
    /// A pinned slot cannot move, and a slot becomes pinned only when it is created.
    Pinned,
    /// Memory of a pinned slot could not be mapped ahead.
    NotMapped {
        /// Where.
        gpa: Gpa,
        /// Why, if the host gave no page; otherwise there was no memory for a table.
        error: Option<HostError>,
    },
    /// There is a slot with this number already.
    Exists,
    /// Another slot has some of these guest addresses.
    Overlaps {
        /// Which.
        other: SlotId,
    },
    /// There is no slot with this number.
    NotFound,
    /// The allocator has no memory.
    OutOfMemory,
    /// The worker belongs to another machine than this VM.
    OtherMachine,
    /// The tree refused to unmap the slot.
    Tree(slat::Error),
}

impl fmt::Display for SlotError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str("a memslot needs a size"),
            Self::Misaligned { to } => write!(
                f,
                "guest address, host address and size of a memslot must be multiples of {to:#x}"
            ),
            Self::Wraps => f.write_str("the memslot would wrap round the end of the addresses"),
            Self::OutOfRange { limit } => {
                write!(f, "the memslot must end at or below {limit}, where guest addresses end")
            }
            Self::TooLarge { max } => write!(f, "a memslot has at most {max:#x} bytes"),
            Self::MaxPageSize { granule } => {
                write!(f, "the largest page size must be at least the granule, {granule:#x}")
            }
            Self::NoSpace { spaces } => {
                write!(f, "the VM has {spaces} address spaces: VmOptions says how many")
            }
            Self::Private => f.write_str(
                "a memslot with private memory cannot be read-only or pinned, nor be changed: delete it first",
            ),
            Self::Fixed => f.write_str(
                "size and host address of a memslot cannot be changed: delete it and create another",
            ),
            Self::Pinned => f.write_str(
                "a pinned memslot cannot move, and no memslot becomes or ceases to be pinned: delete it first",
            ),
            Self::NotMapped { gpa, error: Some(error) } => {
                write!(f, "the pinned memslot could not be mapped at {gpa}: {error}")
            }
            Self::NotMapped { gpa, error: None } => {
                write!(f, "the pinned memslot could not be mapped at {gpa}: no memory for tables")
            }
            Self::Exists => f.write_str("a memslot with this number exists: delete it first"),
            Self::Overlaps { other } => write!(f, "memslot {other} has some of these addresses"),
            Self::NotFound => f.write_str("there is no memslot with this number"),
            Self::OutOfMemory => OutOfMemory.fmt(f),
            Self::OtherMachine => OtherMachine.fmt(f),
            Self::Tree(error) => write!(f, "the tree of the memslot: {error}"),
        }
    }
}

impl core::error::Error for SlotError {}

impl From<OutOfMemory> for SlotError {
    fn from(_: OutOfMemory) -> Self {
        Self::OutOfMemory
    }
}

impl From<OtherMachine> for SlotError {
    fn from(_: OtherMachine) -> Self {
        Self::OtherMachine
    }
}

/// A memslot as it is from one change to the next: never written after it was published (rule 10).
#[derive(Clone, Debug)]
pub(crate) struct Version {
    /// Different for every version of every slot of a VM.
    pub(crate) number: u64,
    pub(crate) id: SlotId,
    pub(crate) range: GpaRange,
    pub(crate) config: SlotConfig,
    pub(crate) log: Option<Shared<Log>>,
    /// Which pages are private, where any can be.
    pub(crate) private: Option<Shared<Private>>,
    /// What the monitor has written itself.
    pub(crate) monitor: Option<Shared<Bitmap>>,
}

impl Version {
    /// What the fault path takes along while it is not pinned.
    pub(crate) fn facts(&self) -> Facts {
        let log = self.log.as_ref().filter(|_| !self.config.read_only);
        Facts {
            version: self.number,
            id: self.id,
            range: self.range,
            hva: self.config.hva,
            read_only: self.config.read_only,
            log: log.map(|log| log.mode),
            // What hardware has marked in pages until a slot became read-only is not to vanish in a block.
            pages: log.is_some()
                || self.log.as_ref().is_some_and(|log| log.mode == LogMode::Hardware),
            uniform: u64::MAX,
            largest: self.config.max_page_size.unwrap_or(u64::MAX),
        }
    }

    /// Which page of the slot `gpa` lies in, for pages of `1 << page_shift` bytes.
    pub(crate) fn page_of(&self, gpa: Gpa, page_shift: u32) -> u64 {
        gpa.0.saturating_sub(self.range.start().0) >> page_shift
    }

    /// The log that hears of writes: a read-only slot has none.
    pub(crate) fn writes(&self) -> Option<&Shared<Log>> {
        self.log.as_ref().filter(|_| !self.config.read_only)
    }
}

/// A version's contents, copied out of a pin. Valid if the version is still there in the pin in which they are used.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Facts {
    pub(crate) version: u64,
    pub(crate) id: SlotId,
    pub(crate) range: GpaRange,
    /// The host address of the first byte: of private memory, where the page is private.
    pub(crate) hva: Hva,
    pub(crate) read_only: bool,
    /// Whether and how writes must be noticed. A read-only slot is never logged.
    pub(crate) log: Option<LogMode>,
    /// Whether every page has a leaf of its own.
    pub(crate) pages: bool,
    /// The largest piece round the page, in bytes, all of which is private or all of which is shared.
    pub(crate) uniform: u64,
    /// The largest leaf that the slot allows, in bytes.
    pub(crate) largest: u64,
}

impl Facts {
    /// The host address behind `gpa`, which lies in the slot.
    pub(crate) fn hva_of(&self, gpa: Gpa) -> Hva {
        Hva(self.hva.0 + (gpa.0 - self.range.start().0))
    }

    /// Whether a page that was not written must not be writable: a log is on, and nobody else notices the write.
    pub(crate) fn protects(&self) -> bool {
        self.log.is_some_and(|mode| mode != LogMode::Hardware)
    }
}
