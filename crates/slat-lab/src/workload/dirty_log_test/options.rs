//! What `slat dirty-log-test` is asked, and what of it makes no sense.

use std::fmt;
use std::ops::Range;

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};

use crate::backend::Backend;
use crate::backing::Backing;
use crate::config::{self, GuestConfig};
use crate::failure::Failure;
use crate::guest_mode::GuestMode;
use crate::layout::{Layout, Plan};
use crate::metal::{self, MetalOptions};
use crate::options::{
    CheckOption, EagerSplit, MachineOptions, MemoryOptions, OffsetOption, OrHelp, OutputOptions,
};
use crate::size::Size;

/// What follows the options in `--help`.
pub(crate) const LONG_HELP: &str = "\
Letters mean what they mean in the kernel's dirty_log_test; -v, -b and -s are those of its other tests. Guest memory has \
three pages more than -b says, so that it does not end with a word of the bitmap.

--json prints one object of the same form as that of dirty-log, and in it \"modes\": one for each way of logging, with mode, \
rounds, writes, ring_full, dirty, clear, track_next, missing, stale, early and foreign. Contents are always compared, so \
\"check\" is always there: pages, the sums of these counts, mismatched, violations and violation; --check also checks the \
architecture's rules.

Exit status: 0 done; 1 the run broke off or the check found something; 2 the command makes no sense; 4 this computer \
cannot do it.";

/// Pages of guest memory beyond what -b says.
const MORE_PAGES: u64 = 3;

/// Milliseconds.
const INTERVAL: u32 = 10;

/// Options of `dirty-log-test`.
#[derive(Clone, Debug, Args)]
pub(crate) struct Options {
    #[command(flatten)]
    pub(crate) memory: MemoryOptions,

    #[command(flatten)]
    offset: OffsetOption,

    /// Ways of logging: dirty-log, clear-log, dirty-ring, hardware, or all of them
    #[arg(
        short = 'M',
        long,
        value_enum,
        value_name = "WAY",
        default_value = "all",
        hide_possible_values = true
    )]
    log: Ways,

    /// Rounds, one fewer than this; more than 2
    #[arg(short = 'i', long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(3..))]
    iterations: u32,

    /// Milliseconds from one round to the next
    #[arg(short = 'I', long, value_name = "MILLISECONDS", default_value_t = INTERVAL, value_parser = clap::value_parser!(u32).range(1..))]
    interval: u32,

    /// Entries of a dirty ring, rounded down to a power of two that the pages can fill
    #[arg(short = 'c', long, value_name = "N", default_value_t = 65536, value_parser = clap::value_parser!(u32).range(256..=65536))]
    ring: u32,

    /// Seed of which pages are written
    #[arg(long, value_name = "SEED", default_value_t = 1)]
    seed: u64,

    #[command(flatten)]
    pub(crate) machine: MachineOptions,

    #[command(flatten)]
    pub(super) metal: MetalOptions,

    #[command(flatten)]
    check: CheckOption,

    #[command(flatten)]
    pub(crate) output: OutputOptions,
}

/// What `-M` can name.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Ways {
    All,
    DirtyLog,
    ClearLog,
    DirtyRing,
    Hardware,
}

/// A way of logging.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Way {
    /// Collections clear and protect.
    DirtyLog,
    /// They are cleared by the caller; every page counts as written at first.
    ClearLog,
    /// Each vCPU has a ring.
    DirtyRing,
    /// Hardware keeps dirty state.
    Hardware,
}

impl Way {
    const ALL: [Self; 4] = [Self::DirtyLog, Self::ClearLog, Self::DirtyRing, Self::Hardware];

    /// As `-M` calls it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::DirtyLog => "dirty-log",
            Self::ClearLog => "clear-log",
            Self::DirtyRing => "dirty-ring",
            Self::Hardware => "hardware",
        }
    }
}

impl Ways {
    fn list(self) -> Vec<Way> {
        match self {
            Self::All => Way::ALL.to_vec(),
            Self::DirtyLog => vec![Way::DirtyLog],
            Self::ClearLog => vec![Way::ClearLog],
            Self::DirtyRing => vec![Way::DirtyRing],
            Self::Hardware => vec![Way::Hardware],
        }
    }
}

/// What runs, with every default filled in: the `config` of the report.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Config {
    /// Its `bytes` are those of all guest memory.
    #[serde(flatten)]
    pub(crate) guest: GuestConfig,
    pub(super) log: Vec<Way>,
    pub(super) iterations: u32,
    pub(super) interval_milliseconds: u32,
    pub(super) ring_entries: u32,
    pub(super) seed: u64,
}

impl Options {
    /// Refuses what only slat's own engine has.
    ///
    /// # Errors
    /// [`Failure::Usage`].
    #[cfg(all(target_os = "linux", target_arch = "x86_64"))]
    pub(super) fn fit_kvm(&self) -> Result<(), Failure> {
        if self.log != Ways::Hardware {
            return Ok(());
        }
        let why = "KVM itself decides whether the CPU logs; -M dirty-log reads it";
        Err(Failure::Usage(format!("--backend kvm -M hardware: {why}")))
    }

    /// The ways of logging that were asked for, of those that there are.
    fn ways(&self) -> Vec<Way> {
        let all = self.log.list().into_iter();
        let there = |way: &Way| *way != Way::Hardware || self.machine.backend() != Backend::Kvm;
        all.filter(there).collect()
    }

    /// Where guest memory lies, and everything that was asked for.
    ///
    /// # Errors
    /// [`Failure::Usage`] with what makes no sense.
    pub(crate) fn settle(&self, chosen: (Backing, GuestMode)) -> Result<(Layout, Config), Failure> {
        let plan = Plan {
            overlap: true,
            slots: 1,
            offset: self.offset.offset,
            eager_split: EagerSplit::Off,
        };
        if self.log.list().contains(&Way::Hardware) {
            self.machine.allow_hardware_dirty("-M hardware")?;
        }
        let check = self.check.check;
        // What -v and -b say must make sense by itself.
        config::settle(&self.memory, &self.machine, plan, chosen, check)?;
        let (backing, mode) = chosen;
        let vcpus = self.memory.vcpus;
        let page = mode.page_size.max(self.machine.granule().page_size()).0;
        let more = (MORE_PAGES * mode.page_size.0).next_multiple_of(page);
        // To the layout the whole is one vCPU's.
        let memory = MemoryOptions {
            vcpus: 1,
            bytes: Size(self.memory.bytes.0 * u64::from(vcpus) + more),
            backing: OrHelp::Value(backing),
            mode: OrHelp::Value(mode),
        };
        let (layout, guest) = config::settle(&memory, &self.machine, plan, chosen, check)?;
        let pages = layout.size / layout.page;
        let fillable = u32::try_from(pages).unwrap_or(u32::MAX);
        let config = Config {
            guest: GuestConfig { vcpus, ..guest },
            log: self.ways(),
            iterations: self.iterations,
            interval_milliseconds: self.interval,
            ring_entries: power_below(self.ring.min(fillable)).max(256),
            seed: self.seed,
        };
        Ok((layout, config))
    }
}

impl Options {
    /// As the hypervisor on bare metal is told.
    ///
    /// # Errors
    /// [`Failure::Usage`]: it has not what was asked for.
    pub(super) fn words(&self, config: &Config) -> Result<String, Failure> {
        if self.interval != INTERVAL {
            return Err(metal::refusal(
                "-I: its rounds are as long as guests take to write for a while",
            ));
        }
        let ways = match self.log {
            Ways::All => "all",
            Ways::DirtyLog => Way::DirtyLog.name(),
            Ways::ClearLog => Way::ClearLog.name(),
            Ways::DirtyRing => Way::DirtyRing.name(),
            Ways::Hardware => Way::Hardware.name(),
        };
        let Config { iterations, seed, ring_entries: ring, .. } = config;
        Ok(format!("ways={ways} iterations={iterations} seed={seed} ring={ring}"))
    }
}

/// The largest power of two that is not larger.
fn power_below(number: u32) -> u32 {
    number.checked_ilog2().map_or(0, |log| 1 << log)
}

impl Config {
    /// Bytes from one page that guests write to the next: pages of the guest, as far as each has one of the host.
    pub(super) fn step(&self, layout: &Layout) -> u64 {
        layout.guest_page.max(layout.page)
    }

    /// Which of `pages` pages vCPU `index` writes first.
    pub(super) fn share(&self, index: u32, pages: u64) -> Range<u64> {
        let at = |index: u32| pages * u64::from(index) / u64::from(self.guest.vcpus);
        at(index)..at(index + 1)
    }
}

impl fmt::Display for Config {
    /// Two lines: what the guest is and how it is logged; what it runs on.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { guest, log, iterations, interval_milliseconds, .. } = self;
        let names: Vec<_> = log.iter().map(|way| way.name()).collect();
        writeln!(
            f,
            "{}, {} {}, {iterations} iterations, interval {interval_milliseconds} ms; {}",
            guest.crowd(),
            guest.bytes,
            guest.backing,
            names.join(", ")
        )?;
        guest.machine_line(f, "")
    }
}
