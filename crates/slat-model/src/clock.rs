//! Virtual time: threads that are fibers of one thread, under a scheduler that always runs the one with the least time.
//!
//! What runs is the real engine; what it does is charged from a cost profile instead of being timed. The same program
//! takes the same virtual time on any computer, to the picosecond, for one vCPU or a thousand.
//!
//! # Order
//! Each fiber has a clock of its own. What only concerns itself it does at once, and its clock runs ahead of the others.
//! Before it touches what others touch too (a cache line that another CPU has, a lock, the interconnect) it lets all run
//! that are behind it ([`sync`]). Whoever comes first in virtual time gets it first; the others wait for it in their
//! clocks ([`Serial`]).
//!
//! # Causes
//! A clock moves for a [`Cause`], so that what a fiber's time went into adds up to its time ([`ledger`]).

mod fibers;
mod ledger;
mod lines;
mod serial;
mod timed;

pub use fibers::{
    Fiber, Simulation, advance, current, ledger, now, park, sync, unpark, wait_until,
};
pub use ledger::{Cause, Ledger};
pub use lines::Lines;
pub use serial::{Serial, Shared};
pub use timed::{Costs, Timed};

/// Virtual time or a duration of it, in picoseconds.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Time(pub u64);

impl Time {
    /// So many nanoseconds, rounded to picoseconds; nothing for what is negative or no number.
    pub fn from_ns(ns: f64) -> Self {
        Self((ns * 1e3).round() as u64)
    }

    /// In seconds.
    pub fn as_seconds(self) -> f64 {
        self.0 as f64 / 1e12
    }

    /// In nanoseconds.
    pub fn as_ns(self) -> f64 {
        self.0 as f64 / 1e3
    }

    /// Later by `more`, at most at the end of time.
    pub const fn after(self, more: Self) -> Self {
        Self(self.0.saturating_add(more.0))
    }

    /// The duration since `earlier`; none if that is later.
    pub const fn since(self, earlier: Self) -> Self {
        Self(self.0.saturating_sub(earlier.0))
    }
}
