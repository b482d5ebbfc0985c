//! Which memory is meant: guest-physical and host-physical addresses, and ranges of the former.

use core::fmt;

/// A guest-physical address in bytes (Arm: intermediate physical address, IPA).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[repr(transparent)]
pub struct Gpa(pub u64);

/// A host-physical address in bytes, as the table walker of the hardware sees it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[repr(transparent)]
pub struct Hpa(pub u64);

impl fmt::Debug for Gpa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gpa({:#x})", self.0)
    }
}

impl fmt::Display for Gpa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl fmt::Debug for Hpa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Hpa({:#x})", self.0)
    }
}

impl fmt::Display for Hpa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// A half-open range of guest-physical addresses, `start..end` in bytes, never empty and never wrapping.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct GpaRange {
    start: Gpa,
    end: Gpa,
}

impl GpaRange {
    /// The `size` bytes from `start`; `None` if `size` is zero or the range would wrap.
    pub const fn new(start: Gpa, size: u64) -> Option<Self> {
        match start.0.checked_add(size) {
            Some(end) if size != 0 => Some(Self { start, end: Gpa(end) }),
            _ => None,
        }
    }

    /// The first address.
    pub const fn start(&self) -> Gpa {
        self.start
    }

    /// The address after the last.
    pub const fn end(&self) -> Gpa {
        self.end
    }

    /// Length in bytes, never zero.
    pub const fn size(&self) -> u64 {
        self.end.0 - self.start.0
    }

    /// Whether `gpa` lies inside.
    pub const fn contains(&self, gpa: Gpa) -> bool {
        self.start.0 <= gpa.0 && gpa.0 < self.end.0
    }

    /// Whether the two ranges share an address.
    pub const fn overlaps(&self, other: &Self) -> bool {
        self.start.0 < other.end.0 && other.start.0 < self.end.0
    }
}
