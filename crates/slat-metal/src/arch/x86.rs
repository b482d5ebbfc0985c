//! AMD SVM with nested paging, on QEMU's `q35` board.
#![expect(unsafe_code, reason = "entries from assembly, and the guest's instruction")]

use core::arch::{asm, global_asm};

use slat::Hpa;
use slat::format::npt::Npt;
use slat::maintenance::{Features, Instruction};

use crate::arch::{Arch, Left, Start, Wanted};
use crate::console;

mod apic;
mod board;
mod control_block;
mod cpu;
mod features;
mod firmware;
mod guest;
mod guest_tables;
mod interrupts;
mod own;
mod permissions;
mod registers;

use guest::Vcpu;

global_asm!(
    include_str!("x86/boot.s"),
    own_root = sym own::OWN_ROOT,
    own_blocks = sym own::OWN_BLOCKS,
    trampoline = const TRAMPOLINE,
    starting = sym board::STARTING,
    end_of_interrupt = const apic::END_OF_INTERRUPT,
    first_cpu = sym first_cpu,
    other_cpu = sym other_cpu,
    exception = sym interrupts::exception,
);

/// Where CPUs start, in real mode: a page below 1 MiB.
const TRAMPOLINE: u64 = 0x8000;

pub(crate) struct X86;

impl Arch for X86 {
    type Format = Npt;
    type Vcpu = Vcpu;

    const NAME: &'static str = "npt";
    const SCRATCH: u64 = guest_tables::SIZE;

    fn put(byte: u8) {
        board::put(byte);
    }

    fn power_off(failed: bool) -> ! {
        board::power_off(failed)
    }

    #[inline(always)]
    fn ticks() -> u64 {
        registers::time_stamp()
    }

    fn ticks_per_second() -> u64 {
        board::ticks_per_second()
    }

    #[inline(always)]
    fn instructions() -> u64 {
        registers::time_stamp()
    }

    fn set_alarm(ticks: u64) {
        board::set_alarm(ticks);
    }

    #[inline(always)]
    fn cpu() -> usize {
        cpu::number()
    }

    fn start_cpu(cpu: usize) -> Result<(), &'static str> {
        board::start_cpu(cpu)
    }

    fn kick(cpu: usize) {
        if let Some(apic) = board::apic_of(cpu) {
            apic::kick(apic);
        }
    }

    fn format(wanted: Wanted) -> Result<Npt, &'static str> {
        features::format(wanted)
    }

    fn features() -> Features {
        Features::default()
    }

    fn coherent_instructions() -> bool {
        true
    }

    fn coherent_data() -> bool {
        true
    }

    /// All that the sequences of this architecture contain is a flush, which takes effect at the next entry here.
    #[inline(always)]
    fn execute(instruction: Instruction) {
        if let Instruction::FlushAsid(_) = instruction {
            cpu::flush_later();
        }
    }

    fn clean_data(_from: Hpa, _size: u64) {}

    fn sync_instructions(_from: Hpa, _size: u64) {}

    fn prepare_cpu(_format: &Npt) {
        if let Err(why) = cpu::enable_guests() {
            console::fail(format_args!("{why}"));
        }
    }

    fn vcpu(start: &Start) -> Vcpu {
        Vcpu::new(start)
    }

    #[inline(always)]
    fn enter(vcpu: &mut Vcpu, root: u64) -> Left {
        vcpu.enter(root)
    }

    /// A vCPU that enters a tree for the first time flushes.
    fn retire() {}

    #[inline(always)]
    fn signal() {
        // SAFETY: executed by a guest, where it leaves and comes back; the hypervisor reads and writes guest memory
        // meanwhile.
        unsafe { asm!("vmmcall", options(nostack)) }
    }
}

/// The first CPU comes here from `boot.s`, with the address of the start info.
extern "C" fn first_cpu(number: usize, start_info: u64) -> ! {
    cpu::init(number);
    interrupts::install();
    apic::enable();
    match board::boot(start_info) {
        Ok(boot) => crate::hypervisor::start(boot),
        Err(why) => console::fail(format_args!("{why}")),
    }
}

/// The others.
extern "C" fn other_cpu(number: usize) -> ! {
    cpu::init(number);
    interrupts::install();
    apic::enable();
    board::has_started();
    crate::hypervisor::start_secondary(number)
}
