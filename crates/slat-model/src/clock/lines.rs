//! Which CPU has which cache line of the tables.

use slat::Hpa;

use super::{Fiber, Time, current, now, sync, wait_until};

const LINE: u64 = 64;
const NOBODY: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Line {
    free: Time,
    owner: u32,
}

/// Lines of neighbouring memory that come to be known together.
const TOGETHER: usize = 4096;

/// Every line of memory, all with nobody at first.
#[derive(Debug, Default)]
pub struct Lines(Vec<Option<Box<[Line]>>>);

/// What an access to a line found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Had {
    /// The accessing CPU itself, or nobody.
    Own,
    /// Another.
    Other,
}

impl Lines {
    fn line(&mut self, at: Hpa) -> &mut Line {
        let index = (at.0 / LINE) as usize;
        let (group, index) = (index / TOGETHER, index % TOGETHER);
        if group >= self.0.len() {
            self.0.resize_with(group + 1, || None);
        }
        let unused = || vec![Line { free: Time(0), owner: NOBODY }; TOGETHER].into_boxed_slice();
        &mut self.0[group].get_or_insert_with(unused)[index]
    }

    /// Who has it.
    pub(crate) fn had(&mut self, at: Hpa) -> Had {
        let me = current().map_or(NOBODY, |Fiber(number)| number);
        let owner = self.line(at).owner;
        if owner == me || owner == NOBODY { Had::Own } else { Had::Other }
    }

    /// The calling fiber's CPU takes the line, which takes `transfer` if another has it: one transfer after the other.
    /// Call [`sync`] before, not while anything is borrowed.
    pub(crate) fn take(&mut self, at: Hpa, transfer: Time) -> Time {
        let me = current().map_or(NOBODY, |Fiber(number)| number);
        let line = self.line(at);
        if line.owner == me || line.owner == NOBODY {
            line.owner = me;
            return Time(0);
        }
        let begins = line.free.max(now());
        let ends = begins.after(transfer);
        (line.free, line.owner) = (ends, me);
        let took = ends.since(now());
        wait_until(ends);
        took
    }
}

/// Lets all run that are behind, before a line of another is taken.
pub(crate) fn before_transfer() {
    sync();
}
