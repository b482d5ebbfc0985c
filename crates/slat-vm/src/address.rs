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
