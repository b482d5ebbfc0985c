//! The host's side: which memory backs which host address, while pages move.
//!
//! vCPU `n` has one word in each page, the `n`-th; nobody else writes to it. A page that moves takes its words along and
//! leaves [`GONE`] behind, so whoever still uses the old place finds or loses something that a check sees.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::{ptr, thread};

use slat::Hpa;
use slat_model::{HostMemory, Model};
use slat_vm::{Access, Host, HostError, HostPage, Hva, HvaRange};

use crate::random::Dice;

/// What a word holds where no page is.
const GONE: u64 = u64::MAX;

/// One page of host addresses.
#[derive(Debug, Default)]
struct Page {
    /// Held while the page moves, and while its contents are looked at by the host.
    still: Mutex<()>,
    /// Where it has moved to; zero while it is in its own place.
    moved: AtomicU64,
    /// Taken back: an invalidation has begun, and not yet ended.
    taken: AtomicBool,
}

/// Memory behind a guest. Host address `n` is offset `n` of the memory that pages have their own places in.
#[derive(Debug)]
pub(crate) struct Memory {
    own: Arc<HostMemory>,
    page_size: u64,
    block_size: u64,
    pages: Vec<Page>,
    /// By block of host addresses, how many pages are not in their own places.
    away: Vec<AtomicU32>,
    /// Places that back nothing.
    spare: Mutex<Vec<Hpa>>,
    words: u32,
    /// How often it was asked for a page.
    asked: AtomicU64,
}

/// Pages that nobody else moves or looks at meanwhile.
#[derive(Debug)]
pub(crate) struct Claim<'a> {
    memory: &'a Memory,
    first: u64,
    pages: u64,
    #[expect(dead_code, reason = "held until it is dropped")]
    still: Vec<MutexGuard<'a, ()>>,
}

impl Memory {
    /// `own` as it is, and `spare` pages to move to; each page with a word for each of `words` vCPUs.
    pub(crate) fn new(
        own: Arc<HostMemory>,
        spare: &HostMemory,
        (page_size, block_size): (u64, u64),
        words: u32,
    ) -> Self {
        let place = |at: u64| spare.page(at * page_size).map(|page| page.hpa);
        Self {
            pages: (0..own.size() / page_size).map(|_| Page::default()).collect(),
            away: (0..own.size().div_ceil(block_size)).map(|_| AtomicU32::new(0)).collect(),
            spare: Mutex::new((0..spare.size() / page_size).filter_map(place).collect()),
            own,
            page_size,
            block_size,
            words,
            asked: AtomicU64::new(0),
        }
    }

    /// Where the page is, if it is anywhere.
    pub(crate) fn place(&self, page: u64) -> Option<Hpa> {
        match self.pages.get(page as usize)?.moved.load(Ordering::SeqCst) {
            0 => self.own.page(page * self.page_size).map(|page| page.hpa),
            moved => Some(Hpa(moved)),
        }
    }

    /// Whether `word` is the one that a vCPU has in the page.
    pub(crate) fn is_at(&self, model: &Model, page: u64, vcpu: u32, word: &AtomicU64) -> bool {
        let found = self.place(page).and_then(|place| model.host_word(offset(place, vcpu)));
        found.is_some_and(|found| ptr::eq(found, word))
    }

    /// Whether the page is taken back: no guest may reach it.
    pub(crate) fn is_taken(&self, page: u64) -> bool {
        self.pages.get(page as usize).is_none_or(|page| page.taken.load(Ordering::SeqCst))
    }

    /// The page's words, while it stands still.
    pub(crate) fn contents(&self, model: &Model, page: u64) -> Vec<u64> {
        let still = self.pages.get(page as usize).map(|page| wait(&page.still));
        let place = self.place(page);
        let words = (0..self.words).map(|word| {
            let word = place.and_then(|place| model.host_word(offset(place, word)));
            word.map_or(GONE, |word| word.load(Ordering::Relaxed))
        });
        let words = words.collect();
        drop(still);
        words
    }

    /// The pages from `first` on, unless somebody has one of them.
    pub(crate) fn claim(&self, first: u64, pages: u64) -> Option<Claim<'_>> {
        let range = self.pages.get(first as usize..(first + pages) as usize)?;
        let still = range.iter().map(|page| page.still.try_lock().ok()).collect::<Option<_>>()?;
        Some(Claim { memory: self, first, pages, still })
    }
}

impl Claim<'_> {
    /// Their host addresses.
    pub(crate) fn hvas(&self) -> Option<HvaRange> {
        let page = self.memory.page_size;
        HvaRange::new(Hva(self.first * page), self.pages * page)
    }

    /// The pages are taken from the guest: an invalidation of them has begun.
    pub(crate) fn take(&self) {
        self.each(|_, page| page.taken.store(true, Ordering::SeqCst));
    }

    /// Moves each page: to a place that backs nothing, or, if it is away, sometimes home.
    pub(crate) fn scatter(&self, model: &Model, dice: &mut Dice) {
        self.each(|number, page| {
            if page.moved.load(Ordering::SeqCst) != 0 && dice.happens(50) {
                return self.bring_home(model, number, page);
            }
            let mut spare = wait(&self.memory.spare);
            if spare.is_empty() {
                return;
            }
            let at = dice.below(spare.len() as u64) as usize;
            let to = spare.swap_remove(at);
            drop(spare);
            if page.moved.load(Ordering::SeqCst) == 0 {
                self.memory.away(number).fetch_add(1, Ordering::SeqCst);
            }
            self.move_to(model, number, page, to, to.0);
        });
    }

    /// Moves every page that is away home.
    pub(crate) fn gather(&self, model: &Model) {
        self.each(|number, page| {
            if page.moved.load(Ordering::SeqCst) != 0 {
                self.bring_home(model, number, page);
            }
        });
    }

    /// The pages are given to the guest: the invalidation may end.
    pub(crate) fn give(self) {
        self.each(|_, page| page.taken.store(false, Ordering::SeqCst));
    }

    fn each(&self, mut act: impl FnMut(u64, &Page)) {
        for number in self.first..self.first + self.pages {
            act(number, &self.memory.pages[number as usize]);
        }
    }

    fn bring_home(&self, model: &Model, number: u64, page: &Page) {
        if let Some(home) = self.memory.own.page(number * self.memory.page_size) {
            self.move_to(model, number, page, home.hpa, 0);
            self.memory.away(number).fetch_sub(1, Ordering::SeqCst);
        }
    }

    fn move_to(&self, model: &Model, number: u64, page: &Page, to: Hpa, moved: u64) {
        let Some(from) = self.memory.place(number) else { return };
        for word in 0..self.memory.words {
            let (from, to) =
                (model.host_word(offset(from, word)), model.host_word(offset(to, word)));
            if let (Some(from), Some(to)) = (from, to) {
                to.store(from.swap(GONE, Ordering::Relaxed), Ordering::Relaxed);
            }
        }
        if page.moved.swap(moved, Ordering::SeqCst) != 0 {
            wait(&self.memory.spare).push(from);
        }
    }
}

impl Memory {
    fn away(&self, page: u64) -> &AtomicU32 {
        &self.away[(page * self.page_size / self.block_size) as usize]
    }
}

impl Host for Memory {
    fn page(&self, hva: Hva, _: Access) -> Result<HostPage, HostError> {
        let answer = self.present(hva).ok_or(HostError::NotMapped);
        // Now and then the answer is old before it arrives.
        if self.asked.fetch_add(1, Ordering::Relaxed).is_multiple_of(16) {
            thread::yield_now();
        }
        answer
    }

    fn present(&self, hva: Hva) -> Option<HostPage> {
        let page = hva.0 / self.page_size;
        let own = self.own.page(hva.0)?;
        let whole = self.away(page).load(Ordering::SeqCst) == 0;
        let size = if whole { own.size } else { self.page_size };
        let place = if whole { own.hpa } else { self.place(page)? };
        let output = Hpa(place.0 & !(size - 1));
        Some(HostPage { output, size, writable: true, device: false })
    }
}

/// The word of a vCPU in the page at `place`.
fn offset(place: Hpa, word: u32) -> Hpa {
    Hpa(place.0 + 8 * u64::from(word))
}

/// The lock, also after a thread that had it has failed: its round is over then.
fn wait<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}
