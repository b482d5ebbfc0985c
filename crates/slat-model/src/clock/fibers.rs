//! Fibers, and who of them runs.
#![expect(
    unsafe_code,
    reason = "fibers borrow what outlives their simulation, and suspend from deep inside"
)]

use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::marker::PhantomData;

use corosensei::stack::DefaultStack;
use corosensei::{Coroutine, CoroutineResult, Yielder};

use super::{Cause, Ledger, Time};

/// Bytes of a fiber's stack; pages that it does not reach are never there.
const STACK: usize = 256 << 10;

/// One fiber of a simulation, by number from 0 in the order in which they were made.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Fiber(pub u32);

/// Why a fiber lets others run.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pause {
    /// Somebody is behind it.
    Behind,
    /// Until it is told to go on.
    Parked,
}

type Switch = Yielder<(), Pause>;

struct Here {
    /// The clock of the fiber that runs.
    now: Cell<Time>,
    /// The least clock among the others that can run.
    next: Cell<Time>,
    fiber: Cell<Option<Fiber>>,
    /// How the fiber that runs suspends itself.
    switch: Cell<*const Switch>,
    waiting: RefCell<BinaryHeap<Reverse<(Time, u32)>>>,
    /// The clocks of fibers that are parked.
    parked: RefCell<Vec<Option<Time>>>,
    /// What moved each fiber's clock.
    ledgers: RefCell<Vec<Ledger>>,
}

impl Here {
    #[inline]
    fn charge(&self, cause: Cause, time: Time) {
        if let Some(Fiber(number)) = self.fiber.get()
            && let Some(ledger) = self.ledgers.borrow_mut().get_mut(number as usize)
        {
            ledger.charge(cause, time);
        }
    }
}

thread_local! {
    static HERE: Here = const {
        Here {
            now: Cell::new(Time(0)),
            next: Cell::new(Time(u64::MAX)),
            fiber: Cell::new(None),
            switch: Cell::new(std::ptr::null()),
            waiting: RefCell::new(BinaryHeap::new()),
            parked: RefCell::new(Vec::new()),
            ledgers: RefCell::new(Vec::new()),
        }
    };
}

/// The clock of the calling fiber; outside of a simulation, when the last one ended.
pub fn now() -> Time {
    HERE.with(|here| here.now.get())
}

/// The fiber that calls.
pub fn current() -> Option<Fiber> {
    HERE.with(|here| here.fiber.get())
}

/// What a fiber's time has gone into, from its beginning to its clock; if it is parked, to the caller's. Of the
/// simulation that runs, or that ran last.
pub fn ledger(Fiber(number): Fiber) -> Ledger {
    HERE.with(|here| {
        let of = here.ledgers.borrow().get(number as usize).copied();
        let mut ledger = of.unwrap_or_default();
        if let Some(&Some(since)) = here.parked.borrow().get(number as usize) {
            ledger.charge(Cause::Idle, here.now.get().since(since));
        }
        ledger
    })
}

/// The calling fiber has done something that takes so long and concerns nobody else.
#[inline]
pub fn advance(by: Time, cause: Cause) {
    HERE.with(|here| {
        here.now.set(here.now.get().after(by));
        here.charge(cause, by);
    });
}

/// The calling fiber goes on at `time`, or now if that is over.
pub fn wait_until(time: Time, cause: Cause) {
    advance(time.since(now()), cause);
}

/// Lets every fiber run that is behind the calling one.
#[inline]
pub fn sync() {
    let behind = HERE.with(|here| here.next.get() < here.now.get());
    if behind {
        suspend(Pause::Behind);
    }
}

/// The calling fiber stops until another [`unpark`]s it, whose time it has then at least.
pub fn park() {
    suspend(Pause::Parked);
}

/// Lets a parked fiber go on, not earlier than now. Nothing if it is not parked.
pub fn unpark(fiber: Fiber) {
    HERE.with(|here| {
        let parked = here.parked.borrow_mut().get_mut(fiber.0 as usize).and_then(Option::take);
        if let Some(since) = parked {
            let time = since.max(here.now.get());
            here.ledgers.borrow_mut()[fiber.0 as usize].charge(Cause::Idle, time.since(since));
            here.waiting.borrow_mut().push(Reverse((time, fiber.0)));
            here.next.set(here.next.get().min(time));
        }
    });
}

fn suspend(pause: Pause) {
    let switch = HERE.with(|here| here.switch.get());
    // SAFETY: the scheduler has set it to the switch of the fiber that runs, which lies on that fiber's own stack; it
    // is null where no fiber runs.
    if let Some(switch) = unsafe { switch.as_ref() } {
        switch.suspend(pause);
    }
}

/// A set of fibers that share virtual time.
pub struct Simulation<'a> {
    fibers: Vec<Option<Coroutine<(), Pause, ()>>>,
    switches: Vec<*const Switch>,
    started: Vec<Time>,
    borrows: PhantomData<&'a ()>,
}

impl Default for Simulation<'_> {
    fn default() -> Self {
        Self::new()
    }
}

impl<'a> Simulation<'a> {
    /// Without fibers.
    pub fn new() -> Self {
        let (fibers, switches, started) = (Vec::new(), Vec::new(), Vec::new());
        Self { fibers, switches, started, borrows: PhantomData }
    }

    /// Another fiber, which begins at `at`.
    ///
    /// # Errors
    /// There is no memory for its stack.
    pub fn spawn(&mut self, at: Time, body: impl FnOnce() + 'a) -> std::io::Result<Fiber> {
        let number = self.fibers.len();
        let body: Box<dyn FnOnce() + 'a> = Box::new(body);
        // SAFETY: the fiber is dropped with the simulation at the latest, which cannot outlive `'a`.
        let body =
            unsafe { std::mem::transmute::<Box<dyn FnOnce() + 'a>, Box<dyn FnOnce()>>(body) };
        let fiber = Coroutine::with_stack(DefaultStack::new(STACK)?, move |switch: &Switch, ()| {
            HERE.with(|here| here.switch.set(switch));
            body();
        });
        self.fibers.push(Some(fiber));
        self.switches.push(std::ptr::null());
        self.started.push(at);
        Ok(Fiber(number as u32))
    }

    /// Runs until every fiber has ended or is parked for ever, and returns when the last one ended. A panic of a fiber
    /// is passed on.
    pub fn run(mut self) -> Time {
        HERE.with(|here| {
            let mut waiting = here.waiting.borrow_mut();
            waiting.clear();
            waiting.extend(self.started.iter().zip(0..).map(|(&at, number)| Reverse((at, number))));
            here.parked.replace(vec![None; self.fibers.len()]);
            here.ledgers.replace(vec![Ledger::default(); self.fibers.len()]);
        });
        let mut last = Time(0);
        while let Some(number) = Self::begin_next() {
            HERE.with(|here| here.switch.set(self.switches[number]));
            let Some(fiber) = &mut self.fibers[number] else { continue };
            let paused = fiber.resume(());
            HERE.with(|here| {
                let now = here.now.get();
                self.switches[number] = here.switch.replace(std::ptr::null());
                here.fiber.set(None);
                match paused {
                    CoroutineResult::Yield(Pause::Behind) => {
                        here.waiting.borrow_mut().push(Reverse((now, number as u32)));
                    }
                    CoroutineResult::Yield(Pause::Parked) => {
                        here.parked.borrow_mut()[number] = Some(now);
                    }
                    CoroutineResult::Return(()) => {
                        last = last.max(now);
                        self.fibers[number] = None;
                    }
                }
            });
        }
        HERE.with(|here| here.now.set(last));
        last
    }

    /// Sets the clocks for the fiber that is furthest behind.
    fn begin_next() -> Option<usize> {
        HERE.with(|here| {
            let mut waiting = here.waiting.borrow_mut();
            let Reverse((time, number)) = waiting.pop()?;
            here.now.set(time);
            here.next.set(waiting.peek().map_or(Time(u64::MAX), |next| next.0.0));
            here.fiber.set(Some(Fiber(number)));
            Some(number as usize)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fiber_with_the_least_time_runs() {
        let order = RefCell::new(Vec::new());
        let mut simulation = Simulation::new();
        for (name, step) in [("a", 30), ("b", 20), ("c", 70)] {
            let order = &order;
            let body = move || {
                for _ in 0..3 {
                    sync();
                    order.borrow_mut().push((now().0, name));
                    advance(Time(step), Cause::Guest);
                }
            };
            simulation.spawn(Time(0), body).unwrap();
        }
        assert_eq!(simulation.run(), Time(210));
        let mut sorted = order.borrow().clone();
        sorted.sort_by_key(|&(time, _)| time);
        assert_eq!(*order.borrow(), sorted);
        assert_eq!(order.borrow().len(), 9);
    }

    #[test]
    fn a_parked_fiber_goes_on_when_it_is_told_and_not_before() {
        let log = RefCell::new(Vec::new());
        let mut simulation = Simulation::new();
        let sleeper = simulation
            .spawn(Time(0), || {
                advance(Time(5), Cause::Guest);
                park();
                log.borrow_mut().push(now());
            })
            .unwrap();
        simulation
            .spawn(Time(0), || {
                sync();
                advance(Time(100), Cause::Guest);
                sync();
                unpark(sleeper);
                unpark(sleeper);
                advance(Time(1), Cause::Guest);
            })
            .unwrap();
        assert_eq!(simulation.run(), Time(101));
        assert_eq!(*log.borrow(), [Time(100)]);
    }

    #[test]
    fn a_thousand_fibers_fit() {
        let sum = Cell::new(0);
        let mut simulation = Simulation::new();
        for number in 0..1024 {
            let sum = &sum;
            let body = move || {
                for _ in 0..10 {
                    advance(Time(number + 1), Cause::Guest);
                    sync();
                }
                sum.set(sum.get() + now().0);
            };
            simulation.spawn(Time(0), body).unwrap();
        }
        assert_eq!(simulation.run(), Time(10240));
        assert_eq!(sum.get(), 10 * 1024 * 1025 / 2);
    }

    #[test]
    fn fibers_that_are_left_are_dropped_with_what_they_own() {
        let owned = std::rc::Rc::new(());
        let mut simulation = Simulation::new();
        let mine = owned.clone();
        simulation
            .spawn(Time(0), move || {
                park();
                drop(mine);
            })
            .unwrap();
        simulation.run();
        assert_eq!(std::rc::Rc::strong_count(&owned), 1);
    }

    #[test]
    fn every_moment_of_a_fiber_has_one_cause() {
        let fibers = RefCell::new(Vec::new());
        let lock = crate::clock::Serial::new();
        let mut simulation = Simulation::new();
        for number in 0..5 {
            let lock = &lock;
            let body = move || {
                for round in 0..20 {
                    advance(Time(number * round % 7), Cause::Guest);
                    if number == 4 && round % 9 == 3 && round < 18 {
                        park();
                    }
                    lock.occupy(Cause::LockWait, |shared| {
                        let hand_over = Time(if shared.moved { 3 } else { 0 });
                        [(Cause::LockWork, Time(5)), (Cause::HandOver, hand_over)]
                    });
                    if round % 9 == 4 {
                        unpark(Fiber(4));
                    }
                    wait_until(Time(100 * round), Cause::Spin);
                    let (mine, since) = (ledger(Fiber(number as u32)), now().since(Time(number)));
                    assert_eq!(mine.total(), since);
                }
            };
            fibers.borrow_mut().push(simulation.spawn(Time(number), body).unwrap());
        }
        let last = simulation.run();
        let all = fibers.take().into_iter().map(ledger).reduce(|all, one| all.and(&one)).unwrap();
        assert_eq!(all.time(Cause::LockWork), Time(5 * 5 * 20));
        assert_eq!(all.count(Cause::LockWork), 5 * 20);
        assert_eq!(lock.busy(), all.time(Cause::LockWork).after(all.time(Cause::HandOver)));
        assert!(all.time(Cause::Idle) > Time(0) && all.time(Cause::LockWait) > Time(0));
        assert!(all.total() <= Time(last.0 * 5));
    }
}
