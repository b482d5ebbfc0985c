//! Second-level address translation: the page tables that turn guest-physical into host-physical addresses, shared by
//! running vCPUs and by everybody who changes them, without a lock.
//!
//! # Embedding
//! Implement [`Machine`] for the machine that you run on, and you have a stage-2 MMU:
//!
//! ```
//! use core::ptr::NonNull;
//! use slat::format::arm::{K4, Stage2};
//! use slat::maintenance::Instruction;
//! use slat::{Attributes, Entry, Gpa, GpaRange, Hpa, Level, Lookup, Machine, Participant, Reserve, Slot, Tree};
//! # mod frames {
//! #     use std::alloc::{Layout, alloc_zeroed, dealloc};
//! #     fn layout(n: usize) -> Layout { Layout::from_size_align(n * 4096, n * 4096).unwrap() }
//! #     pub fn allocate_zeroed(n: usize) -> Option<u64> { Some(unsafe { alloc_zeroed(layout(n)) } as u64) }
//! #     pub unsafe fn free(first: u64, n: usize) { unsafe { dealloc(first as *mut u8, layout(n)) } }
//! # }
//! # fn execute(_: Instruction) {}
//!
//! struct Board {
//!     slots: [Slot; 5], // four vCPUs and a thread that maintains tables
//! }
//!
//! // SAFETY: tables come from our frame allocator, identity-mapped, and nobody else touches them.
//! unsafe impl Machine for Board {
//!     fn allocate(&self, tables: usize) -> Option<Hpa> {
//!         frames::allocate_zeroed(tables).map(Hpa)
//!     }
//!     unsafe fn free(&self, first: Hpa, tables: usize) {
//!         unsafe { frames::free(first.0, tables) }
//!     }
//!     fn entries(&self, table: Hpa) -> NonNull<Entry> {
//!         NonNull::new(table.0 as *mut Entry).expect("no table at 0")
//!     }
//!     fn slots(&self) -> &[Slot] {
//!         &self.slots
//!     }
//!     fn execute(&self, instruction: Instruction) {
//!         execute(instruction) // at EL2: slat::maintenance::arm::execute
//!     }
//! }
//!
//! let board = Board { slots: Default::default() };
//! let tree = Tree::new(&board, Stage2::<K4>::new(40)?, 1)?;
//! let worker = Participant::register(&board)?;
//! let mut reserve = Reserve::new(&board);
//!
//! // 1 GiB of guest memory at 1 GiB, in the largest blocks that fit; then 4 KiB of it read-only.
//! let ram = GpaRange::new(Gpa(1 << 30), 1 << 30).expect("not empty");
//! reserve.top_up(tree.tables_needed(ram, Level::LAST))?;
//! let rwx = tree.template(Attributes::RWX)?;
//! let largest = Level::new(1).expect("a level");
//! tree.map(&worker, &mut reserve, ram, Hpa(8 << 30), rwx, largest)?;
//! let page = GpaRange::new(Gpa(1 << 30), 4096).expect("not empty");
//! tree.split(&worker, &mut reserve, page, Level::LAST)?;
//! tree.write_protect(&worker, page, |_| {})?;
//!
//! let pin = worker.pin();
//! let Lookup::Mapped { output, template, .. } = tree.look_up(&pin, Gpa(0x4000_0123))? else { panic!() };
//! assert_eq!(output, Hpa((8 << 30) + 0x123));
//! assert!(!tree.attributes(template).write);
//! // vttbr_el2 = tree.root_register(), vtcr_el2 = tree.format().vtcr()
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! What a fault handler calls is [`Tree::install`]; memslots, host pages, dirty logs and everything else that makes
//! tables into guest memory is the crate `slat-vm`.
//!
//! # The way of an address
//! A [`Gpa`] has an index at each [`Level`] ([`Geometry`]). A [`Format`] says what the bits of an [`Entry`] mean. Tables
//! of entries live in the memory of the [`Machine`]. A [`walk`] visits the entries of a range, under a pin ([`rcu`]) that
//! keeps tables from being freed; each operation of a [`Tree`] is a visitor in a file of its own.
//! What changed is published and invalidated in the architecture's sequence ([`maintenance`]), and vCPUs come and go
//! through a [`gate`].
//!
//! # Concurrency
//! There is no lock. Every operation may run at the same time as every other and as the guest; each says what it
//! promises when it returns. The rules behind that are numbered in `ARCHITECTURE.md`, and the code names the rule that
//! an ordering serves.
#![cfg_attr(not(test), no_std)]

mod address;
mod age;
mod backlog;
mod batch;
mod change;
mod collapse;
mod destroy;
mod dirty;
mod entry;
mod error;
pub mod format;
pub mod gate;
mod install;
mod level;
mod lookup;
pub mod machine;
pub mod maintenance;
mod map;
mod protect;
pub mod rcu;
mod relax;
mod reserve;
#[cfg(not(any(loom, shuttle)))]
mod sabotage;
#[cfg(any(loom, shuttle))]
pub mod sabotage;
mod split;
#[cfg(not(any(loom, shuttle)))]
mod sync;
#[cfg(any(loom, shuttle))]
pub mod sync;
mod table;
mod tree;
mod unlinked;
mod unmap;
pub mod vmid;
pub mod walk;

pub use address::{Gpa, GpaRange, Hpa};
pub use destroy::Destroy;
pub use entry::{Entry, Owner};
pub use error::Error;
pub use format::{Attributes, Dirty, Execute, Format, FormatError, Memory};
pub use install::{Installed, Leaf};
pub use level::{Geometry, Level};
pub use lookup::Lookup;
pub use machine::{Event, Machine, Promise};
pub use rcu::{NoSlot, Participant, Pin, Slot};
pub use relax::RelaxedLeaf;
pub use reserve::{NoMemory, Reserve};
pub use tree::{Template, Tree};
pub use unlinked::Unlinked;
pub use unmap::{Edges, Removed};
