//! The control block that `vmrun` takes (AMD APM vol. 2, appendix B "Layout of VMCB"): what makes a guest leave, why it
//! left, and its state.
#![expect(unsafe_code, reason = "zeroes a structure of numbers")]

use core::mem::{MaybeUninit, offset_of};

use super::permissions;
use crate::arch::Start;

/// A segment register (APM vol. 2, table B-2).
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Segment {
    selector: u16,
    attributes: u16,
    limit: u32,
    base: u64,
}

impl Segment {
    /// 64-bit code and data: type, S, present; in the upper nibble long mode or default size, and granularity.
    const CODE: Self = Self { selector: 8, attributes: 0xa9b, limit: u32::MAX, base: 0 };
    const DATA: Self = Self { selector: 16, attributes: 0xc93, limit: u32::MAX, base: 0 };
    /// A busy task, which there has to be.
    const TASK: Self = Self { selector: 0, attributes: 0x8b, limit: 0xffff, base: 0 };
}

/// What is not named here is zero: not used.
#[repr(C, align(4096))]
pub(super) struct ControlBlock {
    _registers: [u32; 2],
    exceptions: u32,
    intercepts: [u32; 2],
    _reserved_14: [u32; 11],
    port_permissions: u64,
    register_permissions: u64,
    _time_stamp_offset: u64,
    pub(super) asid: u32,
    pub(super) tlb_control: u32,
    interrupts: u64,
    _shadow: u64,
    pub(super) exit_code: u64,
    pub(super) exit_info: [u64; 2],
    _exit_interrupt: u64,
    nested_paging: u64,
    _reserved_98: [u64; 3],
    pub(super) nested_cr3: u64,
    _reserved_b8: [u64; 105],
    segments: [Segment; 6],
    _gdtr_ldtr_idtr: [Segment; 3],
    task: Segment,
    _reserved_4a0: [u64; 6],
    efer: u64,
    _reserved_4d8: [u64; 14],
    cr4: u64,
    pub(super) cr3: u64,
    cr0: u64,
    dr7: u64,
    dr6: u64,
    rflags: u64,
    pub(super) rip: u64,
    _reserved_580: [u64; 11],
    rsp: u64,
    _reserved_5e0: [u64; 3],
    rax: u64,
    _reserved_600: [u64; 13],
    pat: u64,
    _reserved_670: [u64; 306],
}

const _: () = {
    assert!(offset_of!(ControlBlock, port_permissions) == 0x40);
    assert!(offset_of!(ControlBlock, asid) == 0x58);
    assert!(offset_of!(ControlBlock, exit_code) == 0x70);
    assert!(offset_of!(ControlBlock, nested_cr3) == 0xb0);
    assert!(offset_of!(ControlBlock, segments) == 0x400);
    assert!(offset_of!(ControlBlock, task) == 0x490);
    assert!(offset_of!(ControlBlock, efer) == 0x4d0);
    assert!(offset_of!(ControlBlock, cr4) == 0x548);
    assert!(offset_of!(ControlBlock, rip) == 0x578);
    assert!(offset_of!(ControlBlock, rsp) == 0x5d8);
    assert!(offset_of!(ControlBlock, rax) == 0x5f8);
    assert!(offset_of!(ControlBlock, pat) == 0x668);
    assert!(size_of::<ControlBlock>() == 0x1000);
};

/// Interrupts, NMI, INIT, CPUID, HLT, INVLPGA, ports, model-specific registers, shutdown.
const INTERCEPTS: u32 =
    1 | 1 << 1 | 1 << 3 | 1 << 18 | 1 << 24 | 1 << 26 | 1 << 27 | 1 << 28 | 1 << 31;
/// All instructions of SVM, and XSETBV.
const SVM_INTERCEPTS: u32 = 0x7f | 1 << 13;
/// Interrupts go by the hypervisor's interrupt flag, not by the guest's.
const MASK_BY_HOST: u64 = 1 << 24;
/// SVME, which has to be set; no-execute; long mode, active.
const EFER: u64 = 1 << 12 | 1 << 11 | 1 << 10 | 1 << 8;
/// Paging, write protection, numeric errors, protected mode.
const CR0: u64 = 1 << 31 | 1 << 16 | 1 << 5 | 1 << 4 | 1 << 1 | 1;
/// SSE with its exceptions, and physical address extension.
const CR4: u64 = 1 << 10 | 1 << 9 | 1 << 5;
/// After a reset.
const PAT: u64 = 0x0007_0406_0007_0406;
const DR6: u64 = 0xffff_0ff0;
const DR7: u64 = 0x400;
const RFLAGS: u64 = 1 << 1;

impl ControlBlock {
    /// A CPU in 64-bit mode with the guest's own tables in its scratch memory, at the first instruction of a function.
    pub(super) fn new(start: &Start) -> Self {
        let [code, data, task] = [Segment::CODE, Segment::DATA, Segment::TASK];
        Self {
            exceptions: u32::MAX,
            intercepts: [INTERCEPTS, SVM_INTERCEPTS],
            port_permissions: permissions::nothing(),
            register_permissions: permissions::nothing(),
            interrupts: MASK_BY_HOST,
            nested_paging: 1,
            segments: [data, code, data, data, data, data],
            task,
            efer: EFER,
            cr4: CR4,
            cr3: start.scratch.0.0,
            cr0: CR0,
            dr7: DR7,
            dr6: DR6,
            rflags: RFLAGS,
            rip: start.entry.0,
            // As if it had been called: the stack is 8 short of a multiple of 16.
            rsp: start.stack.0 - 8,
            pat: PAT,
            ..Self::zeroed()
        }
    }

    const fn zeroed() -> Self {
        // SAFETY: it is made of numbers.
        unsafe { MaybeUninit::zeroed().assume_init() }
    }
}
