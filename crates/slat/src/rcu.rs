//! Grace periods: when it is certain that nobody still stands in a table that left the tree (rule 1).
//!
//! # How it works, and why it is enough
//! Each participant owns one [`Slot`] with a counter: even means not pinned, odd means pinned. Only its owner writes
//! it. A pin makes it odd with a release store and then issues a full fence before it reads any entry; giving the pin
//! up makes it even with a release store.
//!
//! A grace period starts with a full fence, reads every counter, and waits for each odd one to change. Take one
//! participant P, and one exchange X that the caller has made, or that another thread made and handed over (the backlog
//! releases and acquires each table). The two fences are totally ordered.
//!
//! - If P's comes first, the grace period reads P's odd counter or a later value, and waits until that has changed. It
//!   ends with an acquire of what P stored when it unpinned, or later. P's last use of the table comes before that store,
//!   and so before whatever follows the grace period.
//! - If the grace period's comes first, then P's reads after its own fence see X, and P cannot find the table any more.
//!
//! A participant that unpins and pins again meanwhile has changed its counter: nobody is starved by one that pins often.
//! That is also why the store of a pin is a release. The value that ends the wait can be that of P's next pin, and a
//! plain store does not carry on what the store before it released.
//!
//! The counter has 64 bits and does not wrap in practice (580 years at one pin a nanosecond).
//!
//! What follows: *everything that is decided from what a pinned walk has read must happen before it unpins*, and
//! nothing is freed before a grace period that began after its last link was taken away.

use core::cell::Cell;
use core::fmt;
use core::marker::PhantomData;

use crate::gate::Gate;
use crate::machine::{Event, Machine};
use crate::sync::{AtomicU32, AtomicU64, Ordering, fence, store_then_fence};

/// The place of one participant, on cache lines of its own.
#[derive(Debug)]
#[repr(align(128))]
pub struct Slot {
    pin: AtomicU64,
    taken: AtomicU32,
    /// The vCPU gate of this participant, if it is a vCPU.
    pub gate: Gate,
}

impl Slot {
    /// A free slot.
    #[cfg(not(loom))]
    pub const fn new() -> Self {
        Self { pin: AtomicU64::new(0), taken: AtomicU32::new(0), gate: Gate::new() }
    }

    /// A free slot.
    #[cfg(loom)]
    pub fn new() -> Self {
        Self { pin: AtomicU64::new(0), taken: AtomicU32::new(0), gate: Gate::new() }
    }
}

impl Default for Slot {
    fn default() -> Self {
        Self::new()
    }
}

/// Every slot of the machine is taken: give the machine more, or register fewer participants.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NoSlot;

impl fmt::Display for NoSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("every participant slot of the machine is taken: provide more slots")
    }
}

impl core::error::Error for NoSlot {}

/// A vCPU or a thread that maintains tables: whoever walks.
///
/// It can move to another thread while it is not pinned; it cannot be shared.
#[derive(Debug)]
pub struct Participant<'m, M: Machine> {
    machine: &'m M,
    slot: &'m Slot,
    index: usize,
    depth: Cell<u32>,
    /// What this participant has done, counted without sharing anything (rule 6).
    pub counters: Counters,
}

impl<'m, M: Machine> Participant<'m, M> {
    /// Takes a free slot of the machine.
    ///
    /// # Errors
    /// [`NoSlot`] if none is free.
    pub fn register(machine: &'m M) -> Result<Self, NoSlot> {
        for (index, slot) in machine.slots().iter().enumerate() {
            if slot.taken.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                let (depth, counters) = (Cell::new(0), Counters::default());
                return Ok(Self { machine, slot, index, depth, counters });
            }
        }
        Err(NoSlot)
    }

    /// The machine it is registered with.
    pub fn machine(&self) -> &'m M {
        self.machine
    }

    /// The index of its slot, as [`Machine::kick`] gets it.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Its gate, for a vCPU.
    pub fn gate(&self) -> &'m Gate {
        &self.slot.gate
    }

    /// Pins: until the guard is dropped, no table that a walk finds is freed.
    ///
    /// While pinned, do not allocate, block, or wait; a grace period cannot be asked for, since that takes the
    /// participant mutably. Nested pins cost a counter. A pin that is leaked makes every grace period wait until its
    /// participant is dropped.
    #[inline(always)]
    pub fn pin(&self) -> Pin<'_, M> {
        let depth = self.depth.get();
        // Saturated by pins that were leaked, it stays so: then the participant is pinned for good.
        self.depth.set(depth.saturating_add(1));
        if depth == 0 {
            self.machine.preemption(true);
            // Rule 1: the full fence orders the pin before every entry that is read under it.
            store_then_fence(&self.slot.pin, self.slot.pin.load(Ordering::Relaxed) + 1);
            self.machine.observe(Event::Pinned);
        }
        Pin { participant: self, not_send: PhantomData }
    }

    /// Waits until every pin that was held when it was called has been given up: a bounded spin, in which
    /// [`Machine::relax`] is called. What was unlinked before can be freed after.
    pub fn synchronize(&mut self) {
        // Rule 1: pairs with the fence of each pin, see the head of this file.
        fence(Ordering::SeqCst);
        for slot in self.machine.slots() {
            if core::ptr::eq(slot, self.slot) {
                // Not pinned: a pin borrows its participant, which is ours alone here. (One that was leaked guards
                // nothing any more.)
                continue;
            }
            let seen = slot.pin.load(Ordering::Acquire);
            if seen & 1 == 1 {
                // Acquire: the last use under that pin comes before what follows the grace period.
                while slot.pin.load(Ordering::Acquire) == seen {
                    self.machine.relax();
                }
            }
        }
        bump(&self.counters.grace_periods, 1);
        self.machine.observe(Event::GracePeriod);
    }
}

impl<M: Machine> Drop for Participant<'_, M> {
    fn drop(&mut self) {
        // A leaked pin leaves the counter odd; the slot must not block grace periods for ever after its owner.
        let pin = self.slot.pin.load(Ordering::Relaxed);
        self.slot.pin.store(pin + (pin & 1), Ordering::Release);
        self.slot.gate.leave_for_good();
        self.slot.taken.store(0, Ordering::Release);
    }
}

/// The proof that its participant is pinned; giving it up is dropping it. Not to be sent to another thread.
#[derive(Debug)]
pub struct Pin<'p, M: Machine> {
    participant: &'p Participant<'p, M>,
    not_send: PhantomData<*const ()>,
}

impl<'p, M: Machine> Pin<'p, M> {
    /// Whose pin it is.
    #[inline(always)]
    pub fn counters(&self) -> &'p Counters {
        &self.participant.counters
    }

    /// The machine.
    #[inline(always)]
    pub fn machine(&self) -> &'p M {
        self.participant.machine
    }
}

impl<M: Machine> Drop for Pin<'_, M> {
    #[inline(always)]
    fn drop(&mut self) {
        let participant = self.participant;
        let depth = participant.depth.get();
        if depth == u32::MAX {
            return;
        }
        participant.depth.set(depth - 1);
        if depth == 1 {
            participant.machine.observe(Event::Unpinned);
            let pin = &participant.slot.pin;
            // Release: everything done under the pin comes before whoever sees it given up.
            pin.store(pin.load(Ordering::Relaxed) + 1, Ordering::Release);
            participant.machine.preemption(false);
        }
    }
}

/// What a participant has done since it was registered. Plain counters, read by their owner.
#[derive(Clone, Debug, Default)]
pub struct Counters {
    /// Entries that walks have visited (looked at one by one or scanned).
    pub visited: Cell<u64>,
    /// Entries that were exchanged.
    pub exchanged: Cell<u64>,
    /// Blocks that were split.
    pub splits: Cell<u64>,
    /// Tables that became a block.
    pub collapses: Cell<u64>,
    /// Tables linked into a tree.
    pub linked: Cell<u64>,
    /// Tables detached from a tree.
    pub detached: Cell<u64>,
    /// Publishes.
    pub publishes: Cell<u64>,
    /// Invalidations of a range or of everything, on all CPUs.
    pub invalidations: Cell<u64>,
    /// Invalidations of one address on one CPU.
    pub local_invalidations: Cell<u64>,
    /// Times a LOCKED or DEAD entry sent a walk back to the root.
    pub retries: Cell<u64>,
    /// Grace periods waited for.
    pub grace_periods: Cell<u64>,
}

/// Adds to a counter of one's own.
#[inline(always)]
pub(crate) fn bump(counter: &Cell<u64>, by: u64) {
    counter.set(counter.get().wrapping_add(by));
}
