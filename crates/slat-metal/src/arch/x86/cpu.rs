//! What each CPU keeps for itself, found through `gs`.
#![expect(
    unsafe_code,
    reason = "per-CPU data through a segment register, and pages that hardware writes"
)]

use core::arch::asm;
use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicBool, Ordering};

use super::registers::{EFER, GS_BASE, VM_CR, VM_HSAVE_PA, read, write};
use crate::arch::MAX_CPUS;

const SVM_ENABLED: u64 = 1 << 12;
const SVM_DISABLED: u64 = 1 << 4;

#[repr(C, align(64))]
struct Cpu {
    number: usize,
    /// Translations of guests have to go before the next guest runs here.
    flush: AtomicBool,
}

static CPUS: [Cpu; MAX_CPUS] = {
    let mut cpus = [const { Cpu { number: 0, flush: AtomicBool::new(false) } }; MAX_CPUS];
    let mut number = 0;
    while number < MAX_CPUS {
        cpus[number].number = number;
        number += 1;
    }
    cpus
};

/// Hardware's pages for the hypervisor's own state: those of `vmrun`, and those of `vmsave`.
#[repr(C, align(4096))]
struct Page(UnsafeCell<[u8; 4096]>);

// SAFETY: the program never looks into it.
unsafe impl Sync for Page {}

static SAVED_BY_VMRUN: [Page; MAX_CPUS] = [const { Page(UnsafeCell::new([0; 4096])) }; MAX_CPUS];
static SAVED_BY_VMSAVE: [Page; MAX_CPUS] = [const { Page(UnsafeCell::new([0; 4096])) }; MAX_CPUS];

/// Says which CPU this is, before anything else asks.
pub(super) fn init(number: usize) {
    // SAFETY: nothing else uses `gs`.
    unsafe { write(GS_BASE, &raw const CPUS[number] as u64) }
}

#[inline(always)]
pub(super) fn number() -> usize {
    let number;
    // SAFETY: `gs` begins at this CPU's element, and its number first; it never changes.
    unsafe {
        asm!("mov {}, gs:[0]", out(reg) number, options(pure, readonly, nostack, preserves_flags));
    }
    number
}

/// Notes that a guest's translations have to go from this CPU.
pub(super) fn flush_later() {
    CPUS[number()].flush.store(true, Ordering::Relaxed);
}

/// Whether they have to go now.
#[inline(always)]
pub(super) fn take_flush() -> bool {
    let flush = &CPUS[number()].flush;
    let asked = flush.load(Ordering::Relaxed);
    if asked {
        flush.store(false, Ordering::Relaxed);
    }
    asked
}

/// Where this CPU keeps the state that `vmload` brings back.
#[inline(always)]
pub(super) fn own_state() -> u64 {
    SAVED_BY_VMSAVE[number()].0.get() as u64
}

/// Makes this CPU able to run guests.
pub(super) fn enable_guests() -> Result<(), &'static str> {
    if read(VM_CR) & SVM_DISABLED != 0 {
        return Err("the firmware has disabled SVM");
    }
    // SAFETY: the page is this CPU's, for as long as it runs guests; EFER keeps the rest. `vmsave` writes the page only.
    unsafe {
        write(EFER, read(EFER) | SVM_ENABLED);
        write(VM_HSAVE_PA, SAVED_BY_VMRUN[number()].0.get() as u64);
        asm!("vmsave rax", in("rax") own_state(), options(nostack, preserves_flags));
    }
    Ok(())
}
