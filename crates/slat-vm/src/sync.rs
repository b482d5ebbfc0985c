//! Every atomic of this crate comes through here, so that loom or shuttle can stand in for all of them, as in the engine.

#[cfg(not(any(loom, shuttle)))]
pub(crate) use core::sync::atomic::{
    AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
};
#[cfg(any(loom, shuttle))]
pub(crate) use slat::sync::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
