//! Times by vCPUs: a line for each design, as plots show them.

use slat_model::clock::Ledger;

use crate::virtual_time::design::HostLock;

/// Which phase of the workload.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Pass {
    /// The last pass over memory that is logged.
    Dirty,
    /// The first touch.
    Populate,
}

/// What a design takes for a pass, by vCPUs.
#[derive(Clone, Debug)]
pub(crate) struct Series {
    pub(crate) table: &'static str,
    pub(crate) pass: Pass,
    pub(crate) design: String,
    pub(crate) host_lock: HostLock,
    pub(crate) points: Vec<Point>,
}

/// One run's pass.
#[derive(Clone, Debug)]
pub(crate) struct Point {
    pub(crate) vcpus: u32,
    /// Memory of each.
    pub(crate) bytes: u64,
    /// What was mailed of it.
    pub(crate) published: Option<f64>,
    /// At the published size.
    pub(crate) seconds: f64,
    pub(crate) faults: u64,
    /// What the time of all vCPUs went into, at the size that was run.
    pub(crate) ledger: Ledger,
}
