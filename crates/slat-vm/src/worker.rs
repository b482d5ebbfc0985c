//! A thread that maintains guest memory: changes slots, collects logs, answers the host.

use slat::{Machine, NoSlot, Participant, Reserve};

use crate::hands::Hands;

/// A participant with tables in hand, for everything that no vCPU does. One for each thread that does such work at the
/// same time; it can move to another thread between calls.
#[derive(Debug)]
pub struct Worker<'m, M: Machine> {
    pub(crate) hands: Hands<'m, M>,
    pub(crate) statistics: WorkerStatistics,
}

/// What a worker has done since it was made. The engine's own counters are in
/// [`Worker::participant`]`().counters`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct WorkerStatistics {
    /// Blocks that eager split has split.
    pub eager_splits: u64,
    /// Times that eager split ended early because there was no memory for tables. Faults split the rest.
    pub eager_splits_ended: u64,
    /// Leaves that were write-protected.
    pub protected: u64,
    /// Dirty pages that were taken out of logs, and entries of dirty rings that were reset.
    pub collected: u64,
    /// Tables that became blocks on request.
    pub collapsed: u64,
}

impl<'m, M: Machine> Worker<'m, M> {
    pub(crate) fn new(machine: &'m M) -> Result<Self, NoSlot> {
        Ok(Self { hands: Hands::new(machine)?, statistics: WorkerStatistics::default() })
    }

    /// Its participant, for the engine's own operations and their counters.
    pub fn participant(&self) -> &Participant<'m, M> {
        &self.hands.participant
    }

    /// Participant and reserve, as the engine's operations want them.
    pub fn parts(&mut self) -> (&mut Participant<'m, M>, &mut Reserve<'m, M>) {
        (&mut self.hands.participant, &mut self.hands.reserve)
    }

    /// What it has done.
    pub fn statistics(&self) -> &WorkerStatistics {
        &self.statistics
    }
}
