//! A vCPU's dirty ring: which pages were written, in order.

use std::io;
use std::os::fd::AsRawFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use kvm_bindings::{KVM_DIRTY_LOG_PAGE_OFFSET, kvm_dirty_gfn};
use kvm_ioctls::{Kvm, VcpuFd};

use super::capability::{self, Capability};
use super::paging::PAGE;
use crate::failure::Failure;

/// States of an entry: KVM has filled it in; it was taken out.
const DIRTY: u32 = 1;
const TAKEN: u32 = 2;

/// An entry, as both sides see it.
#[derive(Debug)]
#[repr(C)]
struct Entry {
    state: AtomicU32,
    slot: AtomicU32,
    page: AtomicU64,
}

const _: () = assert!(size_of::<Entry>() == size_of::<kvm_dirty_gfn>());

/// The ring of one vCPU.
#[derive(Debug)]
pub(crate) struct Ring {
    first: NonNull<Entry>,
    entries: u32,
    /// The next one to take.
    next: u32,
}

// SAFETY: the mapping is this value's, and entries are atomics.
#[expect(unsafe_code, reason = "a raw pointer to a mapping")]
unsafe impl Send for Ring {}

impl Ring {
    /// Bytes of an entry.
    pub(crate) const ENTRY: u32 = size_of::<Entry>() as u32;

    /// The capability by which this host has rings.
    ///
    /// # Errors
    /// [`Failure::Missing`].
    pub(crate) fn capability(kvm: &Kvm) -> Result<Capability, Failure> {
        let with_barriers = capability::DIRTY_LOG_RING_ACQ_REL;
        if with_barriers.value(kvm) > 0 {
            return Ok(with_barriers);
        }
        capability::DIRTY_LOG_RING.require(kvm).map(|_| capability::DIRTY_LOG_RING)
    }

    /// The ring of a vCPU of a VM that has such rings.
    ///
    /// # Errors
    /// The kernel's.
    #[expect(unsafe_code, reason = "maps the ring")]
    pub(super) fn new(vcpu: &VcpuFd, entries: u32) -> io::Result<Self> {
        let length = entries as usize * size_of::<Entry>();
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let offset = i64::from(KVM_DIRTY_LOG_PAGE_OFFSET) * PAGE as i64;
        let fd = vcpu.as_raw_fd();
        // SAFETY: a new mapping at an address that the kernel chooses.
        let map =
            unsafe { libc::mmap(ptr::null_mut(), length, access, libc::MAP_SHARED, fd, offset) };
        if map == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let first = NonNull::new(map.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { first, entries, next: 0 })
    }

    /// Takes all entries out, each a memslot and a page of it; how many there were. Their pages can be written without
    /// a new entry until all rings of the VM are reset.
    #[expect(unsafe_code, reason = "entries that the kernel fills in")]
    pub(crate) fn harvest(&mut self, mut taken: impl FnMut(u32, u64)) -> u64 {
        let mut count = 0;
        loop {
            // SAFETY: the mapping has so many entries, and is there as long as `self`.
            let entry = unsafe { self.first.add((self.next % self.entries) as usize).as_ref() };
            // Acquire: slot and page were stored before.
            if entry.state.load(Ordering::Acquire) != DIRTY {
                return count;
            }
            taken(entry.slot.load(Ordering::Relaxed), entry.page.load(Ordering::Relaxed));
            // Release: KVM fills the entry in again after it was read.
            entry.state.store(TAKEN, Ordering::Release);
            self.next = self.next.wrapping_add(1);
            count += 1;
        }
    }
}

impl Drop for Ring {
    #[expect(unsafe_code, reason = "unmaps the ring")]
    fn drop(&mut self) {
        let length = self.entries as usize * size_of::<Entry>();
        // SAFETY: the mapping is this value's; nobody has a reference into it any more.
        unsafe { libc::munmap(self.first.as_ptr().cast(), length) };
    }
}
