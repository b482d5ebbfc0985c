//! System registers, read and written by name.
#![expect(unsafe_code, reason = "the instructions that read and write them")]

/// Reads a register.
macro_rules! read {
    ($register:literal) => {{
        let value: u64;
        // SAFETY: reading a register changes no memory, and what it changes besides is none of the compiler's business.
        unsafe {
            core::arch::asm!(concat!("mrs {}, ", $register), out(reg) value, options(nomem, nostack, preserves_flags));
        }
        value
    }};
}

/// Writes a register. What it means for translation or interrupts is on the caller, who says so.
macro_rules! write {
    ($register:literal, $value:expr) => {{
        let value: u64 = $value;
        // SAFETY: the registers written here are about guests, timers and interrupts; none moves the hypervisor's own
        // memory.
        unsafe {
            core::arch::asm!(concat!("msr ", $register, ", {}"), in(reg) value, options(nostack, preserves_flags));
        }
    }};
}

/// Reads a register by the pieces of its number.
macro_rules! read_by_number {
    ($($piece:literal),+) => {{
        let value: u64;
        // SAFETY: as in `read`.
        unsafe {
            core::arch::asm!(concat!("mrs {}, ", $($piece),+), out(reg) value, options(nomem, nostack, preserves_flags));
        }
        value
    }};
}

/// A context synchronisation.
#[inline(always)]
pub(super) fn isb() {
    // SAFETY: a barrier.
    unsafe { core::arch::asm!("isb", options(nostack, preserves_flags)) }
}

pub(super) use {read, read_by_number, write};
