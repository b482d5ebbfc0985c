//! Second-level address translation: the page tables that turn guest-physical into host-physical addresses.
#![cfg_attr(not(test), no_std)]

mod address;
mod entry;
pub mod format;
pub mod gate;
mod level;
pub mod machine;
pub mod maintenance;
pub mod rcu;
mod reserve;
mod sync;
mod table;
mod tree;

pub use address::{Gpa, GpaRange, Hpa};
pub use entry::{Entry, Owner};
pub use format::{Attributes, Dirty, Execute, Format, FormatError, Memory};
pub use level::{Geometry, Level};
pub use machine::{Event, Machine, Promise};
pub use rcu::{NoSlot, Participant, Pin, Slot};
pub use reserve::{NoMemory, Reserve};
pub use tree::Tree;
