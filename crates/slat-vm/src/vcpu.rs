//! A vCPU's side of guest memory: its participant, its tables in hand, and what it has done.

use slat::gate::Gate;
use slat::{Machine, NoSlot, Participant, Reserve};

/// One vCPU. Everything in it is its own: two vCPUs that fault write nothing in common but the entries themselves.
#[derive(Debug)]
pub struct Vcpu<'m, M: Machine> {
    pub(crate) participant: Participant<'m, M>,
    pub(crate) reserve: Reserve<'m, M>,
    /// Where the slot of the last fault was found.
    pub(crate) hit: usize,
    pub(crate) statistics: VcpuStatistics,
}

/// What a vCPU has done since it was made. The engine's own counters are in [`Vcpu::participant`]`().counters`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct VcpuStatistics {
    /// Faults taken: the sum of the seven that follow.
    pub faults: u64,
    /// Faults that installed something or added a permission.
    pub fixed: u64,
    /// Faults that found everything there: another vCPU was faster, or this one's TLB was behind.
    pub spurious: u64,
    /// Faults that sent the guest back to try again: an entry was being changed, the slot changed, or the host took
    /// pages back.
    pub retried: u64,
    /// Faults outside every slot, and writes to read-only slots.
    pub mmio: u64,
    /// Faults that only set the access flag.
    pub young: u64,
    /// Faults that the guest is to be told of.
    pub aborted: u64,
    /// Faults that failed.
    pub failed: u64,
    /// Faults that put a block in the place of smaller leaves.
    pub collapsed: u64,
    /// Pages that were clean in the log and that a fault has marked.
    pub marked: u64,
}

impl<'m, M: Machine> Vcpu<'m, M> {
    pub(crate) fn new(machine: &'m M) -> Result<Self, NoSlot> {
        Ok(Self {
            participant: Participant::register(machine)?,
            reserve: Reserve::new(machine),
            hit: 0,
            statistics: VcpuStatistics::default(),
        })
    }

    /// Its participant, for the engine's own operations and their counters.
    pub fn participant(&self) -> &Participant<'m, M> {
        &self.participant
    }

    /// The gate through which it enters the guest.
    pub fn gate(&self) -> &'m Gate {
        self.participant.gate()
    }

    /// What it has done.
    pub fn statistics(&self) -> &VcpuStatistics {
        &self.statistics
    }
}
