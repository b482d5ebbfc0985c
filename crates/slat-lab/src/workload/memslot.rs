//! `slat memslot`: what memslots cost when there are few or very many, as in the kernel's `memslot_perf_test`.
//!
//! Six tests, each on a VM of its own: guests write one half of their memory while the other is unmapped (`map`); the
//! host unmaps what they hardly use, page by page or 2 MiB at once (`unmap`, `unmap chunked`); the last slot is moved
//! away and back while guests write to it, or next to it (`move active area`, `move inactive area`); guests and host
//! write all memory in turn (`RW`).

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use serde::Serialize;
use slat_model::HostMemory;

use crate::arch::{Tables, with_tables};
use crate::backend::Backend;
use crate::check::{Check, Findings, Rules};
use crate::failure::Failure;
use crate::layout::Layout;
use crate::model::ModelHost;
use crate::options::MachineOptions;
use crate::report::{Phase, Report};
use crate::stage::{Ground, Stage};
use crate::{backing, guest_mode, model, output};

mod area;
mod guest;
mod host;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod on_kvm;
#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
use crate::kvm as on_kvm;
mod options;
mod pages;

use area::{Slots, Test};
use guest::{Meeting, Tester};
use host::Host;
use options::Config;
pub(crate) use options::{LONG_HELP, Options};
use pages::Pages;

/// One run of one test.
#[derive(Clone, Debug, Serialize)]
struct Outcome {
    name: Test,
    run: u32,
    slots: u64,
    /// The last slot has more, if they cannot be divided.
    pages_per_slot: u64,
    /// Why this test does not run with these slots; it has no phases then.
    refused: Option<String>,
    /// What was measured, if it ran.
    #[serde(flatten)]
    measured: Measured,
}

#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Measured {
    iterations: Option<u64>,
    setup_seconds: Option<f64>,
    seconds: Option<f64>,
    average_seconds: Option<f64>,
}

#[derive(Clone, Debug, Default, Serialize)]
struct Results {
    tests: Vec<Outcome>,
}

impl Results {
    /// # Errors
    /// [`Failure::Usage`]: none of the tests has run, for these reasons.
    fn must_be_some(&self, reasons: &[String]) -> Result<(), Failure> {
        if self.tests.iter().any(|test| test.refused.is_none()) {
            return Ok(());
        }
        Err(Failure::Usage(format!("no test runs; {}", reasons.join("; "))))
    }
}

/// What was found.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Found {
    /// Values in host memory that were compared with what guests stored.
    compared: u64,
    /// Those that were different.
    wrong: u64,
    /// Loads by guests of what the host had stored.
    loads: u64,
    /// Those that returned something else.
    wrong_loads: u64,
    /// Writes to the slot that moved that were exits, as it was not there.
    exits: u64,
}

impl Findings for Found {
    const CLEAN: &'static str = "all values right";

    fn compared(&self) -> String {
        let Self { compared, loads, exits, .. } = self;
        format!("{compared} stores and {loads} loads of guests compared; {exits} exits")
    }

    fn wrong(&self) -> Vec<(u64, &'static str)> {
        vec![
            (self.wrong, "values in host memory are not what guests stored"),
            (self.wrong_loads, "loads did not return what the host had stored"),
        ]
    }
}

/// Runs the workload and prints its report.
///
/// # Errors
/// See [`Failure`].
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    match options.machine.backend() {
        Backend::Model => on_model(options),
        Backend::Kvm => on_kvm::run(options),
        backend @ Backend::Metal => Err(backend.lacks("memslot")),
    }
}

fn on_model(options: &Options) -> Result<(), Failure> {
    let Some(mode) = output::chosen(options.mode, guest_mode::list)? else { return Ok(()) };
    let Some(backing) = output::chosen(options.backing, backing::list)? else { return Ok(()) };
    let (layout, config) = options.settle(backing, mode)?;
    let mut all = All::default();
    for test in config.tests() {
        for run in 1..=config.runs {
            all.run(test, run, &layout, &options.machine, &config)?;
        }
    }
    let All { mut notes, phases, results, found, rules } = all;
    results.must_be_some(&notes)?;
    notes.extend(config.guest.notes(&layout));
    let report = Report {
        workload: "memslot",
        backend: "model",
        host: None,
        notes,
        summary: summary(&results),
        config,
        counters: phases.iter().map(|phase| phase.counters).sum(),
        phases,
        results,
        check: Some(Check { found, rules: Some(rules) }),
    };
    output::print(&report, &options.output)
}

/// What all tests together have given.
#[derive(Debug, Default)]
struct All {
    notes: Vec<String>,
    phases: Vec<Phase>,
    results: Results,
    found: Found,
    rules: Rules,
}

impl All {
    fn run(
        &mut self,
        test: Test,
        run: u32,
        layout: &Layout,
        machine: &MachineOptions,
        config: &Config,
    ) -> Result<(), Failure> {
        let page = layout.page.max(layout.guest_page);
        let area = test.area(config.guest.bytes.0);
        let count = u64::from(config.slots);
        let mut outcome = Outcome {
            name: test,
            run,
            slots: count,
            pages_per_slot: 0,
            refused: None,
            measured: Measured::default(),
        };
        match Slots::new(test, area, page, count) {
            Ok(slots) => {
                outcome.pages_per_slot = slots.pages_per_slot();
                if config.verbose && run == 1 {
                    self.notes.push(divided(test, &slots));
                }
                let mut layout = layout.clone();
                let places = if config.exchanges_pages() { 2 } else { 1 };
                layout.host_size =
                    (places * slots.pages * page).next_multiple_of(config.guest.backing_page.0);
                outcome.measured = self.measure(test, slots, run, &layout, machine, config)?;
            }
            Err(misfit) => {
                let note = || format!("{}: {misfit}", test.name());
                self.notes.extend((run == 1).then(note));
                outcome.refused = Some(misfit.to_string());
            }
        }
        self.results.tests.push(outcome);
        Ok(())
    }

    fn measure(
        &mut self,
        test: Test,
        slots: Slots,
        run: u32,
        layout: &Layout,
        machine: &MachineOptions,
        config: &Config,
    ) -> Result<Measured, Failure> {
        let (model, memory) = model::machine(layout, machine, &config.guest)?;
        touch(&memory);
        let ground = Ground { model: &model, memory: &memory, layout, machine };
        let run = Run { test, slots, run: (config.runs > 1).then_some(run), config };
        let (phases, measured, found) = with_tables!(layout.kind, T => run.measure::<T>(ground))?;
        self.phases.extend(phases);
        let Check { found, rules } = ground.judge(found);
        self.found.add(found);
        self.rules.add(rules.unwrap_or_default());
        Ok(measured)
    }
}

/// Has the operating system back all of it, so that no test measures that.
fn touch(memory: &HostMemory) {
    for word in (0..memory.size()).step_by(4096).filter_map(|offset| memory.word(offset)) {
        word.store(0, Ordering::Relaxed);
    }
}

/// One run of a test that is possible.
struct Run<'a> {
    test: Test,
    slots: Slots,
    run: Option<u32>,
    config: &'a Config,
}

impl Run<'_> {
    fn measure<T: Tables>(
        &self,
        ground: Ground<'_>,
    ) -> Result<(Vec<Phase>, Measured, Found), Failure> {
        let Self { test, slots, config, .. } = *self;
        let vcpus = config.guest.vcpus;
        let meeting = Arc::<Meeting>::default();
        let tester = |index| Tester::new(test, slots, (index, vcpus), Arc::clone(&meeting));
        let testers = (0..vcpus).map(tester).collect();
        let memory = Arc::clone(ground.memory);
        let pages = Arc::new(match config.exchanges_pages() {
            true => Pages::exchanged(memory, slots.page, slots.pages),
            false => Pages::fixed(memory, slots.page),
        });
        let host = ModelHost::shared(Arc::clone(&pages));
        let ended = ground.play_without_slots::<T, _, _>(host, testers, 0, |stage| {
            let setup_seconds = self.create(stage)?;
            let mut host = Host {
                test,
                slots,
                pages: &pages,
                meeting: &meeting,
                vcpus: vcpus.into(),
                verify: config.verify,
                stage,
                compared: 0,
                wrong: 0,
            };
            let (iterations, seconds) = self.iterate(&mut host)?;
            let average_seconds = (iterations > 0).then(|| seconds / iterations as f64);
            let measured = Measured {
                iterations: Some(iterations),
                setup_seconds: Some(setup_seconds),
                seconds: Some(seconds),
                average_seconds,
            };
            Ok((measured, host.compared, host.wrong))
        })?;
        let (measured, compared, wrong) = ended.result;
        let sum = |of: fn(&Tester) -> u64| ended.programs.iter().map(of).sum();
        let found = Found {
            compared,
            wrong,
            loads: sum(|tester| tester.loads),
            wrong_loads: sum(|tester| tester.wrong_loads),
            exits: sum(|tester| tester.exits),
        };
        Ok((ended.phases, measured, found))
    }

    /// Creates the slots; how many seconds that took.
    fn create<T: Tables>(&self, stage: &mut Stage<'_, '_, T, Tester>) -> Result<f64, Failure> {
        stage.begin(self.test.setup(), self.run);
        let start = Instant::now();
        for id in 1..=self.slots.last() {
            stage.vm.create_slot(&mut stage.worker, id, self.slots.config(id))?;
        }
        let took = start.elapsed();
        stage.end(self.test.setup(), self.run, took);
        Ok(took.as_secs_f64())
    }

    /// Goes through the test until its time is over, once at least if it has any; how often, and how many seconds that
    /// took.
    fn iterate<T: Tables>(
        &self,
        host: &mut Host<'_, '_, '_, '_, T>,
    ) -> Result<(u64, f64), Failure> {
        host.stage.begin(self.test.name(), self.run);
        let start = host.stage.crew.tell(());
        let mut iterations = 0;
        let took = loop {
            let took = start.elapsed();
            let begun = iterations > 0 || self.config.length.is_zero();
            if begun && took >= self.config.length {
                break took;
            }
            host.turn()?;
            iterations += 1;
        };
        host.stage.crew.stop();
        host.stage.crew.wait(|_| {})?;
        host.stage.end(self.test.name(), self.run, took);
        Ok((iterations, took.as_secs_f64()))
    }
}

impl Found {
    fn add(&mut self, other: Self) {
        let Self { compared, wrong, loads, wrong_loads, exits } = other;
        self.compared += compared;
        self.wrong += wrong;
        self.loads += loads;
        self.wrong_loads += wrong_loads;
        self.exits += exits;
    }
}

/// For `-v`.
fn divided(test: Test, slots: &Slots) -> String {
    let last = slots.pages_of(slots.last());
    format!(
        "{}: {} slots of {} pages, the last of {}",
        test.name(),
        slots.last(),
        slots.pages_per_slot(),
        last.end - last.start
    )
}

/// The lines of the kernel's test.
fn summary(results: &Results) -> Vec<String> {
    let mut lines = Vec::new();
    for runs in results.tests.chunk_by(|a, b| a.name == b.name) {
        let lasted = runs.iter().filter_map(|outcome| outcome.measured.line());
        lines.extend(lasted.map(|line| format!("{}: {line}", runs[0].name.name())));
        let best = best(runs, |measured| measured.average_seconds);
        lines.extend(best.map(|(average, outcome)| {
            let iterations = outcome.measured.iterations.unwrap_or(0);
            format!(
                "{}: best runtime result was {average:.9}s per iteration (with {iterations} iterations)",
                outcome.name.name()
            )
        }));
    }
    let whole: Vec<_> =
        results.tests.iter().filter(|outcome| outcome.name.is_whole()).cloned().collect();
    let best = best(&whole, |measured| measured.setup_seconds);
    lines.extend(
        best.map(|(setup, _)| {
            format!("best slot setup time for the whole test area was {setup:.9}s")
        }),
    );
    lines
}

/// The smallest of a measure, and where it was.
fn best(
    outcomes: &[Outcome],
    measure: impl Fn(&Measured) -> Option<f64>,
) -> Option<(f64, &Outcome)> {
    let all = outcomes.iter().filter_map(|outcome| Some((measure(&outcome.measured)?, outcome)));
    all.min_by(|(a, _), (b, _)| a.total_cmp(b))
}

impl Measured {
    fn line(&self) -> Option<String> {
        let (setup, seconds) = (self.setup_seconds?, self.seconds?);
        let took = format!("{setup:.9}s for slot setup + {seconds:.9}s all iterations");
        Some(match self.average_seconds {
            Some(average) => {
                let iterations = self.iterations.unwrap_or(0);
                format!("{took}; {iterations} iterations, avg {average:.9}s each")
            }
            None => format!("{took}; no full iteration: give a longer -l"),
        })
    }
}
