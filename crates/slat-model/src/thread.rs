//! What belongs to the thread that executes: which CPU it runs on, its context, what it has begun and not completed.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};

use slat::maintenance::Instruction;
use slat::{Event, Hpa};

use crate::execute::Pending;
use crate::tlb::FrameHash;

/// Steps of a thread that a report shows.
const RECENT: usize = 24;

/// Looks of a waiting thread before it gives its time slice away.
const WAITS: u32 = 32;

/// One thread's state in one model.
#[derive(Debug, Default)]
pub(crate) struct Thread {
    model: u64,
    /// Values of `VTTBR_EL2` that `EnterContext` has written and `LeaveContext` not yet taken back.
    pub(crate) contexts: Vec<u64>,
    /// Invalidations that no barrier has completed yet.
    pub(crate) pending: Vec<Pending>,
    /// Operations that have begun and not ended, the outermost first.
    pub(crate) operations: Vec<Operation>,
    /// How many outermost operations have begun.
    pub(crate) begun: u64,
    /// By the address of the entry, stores that no barrier has published yet.
    pub(crate) unpublished: HashMap<u64, Unpublished, FrameHash>,
    /// Entries that this thread has turned to LOCKED, and how many operations were open then.
    pub(crate) locked: HashMap<u64, usize, FrameHash>,
    recent: VecDeque<Step>,
}

/// An operation that has begun.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operation {
    /// How many fills there had been.
    pub(crate) fills: u64,
    /// The root of the tree that it works on: the first table that it touches.
    pub(crate) root: Option<Hpa>,
}

/// A change of one entry that walkers need not see yet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unpublished {
    /// What was published last.
    pub(crate) before: u64,
    /// What was stored since.
    pub(crate) value: u64,
    /// Which outermost operation stored it, counted by [`Thread::begun`]; zero if none.
    pub(crate) operation: u64,
    /// The walker of the CPU that stored it sees it.
    pub(crate) locally: bool,
}

/// One thing that a thread did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// An event of the engine.
    Event(Event),
    /// A barrier or invalidation.
    Instruction(Instruction),
}

thread_local! {
    /// The model and the CPU of it that the thread runs on.
    static CPU: Cell<(u64, usize)> = const { Cell::new((0, 0)) };
    static WAITED: Cell<u32> = const { Cell::new(0) };
    static THREADS: RefCell<Vec<Thread>> = const { RefCell::new(Vec::new()) };
}

/// Whether it is time that the calling thread, which waits, gives its time slice to another: every now and then.
pub(crate) fn should_yield() -> bool {
    WAITED.with(|waited| {
        waited.set(waited.get().wrapping_add(1));
        waited.get() % WAITS == 0
    })
}

/// The calling thread runs on CPU `index` of `model` from now on.
#[inline(always)]
pub(crate) fn run_on(model: u64, index: usize) {
    CPU.with(|cpu| cpu.set((model, index)));
}

/// The CPU of `model` that the calling thread runs on.
pub(crate) fn cpu(model: u64) -> Option<usize> {
    CPU.with(|cpu| {
        let (of, index) = cpu.get();
        (of == model).then_some(index)
    })
}

/// The calling thread's state in `model`. Not to be nested.
#[inline]
pub(crate) fn with<R>(model: u64, f: impl FnOnce(&mut Thread) -> R) -> R {
    THREADS.with_borrow_mut(|threads| {
        let at = threads.iter().position(|thread| thread.model == model).unwrap_or_else(|| {
            threads.push(Thread { model, ..Thread::default() });
            threads.len() - 1
        });
        f(&mut threads[at])
    })
}

/// Forgets the calling thread's state in a model that is going away.
pub(crate) fn forget(model: u64) {
    // A model may be dropped while the thread's own state is being destroyed.
    let _ = THREADS.try_with(|threads| {
        if let Ok(mut threads) = threads.try_borrow_mut() {
            threads.retain(|thread| thread.model != model);
        }
    });
}

impl Thread {
    /// The outermost operation that is under way, counted by `begun`; zero if none is.
    pub(crate) fn operation(&self) -> u64 {
        if self.operations.is_empty() { 0 } else { self.begun }
    }

    /// Notes a step for reports.
    pub(crate) fn note(&mut self, step: Step) {
        if self.recent.len() == RECENT {
            self.recent.pop_front();
        }
        self.recent.push_back(step);
    }

    /// The last steps, the latest last.
    pub(crate) fn recent(&self) -> Vec<Step> {
        self.recent.iter().copied().collect()
    }
}
