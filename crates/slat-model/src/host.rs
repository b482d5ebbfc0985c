//! What the host gives a guest: memory whose pages have a size and a host-physical address, as an operating system
//! would answer.

use std::sync::atomic::AtomicU64;
use std::{fmt, io};

use slat::Hpa;

use crate::mapping::{Below, Mapping};

/// log2 of the base pages that are permuted among themselves.
const GROUP_BITS: u32 = 9;
const GROUP_MASK: u64 = (1 << GROUP_BITS) - 1;
/// Odd, so multiplication modulo the group permutes it; far from one, so neighbours part.
const SCATTER: u64 = 205;
/// The inverse of `SCATTER` modulo the group.
const GATHER: u64 = 5;

/// What kind of pages backs a host memory.
///
/// A base page is one granule of the model's tables. Addresses of base pages are scattered: neighbours in the memory
/// are not neighbours in host-physical space.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Backing {
    /// Private anonymous memory in base pages.
    Anonymous,
    /// Private anonymous memory in transparent huge pages: one for each aligned extent that lies wholly inside, base
    /// pages for the rest. An extent is what one entry above the last level covers: 2 MiB with 4 KiB base pages.
    AnonymousThp,
    /// Private memory in huge pages of one size (hugetlb), a power of two and a multiple of the base page.
    AnonymousHugetlb {
        /// Bytes of a page.
        page_size: u64,
    },
    /// Shared memory (shmem) in base pages.
    Shmem,
    /// Shared memory in huge pages of one size (hugetlb).
    SharedHugetlb {
        /// Bytes of a page.
        page_size: u64,
    },
}

/// The page that backs a byte of host memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct HostPage {
    /// The host-physical address of the byte that was asked for. The page begins at the next multiple of `size` below.
    pub hpa: Hpa,
    /// Bytes of the page, a power of two. Byte `n` of the page lies at byte `n` of its physical page.
    pub size: u64,
}

/// Why host memory cannot be had.
#[derive(Debug)]
pub enum HostMemoryError {
    /// More than this machine has available, or than the limit that was set.
    NotEnough {
        /// Bytes asked for, together with what the model already has.
        wanted: u64,
        /// Bytes available or allowed.
        available: u64,
    },
    /// The size is zero or not a multiple of the backing's page size.
    Size {
        /// Bytes asked for.
        size: u64,
        /// Bytes of a page.
        page_size: u64,
    },
    /// The page size is not a power of two, or smaller than a base page.
    PageSize(u64),
    /// The model's host-physical address space is full.
    AddressSpace,
    /// The operating system refused.
    System(io::Error),
}

impl fmt::Display for HostMemoryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotEnough { wanted, available } => write!(
                f,
                "{} MiB of guest memory are more than the machine has: {} MiB are available; \
                 ask for less, or set a limit if most of it will never be touched",
                wanted >> 20,
                available >> 20
            ),
            Self::Size { size, page_size } => {
                write!(f, "{size} bytes are not a whole number of pages of {page_size} bytes")
            }
            Self::PageSize(size) => {
                write!(f, "{size} bytes are no page size: a power of two from a base page up is")
            }
            Self::AddressSpace => f.write_str("the host-physical address space is full"),
            Self::System(error) => write!(f, "the operating system gave no memory: {error}"),
        }
    }
}

impl std::error::Error for HostMemoryError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::System(error) => Some(error),
            _ => None,
        }
    }
}

impl From<io::Error> for HostMemoryError {
    fn from(error: io::Error) -> Self {
        Self::System(error)
    }
}

/// Memory that the host gives to guests. Offsets count bytes as the host's user sees them; what backs an offset is
/// what [`page`](Self::page) says.
#[derive(Debug)]
pub struct HostMemory {
    mapping: Mapping,
    first: Hpa,
    size: u64,
    span: u64,
    base_shift: u32,
    backing: Backing,
    page_size: u64,
    /// Below, whole pages of `page_size` are congruent; from here on, base pages are scattered.
    huge_end: u64,
}

/// How a memory is laid out in host-physical space.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    pub(crate) span: u64,
    pub(crate) align: u64,
}

impl Backing {
    /// The page size of aligned parts, given log2 of a base page.
    pub(crate) fn page_size(self, base_shift: u32) -> u64 {
        match self {
            Self::Anonymous | Self::Shmem => 1 << base_shift,
            Self::AnonymousThp => 1 << (2 * base_shift - 3),
            Self::AnonymousHugetlb { page_size } | Self::SharedHugetlb { page_size } => page_size,
        }
    }

    /// Whether other processes see the memory too.
    pub const fn is_shared(self) -> bool {
        matches!(self, Self::Shmem | Self::SharedHugetlb { .. })
    }

    /// The physical space for `size` bytes.
    pub(crate) fn extent(self, size: u64, base_shift: u32) -> Result<Extent, HostMemoryError> {
        let base = 1 << base_shift;
        let page_size = self.page_size(base_shift);
        if !page_size.is_power_of_two() || page_size < base || page_size > 1 << 40 {
            return Err(HostMemoryError::PageSize(page_size));
        }
        let multiple = if self == Self::AnonymousThp { base } else { page_size };
        if size == 0 || !size.is_multiple_of(multiple) {
            return Err(HostMemoryError::Size { size, page_size: multiple });
        }
        let group = base << GROUP_BITS;
        let unit = page_size.max(group);
        let span = size.checked_next_multiple_of(unit).ok_or(HostMemoryError::AddressSpace)?;
        Ok(Extent { span, align: unit.max(1 << 30) })
    }
}

impl HostMemory {
    /// Maps `size` bytes whose physical addresses begin at `first`.
    pub(crate) fn new(
        backing: Backing,
        size: u64,
        base_shift: u32,
        first: Hpa,
    ) -> Result<Self, HostMemoryError> {
        let extent = backing.extent(size, base_shift)?;
        let page_size = backing.page_size(base_shift);
        let huge_end = if page_size > 1 << base_shift { size & !(page_size - 1) } else { 0 };
        let below = if page_size >= 1 << 21 { Below::Huge } else { Below::Small };
        // Real huge pages need no more than 2 MiB of alignment.
        let mapping = Mapping::new(extent.span, 1 << 21, below)?;
        let span = extent.span;
        Ok(Self { mapping, first, size, span, base_shift, backing, page_size, huge_end })
    }

    /// Bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// What kind of pages it has.
    pub fn backing(&self) -> Backing {
        self.backing
    }

    /// The first host-physical address that belongs to it.
    pub(crate) fn first(&self) -> Hpa {
        self.first
    }

    /// Bytes of host-physical space that belong to it.
    pub(crate) fn span(&self) -> u64 {
        self.span
    }

    /// Which page backs the byte at `offset`; `None` beyond the end. Always the same answer; costs a few operations.
    pub fn page(&self, offset: u64) -> Option<HostPage> {
        if offset >= self.size {
            return None;
        }
        if offset < self.huge_end {
            return Some(HostPage { hpa: Hpa(self.first.0 + offset), size: self.page_size });
        }
        let frame = offset >> self.base_shift;
        let group = frame & !GROUP_MASK;
        let scattered =
            group | (frame.wrapping_mul(SCATTER).wrapping_add(turn(group)) & GROUP_MASK);
        let inside = offset & ((1 << self.base_shift) - 1);
        let hpa = Hpa(self.first.0 + (scattered << self.base_shift) + inside);
        Some(HostPage { hpa, size: 1 << self.base_shift })
    }

    /// The offset that `hpa` backs; `None` if it backs none.
    pub fn offset_of(&self, hpa: Hpa) -> Option<u64> {
        let place = hpa.0.checked_sub(self.first.0).filter(|&place| place < self.span)?;
        if place < self.huge_end {
            return Some(place);
        }
        let frame = place >> self.base_shift;
        let group = frame & !GROUP_MASK;
        let gathered = group | (frame.wrapping_sub(turn(group)).wrapping_mul(GATHER) & GROUP_MASK);
        let offset = (gathered << self.base_shift) | (place & ((1 << self.base_shift) - 1));
        (self.huge_end <= offset && offset < self.size).then_some(offset)
    }

    /// The word at `offset` (rounded down to a multiple of 8) as the host reads and writes it, past every guest
    /// translation; `None` beyond the end.
    pub fn word(&self, offset: u64) -> Option<&AtomicU64> {
        self.mapping.word(self.page(offset)?.hpa.0 - self.first.0)
    }

    /// The word at a distance from [`first`](Self::first).
    #[inline(always)]
    pub(crate) fn word_at(&self, place: u64) -> Option<&AtomicU64> {
        self.mapping.word(place)
    }
}

/// How far the scattered frames of a group are turned, so that groups differ.
fn turn(group: u64) -> u64 {
    (group >> GROUP_BITS).wrapping_mul(37).wrapping_add(11)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    const FIRST: Hpa = Hpa(4 << 30);

    #[test]
    fn base_pages_are_scattered_and_each_is_given_once() {
        for backing in [Backing::Anonymous, Backing::Shmem] {
            let memory = HostMemory::new(backing, 5 << 20, 12, FIRST).unwrap();
            let mut seen = HashSet::new();
            let mut before = None;
            for offset in (0..5 << 20).step_by(4096) {
                let page = memory.page(offset).unwrap();
                assert_eq!(page.size, 4096);
                assert!(seen.insert(page.hpa));
                assert_ne!(before, Some(page.hpa.0.wrapping_sub(4096)));
                assert_eq!(memory.offset_of(Hpa(page.hpa.0 + 8)), Some(offset + 8));
                before = Some(page.hpa.0);
            }
            assert_eq!(memory.page(5 << 20), None);
        }
    }

    #[test]
    fn huge_pages_are_congruent_with_their_offset() {
        for (size, shift) in [(2 << 20, 12), (1 << 30, 12), (32 << 20, 14), (64 << 10, 12)] {
            let backing = Backing::AnonymousHugetlb { page_size: size };
            let memory = HostMemory::new(backing, 2 * size, shift, FIRST).unwrap();
            for offset in [0, 4096, size - 8, size, 2 * size - 1] {
                let page = memory.page(offset).unwrap();
                assert_eq!((page.size, page.hpa.0 % size), (size, offset % size));
                assert_eq!(memory.offset_of(page.hpa), Some(offset));
            }
        }
    }

    #[test]
    fn transparent_huge_pages_end_with_the_last_whole_extent() {
        let memory = HostMemory::new(Backing::AnonymousThp, (6 << 20) - 4096, 12, FIRST).unwrap();
        assert_eq!(memory.page((4 << 20) - 1).unwrap().size, 2 << 20);
        assert_eq!(memory.page(4 << 20).unwrap().size, 4096);
        let tail: HashSet<_> = ((4 << 20)..(6 << 20) - 4096)
            .step_by(4096)
            .map(|offset| memory.page(offset).unwrap().hpa)
            .collect();
        assert_eq!(tail.len(), 511);
        assert!(tail.iter().all(|hpa| hpa.0 >= FIRST.0 + (4 << 20)));
    }

    #[test]
    fn sizes_that_the_backing_does_not_have_are_refused() {
        let refused = |backing, size| HostMemory::new(backing, size, 14, FIRST).is_err();
        assert!(refused(Backing::Anonymous, 4096));
        assert!(refused(Backing::Anonymous, 0));
        assert!(refused(Backing::AnonymousHugetlb { page_size: 2 << 20 }, 3 << 20));
        assert!(refused(Backing::AnonymousHugetlb { page_size: 3 << 20 }, 3 << 20));
        assert!(refused(Backing::SharedHugetlb { page_size: 4096 }, 1 << 20));
    }
}
