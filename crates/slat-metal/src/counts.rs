//! What CPUs have done: each counts for itself, so that nobody waits for anybody's cache line.

use core::sync::atomic::{AtomicU64, Ordering};

use slat::maintenance::Instruction;
use slat_metal::report::{Counters, Invalidations};

/// What is counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Publish,
    ByIpa,
    ByRange,
    Combined,
    Everything,
    Local,
    TablesAllocated,
    TablesFreed,
}

const KINDS: usize = Kind::TablesFreed as usize + 1;

impl Kind {
    /// What an instruction counts as; `None` for barriers, and for what goes with an invalidation that counts.
    #[inline(always)]
    pub(crate) fn of(instruction: Instruction) -> Option<Self> {
        match instruction {
            Instruction::DsbIshst => Some(Self::Publish),
            Instruction::TlbiIpas2e1is { .. } => Some(Self::ByIpa),
            Instruction::TlbiRipas2e1is { .. } => Some(Self::ByRange),
            Instruction::TlbiVmalle1is => Some(Self::Combined),
            Instruction::TlbiVmalls12e1is | Instruction::TlbiAlle1is => Some(Self::Everything),
            Instruction::TlbiIpas2e1 { .. } | Instruction::FlushAsid(_) => Some(Self::Local),
            _ => None,
        }
    }
}

/// Whether an instruction removes translations from TLBs; the others are barriers, and changes of context.
#[inline(always)]
pub(crate) fn is_invalidation(instruction: Instruction) -> bool {
    use Instruction::*;
    !matches!(
        instruction,
        DsbIshst | DsbIsh | DsbNshst | DsbNsh | Isb | EnterContext(_) | LeaveContext
    )
}

/// One CPU's.
#[repr(align(128))]
pub(crate) struct Counts([AtomicU64; KINDS]);

impl Counts {
    pub(crate) const fn new() -> Self {
        Self([const { AtomicU64::new(0) }; KINDS])
    }

    /// On the CPU whose counts these are.
    #[inline(always)]
    pub(crate) fn add(&self, kind: Kind, by: u64) {
        let count = &self.0[kind as usize];
        count.store(count.load(Ordering::Relaxed) + by, Ordering::Relaxed);
    }

    pub(crate) fn counters(&self) -> Counters {
        let count = |kind| self.0[kind as usize].load(Ordering::Relaxed);
        Counters {
            tables_allocated: count(Kind::TablesAllocated),
            tables_freed: count(Kind::TablesFreed),
            publishes: count(Kind::Publish),
            invalidations: Invalidations {
                by_ipa: count(Kind::ByIpa),
                by_range: count(Kind::ByRange),
                combined: count(Kind::Combined),
                everything: count(Kind::Everything),
                local: count(Kind::Local),
            },
            ..Counters::default()
        }
    }
}
