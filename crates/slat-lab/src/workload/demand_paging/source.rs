//! What handlers copy: the kernel's pattern, with a mark in each guest page that says which page it is.

use std::ops::Range;
use std::sync::atomic::Ordering;

use crate::contents::Words;

/// Every byte, as in the kernel's test.
const PATTERN: u64 = 0xabab_abab_abab_abab;
/// Where in a guest page the mark is: guests store at the beginning.
pub(crate) const MARK_OFFSET: u64 = 8;

/// The mark of a guest page.
pub(crate) fn mark(guest_page: u64) -> u64 {
    PATTERN ^ (guest_page + 1)
}

/// Fills `range` of the memory, whole guest pages or a part of one.
pub(crate) fn copy(memory: &dyn Words, range: Range<u64>, guest_page: u64) {
    for offset in range.step_by(8) {
        if let Some(word) = memory.word(offset) {
            word.store(value(offset, guest_page), Ordering::Relaxed);
        }
    }
}

/// Fills a page that is to be copied to an offset into the memory.
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
pub(crate) fn fill(page: &mut [u8], offset: u64, guest_page: u64) {
    for (at, word) in (offset..).step_by(8).zip(page.chunks_exact_mut(8)) {
        word.copy_from_slice(&value(at, guest_page).to_ne_bytes());
    }
}

/// What is at an offset.
fn value(offset: u64, guest_page: u64) -> u64 {
    if offset % guest_page == MARK_OFFSET { mark(offset / guest_page) } else { PATTERN }
}

#[cfg(test)]
mod tests {
    use slat_model::{Backing, Model};

    use super::*;

    #[test]
    fn each_guest_page_has_its_mark_and_nothing_else_is_touched() {
        let model = Model::builder().build().unwrap();
        let memory = model.host_memory(1 << 20, Backing::Anonymous).unwrap();
        copy(&memory, 8192..16384, 4096);
        let word = |offset| memory.word(offset).unwrap().load(Ordering::Relaxed);
        assert_eq!([word(8192), word(8200), word(12296)], [PATTERN, mark(2), mark(3)]);
        assert_eq!([word(8184), word(16384), word(16392)], [0, 0, 0]);
        assert_ne!(mark(0), PATTERN);
    }
}
