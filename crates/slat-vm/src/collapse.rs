//! Putting blocks back in the place of pages, ahead of the faults that would do it one by one.

use slat::{Format, Gpa, GpaRange, Level, Machine};

use crate::hands::Hands;
use crate::leaf::Wanted;
use crate::slot::Facts;
use crate::template::{HOST_WRITABLE, LeafKind};
use crate::{Access, Host, LogError, SlotId, Vm, Worker};

impl<'m, F: Format, M: Machine, H: Host> Vm<'m, F, M, H> {
    /// Turns the pages of a slot into blocks again where all of a block's are mapped, contiguous and alike, such as
    /// after a log that split them. Returns how many tables became blocks. Pages that a log has left read-only become
    /// writable first, where the host lets them be written: one read-only page would make its whole block so.
    ///
    /// The guest may run meanwhile, and its translations stay what they were; a fault in a table that is being collapsed
    /// comes again. Only leaves that came from one page of the host are put together, and never into more than
    /// [`SlotConfig::max_page_size`](crate::SlotConfig). The host is asked once for each block, and changes of slots wait
    /// meanwhile, for a gibibyte at most. Costs an exchange and a store an entry, and one invalidation for up to 8
    /// blocks. A pinned slot is left as it was mapped.
    ///
    /// # Errors
    /// [`LogError::NoSlot`]; [`LogError::Enabled`] while a log is on, which needs pages; [`LogError::OtherMachine`];
    /// [`LogError::Tree`]. Some blocks may have been put together then.
    pub fn collapse(
        &self,
        worker: &mut Worker<'m, M>,
        id: impl Into<SlotId>,
    ) -> Result<u64, LogError> {
        /// How much is done under one lock.
        const AT_ONCE: u64 = 1 << 30;
        let id = id.into();
        let mut collapsed = 0;
        let mut offset = 0;
        loop {
            let Worker { hands: Hands { participant, .. }, .. } = &mut *worker;
            // No log begins while the lock is held, so pages may be made writable.
            let mut change = self.slots.lock(participant)?;
            let version = change.map().get(id).ok_or(LogError::NoSlot)?;
            if version.log.is_some() {
                return Err(LogError::Enabled);
            }
            let (facts, pinned) = (version.facts(), version.config.pinned);
            let start = facts.range.start().0 + offset;
            if start >= facts.range.end().0 || version.private.is_some() || pinned {
                break;
            }
            let end = (start | (AT_ONCE - 1)).saturating_add(1).min(facts.range.end().0);
            let mut at = start;
            while at < end {
                let (run, level) = self.next_blocks(&facts, at, end);
                at = run.1;
                let Some(range) = GpaRange::new(Gpa(run.0), run.1 - run.0) else { continue };
                if level == Level::LAST {
                    continue;
                }
                let who = change.who();
                for tree in self.trees(id.space) {
                    if !facts.read_only {
                        let writable = LeafKind {
                            write: true,
                            host_writable: true,
                            old: true,
                            ..LeafKind::default()
                        };
                        let relaxed =
                            tree.relax(who, range, HOST_WRITABLE, self.template(writable))?;
                        if relaxed > 0 {
                            self.host.dirtied(facts.hva_of(range.start()), range.size());
                        }
                    }
                    collapsed += tree.collapse(who, range, level)?;
                }
            }
            offset = end - facts.range.start().0;
        }
        worker.statistics.collapsed += collapsed;
        Ok(collapsed)
    }

    /// The next addresses from `at` on that may be blocks of the same level, up to `end`, and that level; the last level
    /// where there can be none.
    fn next_blocks(&self, facts: &Facts, at: u64, end: u64) -> ((u64, u64), Level) {
        let geometry = self.tree().geometry();
        let mut run: Option<((u64, u64), Level)> = None;
        let mut next = at;
        while next < end {
            let (piece, level) = self.block_at(facts, Gpa(next));
            // What lies before the block's own start was seen already, or is another slot's.
            let piece_end = piece.saturating_add(geometry.size(level)).min(end);
            match &mut run {
                None => run = Some(((next, piece_end), level)),
                Some((range, same)) if *same == level => range.1 = piece_end,
                Some(_) => break,
            }
            next = piece_end;
        }
        run.unwrap_or(((at, end), Level::LAST))
    }

    /// Where the largest leaf that the host and the slot allow at `gpa` begins, and its level. Where the host has no
    /// page, a page.
    fn block_at(&self, facts: &Facts, gpa: Gpa) -> (u64, Level) {
        let page = self.host.page(facts.hva_of(gpa), Access::Read).ok();
        let wanted = page.and_then(|page| Wanted::new(self.tree().format(), facts, gpa, &page));
        let level = wanted.map_or(Level::LAST, |wanted| wanted.level);
        (gpa.0 & !(self.tree().geometry().size(level) - 1), level)
    }
}
