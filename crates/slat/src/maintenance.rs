//! What the hardware must be told: publishing stores, invalidating translations, in the sequence of each
//! architecture (rule 12).

use crate::machine::Machine;
use crate::{Gpa, GpaRange, Hpa, Level};

pub mod arm;
pub mod x86;

/// One barrier or TLB-maintenance instruction, the step that [`Machine::execute`] executes.
///
/// A machine may do more than is asked, never less: an erratum that wants an invalidation repeated is the machine's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Instruction {
    /// `dsb ishst`: earlier stores are visible to every table walker of the inner-shareable domain.
    DsbIshst,
    /// `dsb ish`: earlier stores and invalidations are complete on every CPU of the inner-shareable domain.
    DsbIsh,
    /// `dsb nshst`: earlier stores are visible to this CPU's table walker.
    DsbNshst,
    /// `dsb nsh`: earlier invalidations are complete on this CPU.
    DsbNsh,
    /// `isb`: later instructions are fetched after everything before is done.
    Isb,
    /// Write this value to `VTTBR_EL2`, and `isb`: invalidations that follow act on its VMID.
    EnterContext(u64),
    /// Write to `VTTBR_EL2` what it holds while this CPU runs the host, and `isb`. That is one value for the whole
    /// machine (zero, or the host's own stage 2), so nothing has to be remembered from `EnterContext`; entering a
    /// guest writes its `VTTBR_EL2` anyway.
    LeaveContext,
    /// `tlbi ipas2e1is`: what caches the stage-2 translation of one address, on every CPU.
    TlbiIpas2e1is {
        /// The address.
        ipa: Gpa,
        /// log2 of the granule, for the level hint.
        page_shift: u32,
        /// The level of the leaf, where it is known (TTL hint, FEAT_TTL).
        level: Option<Level>,
    },
    /// `tlbi ripas2e1is`: the same for `(num + 1) << (5 * scale + 1)` granules from `ipa` (FEAT_TLBIRANGE).
    TlbiRipas2e1is {
        /// The first address, aligned to 64K and to the size of a leaf at `level`.
        ipa: Gpa,
        /// log2 of the granule.
        page_shift: u32,
        /// The SCALE field, 0 to 3.
        scale: u8,
        /// The NUM field, 0 to 31.
        num: u8,
        /// The level of all leaves, where it is known.
        level: Option<Level>,
    },
    /// `tlbi ipas2e1`: as `TlbiIpas2e1is` on this CPU only.
    TlbiIpas2e1 {
        /// The address.
        ipa: Gpa,
        /// log2 of the granule, for the level hint.
        page_shift: u32,
        /// The level of the leaf, where it is known.
        level: Option<Level>,
    },
    /// `tlbi vmalle1is`: combined-stage and stage-1 translations of the current VMID, on every CPU.
    TlbiVmalle1is,
    /// `tlbi vmalle1`: the same on this CPU only.
    TlbiVmalle1,
    /// `tlbi vmalls12e1is`: every translation of the current VMID, both stages, on every CPU.
    TlbiVmalls12e1is,
    /// `tlbi alle1is`: every EL1&0 translation of every VMID, on every CPU.
    TlbiAlle1is,
    /// `invept`, single-context: every translation that this EPTP's tables made, on this CPU (Intel).
    InveptSingle(u64),
    /// `invept`, all-context: every translation of every EPTP, on this CPU (Intel). For a CPU that begins to run
    /// guests; no sequence of this crate contains it.
    InveptAll,
    /// Every translation of this ASID on this CPU is gone before this CPU runs a guest under it again (AMD): set
    /// TLB_CONTROL of the control block to 3 (flush by ASID) or 1 for the next `vmrun`, or give the guest an ASID
    /// that this CPU has not used.
    FlushAsid(u16),
}

/// What a machine's translation hardware can do. The default is what every machine can do.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Features {
    /// Invalidation by range (Arm FEAT_TLBIRANGE: `ID_AA64ISAR0_EL1.TLB` is 2).
    pub tlb_range: bool,
    /// Level hints in invalidations (Arm FEAT_TTL: `ID_AA64MMFR2_EL1.TTL` is 1).
    pub ttl: bool,
    /// How well a change of block size is tolerated without break-before-make (Arm `ID_AA64MMFR2_EL1.BBM`, 0 to 2).
    pub bbm_level: u8,
}

/// What to invalidate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Invalidation {
    /// The addresses; `None` for the whole tree.
    pub range: Option<GpaRange>,
    /// The level of every leaf that could be cached, where it is known and no table is among what went away.
    pub level: Option<Level>,
}

/// Whose translations: what identifies a tree to the TLB.
///
/// Where the identifier can change (see [`TreeVmid`](crate::vmid::TreeVmid)), make the context after the entries were
/// changed, with [`TreeVmid::to_invalidate`](crate::vmid::TreeVmid::to_invalidate).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Context {
    /// What [`Maintenance::root`] made of the root table and the identifier.
    pub root: u64,
    /// log2 of the granule.
    pub page_shift: u32,
}

/// The sequences of one architecture. Each returns when its effect is complete, and cannot fail.
pub trait Maintenance {
    /// Whether a permission fault by itself removes the translation that caused it from the faulting CPU's TLB, so
    /// that a fault which finds enough permission in the entry need not call
    /// [`invalidate_local`](Self::invalidate_local).
    const FAULT_INVALIDATES: bool = false;
    /// Whether every CPU tolerates that one page is cached in two sizes that translate it alike, and every
    /// [`invalidate`](Self::invalidate) is of the whole tree: then a block is split by one exchange and nothing is
    /// invalidated. Otherwise [`Features::bbm_level`] says what is tolerated.
    const RESIZES: bool = false;

    /// Makes the calling CPU's earlier stores to tables visible to every table walker.
    fn publish<M: Machine>(machine: &M);
    /// Removes translations from every CPU's TLB and walk caches. More may be removed than is asked.
    fn invalidate<M: Machine>(machine: &M, context: &Context, what: Invalidation);
    /// Removes the translation of one address from the calling CPU's TLB. More may be removed than is asked.
    fn invalidate_local<M: Machine>(machine: &M, context: &Context, gpa: Gpa);
    /// The value that identifies a tree to this architecture's instructions, from its root table and an identifier
    /// (Arm: VMID; AMD: ASID; Intel: see [`x86::Ept`]).
    fn root(table: Hpa, identifier: u16) -> u64;

    /// What a vCPU of this tree does that found [`Requests::INVALIDATE`](crate::gate::Requests::INVALIDATE) at its
    /// gate, on the CPU on which it will enter. Nothing where invalidations are broadcast.
    fn answer<M: Machine>(machine: &M, context: &Context) {
        let _ = (machine, context);
    }
}
