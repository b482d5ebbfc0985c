//! The first CPU and the others: who runs which guest, and who is told what.

use alloc::sync::Arc;
use core::sync::atomic::{AtomicU64, Ordering};

use slat_metal::report::Counters;
use spin::Mutex;

use crate::arch::{Arch, Here, MAX_CPUS};
use crate::guest::Guest;
use crate::vcpu::Runner;
use crate::watchdog::wait_for;

/// Where one vCPU of a guest gets its orders. What they are is in its mailbox.
pub(crate) struct Post {
    /// Orders that were given.
    told: AtomicU64,
    /// Orders that were followed; the first is to get ready.
    done: AtomicU64,
    /// What it has done, and instructions of the engine, when it was done last.
    counters: Mutex<(Counters, u64)>,
}

/// In the place of an order: the guest has ended.
const DISMISSED: u64 = u64::MAX;

impl Post {
    pub(crate) const fn new() -> Self {
        const NONE: Counters = Counters::NONE;
        Self { told: AtomicU64::new(1), done: AtomicU64::new(0), counters: Mutex::new((NONE, 0)) }
    }

    /// Lets the vCPU run until its guest calls.
    pub(crate) fn tell(&self) {
        // Release: whoever sees the order sees the mailbox.
        self.told.fetch_add(1, Ordering::Release);
    }

    pub(crate) fn dismiss(&self) {
        self.told.store(DISMISSED, Ordering::Release);
    }

    /// Whether it has done all that it was told.
    pub(crate) fn is_done(&self) -> bool {
        // Acquire: whoever sees it done sees what it did.
        self.done.load(Ordering::Acquire) == self.told.load(Ordering::Relaxed)
    }

    pub(crate) fn counters(&self) -> (Counters, u64) {
        *self.counters.lock()
    }

    /// On the vCPU's CPU.
    pub(crate) fn report(&self, runner: &Runner<'_>, order: u64) {
        *self.counters.lock() = (runner.counters(), runner.engine_instructions());
        self.done.store(order, Ordering::Release);
    }
}

/// The guest whose vCPU a CPU is to run.
static GUESTS: [Mutex<Option<Arc<Guest>>>; MAX_CPUS] = [const { Mutex::new(None) }; MAX_CPUS];

/// Has another CPU run the vCPU of its number.
pub(crate) fn assign(cpu: usize, guest: Arc<Guest>) {
    if let Some(place) = GUESTS.get(cpu) {
        *place.lock() = Some(guest);
    }
}

/// Waits until no other CPU has the guest any more.
pub(crate) fn wait_until_alone(guest: &Arc<Guest>) {
    let seconds = guest.options.watchdog;
    wait_for(seconds, "a vCPU that was dismissed", || Arc::strong_count(guest) == 1);
}

/// The life of every CPU but the first.
pub(crate) fn serve(cpu: usize) -> ! {
    loop {
        let guest = GUESTS.get(cpu).and_then(|place| place.lock().take());
        match guest {
            Some(guest) => run(&guest, cpu),
            None => core::hint::spin_loop(),
        }
    }
}

/// One guest, until its vCPU is dismissed.
fn run(guest: &Guest, cpu: usize) {
    let Some(post) = guest.posts.get(cpu) else { return };
    let mut runner = Runner::new(guest, cpu);
    let mut followed = 1;
    post.report(&runner, followed);
    loop {
        match post.told.load(Ordering::Acquire) {
            DISMISSED => break,
            told if told == followed => core::hint::spin_loop(),
            told => {
                runner.run();
                followed = told;
                post.report(&runner, followed);
            }
        }
    }
    drop(runner);
    Here::retire();
}
