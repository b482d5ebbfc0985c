//! A dirty ring: which pages one vCPU has made writable, in order, for a log of [`LogMode::Ring`](crate::LogMode).
//!
//! # States of an entry
//! Empty; dirty, when the vCPU has put a page in; harvested, when somebody has read it; empty again when the page was
//! protected ([`Vm::reset_dirty_ring`](crate::Vm::reset_dirty_ring)). The page is stored before the entry is dirty, and
//! read after that was seen (release, acquire). The vCPU puts a page in after it made it writable (rule 8), so whoever
//! has harvested it and then protects it, finds the entry of the table writable.
//!
//! Two counts run through the ring, as far as 64 bits go: what was put in, written by the vCPU alone, and what was
//! reset, written under a lock.

use alloc::vec::Vec;

use crate::SlotId;
use crate::heap::{OutOfMemory, with_room};
use crate::lock::Lock;
use crate::sabotage::{Skip, skips};
use crate::shared::Shared;
use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// Entries that are left free when a vCPU is told that its ring is full: what it may still fill before it is out of the
/// guest.
const LEFT: u64 = if cfg!(any(loom, shuttle)) { 1 } else { 64 };

const DIRTY: u64 = 1;
const HARVESTED: u64 = 2;
const SPACE_SHIFT: u32 = 16;
const NUMBER_SHIFT: u32 = 32;

/// A page that a vCPU has written, or was about to write.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct DirtyPage {
    /// The slot that it lies in.
    pub slot: SlotId,
    /// Its number there, from 0.
    pub page: u64,
}

#[derive(Debug)]
struct Entry {
    state: AtomicU64,
    page: AtomicU64,
}

#[derive(Debug)]
pub(crate) struct Ring {
    entries: Vec<Entry>,
    pushed: AtomicU64,
    /// The next entry to harvest, and whether a thread is at it.
    harvested: AtomicU64,
    harvesting: AtomicU32,
    reset: AtomicU64,
    pub(crate) resetting: Lock,
    /// The number of its VM.
    pub(crate) vm: u64,
}

impl Ring {
    /// A ring of so many entries, a power of two above `LEFT`.
    pub(crate) fn new(entries: u32, vm: u64) -> Result<Self, OutOfMemory> {
        let mut ring = with_room(entries as usize)?;
        let empty = || Entry { state: AtomicU64::new(0), page: AtomicU64::new(u64::MAX) };
        ring.extend((0..entries).map(|_| empty()));
        let zero = || AtomicU64::new(0);
        let (pushed, harvested, reset) = (zero(), zero(), zero());
        let (harvesting, resetting) = (AtomicU32::new(0), Lock::new());
        Ok(Self { entries: ring, pushed, harvested, harvesting, reset, resetting, vm })
    }

    fn entry(&self, count: u64) -> &Entry {
        &self.entries[count as usize & (self.entries.len() - 1)]
    }

    /// Entries in use. Acquire, and first: what was reset is empty, and was counted when it was put in.
    fn used(&self) -> u64 {
        let reset = self.reset.load(Ordering::Acquire);
        self.pushed.load(Ordering::Relaxed).wrapping_sub(reset)
    }

    /// Whether the vCPU must leave the guest.
    pub(crate) fn is_full(&self) -> bool {
        self.used() >= self.entries.len() as u64 - LEFT
    }

    /// Whether there is no entry left at all.
    pub(crate) fn is_exhausted(&self) -> bool {
        self.used() >= self.entries.len() as u64
    }

    /// Puts a page in; by the vCPU alone, and not when the ring is exhausted.
    pub(crate) fn push(&self, id: SlotId, page: u64) {
        let count = self.pushed.load(Ordering::Relaxed);
        let entry = self.entry(count);
        if !skips(Skip::PageFirst) {
            entry.page.store(page, Ordering::Relaxed);
        }
        let slot = u64::from(id.space) << SPACE_SHIFT | u64::from(id.number) << NUMBER_SHIFT;
        self.pushed.store(count.wrapping_add(1), Ordering::Relaxed);
        // Release: the page is there before the entry is dirty, and writable in its table; and it is counted.
        entry.state.store(slot | DIRTY, Ordering::Release);
        if skips(Skip::PageFirst) {
            entry.page.store(page, Ordering::Relaxed);
        }
    }

    /// The first entry that may be reset.
    pub(crate) fn first(&self) -> u64 {
        self.reset.load(Ordering::Relaxed)
    }

    /// What was harvested in an entry, if it was.
    pub(crate) fn harvested(&self, count: u64) -> Option<DirtyPage> {
        if count.wrapping_sub(self.first()) >= self.entries.len() as u64 {
            return None;
        }
        let entry = self.entry(count);
        let state = entry.state.load(Ordering::Acquire);
        (state & HARVESTED != 0).then(|| entry.dirty_page(state))
    }

    /// Gives entries back whose pages were protected; under the lock.
    pub(crate) fn give_back(&self, end: u64) {
        for count in self.first()..end {
            self.entry(count).state.store(0, Ordering::Relaxed);
        }
        // Release: they are empty before they are counted.
        self.reset.store(end, Ordering::Release);
    }

    fn harvest(&self, mut sink: impl FnMut(DirtyPage)) -> u64 {
        // Acquire: what the thread before has harvested is harvested.
        if self.harvesting.swap(1, Ordering::Acquire) != 0 {
            return 0;
        }
        let _harvesting = Harvesting(&self.harvesting);
        let mut pages = 0;
        loop {
            // Only whoever harvests writes it, and the state of a dirty entry.
            let count = self.harvested.load(Ordering::Relaxed);
            let entry = self.entry(count);
            let state = entry.state.load(Ordering::Acquire);
            if state & (DIRTY | HARVESTED) != DIRTY {
                return pages;
            }
            let page = entry.dirty_page(state);
            self.harvested.store(count.wrapping_add(1), Ordering::Relaxed);
            // Release: the page is read before the entry can be given back.
            entry.state.store(state | HARVESTED, Ordering::Release);
            sink(page);
            pages += 1;
        }
    }
}

/// The right to harvest a ring.
struct Harvesting<'r>(&'r AtomicU32);

impl Drop for Harvesting<'_> {
    fn drop(&mut self) {
        self.0.store(0, Ordering::Release);
    }
}

impl Entry {
    fn dirty_page(&self, state: u64) -> DirtyPage {
        let slot =
            SlotId { space: (state >> SPACE_SHIFT) as u16, number: (state >> NUMBER_SHIFT) as u32 };
        DirtyPage { slot, page: self.page.load(Ordering::Relaxed) }
    }
}

/// A vCPU's dirty ring, for whoever collects it on another thread.
#[derive(Clone, Debug)]
pub struct DirtyRing(pub(crate) Shared<Ring>);

impl DirtyRing {
    /// Hands every page in the ring that was not harvested before to `sink`, oldest first, and returns how many. One
    /// thread at a time: none for a second one that comes meanwhile, and what the first has taken is the first's. If
    /// `sink` panics, the page it was given counts as harvested.
    ///
    /// The pages are still writable: read what they hold only after [`Vm::reset_dirty_ring`](crate::Vm::reset_dirty_ring)
    /// has protected them. Costs two stores a page and waits for nobody.
    pub fn harvest(&self, sink: impl FnMut(DirtyPage)) -> u64 {
        self.0.harvest(sink)
    }

    /// How many entries it has.
    pub fn capacity(&self) -> u32 {
        self.0.entries.len() as u32
    }

    /// How many entries are in use: not put in and reset again. A moment later there may be more or fewer.
    pub fn used(&self) -> u32 {
        self.0.used() as u32
    }

    /// Whether its vCPU must not enter the guest before the ring is reset.
    pub fn is_full(&self) -> bool {
        self.0.is_full()
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    fn page(page: u64) -> DirtyPage {
        DirtyPage { slot: SlotId { space: 3, number: u32::MAX }, page }
    }

    #[test]
    fn an_entry_is_reset_only_after_it_was_harvested_and_a_full_ring_says_so() {
        let ring = Ring::new(256, 1).unwrap();
        for n in 0..256 {
            assert_eq!((ring.is_full(), ring.is_exhausted()), (n >= 256 - LEFT, false));
            ring.push(page(n).slot, n);
        }
        assert!(ring.is_exhausted());
        assert_eq!(ring.harvested(0), None);
        let mut pages = Vec::new();
        assert_eq!(ring.harvest(|page| pages.push(page)), 256);
        assert_eq!(pages, (0..256).map(page).collect::<Vec<_>>());
        assert_eq!(ring.harvest(|_| panic!("twice")), 0);
        assert_eq!(ring.harvested(255), Some(page(255)));
        assert_eq!(ring.harvested(256), None);
        ring.give_back(100);
        assert_eq!(ring.used(), 156);
        assert_eq!(ring.harvested(99), None);
        ring.push(page(0).slot, 1 << 40);
        ring.give_back(256);
        assert_eq!(ring.harvested(256), None);
        assert_eq!(ring.harvest(|found| assert_eq!(found, page(1 << 40))), 1);
        assert_eq!(ring.harvested(256), Some(page(1 << 40)));
    }
}
