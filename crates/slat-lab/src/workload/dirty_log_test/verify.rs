//! Whether what a collection says fits what is in memory, by the rules of the kernel's test: [`slat_metal::rounds`], and
//! what dirty rings add.
//!
//! Where vCPUs have dirty rings, a page may be in the ring whose write is still to come: the vCPU had to leave the guest
//! because of the ring before it could make it. That is the last page of its ring; and once a round for each vCPU the
//! write that was pending comes a round late.

use std::sync::atomic::Ordering;

use slat_metal::rounds;
pub(super) use slat_metal::rounds::Bits;

use crate::contents::Words;

/// Bits of a word of a bitmap.
const WORD: u64 = 64;

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
pub(super) struct Verifier<'a> {
    rounds: rounds::Verifier<Box<dyn Fn(u64) -> u64 + 'a>>,
    /// Pages of the host.
    pages: u64,
}

impl<'a> Verifier<'a> {
    /// Guests write every `step`-th of `pages` pages of the host, of `page` bytes each.
    pub(super) fn new(memory: &'a dyn Words, (page, pages, step): (u64, u64, u64)) -> Self {
        let value = move |number: u64| {
            memory.word(number * page).map_or(0, |word| word.load(Ordering::Relaxed))
        };
        Self { rounds: rounds::Verifier::new(pages, step, Box::new(value)), pages }
    }

    /// Pages of the host.
    pub(super) fn pages(&self) -> u64 {
        self.pages
    }

    /// What was compared so far.
    pub(super) fn bits(&self) -> Bits {
        self.rounds.bits
    }

    /// `log` was collected while the guests wrote `round`; they have stopped since.
    pub(super) fn compare(&mut self, log: &Collected, round: u64) {
        // With rings: how many pages may be a round too old.
        let mut late = log.last.len();
        let excused = |page, value| {
            let is_late = value + 2 == round && late > 0;
            late -= usize::from(is_late);
            is_late || value < round && log.last.contains(&Some(page))
        };
        self.rounds.compare(|page| log.has(page), excused, round);
    }

    /// `log` was collected after the guests had stopped for good: it has everything that is still expected.
    pub(super) fn finish(&mut self, log: &Collected) {
        self.rounds.finish(|page| log.has(page));
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
    fn with_a_ring_the_last_page_and_one_more_may_be_older() {
        let memory = memory();
        let mut verifier = Verifier::new(&memory, (4096, PAGES, 1));
        for (page, value) in [(1, 3), (2, 3), (3, 1)] {
            store(&memory, page, value);
        }
        verifier.compare(&log(&[1, 3], 1), 5);
        assert_eq!(verifier.bits().stale, 0);
        verifier.compare(&log(&[1, 2, 3], 1), 5);
        assert_eq!(verifier.bits().stale, 1);
    }
}
