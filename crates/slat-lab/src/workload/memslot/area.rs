//! Which tests there are, and what memory and slots each has.

use std::ops::Range;

use serde::{Serialize, Serializer};
use slat::Gpa;
use slat_vm::{Hva, SlotConfig};

/// Where the memory of a test begins.
pub(super) const GPA: u64 = 256 << 20;
/// Bytes before the area that guests use, so that slots and area are not aligned with each other.
pub(super) const EXTRA: u64 = 64 << 10;
/// Bytes that guests of the move tests write to.
pub(super) const MOVED: u64 = 3 * (64 << 10);
/// Bytes that `unmap chunked` unmaps at once.
pub(super) const CHUNK: u64 = 2 << 20;

/// One of the kernel's tests. Its number there is its place here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Test {
    Map,
    Unmap,
    UnmapChunked,
    MoveActive,
    MoveInactive,
    ReadWrite,
}

impl Test {
    pub(super) const ALL: [Self; 6] = [
        Self::Map,
        Self::Unmap,
        Self::UnmapChunked,
        Self::MoveActive,
        Self::MoveInactive,
        Self::ReadWrite,
    ];

    /// The kernel's name for it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Map => "map",
            Self::Unmap => "unmap",
            Self::UnmapChunked => "unmap chunked",
            Self::MoveActive => "move active area",
            Self::MoveInactive => "move inactive area",
            Self::ReadWrite => "RW",
        }
    }

    /// The phase in which its slots are created.
    pub(super) fn setup(self) -> &'static str {
        match self {
            Self::Map => "map setup",
            Self::Unmap => "unmap setup",
            Self::UnmapChunked => "unmap chunked setup",
            Self::MoveActive => "move active area setup",
            Self::MoveInactive => "move inactive area setup",
            Self::ReadWrite => "RW setup",
        }
    }

    /// Bytes of its area, where that of the whole is `whole`.
    pub(super) fn area(self, whole: u64) -> u64 {
        match self {
            Self::Map => whole / 16,
            Self::Unmap | Self::UnmapChunked => whole / 4,
            Self::MoveActive | Self::MoveInactive | Self::ReadWrite => whole,
        }
    }

    /// Whether it has the whole memory, so that its slots took as long to create as those of others of which that is
    /// true.
    pub(super) fn is_whole(self) -> bool {
        matches!(self, Self::MoveActive | Self::MoveInactive | Self::ReadWrite)
    }
}

impl Serialize for Test {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// The memory of one test, divided into slots of one size; the last one has the rest too.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slots {
    /// Bytes of a page of guest and host.
    pub(super) page: u64,
    /// All pages.
    pub(super) pages: u64,
    pub(super) count: u64,
}

/// Why a test does not run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub(super) enum Misfit {
    /// `most` counts the slot of the guest's code too.
    #[error("more slots than pages; -s {most} is possible")]
    Pages { most: u64 },
    #[error("the last slot is smaller than what guests use of it; give a smaller -s")]
    Last,
    #[error("the slots before the last are smaller than what guests use of them; give a larger -s")]
    BeforeLast,
}

impl Slots {
    /// `count` slots for a test whose area has `area` bytes.
    pub(super) fn new(test: Test, area: u64, page: u64, count: u64) -> Result<Self, Misfit> {
        let pages = (EXTRA + area) / page;
        if count > pages {
            return Err(Misfit::Pages { most: pages + 1 });
        }
        let slots = Self { page, pages, count };
        let last = slots.pages_of(slots.last());
        let (before, inside) = match test {
            Test::MoveActive => (MOVED / 2, MOVED / 2),
            Test::MoveInactive => (MOVED, 0),
            _ => (0, 0),
        };
        if (last.end - last.start) * page < inside {
            return Err(Misfit::Last);
        }
        if last.start * page < before {
            return Err(Misfit::BeforeLast);
        }
        Ok(slots)
    }

    pub(super) fn pages_per_slot(&self) -> u64 {
        self.pages / self.count
    }

    /// The number of the last slot; numbers begin at 1, as in the kernel's test.
    pub(super) fn last(&self) -> u32 {
        self.count as u32
    }

    /// Its pages, from the start of the memory.
    pub(super) fn pages_of(&self, id: u32) -> Range<u64> {
        let first = u64::from(id - 1) * self.pages_per_slot();
        let end = if id == self.last() { self.pages } else { first + self.pages_per_slot() };
        first..end
    }

    pub(super) fn gpa(&self, page: u64) -> u64 {
        GPA + page * self.page
    }

    /// A slot in its place.
    pub(super) fn config(&self, id: u32) -> SlotConfig {
        let pages = self.pages_of(id);
        let size = (pages.end - pages.start) * self.page;
        SlotConfig::new(Gpa(self.gpa(pages.start)), size, Hva(pages.start * self.page))
    }

    /// The address behind all of it, where a slot can be moved.
    pub(super) fn beyond(&self) -> u64 {
        self.gpa(self.pages)
    }

    /// The first page of the area that guests use.
    pub(super) fn area(&self) -> u64 {
        EXTRA / self.page
    }

    /// That area in two halves.
    pub(super) fn halves(&self) -> [Range<u64>; 2] {
        let (start, end) = (self.area(), self.pages);
        let middle = start + (end - start) / 2;
        [start..middle, middle..end]
    }

    /// Where guests of the move tests write: half of it in the slot that is moved, or all just below.
    pub(super) fn moved(&self, active: bool) -> Range<u64> {
        let first = self.pages_of(self.last()).start;
        let pages = MOVED / self.page;
        let start = first - if active { pages / 2 } else { pages };
        start..start + pages
    }

    /// A range of pages, divided where slots meet.
    pub(super) fn pieces(&self, pages: Range<u64>) -> impl Iterator<Item = Range<u64>> + use<> {
        let slots = *self;
        let mut rest = pages;
        std::iter::from_fn(move || {
            let id = (rest.start / slots.pages_per_slot()).min(slots.count - 1) + 1;
            let end = slots.pages_of(id as u32).end.min(rest.end);
            let piece = (!rest.is_empty()).then_some(rest.start..end);
            rest.start = end;
            piece
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slots(test: Test, count: u64) -> Result<Slots, Misfit> {
        Slots::new(test, test.area(512 << 20), 4096, count)
    }

    #[test]
    fn the_last_slot_has_the_rest() {
        let slots = slots(Test::ReadWrite, 32763).unwrap();
        assert_eq!((slots.pages, slots.pages_per_slot()), (131_088, 4));
        assert_eq!(slots.pages_of(1), 0..4);
        assert_eq!(slots.pages_of(slots.last()), 131_048..131_088);
    }

    #[test]
    fn pieces_are_cut_where_slots_meet() {
        let slots = Slots { page: 4096, pages: 11, count: 3 };
        let pieces = |pages| slots.pieces(pages).collect::<Vec<_>>();
        assert_eq!(pieces(1..11), [1..3, 3..6, 6..11]);
        assert_eq!(pieces(7..9), vec![7..9]);
        assert!(pieces(4..4).is_empty());
    }

    #[test]
    fn more_slots_than_pages_are_refused_with_what_is_possible() {
        assert_eq!(slots(Test::Map, 32763).unwrap_err(), Misfit::Pages { most: 8209 });
        assert!(slots(Test::Map, 8208).is_ok());
    }

    #[test]
    fn the_active_area_lies_half_in_the_slot_that_moves() {
        let slots = slots(Test::MoveActive, 100).unwrap();
        let first = slots.pages_of(slots.last()).start;
        assert_eq!(slots.moved(true), first - 24..first + 24);
        assert_eq!(slots.moved(false), first - 48..first);
        let small = |count| Slots::new(Test::MoveActive, 16 << 20, 4096, count).unwrap_err();
        assert_eq!((small(2056), small(1)), (Misfit::Last, Misfit::BeforeLast));
    }
}
