//! `slat demand-paging`: how fast guests get pages that the host has to fetch first, as in the kernel's
//! `demand_paging_test`.
//!
//! Every vCPU writes to each page of its part once. With `-u`, handler threads serve the pages; a vCPU whose page has
//! not come sleeps in the fault. With `--check` the vCPUs then read everything back, and every page must have come once.

use std::sync::Arc;
use std::thread::{self, Scope};
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::arch::{Tables, with_tables};
use crate::backend::Backend;
use crate::check::Check;
use crate::failure::Failure;
use crate::guest::{Pass, Program};
use crate::layout::Layout;
use crate::metal::{self, Request};
use crate::model::{self, Equipment, ModelHost};
use crate::random::Dice;
use crate::report::{Phase, Report};
use crate::stage::{Ground, Stage};
use crate::{config, output};

mod found;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod on_kvm;
#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
use crate::kvm as on_kvm;
mod options;
mod source;
mod userfault;

use found::Found;
use options::Config;
pub(crate) use options::{LONG_HELP, Options};
use userfault::{CloseAtEnd, Division, Mode, Served, Userfault};

/// What every vCPU does.
const WRITE: Pass = Pass { write_percent: 100, random: false };
/// What it does to see what it has written.
const READ: Pass = Pass { write_percent: 0, random: false };

/// What is measured besides time.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Results {
    demand: Demand,
}

/// Guest pages by time, and what the handlers did.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Demand {
    pages_per_second_per_vcpu: f64,
    pages_per_second: f64,
    userfault: Option<Served>,
}

/// Runs the workload and prints its report.
///
/// # Errors
/// See [`Failure`].
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let backend = options.machine.backend();
    options.metal.only_for(backend)?;
    match backend {
        Backend::Model => on_model(options),
        Backend::Metal => on_metal(options),
        Backend::Kvm => on_kvm::run(options),
    }
}

fn on_model(options: &Options) -> Result<(), Failure> {
    let Some(chosen) = config::choose(&options.memory)? else { return Ok(()) };
    let (layout, config) = options.settle(chosen)?;
    let (layout, machine) = (&layout, &options.machine);
    let (model, memory) = model::machine(layout, machine, &config.guest)?;
    let ground = Ground { model: &model, memory: &memory, layout, machine };
    let Measured { phases, served, check } =
        with_tables!(layout.kind, T => measure::<T>(ground, &config))?;
    let mut notes = config.guest.notes(layout);
    notes.extend(options.ignored());
    let demand = demand(&phases, layout, &config, served);
    let report = Report {
        workload: "demand-paging",
        backend: "model",
        host: None,
        notes,
        summary: summary(&phases, &demand),
        config,
        counters: phases.iter().map(|phase| phase.counters).sum(),
        phases,
        results: Results { demand },
        check,
    };
    output::print(&report, &options.output)
}

fn on_metal(options: &Options) -> Result<(), Failure> {
    let Some(chosen) = config::choose(&options.memory)? else { return Ok(()) };
    metal::check(&options.memory, &options.machine)?;
    let (layout, mut config) = options.settle(chosen)?;
    let request = Request {
        workload: "demand-paging",
        options: &options.metal,
        layout: &layout,
        bytes: options.memory.bytes.0,
        words: options.words()?,
        phases: 3,
    };
    let told = metal::run::<Results, Found>(&request, &mut config.guest)?;
    let demand = demand(&told.phases, &layout, &config, told.results.demand.userfault);
    let report = Report {
        workload: "demand-paging",
        backend: "metal",
        host: None,
        notes: told.notes,
        summary: summary(&told.phases, &demand),
        config,
        phases: told.phases,
        counters: told.counters,
        results: Results { demand },
        check: told.check,
    };
    output::print(&report, &options.output)
}

/// How long the vCPUs wrote.
fn seconds<N>(phases: &[Phase<N>]) -> f64 {
    phases.iter().find(|phase| phase.name == "demand").map_or(0.0, |phase| phase.seconds)
}

fn demand<N>(
    phases: &[Phase<N>],
    layout: &Layout,
    config: &Config,
    served: Option<Served>,
) -> Demand {
    let part = layout.part(0);
    let rate = (part.end - part.start) as f64 / seconds(phases);
    Demand {
        pages_per_second_per_vcpu: rate,
        pages_per_second: rate * f64::from(config.guest.vcpus),
        userfault: served,
    }
}

/// The lines that the kernel's test ends with.
fn summary<N>(phases: &[Phase<N>], demand: &Demand) -> Vec<String> {
    let mut lines = vec![
        format!("Total guest execution time: {:.9}s", seconds(phases)),
        format!(
            "Per-vcpu demand paging rate: {:.6} pgs/sec/vcpu",
            demand.pages_per_second_per_vcpu
        ),
        format!("Overall demand paging rate: {:.6} pgs/sec", demand.pages_per_second),
    ];
    if let Some(Served { requests, served, duplicates }) = demand.userfault {
        lines.push(format!(
            "Userfault: {requests} requests, {served} served, {duplicates} duplicates"
        ));
    }
    lines
}

struct Measured {
    phases: Vec<Phase>,
    served: Option<Served>,
    check: Option<Check<Found>>,
}

/// All phases with one granule.
fn measure<T: Tables>(ground: Ground<'_>, config: &Config) -> Result<Measured, Failure> {
    let Some(mode) = config.userfault else {
        return play::<T>(ground, config, None);
    };
    let queues = config.queues();
    let division = Division {
        page: config.guest.backing_page.0,
        region: ground.layout.size / u64::from(queues),
        regions: queues as usize,
        guest_page: ground.layout.guest_page,
    };
    let userfault = Arc::new(Userfault::new(Arc::clone(ground.memory), mode, division));
    let measured = thread::scope(|scope| {
        let close = CloseAtEnd(&userfault);
        start_handlers(scope, config, &userfault)
            .map_err(|error| Failure::Run(format!("no thread for a handler: {error}")))?;
        let measured = play::<T>(ground, config, Some(&userfault));
        drop(close);
        measured
    })?;
    let served = userfault.served();
    let check = measured.check.map(|mut check| {
        check.found.count(served, userfault.present());
        check
    });
    Ok(Measured { served: Some(served), check, ..measured })
}

fn start_handlers<'scope>(
    scope: &'scope Scope<'scope, '_>,
    config: &Config,
    userfault: &'scope Userfault,
) -> std::io::Result<()> {
    let delay = config.delay();
    for queue in 0..config.queues() as usize {
        for _ in 0..config.readers {
            let thread = thread::Builder::new().name(format!("handler-{queue}"));
            thread.spawn_scoped(scope, move || userfault.handle(queue, delay))?;
        }
    }
    Ok(())
}

/// The guests' part of it.
fn play<T: Tables>(
    ground: Ground<'_>,
    config: &Config,
    userfault: Option<&Arc<Userfault>>,
) -> Result<Measured, Failure> {
    let host = match userfault {
        Some(userfault) => ModelHost::shared(Arc::clone(userfault)),
        None => ModelHost::of(ground.memory),
    };
    let guests = (0..config.guest.vcpus).map(|index| program(ground.layout, config, index));
    let equipment = Equipment { pinning: config.pinning.clone(), ..host.into() };
    let ended = ground.play_on::<T, _, _>(equipment, guests.collect(), 1, |stage| {
        if config.userfault == Some(Mode::Minor) {
            fill(stage, ground);
        }
        stage.pass("demand", None, WRITE)?;
        if !config.guest.check {
            return Ok(None);
        }
        let found =
            Found::look(stage, ground, userfault.map(Arc::as_ref), config.guest.backing_page.0);
        stage.pass("check", None, READ)?;
        Ok(Some(found))
    })?;
    let check = ended.result.map(|mut found| {
        found.finish(ground, config.userfault, &ended.programs);
        ground.judge(found)
    });
    Ok(Measured { phases: ended.phases, served: None, check })
}

/// Gives shared memory its contents before anybody maps it.
fn fill<T: Tables>(stage: &mut Stage<'_, '_, T>, ground: Ground<'_>) {
    stage.begin("fill", None);
    let start = Instant::now();
    source::copy(ground.memory, 0..ground.layout.size, ground.layout.guest_page);
    stage.end("fill", None, start.elapsed());
}

fn program(layout: &Layout, config: &Config, index: u32) -> Program {
    let dice = Dice::new(0, index);
    let program = Program::new(layout.gpa, layout.guest_page, layout.part(index), dice);
    match config.guest.check {
        true => program.checked(index, config.guest.vcpus, !config.overlap),
        false => program,
    }
}
