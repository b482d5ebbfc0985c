//! What `slat touch` is asked, and what of it makes no sense.

use std::fmt;
use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use crate::arch::Arch;
use crate::around::{self, Around};
use crate::config::GuestConfig;
use crate::failure::Failure;
use crate::layout::Layout;
use crate::options::{MAX_VCPUS, MachineOptions, OutputOptions};
use crate::size::Size;

/// What follows the options in `--help`.
pub(crate) const LONG_HELP: &str = "\
--fault-around is the window of pages that a fault maps round its own, where the host has them: 1 for none, 8 as the engine \
does by itself, adaptive up to a whole table. closed-runs is KVM before its prefetch was completed: of a window of eight \
it fills what lies before a page that is mapped, and leaves what follows the last one. Whoever touches pages upwards faults \
on each then.

--json prints one object as dirty-log does; \"touched\" has touches, faults and faults_per_touch.

Exit status: 0 done; 1 the run broke off; 2 the command makes no sense.";

/// Options of `touch`.
#[derive(Clone, Debug, Args)]
#[command(mut_arg("granule", |granule| granule.long("pages").alias("granule")))]
pub(crate) struct Options {
    /// vCPUs, each with a part of the memory
    #[arg(short = 'v', long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=MAX_VCPUS))]
    vcpus: u32,

    /// Memory of all vCPUs together
    #[arg(long, value_name = "SIZE", default_value = "6G")]
    size: Size,

    /// Share of pages that are written; the others are read
    #[arg(short = 'w', long, value_name = "PERCENT", default_value_t = 100, value_parser = clap::value_parser!(u32).range(0..=100))]
    write_percent: u32,

    /// Pages of the window of a fault, adaptive, or closed-runs
    #[arg(long, value_name = "N|adaptive|closed-runs", default_value = "8")]
    fault_around: Around,

    /// File to record the touches in, for boot --trace and app --trace; of one vCPU
    #[arg(long, value_name = "FILE")]
    pub(super) record: Option<PathBuf>,

    #[command(flatten)]
    pub(super) machine: MachineOptions,

    #[command(flatten)]
    pub(super) output: OutputOptions,
}

/// What runs, with every default filled in: the `config` of the report.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Config {
    /// Its `bytes` are those of all vCPUs together.
    #[serde(flatten)]
    pub(super) guest: GuestConfig,
    pub(super) write_percent: u32,
    #[serde(rename = "fault_around")]
    pub(super) around: Around,
}

impl Options {
    /// One guest on EPT that writes.
    pub(super) fn on_ept(size: Size, fault_around: Around) -> Self {
        let (machine, output) = (MachineOptions::plain(Arch::Ept), OutputOptions { json: false });
        Self { vcpus: 1, size, write_percent: 100, fault_around, record: None, machine, output }
    }

    /// Where guest memory lies, and everything that was asked for.
    ///
    /// # Errors
    /// [`Failure::Usage`] with what makes no sense.
    pub(super) fn settle(&self) -> Result<(Layout, Config), Failure> {
        let Self { vcpus, size, write_percent, fault_around: around, .. } = *self;
        if self.record.is_some() && vcpus > 1 {
            let why = "--record: the touches of one vCPU have an order, those of several have none";
            return Err(Failure::Usage(why.to_owned()));
        }
        let part = Size(size.0 / u64::from(vcpus));
        if part.0 * u64::from(vcpus) != size.0 {
            let why = format!("--size {size}: it cannot be divided among {vcpus} vCPUs");
            return Err(Failure::Usage(why));
        }
        let (mut layout, guest) = around::settle(around, &self.machine, (vcpus, part))?;
        // The guests go by pages of the host.
        layout.guest_page = layout.page;
        let guest = GuestConfig { bytes: size, ..guest };
        Ok((layout, Config { guest, write_percent, around }))
    }
}

impl fmt::Display for Config {
    /// Two lines: what the guest is and does; what it runs on.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { guest, write_percent, around } = self;
        let crowd = guest.crowd();
        writeln!(f, "{crowd}, {} once, {write_percent}% writes", guest.bytes)?;
        guest.machine_line(f, &format!(", fault-around {around}"))
    }
}
