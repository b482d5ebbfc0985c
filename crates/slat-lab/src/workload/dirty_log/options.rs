//! What `slat dirty-log` is asked, and what of it makes no sense.

use std::fmt;

use clap::Args;
use serde::Serialize;

use crate::backing::Backing;
use crate::config::{self, GuestConfig};
use crate::failure::Failure;
use crate::guest_mode::GuestMode;
use crate::layout::{Layout, Plan};
use crate::options::{
    CheckOption, EagerSplit, EagerSplitOption, MachineOptions, MemoryOptions, OffsetOption,
    OutputOptions, OverlapOption, SlotsOption,
};

/// What follows the options in `--help`.
pub(crate) const LONG_HELP: &str = "\
Sizes are whole numbers with an optional K, M, G or T. Letters mean what they mean in the kernel's \
dirty_log_perf_test; numbers of guest modes are those of Linux 6.12 for arm64 (9 to 11 are other architectures'). \
One run is one guest mode.

--json prints one object: {\"workload\", \"backend\", \"config\", \"notes\", \"phases\": [{\"name\", \
\"iteration\", \"seconds\", \"counters\"}], \"counters\", \"check\"}. Counters are faults, splits, collapses, \
tables_allocated, tables_freed, publishes, invalidations by kind (by_ipa, by_range, combined, everything, local) and \
entries_visited: of the phase, and of all phases together. \"check\" is null without --check; otherwise it has pages, \
collections, collections_while_running, changed, lost, lost_pages, wrong_loads, misplaced, violations and violation.

Exit status: 0 done; 1 the run broke off or the check found something; 2 the command makes no sense.";

/// Options of `dirty-log`.
#[derive(Clone, Debug, Args)]
pub(crate) struct Options {
    #[command(flatten)]
    pub(crate) memory: MemoryOptions,

    #[command(flatten)]
    overlap: OverlapOption,

    #[command(flatten)]
    slots: SlotsOption,

    #[command(flatten)]
    offset: OffsetOption,

    /// Rounds of dirty, get, clear; at least 2
    #[arg(short = 'i', long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(2..))]
    pub(crate) iterations: u32,

    /// Per cent of the accesses that are writes, drawn for each
    #[arg(short = 'w', long, value_name = "PERCENT", default_value_t = 100, value_parser = clap::value_parser!(u32).range(0..=100))]
    pub(crate) write_percent: u32,

    /// No manual protect: getting the log clears and write-protects at once
    #[arg(short = 'g', long)]
    pub(crate) no_manual_protect: bool,

    /// vCPUs go on while the log is disabled
    #[arg(short = 'e', long)]
    pub(crate) run_while_disabling: bool,

    /// Random order of accesses, after populating
    #[arg(short = 'a', long)]
    pub(crate) random_order: bool,

    /// Seed of what is random
    #[arg(short = 'r', long, value_name = "SEED", default_value_t = 1)]
    pub(crate) seed: u64,

    /// Nested guests are out of scope
    #[arg(short = 'n', long, hide = true)]
    pub(crate) nested: bool,

    #[command(flatten)]
    pub(crate) machine: MachineOptions,

    #[command(flatten)]
    split: EagerSplitOption,

    #[command(flatten)]
    check: CheckOption,

    #[command(flatten)]
    pub(crate) output: OutputOptions,
}

/// What runs, with every default filled in: the `config` of the report.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Config {
    #[serde(flatten)]
    pub(crate) guest: GuestConfig,
    pub(crate) iterations: u32,
    pub(crate) write_percent: u32,
    pub(crate) random_order: bool,
    pub(crate) seed: u64,
    pub(crate) manual_protect: bool,
    pub(crate) run_while_disabling: bool,
    pub(crate) overlap: bool,
    pub(crate) slots: u32,
    pub(crate) eager_split: EagerSplit,
}

impl Options {
    /// Where guest memory lies, and everything that was asked for.
    ///
    /// # Errors
    /// [`Failure::Usage`] with what makes no sense.
    pub(crate) fn settle(&self, chosen: (Backing, GuestMode)) -> Result<(Layout, Config), Failure> {
        if self.nested {
            return Err(Failure::Usage("-n: nested guests are out of scope".to_owned()));
        }
        let plan = Plan {
            overlap: self.overlap.overlap,
            slots: self.slots.slots,
            offset: self.offset.offset,
            eager_split: self.split.eager_split,
        };
        let check = self.check.check;
        let (layout, guest) = config::settle(&self.memory, &self.machine, plan, chosen, check)?;
        let config = Config {
            guest,
            iterations: self.iterations,
            write_percent: self.write_percent,
            random_order: self.random_order,
            seed: self.seed,
            manual_protect: !self.no_manual_protect,
            run_while_disabling: self.run_while_disabling,
            overlap: plan.overlap,
            slots: plan.slots,
            eager_split: plan.eager_split,
        };
        Ok((layout, config))
    }
}

impl fmt::Display for Config {
    /// Two lines: what the guest is and does; what it runs on.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { guest, slots, .. } = self;
        let plural = if *slots == 1 { "" } else { "s" };
        write!(f, "{} x {} {}, {slots} slot{plural}", guest.crowd(), guest.bytes, guest.backing)?;
        write!(f, ", {}% writes", self.write_percent)?;
        if self.random_order {
            write!(f, " in random order (seed {})", self.seed)?;
        }
        if self.overlap {
            f.write_str(", overlapping")?;
        }
        let protect = if self.manual_protect { "manual protect" } else { "no manual protect" };
        write!(f, ", {protect}")?;
        if self.run_while_disabling {
            f.write_str(", running while disabling")?;
        }
        writeln!(f)?;
        guest.machine_line(f, &format!(", eager split {}", self.eager_split))
    }
}
