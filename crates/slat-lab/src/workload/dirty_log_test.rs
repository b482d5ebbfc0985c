//! `slat dirty-log-test`: whether dirty logs are true, as in the kernel's `dirty_log_test`.
//!
//! Each way of logging on a VM of its own: the log is on before anything is mapped; guests write the number of the round
//! into pages at random; meanwhile the log is collected, then the guests are stopped and memory is compared with what was
//! reported.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use slat_vm::LogMode;

use crate::arch::{Tables, with_tables};
use crate::backend::Backend;
use crate::check::{Check, Findings, Rules};
use crate::failure::Failure;
use crate::layout::Layout;
use crate::metal::Request;
use crate::model::{Equipment, ModelHost};
use crate::options::MachineOptions;
use crate::random::Dice;
use crate::report::{Phase, Report};
use crate::stage::{Ground, Stage};
use crate::{config, metal, model, output};

mod guest;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod on_kvm;
#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
use crate::kvm as on_kvm;
mod options;
mod verify;

use guest::Dirtier;
use options::{Config, Way};
pub(crate) use options::{LONG_HELP, Options};
use verify::{Bits, Collected, Verifier};

/// The number of the only slot.
const SLOT: u32 = 0;

/// What one way of logging gave.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Mode {
    mode: Way,
    rounds: u32,
    writes: u64,
    /// Times that a vCPU had to wait until its ring was reset.
    #[serde(default)]
    ring_full: u64,
    /// Entries of rings that were reset, though not so many had been taken, or the other way round.
    mismatched: u64,
    /// Entries of rings that named no page of the slot.
    #[serde(default)]
    foreign: u64,
    #[serde(flatten)]
    bits: Bits,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Results {
    modes: Vec<Mode>,
}

/// What was found, in all ways together.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct Found {
    /// Pages of the host that were watched.
    pages: u64,
    #[serde(flatten)]
    bits: Bits,
    mismatched: u64,
    #[serde(default)]
    foreign: u64,
}

impl Findings for Found {
    const CLEAN: &'static str = "all reports fit memory";

    fn compared(&self) -> String {
        let Self { pages, bits: Bits { dirty, clear, track_next, .. }, .. } = self;
        format!("{pages} pages, {dirty} dirty bits, {clear} clear bits, {track_next} pages tracked")
    }

    fn wrong(&self) -> Vec<(u64, &'static str)> {
        vec![
            (self.bits.missing, "pages were written and the next collection did not report them"),
            (self.bits.stale, "reported pages held a value too old"),
            (self.bits.early, "pages that were not reported held a value too young"),
            (self.mismatched, "entries of rings were reset or taken, but not both"),
            (self.foreign, "entries of rings named no page of the slot"),
        ]
    }
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
    let mut all = All::default();
    for &way in &config.log {
        all.run(way, &layout, &options.machine, &config)?;
    }
    let All { phases, results, rules } = all;
    let mut found = Found { pages: layout.size / layout.page, ..Found::default() };
    for mode in &results.modes {
        found.add(mode);
    }
    let report = Report {
        workload: "dirty-log-test",
        backend: "model",
        host: None,
        notes: config.guest.notes(&layout),
        summary: results.modes.iter().map(Mode::line).collect(),
        config,
        counters: phases.iter().map(|phase| phase.counters).sum(),
        phases,
        results,
        check: Some(Check { found, rules: Some(rules) }),
    };
    output::print(&report, &options.output)
}

fn on_metal(options: &Options) -> Result<(), Failure> {
    let Some(chosen) = config::choose(&options.memory)? else { return Ok(()) };
    metal::check(&options.memory, &options.machine)?;
    let (layout, mut config) = options.settle(chosen)?;
    let request = Request {
        workload: "dirty-log-test",
        options: &options.metal,
        layout: &layout,
        bytes: options.memory.bytes.0 * u64::from(options.memory.vcpus),
        words: options.words(&config)?,
        phases: config.log.len() as u64,
    };
    let told = metal::run::<Results, Found>(&request, &mut config.guest)?;
    let report = Report {
        workload: "dirty-log-test",
        backend: "metal",
        host: None,
        notes: told.notes,
        summary: told.results.modes.iter().map(Mode::line).collect(),
        config,
        phases: told.phases,
        counters: told.counters,
        results: told.results,
        check: told.check,
    };
    output::print(&report, &options.output)
}

/// What all ways have given.
#[derive(Debug, Default)]
struct All {
    phases: Vec<Phase>,
    results: Results,
    rules: Rules,
}

impl All {
    fn run(
        &mut self,
        way: Way,
        layout: &Layout,
        machine: &MachineOptions,
        config: &Config,
    ) -> Result<(), Failure> {
        let (model, memory) = model::machine(layout, machine, &config.guest)?;
        let ground = Ground { model: &model, memory: &memory, layout, machine };
        let (phases, mode) = with_tables!(layout.kind, T => measure::<T>(ground, config, way))?;
        let Check { rules, .. } = ground.judge(());
        self.phases.extend(phases);
        self.results.modes.push(mode);
        self.rules.add(rules.unwrap_or_default());
        Ok(())
    }
}

impl Found {
    fn add(&mut self, mode: &Mode) {
        let Bits { dirty, clear, track_next, missing, stale, early } = mode.bits;
        self.bits.dirty += dirty;
        self.bits.clear += clear;
        self.bits.track_next += track_next;
        self.bits.missing += missing;
        self.bits.stale += stale;
        self.bits.early += early;
        self.mismatched += mode.mismatched;
        self.foreign += mode.foreign;
    }
}

impl Mode {
    /// The line that the kernel's test ends with.
    fn line(&self) -> String {
        let Bits { dirty, clear, track_next, .. } = self.bits;
        let name = self.mode.name();
        format!(
            "{name}: Total bits checked: dirty ({dirty}), clear ({clear}), track_next ({track_next})"
        )
    }
}

/// One way of logging with one granule.
fn measure<T: Tables>(
    ground: Ground<'_>,
    config: &Config,
    way: Way,
) -> Result<(Vec<Phase>, Mode), Failure> {
    let layout = ground.layout;
    let round = Arc::new(AtomicU64::new(1));
    let step = config.step(layout);
    let pages = layout.size / step;
    let dirtier = |index| {
        let memory = (layout.gpa, step, pages);
        let dice = Dice::new(config.seed, index);
        Dirtier::new(memory, config.share(index, pages), Arc::clone(&round), dice)
    };
    let dirtiers = (0..config.guest.vcpus).map(dirtier).collect();
    let equipment = Equipment {
        host: ModelHost::of(ground.memory),
        dirty_ring: (way == Way::DirtyRing).then_some(config.ring_entries),
        hardware_dirty: way == Way::Hardware,
        around: None,
        pinning: None,
    };
    let ended = ground.play_on::<T, _, _>(equipment, dirtiers, 0, |stage| {
        let host_pages = layout.slot_pages();
        let verifier = Verifier::new(ground.memory, (layout.page, host_pages, step / layout.page));
        let rings = stage.rings.len();
        let log = Collected::new(host_pages, rings);
        let mut run = Run { config, way, stage, log, verifier, mismatched: 0, foreign: 0 };
        run.all(&round)?;
        let Run { verifier, mismatched, foreign, .. } = run;
        Ok((verifier.bits(), mismatched, foreign))
    })?;
    let (bits, mismatched, foreign) = ended.result;
    let mode = Mode {
        mode: way,
        rounds: config.iterations - 1,
        writes: ended.programs.iter().map(|guest| guest.writes).sum(),
        ring_full: ended.programs.iter().map(|guest| guest.ring_full).sum(),
        mismatched,
        foreign,
        bits,
    };
    Ok((ended.phases, mode))
}

/// A way of logging in progress.
struct Run<'a, 'r, 's, 'm, T: Tables> {
    config: &'a Config,
    way: Way,
    stage: &'r mut Stage<'s, 'm, T, Dirtier>,
    log: Collected,
    verifier: Verifier<'a>,
    mismatched: u64,
    foreign: u64,
}

impl<T: Tables> Run<'_, '_, '_, '_, T> {
    fn all(&mut self, round: &AtomicU64) -> Result<(), Failure> {
        let mode = match self.way {
            Way::DirtyLog => LogMode::Protect,
            Way::ClearLog => LogMode::Manual { initially_all_set: true },
            Way::DirtyRing => LogMode::Ring { backup: false },
            Way::Hardware if self.config.guest.can_track_dirty() => LogMode::Hardware,
            // Where an entry has no dirty flag that could be cleared, writing is forbidden instead.
            Way::Hardware => LogMode::Protect,
        };
        self.stage.vm.enable_log(&mut self.stage.worker, SLOT, mode)?;
        self.stage.begin(self.way.name(), None);
        let interval = Duration::from_millis(self.config.interval_milliseconds.into());
        let mut took = Duration::ZERO;
        for number in 1..u64::from(self.config.iterations) {
            round.store(number, Ordering::Relaxed);
            let start = self.stage.crew.tell(());
            thread::sleep(interval);
            self.collect()?;
            self.stage.crew.stop();
            let end = self.stage.crew.wait(|_| {})?;
            took += end - start;
            self.verifier.compare(&self.log, number);
        }
        self.stage.end(self.way.name(), None, took);
        self.collect()?;
        self.verifier.finish(&self.log);
        Ok(())
    }

    /// Replaces the log by what is in it now.
    fn collect(&mut self) -> Result<(), Failure> {
        let Stage { vm, worker, .. } = &mut *self.stage;
        match self.way {
            Way::DirtyRing => return self.empty_rings(),
            Way::DirtyLog | Way::Hardware => {
                vm.dirty_log(worker, SLOT, &mut self.log.bitmap)?;
            }
            Way::ClearLog => {
                vm.dirty_log(worker, SLOT, &mut self.log.bitmap)?;
                let pages = self.verifier.pages();
                vm.clear_dirty_log(worker, SLOT, 0, pages, &self.log.bitmap)?;
            }
        }
        Ok(())
    }

    /// Takes all entries out of the rings, and has their pages protected again.
    fn empty_rings(&mut self) -> Result<(), Failure> {
        self.log.bitmap.fill(0);
        let pages = self.verifier.pages();
        let Stage { vm, worker, rings, .. } = &mut *self.stage;
        for (index, ring) in rings.iter().enumerate() {
            let taken = ring.harvest(|entry| {
                if entry.slot == SLOT.into() && entry.page < pages {
                    self.log.add(entry.page, index);
                } else {
                    self.foreign += 1;
                }
            });
            let reset = vm.reset_dirty_ring(worker, ring)?;
            self.mismatched += taken.abs_diff(reset);
        }
        Ok(())
    }
}
