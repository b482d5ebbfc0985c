//! What the hardware must be told: publishing stores, invalidating translations, in the sequence of each
//! architecture (rule 12).

use crate::machine::Machine;
use crate::{Gpa, GpaRange, Level};

pub mod arm;

/// One barrier or TLB-maintenance instruction, the step that [`Machine::execute`] executes.
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
    /// Write this value to `VTTBR_EL2`, so that invalidations by IPA act on its VMID; remember the one before.
    EnterContext(u64),
    /// Write back the `VTTBR_EL2` that `EnterContext` remembered.
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
        /// The first address, aligned to the granule.
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
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Context {
    /// The value of the root register (Arm: `VTTBR_EL2`; Intel: EPTP).
    pub root: u64,
    /// log2 of the granule.
    pub page_shift: u32,
}

/// The sequences of one architecture. Each returns when its effect is complete.
pub trait Maintenance {
    /// Makes the calling CPU's earlier stores to tables visible to every table walker.
    fn publish<M: Machine>(machine: &M);
    /// Removes translations from every CPU's TLB and walk caches.
    fn invalidate<M: Machine>(machine: &M, context: &Context, what: Invalidation);
    /// Removes the translation of one address from the calling CPU's TLB.
    fn invalidate_local<M: Machine>(machine: &M, context: &Context, gpa: Gpa);
    /// The value of the root register for a root and an identifier (Arm: VMID; x86: ASID).
    fn root(table: crate::Hpa, identifier: u16) -> u64;
}
