//! Taking a range out of a tree, with the dirty state that hardware has kept there going to the log.

use slat::{Edges, Error, Format, Gpa, GpaRange, Machine, Memory, Participant, Reserve, Tree};

use crate::hands::Hands;
use crate::{Host, InvalidateError, Vm, Worker};

/// The largest table has 8192 entries (64K granule).
const WORDS: usize = 8192 / 64;

/// What was dirty in one table's worth of pages, or in the block that covers them.
struct Taken {
    part: GpaRange,
    page_shift: u32,
    pages: [u64; WORDS],
    block: Option<GpaRange>,
}

impl Taken {
    fn hear(&mut self, dirty: GpaRange) {
        let page = |gpa: Gpa| ((gpa.0 - self.part.start().0) >> self.page_shift) as usize;
        if dirty.start() < self.part.start() || dirty.end() > self.part.end() {
            self.block = Some(dirty);
            return;
        }
        for page in page(dirty.start())..page(dirty.end()) {
            self.pages[page / 64 % WORDS] |= 1 << (page % 64);
        }
    }

    fn pages(&self) -> impl Iterator<Item = Gpa> + '_ {
        let size = 1 << self.page_shift;
        let block = self.block.map_or(0..0, |block| block.start().0..block.end().0);
        let block = block.step_by(size).map(Gpa);
        let words = self.pages.iter().enumerate().filter(|&(_, &word)| word != 0);
        let pages = words.flat_map(|(index, &word)| {
            (0..64).filter(move |bit| word >> bit & 1 == 1).map(move |bit| index * 64 + bit)
        });
        let start = self.part.start().0;
        block.chain(pages.map(move |page| Gpa(start + ((page as u64) << self.page_shift))))
    }
}

impl<'m, F: Format, M: Machine, H: Host> Vm<'m, F, M, H> {
    /// Unmaps `range` in an address space without needing memory: a block that reaches beyond it goes as a whole. Pages
    /// that hardware had marked dirty are in their slot's log when it returns, and what the guest has written past the
    /// caches is seen by the host.
    pub(crate) fn unmap_whole(
        &self,
        worker: &mut Worker<'m, M>,
        space: u16,
        range: GpaRange,
    ) -> Result<(), InvalidateError> {
        let Hands { participant, reserve, .. } = &mut worker.hands;
        for tree in self.trees(space) {
            if !tree.format().tracks_dirty() {
                self.unmap_in(tree, (participant, reserve), range, Edges::Whole, |_| {})
                    .map_err(InvalidateError::Tree)?;
                continue;
            }
            let mut at = range.start().0;
            while at < range.end().0 {
                let end = (at | ((1 << (F::PAGE_SHIFT + F::INDEX_BITS)) - 1)).saturating_add(1);
                let end = end.min(range.end().0);
                let Some(part) = GpaRange::new(Gpa(at), end - at) else { break };
                let (page_shift, pages) = (F::PAGE_SHIFT, [0; WORDS]);
                let mut taken = Taken { part, page_shift, pages, block: None };
                // Rule 8: from the first exchange until the pages are marked, collections know of it.
                let moving = self.transit.enter();
                let hear = |dirty| taken.hear(dirty);
                let unmapped =
                    self.unmap_in(tree, (participant, reserve), part, Edges::Whole, hear);
                for gpa in taken.pages() {
                    self.mark_taken(participant, space, gpa);
                }
                drop(moving);
                unmapped.map_err(InvalidateError::Tree)?;
                at = end;
            }
        }
        Ok(())
    }

    /// The engine's unmap, with the cache maintenance that a guest makes necessary which can bypass the caches: what
    /// it has written in memory must not be hidden by a line that was there before (Arm ARM DDI 0487,
    /// part B2, "Mismatched memory attributes").
    pub(crate) fn unmap_in(
        &self,
        tree: &Tree<'m, F, M>,
        (participant, reserve): (&mut Participant<'m, M>, &mut Reserve<'m, M>),
        range: GpaRange,
        edges: Edges,
        mut dirty: impl FnMut(GpaRange),
    ) -> Result<u64, Error> {
        if self.options.coherent_data {
            return tree.unmap(participant, reserve, range, edges, dirty);
        }
        tree.unmap_leaves(participant, reserve, range, edges, |leaf| {
            if tree.attributes(leaf.template).memory == Memory::Normal {
                self.machine().clean_data(leaf.output, leaf.range.size());
            }
            if leaf.dirty {
                dirty(leaf.range);
            }
        })
    }
}
