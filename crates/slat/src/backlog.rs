//! What waits to be freed: tables that left the tree, recorded outside of them, bounded (rule 5).
//!
//! A ring in one page of table memory. An operation claims places before it pins, fills them when its invalidation is
//! done, and nobody waits for it: who drains takes what is filled from the head on. Places that were claimed and not
//! needed are filled with a token that means nothing.

use crate::machine::Machine;
use crate::sabotage::{Skip, skips};
use crate::sync::{AtomicU32, AtomicU64, Ordering};
use crate::table::Table;
use crate::{Error, Format, Hpa, Level, Participant, Tree};

const UNFILLED: u64 = 0;
const NOTHING: u64 = 1;

/// The ring. Positions count up for ever; an index is a position modulo the capacity.
#[derive(Debug)]
pub(crate) struct Backlog {
    page: Hpa,
    capacity: u64,
    head: AtomicU64,
    tail: AtomicU64,
    draining: AtomicU32,
}

/// Places that were claimed and not yet filled.
#[derive(Debug)]
pub(crate) struct Claim {
    next: u64,
    end: u64,
}

impl Claim {
    /// How many tables can still be detached.
    #[inline(always)]
    pub(crate) fn left(&self) -> usize {
        (self.end - self.next) as usize
    }
}

impl Backlog {
    pub(crate) fn new(page: Hpa, index_bits: u32) -> Self {
        Self {
            page,
            capacity: 1 << index_bits,
            head: AtomicU64::new(0),
            tail: AtomicU64::new(0),
            draining: AtomicU32::new(0),
        }
    }
}

impl<F: Format, M: Machine> Tree<'_, F, M> {
    fn ring(&self) -> Table<'_, M> {
        self.owned(self.backlog.page)
    }

    fn ring_index(&self, position: u64) -> usize {
        (position & (self.backlog.capacity - 1)) as usize
    }

    /// Claims up to `want` places, as many as there are.
    pub(crate) fn claim(&self, want: usize) -> Claim {
        let ring = &self.backlog;
        let mut tail = ring.tail.load(Ordering::Relaxed);
        loop {
            // Acquire: the drain that moved the head has emptied the places behind it.
            let used = tail.wrapping_sub(ring.head.load(Ordering::Acquire));
            let Some(free) = ring.capacity.checked_sub(used) else {
                // The head has gone past the tail that was read, which is old then.
                tail = ring.tail.load(Ordering::Relaxed);
                continue;
            };
            let n = free.min(want as u64);
            if n == 0 {
                return Claim { next: 0, end: 0 };
            }
            match ring.tail.compare_exchange(tail, tail + n, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Claim { next: tail, end: tail + n },
                Err(now) => tail = now,
            }
        }
    }

    /// Records a table at `level`, detached and invalidated, in the next claimed place.
    pub(crate) fn retire(&self, claim: &mut Claim, table: Hpa, level: Level) {
        if skips(Skip::RecordOutside) {
            self.owned(table).settle(0, self.format.table(self.backlog.page));
        }
        self.fill_place(claim, table.0 | (level.number() + 3) as u64);
    }

    /// Gives the rest of a claim back.
    pub(crate) fn unclaim(&self, mut claim: Claim) {
        while claim.next < claim.end {
            self.fill_place(&mut claim, NOTHING);
        }
    }

    fn fill_place(&self, claim: &mut Claim, word: u64) {
        // Release: the table left the tree before whoever drains reads this.
        let index = self.ring_index(claim.next);
        self.ring().entry(index).0.store(word, Ordering::Release);
        claim.next += 1;
    }

    /// Waits for a grace period and frees every table that has left the tree and was recorded before the call, unless
    /// another thread is doing just that.
    ///
    /// Operations call this themselves when many tables wait; call it when memory should come back now. Costs a grace
    /// period and a look at each entry of the freed tables above the last level. A participant of another machine frees
    /// nothing.
    pub fn reclaim(&self, who: &mut Participant<'_, M>) {
        if self.check_machine(who.machine()).is_err() {
            return;
        }
        let ring = &self.backlog;
        let taken = ring.draining.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed);
        if taken.is_err() {
            self.machine.relax();
            return;
        }
        let head = ring.head.load(Ordering::Relaxed);
        let tail = ring.tail.load(Ordering::Relaxed);
        let mut filled = head;
        // Acquire: pairs with the release of `fill_place`.
        while filled < tail && self.place(filled).load(Ordering::Acquire) != UNFILLED {
            filled += 1;
        }
        if filled > head {
            if !skips(Skip::GracePeriod) {
                who.synchronize();
            }
            for position in head..filled {
                let word = self.place(position).load(Ordering::Relaxed);
                self.place(position).store(UNFILLED, Ordering::Relaxed);
                self.free_recorded(word);
            }
            // Release: the places are empty before they can be claimed again.
            ring.head.store(filled, Ordering::Release);
        } else if tail > head {
            // The next place is claimed, and its owner must get on before anything can be freed.
            self.machine.relax();
        }
        ring.draining.store(0, Ordering::Release);
    }

    fn place(&self, position: u64) -> &AtomicU64 {
        &self.ring().entry(self.ring_index(position)).0
    }

    /// How many tables (with what hangs below them) wait to be freed.
    pub fn waiting(&self) -> usize {
        let ring = &self.backlog;
        let head = ring.head.load(Ordering::Relaxed);
        ring.tail.load(Ordering::Relaxed).saturating_sub(head) as usize
    }

    /// Helps to free when half of the places are taken.
    pub(crate) fn reclaim_if_many(&self, who: &mut Participant<'_, M>) {
        if self.waiting() as u64 > self.backlog.capacity / 2 {
            self.reclaim(who);
        }
    }

    /// Claims one place inside a pin.
    pub(crate) fn claim_one(&self) -> Result<Claim, Error> {
        let claim = self.claim(1);
        if claim.left() == 0 { Err(Error::Backlog) } else { Ok(claim) }
    }

    fn free_recorded(&self, word: u64) {
        if let Some(level) = Level::new((word & 7) as i8 - 3) {
            self.free_subtree(Hpa(word & !7), level);
        }
    }

    /// Frees a table and everything below it that nobody can reach.
    pub(crate) fn free_subtree(&self, table: Hpa, level: Level) {
        if level < Level::LAST {
            let entries = self.owned(table);
            for index in 0..self.geometry().entries() {
                let entry = entries.entry(index).0.load(Ordering::Acquire);
                if F::is_table(entry, level) {
                    self.free_subtree(self.format.next(entry), level.below());
                }
            }
        }
        Self::free_tables(self.machine, table, 1);
    }

    /// Frees the ring and what is in it; the tree is going away.
    pub(crate) fn drop_backlog(&mut self) {
        let head = self.backlog.head.load(Ordering::Relaxed);
        let tail = self.backlog.tail.load(Ordering::Relaxed);
        for position in head..tail {
            let word = self.place(position).load(Ordering::Relaxed);
            self.free_recorded(word);
        }
        Self::free_tables(self.machine, self.backlog.page, 1);
    }
}
