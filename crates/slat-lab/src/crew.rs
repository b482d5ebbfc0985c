//! The vCPU threads of a run: started once, told what to do next, waited for.
//!
//! A phase begins when the first vCPU is told and ends when the last has done it, as the kernel's tests measure it;
//! each vCPU takes the time itself, so that waking up the thread that waits costs nothing.

use std::fmt::{Debug, Display};
use std::io;
use std::num::NonZero;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::{self, Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

use crate::exits::Exits;
use crate::failure::Failure;
use crate::guest::{GuestMemory, Order, Pass, Program, Pulse, Watch};
use crate::pinning::Pinning;
use crate::report::Counters;

/// How often whoever waits looks up.
const LOOK_UP: Duration = Duration::from_millis(100);

/// A vCPU with its memory.
pub(crate) trait Vcpu: GuestMemory<Error: Display> + Send {
    /// What it has done since it was made.
    fn counters(&self) -> Counters;

    /// What it left the guest for since this was last asked, if that is noted.
    fn take_exits(&mut self) -> Option<Exits> {
        None
    }
}

/// What runs on a vCPU.
pub(crate) trait Guest: Send {
    /// What it can be told to do.
    type Order: Copy + Send + Debug;

    /// Accesses of its longest order, as far as that is known.
    fn accesses(&self) -> u64;
}

/// A guest that knows this kind of vCPU.
pub(crate) trait RunOn<V: Vcpu>: Guest {
    /// Does what it is told.
    ///
    /// # Errors
    /// Why it cannot go on.
    fn run(&mut self, vcpu: &mut V, order: Self::Order, watch: Watch<'_>) -> Result<(), String>;
}

/// What the threads share.
#[derive(Debug)]
pub(crate) struct Board {
    pulses: Vec<Pulse>,
    stop: AtomicBool,
    pinning: Option<Pinning>,
}

impl Board {
    /// A board for so many vCPUs. With `checked`, a crowd of them lets each other run: an invalidation takes a look at
    /// each, and would take a time slice of each otherwise. A few do not: being stopped anywhere finds more.
    pub(crate) fn new(vcpus: usize, checked: bool) -> Self {
        let processors = thread::available_parallelism().map_or(1, NonZero::get);
        let yields = checked && vcpus > 2 * processors;
        let pulse = || if yields { Pulse::yielding() } else { Pulse::default() };
        let pulses = (0..vcpus).map(|_| pulse()).collect();
        Self { pulses, stop: AtomicBool::new(false), pinning: None }
    }

    /// The same, with threads that stay where they are told to.
    pub(crate) fn pinned(self, pinning: Option<Pinning>) -> Self {
        Self { pinning, ..self }
    }
}

/// What a vCPU says when it is through.
#[derive(Debug)]
struct Done {
    index: usize,
    at: Instant,
    result: Result<(Counters, Option<Exits>), String>,
}

/// A vCPU could not go on.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("vCPU {index}: {why}")]
pub(crate) struct Stopped {
    index: usize,
    why: String,
}

impl From<Stopped> for Failure {
    fn from(stopped: Stopped) -> Self {
        Self::Run(stopped.to_string())
    }
}

/// All vCPU threads. Dropping it ends them.
#[derive(Debug)]
pub(crate) struct Crew<'scope, P: Guest = Program> {
    board: &'scope Board,
    tasks: Vec<Sender<P::Order>>,
    done: Receiver<Done>,
    threads: Vec<ScopedJoinHandle<'scope, P>>,
    counters: Vec<Counters>,
    exits: Option<Exits>,
}

impl<'scope, P: Guest> Crew<'scope, P> {
    /// Starts one thread for each vCPU. They wait until they are told something.
    ///
    /// # Errors
    /// The operating system has no more threads.
    pub(crate) fn start<'env, V: Vcpu + 'scope>(
        scope: &'scope Scope<'scope, 'env>,
        board: &'scope Board,
        vcpus: Vec<(V, P)>,
    ) -> io::Result<Self>
    where
        P: RunOn<V> + 'scope,
        P::Order: 'scope,
    {
        let (report, done) = mpsc::channel();
        let mut crew =
            Self { board, tasks: vec![], done, threads: vec![], counters: vec![], exits: None };
        for (index, (vcpu, program)) in vcpus.into_iter().enumerate() {
            let (task, tasks) = mpsc::channel();
            let messenger = Messenger { index, report: report.clone() };
            let thread = thread::Builder::new().name(format!("vcpu-{index}"));
            let body = move || work(vcpu, program, board, &tasks, &messenger);
            crew.threads.push(thread.spawn_scoped(scope, body)?);
            crew.tasks.push(task);
            crew.counters.push(Counters::default());
        }
        Ok(crew)
    }

    /// Every vCPU does this; the moment when the first was told.
    pub(crate) fn tell(&self, order: P::Order) -> Instant {
        self.board.stop.store(false, Ordering::Relaxed);
        let now = Instant::now();
        for vcpu in &self.tasks {
            // A thread that ended has said why, or will be found missing by `wait`.
            let _ = vcpu.send(order);
        }
        now
    }

    /// Tells vCPUs that run until they are stopped to stop. They may make one more access.
    pub(crate) fn stop(&self) {
        self.board.stop.store(true, Ordering::Relaxed);
    }

    /// Waits until every vCPU has done what it was told; the moment when the last had. Meanwhile `look` is called now
    /// and then with the accesses that were completed since the threads were started.
    ///
    /// # Errors
    /// The first vCPU that could not go on. The crew is of no use then but to be dropped.
    pub(crate) fn wait(&mut self, mut look: impl FnMut(u64)) -> Result<Instant, Stopped> {
        let mut last = None;
        let mut running = self.tasks.len();
        while running > 0 {
            match self.done.recv_timeout(LOOK_UP) {
                Ok(Done { index, at, result }) => {
                    let (counters, exits) = result.map_err(|why| Stopped { index, why })?;
                    self.counters[index] = counters;
                    if let Some(exits) = exits {
                        self.exits.get_or_insert_default().add(&exits);
                    }
                    last = last.max(Some(at));
                    running -= 1;
                }
                Err(RecvTimeoutError::Timeout) => look(self.completed().sum()),
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        Ok(last.unwrap_or_else(Instant::now))
    }

    /// Waits until every vCPU has completed an access that was under way when this was called, or begun later.
    ///
    /// # Errors
    /// A vCPU that could not go on, as for [`wait`](Self::wait).
    pub(crate) fn wait_for_access(&mut self) -> Result<(), Stopped> {
        self.wait_for_accesses(1)
    }

    /// Waits until every vCPU has completed so many accesses, of which one may have been under way when this was called.
    ///
    /// # Errors
    /// A vCPU that could not go on, as for [`wait`](Self::wait).
    pub(crate) fn wait_for_accesses(&mut self, count: u64) -> Result<(), Stopped> {
        let before: Vec<_> = self.completed().collect();
        while self.completed().zip(&before).any(|(now, before)| now - before < count) {
            self.all_run()?;
            thread::yield_now();
        }
        Ok(())
    }

    /// Whether all vCPUs run that were told to run until they are stopped.
    ///
    /// # Errors
    /// A vCPU that could not go on, as for [`wait`](Self::wait).
    pub(crate) fn all_run(&mut self) -> Result<(), Stopped> {
        match self.done.try_recv() {
            Ok(Done { index, result: Err(why), .. }) => Err(Stopped { index, why }),
            _ => Ok(()),
        }
    }

    /// Accesses that each vCPU has completed.
    fn completed(&self) -> impl Iterator<Item = u64> {
        self.board.pulses.iter().map(Pulse::completed)
    }

    /// What all vCPUs have done up to the last [`wait`](Self::wait).
    pub(crate) fn counters(&self) -> Counters {
        self.counters.iter().copied().sum()
    }

    /// What vCPUs left their guests for, since this was last asked and up to the last [`wait`](Self::wait).
    pub(crate) fn take_exits(&mut self) -> Option<Exits> {
        self.exits.take()
    }

    /// Ends the threads and gives their programs back, in order.
    ///
    /// # Errors
    /// A thread that panicked.
    pub(crate) fn dismiss(mut self) -> Result<Vec<P>, Stopped> {
        let panicked = |index| Stopped { index, why: PANICKED.to_owned() };
        let programs = self.join().into_iter().enumerate();
        programs.map(|(index, program)| program.ok_or_else(|| panicked(index))).collect()
    }

    /// Ends the threads. Every one is joined, since the scope would panic for one that did and was not.
    fn join(&mut self) -> Vec<Option<P>> {
        self.stop();
        self.tasks.clear();
        let threads = std::mem::take(&mut self.threads);
        threads.into_iter().map(|thread| thread.join().ok()).collect()
    }
}

impl<P: Guest<Order = Order>> Crew<'_, P> {
    /// Every vCPU touches its part again and again, until [`stop`](Self::stop).
    pub(crate) fn begin_running(&self, pass: Pass) -> Instant {
        self.tell(Order::RunUntilStopped(pass))
    }
}

impl<P: Guest> Drop for Crew<'_, P> {
    fn drop(&mut self) {
        self.join();
    }
}

const PANICKED: &str = "its thread panicked";

/// Speaks for one thread, also when it panics.
#[derive(Debug)]
struct Messenger {
    index: usize,
    report: Sender<Done>,
}

impl Messenger {
    fn send(&self, result: Result<(Counters, Option<Exits>), String>) {
        // Whoever waited may have given up.
        let _ = self.report.send(Done { index: self.index, at: Instant::now(), result });
    }
}

impl Drop for Messenger {
    fn drop(&mut self) {
        if thread::panicking() {
            self.send(Err(PANICKED.to_owned()));
        }
    }
}

/// The life of one thread.
fn work<V: Vcpu, P: RunOn<V>>(
    mut vcpu: V,
    mut program: P,
    board: &Board,
    tasks: &Receiver<P::Order>,
    messenger: &Messenger,
) -> P {
    let pinned = board.pinning.as_ref().map_or(Ok(()), |pins| pins.pin_vcpu(messenger.index));
    let watch = Watch { pulse: &board.pulses[messenger.index], stop: &board.stop };
    while let Ok(order) = tasks.recv() {
        let result = pinned.clone().and_then(|()| program.run(&mut vcpu, order, watch));
        let failed = result.is_err();
        messenger.send(result.map(|()| (vcpu.counters(), vcpu.take_exits())));
        if failed {
            break;
        }
    }
    program
}

impl Guest for Program {
    type Order = Order;

    fn accesses(&self) -> u64 {
        self.pages()
    }
}

impl<V: Vcpu> RunOn<V> for Program {
    fn run(&mut self, vcpu: &mut V, order: Order, watch: Watch<'_>) -> Result<(), String> {
        let result = match order {
            Order::Pass(pass) => self.pass(vcpu, pass, watch.pulse),
            Order::RunUntilStopped(pass) => self.run_until(vcpu, pass, watch),
        };
        result.map_err(|error| error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Dice;

    /// A vCPU whose `fails_at`-th access, counted from 1, fails or panics.
    struct Fake {
        accesses: u64,
        fails_at: u64,
        panics: bool,
    }

    impl GuestMemory for Fake {
        type Error = &'static str;

        fn load(&mut self, _gpa: u64) -> Result<u64, Self::Error> {
            self.accesses += 1;
            assert!(!(self.panics && self.accesses == self.fails_at), "as the test wants it");
            if self.accesses == self.fails_at { Err("no more") } else { Ok(0) }
        }

        fn store(&mut self, gpa: u64, _value: u64) -> Result<(), Self::Error> {
            self.load(gpa).map(|_| ())
        }
    }

    impl Vcpu for Fake {
        fn counters(&self) -> Counters {
            Counters { faults: self.accesses, ..Counters::default() }
        }
    }

    const PASS: Pass = Pass { write_percent: 50, random: true };

    fn with_crew<R>(fails_at: [u64; 2], panics: bool, f: impl FnOnce(Crew<'_>) -> R) -> R {
        let board = Board::new(2, false);
        thread::scope(|scope| {
            let vcpu = |(index, fails_at)| {
                let program = Program::new(0, 4096, 0..100, Dice::new(1, index));
                (Fake { accesses: 0, fails_at, panics }, program)
            };
            let vcpus = (0..).zip(fails_at).map(vcpu).collect();
            f(Crew::start(scope, &board, vcpus).unwrap())
        })
    }

    #[test]
    fn a_pass_is_over_when_every_vcpu_has_made_it() {
        with_crew([0; 2], false, |mut crew| {
            for pass in 1..=3 {
                let start = crew.tell(Order::Pass(PASS));
                assert!(crew.wait(|_| {}).unwrap() >= start);
                assert_eq!(crew.counters().faults, pass * 200);
            }
            assert_eq!(crew.dismiss().unwrap().len(), 2);
        });
    }

    #[test]
    fn vcpus_run_until_they_are_stopped() {
        with_crew([0; 2], false, |mut crew| {
            crew.begin_running(PASS);
            for _ in 0..10 {
                crew.wait_for_access().unwrap();
            }
            crew.stop();
            crew.wait(|_| {}).unwrap();
            assert!(crew.counters().faults >= 20);
            crew.tell(Order::Pass(PASS));
            crew.wait(|_| {}).unwrap();
        });
    }

    #[test]
    fn a_vcpu_that_cannot_go_on_ends_the_wait_with_its_reason() {
        with_crew([0, 50], false, |mut crew| {
            crew.tell(Order::Pass(PASS));
            assert_eq!(crew.wait(|_| {}).unwrap_err().to_string(), "vCPU 1: no more");
        });
        with_crew([0, 1000], false, |mut crew| {
            crew.begin_running(PASS);
            let stopped = loop {
                if let Err(stopped) = crew.wait_for_access() {
                    break stopped;
                }
            };
            assert_eq!(stopped.to_string(), "vCPU 1: no more");
        });
    }

    #[test]
    fn a_thread_that_panics_ends_the_wait_too() {
        with_crew([50, 0], true, |mut crew| {
            crew.tell(Order::Pass(PASS));
            let stopped = crew.wait(|_| {}).unwrap_err();
            assert_eq!(stopped.to_string(), "vCPU 0: its thread panicked");
            assert_eq!(crew.dismiss().unwrap_err(), stopped);
        });
        with_crew([50, 50], true, |crew| {
            crew.tell(Order::Pass(PASS));
        });
    }
}
