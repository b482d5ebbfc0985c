//! The rules of the architecture and of the engine's protocol, checked while the machine runs.
//!
//! # How the checks are exact
//! While the checker is on, walks that fill a TLB, the completion of invalidations, frees, and the beginnings and
//! ends of operations are put in one order by one lock; hits take only their own TLB's lock, and change nothing that
//! is checked. What a thread owes (a publish, a LOCKED entry) is kept with the thread, and seen in its own order.
//! Locks are taken in the order: `order`, one CPU's TLB, another CPU's TLB (by whoever holds `order`).

use std::backtrace::Backtrace;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use slat::Hpa;

use crate::checker::freed::Quarantine;
use crate::model::Model;
use crate::tables::{PerTable, Tables};
use crate::thread::{self, Step};

mod cached;
mod entries;
mod freed;
mod promise;
mod quiet;
mod violation;

pub(crate) use cached::Filler;
pub use violation::{Before, CachedLeaf, Reach, Until, Violation};

/// What the model does at a violation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum OnViolation {
    /// Panics on the thread that broke the rule, and on every other thread at its next access or wait.
    #[default]
    Stop,
    /// Keeps the first for [`Model::violation`], counts the others, and goes on.
    Record,
}

/// A violation and where it happened.
#[derive(Clone, Debug)]
pub struct Report {
    /// The rule that was broken, with addresses.
    pub violation: Violation,
    /// The thread that broke it, by name or number.
    pub thread: String,
    /// The CPU that the thread ran on, if it is a vCPU's.
    pub cpu: Option<usize>,
    /// The root of the tree whose operation was under way on the thread, if one was.
    pub operation: Option<Hpa>,
    /// What the thread did last, the latest last.
    pub recent: Vec<Step>,
    /// Where in the program, if backtraces are on.
    pub backtrace: String,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.violation)?;
        write!(f, "  on thread {}", self.thread)?;
        if let Some(cpu) = self.cpu {
            write!(f, ", CPU {cpu}")?;
        }
        match self.operation {
            Some(root) => write!(f, ", in an operation on the tree at {root}")?,
            None => write!(f, ", outside operations")?,
        }
        for step in &self.recent {
            write!(f, "\n  {step:x?}")?;
        }
        if !self.backtrace.is_empty() {
            write!(f, "\n{}", self.backtrace)?;
        }
        Ok(())
    }
}

/// What the checker knows.
#[derive(Debug)]
pub(crate) struct Checker {
    on: bool,
    mode: OnViolation,
    order: Mutex<Order>,
    /// For each table, its state; see `freed`. Empty if the checker is off.
    states: PerTable,
    /// For each table, how many walk caches and root registers hold it. Empty if the checker is off.
    held: PerTable,
    first: Mutex<Option<Report>>,
    violations: AtomicU64,
    stopped: AtomicBool,
}

/// What is put in order.
#[derive(Debug, Default)]
pub(crate) struct Order {
    /// Fills of any TLB so far.
    pub(crate) fills: u64,
    quarantine: Quarantine,
}

impl Checker {
    pub(crate) fn new(on: bool, mode: OnViolation, tables: &Tables) -> Self {
        let numbers = || if on { PerTable::new(tables) } else { PerTable::default() };
        Self {
            on,
            mode,
            order: Mutex::default(),
            states: numbers(),
            held: numbers(),
            first: Mutex::default(),
            violations: AtomicU64::new(0),
            stopped: AtomicBool::new(false),
        }
    }

    /// Whether rules are checked.
    #[inline(always)]
    pub(crate) fn is_on(&self) -> bool {
        self.on
    }

    /// The lock that orders what is checked; nothing if the checker is off.
    pub(crate) fn order(&self) -> Option<MutexGuard<'_, Order>> {
        self.on.then(|| self.order.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn first(&self) -> MutexGuard<'_, Option<Report>> {
        self.first.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Model {
    /// The first violation, if one was found.
    pub fn violation(&self) -> Option<Report> {
        self.checker.first().clone()
    }

    /// How many violations were found.
    pub fn violations(&self) -> u64 {
        self.checker.violations.load(Ordering::Relaxed)
    }

    /// Takes the first violation out, so that another can be found; for tests that break rules on purpose.
    pub fn take_violation(&self) -> Option<Report> {
        self.checker.first().take()
    }

    /// A rule was broken.
    #[cold]
    pub(crate) fn raise(&self, violation: Violation) {
        let stop = self.checker.mode == OnViolation::Stop;
        // After the first, what a stopping machine does is no longer the engine's fault.
        if stop && (self.checker.stopped.swap(true, Ordering::Relaxed) || std::thread::panicking())
        {
            return;
        }
        self.checker.violations.fetch_add(1, Ordering::Relaxed);
        let current = std::thread::current();
        let name = current.name().map_or_else(|| format!("{:?}", current.id()), str::to_owned);
        let (operation, recent) = thread::with(self.id, |thread| {
            (thread.operations.last().and_then(|operation| operation.root), thread.recent())
        });
        let backtrace = Backtrace::capture();
        let captured = backtrace.status() == std::backtrace::BacktraceStatus::Captured;
        let report = Report {
            violation,
            thread: name,
            cpu: thread::cpu(self.id),
            operation,
            recent,
            backtrace: if captured { backtrace.to_string() } else { String::new() },
        };
        let text = stop.then(|| report.to_string());
        self.checker.first().get_or_insert(report);
        if let Some(text) = text {
            panic!("{text}");
        }
    }

    /// Panics if another thread broke a rule: this one would wait for it for ever.
    #[inline]
    pub(crate) fn stop_if_broken(&self) {
        if self.checker.stopped.load(Ordering::Relaxed) && !std::thread::panicking() {
            self.stop();
        }
    }

    #[cold]
    fn stop(&self) {
        let first = self.checker.first().as_ref().map(|report| report.violation.to_string());
        panic!("stopped: another thread broke a rule: {}", first.unwrap_or_default());
    }
}
