//! What a run found: its phases, counts and check, in the shape that `--json` prints.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;
pub(crate) use slat_metal::report::{Counters, Instructions, Invalidations};

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
