//! Whether a dirty log is true: contents compared with what collections reported.
//!
//! The audit plays live migration. It keeps a copy of the first word of each page and renews it for the pages that a
//! collection reports, after the collection has made them read-only again. Guests store values that never come twice, so
//! a page whose word differs from the copy was changed since.
//!
//! # Why the comparison is exact while vCPUs run
//! A store needs a translation that can be written, and the fault that made it so marks the page before its vCPU
//! resumes. So before each collection: all words are sampled; then every vCPU that runs completes an access, and with it
//! the fault that was under way. Whatever the sample shows changed has been marked by then, by its own vCPU or by another
//! one whose fault it profited from: a page that the sample shows changed and the collection does not report is lost.
//! That holds for each way of logging: with dirty rings, the fault that makes a page writable puts it into the ring of
//! its vCPU; with hardware's dirty state, the entry is dirty before the store is done.
//! There is no slack of a round, and no store is left out, since the copy must equal memory when all vCPUs have
//! stopped and the log has been collected once more.

use alloc::collections::BTreeSet;
use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

/// Lost pages that the report names.
const NAMED: usize = 10;

/// What the audit found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Found {
    /// Guest pages that were watched.
    pub pages: u64,
    /// Collections of the log that were compared with memory.
    pub collections: u64,
    /// How many of them while vCPUs ran.
    pub collections_while_running: u64,
    /// Page changes that the log reported, over all collections.
    pub changed: u64,
    /// Pages whose change no collection that covers it reported.
    pub lost: u64,
    /// The first of them, as page numbers from the start of guest memory.
    pub lost_pages: Vec<u64>,
    /// Loads that did not return what the guest had stored.
    pub wrong_loads: u64,
    /// Pages of host memory that hold what was stored elsewhere, or not what was stored last.
    pub misplaced: u64,
}

/// The pages that collections report: a bit each, slot after slot.
#[derive(Debug, Default)]
pub struct Log {
    /// Words of each slot.
    pub slots: Vec<Vec<u64>>,
    slot_pages: u64,
}

impl Log {
    /// A log of nothing, of `slots` slots of so many pages.
    pub fn new(slots: u32, slot_pages: u64) -> Self {
        let words = slot_pages.div_ceil(64) as usize;
        Self { slots: (0..slots).map(|_| alloc::vec![0; words]).collect(), slot_pages }
    }

    /// Puts page `page` of memslot `slot` in. Whether there is such a page.
    pub fn add(&mut self, slot: u32, page: u64) -> bool {
        let slot_pages = self.slot_pages;
        let slot = self.slots.get_mut(slot as usize).filter(|_| page < slot_pages);
        let Some(word) = slot.and_then(|slot| slot.get_mut((page / 64) as usize)) else {
            return false;
        };
        *word |= 1 << (page % 64);
        true
    }

    /// Nothing is in it any more.
    pub fn clear(&mut self) {
        self.slots.iter_mut().for_each(|slot| slot.fill(0));
    }

    /// Whether a page of guest memory is in it.
    pub fn has(&self, page: u64) -> bool {
        let (slot, page) = (page / self.slot_pages, page % self.slot_pages);
        let word = self.slots.get(slot as usize).and_then(|slot| slot.get((page / 64) as usize));
        word.is_some_and(|word| word >> (page % 64) & 1 == 1)
    }
}

/// The copy, and what was found so far. `W` reads the first word of a page of guest memory.
#[derive(Debug)]
pub struct Audit<W> {
    word: W,
    copy: Vec<u64>,
    sample: Vec<u64>,
    lost: BTreeSet<u64>,
    /// What was found.
    pub found: Found,
}

impl<W: Fn(u64) -> u64> Audit<W> {
    /// Copies all of guest memory. No vCPU runs, and the log is not on yet.
    pub fn new(pages: u64, word: W) -> Self {
        let copy: Vec<_> = (0..pages).map(&word).collect();
        let found = Found { pages, ..Found::default() };
        Self { word, sample: copy.clone(), copy, lost: BTreeSet::new(), found }
    }

    /// The same from the beginning, of so many pages.
    pub fn again(self, pages: u64) -> Self {
        Self::new(pages, self.word)
    }

    /// Reads every page. Faults that were under way must be waited for before the log is collected.
    pub fn sample(&mut self) {
        for (page, sampled) in (0..).zip(&mut self.sample) {
            *sampled = (self.word)(page);
        }
    }

    /// The log, of which `has` says what is in it, was collected after [`sample`](Self::sample): every page that the sample
    /// shows changed must be. Copies what it reports: all of that is read-only, or in the next collection.
    pub fn compare(&mut self, has: impl Fn(u64) -> bool, while_running: bool) {
        self.found.collections += 1;
        self.found.collections_while_running += u64::from(while_running);
        for (page, (sampled, copied)) in (0..).zip(self.sample.iter().zip(&mut self.copy)) {
            if has(page) {
                let now = (self.word)(page);
                self.found.changed += u64::from(now != *copied);
                *copied = now;
            } else if sampled != copied {
                self.lost.insert(page);
                *copied = *sampled;
            }
        }
    }

    /// All vCPUs have stopped and the log was collected once more: the copy is memory.
    pub fn compare_copy(&mut self) {
        for (page, copied) in (0..).zip(&self.copy) {
            if (self.word)(page) != *copied {
                self.lost.insert(page);
            }
        }
    }

    /// What was found.
    pub fn finish(mut self) -> Found {
        self.found.lost = self.lost.len() as u64;
        self.found.lost_pages = self.lost.into_iter().take(NAMED).collect();
        self.found
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn a_changed_page_that_is_reported_is_copied_and_one_that_is_not_is_lost() {
        let memory = RefCell::new([0; 128]);
        let mut audit = Audit::new(128, |page| memory.borrow()[page as usize]);
        let mut log = Log::new(2, 64);
        memory.borrow_mut()[3] = 3;
        memory.borrow_mut()[70] = 70;
        assert!(log.add(1, 70 - 64) && !log.add(1, 64) && !log.add(2, 0));
        audit.sample();
        audit.compare(|page| log.has(page), true);
        audit.compare_copy();
        let found = audit.finish();
        assert_eq!((found.lost, found.lost_pages), (1, [3].into()));
        assert_eq!((found.changed, found.collections_while_running), (1, 1));
    }

    #[test]
    fn a_page_that_was_reported_once_too_often_is_not_lost() {
        let mut audit = Audit::new(64, |page| page);
        let mut log = Log::new(1, 64);
        log.add(0, 5);
        audit.sample();
        audit.compare(|page| log.has(page), false);
        assert_eq!((audit.found.changed, audit.finish().lost), (0, 0));
    }

    #[test]
    fn a_store_after_the_last_collection_is_lost() {
        let memory = RefCell::new([0; 64]);
        let mut audit = Audit::new(64, |page| memory.borrow()[page as usize]);
        audit.sample();
        memory.borrow_mut()[9] = 9;
        audit.compare(|_| false, false);
        audit.compare_copy();
        assert_eq!(audit.finish().lost_pages, [9]);
    }
}
