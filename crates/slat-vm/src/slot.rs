//! What a memslot is: a range of guest addresses, and the host memory behind it.

use core::fmt;

use slat::{Geometry, Gpa, GpaRange};

use crate::heap::OutOfMemory;
use crate::log::Log;
use crate::{Hva, OtherMachine};

/// The number by which an embedder names a memslot.
pub type SlotId = u32;

/// The most pages of one slot, as many as KVM admits.
const MAX_PAGES: u64 = (1 << 31) - 1;

/// What to create a memslot from.
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
}

impl SlotConfig {
    /// A writable slot with leaves of any size.
    pub const fn new(gpa: Gpa, size: u64, hva: Hva) -> Self {
        Self { gpa, size, hva, read_only: false, max_page_size: None }
    }

    /// The range of guest addresses, if the slot can be one of this shape.
    pub(crate) fn check(&self, geometry: &Geometry) -> Result<GpaRange, SlotError> {
        let page_size = geometry.page_size();
        if self.size == 0 {
            return Err(SlotError::Empty);
        }
        if (self.gpa.0 | self.size | self.hva.0) & (page_size - 1) != 0 {
            return Err(SlotError::Misaligned { to: page_size });
        }
        let range = GpaRange::new(self.gpa, self.size).ok_or(SlotError::Wraps)?;
        self.hva.0.checked_add(self.size).ok_or(SlotError::Wraps)?;
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
    /// The tree refused to unmap the slot, which is deleted nevertheless: its translations may be left.
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
            Self::Exists => f.write_str("a memslot with this number exists: delete it first"),
            Self::Overlaps { other } => write!(f, "memslot {other} has some of these addresses"),
            Self::NotFound => f.write_str("there is no memslot with this number"),
            Self::OutOfMemory => OutOfMemory.fmt(f),
            Self::OtherMachine => OtherMachine.fmt(f),
            Self::Tree(error) => write!(f, "the tree of the deleted memslot: {error}"),
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
#[derive(Debug)]
pub(crate) struct Version {
    /// Different for every version of every slot of a VM.
    pub(crate) number: u64,
    pub(crate) id: SlotId,
    pub(crate) range: GpaRange,
    pub(crate) hva: Hva,
    pub(crate) read_only: bool,
    pub(crate) max_page_size: u64,
    pub(crate) log: Option<Log>,
}

impl Version {
    /// What the fault path takes along while it is not pinned.
    pub(crate) fn facts(&self) -> Facts {
        Facts {
            version: self.number,
            id: self.id,
            range: self.range,
            hva: self.hva,
            read_only: self.read_only,
            max_page_size: self.max_page_size,
            logged: self.log.is_some() && !self.read_only,
        }
    }
}

/// A version's contents, copied out of a pin. Valid if the version is still there in the pin in which they are used.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Facts {
    pub(crate) version: u64,
    pub(crate) id: SlotId,
    pub(crate) range: GpaRange,
    pub(crate) hva: Hva,
    pub(crate) read_only: bool,
    pub(crate) max_page_size: u64,
    /// Whether writes must be noticed: a log is on. A read-only slot is never logged.
    pub(crate) logged: bool,
}

impl Facts {
    /// The host address behind `gpa`, which lies in the slot.
    pub(crate) fn hva_of(&self, gpa: Gpa) -> Hva {
        Hva(self.hva.0 + (gpa.0 - self.range.start().0))
    }
}
