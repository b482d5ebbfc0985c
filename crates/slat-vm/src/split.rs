//! Eager split: blocks become pages before a log makes the guest fault for it.

use slat::{Error, Format, Gpa, GpaRange, Level, Machine};

use crate::hands::Hands;
use crate::sync::{AtomicU64, AtomicUsize, Ordering};
use crate::{Host, OtherMachine, Vm, Worker};

/// Blocks to be split into pages, for any number of threads: each that [runs](Self::run) it takes one chunk after the
/// other until none is left. Nothing excludes anything, so it scales.
#[derive(Debug)]
pub struct SplitJob {
    space: u16,
    next: AtomicU64,
    end: u64,
    chunk: u64,
    ended: AtomicUsize,
}

impl SplitJob {
    pub(crate) fn new(space: u16, (start, end): (u64, u64), chunk: u64) -> Self {
        Self { space, next: AtomicU64::new(start), end, chunk, ended: AtomicUsize::new(0) }
    }

    /// Splits chunk after chunk, until there is no more, or no memory for tables; then it ends for all threads, and the
    /// rest is split by the faults that need it. Between chunks, outside of pins, the worker's reserve is topped up to
    /// what a chunk can need. A worker of another machine does nothing.
    pub fn run<'m, F: Format, M: Machine, H: Host>(
        &self,
        vm: &Vm<'m, F, M, H>,
        worker: &mut Worker<'m, M>,
    ) {
        if vm.admit(worker.hands.participant.machine()).is_err() {
            return;
        }
        while let Some(part) = self.take() {
            if !vm.split_part(worker, self.space, part) {
                worker.statistics.eager_splits_ended += 1;
                // No data goes with the counts: what a chunk is, each thread knows by itself.
                self.ended.fetch_add(1, Ordering::Relaxed);
                self.next.fetch_max(self.end, Ordering::Relaxed);
            }
        }
    }

    /// Whether everything that was taken was split; when all threads have returned, whether all was.
    pub fn is_complete(&self) -> bool {
        self.ended.load(Ordering::Relaxed) == 0
    }

    fn take(&self) -> Option<GpaRange> {
        let mut at = self.next.load(Ordering::Relaxed);
        loop {
            if at >= self.end {
                return None;
            }
            let next = (at | (self.chunk - 1)).saturating_add(1).min(self.end);
            let (relaxed, order) = (Ordering::Relaxed, Ordering::Relaxed);
            match self.next.compare_exchange(at, next, order, relaxed) {
                Ok(_) => return GpaRange::new(Gpa(at), next - at),
                Err(now) => at = now,
            }
        }
    }
}

impl<'m, F: Format, M: Machine, H: Host> Vm<'m, F, M, H> {
    /// The splitting of every block that `range` touches in address space `space`, a chunk
    /// ([`VmOptions::eager_split`](crate::VmOptions), or the smallest block) at a time. No translation and no permission
    /// changes. Addresses beyond the tree are left out.
    pub fn split_job(&self, space: u16, range: GpaRange) -> SplitJob {
        let geometry = self.tree().geometry();
        let page = geometry.page_size();
        let start = range.start().0 & !(page - 1);
        let end = range.end().0.min(geometry.limit().0);
        let end = end.checked_next_multiple_of(page).unwrap_or(geometry.limit().0);
        let chunk = self.options.eager_split;
        let chunk = chunk.unwrap_or_else(|| geometry.size(Level::new(2).unwrap_or(Level::LAST)));
        SplitJob::new(space, (start, end), chunk)
    }

    /// Splits every block that `range` touches, in every address space, by this worker alone. `Ok(false)`: there was no
    /// memory, and the rest stays as it is. Costs a walk a chunk, and what [`Tree::split`](slat::Tree::split) says for
    /// each block.
    ///
    /// # Errors
    /// [`OtherMachine`].
    pub fn split(&self, worker: &mut Worker<'m, M>, range: GpaRange) -> Result<bool, OtherMachine> {
        self.admit(worker.hands.participant.machine())?;
        let mut complete = true;
        for space in 0..self.options.address_spaces {
            let job = self.split_job(space, range);
            job.run(self, worker);
            complete &= job.is_complete();
        }
        Ok(complete)
    }

    /// Splits with a reserve for all of `part`, if there is the memory. Whether it was done.
    pub(crate) fn split_part(
        &self,
        worker: &mut Worker<'m, M>,
        space: u16,
        part: GpaRange,
    ) -> bool {
        self.trees(space).iter().all(|tree| {
            let mut rest = part;
            loop {
                let Worker { hands: Hands { participant, reserve, .. }, statistics } = worker;
                let short = reserve.top_up(tree.tables_needed(rest, Level::LAST)).is_err();
                match tree.split(participant, reserve, rest, Level::LAST) {
                    Ok(blocks) => {
                        statistics.eager_splits += blocks;
                        return true;
                    }
                    Err(Error::NeedTables { at, .. }) if !short => {
                        let left = rest.end().0.saturating_sub(at.0);
                        match GpaRange::new(at, left) {
                            Some(left) => rest = left,
                            None => return true,
                        }
                    }
                    Err(_) => return false,
                }
            }
        })
    }
}
