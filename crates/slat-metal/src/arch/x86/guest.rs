//! A vCPU's registers, the way into its guest, and what hardware says when it comes out.
#![expect(unsafe_code, reason = "the switch to a guest is assembly")]

use alloc::boxed::Box;
use core::arch::global_asm;

use slat::Gpa;
use slat::maintenance::x86::Npt;
use slat_vm::{Access, Fault, FaultKind};

use super::control_block::ControlBlock;
use super::{cpu, features, guest_tables, interrupts};
use crate::arch::{Left, Start};
use crate::console;

global_asm!(include_str!("guest.s"));

unsafe extern "C" {
    /// See `guest.s`.
    fn enter_guest(registers: *mut Registers, block: *mut ControlBlock, own_state: u64);
}

/// Index of `rdi`, the first argument of a function.
const RDI: usize = 4;

/// What the control block does not hold. `guest.s` knows the layout.
#[repr(C, align(16))]
struct Registers {
    general: [u64; 14],
    /// What `fxsave` writes. Guests cannot enable more of the FPU than that.
    floating: [u32; 128],
}

/// A vCPU while it is outside.
pub(crate) struct Vcpu {
    /// Where it lies is its physical address, too.
    block: Box<ControlBlock>,
    registers: Registers,
    /// What makes `vmrun` flush: one ASID, or everything, where the CPU can do no less.
    flush: u32,
    /// Where the guest's own tables begin, which it never changes.
    tables: u64,
}

impl Vcpu {
    pub(super) fn new(start: &Start) -> Self {
        const FLUSH_ALL: u32 = 1;
        const FLUSH_ASID: u32 = 3;
        guest_tables::write(start.scratch);
        let mut registers = Registers { general: [0; 14], floating: [0; 128] };
        registers.general[RDI] = start.argument;
        // The control words after `fninit` and a reset.
        registers.floating[0] = 0x37f;
        registers.floating[6] = 0x1f80;
        let flush = if features::flushes_by_asid() { FLUSH_ASID } else { FLUSH_ALL };
        let tables = start.scratch.0.0;
        Self { block: Box::new(ControlBlock::new(start)), registers, flush, tables }
    }

    #[inline(always)]
    pub(super) fn enter(&mut self, root: u64) -> Left {
        self.block.nested_cr3 = Npt::ncr3(root);
        self.block.asid = Npt::asid(root).into();
        self.block.tlb_control = if cpu::take_flush() { self.flush } else { 0 };
        // SAFETY: the layouts are what `guest.s` and hardware expect; it keeps the registers that a call keeps. The guest
        // writes to memory of its own only: what its nested tables map.
        unsafe { enter_guest(&mut self.registers, &mut *self.block, cpu::own_state()) }
        self.left()
    }

    /// AMD APM vol. 2, appendix C "SVM Intercept Exit Codes".
    #[inline(always)]
    fn left(&mut self) -> Left {
        const INTERRUPT: u64 = 0x60;
        const VMMCALL: u64 = 0x81;
        const NESTED_PAGE_FAULT: u64 = 0x400;
        let reason = self.block.exit_code;
        if self.block.cr3 != self.tables {
            self.left_twice(reason);
        }
        match reason {
            NESTED_PAGE_FAULT => Left::Fault(fault(self.block.exit_info)),
            VMMCALL => {
                // The length of `vmmcall`: not every CPU says where the next instruction is.
                self.block.rip += 3;
                Left::Call
            }
            INTERRUPT => {
                interrupts::take();
                Left::Interrupt
            }
            _ => Left::Other { reason, at: self.block.rip },
        }
    }

    /// QEMU's SVM does that now and then where a guest is kicked (see README.md): it leaves the guest, and then once more
    /// out of the hypervisor, whose state it stores over the guest's.
    #[cold]
    fn left_twice(&self, reason: u64) -> ! {
        console::fail(format_args!(
            "the CPU left the guest twice: its control block has the hypervisor's state, at {:#x}, because of {reason:#x}",
            self.block.rip
        ))
    }
}

/// APM vol. 2, 15.25.6 "Nested versus Guest Page Faults, Fault Ordering".
#[inline(always)]
fn fault([error, address]: [u64; 2]) -> Fault {
    let kind = if error & 1 == 0 { FaultKind::Translation } else { FaultKind::Permission };
    let access = match (error >> 1 & 1, error >> 4 & 1) {
        (1, _) => Access::Write,
        (_, 1) => Access::Execute,
        _ => Access::Read,
    };
    Fault { gpa: Gpa(address), access, kind }
}
