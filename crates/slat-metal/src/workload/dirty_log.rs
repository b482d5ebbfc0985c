//! `dirty-log`: how long guests take to write, and the hypervisor to log it, as in the kernel's `dirty_log_perf_test`.
//!
//! Populate; enable the log; for each iteration dirty, get, clear (unless getting protects at once); disable. With a check
//! every collection is compared with memory, and before the log is disabled it is also collected and cleared while all
//! vCPUs write at random: the first between two collections, the others at the same time.

use alloc::string::{String, ToString};

use serde::Serialize;
use slat_metal::audit::{Audit, Found, Log};
use slat_metal::layout::Layout;
use slat_metal::options::{LogKind, Options};
use slat_metal::program::Order;
use slat_metal::report::{GuestConfig, Nothing};
use slat_vm::LogMode;

use crate::arch::{Arch, Here};
use crate::guest::{Equipment, Guest};
use crate::stage::{Stage, config, play};

/// Collections while vCPUs write: so many, unless they take so many seconds.
const ROUNDS: u32 = 32;
const LONG_SECONDS: u64 = 5;
/// Touches of the first vCPU between two of them.
const BURST: u64 = 256;
/// Per cent of the touches that are stores then; the rest sees whether they are there.
const STORM_WRITES: u32 = 75;

#[derive(Serialize)]
struct Config {
    #[serde(flatten)]
    guest: GuestConfig,
    iterations: u32,
    write_percent: u32,
    random_order: bool,
    seed: u64,
    log: LogKind,
    ring_entries: Option<u32>,
    manual_protect: bool,
    run_while_disabling: bool,
    overlap: bool,
    slots: u32,
    split_threads: Option<u32>,
}

/// Runs the workload and prints its report.
pub(super) fn run(options: &Options, layout: &Layout) -> Result<(), String> {
    let ring_entries = (options.log == LogKind::Ring).then_some(options.ring);
    let guest = Guest::new(Equipment {
        options,
        layout,
        hardware_dirty: options.log == LogKind::Hardware,
        dirty_ring: ring_entries,
        served: None,
    })?;
    let iterations = options.iterations.unwrap_or(2);
    let config = Config {
        guest: config(options, &guest),
        iterations,
        write_percent: options.writes,
        random_order: options.random,
        seed: options.seed,
        log: options.log,
        ring_entries,
        manual_protect: is_manual(options),
        run_while_disabling: options.run_while_disabling,
        overlap: options.overlap,
        slots: options.slots,
        split_threads: None,
    };
    let (phases, found) = play(guest, |stage| {
        let log = Log::new(layout.slots, layout.slot_pages());
        let memory = stage.guest.vm.host();
        let audit = options.check.then(|| Audit::new(0, |page| memory.first_word(page)));
        Run { options, iterations, log, audit }.all(stage)
    })?;
    super::print(options, config, phases, Nothing {}, found)
}

fn is_manual(options: &Options) -> bool {
    options.log == LogKind::Bitmap && options.manual_protect
}

/// A run in progress. `W` reads the first word of a page.
struct Run<'a, W> {
    options: &'a Options,
    iterations: u32,
    log: Log,
    audit: Option<Audit<W>>,
}

impl<W: Fn(u64) -> u64 + Copy> Run<'_, W> {
    fn all(mut self, stage: &mut Stage<'_>) -> Result<Option<Found>, String> {
        let options = self.options;
        stage.order("populate", None, |stage, index| stage.pass_of(index, 100));
        self.audit = self.audit.take().map(|audit| audit.again(stage.guest.layout.pages()));
        let mode = self.mode();
        stage.each_slot("enable", None, |vm, worker, id| vm.enable_log(worker, id, mode))?;
        for iteration in 1..=self.iterations {
            stage.order("dirty", Some(iteration), |stage, index| pass(stage, options, index));
            self.collect(stage, iteration)?;
        }
        if self.audit.is_some() {
            self.storm(stage)?;
        }
        self.disable(stage)?;
        Ok(self.audit.map(|audit| {
            let (wrong_loads, misplaced) = (stage.wrong_loads(), stage.misplaced());
            Found { wrong_loads, misplaced, ..audit.finish() }
        }))
    }

    fn mode(&self) -> LogMode {
        match self.options.log {
            LogKind::Bitmap if self.options.manual_protect => {
                LogMode::Manual { initially_all_set: true }
            }
            LogKind::Bitmap => LogMode::Protect,
            LogKind::Ring => LogMode::Ring { backup: false },
            LogKind::Hardware => LogMode::Hardware,
        }
    }

    /// Gets and clears, each a phase, and compares. No vCPU runs.
    fn collect(&mut self, stage: &mut Stage<'_>, iteration: u32) -> Result<(), String> {
        self.sample();
        let (iteration, log) = (Some(iteration), &mut self.log);
        if self.options.log == LogKind::Ring {
            let rings = &stage.guest.rings;
            stage.step("get", iteration, |_, _| {
                rings.lock().harvest();
                Ok::<_, String>(())
            })?;
            stage.step("clear", iteration, |vm, _| rings.lock().collect(vm, log))?;
        } else {
            stage.each_slot("get", iteration, |vm, worker, id| {
                vm.dirty_log(worker, id, &mut log.slots[id as usize]).map(drop)
            })?;
            if is_manual(self.options) {
                let pages = stage.guest.layout.slot_pages();
                stage.each_slot("clear", iteration, |vm, worker, id| {
                    vm.clear_dirty_log(worker, id, 0, pages, &log.slots[id as usize]).map(drop)
                })?;
            }
        }
        self.compare(false);
        Ok(())
    }

    /// The same without phases of their own.
    fn collect_untimed(&mut self, stage: &mut Stage<'_>) -> Result<(), String> {
        let (vm, worker, log) = (&stage.guest.vm, &mut stage.worker, &mut self.log);
        if self.options.log == LogKind::Ring {
            return stage.guest.rings.lock().collect(vm, log).map_err(|error| error.to_string());
        }
        let pages = stage.guest.layout.slot_pages();
        for (id, bitmap) in (0..).zip(&mut log.slots) {
            vm.dirty_log(worker, id, bitmap).map_err(|error| error.to_string())?;
            if is_manual(self.options) {
                let cleared = vm.clear_dirty_log(worker, id, 0, pages, bitmap);
                cleared.map_err(|error| error.to_string())?;
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
            audit.compare(|page| self.log.has(page), while_running);
        }
    }

    /// Collects and clears while all vCPUs write, then once more when they have stopped.
    fn storm(&mut self, stage: &mut Stage<'_>) -> Result<(), String> {
        stage.begin("check", None);
        let start = stage.now();
        let deadline = Here::ticks() + LONG_SECONDS * Here::ticks_per_second();
        let running = stage.guest.layout.vcpus > 1;
        stage.begin_running(at_random);
        for _ in 0..ROUNDS {
            let burst = at_random(stage, 0);
            stage.burst(&burst);
            self.sample();
            stage.wait_for_touches();
            self.collect_untimed(stage)?;
            self.compare(running);
            if Here::ticks() > deadline {
                break;
            }
        }
        stage.stop();
        self.sample();
        self.collect_untimed(stage)?;
        self.compare(false);
        if let Some(audit) = &mut self.audit {
            audit.compare_copy();
        }
        let took = stage.now() - start;
        stage.end("check", None, took);
        Ok(())
    }

    fn disable(&self, stage: &mut Stage<'_>) -> Result<(), String> {
        let options = self.options;
        if options.run_while_disabling {
            stage.begin_running(|stage, index| pass(stage, options, index));
        }
        stage.each_slot("disable", None, |vm, worker, id| vm.disable_log(worker, id))?;
        if options.run_while_disabling {
            stage.stop();
        }
        Ok(())
    }
}

/// A pass as it was asked for.
fn pass(stage: &Stage<'_>, options: &Options, index: usize) -> Order {
    let pass = stage.pass_of(index, options.writes);
    Order { random: if options.random { pass.pages } else { 0 }, ..pass }
}

/// What vCPUs do while the log is collected.
fn at_random(stage: &Stage<'_>, index: usize) -> Order {
    Order { random: BURST, ..stage.pass_of(index, STORM_WRITES) }
}
