//! `slat access-tracking`: what it costs guests that the host wants to know which pages they use, as in the kernel's
//! `access_tracking_perf_test`.
//!
//! Populate; write and read, for comparison; mark all memory idle, write; mark it idle again, read. Marking idle clears
//! access flags, and the next use of a page sets its flag again: in hardware with `--hardware-access on`, otherwise by a
//! fault. Before each marking the pages that are idle still are counted: there should be few.
//!
//! A CPU that has a translation cached does not look at the flag. Real TLBs soon forget, the model's never do, so they
//! are told to; `--no-flush` leaves them alone, as the kernel does.

use std::time::Instant;

use serde::Serialize;
use slat::maintenance::{Context, Invalidation, Maintenance};
use slat::{Gpa, GpaRange};
use slat_vm::InvalidateError;

use crate::arch::{Tables, with_tables};
use crate::backend::Backend;
use crate::check::Check;
use crate::failure::Failure;
use crate::guest::{Pass, Program};
use crate::layout::Layout;
use crate::random::Dice;
use crate::report::{Phase, Report};
use crate::stage::{Ground, Stage};
use crate::{config, model, output};

mod found;
mod idle;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod on_kvm;
#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
use crate::kvm as on_kvm;
mod options;

use found::Found;
use idle::Idle;
use options::Config;
pub(crate) use options::{LONG_HELP, Options};

const WRITE: Pass = Pass { write_percent: 100, random: false };
const READ: Pass = Pass { write_percent: 0, random: false };

/// What is measured besides time.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Results {
    /// What each marking found before it marked.
    idle: Vec<Idle>,
}

/// Runs the workload and prints its report.
///
/// # Errors
/// See [`Failure`].
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    match options.machine.backend() {
        Backend::Model => on_model(options),
        Backend::Kvm => on_kvm::run(options),
        backend @ Backend::Metal => Err(backend.lacks("access-tracking")),
    }
}

fn on_model(options: &Options) -> Result<(), Failure> {
    let Some(chosen) = config::choose(&options.memory)? else { return Ok(()) };
    let (layout, config) = options.settle(chosen)?;
    let (layout, machine) = (&layout, &options.machine);
    let (model, memory) = model::machine(layout, machine, &config.guest)?;
    let ground = Ground { model: &model, memory: &memory, layout, machine };
    let Measured { phases, idle, warnings, check } =
        with_tables!(layout.kind, T => measure::<T>(ground, &config))?;
    let mut notes = config.guest.notes(layout);
    notes.extend(warnings);
    let report = Report {
        workload: "access-tracking",
        backend: "model",
        host: None,
        notes,
        summary: (1..)
            .zip(&idle)
            .map(|(n, idle)| format!("Mark memory idle {n}: {idle}"))
            .collect(),
        config,
        counters: phases.iter().map(|phase| phase.counters).sum(),
        phases,
        results: Results { idle },
        check,
    };
    output::print(&report, &options.output)
}

struct Measured {
    phases: Vec<Phase>,
    idle: Vec<Idle>,
    warnings: Vec<String>,
    check: Option<Check<Found>>,
}

/// All phases with one granule.
fn measure<T: Tables>(ground: Ground<'_>, config: &Config) -> Result<Measured, Failure> {
    let guests = (0..config.guest.vcpus).map(|index| program(ground.layout, config, index));
    let ended = ground.play::<T, _, _>(guests.collect(), 5, |stage| {
        let found = config.guest.check.then(|| Found::new(ground.layout));
        let (idle, warnings) = (Vec::new(), Vec::new());
        let mut run = Run { ground, config, stage, idle, warnings, found };
        run.all()?;
        Ok((run.idle, run.warnings, run.found))
    })?;
    let (idle, warnings, found) = ended.result;
    let check = found.map(|mut found| {
        found.finish(ground, &ended.programs);
        ground.judge(found)
    });
    Ok(Measured { phases: ended.phases, idle, warnings, check })
}

fn program(layout: &Layout, config: &Config, index: u32) -> Program {
    let dice = Dice::new(0, index);
    let program = Program::new(layout.gpa, layout.guest_page, layout.part(index), dice);
    match config.guest.check {
        true => program.checked(index, config.guest.vcpus, !config.overlap),
        false => program,
    }
}

/// A run in progress.
struct Run<'a, 'r, 's, 'm, T: Tables> {
    ground: Ground<'a>,
    config: &'a Config,
    stage: &'r mut Stage<'s, 'm, T>,
    idle: Vec<Idle>,
    warnings: Vec<String>,
    found: Option<Found>,
}

impl<T: Tables> Run<'_, '_, '_, '_, T> {
    fn all(&mut self) -> Result<(), Failure> {
        self.access("populate", WRITE)?;
        self.access("write", WRITE)?;
        self.access("read", READ)?;
        self.mark_idle(1)?;
        self.access("write-idle", WRITE)?;
        self.mark_idle(2)?;
        self.access("read-idle", READ)
    }

    /// A phase in which every vCPU uses each of its pages.
    fn access(&mut self, name: &'static str, pass: Pass) -> Result<(), Failure> {
        self.stage.pass(name, None, pass)?;
        if let Some(found) = &mut self.found {
            found.after_access(self.stage, self.ground, self.config.flush);
        }
        Ok(())
    }

    /// Clears all access flags, after it was seen which are clear still.
    fn mark_idle(&mut self, iteration: u32) -> Result<(), Failure> {
        let mut idle = self.look()?;
        let Layout { gpa, size, .. } = *self.ground.layout;
        let memory = GpaRange::new(Gpa(gpa), size);
        let memory = memory.ok_or_else(|| Failure::Run("the guest has no memory".to_owned()))?;
        self.stage.begin("mark-idle", Some(iteration));
        let start = Instant::now();
        let Stage { vm, worker, .. } = &mut *self.stage;
        idle.cleared = vm.clear_young(worker, memory).map_err(unreadable)?;
        if self.config.flush {
            self.flush();
        }
        self.stage.end("mark-idle", Some(iteration), start.elapsed());
        if self.found.is_some() {
            self.stage.begin("check", Some(iteration));
            let start = Instant::now();
            let Stage { vm, worker, .. } = &mut *self.stage;
            let young = vm.test_young(worker, memory).map_err(unreadable)?;
            if let Some(found) = &mut self.found {
                found.after_mark(young, idle.cleared);
            }
            self.stage.end("check", Some(iteration), start.elapsed());
        }
        self.idle.push(idle);
        Ok(())
    }

    /// Every CPU forgets the guest's translations.
    fn flush(&self) {
        let tree = self.stage.vm.tree();
        let context = Context { root: tree.root_register(), page_shift: T::PAGE_SHIFT };
        let everything = Invalidation { range: None, level: None };
        T::Maintenance::invalidate(tree.machine(), &context, everything);
    }

    /// Which pages of each vCPU are idle already, with the kernel's limits.
    fn look(&mut self) -> Result<Idle, Failure> {
        let mut all = Idle::default();
        for vcpu in 0..self.config.owners() {
            let mut idle = Idle::default();
            for page in self.ground.layout.part(vcpu) {
                let offset = page * self.ground.layout.guest_page;
                idle.add(self.stage.translation(self.ground, offset).as_ref());
            }
            idle.check_mapped(vcpu)?;
            match (idle.check_used(vcpu), self.config.flush) {
                (Err(why), true) => return Err(Failure::Run(why)),
                (Err(why), false) => self.warnings.push(format!(
                    "{why}; without a flush the model's TLBs keep what they have, so idle memory was not measured"
                )),
                (Ok(()), _) => {}
            }
            all += idle;
        }
        Ok(all)
    }
}

fn unreadable(error: InvalidateError) -> Failure {
    Failure::Run(format!("access flags cannot be read: {error}"))
}
