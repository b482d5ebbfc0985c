//! What `slat dirty-log` is asked, and what of it makes no sense.

use std::fmt;

use clap::{Args, ValueEnum};
use serde::Serialize;
use slat_vm::LogMode;

use super::in_virtual_time::VirtualOptions;
use crate::arch::Arch;
use crate::backing::Backing;
use crate::config::{self, GuestConfig, TablesConfig};
use crate::failure::Failure;
use crate::guest_mode::GuestMode;
use crate::layout::{Layout, Plan};
use crate::metal::{self, MetalOptions};
use crate::options::{
    CheckOption, EagerSplit, EagerSplitOption, MachineOptions, MemoryOptions, OffsetOption,
    OutputOptions, OverlapOption, SlotsOption,
};
use crate::pinning::{PinOption, Pinning};

/// What follows the options in `--help`.
pub(crate) const LONG_HELP: &str = "\
Sizes are whole numbers with an optional K, M, G or T. Letters mean what they mean in the kernel's \
dirty_log_perf_test; numbers of guest modes are those of Linux 6.12 for arm64 (9 to 11 are other architectures'). \
One run is one guest mode.

--log ring: a vCPU whose ring is full waits for a collector thread, which takes out what is in all rings and resets them \
(phase dirty); get takes out the rest, clear resets it. --log hardware: dirty state of FEAT_HAFDBS, or the dirty flags of x86; get takes it out of the \
entries by a walk, and there is no clear.

--split-threads: without it, one thread splits, when the log is enabled or, where all bits are set at first (--log bitmap \
without -g), as it is cleared. One thread clears, so more would have nothing to do then; with it, memslots are split as a \
whole after the log was enabled.

--json prints one object: {\"workload\", \"backend\", \"config\", \"notes\", \"phases\": [{\"name\", \
\"iteration\", \"seconds\", \"counters\"}], \"counters\", \"check\"}. Counters are faults, splits, collapses, \
tables_allocated, tables_freed, publishes, invalidations by kind (by_ipa, by_range, combined, everything, local) and \
entries_visited: of the phase, and of all phases together. \"check\" is null without --check; otherwise it has pages, \
collections, collections_while_running, changed, lost, lost_pages, wrong_loads, misplaced, violations and violation.

Exit status: 0 done; 1 the run broke off or the check found something; 2 the command makes no sense; 4 this computer \
cannot do it.";

/// More threads than splitting has use for.
const MAX_SPLIT_THREADS: i64 = 64;
/// As the kernel's tests have it.
const RING_ENTRIES: u32 = 65536;

/// Options of `dirty-log`.
#[derive(Clone, Debug, Args)]
pub(crate) struct Options {
    #[command(flatten)]
    pub(crate) memory: MemoryOptions,

    #[command(flatten)]
    pub(super) overlap: OverlapOption,

    #[command(flatten)]
    pub(super) slots: SlotsOption,

    #[command(flatten)]
    pub(super) offset: OffsetOption,

    #[command(flatten)]
    pub(super) pin: PinOption,

    /// Rounds of dirty, get, clear; at least 2
    #[arg(short = 'i', long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(2..))]
    pub(crate) iterations: u32,

    /// Per cent of the accesses that are writes, drawn for each
    #[arg(short = 'w', long, value_name = "PERCENT", default_value_t = 100, value_parser = clap::value_parser!(u32).range(0..=100))]
    pub(crate) write_percent: u32,

    /// What tells which pages were written: a bitmap that faults mark, a dirty ring of each vCPU, or hardware's dirty
    /// state
    #[arg(
        long,
        value_enum,
        value_name = "bitmap|ring|hardware",
        default_value = "bitmap",
        hide_possible_values = true
    )]
    log: LogKind,

    /// Entries of a dirty ring with --log ring, a power of two from 256 to 65536 [default: 65536]
    #[arg(long, value_name = "N", value_parser = ring_entries)]
    ring: Option<u32>,

    /// No manual protect of the bitmap: getting the log clears and write-protects at once
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
    pub(super) metal: MetalOptions,

    #[command(flatten)]
    pub(super) split: EagerSplitOption,

    /// So many threads split each memslot at once, in the enable phase; without this, one does, then or as the log is
    /// cleared
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=MAX_SPLIT_THREADS), help_heading = "Machine")]
    split_threads: Option<u32>,

    #[command(flatten)]
    pub(super) virtual_time: VirtualOptions,

    #[command(flatten)]
    pub(super) check: CheckOption,

    #[command(flatten)]
    pub(crate) output: OutputOptions,
}

/// How the log is kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum LogKind {
    /// A bit a page, which faults set.
    Bitmap,
    /// Each vCPU's ring, into which faults put pages.
    Ring,
    /// Dirty state that hardware keeps in the entries, without faults.
    Hardware,
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
    pub(crate) log: LogKind,
    pub(crate) ring_entries: Option<u32>,
    pub(crate) manual_protect: bool,
    pub(crate) run_while_disabling: bool,
    pub(crate) overlap: bool,
    pub(crate) slots: u32,
    /// Chosen by the run, where that is possible.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) eager_split: Option<EagerSplit>,
    pub(crate) split_threads: Option<u32>,
    pub(crate) pinning: Option<Pinning>,
}

impl Config {
    /// What the user should know of the run that no number says.
    pub(super) fn notes(&self, layout: &Layout) -> Vec<String> {
        let mut notes = self.guest.notes(layout);
        if self.log == LogKind::Hardware && self.mode() != LogMode::Hardware {
            let why = "--log hardware: there are no dirty flags here, so that writes are logged by faults";
            notes.push(why.to_owned());
        }
        notes
    }

    /// As the hypervisor on bare metal is told.
    ///
    /// # Errors
    /// [`Failure::Usage`]: it has not what was asked for.
    pub(super) fn words(&self) -> Result<String, Failure> {
        if self.split_threads.is_some() {
            return Err(metal::refusal(
                "--split-threads: its hypervisor has a thread on each vCPU's CPU, and no more",
            ));
        }
        let log = match self.log {
            LogKind::Bitmap => "bitmap",
            LogKind::Ring => "ring",
            LogKind::Hardware => "hardware",
        };
        let ring = self.ring_entries.map_or_else(String::new, |entries| format!(" ring={entries}"));
        Ok(format!(
            "iterations={} writes={} random={} seed={} log={log}{ring} manual-protect={} overlap={} slots={} \
             run-while-disabling={}",
            self.iterations,
            self.write_percent,
            metal::switch(self.random_order),
            self.seed,
            metal::switch(self.manual_protect),
            metal::switch(self.overlap),
            self.slots,
            metal::switch(self.run_while_disabling),
        ))
    }

    /// How a memslot is logged.
    pub(super) fn mode(&self) -> LogMode {
        match self.log {
            LogKind::Bitmap if self.manual_protect => LogMode::Manual { initially_all_set: true },
            LogKind::Bitmap => LogMode::Protect,
            LogKind::Ring => LogMode::Ring { backup: false },
            LogKind::Hardware if self.guest.can_track_dirty() => LogMode::Hardware,
            // Where an entry has no dirty flag that could be cleared, writing is forbidden instead.
            LogKind::Hardware => LogMode::Protect,
        }
    }
}

impl Options {
    /// Whether the log is the bitmap, and one thread splits: what there is in virtual time too.
    pub(super) fn is_plain_log(&self) -> bool {
        self.log == LogKind::Bitmap && self.ring.is_none() && self.split_threads.is_none()
    }

    /// Refuses what only slat's own engine has.
    ///
    /// # Errors
    /// [`Failure::Usage`].
    #[cfg(all(target_os = "linux", target_arch = "x86_64"))]
    pub(super) fn fit_kvm(&self) -> Result<(), Failure> {
        self.split.fit_kvm()?;
        if self.log != LogKind::Hardware {
            return Ok(());
        }
        let why = "KVM itself decides whether the CPU logs; --log bitmap reads it";
        Err(Failure::Usage(format!("--backend kvm --log hardware: {why}")))
    }

    /// Where guest memory lies, and everything that was asked for.
    ///
    /// # Errors
    /// [`Failure::Usage`] with what makes no sense.
    pub(crate) fn settle(&self, chosen: (Backing, GuestMode)) -> Result<(Layout, Config), Failure> {
        if self.nested {
            return Err(Failure::Usage("-n: nested guests are out of scope".to_owned()));
        }
        self.check_log()?;
        if let Some(option) = self.virtual_time.given() {
            return Err(Failure::Usage(format!("{option}: only with --clock virtual")));
        }
        let plan = Plan {
            overlap: self.overlap.overlap,
            slots: self.slots.slots,
            offset: self.offset.offset,
            eager_split: self.split.chosen(),
        };
        let check = self.check.check;
        let (layout, guest) = config::settle(&self.memory, &self.machine, plan, chosen, check)?;
        let asked = self.log == LogKind::Hardware && self.machine.arch() == Arch::Arm;
        let tables = guest.tables.map(|tables| TablesConfig {
            hardware_access: tables.hardware_access || asked,
            ..tables
        });
        let config = Config {
            guest: GuestConfig { tables, ..guest },
            iterations: self.iterations,
            write_percent: self.write_percent,
            random_order: self.random_order,
            seed: self.seed,
            log: self.log,
            ring_entries: match self.log {
                LogKind::Ring => Some(self.ring.unwrap_or(RING_ENTRIES)),
                LogKind::Bitmap | LogKind::Hardware => None,
            },
            manual_protect: self.log == LogKind::Bitmap && !self.no_manual_protect,
            run_while_disabling: self.run_while_disabling,
            overlap: plan.overlap,
            slots: plan.slots,
            eager_split: self.machine.splits().then_some(plan.eager_split),
            split_threads: self.split_threads,
            pinning: self.pin.settle(self.memory.vcpus)?,
        };
        Ok((layout, config))
    }

    /// Refuses what only another kind of log has, or another way to split.
    fn check_log(&self) -> Result<(), Failure> {
        let usage = |why: &str| Err(Failure::Usage(why.to_owned()));
        if self.no_manual_protect && self.log != LogKind::Bitmap {
            return usage("-g: only the log of --log bitmap has a manual protect to leave out");
        }
        if self.log == LogKind::Hardware {
            self.machine.allow_hardware_dirty("--log hardware")?;
        }
        if self.ring.is_some() && self.log != LogKind::Ring {
            return usage("--ring: there are dirty rings with --log ring only");
        }
        if self.split_threads.is_some() && self.split.chosen() == EagerSplit::Off {
            return usage(
                "--split-threads: without --eager-split nothing is split ahead of write faults; say with it how much at once",
            );
        }
        Ok(())
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
        match (self.log, self.ring_entries) {
            (LogKind::Bitmap, _) if self.manual_protect => f.write_str(", manual protect")?,
            (LogKind::Bitmap, _) => f.write_str(", no manual protect")?,
            (_, Some(entries)) => write!(f, ", dirty rings of {entries}")?,
            (LogKind::Ring | LogKind::Hardware, None) => f.write_str(", hardware dirty state")?,
        }
        if self.run_while_disabling {
            f.write_str(", running while disabling")?;
        }
        if self.pinning.is_some() {
            f.write_str(", pinned")?;
        }
        writeln!(f)?;
        let threads = match self.split_threads {
            None => String::new(),
            Some(1) => " by 1 thread".to_owned(),
            Some(threads) => format!(" by {threads} threads"),
        };
        let split = self.eager_split.unwrap_or(EagerSplit::Off);
        guest.machine_line(f, &format!(", eager split {split}{threads}"))
    }
}

fn ring_entries(text: &str) -> Result<u32, String> {
    let entries = text.parse().map_err(|error: std::num::ParseIntError| error.to_string())?;
    match entries {
        256..=65536 if u32::is_power_of_two(entries) => Ok(entries),
        _ => Err("a dirty ring has a power of two of entries, 256 to 65536".to_owned()),
    }
}
