//! Pages that have to be served before a guest gets them, as with Linux's userfaultfd: by whoever asks first, in the
//! fault, while others that ask for the same page wait.

use alloc::vec::Vec;
use core::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use slat_metal::options::Userfault;
use slat_metal::program::PAGE;
use slat_vm::Hva;

use crate::host::Memory;

const ABSENT: u8 = 0;
const ARRIVING: u8 = 1;
const PRESENT: u8 = 2;
/// What every word of a page that was copied in has, but the first ones, which say which page it is.
const PATTERN: u64 = 0xabab_abab_abab_abab;
/// Where in a page the mark is: guests store at the beginning.
const MARK_OFFSET: u64 = 8;

/// The states of all pages.
pub(crate) struct Served {
    pages: Vec<AtomicU8>,
    /// Bytes that are served at once.
    page: u64,
    mode: Userfault,
    requests: AtomicU64,
    served: AtomicU64,
}

impl Served {
    /// Of so many pages of so many bytes, none is served.
    pub(crate) fn new(mode: Userfault, pages: u64, page: u64) -> Self {
        let pages = (0..pages).map(|_| AtomicU8::new(ABSENT)).collect();
        Self { pages, page, mode, requests: AtomicU64::new(0), served: AtomicU64::new(0) }
    }

    /// Returns when the page at a host address was served.
    pub(crate) fn serve(&self, memory: &Memory, hva: Hva) {
        let Some(state) = self.pages.get((hva.0 / self.page) as usize) else { return };
        if state.load(Ordering::Acquire) == PRESENT {
            return;
        }
        self.requests.fetch_add(1, Ordering::Relaxed);
        let claim = state.compare_exchange(ABSENT, ARRIVING, Ordering::Acquire, Ordering::Acquire);
        if claim.is_ok() {
            if self.mode == Userfault::Missing {
                let start = hva.0 - hva.0 % self.page;
                fill(memory, start, self.page);
            }
            self.served.fetch_add(1, Ordering::Relaxed);
            // Release: who sees the page present sees what is in it.
            state.store(PRESENT, Ordering::Release);
        }
        while state.load(Ordering::Acquire) != PRESENT {
            core::hint::spin_loop();
        }
    }

    /// How often vCPUs asked for a page that was not there yet, and how many were served.
    pub(crate) fn done(&self) -> (u64, u64) {
        (self.requests.load(Ordering::Relaxed), self.served.load(Ordering::Relaxed))
    }

    /// Whether the page at an offset was served.
    pub(crate) fn is_present(&self, offset: u64) -> bool {
        let state = self.pages.get((offset / self.page) as usize);
        state.is_some_and(|state| state.load(Ordering::Relaxed) == PRESENT)
    }

    /// How many were, by their states.
    pub(crate) fn present(&self) -> u64 {
        let pages = self.pages.iter();
        pages.filter(|state| state.load(Ordering::Relaxed) == PRESENT).count() as u64
    }
}

/// Gives `size` bytes from an offset their contents.
pub(crate) fn fill(memory: &Memory, start: u64, size: u64) {
    for offset in (start..start + size).step_by(8) {
        let value = if offset % PAGE == MARK_OFFSET { mark(offset / PAGE) } else { PATTERN };
        if let Some(word) = memory.word(offset) {
            word.store(value, Ordering::Relaxed);
        }
    }
}

/// Whether a guest page has its mark.
pub(crate) fn is_filled(memory: &Memory, page: u64) -> bool {
    let word = memory.word(page * PAGE + MARK_OFFSET);
    word.is_some_and(|word| word.load(Ordering::Relaxed) == mark(page))
}

fn mark(page: u64) -> u64 {
    PATTERN ^ (page + 1)
}
