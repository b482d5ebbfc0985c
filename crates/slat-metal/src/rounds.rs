//! Whether what a collection says fits what is in memory, by the rules of the kernel's `dirty_log_test`.
//!
//! Guests write the number of the round. A page that the collection of a round reports was written in it or in the one
//! before, after that one's collection. A page that it does not report may have been written after the collection; then
//! the next one must report it.

use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

/// What was compared, and what was wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Bits {
    /// Pages that were reported.
    pub dirty: u64,
    /// Pages that were not.
    pub clear: u64,
    /// Pages that the next collection had to report.
    pub track_next: u64,
    /// Those that it did not.
    pub missing: u64,
    /// Reported pages with a value too old.
    pub stale: u64,
    /// Pages that were not reported, with a value from later than the collection.
    pub early: u64,
}

/// Compares round after round. `W` reads the first word of a page of guest memory.
#[derive(Debug)]
pub struct Verifier<W> {
    word: W,
    /// Every so many pages there is one that guests write.
    step: usize,
    /// Which pages the next collection must report.
    track: Vec<bool>,
    /// What was compared.
    pub bits: Bits,
}

impl<W: Fn(u64) -> u64> Verifier<W> {
    /// Of so many pages, of which guests write every `step`-th.
    pub fn new(pages: u64, step: u64, word: W) -> Self {
        let (step, track) = (step.max(1) as usize, alloc::vec![false; pages as usize]);
        Self { word, step, track, bits: Bits::default() }
    }

    /// The log, of which `has` says what is in it, was collected while the guests wrote `round`; they have stopped since.
    /// `excused` says of a reported page and its value that is too old why it may be.
    pub fn compare(
        &mut self,
        has: impl Fn(u64) -> bool,
        mut excused: impl FnMut(u64, u64) -> bool,
        round: u64,
    ) {
        let bits = &mut self.bits;
        for (page, track) in (0..).zip(&mut self.track).step_by(self.step) {
            let (value, reported) = ((self.word)(page), has(page));
            bits.look_for_tracked(track, reported);
            if reported {
                bits.dirty += 1;
                let right = value == round || value + 1 == round || excused(page, value);
                bits.stale += u64::from(!right);
            } else {
                bits.clear += 1;
                bits.early += u64::from(value > round);
                *track = value == round;
            }
        }
    }

    /// The log was collected after the guests had stopped for good: it has everything that is still expected.
    pub fn finish(&mut self, has: impl Fn(u64) -> bool) {
        for (page, track) in (0..).zip(&mut self.track).step_by(self.step) {
            self.bits.look_for_tracked(track, has(page));
        }
    }
}

impl Bits {
    fn look_for_tracked(&mut self, track: &mut bool, reported: bool) {
        if core::mem::take(track) {
            self.track_next += 1;
            self.missing += u64::from(!reported);
        }
    }

    /// Adds what another way of logging gave.
    pub fn add(&mut self, other: &Self) {
        self.dirty += other.dirty;
        self.clear += other.clear;
        self.track_next += other.track_next;
        self.missing += other.missing;
        self.stale += other.stale;
        self.early += other.early;
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    const PAGES: u64 = 70;

    fn never(_: u64, _: u64) -> bool {
        false
    }

    #[test]
    fn a_reported_page_is_of_this_round_or_the_one_before() {
        let values = [0, 5, 4, 3, 6];
        let mut verifier = Verifier::new(5, 1, |page| values[page as usize]);
        verifier.compare(|page| page > 0, never, 5);
        let Bits { dirty, clear, stale, early, .. } = verifier.bits;
        assert_eq!((dirty, clear, stale, early), (4, 1, 2, 0));
    }

    #[test]
    fn a_page_of_this_round_that_is_not_reported_must_be_next_time() {
        let memory = RefCell::new([0; PAGES as usize]);
        let mut verifier = Verifier::new(PAGES, 1, |page| memory.borrow()[page as usize]);
        memory.borrow_mut()[68..].fill(5);
        verifier.compare(|_| false, never, 5);
        assert_eq!((verifier.bits.track_next, verifier.bits.missing), (0, 0));
        verifier.compare(|page| page == 68, never, 6);
        assert_eq!((verifier.bits.track_next, verifier.bits.missing), (2, 1));
        memory.borrow_mut()[7] = 6;
        verifier.compare(|_| false, never, 6);
        verifier.finish(|_| false);
        assert_eq!((verifier.bits.track_next, verifier.bits.missing), (3, 2));
    }

    #[test]
    fn only_pages_that_guests_write_are_compared() {
        let mut verifier = Verifier::new(PAGES, 16, |_| 0);
        verifier.compare(|page| [0, 1, 16].contains(&page), never, 1);
        assert_eq!((verifier.bits.dirty, verifier.bits.clear), (2, 3));
    }

    #[test]
    fn a_page_that_is_excused_is_not_stale() {
        let mut verifier = Verifier::new(2, 1, |_| 1);
        verifier.compare(|_| true, |page, value| (page, value) == (0, 1), 5);
        assert_eq!(verifier.bits.stale, 1);
    }

    #[test]
    fn a_page_that_is_not_reported_is_not_of_a_later_round() {
        let mut verifier = Verifier::new(1, 1, |_| 6);
        verifier.compare(|_| false, never, 5);
        assert_eq!(verifier.bits.early, 1);
    }
}
