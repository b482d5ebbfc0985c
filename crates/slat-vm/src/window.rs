//! How many pages fault-around maps for one fault of a vCPU: as many as its guesses are worth.
//!
//! A window that adapts grows while the pages that were mapped ahead are used, and shrinks when their access flags say
//! that they were not. A vCPU judges its own guesses only, a few faults after it made them, by looking at eight pages of
//! each window at most. A window of one page makes no guess; then a fault right beside the last one says that a guess
//! would have been good.

use slat::{Format, Gpa, Lookup, Machine, Pin, Tree};

/// Windows that are remembered until they are judged: so many faults a guest has to use what was guessed.
const KEPT: usize = 4;
/// Pages of a window that are looked at.
const LOOKED_AT: usize = 8;

/// A vCPU's window, and what it has guessed.
#[derive(Debug, Default)]
pub(crate) struct Window {
    /// log2 of its pages; `None` before the first fault.
    size: Option<u32>,
    /// The page of the last fault.
    last: Option<u64>,
    kept: [Guess; KEPT],
    /// Where the next one goes, in the place of the oldest.
    next: usize,
}

/// Pages that were mapped ahead of use in one window.
#[derive(Clone, Copy, Debug, Default)]
struct Guess {
    space: u16,
    pages: [u64; LOOKED_AT],
    count: usize,
}

impl Window {
    /// Pages of the window of the next fault. `first` and `most` are powers of two.
    pub(crate) fn pages(&self, first: u32, most: Option<u32>) -> u32 {
        let size = self.size.unwrap_or(first.ilog2());
        most.map_or(first, |most| (1 << size).min(most))
    }

    /// A fault at `page`, of which the window will be used: judges the oldest guess, and remembers that nothing is
    /// guessed yet for this one.
    pub(crate) fn turn<F: Format, M: Machine>(
        &mut self,
        trees: &[Tree<'_, F, M>],
        space: u16,
        pin: &Pin<'_, M>,
        page: u64,
        (first, most): (u32, u32),
    ) {
        let size = self.size.unwrap_or(first.ilog2());
        let oldest = core::mem::take(&mut self.kept[self.next]);
        let beside = self.last.is_some_and(|last| last.abs_diff(page) == 1);
        let grown = size + u32::from(1 << size < most);
        let judged = if oldest.space == space { oldest.used(trees, pin) } else { None };
        self.size = Some(match judged {
            // Half of what was looked at is worth a fault that was spared.
            Some((used, of)) if 2 * used >= of => grown,
            Some((used, of)) if 4 * used < of => size.saturating_sub(1),
            None if size == 0 && beside => grown,
            _ => size,
        });
        self.last = Some(page);
        self.kept[self.next].space = space;
    }

    /// The page at `gpa` was mapped ahead, in a window of so many pages.
    pub(crate) fn guessed(&mut self, gpa: u64, page_shift: u32, window: u32) {
        let guess = &mut self.kept[self.next];
        let every = u64::from(window) / LOOKED_AT as u64;
        let chosen = every < 2 || (gpa >> page_shift).is_multiple_of(every);
        if chosen && guess.count < LOOKED_AT {
            guess.pages[guess.count] = gpa;
            guess.count += 1;
        }
    }

    /// Everything is mapped that will be for this fault.
    pub(crate) fn keep(&mut self) {
        self.next = (self.next + 1) % KEPT;
    }
}

impl Guess {
    /// How many of its pages were used, of those that are still mapped; `None` if there are none.
    fn used<F: Format, M: Machine>(
        &self,
        trees: &[Tree<'_, F, M>],
        pin: &Pin<'_, M>,
    ) -> Option<(usize, usize)> {
        let tree = trees.first()?;
        let (mut used, mut mapped) = (0, 0);
        for &page in &self.pages[..self.count] {
            if let Ok(Lookup::Mapped { template, .. }) = tree.look_up(pin, Gpa(page)) {
                mapped += 1;
                used += usize::from(tree.attributes(template).accessed);
            }
        }
        (mapped > 0).then_some((used, mapped))
    }
}
