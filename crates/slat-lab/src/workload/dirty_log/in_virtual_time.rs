//! `slat dirty-log --clock virtual`: what of the workload can be had there, and its report.

use std::collections::BTreeMap;
use std::fmt;

use clap::Args;
use serde::Serialize;
use slat_model::clock::{self, Cause};

use super::Options;
use super::audit::Found;
use crate::arch::Arch;
use crate::backing::{Backing, Pages};
use crate::explain::Explanation;
use crate::failure::Failure;
use crate::granule::GranuleSize;
use crate::guest_mode::{self, GuestMode};
use crate::options::{Clock, EagerSplit};
use crate::output;
use crate::report::{self, Report};
use crate::size::Size;
use crate::virtual_time::design::{Barrier, Design, HostLock, Maintenance, MmuLock, SkipLevels};
use crate::virtual_time::dirty_log::{Phase, Scenario, run};
use crate::virtual_time::ground::{BLOCK, PAGE};
use crate::virtual_time::profile::Profile;

/// The machine and the design, and choices in which it differs.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Virtual time")]
pub(crate) struct VirtualOptions {
    /// What the machine's steps cost: a name or a file [default: arm-server-2022]
    #[arg(long, value_name = "NAME|FILE")]
    profile: Option<String>,

    /// How the hypervisor is built: a name that `slat designs` lists, or a file [default: slat]
    #[arg(long, value_name = "NAME|FILE")]
    design: Option<String>,

    /// What faults do with the MMU lock, instead of what the design says
    #[arg(long, value_enum, value_name = "exclusive|shared|none", hide_possible_values = true)]
    lock: Option<MmuLock>,

    /// When stores are made visible while blocks are split
    #[arg(
        long,
        value_enum,
        value_name = "per-entry|per-block|per-walk",
        hide_possible_values = true
    )]
    barrier: Option<Barrier>,

    /// Whether a walk that splits enters the last level
    #[arg(long, value_enum, value_name = "off|on|child", hide_possible_values = true)]
    skip_levels: Option<SkipLevels>,

    /// Where new memory is cleaned from the data caches
    #[arg(long, value_enum, value_name = "under-lock|outside|none", hide_possible_values = true)]
    maintenance: Option<Maintenance>,

    /// Whether faults that ask the host write its memory-map lock
    #[arg(long, value_enum, value_name = "kept|gone", hide_possible_values = true)]
    host_lock: Option<HostLock>,
}

impl VirtualOptions {
    /// The option that was given and that only virtual time has.
    pub(super) fn given(&self) -> Option<&'static str> {
        let given = [
            ("--profile", self.profile.is_some()),
            ("--design", self.design.is_some()),
            ("--lock", self.lock.is_some()),
            ("--barrier", self.barrier.is_some()),
            ("--skip-levels", self.skip_levels.is_some()),
            ("--maintenance", self.maintenance.is_some()),
            ("--host-lock", self.host_lock.is_some()),
        ];
        given.into_iter().find(|(_, given)| *given).map(|(name, _)| name)
    }

    fn design(&self) -> Result<Design, Failure> {
        let design = Design::load(self.design.as_deref().unwrap_or("slat"))?;
        Ok(Design {
            lock: self.lock.unwrap_or(design.lock),
            barrier: self.barrier.unwrap_or(design.barrier),
            skip_levels: self.skip_levels.unwrap_or(design.skip_levels),
            maintenance: self.maintenance.unwrap_or(design.maintenance),
            host_lock: self.host_lock.unwrap_or(design.host_lock),
            ..design
        })
    }
}

/// What runs, with every default filled in.
#[derive(Clone, Debug, Serialize)]
struct Config {
    vcpus: u32,
    bytes: Size,
    iterations: u32,
    manual_protect: bool,
    eager_split: EagerSplit,
    seed: u64,
    clock: Clock,
    profile: String,
    design: String,
    lock: MmuLock,
    barrier: Barrier,
    skip_levels: SkipLevels,
    maintenance: Maintenance,
    host_lock: HostLock,
}

impl fmt::Display for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = if self.vcpus == 1 { "" } else { "s" };
        let protect = if self.manual_protect { "manual protect" } else { "no manual protect" };
        let Self { vcpus, bytes, eager_split, .. } = self;
        writeln!(f, "{vcpus} vCPU{plural} x {bytes} anonymous_thp, {protect}")?;
        write!(
            f,
            "profile {}, design {}: MMU lock {}",
            self.profile,
            self.design,
            self.lock.name()
        )?;
        write!(f, ", barrier {}, skip levels {}", self.barrier.name(), self.skip_levels.name())?;
        write!(f, ", eager split {eager_split}, cleaning {}", self.maintenance.name())?;
        write!(f, ", host lock {}", self.host_lock.name())
    }
}

/// Where the time of a phase went, of those who worked in it.
#[derive(Clone, Debug, Serialize)]
struct Time {
    name: &'static str,
    iteration: Option<u32>,
    /// By cause; those that took nothing are left out.
    seconds: BTreeMap<&'static str, f64>,
    /// How long what only one can use at a time was in use.
    busy: BTreeMap<&'static str, f64>,
}

#[derive(Clone, Debug, Serialize)]
struct Results {
    time: Vec<Time>,
}

impl Time {
    fn of(phase: &Phase, design: &Design) -> Self {
        let causes = Cause::ALL.into_iter().map(|cause| (cause, phase.ledger.time(cause)));
        let taken = causes.filter(|(_, time)| *time > clock::Time(0));
        let seconds = taken.map(|(cause, time)| (cause.key(), time.as_seconds())).collect();
        let resources = phase.busy.resources(design).into_iter();
        let busy = resources.map(|(key, _, time)| (key, time.as_seconds())).collect();
        Self { name: phase.name, iteration: phase.iteration, seconds, busy }
    }
}

/// The phase and the shares of its time, largest first; nothing if it took none.
fn shares(phase: &Phase) -> Option<String> {
    let total = phase.ledger.total().as_ns();
    let mut parts = Cause::ALL.map(|cause| (cause, phase.ledger.time(cause).as_ns() / total));
    parts.sort_by(|a, b| b.1.total_cmp(&a.1));
    let parts = parts.into_iter().filter(|(_, share)| *share >= 0.001);
    let line = |(cause, share): (Cause, f64)| format!("{} {:.1} %", cause.words(), share * 100.0);
    let parts: Vec<_> = parts.map(line).collect();
    let iteration = phase.iteration.map(|number| format!(" {number}")).unwrap_or_default();
    (total > 0.0).then(|| format!("{}{iteration}: {}", phase.name, parts.join("; ")))
}

/// What runs on which machine, and what it is called in a report.
struct Setup {
    scenario: Scenario,
    profile: Profile,
    design: Design,
    config: Config,
}

impl Setup {
    /// # Errors
    /// [`Failure::Usage`] for what virtual time has not, or what is wrong with a file.
    fn new(options: &Options, backing: Backing, mode: GuestMode) -> Result<Self, Failure> {
        refuse(options, backing, mode)?;
        let design = options.virtual_time.design()?;
        let profile =
            Profile::load(options.virtual_time.profile.as_deref().unwrap_or("arm-server-2022"))?;
        let eager_split = options.split.eager_split.unwrap_or(design.eager_split);
        let scenario = Scenario {
            vcpus: options.memory.vcpus,
            bytes: options.memory.bytes.0,
            iterations: options.iterations,
            manual_protect: !options.no_manual_protect,
            eager_split: eager_split.chunk().map(|chunk| chunk.0),
            seed: options.seed,
        };
        let config = Config {
            vcpus: scenario.vcpus,
            bytes: options.memory.bytes,
            iterations: scenario.iterations,
            manual_protect: scenario.manual_protect,
            eager_split,
            seed: scenario.seed,
            clock: Clock::Virtual,
            profile: profile.name.clone(),
            design: design.name.clone(),
            lock: design.lock,
            barrier: design.barrier,
            skip_levels: design.skip_levels,
            maintenance: design.maintenance,
            host_lock: design.host_lock,
        };
        Ok(Self { scenario, profile, design, config })
    }

    fn run(&self) -> Result<Vec<Phase>, Failure> {
        run(&self.scenario, &self.profile, &self.design)
    }
}

/// Runs the workload in virtual time and prints its report.
///
/// # Errors
/// [`Failure::Usage`] for what virtual time has not; see [`Failure`].
pub(super) fn run_and_print(
    options: &Options,
    backing: Backing,
    mode: GuestMode,
) -> Result<(), Failure> {
    let setup = Setup::new(options, backing, mode)?;
    let found = setup.run()?;
    let Setup { design, config, .. } = setup;
    let phases: Vec<_> = found.iter().map(counted).collect();
    let time: Vec<_> = found.iter().map(|phase| Time::of(phase, &design)).collect();
    let mut summary = vec!["Where time went, of all who worked in a phase:".to_owned()];
    summary.extend(found.iter().filter_map(shares));
    let mut notes = Vec::new();
    let what = if design.lock != MmuLock::None {
        "faults are counted in slat's engine, which does this design's work too; walks, in the design's visitors"
    } else {
        "the thread's walks pay for each step of the engine; those of older designs pay what theirs took on another CPU: \
         compare populate and dirty with theirs, not clear"
    };
    notes.push(what.to_owned());
    if backing.pages == Pages::Base {
        notes.push("virtual time has transparent huge pages behind guest memory".to_owned());
    }
    let report = Report::<_, _, Found> {
        workload: "dirty-log",
        backend: "virtual",
        host: None,
        config,
        notes,
        summary,
        counters: phases.iter().map(|phase| phase.counters).sum(),
        phases,
        results: Results { time },
        check: None,
    };
    output::print(&report, &options.output)
}

/// Runs the workload in virtual time and says where the time of a fault went.
///
/// # Errors
/// As [`run_and_print`].
pub(super) fn run_and_explain(
    options: &Options,
    backing: Backing,
    mode: GuestMode,
) -> Result<(), Failure> {
    let setup = Setup::new(options, backing, mode)?;
    let phases = setup.run()?;
    let Setup { scenario, profile, design, config } = setup;
    let pages = scenario.bytes / PAGE * u64::from(scenario.vcpus);
    Explanation::new(("dirty-log", config), &phases, (&profile, &design), pages)
        .print(&options.output)
}

fn counted(phase: &Phase) -> report::Phase {
    let &Phase { name, iteration, took, counters, .. } = phase;
    let seconds = took.as_seconds();
    report::Phase { name, iteration, seconds, instructions: None, counters, exits: None }
}

/// Says why something that was asked for cannot be had in virtual time.
fn refuse(options: &Options, backing: Backing, mode: GuestMode) -> Result<(), Failure> {
    let Options { memory, machine, .. } = options;
    let bytes = memory.bytes.0;
    let size = bytes.checked_mul(u64::from(memory.vcpus));
    let refusals = [
        (bytes == 0, "-b 0: a vCPU needs memory"),
        (!bytes.is_multiple_of(BLOCK), "-b: virtual time has whole blocks of 2M only"),
        (size.is_none_or(|size| size > 1 << 43), "-v, -b: more than 8T together"),
        (options.check.check, "--check: there is no content to compare, memory is addresses only"),
        (options.overlap.overlap, "-o: vCPUs use memory of their own in virtual time"),
        (options.slots.slots != 1, "-x: virtual time has one memslot"),
        (options.offset.offset.is_some(), "-p: guest memory begins at 0 in virtual time"),
        (options.pin.is_given(), "-c: vCPUs have no processors of their own in virtual time"),
        (options.write_percent != 100, "-w: vCPUs only write in virtual time"),
        (options.run_while_disabling, "-e: vCPUs stand while the log is disabled in virtual time"),
        (options.random_order, "-a: vCPUs write page after page in virtual time"),
        (
            !options.is_plain_log(),
            "--log, --ring, --split-threads: virtual time has the bitmap and one thread",
        ),
        (options.nested, "-n: nested guests are out of scope"),
        (
            backing.shared || !matches!(backing.pages, Pages::Base | Pages::Transparent),
            "-s: virtual time has anonymous_thp only",
        ),
        (
            guest_mode::DEFAULT.parse() != Ok(mode),
            "-m: virtual time has guest pages of 4K only, and its own address width",
        ),
        (machine.arch() != Arch::Arm, "--arch: profiles are of Arm machines"),
        (machine.granule() != GranuleSize::K4, "--granule: profiles are of 4K tables"),
        (machine.ipa_bits.is_some(), "--ipa-bits: virtual time has 44 of them"),
        (machine.exits, "--exits: what an exit takes here is in the costs of the profile"),
        (machine.fwb, "--fwb: --maintenance none is the same here"),
        (machine.hardware_access(), "--hardware-access: no fault here is of the access flag"),
    ];
    match refusals.into_iter().find(|(refused, _)| *refused) {
        Some((_, why)) => Err(Failure::Usage(format!("{why} (--clock virtual)"))),
        None => Ok(()),
    }
}
