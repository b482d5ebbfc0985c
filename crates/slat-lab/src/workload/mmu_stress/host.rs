//! Host memory whose protection changes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use slat_model::HostMemory;
use slat_vm::{Access, Host, HostError, HostPage, Hva};

use crate::model;

/// What may be done with host memory at the moment. Changes are announced to the VM as its invalidations.
#[derive(Debug)]
pub(super) struct Protected {
    writable: AtomicBool,
    /// Where mapped memory begins.
    mapped: AtomicU64,
}

impl Protected {
    /// Everything is mapped and writable.
    pub(super) fn new() -> Self {
        Self { writable: AtomicBool::new(true), mapped: AtomicU64::new(0) }
    }

    pub(super) fn set_writable(&self, writable: bool) {
        self.writable.store(writable, Ordering::Release);
    }

    /// Unmaps what lies below `end`, a multiple of the backing's page size.
    pub(super) fn unmap_below(&self, end: u64) {
        self.mapped.store(end, Ordering::Release);
    }
}

/// Host memory under that protection.
#[derive(Debug)]
pub(super) struct ProtectedMemory {
    memory: Arc<HostMemory>,
    protected: Arc<Protected>,
}

impl ProtectedMemory {
    pub(super) fn new(memory: Arc<HostMemory>, protected: Arc<Protected>) -> Self {
        Self { memory, protected }
    }
}

impl Host for ProtectedMemory {
    fn page(&self, hva: Hva, access: Access) -> Result<HostPage, HostError> {
        if hva.0 < self.protected.mapped.load(Ordering::Acquire) {
            return Err(HostError::NotMapped);
        }
        let writable = self.protected.writable.load(Ordering::Acquire);
        if access == Access::Write && !writable {
            return Err(HostError::NotWritable);
        }
        Ok(HostPage { writable, ..model::page(&self.memory, hva)? })
    }
}
