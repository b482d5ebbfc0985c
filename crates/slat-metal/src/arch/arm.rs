//! Arm at EL2 (Armv8.0 and later), on QEMU's `virt` board.
#![expect(unsafe_code, reason = "entries from assembly, and the instructions of EL2")]

use core::arch::{asm, global_asm};
use core::sync::atomic::{AtomicU64, Ordering};

use slat::Hpa;
use slat::format::arm::{K4, Stage2};
use slat::maintenance::{Features, Instruction};

use crate::arch::{Arch, Left, Start, Wanted};
use crate::console;

mod board;
mod clock;
mod features;
mod guest;
mod interrupts;
mod linux;
mod own;
mod registers;

use guest::Vcpu;
use registers::{isb, read, write};

global_asm!(include_str!("arm/boot.s"), own_table = sym own::OWN_TABLE);
global_asm!(include_str!("arm/memory.s"));

/// `HCR_EL2`: EL1 is AArch64; stage 2 on; interrupts come here; guests without an MMU of their own have cacheable memory.
const HCR: u64 = 1 << 31 | 1 << 12 | 1 << 5 | 1 << 4 | 1 << 3 | 1 << 1 | 1;
/// `SCTLR_EL1` after a reset: RES1, MMU and caches off.
const SCTLR_RESET: u64 = 0x30d0_0800;

pub(crate) struct Arm;

impl Arch for Arm {
    type Format = Stage2<K4>;
    type Vcpu = Vcpu;

    const NAME: &'static str = "arm";
    /// Guests run with their MMU off.
    const SCRATCH: u64 = 0;

    fn put(byte: u8) {
        board::put(byte);
    }

    /// The firmware's call has no status: what the console said has to do.
    fn power_off(_failed: bool) -> ! {
        board::power_off()
    }

    fn ticks() -> u64 {
        clock::ticks()
    }

    fn ticks_per_second() -> u64 {
        clock::ticks_per_second()
    }

    #[inline(always)]
    fn instructions() -> u64 {
        clock::instructions()
    }

    fn set_alarm(ticks: u64) {
        interrupts::set_alarm(ticks);
    }

    #[inline(always)]
    fn cpu() -> usize {
        read!("TPIDR_EL2") as usize
    }

    fn start_cpu(cpu: usize) -> Result<(), &'static str> {
        board::start_cpu(cpu)
    }

    fn kick(cpu: usize) {
        interrupts::kick(cpu);
    }

    fn format(wanted: Wanted) -> Result<Self::Format, &'static str> {
        features::format(wanted)
    }

    fn features() -> Features {
        features::translation()
    }

    fn coherent_instructions() -> bool {
        features::coherent_instructions()
    }

    fn coherent_data() -> bool {
        features::coherent_data()
    }

    #[inline(always)]
    fn execute(instruction: Instruction) {
        // SAFETY: this is EL2, with `VTTBR_EL2` used by nobody meanwhile; there is one guest, whose root it always holds.
        unsafe { slat::maintenance::arm::execute(instruction, RESIDENT.load(Ordering::Relaxed)) }
    }

    fn clean_data(from: Hpa, size: u64) {
        each_line(from, size, |line| {
            // SAFETY: cleaning and invalidating a line loses nothing.
            unsafe { asm!("dc civac, {}", in(reg) line, options(nostack, preserves_flags)) }
        });
        Self::execute(Instruction::DsbIsh);
    }

    fn sync_instructions(from: Hpa, size: u64) {
        each_line(from, size, |line| {
            // SAFETY: cleaning a line loses nothing.
            unsafe { asm!("dc cvau, {}", in(reg) line, options(nostack, preserves_flags)) }
        });
        // SAFETY: instructions are fetched anew.
        unsafe {
            asm!("dsb ish", "ic ialluis", "dsb ish", "isb", options(nostack, preserves_flags))
        }
    }

    fn prepare_cpu(format: &Self::Format) {
        write!("VTCR_EL2", features::vtcr(format));
        write!("HCR_EL2", HCR | features::hcr_fwb());
        write!("SCTLR_EL1", SCTLR_RESET);
        // The guest's floating point is its own: see `guest`.
        write!("CPACR_EL1", 3 << 20);
        isb();
    }

    fn vcpu(start: &Start) -> Vcpu {
        Vcpu::new(start)
    }

    #[inline(always)]
    fn enter(vcpu: &mut Vcpu, root: u64) -> Left {
        vcpu.enter(root)
    }

    fn retire() {
        RESIDENT.store(0, Ordering::Relaxed);
        write!("VTTBR_EL2", 0);
        isb();
    }

    #[inline(always)]
    fn signal() {
        // SAFETY: executed by a guest, where it leaves and comes back; the hypervisor reads and writes guest memory
        // meanwhile.
        unsafe { asm!("hvc #0", options(nostack)) }
    }
}

/// What `VTTBR_EL2` holds outside of guests: the root of the one guest that there is, so that it is written when another
/// comes and not at each exit.
static RESIDENT: AtomicU64 = AtomicU64::new(0);

fn each_line(from: Hpa, size: u64, operate: impl Fn(u64)) {
    let line = 4 << (read!("CTR_EL0") >> 16 & 0xf);
    let mut at = from.0 & !(line - 1);
    while at < from.0 + size {
        operate(at);
        at += line;
    }
}

/// The first CPU comes here from `boot.s`.
#[unsafe(no_mangle)]
extern "C" fn first_cpu() -> ! {
    clock::prepare();
    let boot = board::boot().and_then(|boot| {
        // All interrupts are Linux's.
        linux::start_if_asked(&boot);
        interrupts::prepare(0).map(|()| boot)
    });
    match boot {
        Ok(boot) => crate::hypervisor::start(boot),
        Err(why) => console::fail(format_args!("{why}")),
    }
}

/// The others.
#[unsafe(no_mangle)]
extern "C" fn other_cpu(cpu: usize) -> ! {
    clock::prepare();
    linux::start_secondary(cpu);
    if let Err(why) = interrupts::prepare(cpu) {
        console::fail(format_args!("{why}"));
    }
    crate::hypervisor::start_secondary(cpu)
}

/// Everything that a guest does not cause and the hypervisor does not expect.
#[unsafe(no_mangle)]
extern "C" fn unexpected_exception(vector: u64) -> ! {
    console::fail(format_args!(
        "exception {vector}: ESR_EL2 {:#x}, ELR_EL2 {:#x}, FAR_EL2 {:#x}, HPFAR_EL2 {:#x}",
        read!("ESR_EL2"),
        read!("ELR_EL2"),
        read!("FAR_EL2"),
        read!("HPFAR_EL2")
    ))
}
