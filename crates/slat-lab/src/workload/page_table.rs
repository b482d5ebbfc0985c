//! `slat page-table`: what it takes to create, update and adjust translations while all vCPUs touch the same memory, as
//! in the kernel's `kvm_page_table_test`.
//!
//! Create: each vCPU touches each large page of the backing; those with an even number write, the others read. The log
//! goes on. Update: of memory in small pages every page is written; otherwise the first page of each large page is
//! written and its second half is read, page by page. The log goes off. What was split becomes blocks again, in place.
//! Adjust: every page is read.
//!
//! Where KVM splits a block lazily, most of its pages are gone until they are touched, and the reads of the last phase
//! put the block back by faults. Here a split loses nothing, reads never fault, and blocks come back by request.

use std::time::Instant;

use slat_vm::LogMode;

use crate::arch::{Tables, with_tables};
use crate::backend::Backend;
use crate::check::Check;
use crate::contents;
use crate::failure::Failure;
use crate::metal::{Nothing, Request};
use crate::report::{Phase, Report};
use crate::stage::{Ground, Stage};
use crate::translations::Survey;
use crate::{config, metal, model, output};

mod found;
mod guest;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod on_kvm;
#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
use crate::kvm as on_kvm;
mod options;

use found::Found;
use guest::{Order, Toucher};
use options::Config;
pub(crate) use options::{LONG_HELP, Options};

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
    let (phases, check) = with_tables!(layout.kind, T => measure::<T>(ground, &config))?;
    let report = Report {
        workload: "page-table",
        backend: "model",
        host: None,
        notes: config.guest.notes(layout),
        summary: summary(&phases),
        config,
        counters: phases.iter().map(|phase| phase.counters).sum(),
        phases,
        results: (),
        check,
    };
    output::print(&report, &options.output)
}

fn on_metal(options: &Options) -> Result<(), Failure> {
    let Some(chosen) = config::choose(&options.memory)? else { return Ok(()) };
    metal::check(&options.memory, &options.machine)?;
    let (layout, mut config) = options.settle(chosen)?;
    let request = Request {
        workload: "page-table",
        options: &options.metal,
        layout: &layout,
        bytes: layout.size,
        words: String::new(),
        phases: 6,
    };
    let told = metal::run::<Nothing, Found>(&request, &mut config.guest)?;
    let report = Report {
        workload: "page-table",
        backend: "metal",
        host: None,
        notes: told.notes,
        summary: summary(&told.phases),
        config,
        phases: told.phases,
        counters: told.counters,
        results: (),
        check: told.check,
    };
    output::print(&report, &options.output)
}

/// The lines that the kernel's test prints.
fn summary<N>(phases: &[Phase<N>]) -> Vec<String> {
    let stages = [("create", "CREATE"), ("update", "UPDATE"), ("adjust", "ADJUST")];
    let line = |(name, stage)| {
        let phase = phases.iter().find(|phase| phase.name == name)?;
        Some(format!("KVM_{stage}_MAPPINGS: total execution time: {:.9}s", phase.seconds))
    };
    stages.into_iter().filter_map(line).collect()
}

/// All phases with one granule, and what the check found.
fn measure<T: Tables>(
    ground: Ground<'_>,
    config: &Config,
) -> Result<(Vec<Phase>, Option<Check<Found>>), Failure> {
    let vcpus = config.guest.vcpus;
    let guests = (0..vcpus).map(|index| Toucher::new(ground.layout, config, index)).collect();
    let ended = ground.play::<T, _, _>(guests, 2, |stage| {
        let found = Found::new(ground.layout, config);
        let mut run = Run { ground, config, stage, found };
        run.all()?;
        Ok(run.found)
    })?;
    let check = config.guest.check.then(|| {
        let guests: Vec<_> = ended.programs.into_iter().map(Toucher::into_program).collect();
        let mut found = ended.result;
        found.wrong_loads = contents::wrong_loads(&guests);
        found.misplaced += contents::misplaced(ground.memory, ground.layout, &guests);
        ground.judge(found)
    });
    Ok((ended.phases, check))
}

/// A run in progress.
struct Run<'a, 'r, 's, 'm, T: Tables> {
    ground: Ground<'a>,
    config: &'a Config,
    stage: &'r mut Stage<'s, 'm, T, Toucher>,
    found: Found,
}

impl<T: Tables> Run<'_, '_, '_, '_, T> {
    fn all(&mut self) -> Result<(), Failure> {
        let check = self.config.guest.check;
        self.touch("create", Order::Create)?;
        if check {
            self.found.created = self.survey(Found::after_create);
        }
        let log = LogMode::Protect;
        self.stage.each_slot("enable", None, |vm, worker, id| vm.enable_log(worker, id, log))?;
        self.touch("update", Order::Update)?;
        if check {
            self.collect()?;
            self.found.updated = self.survey(Found::after_update);
        }
        self.stage.each_slot("disable", None, |vm, worker, id| vm.disable_log(worker, id))?;
        self.stage
            .each_slot("collapse", None, |vm, worker, id| vm.collapse(worker, id).map(drop))?;
        self.touch("adjust", Order::Adjust)?;
        if check {
            self.found.adjusted = self.survey(Found::after_adjust);
        }
        Ok(())
    }

    /// A phase in which every vCPU follows one order.
    fn touch(&mut self, name: &'static str, order: Order) -> Result<(), Failure> {
        self.stage.order(name, None, order)
    }

    /// Every page that was written is in the log, and has what was written. A phase of its own, so that no other
    /// counts what it does.
    fn collect(&mut self) -> Result<(), Failure> {
        let layout = self.ground.layout;
        self.stage.begin("check", None);
        let start = Instant::now();
        let mut log = vec![0; layout.slot_pages().div_ceil(64) as usize];
        let Stage { vm, worker, .. } = &mut *self.stage;
        vm.dirty_log(worker, 0, &mut log)?;
        for page in self.config.written_pages(layout) {
            let reported = log[(page / 64) as usize] >> (page % 64) & 1 == 1;
            self.found.lost += u64::from(!reported);
            let there = contents::word(self.ground.memory, layout, page) != 0;
            self.found.misplaced += u64::from(!there);
        }
        self.stage.end("check", None, start.elapsed());
        Ok(())
    }

    fn survey(&mut self, judge: found::Judge) -> Survey {
        let found = &mut self.found;
        let survey = self.stage.survey(self.ground, |offset, leaf| judge(found, offset, leaf));
        found.elsewhere += survey.elsewhere;
        survey
    }
}
