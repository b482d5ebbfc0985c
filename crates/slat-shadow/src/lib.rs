//! x86 shadow paging: tables that hardware walks in place of the guest's own, for guests that run without a second
//! level in hardware.
//!
//! A shadow entry is what a guest's entry says, composed with where that guest-physical page lies below
//! ([`GuestMemory`]). It is made by a fault ([`Shadow::fault`]), and never permits more than the guest's entries and the
//! second level did. What takes rights away comes after it:
//!
//! | what changes | who says so | what happens |
//! |---|---|---|
//! | a table of the guest, above the last level | the write faults: [`ShadowExit::EmulateWrite`], [`Shadow::written`] | the entries that shadow it go |
//! | a last-level table | nobody: it is writable, "unsync" | looked at when the guest flushes: [`Shadow::synchronise`], [`Shadow::invalidate_page`], [`Shadow::load_root`] |
//! | the second level: the host takes a page back, a log begins or is collected, a slot goes | the embedder, after the second level has changed: [`Shadow::zap`], [`Shadow::write_protect`], [`Shadow::delete_slot`] | entries are found by the [reverse maps](rmap) of their frames |
//!
//! [`VmMemory`] makes a [`slat_vm::Vm`] the second level, with its slots, its host and its dirty log.
//!
//! # Who waits for whom
//! A [`Shadow`] is changed through `&mut`: put it behind a lock. Nothing in it waits for the host: what the host has to
//! do for a fault is an exit, [`ShadowExit::SecondLevel`], to be done without the lock. That a fault which read the
//! second level before a change installs its entry before the change's call here follows from the lock.
//!
//! # Sources
//! Entries, walks and error codes: Intel SDM vol. 3, chapter 5; AMD APM vol. 2, chapter 5. When a CPU may use what its
//! tables said before: Intel SDM vol. 3, 5.10.
#![cfg_attr(not(test), no_std)]

extern crate alloc;

mod age;
mod below;
mod fault;
mod guest;
mod histogram;
mod memory;
mod page;
mod pages;
mod protect;
mod pte;
pub mod rmap;
mod root;
mod shadow;
mod sync;
mod walk;
mod write;
mod zap;

pub use below::{HostBytes, VmMemory};
pub use fault::ShadowExit;
pub use guest::{Below, GuestAccess, GuestMemory, Missing, PagingMode};
pub use histogram::Histogram;
pub use page::Role;
pub use pte::Rights;
pub use root::Root;
pub use shadow::{OutOfMemory, Shadow, ShadowError, ShadowOptions, ShadowStatistics};
pub use walk::ErrorCode;
