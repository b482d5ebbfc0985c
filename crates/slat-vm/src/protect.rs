//! Which pages of a log are write-protected together: as few walks and invalidations as the bits allow.
//!
//! A collection says for each word of 64 pages what it took and what it left. Where nothing is left, every page of the
//! word is either taken just now or was protected before, so the word can be protected as part of a longer stretch: one
//! walk, one invalidation, and entries that are read-only already cost a load. Words between such ones that have no
//! bits are walked over too, up to a limit. Where bits are left, their pages must stay writable, or they would fault
//! once more than they have to: these words are protected by mask. So is a word that no other joins.

use slat::{Format, Gpa, GpaRange, Lookup, Machine};

use crate::bitmap::{SECTION, Taken};
use crate::split::SplitJob;
use crate::{Host, Vm, Worker};

/// Words without bits that a stretch goes over: looking at 64 entries costs much less than an invalidation.
const GAP: u64 = 64;

/// What happens to blocks before they are protected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Split {
    /// Nothing: the pages around those that are protected are read-only anyway.
    Nothing,
    /// Those that reach beyond what is protected are split, so that the rest stays writable.
    Edges,
    /// All are split, this many bytes at a time.
    Chunks(u64),
}

/// The stretch that has grown so far.
pub(crate) struct Protector<'a, 'm, F: Format, M: Machine, H: Host> {
    vm: &'a Vm<'m, F, M, H>,
    worker: &'a mut Worker<'m, M>,
    space: u16,
    slot: GpaRange,
    split: Split,
    stretch: Option<Stretch>,
}

/// Words of which nothing is left.
struct Stretch {
    first: u64,
    end: u64,
    /// What was taken out of the first.
    bits: u64,
}

impl<'a, 'm, F: Format, M: Machine, H: Host> Protector<'a, 'm, F, M, H> {
    pub(crate) fn new(
        vm: &'a Vm<'m, F, M, H>,
        worker: &'a mut Worker<'m, M>,
        (space, slot): (u16, GpaRange),
        split: Split,
    ) -> Self {
        Self { vm, worker, space, slot, split, stretch: None }
    }

    /// The worker, between two words.
    pub(crate) fn worker(&mut self) -> &mut Worker<'m, M> {
        self.worker
    }

    /// The next word, in order: what was taken out of it.
    ///
    /// # Errors
    /// What the tree refused.
    #[inline]
    pub(crate) fn word(&mut self, word: u64, taken: Taken) -> Result<(), slat::Error> {
        match (taken.bits, taken.left) {
            (0, 0) => Ok(()),
            (0, _) => self.finish(),
            (bits, 0) => self.whole(word, bits),
            (bits, _) => {
                self.finish()?;
                self.masked(word, bits)
            }
        }
    }

    fn whole(&mut self, word: u64, bits: u64) -> Result<(), slat::Error> {
        match &mut self.stretch {
            Some(stretch) if word - stretch.end <= GAP => stretch.end = word + 1,
            _ => {
                self.finish()?;
                self.stretch = Some(Stretch { first: word, end: word + 1, bits });
            }
        }
        Ok(())
    }

    /// Protects the stretch that has grown so far.
    ///
    /// # Errors
    /// What the tree refused.
    pub(crate) fn finish(&mut self) -> Result<(), slat::Error> {
        let Some(Stretch { first, end, bits }) = self.stretch.take() else { return Ok(()) };
        if end == first + 1 && !matches!(self.split, Split::Chunks(_)) {
            return self.masked(first, bits);
        }
        let start = self.address(first);
        let end = self.address(end).min(self.slot.end().0);
        let Some(range) = GpaRange::new(Gpa(start), end.saturating_sub(start)) else {
            return Ok(());
        };
        match self.split {
            Split::Nothing => {}
            Split::Chunks(chunk) => {
                SplitJob::new(self.space, (start, end), chunk).run(self.vm, self.worker);
            }
            Split::Edges => {
                let page = self.page_size();
                self.split_edge(start, start);
                self.split_edge(end, end - page);
            }
        }
        self.vm.protect(self.worker, self.space, range)
    }

    /// If `edge` lies inside of the block that `page` is part of, splits it.
    fn split_edge(&mut self, edge: u64, page: u64) {
        let pin = self.worker.hands.participant.pin();
        let trees = self.vm.trees(self.space);
        let crosses = trees.iter().any(|tree| match tree.look_up(&pin, Gpa(page)) {
            Ok(Lookup::Mapped { level, .. }) => edge & (tree.geometry().size(level) - 1) != 0,
            Ok(_) => false,
            // Being changed: it may become a block.
            Err(_) => true,
        });
        drop(pin);
        if crosses && let Some(page) = GpaRange::new(Gpa(page), self.page_size()) {
            self.vm.split_part(self.worker, self.space, page);
        }
    }

    fn masked(&mut self, word: u64, bits: u64) -> Result<(), slat::Error> {
        let first = self.address(word);
        let page = self.page_size();
        let skip = u64::from(bits.trailing_zeros());
        let pages = SECTION - skip - u64::from(bits.leading_zeros());
        // Without memory the block is protected as a whole: more faults, nothing lost.
        if self.split != Split::Nothing
            && let Some(range) = GpaRange::new(Gpa(first + skip * page), pages * page)
        {
            self.vm.split_part(self.worker, self.space, range);
        }
        for tree in self.vm.trees(self.space) {
            let Worker { hands, statistics } = &mut *self.worker;
            statistics.protected +=
                tree.write_protect_mask(&hands.participant, Gpa(first), bits, |_| {})?;
        }
        Ok(())
    }

    fn address(&self, word: u64) -> u64 {
        self.slot.start().0 + word * SECTION * self.page_size()
    }

    fn page_size(&self) -> u64 {
        self.vm.tree().geometry().page_size()
    }
}

impl<'m, F: Format, M: Machine, H: Host> Vm<'m, F, M, H> {
    /// Write-protects a range of an address space.
    pub(crate) fn protect(
        &self,
        worker: &mut Worker<'m, M>,
        space: u16,
        range: GpaRange,
    ) -> Result<(), slat::Error> {
        for tree in self.trees(space) {
            let leaves = tree.write_protect(&worker.hands.participant, range, |_| {})?;
            worker.statistics.protected += leaves;
        }
        Ok(())
    }
}
