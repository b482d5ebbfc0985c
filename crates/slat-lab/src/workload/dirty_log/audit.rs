//! Whether the dirty log is true: [`slat_metal::audit`] on guest memory as a host sees it, and what guests remember.

use slat_metal::audit;
pub(crate) use slat_metal::audit::Found;

use crate::check::Findings;
use crate::contents::{self, Words, word};
use crate::guest::Program;
use crate::layout::Layout;

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
pub(crate) struct Audit<'a> {
    memory: &'a dyn Words,
    layout: &'a Layout,
    copy: audit::Audit<Box<dyn Fn(u64) -> u64 + 'a>>,
}

impl<'a> Audit<'a> {
    /// Copies all of guest memory. No vCPU runs, and the log is not on yet.
    pub(crate) fn new(memory: &'a dyn Words, layout: &'a Layout) -> Self {
        let first_word = Box::new(move |page| word(memory, layout, page));
        Self { memory, layout, copy: audit::Audit::new(layout.guest_pages(), first_word) }
    }

    /// Reads every page. Faults that were under way must be waited for before the log is collected.
    pub(crate) fn sample(&mut self) {
        self.copy.sample();
    }

    /// The log was collected after [`sample`](Self::sample): every page that the sample shows changed must be in it.
    pub(crate) fn compare(&mut self, log: &Log, while_running: bool) {
        self.copy.compare(|page| log.has(page), while_running);
    }

    /// All vCPUs have stopped and the log was collected once more: the copy is memory.
    pub(crate) fn compare_copy(&mut self) {
        self.copy.compare_copy();
    }

    /// The guests have ended: what they remember is in memory, where they stored it.
    pub(crate) fn finish(self, programs: &[Program]) -> Found {
        let misplaced = contents::misplaced(self.memory, self.layout, programs);
        let wrong_loads = contents::wrong_loads(programs);
        Found { misplaced, wrong_loads, ..self.copy.finish() }
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
