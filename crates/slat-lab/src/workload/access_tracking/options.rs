//! What `slat access-tracking` is asked, and what of it makes no sense.

use std::fmt;

use clap::Args;
use serde::Serialize;

use crate::backing::Backing;
use crate::config::{self, GuestConfig};
use crate::failure::Failure;
use crate::guest_mode::GuestMode;
use crate::layout::{Layout, Plan};
use crate::options::{CheckOption, MachineOptions, MemoryOptions, OutputOptions, OverlapOption};

/// What follows the options in `--help`.
pub(crate) const LONG_HELP: &str = "\
Letters mean what they mean in the kernel's access_tracking_perf_test. Phases are populate, write, read, mark-idle, \
write-idle, mark-idle, read-idle. As there, a run fails if a vCPU finds 1% of its pages without a translation, or 10% \
idle although it has used them; the latter is only a note with --no-flush.

--json prints one object as dirty-log does, and \"idle\": [{\"pages\", \"unmapped\", \"still_idle\", \"cleared\"}], one \
for each marking. \"check\" is null without --check; otherwise it has pages, young_after_mark, idle_after_access, \
miscounted, elsewhere, wrong_loads, misplaced, violations and violation.

Exit status: 0 done; 1 the run broke off or the check found something; 2 the command makes no sense; 4 this computer \
cannot do it.";

/// Options of `access-tracking`.
#[derive(Clone, Debug, Args)]
pub(crate) struct Options {
    #[command(flatten)]
    pub(crate) memory: MemoryOptions,

    #[command(flatten)]
    overlap: OverlapOption,

    /// Leave the TLBs alone when memory is marked idle, as the kernel does; the model's never forget by themselves
    #[arg(long)]
    no_flush: bool,

    #[command(flatten)]
    pub(crate) machine: MachineOptions,

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
    pub(crate) overlap: bool,
    pub(crate) flush: bool,
}

impl Options {
    /// Where guest memory lies, and everything that was asked for.
    ///
    /// # Errors
    /// [`Failure::Usage`] with what makes no sense.
    pub(crate) fn settle(&self, chosen: (Backing, GuestMode)) -> Result<(Layout, Config), Failure> {
        let overlap = self.overlap.overlap;
        let plan = Plan { overlap, ..Plan::PLAIN };
        let check = self.check.check;
        let (layout, guest) = config::settle(&self.memory, &self.machine, plan, chosen, check)?;
        Ok((layout, Config { guest, overlap, flush: !self.no_flush }))
    }
}

impl Config {
    /// vCPUs whose parts are all of memory together.
    pub(crate) fn owners(&self) -> u32 {
        if self.overlap { 1 } else { self.guest.vcpus }
    }
}

impl fmt::Display for Config {
    /// Two lines: what the guest is and does; what it runs on.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let guest = &self.guest;
        write!(f, "{} x {} {}", guest.crowd(), guest.bytes, guest.backing)?;
        if self.overlap {
            f.write_str(", overlapping")?;
        }
        if !self.flush {
            f.write_str(", TLBs left alone")?;
        }
        writeln!(f)?;
        guest.machine_line(f, "")
    }
}
