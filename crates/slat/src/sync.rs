//! Every atomic of the engine comes through here, so that loom or shuttle can stand in for all of them.

#[cfg(not(all(target_arch = "x86_64", not(any(loom, shuttle)))))]
use crate::sabotage::{Skip, skips};
#[cfg(not(any(loom, shuttle)))]
pub(crate) use core::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
#[cfg(loom)]
mod scheduled;
#[cfg(loom)]
pub use scheduled::*;
#[cfg(shuttle)]
pub use shuttle::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
};

/// Stores `value` (a release) and orders the store before every later load, as rules 1 and 11 demand.
///
/// On x86 a sequentially consistent exchange is a full barrier and costs half of `mfence`; elsewhere it is the store
/// and a full fence.
#[inline(always)]
pub(crate) fn store_then_fence(place: &AtomicU64, value: u64) {
    #[cfg(all(target_arch = "x86_64", not(any(loom, shuttle))))]
    {
        place.swap(value, Ordering::SeqCst);
        core::sync::atomic::compiler_fence(Ordering::SeqCst);
    }
    #[cfg(not(all(target_arch = "x86_64", not(any(loom, shuttle)))))]
    {
        let release = if skips(Skip::PinRelease) { Ordering::Relaxed } else { Ordering::Release };
        place.store(value, release);
        if !skips(Skip::PinFence) {
            fence(Ordering::SeqCst);
        }
    }
}
