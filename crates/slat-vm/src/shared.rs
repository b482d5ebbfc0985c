//! One value with several owners: what more than one version of a slot has, or a vCPU and whoever reads its ring.
#![expect(unsafe_code, reason = "a counted pointer whose allocation can fail is made by hand")]

use alloc::boxed::Box;
use core::fmt;
use core::ops::Deref;
use core::ptr::NonNull;

use crate::heap::{OutOfMemory, boxed};
use crate::sync::{AtomicUsize, Ordering, fence};

struct Inner<T> {
    owners: AtomicUsize,
    value: T,
}

/// A counted pointer, as the standard library's, but refused memory is an error.
pub(crate) struct Shared<T>(NonNull<Inner<T>>);

// SAFETY: owners on several threads read the value, and the last one drops it, wherever it is.
unsafe impl<T: Send + Sync> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// # Errors
    /// [`OutOfMemory`].
    pub(crate) fn new(value: T) -> Result<Self, OutOfMemory> {
        let inner = boxed(Inner { owners: AtomicUsize::new(1), value })?;
        Ok(Self(NonNull::from(Box::leak(inner))))
    }

    /// Whether both own the same.
    pub(crate) fn is(&self, other: &Self) -> bool {
        self.0 == other.0
    }

    fn inner(&self) -> &Inner<T> {
        // SAFETY: it lives as long as it has an owner, and `self` is one.
        unsafe { self.0.as_ref() }
    }
}

impl<T> Clone for Shared<T> {
    fn clone(&self) -> Self {
        // Whoever clones has it already: no order is needed.
        self.inner().owners.fetch_add(1, Ordering::Relaxed);
        Self(self.0)
    }
}

impl<T> Deref for Shared<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.inner().value
    }
}

impl<T> Drop for Shared<T> {
    fn drop(&mut self) {
        // Release: what this owner did comes before the last one's drop, which acquires it.
        if self.inner().owners.fetch_sub(1, Ordering::Release) != 1 {
            return;
        }
        fence(Ordering::Acquire);
        // SAFETY: this was the last owner, and the pointer came from a box.
        unsafe { drop(Box::from_raw(self.0.as_ptr())) }
    }
}

impl<T: fmt::Debug> fmt::Debug for Shared<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.deref().fmt(f)
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    #[test]
    fn the_last_owner_drops_the_value_once() {
        struct Counted<'a>(&'a AtomicUsize);
        impl Drop for Counted<'_> {
            fn drop(&mut self) {
                self.0.fetch_add(1, Ordering::Relaxed);
            }
        }
        let drops = AtomicUsize::new(0);
        let first = Shared::new(Counted(&drops)).unwrap();
        let others: [_; 8] = core::array::from_fn(|_| first.clone());
        drop(first);
        std::thread::scope(|scope| {
            for other in others {
                scope.spawn(move || drop(other));
            }
        });
        assert_eq!(drops.load(Ordering::Relaxed), 1);
    }
}
