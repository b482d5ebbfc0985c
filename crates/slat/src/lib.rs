//! Second-level address translation: the page tables that turn guest-physical into host-physical addresses.
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
#[cfg(not(loom))]
mod sabotage;
#[cfg(loom)]
pub mod sabotage;
mod split;
mod sync;
mod table;
mod tree;
mod unlinked;
mod unmap;
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
pub use reserve::{NoMemory, Reserve};
pub use tree::{Template, Tree};
pub use unlinked::Unlinked;
pub use unmap::Edges;
