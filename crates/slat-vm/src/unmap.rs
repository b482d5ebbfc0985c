//! Taking a range out of a tree, with the dirty state that hardware has kept there going to the log.

use slat::{Edges, Format, Gpa, GpaRange, Machine};

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
    /// that hardware had marked dirty are in their slot's log when it returns.
    pub(crate) fn unmap_whole(
        &self,
        worker: &mut Worker<'m, M>,
        space: u16,
        range: GpaRange,
    ) -> Result<(), InvalidateError> {
        for tree in self.trees(space) {
            let whole = |hands: &mut Hands<'m, M>, part, dirty: &mut dyn FnMut(GpaRange)| {
                let Hands { participant, reserve, .. } = hands;
                tree.unmap(participant, reserve, part, Edges::Whole, dirty)
            };
            if !tree.format().tracks_dirty() {
                whole(&mut worker.hands, range, &mut |_| {}).map_err(InvalidateError::Tree)?;
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
                let unmapped = whole(&mut worker.hands, part, &mut |dirty| taken.hear(dirty));
                for gpa in taken.pages() {
                    self.mark_taken(worker, space, gpa);
                }
                drop(moving);
                unmapped.map_err(InvalidateError::Tree)?;
                at = end;
            }
        }
        Ok(())
    }
}
