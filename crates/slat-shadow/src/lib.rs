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
//! ```
//! use slat::{Gpa, GpaRange};
//! use slat_shadow::{GuestAccess, PagingMode, Shadow, ShadowExit, ShadowOptions};
//! use slat_vm::Access;
//! # use slat_shadow::{Below, GuestMemory, Missing};
//! # use std::cell::RefCell;
//! # struct Memory(RefCell<Vec<u64>>);
//! # impl GuestMemory for Memory {
//! #     fn below(&self, gpa: Gpa) -> Option<Below> {
//! #         Some(Below { output: slat::Hpa(1 << 40 | gpa.0), size: 4096, writable: true, device: false })
//! #     }
//! #     fn read(&self, gpa: Gpa) -> Result<u64, Missing> {
//! #         self.0.borrow().get(gpa.0 as usize / 8).copied().ok_or(Missing)
//! #     }
//! #     fn exchange(&self, gpa: Gpa, old: u64, new: u64) -> Result<bool, Missing> {
//! #         let mut words = self.0.borrow_mut();
//! #         let word = words.get_mut(gpa.0 as usize / 8).ok_or(Missing)?;
//! #         Ok(std::mem::replace(word, new) == old)
//! #     }
//! #     fn flush(&self) {}
//! # }
//! # let machine = slat_model::Model::builder().build()?;
//! # let memory = Memory(RefCell::new(vec![0; 8 * 512]));
//! # for table in 1..4 {
//! #     memory.0.borrow_mut()[table * 512] = (table as u64 + 1) << 12 | 7;
//! # }
//! # memory.0.borrow_mut()[4 * 512 + 5] = 6 << 12 | 5;
//! // `machine` implements `slat::Machine`; `memory` is the guest's, with its tables from 0x1000 on.
//! let mut shadow = Shadow::new(&machine, ShadowOptions::default())?;
//! shadow.create_slot(GpaRange::new(Gpa(0), 8 * 4096).expect("not empty"))?;
//! let root = shadow.load_root(&memory, PagingMode::LONG, 0x1000)?;
//! // Run the guest with `root.table()` in `CR3`; at each page fault:
//! match shadow.fault(&memory, &root, 0x5008, GuestAccess::user(Access::Read))? {
//!     ShadowExit::Resume | ShadowExit::Retry => { /* run the guest again */ }
//!     ShadowExit::PageFault(code) => println!("inject {code:?}"),
//!     ShadowExit::SecondLevel { gpa, access, .. } => println!("{access:?} of {gpa} is for the VM"),
//!     other => println!("{other:?}"),
//! }
//! assert_eq!(shadow.statistics().mapped, 1);
//! shadow.drop_root(&memory, root)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
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
