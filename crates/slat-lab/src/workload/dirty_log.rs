//! `slat dirty-log`: how long guests take to write, and the hypervisor to log it, as in the kernel's
//! `dirty_log_perf_test`.
//!
//! Populate; enable the log; for each iteration dirty, get, clear (unless getting protects at once); disable. Dirty rings
//! are also emptied when one is full; then to get is to take the rest out, and to clear is to have all of it reset. With
//! `--check` every collection is compared with memory, and before the log is disabled it is also collected and cleared
//! while all vCPUs write at random.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use slat::{Gpa, GpaRange};
use slat_vm::LogError;

use crate::arch::{Tables, with_tables};
use crate::backend::Backend;
use crate::check::Check;
use crate::failure::Failure;
use crate::guest::{Pass, Program};
use crate::layout::Layout;
use crate::metal::{Nothing, Request};
use crate::model::{Equipment, ModelHost};
use crate::options::Clock;
use crate::random::Dice;
use crate::report::{Phase, Report};
use crate::stage::{Ground, Stage};
use crate::{config, metal, model, output};

mod audit;
mod costs;
mod in_virtual_time;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod on_kvm;
#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
use crate::kvm as on_kvm;
mod options;
mod rings;
mod split;

use audit::{Audit, Found, Log};
use options::{Config, LogKind};
pub(crate) use options::{LONG_HELP, Options};
use rings::{Bell, Collector, Writer};
use split::Splitters;

/// Collections while vCPUs write, with `--check`: at least so many, and for so long.
const ROUNDS: (u32, Duration) = (32, Duration::from_millis(300));
/// After this long, so many are enough.
const LONG: (u32, Duration) = (4, Duration::from_secs(10));
/// What vCPUs do then: stores, and loads that see whether the stores are there.
const STORM: Pass = Pass { write_percent: 75, random: true };
/// The first pass of every run.
const POPULATE: Pass = Pass { write_percent: 100, random: false };

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
    let (backing, mode) = chosen;
    if options.machine.clock_or(Clock::Real) == Clock::Virtual {
        return in_virtual_time::run_and_print(options, backing, mode);
    }
    let (layout, config) = options.settle(chosen)?;
    let (layout, machine) = (&layout, &options.machine);
    let workers = config.split_threads.unwrap_or(0);
    let (model, memory) = model::machine_for(layout, machine, &config.guest, workers)?;
    let ground = Ground { model: &model, memory: &memory, layout, machine };
    let (phases, check) = with_tables!(layout.kind, T => measure::<T>(ground, &config))?;
    let report = Report {
        workload: "dirty-log",
        backend: "model",
        host: None,
        notes: config.notes(layout),
        summary: summary(&phases, config.iterations),
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
        workload: "dirty-log",
        options: &options.metal,
        layout: &layout,
        bytes: options.memory.bytes.0,
        words: config.words()?,
        phases: u64::from(config.iterations) * 3 + 3,
    };
    let told = metal::run::<Nothing, Found>(&request, &mut config.guest)?;
    let mut summary = summary(&told.phases, config.iterations);
    // Of what is written at random only the log knows how much it is.
    let writes_all = config.write_percent == 100 && !config.random_order;
    let pages = layout.guest_pages();
    let arch = config.guest.slats_tables()?.arch;
    let costs = costs::lines(&told.phases, arch, pages, writes_all);
    if !costs.is_empty() {
        summary.extend([String::new()].into_iter().chain(costs));
    }
    let report = Report {
        workload: "dirty-log",
        backend: "metal",
        host: None,
        notes: told.notes,
        summary,
        config,
        phases: told.phases,
        counters: told.counters,
        results: (),
        check: told.check,
    };
    output::print(&report, &options.output)
}

/// Runs the workload in virtual time and says where the time of a fault went.
///
/// # Errors
/// See [`Failure`].
pub(crate) fn explain(options: &Options) -> Result<(), Failure> {
    if options.machine.backend() != Backend::Model {
        let why = "--backend: only virtual time can be explained, which the model has";
        return Err(Failure::Usage(why.to_owned()));
    }
    if options.machine.clock_or(Clock::Virtual) == Clock::Real {
        return Err(Failure::Usage("--clock real: only virtual time can be explained".to_owned()));
    }
    let Some((backing, mode)) = config::choose(&options.memory)? else { return Ok(()) };
    in_virtual_time::run_and_explain(options, backing, mode)
}

/// The lines that the kernel's test ends with.
fn summary<N>(phases: &[Phase<N>], iterations: u32) -> Vec<String> {
    let line = |(name, title)| {
        let times = phases.iter().filter(|phase| phase.name == name).map(|phase| phase.seconds);
        let total = times.reduce(|sum, seconds| sum + seconds)?;
        let average = total / f64::from(iterations);
        Some(format!(
            "{title} dirty log over {iterations} iterations took {total:.9}s. \
             (Avg {average:.9}s/iteration)"
        ))
    };
    [("get", "Get"), ("clear", "Clear")].into_iter().filter_map(line).collect()
}

/// All phases with one granule, and what the check found.
fn measure<T: Tables>(
    ground: Ground<'_>,
    config: &Config,
) -> Result<(Vec<Phase>, Option<Check<Found>>), Failure> {
    let bell = Arc::new(Bell::default());
    let writer = |index| Writer::new(program(ground.layout, config, index), &bell);
    let writers = (0..config.guest.vcpus).map(writer).collect();
    let equipment = Equipment {
        host: ModelHost::of(ground.memory),
        dirty_ring: config.ring_entries,
        hardware_dirty: config.log == LogKind::Hardware,
        around: None,
        pinning: config.pinning.clone(),
    };
    let ended = ground.play_on::<T, _, _>(equipment, writers, 1 + config.iterations, |stage| {
        let log = || Log::new(ground.layout);
        let collector = (config.log == LogKind::Ring)
            .then(|| Collector::new(stage.vm, &stage.rings, log(), &bell))
            .transpose()?;
        let splitters = Splitters::new(stage.vm, config.split_threads)?;
        let collector = collector.as_ref();
        let mut run = Run { ground, config, stage, collector, splitters, log: log(), audit: None };
        let played = thread::scope(|scope| {
            let _running = collector.map(|collector| collector.start(scope)).transpose()?;
            run.all()
        });
        // A vCPU that waited for the collector in vain has broken off too.
        collector.and_then(Collector::failure).map_or(played, Err)?;
        Ok(run.audit)
    })?;
    let programs: Vec<_> = ended.programs.into_iter().map(|writer| writer.program).collect();
    let check = ended.result.map(|audit| ground.judge(audit.finish(&programs)));
    Ok((ended.phases, check))
}

fn program(layout: &Layout, config: &Config, index: u32) -> Program {
    let dice = Dice::new(config.seed, index);
    let program = Program::new(layout.gpa, layout.guest_page, layout.part(index), dice);
    if config.guest.check {
        program.checked(index, config.guest.vcpus, !config.overlap)
    } else {
        program
    }
}

/// A run in progress.
struct Run<'a, 'r, 's, 'm, T: Tables> {
    ground: Ground<'a>,
    config: &'a Config,
    stage: &'r mut Stage<'s, 'm, T, Writer>,
    /// Who empties the rings, where there are any.
    collector: Option<&'r Collector<'s, 'm, T>>,
    splitters: Splitters<'m>,
    log: Log,
    audit: Option<Audit<'a>>,
}

impl<T: Tables> Run<'_, '_, '_, '_, T> {
    fn all(&mut self) -> Result<(), Failure> {
        let config = self.config;
        self.pass("populate", None, POPULATE)?;
        if config.guest.check {
            self.audit = Some(Audit::new(self.ground.memory, self.ground.layout));
        }
        self.enable()?;
        let pass = Pass { write_percent: config.write_percent, random: config.random_order };
        for iteration in 1..=config.iterations {
            self.pass("dirty", Some(iteration), pass)?;
            self.collect(iteration)?;
        }
        if config.guest.check {
            self.storm()?;
        }
        self.disable(pass)
    }

    fn pass(
        &mut self,
        name: &'static str,
        iteration: Option<u32>,
        pass: Pass,
    ) -> Result<(), Failure> {
        self.stage.pass(name, iteration, pass)?;
        self.settle();
        Ok(())
    }

    /// Counts for the last phase what was done by others than the stage's own worker.
    fn settle(&mut self) {
        let collector = self.collector.map(Collector::counters).unwrap_or_default();
        self.stage.others = collector + self.splitters.counters();
        self.stage.settle();
    }

    fn enable(&mut self) -> Result<(), Failure> {
        let (mode, layout, splitters) =
            (self.config.mode(), self.ground.layout, &mut self.splitters);
        let size = layout.slot_size();
        self.stage.each_slot("enable", None, |vm, worker, id| {
            let range = GpaRange::new(Gpa(layout.gpa + u64::from(id) * size), size);
            let range = range.ok_or_else(|| Failure::Run(format!("memslot {id} is empty")))?;
            splitters.enable(vm, worker, (id, range), mode)
        })?;
        self.settle();
        Ok(())
    }

    /// Gets and clears, each a phase, and audits both. No vCPU runs.
    fn collect(&mut self, iteration: u32) -> Result<(), Failure> {
        self.sample();
        let (iteration, slots) = (Some(iteration), &mut self.log.slots);
        if let Some(collector) = self.collector {
            self.stage.step("get", iteration, |_, _| collector.get())?;
            self.stage.step("clear", iteration, |_, _| collector.clear(&mut self.log))?;
            self.settle();
        } else {
            self.stage.each_slot("get", iteration, |vm, worker, id| {
                vm.dirty_log(worker, id, &mut slots[id as usize]).map(drop)
            })?;
            if self.config.manual_protect {
                let pages = self.ground.layout.slot_pages();
                self.stage.each_slot("clear", iteration, |vm, worker, id| {
                    vm.clear_dirty_log(worker, id, 0, pages, &slots[id as usize]).map(drop)
                })?;
            }
        }
        self.compare(false);
        Ok(())
    }

    /// The same without phases of their own.
    fn collect_untimed(&mut self) -> Result<(), Failure> {
        if let Some(collector) = self.collector {
            collector.get()?;
            return collector.clear(&mut self.log);
        }
        let Stage { vm, worker, .. } = &mut *self.stage;
        for (id, bitmap) in (0..).zip(&mut self.log.slots) {
            vm.dirty_log(worker, id, bitmap)?;
        }
        if self.config.manual_protect {
            let pages = self.ground.layout.slot_pages();
            for (id, bitmap) in (0..).zip(&self.log.slots) {
                vm.clear_dirty_log(worker, id, 0, pages, bitmap)?;
            }
        }
        Ok(())
    }

    fn sample(&mut self) {
        if let Some(audit) = &mut self.audit {
            audit.sample();
        }
    }

    fn compare(&mut self, while_running: bool) {
        if let Some(audit) = &mut self.audit {
            audit.compare(&self.log, while_running);
        }
    }

    /// Collects and clears while all vCPUs write, then once more when they have stopped.
    fn storm(&mut self) -> Result<(), Failure> {
        self.stage.begin("check", None);
        let start = self.stage.crew.begin_running(STORM);
        self.collect_in_storm(start)?;
        self.stage.crew.stop();
        self.stage.crew.wait(|_| {})?;
        self.sample();
        self.collect_untimed()?;
        self.compare(false);
        if let Some(audit) = &mut self.audit {
            audit.compare_copy();
        }
        self.stage.end("check", None, start.elapsed());
        self.settle();
        Ok(())
    }

    fn collect_in_storm(&mut self, start: Instant) -> Result<(), Failure> {
        for round in 0.. {
            let enough = |(rounds, time)| round >= rounds && start.elapsed() > time;
            if enough(ROUNDS) || enough(LONG) {
                break;
            }
            self.sample();
            self.stage.crew.wait_for_access()?;
            self.collect_untimed()?;
            self.compare(true);
        }
        Ok(())
    }

    fn disable(&mut self, pass: Pass) -> Result<(), Failure> {
        let running = self.config.run_while_disabling;
        if running {
            self.stage.crew.begin_running(pass);
        }
        self.stage.each_slot("disable", None, |vm, worker, id| vm.disable_log(worker, id))?;
        if running {
            self.stage.crew.stop();
            self.stage.crew.wait(|_| {})?;
        }
        self.settle();
        Ok(())
    }
}

impl From<LogError> for Failure {
    fn from(error: LogError) -> Self {
        Self::Run(format!("the dirty log: {error}"))
    }
}
