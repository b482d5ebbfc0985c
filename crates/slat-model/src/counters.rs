//! What the machine has done: barriers, invalidations by kind, tables, walks.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::tables::thread_number;

/// Numbers since the model was made. Reading them while other threads run gives a moment between.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// `dsb ishst`.
    pub publishes: u64,
    /// Invalidations of one address on every CPU.
    pub by_ipa: u64,
    /// Invalidations of a range on every CPU.
    pub by_range: u64,
    /// Invalidations of the combined translations of a VMID, on every CPU.
    pub combined: u64,
    /// Invalidations of a whole VMID, or of all of them, on every CPU.
    pub everything: u64,
    /// Invalidations on one CPU only, of one address (the combined translations that go with it not counted).
    pub local: u64,
    /// Barriers that wait for invalidations on every CPU (`dsb ish`).
    pub waits: u64,
    /// Tables allocated, a root of n tables as n.
    pub tables_allocated: u64,
    /// Tables freed.
    pub tables_freed: u64,
    /// Tables allocated and not freed.
    pub tables_in_use: u64,
    /// Walks of the tables by hardware.
    pub walks: u64,
    /// Translations that a TLB has cached.
    pub fills: u64,
}

/// What is counted by instruction.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    Publish,
    ByIpa,
    ByRange,
    Combined,
    Everything,
    Local,
    Wait,
}

const KINDS: usize = Kind::Wait as usize + 1;
const SHARDS: usize = 16;

/// Counts that threads add to without meeting.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    shards: [Shard; SHARDS],
}

#[derive(Debug, Default)]
#[repr(align(128))]
struct Shard([AtomicU64; KINDS]);

impl Tally {
    #[inline]
    pub(crate) fn add(&self, kind: Kind) {
        self.shards[thread_number() % SHARDS].0[kind as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn sum(&self, kind: Kind) -> u64 {
        self.shards.iter().map(|shard| shard.0[kind as usize].load(Ordering::Relaxed)).sum()
    }
}
