//! The workloads: those of the `slat` command, which follow the kernel's tests.

use alloc::string::{String, ToString};
use alloc::vec::Vec;

use serde::Serialize;
use slat_metal::layout::Layout;
use slat_metal::options::{Options, Workload};
use slat_metal::report::{Counters, Phase, RESULT, Report};

use crate::console;

mod demand_paging;
mod dirty_log;
mod dirty_log_test;
mod page_table;

/// Runs what was asked for and prints its report.
///
/// # Errors
/// Why it broke off.
pub(crate) fn run(options: &Options, vcpus: u32) -> Result<(), String> {
    let layout = Layout::new(options, vcpus)?;
    match options.workload {
        Workload::DirtyLog => dirty_log::run(options, &layout),
        Workload::PageTable => page_table::run(options, &layout),
        Workload::DemandPaging => demand_paging::run(options, &layout),
        Workload::DirtyLogTest => dirty_log_test::run(options, &layout),
    }
}

/// Prints a report.
fn print<C: Serialize, R: Serialize, K: Serialize>(
    options: &Options,
    config: C,
    phases: Vec<Phase>,
    results: R,
    check: Option<K>,
) -> Result<(), String> {
    let counters = phases.iter().fold(Counters::NONE, |sum, phase| sum + phase.counters);
    let report = Report {
        workload: options.workload.name(),
        backend: "metal",
        config,
        notes: notes(options),
        phases,
        counters,
        results,
        check,
    };
    let json = serde_json::to_string(&report).map_err(|error| error.to_string())?;
    console::line(format_args!("{RESULT}{json}"));
    Ok(())
}

fn notes(options: &Options) -> Vec<String> {
    let mut notes = Vec::new();
    if !options.invalidate {
        notes.push(
            "invalidations were dropped: what the check finds is what it is to find".to_string(),
        );
    }
    if options.check {
        notes.push("the check slows everything down: these times are no measurement".to_string());
    }
    notes
}
