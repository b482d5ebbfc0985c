//! Dirty rings: the thread that empties them, and the vCPUs that wait for it while theirs is full.
//!
//! A page is in the log of a collection once it was taken out of a ring and protected again. Both happen under one lock,
//! and so does handing the log over: whatever is written to a page after its log was handed over is in a ring again.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, Scope};

use slat_model::Model;
use slat_vm::{DirtyRing, Exit, Worker};

use super::audit::Log;
use crate::arch::Tables;
use crate::crew::{Guest, RunOn, Vcpu};
use crate::failure::Failure;
use crate::guest::{GuestMemory, Order, Program, Watch};
use crate::model::{self, Broken, ModelVcpu, ModelVm};
use crate::report::Counters;

/// Where vCPUs say that their ring is full, and wait.
#[derive(Debug, Default)]
pub(super) struct Bell {
    state: Mutex<Rung>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Rung {
    rung: bool,
    closed: bool,
}

impl Bell {
    fn lock(&self) -> MutexGuard<'_, Rung> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn sleep<'a>(&self, state: MutexGuard<'a, Rung>) -> MutexGuard<'a, Rung> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits while `is_full`. `false`: nobody empties rings any more.
    fn ring_while(&self, is_full: impl Fn() -> bool) -> bool {
        let mut state = self.lock();
        while is_full() {
            if state.closed {
                return false;
            }
            state.rung = true;
            self.changed.notify_all();
            state = self.sleep(state);
        }
        true
    }

    /// Waits until a vCPU rings. `false`: the bell was closed.
    fn heard(&self) -> bool {
        let mut state = self.lock();
        while !state.rung && !state.closed {
            state = self.sleep(state);
        }
        state.rung = false;
        !state.closed
    }

    /// The rings were emptied.
    fn answer(&self) {
        // Under the lock, so that nobody has looked at a ring and does not sleep yet.
        let _state = self.lock();
        self.changed.notify_all();
    }

    fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }
}

/// A guest whose vCPU waits for the collector when its ring is full.
#[derive(Debug)]
pub(super) struct Writer {
    pub(super) program: Program,
    bell: Arc<Bell>,
}

impl Writer {
    pub(super) fn new(program: Program, bell: &Arc<Bell>) -> Self {
        Self { program, bell: Arc::clone(bell) }
    }
}

impl Guest for Writer {
    type Order = Order;

    fn accesses(&self) -> u64 {
        self.program.accesses()
    }
}

impl<T: Tables> RunOn<ModelVcpu<'_, '_, T>> for Writer {
    fn run(
        &mut self,
        vcpu: &mut ModelVcpu<'_, '_, T>,
        order: Order,
        watch: Watch<'_>,
    ) -> Result<(), String> {
        self.program.run(&mut Patient { vcpu, bell: &self.bell }, order, watch)
    }
}

/// A vCPU that enters the guest again when its ring was emptied.
struct Patient<'a, 'v, 'm, T: Tables> {
    vcpu: &'a mut ModelVcpu<'v, 'm, T>,
    bell: &'a Bell,
}

impl<T: Tables> Patient<'_, '_, '_, T> {
    /// Whether the access is to be tried again.
    #[cold]
    fn waited(&self, broken: &Broken) -> bool {
        matches!(broken, Broken::Exit(Exit::DirtyRingFull))
            && self.bell.ring_while(|| self.vcpu.is_ring_full())
    }
}

impl<T: Tables> GuestMemory for Patient<'_, '_, '_, T> {
    type Error = Broken;

    #[inline]
    fn load(&mut self, gpa: u64) -> Result<u64, Broken> {
        loop {
            match self.vcpu.load(gpa) {
                Err(broken) if self.waited(&broken) => {}
                result => return result,
            }
        }
    }

    #[inline]
    fn store(&mut self, gpa: u64, value: u64) -> Result<(), Broken> {
        loop {
            match self.vcpu.store(gpa, value) {
                Err(broken) if self.waited(&broken) => {}
                result => return result,
            }
        }
    }
}

impl<T: Tables> Vcpu for Patient<'_, '_, '_, T> {
    fn counters(&self) -> Counters {
        self.vcpu.counters()
    }
}

/// Who takes pages out of the rings of all vCPUs.
pub(super) struct Collector<'s, 'm, T: Tables> {
    vm: &'s ModelVm<'m, T>,
    rings: Vec<DirtyRing>,
    bell: Arc<Bell>,
    held: Mutex<Held<'m>>,
}

/// What is done under the lock.
struct Held<'m> {
    worker: Worker<'m, Model>,
    /// What was taken out since the log was last handed over.
    log: Log,
    /// Entries that were taken out and are not reset.
    open: u64,
    /// Why the thread has ended.
    failure: Option<Failure>,
}

/// Ends the thread that empties rings when it is dropped.
pub(super) struct Running<'a>(&'a Bell);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl<'s, 'm, T: Tables> Collector<'s, 'm, T> {
    /// A collector of `rings`, with an empty log to fill.
    ///
    /// # Errors
    /// [`Failure::Run`] if the machine has no place for another worker.
    pub(super) fn new(
        vm: &'s ModelVm<'m, T>,
        rings: &[DirtyRing],
        log: Log,
        bell: &Arc<Bell>,
    ) -> Result<Self, Failure> {
        let worker = vm.worker().map_err(|error| Failure::Run(error.to_string()))?;
        let held = Mutex::new(Held { worker, log, open: 0, failure: None });
        Ok(Self { vm, rings: rings.to_vec(), bell: Arc::clone(bell), held })
    }

    fn lock(&self) -> MutexGuard<'_, Held<'m>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the thread that empties all rings whenever one is full.
    ///
    /// # Errors
    /// [`Failure::Run`]: the operating system has no more threads.
    pub(super) fn start<'c>(&'c self, scope: &'c Scope<'c, '_>) -> Result<Running<'c>, Failure> {
        let running = Running(&self.bell);
        let thread = thread::Builder::new().name("collector".to_owned());
        let started = thread.spawn_scoped(scope, || self.serve());
        started.map_err(|error| Failure::Run(format!("no thread to collect with: {error}")))?;
        Ok(running)
    }

    fn serve(&self) {
        while self.bell.heard() {
            let mut held = self.lock();
            let collected = self.harvest(&mut held).and_then(|()| self.reset(&mut held));
            if let Err(failure) = collected {
                held.failure = Some(failure);
                self.bell.close();
            }
            drop(held);
            self.bell.answer();
        }
    }

    /// Takes everything out of the rings.
    ///
    /// # Errors
    /// [`Failure::Run`] if an entry names a page that there is not.
    pub(super) fn get(&self) -> Result<(), Failure> {
        self.harvest(&mut self.lock())
    }

    /// Has what was taken out protected again, and hands it over.
    ///
    /// # Errors
    /// [`Failure::Run`] if a ring refuses, or did not give back what was taken.
    pub(super) fn clear(&self, log: &mut Log) -> Result<(), Failure> {
        let mut held = self.lock();
        self.reset(&mut held)?;
        log.replace_by(&mut held.log);
        Ok(())
    }

    /// Why the thread has ended, if it was not told to.
    pub(super) fn failure(&self) -> Option<Failure> {
        self.lock().failure.take()
    }

    /// What was done by whoever collected.
    pub(super) fn counters(&self) -> Counters {
        model::engine(&self.lock().worker.participant().counters)
    }

    fn harvest(&self, held: &mut Held<'m>) -> Result<(), Failure> {
        let mut unknown = None;
        for ring in &self.rings {
            held.open += ring.harvest(|entry| {
                if entry.slot.space != 0 || !held.log.add(entry.slot.number, entry.page) {
                    unknown = Some(entry);
                }
            });
        }
        unknown.map_or(Ok(()), |entry| {
            Err(Failure::Run(format!("a dirty ring names a page that there is not: {entry:?}")))
        })
    }

    fn reset(&self, held: &mut Held<'m>) -> Result<(), Failure> {
        let (taken, mut reset) = (std::mem::take(&mut held.open), 0);
        for ring in &self.rings {
            reset += self.vm.reset_dirty_ring(&mut held.worker, ring)?;
        }
        if reset == taken {
            return Ok(());
        }
        Err(Failure::Run(format!("dirty rings gave back {reset} entries, but {taken} were taken")))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn whoever_rings_waits_until_the_ring_is_not_full_and_no_longer_than_the_bell_is_open() {
        let (bell, full) = (Bell::default(), AtomicBool::new(true));
        let is_full = || full.load(Ordering::Relaxed);
        thread::scope(|scope| {
            let vcpu = scope.spawn(|| bell.ring_while(is_full));
            assert!(bell.heard());
            full.store(false, Ordering::Relaxed);
            bell.answer();
            assert!(vcpu.join().unwrap());
            full.store(true, Ordering::Relaxed);
            let vcpu = scope.spawn(|| bell.ring_while(is_full));
            assert!(bell.heard());
            bell.close();
            assert!(!vcpu.join().unwrap());
            assert!(!bell.heard());
        });
    }
}
