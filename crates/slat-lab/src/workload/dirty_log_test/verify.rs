//! Whether what a collection says fits what is in memory, by the rules of the kernel's test.
//!
//! Guests write the number of the round. A page that the collection of a round reports was written in it or in the one
//! before, after that one's collection. A page that it does not report may have been written after the collection; then
//! the next one must report it.
//!
//! Where vCPUs have dirty rings, a page may be in the ring whose write is still to come: the vCPU had to leave the guest
//! because of the ring before it could make it. That is the last page of its ring; and once a round for each vCPU the
//! write that was pending comes a round late.

use std::sync::atomic::Ordering;

use serde::{Deserialize, Serialize};

use crate::contents::Words;

/// Bits of a word of a bitmap.
const WORD: u64 = 64;

/// What was compared, and what was wrong.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct Bits {
    /// Pages that were reported and compared.
    pub(super) dirty: u64,
    /// Pages that were not.
    pub(super) clear: u64,
    /// Pages of which the next collection was expected to report them.
    pub(super) track_next: u64,
    /// Those of them that it did not.
    pub(super) missing: u64,
    /// Reported pages with a value too old, or of no round.
    pub(super) stale: u64,
    /// Pages that were not reported, with a value from later than the collection.
    pub(super) early: u64,
}

/// The bits of one collection, and what the vCPUs' rings ended with.
#[derive(Clone, Debug)]
pub(super) struct Collected {
    pub(super) bitmap: Vec<u64>,
    /// For each ring: the last page that was ever taken from it.
    pub(super) last: Vec<Option<u64>>,
}

impl Collected {
    pub(super) fn new(pages: u64, rings: usize) -> Self {
        Self { bitmap: vec![0; pages.div_ceil(WORD) as usize], last: vec![None; rings] }
    }

    /// Page `page` is reported, by this ring.
    pub(super) fn add(&mut self, page: u64, ring: usize) {
        self.last[ring] = Some(page);
        if let Some(word) = self.bitmap.get_mut((page / WORD) as usize) {
            *word |= 1 << (page % WORD);
        }
    }

    fn has(&self, page: u64) -> bool {
        self.bitmap[(page / WORD) as usize] >> (page % WORD) & 1 == 1
    }
}

/// Compares round after round.
#[derive(Debug)]
pub(super) struct Verifier<'a> {
    memory: &'a dyn Words,
    /// Bytes of a page of the host.
    page: u64,
    /// Pages of the host.
    pages: u64,
    /// Every so many pages of the host there is one that guests write.
    step: u64,
    /// Which pages the next collection must report.
    track: Vec<bool>,
    pub(super) bits: Bits,
}

impl<'a> Verifier<'a> {
    /// Guests write every `step`-th of `pages` pages of the host, of `page` bytes each.
    pub(super) fn new(memory: &'a dyn Words, (page, pages, step): (u64, u64, u64)) -> Self {
        Self {
            memory,
            page,
            pages,
            step,
            track: vec![false; pages as usize],
            bits: Bits::default(),
        }
    }

    /// Pages of the host.
    pub(super) fn pages(&self) -> u64 {
        self.pages
    }

    /// `log` was collected while the guests wrote `round`; they have stopped since.
    pub(super) fn compare(&mut self, log: &Collected, round: u64) {
        // With rings: how many pages may be a round too old.
        let mut late = log.last.len();
        for page in (0..self.pages).step_by(self.step as usize) {
            let value = self.value(page);
            let reported = log.has(page);
            self.look_for_tracked(page, reported);
            if reported {
                self.bits.dirty += 1;
                let right = value == round || value + 1 == round || {
                    let is_late = value + 2 == round && late > 0;
                    late -= usize::from(is_late);
                    is_late || value < round && log.last.contains(&Some(page))
                };
                self.bits.stale += u64::from(!right);
            } else {
                self.bits.clear += 1;
                self.bits.early += u64::from(value > round);
                self.track[page as usize] = value == round;
            }
        }
    }

    /// `log` was collected after the guests had stopped for good: it has everything that is still expected.
    pub(super) fn finish(&mut self, log: &Collected) {
        for page in (0..self.pages).step_by(self.step as usize) {
            self.look_for_tracked(page, log.has(page));
        }
    }

    fn look_for_tracked(&mut self, page: u64, reported: bool) {
        if std::mem::take(&mut self.track[page as usize]) {
            self.bits.track_next += 1;
            self.bits.missing += u64::from(!reported);
        }
    }

    fn value(&self, page: u64) -> u64 {
        self.memory.word(page * self.page).map_or(0, |word| word.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use slat_model::{Backing, HostMemory, Model};

    use super::*;

    const PAGES: u64 = 70;

    fn memory() -> Arc<HostMemory> {
        let model = Model::builder().build().unwrap();
        model.host_memory(PAGES * 4096, Backing::Anonymous).unwrap()
    }

    fn store(memory: &HostMemory, page: u64, value: u64) {
        memory.word(page * 4096).unwrap().store(value, Ordering::Relaxed);
    }

    fn log(pages: &[u64], rings: usize) -> Collected {
        let mut log = Collected::new(PAGES, rings.max(1));
        pages.iter().for_each(|&page| log.add(page, 0));
        log.last.truncate(rings);
        log
    }

    #[test]
    fn a_reported_page_is_of_this_round_or_the_one_before() {
        let memory = memory();
        let mut verifier = Verifier::new(&memory, (4096, PAGES, 1));
        for (page, value) in [(1, 5), (2, 4), (3, 3), (4, 6)] {
            store(&memory, page, value);
        }
        verifier.compare(&log(&[1, 2, 3, 4], 0), 5);
        let Bits { dirty, clear, stale, early, .. } = verifier.bits;
        assert_eq!((dirty, clear, stale, early), (4, 66, 2, 0));
    }

    #[test]
    fn a_page_of_this_round_that_is_not_reported_must_be_next_time() {
        let memory = memory();
        let mut verifier = Verifier::new(&memory, (4096, PAGES, 1));
        store(&memory, 68, 5);
        store(&memory, 69, 5);
        verifier.compare(&log(&[], 0), 5);
        assert_eq!((verifier.bits.track_next, verifier.bits.missing), (0, 0));
        verifier.compare(&log(&[68], 0), 6);
        assert_eq!((verifier.bits.track_next, verifier.bits.missing), (2, 1));
        store(&memory, 7, 6);
        verifier.compare(&log(&[], 0), 6);
        verifier.finish(&log(&[], 0));
        assert_eq!((verifier.bits.track_next, verifier.bits.missing), (3, 2));
    }

    #[test]
    fn a_page_that_is_not_reported_is_not_of_a_later_round() {
        let memory = memory();
        let mut verifier = Verifier::new(&memory, (4096, PAGES, 1));
        store(&memory, 0, 6);
        verifier.compare(&log(&[], 0), 5);
        assert_eq!(verifier.bits.early, 1);
    }

    #[test]
    fn with_a_ring_the_last_page_and_one_more_may_be_older() {
        let memory = memory();
        let mut verifier = Verifier::new(&memory, (4096, PAGES, 1));
        for (page, value) in [(1, 3), (2, 3), (3, 1)] {
            store(&memory, page, value);
        }
        verifier.compare(&log(&[1, 3], 1), 5);
        assert_eq!(verifier.bits.stale, 0);
        verifier.compare(&log(&[1, 2, 3], 1), 5);
        assert_eq!(verifier.bits.stale, 1);
    }

    #[test]
    fn only_pages_that_guests_write_are_compared() {
        let memory = memory();
        let mut verifier = Verifier::new(&memory, (4096, PAGES, 16));
        verifier.compare(&log(&[0, 1, 16], 0), 1);
        assert_eq!((verifier.bits.dirty, verifier.bits.clear), (2, 3));
    }
}
