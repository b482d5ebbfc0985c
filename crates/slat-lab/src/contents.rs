//! What is in host memory, compared with what guests remember to have stored.

use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use slat_model::HostMemory;

use crate::guest::{Program, page_of};
use crate::layout::Layout;

/// Host memory, as the host reads and writes it.
pub(crate) trait Words: Debug {
    /// The word at an offset; `None` beyond the end.
    fn word(&self, offset: u64) -> Option<&AtomicU64>;
}

impl Words for HostMemory {
    fn word(&self, offset: u64) -> Option<&AtomicU64> {
        self.word(offset)
    }
}

impl<W: Words + ?Sized> Words for Arc<W> {
    fn word(&self, offset: u64) -> Option<&AtomicU64> {
        (**self).word(offset)
    }
}

/// The first word of a guest page, as the host sees it.
pub(crate) fn word(memory: &dyn Words, layout: &Layout, page: u64) -> u64 {
    let word = memory.word(page * layout.guest_page);
    word.map_or(0, |word| word.load(Ordering::Relaxed))
}

/// Guest pages that hold what was stored elsewhere, or not what was stored last. The guests have ended.
pub(crate) fn misplaced(memory: &dyn Words, layout: &Layout, programs: &[Program]) -> u64 {
    let wrong = |page: &u64| {
        let value = word(memory, layout, *page);
        let owner = layout.owner(*page).and_then(|index| programs.get(index));
        let right = match owner.and_then(|owner| owner.agrees(*page, value)) {
            Some(right) => right,
            None => value == 0 || page_of(value) == *page,
        };
        !right
    };
    (0..layout.guest_pages()).filter(wrong).count() as u64
}

/// Loads that did not return what was stored, of all guests.
pub(crate) fn wrong_loads(programs: &[Program]) -> u64 {
    programs.iter().map(Program::wrong_loads).sum()
}
