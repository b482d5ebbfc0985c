//! Who may change the slots: one thread at a time, and never a vCPU that faults.

use slat::Machine;

use crate::sync::{AtomicU32, Ordering};

/// A lock that is waited for in [`Machine::relax`]. It guards no data of its own: its guard is the proof that nobody
/// else is between a change's first look and its last step.
#[derive(Debug)]
pub(crate) struct Lock(AtomicU32);

/// The proof that the lock is held.
#[derive(Debug)]
pub(crate) struct Held<'l>(&'l Lock);

impl Lock {
    pub(crate) fn new() -> Self {
        Self(AtomicU32::new(0))
    }

    /// Waits until nobody holds the lock. Not to be called while pinned, nor from interrupt context.
    pub(crate) fn lock<M: Machine>(&self, machine: &M) -> Held<'_> {
        // Acquire: what the last holder did comes before what this one does.
        while self.0.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_err() {
            machine.relax();
        }
        Held(self)
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.0.store(0, Ordering::Release);
    }
}
