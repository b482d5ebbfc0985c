//! Who may change the slots: one thread at a time, and never a vCPU that faults.

use slat::Machine;

use crate::sync::{AtomicU32, Ordering};

/// A lock that is waited for in [`Machine::relax`]. It guards no data of its own: its guard is the proof that nobody
/// else is between a change's first look and its last step.
#[derive(Debug)]
pub(crate) struct Lock {
    /// The next ticket to be given out.
    next: AtomicU32,
    /// The ticket whose turn it is.
    turn: AtomicU32,
}

/// The proof that the lock is held.
#[derive(Debug)]
pub(crate) struct Held<'l> {
    lock: &'l Lock,
    ticket: u32,
}

impl Lock {
    pub(crate) fn new() -> Self {
        Self { next: AtomicU32::new(0), turn: AtomicU32::new(0) }
    }

    /// Waits until those who came before have had the lock. Not to be called while pinned, nor from interrupt context.
    pub(crate) fn lock<M: Machine>(&self, machine: &M) -> Held<'_> {
        let ticket = self.next.fetch_add(1, Ordering::Relaxed);
        // Acquire: what the last holder did comes before what this one does.
        while self.turn.load(Ordering::Acquire) != ticket {
            machine.relax();
        }
        Held { lock: self, ticket }
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.lock.turn.store(self.ticket.wrapping_add(1), Ordering::Release);
    }
}
