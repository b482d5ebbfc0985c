//! What somebody is in the middle of, and others wait for: dirty state on its way from a tree to a log, taken out of
//! entries and not yet in the bitmap.
//!
//! Where hardware keeps dirty state, an unmap for the host takes it along, as does the write protection of a slot that
//! becomes read-only, and only that operation knows of the write until it has marked the page. A collection must not
//! return in between (rule 8). So such an operation counts itself in before its first exchange and out after it has
//! marked; a collection that has seen the entries clean waits for those that were in. There are two counts, of which new
//! operations use one: a collection makes them use the other and waits until the first is down, so that it never waits
//! for those that came later.
//!
//! Another pair of counts has whoever looks for slots and then acts on the tree where it found them: invalidations by host
//! address and conversions of private pages, which unmap; collections, resets and beginnings of logs, which write-protect
//! and drop dirty marks on the way. What was found may be gone by then, and something else be in its place: a slot that is
//! pinned waits for them before it is mapped (rule 7), and a log of hardware's dirty state before it begins (rule 8).

use slat::Machine;

use crate::lock::Lock;
use crate::sabotage::{Skip, skips};
use crate::sync::{AtomicUsize, Ordering};

#[derive(Debug)]
pub(crate) struct Transit {
    current: AtomicUsize,
    counts: [AtomicUsize; 2],
    waiting: Lock,
}

/// Somebody who is in.
#[derive(Debug)]
pub(crate) struct Moving<'t>(&'t AtomicUsize);

impl Transit {
    pub(crate) fn new() -> Self {
        let zero = || AtomicUsize::new(0);
        Self { current: zero(), counts: [zero(), zero()], waiting: Lock::new() }
    }

    /// Before the first exchange that takes dirty state out of entries, or before the look at the slots.
    pub(crate) fn enter(&self) -> Moving<'_> {
        loop {
            let index = self.current.load(Ordering::Acquire) & 1;
            let count = &self.counts[index];
            // Sequentially consistent, here and in `wait`: either this sees the switch and counts in again at the other
            // one, or `wait` sees it counted.
            count.fetch_add(1, Ordering::SeqCst);
            if self.current.load(Ordering::SeqCst) & 1 == index {
                return Moving(count);
            }
            count.fetch_sub(1, Ordering::Release);
        }
    }

    /// Waits for everybody who was counted in before.
    pub(crate) fn wait<M: Machine>(&self, machine: &M) {
        let idle = |count: &AtomicUsize| count.load(Ordering::SeqCst) == 0;
        if self.counts.iter().all(idle) || skips(Skip::Transit) {
            return;
        }
        let held = self.waiting.lock(machine);
        let index = self.current.fetch_add(1, Ordering::SeqCst) & 1;
        while !idle(&self.counts[index]) {
            machine.relax();
        }
        drop(held);
    }
}

impl Drop for Moving<'_> {
    fn drop(&mut self) {
        // Release: the marks come before.
        self.0.fetch_sub(1, Ordering::Release);
    }
}
