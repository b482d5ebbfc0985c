//! Host memory whose pages are others after they were unmapped, as those of an operating system are: what is written
//! through an old translation is not found again.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use slat_model::HostMemory;
use slat_vm::{Access, Host, HostError, HostPage, Hva};

use crate::model;

/// The memory of one test.
#[derive(Debug)]
pub(super) struct Pages {
    memory: Arc<HostMemory>,
    /// Bytes of a page.
    page: u64,
    /// For each page whether the second of its two places has it; empty if each has one place.
    second: Vec<AtomicBool>,
}

impl Pages {
    /// The memory has a place for each page.
    pub(super) fn fixed(memory: Arc<HostMemory>, page: u64) -> Self {
        Self { memory, page, second: Vec::new() }
    }

    /// The memory has two places for each of `pages` pages.
    pub(super) fn exchanged(memory: Arc<HostMemory>, page: u64, pages: u64) -> Self {
        let second = (0..pages).map(|_| AtomicBool::new(false)).collect();
        Self { memory, page, second }
    }

    /// Where a page is now.
    fn offset(&self, page: u64) -> u64 {
        let second = self.second.get(page as usize);
        // Acquire: the page that was put there is empty.
        let second = second.is_some_and(|second| second.load(Ordering::Acquire));
        let places = self.second.len() as u64;
        (page + if second { places } else { 0 }) * self.page
    }

    /// The word at an offset into each of these pages, as the host has it.
    pub(super) fn words(&self, pages: Range<u64>, offset: u64) -> impl Iterator<Item = &AtomicU64> {
        pages.filter_map(move |page| self.memory.word(self.offset(page) + offset))
    }

    /// Drops these pages, which nobody translates any more: empty ones come in their place.
    pub(super) fn drop_pages(&self, pages: Range<u64>) {
        for page in pages {
            let now = self.offset(page);
            let places = self.second.len() as u64 * self.page;
            let next = if now >= places && places > 0 { now - places } else { now + places };
            for offset in [next, next + self.page / 2] {
                if let Some(word) = self.memory.word(offset) {
                    word.store(0, Ordering::Relaxed);
                }
            }
            if let Some(second) = self.second.get(page as usize) {
                second.fetch_xor(true, Ordering::Release);
            }
        }
    }
}

impl Host for Pages {
    fn page(&self, hva: Hva, _access: Access) -> Result<HostPage, HostError> {
        if self.second.is_empty() {
            return model::page(&self.memory, hva);
        }
        let place = self.offset(hva.0 / self.page);
        model::page(&self.memory, Hva(place + hva.0 % self.page))
    }
}

#[cfg(test)]
mod tests {
    use slat_model::{Backing, Model};

    use super::*;

    fn memory(pages: u64) -> Arc<HostMemory> {
        let model = Model::builder().build().unwrap();
        model.host_memory(pages * 4096, Backing::Anonymous).unwrap()
    }

    fn values(pages: &Pages, range: Range<u64>) -> Vec<u64> {
        pages.words(range, 0).map(|word| word.load(Ordering::Relaxed)).collect()
    }

    #[test]
    fn a_page_that_was_dropped_comes_back_empty_and_somewhere_else() {
        let pages = Pages::exchanged(memory(6), 4096, 3);
        for _ in 0..3 {
            let before = pages.page(Hva(4096), Access::Write).unwrap().output;
            pages.words(0..3, 0).for_each(|word| word.store(7, Ordering::Relaxed));
            pages.drop_pages(1..2);
            assert_eq!(values(&pages, 0..3), [7, 0, 7]);
            assert_ne!(pages.page(Hva(4096), Access::Write).unwrap().output, before);
        }
    }

    #[test]
    fn a_page_with_one_place_comes_back_empty() {
        let pages = Pages::fixed(memory(3), 4096);
        pages.words(0..3, 0).for_each(|word| word.store(7, Ordering::Relaxed));
        pages.drop_pages(1..2);
        assert_eq!(values(&pages, 0..3), [7, 0, 7]);
    }
}
