//! Which CPU has which cache line of the tables.

use slat::Hpa;

use super::{Cause, Fiber, Time, advance, current, now, wait_until};

const LINE: u64 = 64;
const NOBODY: u32 = u32::MAX;
/// Whoever wants to read it.
const EVERYBODY: u32 = u32::MAX - 1;

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

    /// Whether an access to the line has to wait for another CPU: a store if any other has it, a load if another has
    /// changed it since it was read last.
    pub(crate) fn is_elsewhere(&mut self, at: Hpa, store: bool) -> bool {
        let me = me();
        let owner = self.line(at).owner;
        owner != me && owner != NOBODY && (store || owner != EVERYBODY)
    }

    /// The calling fiber's CPU has the line from now on, alone for a store.
    pub(crate) fn own(&mut self, at: Hpa, store: bool) {
        let elsewhere = self.is_elsewhere(at, store);
        let line = self.line(at);
        if store {
            line.owner = me();
        } else if elsewhere {
            line.owner = EVERYBODY;
        }
    }

    /// The calling fiber's CPU takes the line, alone for a store, which takes `transfer` if it was elsewhere: one
    /// transfer after the other. Call [`sync`] before, not while anything is borrowed.
    ///
    /// [`sync`]: super::sync
    pub(crate) fn take(&mut self, at: Hpa, store: bool, transfer: Time) {
        let elsewhere = self.is_elsewhere(at, store);
        self.own(at, store);
        if elsewhere {
            let line = self.line(at);
            wait_until(line.free, Cause::LineWait);
            advance(transfer, Cause::Line);
            line.free = now();
        }
    }
}

fn me() -> u32 {
    current().map_or(NOBODY, |Fiber(number)| number)
}
