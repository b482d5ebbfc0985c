//! Which workloads there are. Each has a file of its own, with its options and its phases.

use clap::Subcommand;

use crate::failure::Failure;

mod dirty_log;

/// A workload with its options.
#[derive(Debug, Subcommand)]
pub(crate) enum Workload {
    /// Populate, log, dirty, collect: the kernel's dirty_log_perf_test
    #[command(after_long_help = dirty_log::LONG_HELP, args_override_self = true, allow_negative_numbers = true)]
    DirtyLog(Box<dirty_log::Options>),
}

impl Workload {
    /// Runs it and prints what it found.
    ///
    /// # Errors
    /// Nonsense among the options, a run that broke off, or a check that found something.
    pub(crate) fn run(&self) -> Result<(), Failure> {
        match self {
            Self::DirtyLog(options) => dirty_log::run(options),
        }
    }
}
