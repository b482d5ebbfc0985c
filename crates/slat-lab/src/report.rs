//! What a run found: its phases, counts and check, in the shape that `--json` prints.

use std::collections::BTreeMap;
use std::iter::Sum;
use std::ops::{Add, Sub};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::check::Check;
use crate::exits::Exits;

/// What a backend counts.
pub(crate) trait Counts: Serialize {
    /// What stands above each column of a table, in two lines, where these are the counts of all its rows together.
    fn titles(total: &Self) -> Vec<String>;

    /// What stands in them.
    fn cells(&self, total: &Self) -> Vec<u64>;
}

/// Everything about one run: what was asked for, what else than time it measured, and what its check found.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report<C, R, F, N = Counters> {
    /// The workload's name on the command line.
    pub(crate) workload: &'static str,
    /// What it ran on.
    pub(crate) backend: &'static str,
    /// Whose hypervisor that was, if it is not slat.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) host: Option<HostFacts>,
    /// What was asked for, with all defaults filled in.
    pub(crate) config: C,
    /// What the user should know of this run that no number says.
    pub(crate) notes: Vec<String>,
    /// Sums that people look for first, as lines of text.
    #[serde(skip)]
    pub(crate) summary: Vec<String>,
    /// In the order in which they ran.
    pub(crate) phases: Vec<Phase<N>>,
    /// Of all phases together.
    pub(crate) counters: N,
    /// What only this workload measures.
    #[serde(flatten)]
    pub(crate) results: R,
    /// Absent without `--check`.
    pub(crate) check: Option<Check<F>>,
}

impl<C, R, F, N> Report<C, R, F, N> {
    /// What vCPUs left their guests for in all phases together, if that was noted.
    pub(crate) fn exits(&self) -> Option<Exits> {
        let noted = self.phases.iter().filter_map(|phase| phase.exits);
        noted.reduce(|mut all, exits| {
            all.add(&exits);
            all
        })
    }
}

/// A computer and its hypervisor.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct HostFacts {
    pub(crate) kernel: String,
    pub(crate) cpu: String,
    /// Modules of the hypervisor.
    pub(crate) modules: String,
    /// How guest-physical addresses are translated: by whose tables, or by shadowing the guest's.
    pub(crate) paging: &'static str,
    pub(crate) transparent_hugepage: String,
    /// What the modules were told that matters to memory.
    pub(crate) parameters: BTreeMap<String, String>,
}

/// One phase.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Phase<N = Counters> {
    pub(crate) name: &'static str,
    /// Which round it belongs to, from 1, where a phase comes more than once.
    pub(crate) iteration: Option<u32>,
    /// In virtual time and where instructions are counted, those of the guest's clock.
    pub(crate) seconds: f64,
    /// Where instructions are what time is counted in, a nanosecond each.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) instructions: Option<Instructions>,
    pub(crate) counters: N,
    /// What vCPUs left their guests for, with `--exits`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) exits: Option<Exits>,
}

impl<N> Phase<N> {
    pub(crate) fn new(
        name: &'static str,
        iteration: Option<u32>,
        took: Duration,
        counters: N,
    ) -> Self {
        Self {
            name,
            iteration,
            seconds: took.as_secs_f64(),
            counters,
            instructions: None,
            exits: None,
        }
    }
}

/// Where instructions went, of guests and hypervisor together.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Instructions {
    pub(crate) total: u64,
    /// Those in the engine's calls: faults, and what the hypervisor does to the log.
    pub(crate) engine: u64,
}

impl Add for Instructions {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { total: self.total + other.total, engine: self.engine + other.engine }
    }
}

impl Sum for Instructions {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), Add::add)
    }
}

/// What was done, by all vCPUs and threads together.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Counters {
    /// Faults that vCPUs brought to the hypervisor.
    pub(crate) faults: u64,
    /// Blocks that were split.
    pub(crate) splits: u64,
    /// Tables that became a block.
    pub(crate) collapses: u64,
    pub(crate) tables_allocated: u64,
    pub(crate) tables_freed: u64,
    /// Barriers that make stores visible to table walkers.
    pub(crate) publishes: u64,
    pub(crate) invalidations: Invalidations,
    /// Entries that the engine's walks looked at.
    pub(crate) entries_visited: u64,
}

/// Invalidations by kind, each as an instruction.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Invalidations {
    /// One address, on every CPU.
    pub(crate) by_ipa: u64,
    /// A range, on every CPU.
    pub(crate) by_range: u64,
    /// A guest's combined-stage translations, on every CPU.
    pub(crate) combined: u64,
    /// All of a guest's translations, on every CPU.
    pub(crate) everything: u64,
    /// One address, on one CPU.
    pub(crate) local: u64,
}

impl Counters {
    fn zip(self, other: Self, f: impl Fn(u64, u64) -> u64) -> Self {
        let (a, b) = (self.invalidations, other.invalidations);
        Self {
            faults: f(self.faults, other.faults),
            splits: f(self.splits, other.splits),
            collapses: f(self.collapses, other.collapses),
            tables_allocated: f(self.tables_allocated, other.tables_allocated),
            tables_freed: f(self.tables_freed, other.tables_freed),
            publishes: f(self.publishes, other.publishes),
            invalidations: Invalidations {
                by_ipa: f(a.by_ipa, b.by_ipa),
                by_range: f(a.by_range, b.by_range),
                combined: f(a.combined, b.combined),
                everything: f(a.everything, b.everything),
                local: f(a.local, b.local),
            },
            entries_visited: f(self.entries_visited, other.entries_visited),
        }
    }
}

impl Add for Counters {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        self.zip(other, u64::wrapping_add)
    }
}

impl Sub for Counters {
    type Output = Self;

    /// What happened between two moments.
    fn sub(self, earlier: Self) -> Self {
        self.zip(earlier, u64::wrapping_sub)
    }
}

impl Sum for Counters {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), Add::add)
    }
}
