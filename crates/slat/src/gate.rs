//! Entering the guest: who must be asked, and who is asked at his next entry (rule 11).

use crate::sync::AtomicU64;

/// The gate of one vCPU.
#[derive(Debug, Default)]
pub struct Gate {
    _state: AtomicU64,
}

impl Gate {
    /// A gate in front of which its vCPU stands.
    #[cfg(not(loom))]
    pub const fn new() -> Self {
        Self { _state: AtomicU64::new(0) }
    }

    /// A gate in front of which its vCPU stands.
    #[cfg(loom)]
    pub fn new() -> Self {
        Self { _state: AtomicU64::new(0) }
    }
}
