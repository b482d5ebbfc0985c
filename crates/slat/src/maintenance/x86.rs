//! x86: no CPU can invalidate another's TLB, so invalidations go through the gates (rules 11 and 12).
//!
//! The translations of a guest are used inside the guest only. So each CPU that is inside a guest of the tree is kicked
//! out and waited for, and every vCPU of the tree finds a request at its gate and invalidates before its next entry.
//! Entries may stay in the TLB of a CPU on which no vCPU of the tree runs; a vCPU that comes to such a CPU says so first
//! ([`Participant::moved`](crate::Participant::moved)), as one does that changes trees
//! ([`Participant::switch`](crate::Participant::switch)).
//!
//! # Publishing
//! Stores become visible to all processors in program order, and table walkers read through the coherent caches (Intel
//! SDM vol. 3, 9.2.2 "Memory Ordering in P6 and More Recent Processor Families" and 4.10; AMD APM vol. 2, 7.1 and 7.3):
//! a walker that sees an entry sees the table behind it. What is still in a store buffer is a fault that is taken once
//! more. So nothing is executed; the compiler is kept from moving stores across.
//!
//! # What an invalidation covers
//! Neither `invept` nor an ASID flush takes a guest-physical address: every invalidation is one of the whole tree,
//! whatever its range.

use core::sync::atomic::{Ordering, compiler_fence};

use crate::gate::{Requests, request_everywhere};
use crate::machine::Machine;
use crate::maintenance::{Context, Instruction, Invalidation, Maintenance};
use crate::{Gpa, Hpa};

/// Where an EPTP and an nCR3 hold the address of the root table.
const TABLE: u64 = 0xf_ffff_ffff_f000;

/// Asks every vCPU of the tree to invalidate before its next entry; none is inside on return unless it has.
fn invalidate_through_gates<M: Machine>(machine: &M, root: u64) {
    request_everywhere(machine, Some(Hpa(root & TABLE)), Requests::INVALIDATE);
}

/// Intel: EPT, invalidated by `invept` (Intel SDM vol. 3, 29.4.3 "Invalidating Cached Translation Information").
#[derive(Clone, Copy, Debug)]
pub struct Ept;

impl Ept {
    /// EPTP bits for tables in write-back memory (bits 2:0).
    pub const WRITE_BACK: u16 = 6;
    /// EPTP bits for a root at level 0: a walk of four tables (bits 5:3 hold one less).
    pub const FOUR_LEVELS: u16 = 3 << 3;
    /// EPTP bits for a root at level -1: a walk of five tables.
    pub const FIVE_LEVELS: u16 = 4 << 3;
    /// EPTP bit that enables accessed and dirty flags.
    pub const ACCESSED_DIRTY: u16 = 1 << 6;
}

impl Maintenance for Ept {
    /// An EPT violation invalidates what was used to translate the address that caused it (SDM vol. 3, 29.4.3.1), on
    /// the CPU that took it; a vCPU that moves to another one invalidates there anyway.
    const FAULT_INVALIDATES: bool = true;
    /// SDM vol. 3, 5.10.2.3 "Details of TLB Use": either size may be used. CPUs whose `IA32_ARCH_CAPABILITIES` lacks
    /// IF_PSCHANGE_MC_NO (bit 6) take a machine check if they fetch instructions from a page that they hold in both: an
    /// embedder that runs on them makes no block executable.
    const RESIZES: bool = true;

    fn publish<M: Machine>(_: &M) {
        compiler_fence(Ordering::SeqCst);
    }

    fn invalidate<M: Machine>(machine: &M, context: &Context, _: Invalidation) {
        invalidate_through_gates(machine, context.root);
    }

    fn invalidate_local<M: Machine>(machine: &M, context: &Context, _: Gpa) {
        machine.execute(Instruction::InveptSingle(context.root));
    }

    /// The EPTP. Its tag in the TLB is the table's address; `identifier` is what else it says, bits 11:0: for example
    /// [`WRITE_BACK`](Self::WRITE_BACK)` | `[`FOUR_LEVELS`](Self::FOUR_LEVELS). `invept` fails for one that VM entry
    /// would refuse.
    fn root(table: Hpa, identifier: u16) -> u64 {
        (table.0 & TABLE) | u64::from(identifier & 0xfff)
    }

    fn answer<M: Machine>(machine: &M, context: &Context) {
        machine.execute(Instruction::InveptSingle(context.root));
    }
}

/// AMD: nested page tables, invalidated by ASID (AMD APM vol. 2, 15.16 "TLB Control").
#[derive(Clone, Copy, Debug)]
pub struct Npt;

impl Npt {
    /// The nCR3 in a [`Context::root`] of this architecture.
    pub const fn ncr3(root: u64) -> u64 {
        root & TABLE
    }

    /// The ASID in a [`Context::root`] of this architecture.
    pub const fn asid(root: u64) -> u16 {
        (root & 0xfff) as u16 | (root >> 60 << 12) as u16
    }
}

impl Maintenance for Npt {
    /// No passage is known that promises of a nested page fault what the SDM does of an EPT violation. So a fault that finds
    /// enough permission flushes the ASID on its CPU: nothing smaller goes by guest-physical address.
    const FAULT_INVALIDATES: bool = false;
    /// APM vol. 2, 5.5 "Translation-Lookaside Buffer": a change of size is like any other, and both are right meanwhile.
    const RESIZES: bool = true;

    fn publish<M: Machine>(_: &M) {
        compiler_fence(Ordering::SeqCst);
    }

    fn invalidate<M: Machine>(machine: &M, context: &Context, _: Invalidation) {
        invalidate_through_gates(machine, context.root);
    }

    fn invalidate_local<M: Machine>(machine: &M, context: &Context, _: Gpa) {
        machine.execute(Instruction::FlushAsid(Self::asid(context.root)));
    }

    /// nCR3 with the ASID in the bits that it leaves free (11:0 and 63:60): see [`ncr3`](Self::ncr3) and
    /// [`asid`](Self::asid).
    fn root(table: Hpa, identifier: u16) -> u64 {
        (table.0 & TABLE) | u64::from(identifier & 0xfff) | u64::from(identifier >> 12) << 60
    }

    fn answer<M: Machine>(machine: &M, context: &Context) {
        machine.execute(Instruction::FlushAsid(Self::asid(context.root)));
    }
}
