//! What comes in from outside of the hypervisor's program: kicks, and exceptions, which are failures.
//!
//! The hypervisor runs with interrupts masked. A kick that comes meanwhile makes the next guest leave at once; it is taken
//! after a guest has left for it.
#![expect(unsafe_code, reason = "descriptors that the CPU reads, and the frame that it pushes")]

use core::arch::asm;

use spin::Once;

use super::apic::{KICK, SPURIOUS_VECTOR};
use crate::console;

const CODE_SEGMENT: u64 = 8;
/// Present, a 64-bit gate that masks interrupts.
const INTERRUPT_GATE: u64 = 0x8e00;
const EXCEPTIONS: u64 = 32;

unsafe extern "C" {
    /// 16 bytes of code for each exception.
    static exceptions: u8;
    fn interrupt();
}

static GATES: Once<Gates> = Once::new();

#[repr(C, align(16))]
struct Gates([[u64; 2]; 256]);

impl Gates {
    fn new() -> Self {
        let mut gates = [[0; 2]; 256];
        let first = &raw const exceptions as u64;
        for (vector, gate) in (0..EXCEPTIONS).zip(&mut gates) {
            *gate = gate_to(first + vector * 16);
        }
        for vector in [KICK, SPURIOUS_VECTOR] {
            gates[usize::from(vector)] = gate_to(interrupt as *const () as u64);
        }
        Self(gates)
    }
}

/// AMD APM vol. 2, 4.8.4 "Gate Descriptors".
fn gate_to(code: u64) -> [u64; 2] {
    let low =
        code & 0xffff | CODE_SEGMENT << 16 | INTERRUPT_GATE << 32 | (code >> 16 & 0xffff) << 48;
    [low, code >> 32]
}

#[repr(C, packed)]
struct Descriptor {
    limit: u16,
    base: u64,
}

/// Makes this CPU use the gates.
pub(super) fn install() {
    let gates = GATES.call_once(Gates::new);
    let descriptor =
        Descriptor { limit: size_of::<Gates>() as u16 - 1, base: &raw const *gates as u64 };
    // SAFETY: every gate leads to code that was made for it, and the gates stay where they are.
    unsafe {
        asm!("lidt [{}]", in(reg) &raw const descriptor, options(readonly, nostack, preserves_flags))
    }
}

/// Takes the interrupts that have come.
#[inline(always)]
pub(super) fn take() {
    // SAFETY: the handler changes nothing but the APIC. `sti` takes effect after the instruction that follows.
    unsafe { asm!("sti", "nop", "cli", options(nostack)) }
}

/// What `boot.s` and the CPU push.
#[repr(C)]
pub(super) struct Frame {
    vector: u64,
    error: u64,
    at: u64,
    code_segment: u64,
    flags: u64,
    stack: u64,
}

/// All exceptions come here from `boot.s`.
pub(super) extern "C" fn exception(frame: &Frame) -> ! {
    let address: u64;
    // SAFETY: reads a register.
    unsafe { asm!("mov {}, cr2", out(reg) address, options(nomem, nostack, preserves_flags)) }
    console::fail(format_args!(
        "exception {}: error {:#x}, rip {:#x}, rsp {:#x}, cr2 {address:#x}",
        frame.vector, frame.error, frame.at, frame.stack
    ))
}
