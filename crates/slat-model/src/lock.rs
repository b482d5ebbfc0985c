//! How one CPU's TLB is guarded: whoever accesses memory through a translation holds the lock until the access is
//! done, so an invalidation that takes it has waited for the access.
#![expect(unsafe_code, reason = "a lock hands out the only reference to what it guards")]

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};

/// Looks at a held lock before the thread gives its time slice away.
const SPINS: u32 = 100;

/// A spin lock on cache lines of its own: one exchange to take, one store to give back. A panic while it is held
/// gives it back.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Spin<T> {
    held: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: the lock lets one thread at a time reach the value, so sharing it only sends the value.
unsafe impl<T: Send> Sync for Spin<T> {}

impl<T> Spin<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self { held: AtomicBool::new(false), value: UnsafeCell::new(value) }
    }

    #[inline(always)]
    pub(crate) fn lock(&self) -> Held<'_, T> {
        if self.held.swap(true, Ordering::Acquire) {
            self.wait();
        }
        Held { lock: self }
    }

    #[cold]
    fn wait(&self) {
        loop {
            for _ in 0..SPINS {
                if !self.held.load(Ordering::Relaxed) && !self.held.swap(true, Ordering::Acquire) {
                    return;
                }
                std::hint::spin_loop();
            }
            std::thread::yield_now();
        }
    }
}

/// The proof that the lock is held.
#[derive(Debug)]
pub(crate) struct Held<'l, T> {
    lock: &'l Spin<T>,
}

// SAFETY: sharing a guard shares no more than `&T`.
unsafe impl<T: Sync> Sync for Held<'_, T> {}

impl<T> Deref for Held<'_, T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: this guard is the only one, so nobody writes the value while it is borrowed.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for Held<'_, T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: this guard is the only one and is borrowed mutably.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for Held<'_, T> {
    #[inline(always)]
    fn drop(&mut self) {
        self.lock.held.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holders_exclude_each_other_and_a_panic_gives_the_lock_back() {
        let counter = Spin::new(0u64);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..10_000).for_each(|_| *counter.lock() += 1));
            }
        });
        assert_eq!(*counter.lock(), 40_000);
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _held = counter.lock();
            panic!("while held");
        }));
        assert!(panicked.is_err());
        assert_eq!(*counter.lock(), 40_000);
    }
}
