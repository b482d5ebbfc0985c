//! The seam: what an architecture gives the hypervisor. Everything outside of this folder is the same for all of them.
//!
//! Boot goes the other way: an architecture sets up its first CPU (own MMU on, a stack, memory found), then calls
//! [`crate::hypervisor::start`]; each CPU that [`Arch::start_cpu`] has started calls [`crate::hypervisor::start_secondary`].

use core::ops::Range;

use slat::maintenance::{Features, Instruction};
use slat::{Format, Gpa, Hpa};
use slat_vm::Fault;

#[cfg(target_arch = "aarch64")]
mod arm;
#[cfg(target_arch = "aarch64")]
pub(crate) use arm::Arm as Here;

#[cfg(target_arch = "x86_64")]
mod x86;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86::X86 as Here;

/// The most CPUs.
pub(crate) const MAX_CPUS: usize = 8;

/// What is known when the first CPU is up.
pub(crate) struct Boot {
    /// The largest range of memory that nobody uses: neither the image nor what the firmware has left.
    pub(crate) memory: Range<u64>,
    pub(crate) command_line: &'static str,
    /// How many CPUs there are, at most [`MAX_CPUS`].
    pub(crate) cpus: usize,
}

/// Which of the optional features the guest's tables are to use. What the CPU has not is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Wanted {
    /// Bits of guest-physical addresses.
    pub(crate) address_bits: u32,
    /// Hardware sets the access flag; `None`: where it can.
    pub(crate) hardware_access: Option<bool>,
    /// Hardware keeps dirty state.
    pub(crate) hardware_dirty: bool,
}

/// Where a vCPU begins. Guest memory is host memory one to one here, except that the guest's addresses are others.
pub(crate) struct Start {
    /// The first instruction.
    pub(crate) entry: Gpa,
    /// The first argument of the function there.
    pub(crate) argument: u64,
    /// One past the highest address of its stack.
    pub(crate) stack: Gpa,
    /// [`Arch::SCRATCH`] bytes of the guest's memory, zeroed, for what the architecture needs to run it.
    #[cfg_attr(
        target_arch = "aarch64",
        expect(dead_code, reason = "guests run with their MMU off")
    )]
    pub(crate) scratch: (Gpa, Hpa),
}

/// Why a vCPU left its guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Left {
    /// It used memory that is not mapped for it.
    Fault(Fault),
    /// The guest called: [`Arch::signal`].
    Call,
    /// An interrupt came (a kick, or the watchdog's look at the clock), or there is nothing to be done but enter again.
    Interrupt,
    /// It did something that no program of ours does; what hardware says of it.
    Other { reason: u64, at: u64 },
}

/// One architecture. All functions are about the CPU that calls them, unless they name another.
pub(crate) trait Arch {
    /// The guest's tables.
    type Format: Format;
    /// A vCPU's registers while it is outside, and whatever else hardware wants to enter with.
    type Vcpu: Send;

    /// As in `--arch` of the `slat` command.
    const NAME: &'static str;
    /// Bytes of guest memory that each vCPU needs for [`Start::scratch`], in whole pages.
    const SCRATCH: u64;

    /// Sends a byte to the console.
    fn put(byte: u8);
    /// Turns the machine off. Where it can it says `failed` to whoever started it.
    fn power_off(failed: bool) -> !;
    /// A counter that goes up [`ticks_per_second`](Self::ticks_per_second), on all CPUs the same.
    fn ticks() -> u64;
    fn ticks_per_second() -> u64;
    /// A counter of the finest resolution that there is. Where instructions are what time is counted in, and each takes a
    /// nanosecond (QEMU: `-icount shift=0`), it goes up by one for each.
    fn instructions() -> u64;
    /// Makes this CPU leave its guest after so many ticks, once.
    fn set_alarm(ticks: u64);

    /// Which CPU this is, from 0.
    fn cpu() -> usize;
    /// Starts another CPU.
    fn start_cpu(cpu: usize) -> Result<(), &'static str>;
    /// Makes another CPU leave its guest, or not enter it.
    fn kick(cpu: usize);

    /// The format for the tables of every guest.
    fn format(wanted: Wanted) -> Result<Self::Format, &'static str>;
    /// What the translation hardware can do.
    fn features() -> Features;
    /// Whether instruction fetches see stores without maintenance.
    fn coherent_instructions() -> bool;
    /// Whether guests cannot bypass the data caches.
    fn coherent_data() -> bool;
    /// One barrier or invalidation.
    fn execute(instruction: Instruction);
    fn clean_data(from: Hpa, size: u64);
    fn sync_instructions(from: Hpa, size: u64);

    /// Makes this CPU ready to run guests with tables of this format.
    fn prepare_cpu(format: &Self::Format);
    /// A vCPU that begins there.
    fn vcpu(start: &Start) -> Self::Vcpu;
    /// Runs the guest on the tree with this root register ([`slat::Tree::root_register`]) until it leaves.
    fn enter(vcpu: &mut Self::Vcpu, root: u64) -> Left;

    /// This CPU runs no guest any more: hardware may forget the tree's root.
    fn retire();

    /// The guest's side of [`Left::Call`]: the instruction that leaves. Inlined into what runs in the guest.
    fn signal();
}
