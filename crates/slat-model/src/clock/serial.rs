//! What only one can use at a time: who comes first in virtual time has it first.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;

use super::{Cause, Fiber, Time, advance, current, now, sync, wait_until};

/// A thing that is used by one after the other: a lock, a cache line, an interconnect.
#[derive(Debug, Default)]
pub struct Serial {
    /// When those are through that have come and are not.
    ends: RefCell<VecDeque<Time>>,
    owner: Cell<Option<Fiber>>,
    busy: Cell<Time>,
}

/// How a use of a [`Serial`] went.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shared {
    /// How long it was waited for.
    pub waited: Time,
    /// Whether another fiber had it before.
    pub moved: bool,
    /// How many were before, in use or in wait.
    pub ahead: usize,
}

impl Serial {
    /// Nobody has used it.
    pub fn new() -> Self {
        Self::default()
    }

    /// The calling fiber uses it, when all are through that came before; until then it waits for `wait`. `takes` says
    /// for how long and for what: it is told whether it was waited for, and whether another fiber had it last. The
    /// calling fiber goes on when that is over.
    pub fn occupy<const N: usize>(
        &self,
        wait: Cause,
        takes: impl FnOnce(Shared) -> [(Cause, Time); N],
    ) -> Shared {
        sync();
        let mut ends = self.ends.borrow_mut();
        while ends.front().is_some_and(|&end| end <= now()) {
            ends.pop_front();
        }
        let begins = ends.back().copied().unwrap_or_default().max(now());
        let me = current();
        let before = self.owner.replace(me);
        let moved = before.is_some() && before != me;
        let shared = Shared { waited: begins.since(now()), moved, ahead: ends.len() };
        wait_until(begins, wait);
        for (cause, time) in takes(shared) {
            advance(time, cause);
        }
        self.busy.set(self.busy.get().after(now().since(begins)));
        ends.push_back(now());
        shared
    }

    /// How long it was in use, by all fibers together.
    pub fn busy(&self) -> Time {
        self.busy.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::{Simulation, advance};

    #[test]
    fn users_come_one_after_the_other_in_the_order_of_their_clocks() {
        let lock = Serial::new();
        let ends = Cell::new([Time(0); 3]);
        let mut simulation = Simulation::new();
        for (index, at) in [20, 0, 10].into_iter().enumerate() {
            let (lock, ends) = (&lock, &ends);
            let body = move || {
                advance(Time(at), Cause::Guest);
                let takes =
                    |shared: Shared| [(Cause::LockWork, Time(if shared.moved { 40 } else { 30 }))];
                let shared = lock.occupy(Cause::LockWait, takes);
                assert_eq!(shared.moved, at > 0);
                assert_eq!(shared.ahead as u64, at / 10);
                let mut all = ends.get();
                all[index] = now();
                ends.set(all);
            };
            simulation.spawn(Time(0), body).unwrap();
        }
        assert_eq!(simulation.run(), Time(110));
        assert_eq!(ends.get(), [Time(110), Time(30), Time(70)]);
        assert_eq!(lock.busy(), Time(110));
    }
}
