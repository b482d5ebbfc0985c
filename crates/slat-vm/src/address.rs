//! Which memory of the host is meant: addresses as the host's program that runs the guest sees them.

use core::fmt;

/// A host-virtual address, or an offset into the memory that the host sets aside for guests, in bytes: whatever
/// [`Host::page`](crate::Host::page) understands.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[repr(transparent)]
pub struct Hva(pub u64);

impl fmt::Debug for Hva {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Hva({:#x})", self.0)
    }
}

impl fmt::Display for Hva {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// A half-open range of host addresses, `start..end` in bytes, never empty and never wrapping.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct HvaRange {
    start: Hva,
    end: Hva,
}

impl HvaRange {
    /// The `size` bytes from `start`; `None` if `size` is zero or the range would wrap.
    pub const fn new(start: Hva, size: u64) -> Option<Self> {
        match start.0.checked_add(size) {
            Some(end) if size != 0 => Some(Self { start, end: Hva(end) }),
            _ => None,
        }
    }

    /// The first address.
    pub const fn start(&self) -> Hva {
        self.start
    }

    /// The address after the last.
    pub const fn end(&self) -> Hva {
        self.end
    }

    /// Length in bytes, never zero.
    pub const fn size(&self) -> u64 {
        self.end.0 - self.start.0
    }
}
