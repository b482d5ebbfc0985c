//! What a run of Linux has found, besides what every workload reports.

use alloc::vec::Vec;

use serde::Serialize;

use super::exits::Row;

/// What only a run of Linux measures.
#[derive(Debug, Serialize)]
pub struct Booted {
    /// CPUs that the guest has started, its first one included.
    pub vcpus_started: usize,
    /// What vCPUs left it for.
    pub exits: Vec<Row>,
    /// What the copy of its memory came to, if one was kept.
    pub migration: Option<Migration>,
}

/// Of all copies that were made while the guest ran.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Migration {
    /// How often the log was switched on, and off again.
    pub rounds: u64,
    /// How often it was collected.
    pub collections: u64,
    /// Pages that it reported.
    pub dirty: u64,
    /// Pages that were compared with the copy, before collections.
    pub compared: u64,
    /// Those that had changed since they were copied.
    pub changed: u64,
    /// Those of them that the collection did not report: writes that no log had.
    pub lost: u64,
}
