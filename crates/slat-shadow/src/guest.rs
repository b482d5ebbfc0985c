//! What the guest's CPU is told, and what lies below the guest: its memory, translated once more.

use core::fmt;

use slat::{Gpa, Hpa, Level};
use slat_vm::Access;

/// How the guest's CPU translates (Intel SDM vol. 3, 5.1.1).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct PagingMode {
    /// `CR4.LA57`: tables of five levels instead of four.
    pub five_level: bool,
    /// `EFER.NXE`: entries can forbid execution; otherwise that bit is reserved.
    pub no_execute: bool,
    /// `CR0.WP`: the kernel cannot write to read-only pages.
    pub write_protect: bool,
    /// `CR4.SMEP`: the kernel cannot execute from user pages.
    pub smep: bool,
    /// `CR4.SMAP`: the kernel cannot reach the data of user pages unless it says so.
    pub smap: bool,
    /// Bits of a physical address that the guest's `CPUID` reports, 36 to 52; those above are reserved in entries.
    pub physical_bits: u32,
}

impl PagingMode {
    /// What 64-bit kernels of today switch on, four levels, 46 bits.
    pub const LONG: Self = Self {
        five_level: false,
        no_execute: true,
        write_protect: true,
        smep: true,
        smap: true,
        physical_bits: 46,
    };

    /// The level of the root.
    pub(crate) fn top(self) -> Level {
        let zero = Level::new(0).unwrap_or(Level::TOP);
        if self.five_level { Level::TOP } else { zero }
    }
}

/// An access of the guest by virtual address.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct GuestAccess {
    /// Load, store or fetch.
    pub kind: Access,
    /// By a user program.
    pub user: bool,
    /// By the kernel, to data of user pages, with `EFLAGS.AC` set: SMAP does not forbid it.
    pub user_data_allowed: bool,
}

impl GuestAccess {
    /// By a user program.
    pub const fn user(kind: Access) -> Self {
        Self { kind, user: true, user_data_allowed: false }
    }

    /// By the kernel.
    pub const fn kernel(kind: Access) -> Self {
        Self { kind, user: false, user_data_allowed: false }
    }
}

/// The page behind a guest-physical address, as the second level has it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Below {
    /// Where the guest-physical address lies.
    pub output: Hpa,
    /// Bytes round it that are mapped congruently, a power of two of at least 4096.
    pub size: u64,
    /// Whether the guest may write there now.
    pub writable: bool,
    /// Device registers: not cached.
    pub device: bool,
}

/// A guest-physical address cannot be used now: see to it as after a fault of the second level.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Missing;

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the guest-physical address is not mapped, or not for writing")
    }
}

impl core::error::Error for Missing {}

/// The guest's memory by guest-physical address, and the CPUs that run it.
///
/// [`VmMemory`](crate::VmMemory) is what [`slat_vm::Vm`] makes of it. A shadow entry never permits more than
/// [`below`](Self::below) did when it was made; whoever takes something away below says so to the
/// [`Shadow`](crate::Shadow) afterwards, and the translation is gone when that call returns.
pub trait GuestMemory {
    /// The page behind `gpa` now. Neither blocks nor changes anything.
    fn below(&self, gpa: Gpa) -> Option<Below>;

    /// The eight bytes at `gpa`, a multiple of eight.
    ///
    /// # Errors
    /// [`Missing`] where nothing is mapped below.
    fn read(&self, gpa: Gpa) -> Result<u64, Missing>;

    /// Replaces the eight bytes at `gpa`, if they are `old`, in one step, and says whether they were. The write is one of
    /// the guest's: it is in the dirty log.
    ///
    /// # Errors
    /// [`Missing`] where nothing is mapped for writing below.
    fn exchange(&self, gpa: Gpa, old: u64, new: u64) -> Result<bool, Missing>;

    /// Removes every translation that shadow tables made from the TLBs and paging-structure caches of all CPUs that run
    /// this guest. Earlier stores to shadow tables are seen by every walk after it. Complete on return.
    fn flush(&self);
}
