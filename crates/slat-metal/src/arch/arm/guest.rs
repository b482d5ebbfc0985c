//! A vCPU's registers, the way into its guest, and what hardware says when it comes out.
#![expect(unsafe_code, reason = "the switch to a guest is assembly")]

use core::arch::{asm, global_asm};
use core::sync::atomic::Ordering;

use slat::Gpa;
use slat_vm::{Access, Fault, FaultKind};

use super::registers::{isb, read, write};
use super::{RESIDENT, interrupts};
use crate::arch::{Left, Start};

global_asm!(include_str!("guest.s"));

unsafe extern "C" {
    /// See `guest.s`.
    fn enter_guest(registers: *mut Vcpu) -> u64;
}

/// What `enter_guest` returns for an interrupt: no syndrome has these bits.
const INTERRUPT: u64 = u64::MAX;
/// The class of the syndrome of an instruction that uses floating point.
const FLOATING_POINT: u64 = 0x07;
/// EL1 with its own stack pointer, all interrupts masked.
const EL1H: u64 = 0x3c5;

/// Registers of a vCPU while it is outside. `guest.s` knows the layout. All else that EL1 has stays where it is: a CPU runs
/// one vCPU only.
#[derive(Default)]
#[repr(C, align(16))]
pub(crate) struct Vcpu {
    pub(super) x: [u64; 31],
    pub(super) elr: u64,
    spsr: u64,
    fpcr: u64,
    fpsr: u64,
    /// Not zero: the next entry loads what follows.
    floating_point: u64,
    q: [u128; 32],
    stack: u64,
}

impl Vcpu {
    pub(super) fn new(start: &Start) -> Self {
        let mut vcpu =
            Self { elr: start.entry.0, spsr: EL1H, stack: start.stack.0, ..Self::default() };
        vcpu.x[0] = start.argument;
        vcpu
    }

    #[inline(always)]
    pub(super) fn enter(&mut self, root: u64) -> Left {
        if RESIDENT.load(Ordering::Relaxed) != root || self.stack != 0 {
            self.move_in(root);
        }
        left(self.run(), self.elr)
    }

    /// One that begins there, with this in its first register, on a CPU that is prepared for its guest.
    pub(super) fn at(entry: u64, argument: u64) -> Self {
        let mut vcpu = Self { elr: entry, spsr: EL1H, ..Self::default() };
        vcpu.x[0] = argument;
        vcpu
    }

    /// Runs the guest of this CPU's `VTTBR_EL2` until it leaves: what `enter_guest` returns.
    #[inline(always)]
    pub(super) fn run(&mut self) -> u64 {
        loop {
            // SAFETY: the layout is what `guest.s` expects; it keeps the registers that a call keeps. The guest writes
            // to memory of its own only: what stage 2 maps.
            let syndrome = unsafe { enter_guest(self) };
            if syndrome >> 26 & 0x3f != FLOATING_POINT {
                return syndrome;
            }
            self.floating_point = 1;
        }
    }

    /// Before the first entry.
    #[cold]
    fn move_in(&mut self, root: u64) {
        RESIDENT.store(root, Ordering::Relaxed);
        write!("VTTBR_EL2", root);
        write!("SP_EL1", self.stack);
        self.stack = 0;
        isb();
    }
}

/// What the syndrome says (Arm ARM, D24.2 "ESR_EL2").
#[inline(always)]
fn left(syndrome: u64, at: u64) -> Left {
    const HVC: u64 = 0x16;
    const INSTRUCTION_ABORT: u64 = 0x20;
    const DATA_ABORT: u64 = 0x24;
    let class = syndrome >> 26 & 0x3f;
    match class {
        _ if syndrome == INTERRUPT => {
            interrupts::take();
            Left::Interrupt
        }
        HVC => Left::Call,
        INSTRUCTION_ABORT | DATA_ABORT => match kind(syndrome) {
            Some(kind) => fault(syndrome, kind, class == INSTRUCTION_ABORT),
            None => Left::Other { reason: syndrome, at },
        },
        _ => Left::Other { reason: syndrome, at },
    }
}

/// Why an access was stopped; `None` for reasons that no hypervisor mends.
#[inline(always)]
pub(super) fn kind(syndrome: u64) -> Option<FaultKind> {
    match syndrome >> 2 & 0xf {
        0b0001 => Some(FaultKind::Translation),
        0b0010 => Some(FaultKind::AccessFlag),
        0b0011 => Some(FaultKind::Permission),
        _ => None,
    }
}

#[inline(always)]
pub(super) fn fault(syndrome: u64, kind: FaultKind, fetch: bool) -> Left {
    // Of the guest's own walk: it reads, or updates a descriptor that it may not write.
    let walk = syndrome >> 7 & 1 == 1;
    let maintenance = syndrome >> 8 & 1 == 1;
    let writes = syndrome >> 6 & 1 == 1;
    let access = match () {
        () if walk && kind == FaultKind::Permission => Access::Write,
        () if walk => Access::Read,
        () if fetch => Access::Execute,
        // Maintenance of caches writes nothing, but some of it needs the permission.
        () if writes && (!maintenance || kind == FaultKind::Permission) => Access::Write,
        () => Access::Read,
    };
    let reports = kind != FaultKind::Permission || walk;
    // Without a page, another vCPU has changed the guest's own translation meanwhile: the guest does it again.
    let Some(page) = (if reports { Some(reported()) } else { translate() }) else {
        return Left::Interrupt;
    };
    let offset = if walk { 0 } else { read!("FAR_EL2") & 0xfff };
    Left::Fault(Fault { gpa: Gpa(page | offset), access, kind })
}

/// The page that hardware reports: not valid after permission faults, except those of the guest's walk.
#[inline(always)]
fn reported() -> u64 {
    (read!("HPFAR_EL2") & 0xfff_ffff_fff0) << 8
}

/// The page, by the guest's own translation.
#[inline(always)]
fn translate() -> Option<u64> {
    let (saved, address) = (read!("PAR_EL1"), read!("FAR_EL2"));
    // SAFETY: a translation without an access.
    unsafe { asm!("at s1e1r, {}", "isb", in(reg) address, options(nostack, preserves_flags)) }
    let found = read!("PAR_EL1");
    write!("PAR_EL1", saved);
    (found & 1 == 0).then_some(found & 0xf_ffff_ffff_f000)
}
