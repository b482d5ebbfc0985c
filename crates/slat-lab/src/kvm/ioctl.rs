//! Calls that `kvm-ioctls` has not, as thin as they can be.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use kvm_bindings::{KVMIO, kvm_clear_dirty_log, kvm_dirty_log, kvm_pre_fault_memory};
use kvm_ioctls::{VcpuFd, VmFd};
use vmm_sys_util::ioctl::{ioctl, ioctl_with_mut_ref, ioctl_with_ref};
use vmm_sys_util::{ioctl_io_nr, ioctl_iow_nr, ioctl_iowr_nr};

ioctl_iow_nr!(KVM_GET_DIRTY_LOG, KVMIO, 0x42, kvm_dirty_log);
ioctl_iowr_nr!(KVM_CLEAR_DIRTY_LOG, KVMIO, 0xc0, kvm_clear_dirty_log);
ioctl_io_nr!(KVM_RESET_DIRTY_RINGS, KVMIO, 0xc7);
ioctl_io_nr!(KVM_GET_STATS_FD, KVMIO, 0xce);
ioctl_iowr_nr!(KVM_PRE_FAULT_MEMORY, KVMIO, 0xd5, kvm_pre_fault_memory);

fn done(result: i32) -> io::Result<i32> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Reads the bitmap of a slot of `pages` pages into `bitmap`; without manual protect the log is cleared with it.
#[expect(unsafe_code, reason = "the kernel writes into the bitmap")]
pub(crate) fn get_dirty_log(
    vm: &VmFd,
    slot: u32,
    pages: u64,
    bitmap: &mut [u64],
) -> io::Result<()> {
    assert!(bitmap.len() as u64 >= pages.div_ceil(64), "a bit for each page");
    let mut log = kvm_dirty_log { slot, ..Default::default() };
    log.__bindgen_anon_1.dirty_bitmap = bitmap.as_mut_ptr().cast();
    // SAFETY: the kernel writes a bit for each page of the slot, which the bitmap has room for.
    done(unsafe { ioctl_with_ref(vm, KVM_GET_DIRTY_LOG(), &log) }).map(drop)
}

/// Clears and protects, of `pages` pages from `first`, those whose bits are set.
#[expect(unsafe_code, reason = "the kernel reads the bitmap")]
pub(crate) fn clear_dirty_log(
    vm: &VmFd,
    slot: u32,
    (first, pages): (u64, u32),
    bitmap: &[u64],
) -> io::Result<()> {
    assert!(bitmap.len() as u64 >= u64::from(pages).div_ceil(64), "a bit for each page");
    let mut log =
        kvm_clear_dirty_log { slot, num_pages: pages, first_page: first, ..Default::default() };
    log.__bindgen_anon_1.dirty_bitmap = bitmap.as_ptr().cast_mut().cast();
    // SAFETY: the kernel reads a bit for each of `pages` pages.
    done(unsafe { ioctl_with_ref(vm, KVM_CLEAR_DIRTY_LOG(), &log) }).map(drop)
}

/// Protects the pages that were taken out of all vCPUs' rings; how many entries are free again.
#[expect(unsafe_code, reason = "an ioctl without arguments")]
pub(crate) fn reset_dirty_rings(vm: &VmFd) -> io::Result<u64> {
    // SAFETY: no memory of ours is involved but the rings, which stay mapped.
    done(unsafe { ioctl(vm, KVM_RESET_DIRTY_RINGS()) }).map(|reset| reset.unsigned_abs().into())
}

/// A descriptor from which statistics of a VM or a vCPU are read.
#[expect(unsafe_code, reason = "the kernel returns a descriptor")]
pub(crate) fn stats_fd(of: &impl AsRawFd) -> io::Result<OwnedFd> {
    // SAFETY: no memory of ours is involved.
    let fd = done(unsafe { ioctl(of, KVM_GET_STATS_FD()) })?;
    // SAFETY: the descriptor is new, and nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Maps memory ahead of any access. What is left of `range` is in it afterwards, also after an error.
#[expect(unsafe_code, reason = "the kernel writes into the range")]
pub(crate) fn pre_fault(vcpu: &VcpuFd, range: &mut kvm_pre_fault_memory) -> io::Result<()> {
    // SAFETY: the kernel reads and writes the structure and nothing else of ours.
    done(unsafe { ioctl_with_mut_ref(vcpu, KVM_PRE_FAULT_MEMORY(), range) }).map(drop)
}
