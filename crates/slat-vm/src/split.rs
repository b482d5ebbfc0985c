//! Eager split: blocks become pages before a log makes the guest fault for it.

use slat::{Error, Format, Gpa, GpaRange, Level, Machine};

use crate::{Host, OtherMachine, Vm, Worker};

impl<'m, F: Format, M: Machine, H: Host> Vm<'m, F, M, H> {
    /// Splits every block that `range` touches into pages, a chunk ([`VmOptions::eager_split`](crate::VmOptions), or
    /// the smallest block) at a time. No translation and no permission changes, and any number of workers may do it at
    /// the same time, on the same range or parts of it. Addresses beyond the tree are left out.
    ///
    /// Between chunks, outside of pins, the worker's reserve is topped up to what a chunk can need. When there is no
    /// memory it ends: `Ok(false)`, the rest stays as it is and is split by the faults that need it. Costs a walk a
    /// chunk, and what [`Tree::split`](slat::Tree::split) says for each block.
    ///
    /// # Errors
    /// [`OtherMachine`].
    pub fn split(&self, worker: &mut Worker<'m, M>, range: GpaRange) -> Result<bool, OtherMachine> {
        self.admit(worker.participant.machine())?;
        let geometry = self.tree().geometry();
        let page = geometry.page_size();
        let start = range.start().0 & !(page - 1);
        let end = range.end().0.min(geometry.limit().0);
        let end = end.checked_next_multiple_of(page).unwrap_or(geometry.limit().0);
        let chunk = self.options.eager_split;
        let chunk = chunk.unwrap_or_else(|| geometry.size(Level::new(2).unwrap_or(Level::LAST)));
        Ok(self.split_in_chunks(worker, (start, end), chunk))
    }

    /// Whether all of it was split.
    pub(crate) fn split_in_chunks(
        &self,
        worker: &mut Worker<'m, M>,
        (start, end): (u64, u64),
        chunk: u64,
    ) -> bool {
        let mut at = start;
        while at < end {
            let next = (at | (chunk - 1)).saturating_add(1).min(end);
            if let Some(part) = GpaRange::new(Gpa(at), next - at)
                && !self.split_part(worker, part)
            {
                worker.statistics.eager_splits_ended += 1;
                return false;
            }
            at = next;
        }
        true
    }

    /// Splits with a reserve for all of `part`, if there is the memory. Whether it was done.
    pub(crate) fn split_part(&self, worker: &mut Worker<'m, M>, part: GpaRange) -> bool {
        self.trees().iter().all(|tree| {
            let mut rest = part;
            loop {
                let Worker { participant, reserve, statistics } = worker;
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
