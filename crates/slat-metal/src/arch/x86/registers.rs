//! Ports, model-specific registers and counters.
#![expect(unsafe_code, reason = "the instructions that read and write them")]

use core::arch::asm;
use core::arch::x86_64::_rdtsc;

/// Extended features: bit 12 lets the CPU run guests (SVME).
pub(super) const EFER: u32 = 0xc000_0080;
/// Where `gs` begins.
pub(super) const GS_BASE: u32 = 0xc000_0101;
/// Where `vmrun` keeps the hypervisor's state.
pub(super) const VM_HSAVE_PA: u32 = 0xc001_0117;
/// Bit 4: SVM is disabled, and cannot be enabled if bit 3 is set too.
pub(super) const VM_CR: u32 = 0xc001_0114;

pub(super) fn read(register: u32) -> u64 {
    let (low, high): (u32, u32);
    // SAFETY: the registers read here have no side effects.
    unsafe {
        asm!("rdmsr", in("ecx") register, out("eax") low, out("edx") high,
            options(nomem, nostack, preserves_flags));
    }
    u64::from(high) << 32 | u64::from(low)
}

/// # Safety
/// What the register means for memory, interrupts and guests is right for all that follows.
pub(super) unsafe fn write(register: u32, value: u64) {
    // SAFETY: the caller's promise.
    unsafe {
        asm!("wrmsr", in("ecx") register, in("eax") value as u32, in("edx") (value >> 32) as u32,
            options(nostack, preserves_flags));
    }
}

pub(super) fn write_port_8(port: u16, value: u8) {
    // SAFETY: devices behind the ports written here touch no memory.
    unsafe { asm!("out dx, al", in("dx") port, in("al") value, options(nostack, preserves_flags)) }
}

pub(super) fn write_port_16(port: u16, value: u16) {
    // SAFETY: devices behind the ports written here touch no memory.
    unsafe { asm!("out dx, ax", in("dx") port, in("ax") value, options(nostack, preserves_flags)) }
}

pub(super) fn read_port_8(port: u16) -> u8 {
    let value;
    // SAFETY: devices behind the ports read here touch no memory.
    unsafe { asm!("in al, dx", in("dx") port, out("al") value, options(nostack, preserves_flags)) }
    value
}

pub(super) fn read_port_32(port: u16) -> u32 {
    let value;
    // SAFETY: devices behind the ports read here touch no memory.
    unsafe {
        asm!("in eax, dx", in("dx") port, out("eax") value, options(nostack, preserves_flags))
    }
    value
}

/// The time-stamp counter.
#[inline(always)]
pub(super) fn time_stamp() -> u64 {
    // SAFETY: reads a counter.
    unsafe { _rdtsc() }
}
