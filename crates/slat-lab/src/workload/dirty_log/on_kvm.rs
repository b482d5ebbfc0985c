//! The workload on this host's own KVM.
//!
//! A ring that is full is emptied while its vCPU waits, by the thread that waits for the vCPUs.

use std::time::Instant;

use super::audit::{Audit, Log};
use super::options::{Config, LogKind, Options};
use super::{LONG, POPULATE, ROUNDS, STORM, summary};
use crate::check::Check;
use crate::failure::Failure;
use crate::guest::Pass;
use crate::kvm;
use crate::kvm::memory::Memory;
use crate::kvm::ring::Ring;
use crate::kvm::stage::{Ended, Stage};
use crate::kvm::vcpu::{Order, Vcpu};
use crate::kvm::vm::{self, Plan, Reach, Vm};
use crate::layout::Layout;
use crate::report::Report;
use crate::{config, output};

/// Runs the workload and prints its report.
///
/// # Errors
/// See [`Failure`].
pub(super) fn run(options: &Options) -> Result<(), Failure> {
    let Some(chosen) = config::choose(&options.memory)? else { return Ok(()) };
    options.fit_kvm()?;
    kvm::check_mode(chosen.1)?;
    let (kvm, machine) = kvm::open(&options.machine)?;
    let mut options = options.clone();
    options.machine = machine;
    let (layout, config) = options.settle(chosen)?;
    vm::check_slots(&kvm, layout.slots)?;
    let memory = Memory::new(layout.host_size, config.guest.backing)?;
    let plan = Plan {
        dirty_ring: config.ring_entries,
        manual_protect: config.manual_protect,
        seed: config.seed,
        pinning: config.pinning.clone(),
        ..Plan::new(config.guest.vcpus, Reach::of(&layout))
    };
    let passes = u64::from(1 + config.iterations);
    let accesses = layout.part(0).count() as u64 * u64::from(config.guest.vcpus) * passes;
    let stage = Stage::new(&kvm, plan, accesses)?;
    let (Ended { phases, counters, vcpus }, audit) = stage.play(|stage| {
        let log = Log::new(&layout);
        let mut run =
            Run { config: &config, layout: &layout, memory: &memory, stage, log, audit: None };
        run.all()?;
        Ok(run.audit)
    })?;
    let check = audit.map(|audit| {
        let mut found = audit.finish(&[]);
        found.wrong_loads = vcpus.iter().map(Vcpu::wrong_loads).sum();
        Check { found, rules: None }
    });
    let report = Report {
        workload: "dirty-log",
        backend: "kvm",
        host: Some(kvm::facts()),
        notes: config.notes(&layout),
        summary: summary(&phases, config.iterations),
        config,
        counters,
        phases,
        results: (),
        check,
    };
    output::print(&report, &options.output)
}

/// A run in progress.
struct Run<'a, 'r> {
    config: &'a Config,
    layout: &'a Layout,
    memory: &'a Memory,
    stage: &'r mut Stage,
    log: Log,
    audit: Option<Audit<'a>>,
}

impl Run<'_, '_> {
    fn all(&mut self) -> Result<(), Failure> {
        let config = self.config;
        self.set_slots(false)?;
        self.pass("populate", None, POPULATE)?;
        if config.guest.check {
            self.audit = Some(Audit::new(self.memory, self.layout));
        }
        self.stage.begin("enable", None);
        let start = Instant::now();
        self.set_slots(true)?;
        self.stage.end("enable", None, start.elapsed())?;
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

    fn set_slots(&self, logged: bool) -> Result<(), Failure> {
        self.stage.vm.set_slots(self.layout, self.memory, logged)
    }

    /// What each vCPU does in a pass.
    fn order(&self, pass: Pass, forever: bool) -> impl Fn(u32) -> Order + use<> {
        let (layout, check) = (self.layout.clone(), self.config.guest.check);
        move |index| Order { forever, ..Order::pass(&layout, index, pass, check) }
    }

    fn pass(
        &mut self,
        name: &'static str,
        iteration: Option<u32>,
        pass: Pass,
    ) -> Result<(), Failure> {
        let order = self.order(pass, false);
        let log = &mut self.log;
        self.stage.order_with(name, iteration, order, &mut |vm, rings| empty(vm, rings, log))
    }

    /// Gets and clears, each a phase, and audits both. No vCPU runs.
    fn collect(&mut self, iteration: u32) -> Result<(), Failure> {
        self.sample();
        let (iteration, log) = (Some(iteration), &mut self.log);
        if self.config.log == LogKind::Ring {
            self.stage.step("get", iteration, |stage| harvest(&mut stage.rings, log))?;
            self.stage.step("clear", iteration, |stage| stage.vm.reset_rings().map(drop))?;
        } else {
            let pages = self.layout.slot_pages();
            self.stage.step("get", iteration, |stage| get(&stage.vm, pages, log))?;
            if self.config.manual_protect {
                self.stage.step("clear", iteration, |stage| clear(&stage.vm, pages, log))?;
            }
        }
        self.compare(false);
        Ok(())
    }

    /// The same without phases of their own.
    fn collect_untimed(&mut self) -> Result<(), Failure> {
        let (pages, log, stage) = (self.layout.slot_pages(), &mut self.log, &mut *self.stage);
        if self.config.log == LogKind::Ring {
            return empty(&stage.vm, &mut stage.rings, log);
        }
        get(&stage.vm, pages, log)?;
        if self.config.manual_protect {
            clear(&stage.vm, pages, log)?;
        }
        Ok(())
    }

    fn sample(&mut self) {
        if let Some(audit) = &mut self.audit {
            audit.sample();
        }
    }

    /// Compares a collection with the sample before it. A log of rings begins anew.
    fn compare(&mut self, while_running: bool) {
        if let Some(audit) = &mut self.audit {
            audit.compare(&self.log, while_running);
        }
        self.log.forget();
    }

    /// Collects and clears while all vCPUs write, then once more when they have stopped.
    fn storm(&mut self) -> Result<(), Failure> {
        self.stage.begin("check", None);
        let order = self.order(STORM, true);
        let start = self.stage.crew.tell(order);
        for round in 0.. {
            let enough = |(rounds, time)| round >= rounds && start.elapsed() > time;
            if enough(ROUNDS) || enough(LONG) {
                break;
            }
            self.sample();
            let (log, Stage { crew, vm, rings, .. }) = (&mut self.log, &mut *self.stage);
            // The access under way, and one that begins after the sample.
            crew.wait_for_accesses(2, &mut || empty(vm, rings, log))?;
            self.collect_untimed()?;
            self.compare(true);
        }
        self.stage.crew.stop();
        let log = &mut self.log;
        self.stage.wait_with(&mut |vm, rings| empty(vm, rings, log))?;
        self.sample();
        self.collect_untimed()?;
        self.compare(false);
        if let Some(audit) = &mut self.audit {
            audit.compare_copy();
        }
        self.stage.end("check", None, start.elapsed())
    }

    fn disable(&mut self, pass: Pass) -> Result<(), Failure> {
        self.stage.begin("disable", None);
        let running = self.config.run_while_disabling;
        if running {
            let order = self.order(pass, true);
            self.stage.crew.tell(order);
        }
        let start = Instant::now();
        self.set_slots(false)?;
        let took = start.elapsed();
        if running {
            self.stage.crew.stop();
            let log = &mut self.log;
            self.stage.wait_with(&mut |vm, rings| empty(vm, rings, log))?;
        }
        self.stage.end("disable", None, took)
    }
}

fn get(vm: &Vm, pages: u64, log: &mut Log) -> Result<(), Failure> {
    (0..).zip(&mut log.slots).try_for_each(|(id, bitmap)| vm.dirty_log(id, pages, bitmap))
}

fn clear(vm: &Vm, pages: u64, log: &Log) -> Result<(), Failure> {
    (0..).zip(&log.slots).try_for_each(|(id, bitmap)| vm.clear_dirty_log(id, pages, bitmap))
}

/// Takes all entries out of the rings.
fn harvest(rings: &mut [Ring], log: &mut Log) -> Result<(), Failure> {
    let mut foreign = None;
    for ring in rings {
        Vm::harvest(ring, |slot, page| {
            if !log.add(slot, page) {
                foreign = Some((slot, page));
            }
        });
    }
    match foreign {
        Some((slot, page)) => Err(Failure::Run(format!(
            "a dirty ring names page {page} of memslot {slot}, which is not logged"
        ))),
        None => Ok(()),
    }
}

/// Takes all entries out of the rings, and has them used again.
fn empty(vm: &Vm, rings: &mut [Ring], log: &mut Log) -> Result<(), Failure> {
    harvest(rings, log)?;
    vm.reset_rings().map(drop)
}
