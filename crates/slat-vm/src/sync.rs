//! Every atomic of this crate comes through here, so that loom can stand in for all of them, as it does in the engine.

#[cfg(not(loom))]
pub(crate) use core::sync::atomic::{
    AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
};
#[cfg(loom)]
pub(crate) use slat::sync::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
