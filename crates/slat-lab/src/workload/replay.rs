//! What a guest faults for that touches the pages of a trace, in its order: `slat boot` and `slat app`.

use std::fmt;
use std::path::{Path as FilePath, PathBuf};
use std::sync::Arc;

use clap::Args;
use serde::Serialize;

use super::touch::{Path, Place, Results, Touched, Toucher};
use crate::arch::Arch;
use crate::around::{self, Around};
use crate::backend::Backend;
use crate::check::{Check, Unchecked};
use crate::config::GuestConfig;
use crate::failure::Failure;
use crate::layout::Layout;
use crate::metal;
use crate::options::{MachineOptions, OutputOptions};
use crate::output;
use crate::report::{Phase, Report};
use crate::size::Size;
use crate::trace::{Run, Trace};

/// The window if none is asked for.
const WINDOW: Around = Around::Pages(8);

/// What follows the options in `--help`.
pub(crate) const LONG_HELP: &str = "\
Without --trace the touches are synthetic: made up, the same at every run, with a share of pages touched upwards that was \
fitted to published counts of faults. touch --record, and --record here, write a trace; docs/README.md of crates/slat-lab \
describes the file. Windows of --fault-around are those of touch, 8 if none is named.

--json prints one object as dirty-log does; \"touched\" has touches, faults and faults_per_touch.

Exit status: 0 done; 1 the run broke off; 2 the command makes no sense, or the file is no trace.";

/// Options of a replay.
#[derive(Clone, Debug, Args)]
#[command(mut_arg("granule", |granule| granule.long("pages").alias("granule")))]
pub(crate) struct Options {
    /// File with the touches [default: those of the workload]
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,

    /// Pages of the window of a fault, adaptive, or closed-runs [default: 8]
    #[arg(long, value_name = "N|adaptive|closed-runs")]
    fault_around: Option<Around>,

    /// File to record the touches in
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,

    #[command(flatten)]
    machine: MachineOptions,

    #[command(flatten)]
    pub(super) output: OutputOptions,
}

/// What runs, with every default filled in: the `config` of the report.
#[derive(Clone, Debug, Serialize)]
struct Config {
    #[serde(flatten)]
    guest: GuestConfig,
    #[serde(rename = "fault_around")]
    around: Around,
    /// Where the touches come from.
    trace: String,
}

impl Options {
    /// What it runs on.
    pub(super) fn backend(&self) -> Backend {
        self.machine.backend()
    }

    /// The window that was asked for.
    pub(super) fn around(&self) -> Option<Around> {
        self.fault_around
    }

    /// Refuses what a guest on bare metal has not, of what a replay is asked: the file to record in.
    ///
    /// # Errors
    /// [`Failure::Usage`].
    pub(super) fn for_metal(&self) -> Result<Option<&FilePath>, Failure> {
        if self.trace.is_some() {
            return Err(metal::refusal("--trace: Linux itself boots there, nothing is replayed"));
        }
        if self.machine.arch() != Arch::Arm {
            return Err(metal::refusal("--arch: the guest is a Linux for Arm"));
        }
        if self.machine.ipa_bits.is_some() || self.machine.hardware_access.is_some() {
            return Err(metal::refusal(
                "--ipa-bits, --hardware-access: Linux gets what the CPU has",
            ));
        }
        metal::check_machine(&self.machine)?;
        Ok(self.record.as_deref())
    }

    fn settle(&self, trace: &Trace) -> Result<(Layout, Config), Failure> {
        let bytes = Size(trace.pages * trace.page);
        let around = self.fault_around.unwrap_or(WINDOW);
        let (mut layout, guest) = around::settle(around, &self.machine, (1, bytes))?;
        layout.guest_page = trace.page;
        let config = Config { guest, around, trace: trace.origin.clone() };
        Ok((layout, config))
    }

    fn measure(
        &self,
        name: &'static str,
        trace: &Arc<Trace>,
        (layout, config): (&Layout, &Config),
    ) -> Result<(Vec<Phase>, Vec<Run>), Failure> {
        let path = Path::Trace(Arc::clone(trace), layout.gpa);
        let guest = Toucher::new(path, self.record.as_ref().map(|_| layout));
        let place =
            Place { layout, machine: &self.machine, guest: &config.guest, around: config.around };
        place.touch(name, vec![guest])
    }
}

impl fmt::Display for Config {
    /// Three lines: what the guest is and does; where that comes from; what it runs on.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { guest, around, trace } = self;
        writeln!(f, "{}, {}", guest.crowd(), guest.bytes)?;
        writeln!(f, "trace {trace}")?;
        guest.machine_line(f, &format!(", fault-around {around}"))
    }
}

/// Replays a trace as the workload of this name: that of the options, or the workload's own.
///
/// # Errors
/// See [`Failure`].
pub(super) fn run(
    name: &'static str,
    own: impl FnOnce() -> Result<Trace, Failure>,
    options: &Options,
) -> Result<(), Failure> {
    match options.machine.backend() {
        Backend::Model => on_model(name, own, options),
        backend @ (Backend::Metal | Backend::Kvm) => Err(backend.lacks(name)),
    }
}

fn on_model(
    name: &'static str,
    own: impl FnOnce() -> Result<Trace, Failure>,
    options: &Options,
) -> Result<(), Failure> {
    let trace = match &options.trace {
        Some(path) => Trace::load(path)?,
        None => own()?,
    };
    let trace = Arc::new(trace);
    let (layout, config) = options.settle(&trace)?;
    let (phases, runs) = options.measure(name, &trace, (&layout, &config))?;
    if let Some(path) = &options.record {
        Trace { runs, ..Trace::clone(&trace) }.save(path)?;
    }
    let touched = Touched::new(trace.touches(), &phases);
    let report = Report {
        workload: name,
        backend: "model",
        host: None,
        notes: config.guest.notes(&layout),
        summary: vec![touched.line()],
        config,
        counters: phases.iter().map(|phase| phase.counters).sum(),
        phases,
        results: Results { touched },
        check: None::<Check<Unchecked>>,
    };
    output::print(&report, &options.output)
}

/// Faults of a guest on EPT that touches what the trace says.
///
/// # Errors
/// As [`run`].
pub(crate) fn faults(trace: &Arc<Trace>, around: Around) -> Result<u64, Failure> {
    let (machine, output) = (MachineOptions::plain(Arch::Ept), OutputOptions { json: false });
    let around = Some(around);
    let options = Options { trace: None, fault_around: around, record: None, machine, output };
    let (layout, config) = options.settle(trace)?;
    let (phases, _) = options.measure("replay", trace, (&layout, &config))?;
    Ok(Touched::new(trace.touches(), &phases).faults)
}
