//! `slat touch`: guests touch the first byte of every page of their memory, as the one did whose faults were counted when
//! KVM's prefetch began to fill what follows the last mapped page of its window.
//!
//! Host memory is there before, page by page. A little of it lies under all of the guest's, so that nothing but tables
//! grows with `--size`.

use serde::Serialize;

use crate::arch::{Tables, with_tables};
use crate::around::Around;
use crate::backend::Backend;
use crate::check::{Check, Unchecked};
use crate::config::GuestConfig;
use crate::failure::Failure;
use crate::guest::{Pass, Program};
use crate::layout::Layout;
use crate::model::{self, Equipment};
use crate::options::MachineOptions;
use crate::output;
use crate::random::Dice;
use crate::report::{Phase, Report};
use crate::size::Size;
use crate::stage::Ground;
use crate::trace::{Run, Trace};

mod guest;
mod options;

pub(crate) use guest::{Path, Toucher};
use options::Config;
pub(crate) use options::{LONG_HELP, Options};

/// What guests touched, and how often they faulted for it.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Touched {
    pub(crate) touches: u64,
    pub(crate) faults: u64,
    faults_per_touch: f64,
}

/// The results of a report, by name.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Results {
    pub(crate) touched: Touched,
}

impl Touched {
    pub(crate) fn new(touches: u64, phases: &[Phase]) -> Self {
        let faults = phases.iter().map(|phase| phase.counters.faults).sum();
        Self { touches, faults, faults_per_touch: faults as f64 / touches.max(1) as f64 }
    }

    pub(crate) fn line(&self) -> String {
        let Self { touches, faults, faults_per_touch } = self;
        format!("{touches} touches, {faults} faults: {faults_per_touch:.4} for a touch")
    }
}

/// Where touching guests run.
#[derive(Clone, Copy)]
pub(crate) struct Place<'a> {
    pub(crate) layout: &'a Layout,
    pub(crate) machine: &'a MachineOptions,
    pub(crate) guest: &'a GuestConfig,
    pub(crate) around: Around,
}

impl Place<'_> {
    /// Lets all guests touch what they have to touch, in one phase of this name, and returns what they have recorded.
    ///
    /// # Errors
    /// Such a machine cannot be had, or a vCPU broke off.
    pub(crate) fn touch(
        self,
        name: &'static str,
        guests: Vec<Toucher>,
    ) -> Result<(Vec<Phase>, Vec<Run>), Failure> {
        let Self { layout, machine, guest, .. } = self;
        let (model, memory) = model::machine(layout, machine, guest)?;
        let ground = Ground { model: &model, memory: &memory, layout, machine };
        with_tables!(layout.kind, T => self.play::<T>(ground, name, guests))
    }

    fn play<T: Tables>(
        self,
        ground: Ground<'_>,
        name: &'static str,
        guests: Vec<Toucher>,
    ) -> Result<(Vec<Phase>, Vec<Run>), Failure> {
        let host = self.around.host(ground.memory, self.layout.size, self.layout.page);
        let equipment = Equipment { around: Some(self.around), ..host.into() };
        let ended =
            ground.play_on::<T, _, _>(equipment, guests, 1, |stage| stage.order(name, None, ()))?;
        let recorded = ended.programs.into_iter().flat_map(Toucher::into_recorded).collect();
        Ok((ended.phases, recorded))
    }
}

/// Runs the workload and prints its report.
///
/// # Errors
/// See [`Failure`].
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    match options.machine.backend() {
        Backend::Model => on_model(options),
        backend @ (Backend::Metal | Backend::Kvm) => Err(backend.lacks("touch")),
    }
}

fn on_model(options: &Options) -> Result<(), Failure> {
    let (layout, config) = options.settle()?;
    let (phases, recorded) = measure(options, &layout, &config)?;
    if let Some(path) = &options.record {
        let Config { guest, around, .. } = &config;
        let origin = format!("recorded: slat touch --size {} --fault-around {around}", guest.bytes);
        let pages = layout.size / layout.page;
        Trace { origin, page: layout.page, pages, runs: recorded }.save(path)?;
    }
    let touched = Touched::new(layout.size / layout.page, &phases);
    let report = Report {
        workload: "touch",
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

/// Faults of one guest on EPT that writes to every page of so much memory.
///
/// # Errors
/// As [`run`].
pub(crate) fn faults(bytes: Size, around: Around) -> Result<u64, Failure> {
    let options = Options::on_ept(bytes, around);
    let (layout, config) = options.settle()?;
    let (phases, _) = measure(&options, &layout, &config)?;
    Ok(Touched::new(0, &phases).faults)
}

fn measure(
    options: &Options,
    layout: &Layout,
    config: &Config,
) -> Result<(Vec<Phase>, Vec<Run>), Failure> {
    let pass = Pass { write_percent: config.write_percent, random: false };
    let toucher = |index| {
        let dice = Dice::new(1, index);
        let program = Program::new(layout.gpa, layout.page, layout.part(index), dice);
        Toucher::new(Path::Part(program, pass), options.record.as_ref().map(|_| layout))
    };
    let guests = (0..config.guest.vcpus).map(toucher).collect();
    let Config { guest, around, .. } = config;
    Place { layout, machine: &options.machine, guest, around: *around }.touch("touch", guests)
}
