//! Whether the dirty log is true: contents compared with what collections reported, as the kernel's `dirty_log_test`
//! does.
//!
//! The audit plays live migration. It keeps a copy of the first word of each guest page and renews it for the pages
//! that a collection reports, after the collection has made them read-only again. Guests store values that never come
//! twice, so a page whose word differs from the copy was changed since.
//!
//! # Why the comparison is exact while vCPUs run
//! A store needs a translation that can be written, and the fault that made it so marks the page before its vCPU
//! resumes. So before each collection: all words are sampled; then every vCPU completes an access, and with it the
//! fault that was under way. Whatever the sample shows changed has been marked by then, by its own vCPU or by another
//! one whose fault it profited from: a page that the sample shows changed and the collection does not report is lost.
//! That holds for each way of logging: with dirty rings, the fault that makes a page writable puts it into the ring of
//! its vCPU; with hardware's dirty state, the entry is dirty before the store is done.
//! There is no slack of a round, and no store is left out, since the copy must equal memory when all vCPUs have
//! stopped and the log has been collected once more.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::check::Findings;
use crate::contents::{self, Words, word};
use crate::guest::Program;
use crate::layout::Layout;

/// Lost pages that the report names.
const NAMED: usize = 10;

/// What the audit found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Found {
    /// Guest pages that were watched.
    pages: u64,
    /// Collections of the log that were compared with memory.
    collections: u64,
    /// How many of them while vCPUs ran.
    collections_while_running: u64,
    /// Page changes that the log reported, over all collections.
    changed: u64,
    /// Pages whose change no collection that covers it reported.
    lost: u64,
    /// The first of them, as guest page numbers from the start of guest memory.
    lost_pages: Vec<u64>,
    /// Loads that did not return what the guest had stored.
    pub(super) wrong_loads: u64,
    /// Pages of host memory that hold what was stored elsewhere, or not what was stored last.
    misplaced: u64,
}

impl Findings for Found {
    const CLEAN: &'static str = "nothing lost, nothing misplaced";

    fn compared(&self) -> String {
        let Self { pages, collections, collections_while_running, changed, .. } = self;
        format!(
            "{pages} pages, {collections} collections of the log ({collections_while_running} while vCPUs wrote), \
             {changed} changed pages reported"
        )
    }

    fn wrong(&self) -> Vec<(u64, &'static str)> {
        vec![
            (self.lost, "pages changed and were not in the log that covers the change"),
            (self.wrong_loads, "loads did not return what was stored last"),
            (self.misplaced, "pages of host memory do not hold what was stored last"),
        ]
    }

    fn named(&self) -> Option<String> {
        let some = !self.lost_pages.is_empty();
        some.then(|| format!("lost guest pages, the first: {:?}", self.lost_pages))
    }
}

/// The copy, and what was found so far.
#[derive(Debug)]
pub(crate) struct Audit<'a> {
    memory: &'a dyn Words,
    layout: &'a Layout,
    copy: Vec<u64>,
    sample: Vec<u64>,
    lost: BTreeSet<u64>,
    found: Found,
}

impl<'a> Audit<'a> {
    /// Copies all of guest memory. No vCPU runs, and the log is not on yet.
    pub(crate) fn new(memory: &'a dyn Words, layout: &'a Layout) -> Self {
        let found = Found { pages: layout.guest_pages(), ..Found::default() };
        let (copy, sample, lost) = (Vec::new(), Vec::new(), BTreeSet::new());
        let mut audit = Self { memory, layout, copy, sample, lost, found };
        audit.sample();
        audit.copy = audit.sample.clone();
        audit
    }

    /// Reads every page. Faults that were under way must be waited for before the log is collected.
    pub(crate) fn sample(&mut self) {
        let pages = 0..self.layout.guest_pages();
        self.sample.clear();
        self.sample.extend(pages.map(|page| word(self.memory, self.layout, page)));
    }

    /// The log was collected after [`sample`](Self::sample): every page that the sample shows changed must be in it.
    pub(crate) fn compare(&mut self, log: &Log, while_running: bool) {
        self.found.collections += 1;
        self.found.collections_while_running += u64::from(while_running);
        for (page, (sampled, copied)) in (0..).zip(self.sample.iter().zip(&mut self.copy)) {
            if sampled != copied && !log.has(page) {
                self.lost.insert(page);
                *copied = *sampled;
            }
        }
    }

    /// Copies what a collection has reported. All of it is read-only or in the next collection.
    pub(crate) fn renew(&mut self, log: &Log) {
        for (page, copied) in (0..).zip(&mut self.copy) {
            if log.has(page) {
                let now = word(self.memory, self.layout, page);
                self.found.changed += u64::from(now != *copied);
                *copied = now;
            }
        }
    }

    /// All vCPUs have stopped and the log was collected once more: the copy is memory.
    pub(crate) fn compare_copy(&mut self) {
        for (page, copied) in (0..).zip(&self.copy) {
            if word(self.memory, self.layout, page) != *copied {
                self.lost.insert(page);
            }
        }
    }

    /// The guests have ended: what they remember is in memory, where they stored it.
    pub(crate) fn finish(mut self, programs: &[Program]) -> Found {
        self.found.misplaced = contents::misplaced(self.memory, self.layout, programs);
        self.found.wrong_loads = contents::wrong_loads(programs);
        self.found.lost = self.lost.len() as u64;
        self.found.lost_pages = self.lost.into_iter().take(NAMED).collect();
        self.found
    }
}

/// What the last collection reported, slot by slot.
#[derive(Debug)]
pub(crate) struct Log {
    /// One bit for each page of the host.
    pub(crate) slots: Vec<Vec<u64>>,
    guest_page: u64,
    page: u64,
    slot_size: u64,
}

impl Log {
    /// A log of nothing.
    pub(crate) fn new(layout: &Layout) -> Self {
        let words = layout.slot_pages().div_ceil(64) as usize;
        Self {
            slots: vec![vec![0; words]; layout.slots as usize],
            guest_page: layout.guest_page,
            page: layout.page,
            slot_size: layout.slot_size(),
        }
    }

    /// Puts page `page` of memslot `slot` in. Whether there is such a page.
    pub(super) fn add(&mut self, slot: u32, page: u64) -> bool {
        let slot = self.slots.get_mut(slot as usize);
        let Some(slot) = slot.filter(|_| page < self.slot_size / self.page) else { return false };
        slot[(page / 64) as usize] |= 1 << (page % 64);
        true
    }

    /// Begins anew, with nothing in it.
    #[cfg(all(target_os = "linux", target_arch = "x86_64"))]
    pub(super) fn forget(&mut self) {
        self.slots.iter_mut().for_each(|slot| slot.fill(0));
    }

    /// Takes what is in `other`, which is empty then.
    pub(super) fn replace_by(&mut self, other: &mut Self) {
        std::mem::swap(&mut self.slots, &mut other.slots);
        other.slots.iter_mut().for_each(|slot| slot.fill(0));
    }

    /// Whether the page of the host with the first word of a guest page is in it.
    fn has(&self, guest_page: u64) -> bool {
        let offset = guest_page * self.guest_page;
        let slot = &self.slots[(offset / self.slot_size) as usize];
        let page = offset % self.slot_size / self.page;
        slot[(page / 64) as usize] >> (page % 64) & 1 == 1
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::Ordering;

    use slat_model::{Backing, HostMemory, Model};

    use super::*;
    use crate::layout::lay_out;

    fn memory(layout: &Layout) -> Arc<HostMemory> {
        let model = Model::builder().build().unwrap();
        model.host_memory(layout.host_size, Backing::Anonymous).unwrap()
    }

    fn store(memory: &HostMemory, page: u64, value: u64) {
        memory.word(page * 4096).unwrap().store(value, Ordering::Relaxed);
    }

    fn mark(log: &mut Log, slot: usize, page: usize) {
        log.slots[slot][page / 64] |= 1 << (page % 64);
    }

    #[test]
    fn a_changed_page_that_is_reported_is_copied_and_one_that_is_not_is_lost() {
        let layout = lay_out("-b 512K -x 2");
        let memory = memory(&layout);
        let mut audit = Audit::new(&memory, &layout);
        let mut log = Log::new(&layout);
        store(&memory, 3, 3);
        store(&memory, 70, 70);
        mark(&mut log, 1, 70 - 64);
        audit.sample();
        audit.compare(&log, true);
        audit.renew(&log);
        audit.compare_copy();
        let found = audit.finish(&[]);
        assert_eq!((found.lost, found.lost_pages), (1, vec![3]));
        assert_eq!((found.changed, found.collections_while_running, found.misplaced), (1, 1, 0));
    }

    #[test]
    fn a_page_that_was_reported_once_too_often_is_not_lost() {
        let layout = lay_out("-b 512K");
        let memory = memory(&layout);
        let mut audit = Audit::new(&memory, &layout);
        let mut log = Log::new(&layout);
        mark(&mut log, 0, 5);
        for _ in 0..2 {
            audit.sample();
            audit.compare(&log, false);
            audit.renew(&log);
        }
        let found = audit.finish(&[]);
        assert_eq!((found.collections, found.changed, found.lost), (2, 0, 0));
    }

    #[test]
    fn a_store_after_the_last_collection_is_lost() {
        let layout = lay_out("-b 512K");
        let memory = memory(&layout);
        let mut audit = Audit::new(&memory, &layout);
        audit.sample();
        store(&memory, 9, 9);
        audit.compare(&Log::new(&layout), false);
        audit.compare_copy();
        assert_eq!(audit.finish(&[]).lost_pages, [9]);
    }

    #[test]
    fn a_value_of_another_page_is_misplaced() {
        let layout = lay_out("-b 512K");
        let memory = memory(&layout);
        store(&memory, 9, 1 << 28 | 9);
        store(&memory, 10, 1 << 28 | 9);
        assert_eq!(Audit::new(&memory, &layout).finish(&[]).misplaced, 1);
    }

    #[test]
    fn large_guest_pages_are_looked_up_at_their_first_host_page_and_small_ones_share_one() {
        let mut large = Log::new(&lay_out("-b 512K -m P40V48_64K"));
        mark(&mut large, 0, 16);
        mark(&mut large, 0, 33);
        assert!(large.has(1) && !large.has(0) && !large.has(2));
        let mut small = Log::new(&lay_out("-b 512K --granule 64k"));
        mark(&mut small, 0, 1);
        assert!(!small.has(15) && small.has(16) && small.has(31) && !small.has(32));
    }
}
