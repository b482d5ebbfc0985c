//! What `slat demand-paging` is asked, and what of it makes no sense.

use std::fmt;
use std::time::Duration;

use clap::Args;
use serde::Serialize;

use super::userfault::Mode;
use crate::backing::Backing;
use crate::config::{self, GuestConfig};
use crate::failure::Failure;
use crate::guest_mode::GuestMode;
use crate::layout::{Layout, Plan};
use crate::metal::{self, MetalOptions};
use crate::options::{CheckOption, MachineOptions, MemoryOptions, OutputOptions, OverlapOption};
use crate::pinning::{PinOption, Pinning};

/// More threads than any computer has processors.
const MAX_READERS: i64 = 1024;

/// What follows the options in `--help`.
pub(crate) const LONG_HELP: &str = "\
Letters mean what they mean in the kernel's demand_paging_test. Without -u the host has every page at once, and -a, -d \
and -r mean nothing. Phases are fill (MINOR only: shared memory gets its contents) and demand (every vCPU writes to \
each of its pages).

--json prints one object as dirty-log does, and \"demand\": {\"pages_per_second_per_vcpu\", \"pages_per_second\", \
\"userfault\"}, where userfault is null without -u and otherwise has requests, served and duplicates. \"check\" is null \
without --check; otherwise it has pages, unserved, unasked, miscounted, elsewhere, unfilled, wrong_loads, misplaced, violations and \
violation.

Exit status: 0 done; 1 the run broke off or the check found something; 2 the command makes no sense; 4 this computer \
cannot do it.";

/// Options of `demand-paging`.
#[derive(Clone, Debug, Args)]
pub(crate) struct Options {
    #[command(flatten)]
    pub(crate) memory: MemoryOptions,

    #[command(flatten)]
    overlap: OverlapOption,

    /// A handler serves the faults: MISSING pages are copied in, MINOR ones are there and let through
    #[arg(
        short = 'u',
        long,
        value_enum,
        value_name = "MISSING|MINOR",
        hide_possible_values = true
    )]
    userfault: Option<Mode>,

    /// One queue for all of guest memory, instead of one for each vCPU's; -o does so too
    #[arg(short = 'a', long)]
    single: bool,

    /// Microseconds that a handler waits before it serves
    #[arg(short = 'd', long, value_name = "MICROSECONDS", default_value_t = 0)]
    delay: u32,

    /// Handlers of each queue, each a host thread
    #[arg(short = 'r', long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=MAX_READERS))]
    readers: u32,

    #[command(flatten)]
    pin: PinOption,

    #[command(flatten)]
    pub(crate) machine: MachineOptions,

    #[command(flatten)]
    pub(super) metal: MetalOptions,

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
    pub(crate) userfault: Option<Mode>,
    /// One queue for all of guest memory.
    pub(crate) single: bool,
    pub(crate) delay_microseconds: u32,
    pub(crate) readers: u32,
    pub(crate) pinning: Option<Pinning>,
}

impl Options {
    /// Where guest memory lies, and everything that was asked for.
    ///
    /// # Errors
    /// [`Failure::Usage`] with what makes no sense.
    pub(crate) fn settle(&self, chosen: (Backing, GuestMode)) -> Result<(Layout, Config), Failure> {
        if self.userfault == Some(Mode::Minor) && !chosen.0.shared {
            return Err(Failure::Usage(format!(
                "-u MINOR: a page can be there and not mapped only in shared memory, and {} is private; \
                 choose another -s, such as shmem or shared_hugetlb",
                chosen.0
            )));
        }
        let overlap = self.overlap.overlap;
        let plan = Plan { overlap, ..Plan::PLAIN };
        let check = self.check.check;
        let (layout, guest) = config::settle(&self.memory, &self.machine, plan, chosen, check)?;
        let config = Config {
            guest,
            overlap,
            userfault: self.userfault,
            single: self.single || overlap,
            delay_microseconds: self.delay,
            readers: self.readers,
            pinning: self.pin.settle(self.memory.vcpus)?,
        };
        Ok((layout, config))
    }

    /// As the hypervisor on bare metal is told.
    ///
    /// # Errors
    /// [`Failure::Usage`]: it has not what was asked for.
    pub(super) fn words(&self) -> Result<String, Failure> {
        let given = [("-a", self.single), ("-d", self.delay > 0), ("-r", self.readers > 1)];
        if let Some((option, _)) = given.into_iter().find(|(_, given)| *given) {
            let why = format!("{option}: there are no handlers; who faults on a page serves it");
            return Err(metal::refusal(&why));
        }
        let userfault = match self.userfault {
            None => "off",
            Some(Mode::Missing) => "missing",
            Some(Mode::Minor) => "minor",
        };
        Ok(format!("overlap={} userfault={userfault}", metal::switch(self.overlap.overlap)))
    }

    /// Options that were given and mean nothing.
    pub(crate) fn ignored(&self) -> Option<String> {
        let given = self.single || self.delay > 0 || self.readers > 1;
        let ignored = given && self.userfault.is_none();
        ignored.then(|| {
            "-a, -d and -r mean nothing without -u: the host has every page at once".to_owned()
        })
    }
}

impl Config {
    pub(crate) fn delay(&self) -> Duration {
        Duration::from_micros(self.delay_microseconds.into())
    }

    /// How many queues there are.
    pub(crate) fn queues(&self) -> u32 {
        if self.single { 1 } else { self.guest.vcpus }
    }
}

impl fmt::Display for Config {
    /// Two lines: what the guest is and does; what it runs on.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { guest, readers, delay_microseconds, .. } = self;
        write!(f, "{} x {} {}", guest.crowd(), guest.bytes, guest.backing)?;
        if self.overlap {
            f.write_str(", overlapping")?;
        }
        match self.userfault {
            None => f.write_str(", no userfault")?,
            Some(mode) => {
                let name = if mode == Mode::Missing { "MISSING" } else { "MINOR" };
                let handlers = u64::from(self.queues()) * u64::from(*readers);
                let plural = if handlers == 1 { "" } else { "s" };
                write!(f, ", {name} pages, {handlers} handler{plural}")?;
            }
        }
        if *delay_microseconds > 0 {
            write!(f, ", {delay_microseconds} us delay")?;
        }
        if self.pinning.is_some() {
            f.write_str(", pinned")?;
        }
        writeln!(f)?;
        guest.machine_line(f, "")
    }
}
