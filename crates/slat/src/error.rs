//! Why an operation stopped, and what its caller needs to go on.

use core::fmt;

use crate::{Gpa, NoMemory, Owner};

/// Why an operation on a tree stopped. What it did before `at` stays done; nothing is half done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Error {
    /// A range or address reaches beyond the tree's guest addresses.
    OutOfRange {
        /// The first address that is too large for this tree.
        limit: Gpa,
    },
    /// An address or size is not a multiple of what it must be.
    Misaligned {
        /// What it must be a multiple of, in bytes.
        to: u64,
    },
    /// The output addresses reach beyond what the format can express.
    OutputTooLarge {
        /// Width of an output address in this format.
        bits: u32,
    },
    /// No leaf can stand at this level in this format.
    Level(crate::Level),
    /// The reserve ran out: [top it up](crate::Reserve::top_up) to `tables` in hand and call again from `at`.
    NeedTables {
        /// The first address that was not dealt with.
        at: Gpa,
        /// How many tables the next step takes, those in hand included. A split goes on with fewer, a level at a time.
        tables: usize,
    },
    /// The machine has no memory for a table that had to be allocated.
    NoMemory(NoMemory),
    /// Somebody else owns this frame.
    Owned {
        /// Where.
        at: Gpa,
        /// Who.
        owner: Owner,
    },
    /// The participant, pin, reserve or unlinked tree belongs to another machine than the tree.
    OtherMachine,
    /// The template or unlinked tree was made by a tree whose format is configured differently.
    OtherFormat,
    /// Something stands where an unlinked tree was to be linked.
    Occupied {
        /// Where.
        at: Gpa,
    },
    /// There is no table yet that an unlinked tree could be linked into.
    NoTable {
        /// The level at which the tree ends.
        level: crate::Level,
    },
    /// Another thread is changing this entry: let the guest run again, or call again.
    Retry,
    /// More tables wait for a grace period than the backlog holds: call [`Tree::reclaim`](crate::Tree::reclaim),
    /// then again.
    Backlog,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OutOfRange { limit } => write!(f, "guest addresses end below {limit}"),
            Self::Misaligned { to } => write!(f, "address or size is not a multiple of {to:#x}"),
            Self::OutputTooLarge { bits } => {
                write!(f, "host-physical addresses have at most {bits} bits in this format")
            }
            Self::Level(level) => write!(f, "no leaf can stand at level {}", level.number()),
            Self::NeedTables { at, tables } => {
                write!(f, "a reserve of {tables} page tables is needed to go on at {at}")
            }
            Self::NoMemory(no) => no.fmt(f),
            Self::Owned { at, owner } => write!(f, "{at} belongs to owner {}", owner.0),
            Self::OtherMachine => {
                f.write_str("the participant, reserve or unlinked tree belongs to another machine than the tree")
            }
            Self::OtherFormat => f.write_str("made for a tree with another configuration of the format"),
            Self::Occupied { at } => write!(f, "something is mapped or noted at {at}: unmap it first"),
            Self::NoTable { level } => {
                write!(f, "the entry at level {} is empty: map something beside first", level.number())
            }
            Self::Retry => f.write_str("another thread is changing this entry: try again"),
            Self::Backlog => f.write_str("too many tables wait to be freed: reclaim first"),
        }
    }
}

impl core::error::Error for Error {}

impl From<NoMemory> for Error {
    fn from(no: NoMemory) -> Self {
        Self::NoMemory(no)
    }
}
