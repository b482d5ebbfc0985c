//! `slat pre-fault`: memory is mapped ahead of any access, as in the kernel's `pre_fault_memory_test`.
//!
//! Each call must come further or say why not, and be resumable; what no slot has is left, and said so. Afterwards the
//! guests read everything, without a fault.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use serde::Serialize;
use slat::Gpa;
use slat_vm::{Hva, SlotConfig};

use crate::arch::{Tables, with_tables};
use crate::backend::Backend;
use crate::check::{Check, Findings};
use crate::failure::Failure;
use crate::model::ModelHost;
use crate::report::{Phase, Report};
use crate::stage::{Ground, Stage};
use crate::{backing, guest_mode, model, output};

mod guest;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod on_kvm;
#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
use crate::kvm as on_kvm;
mod options;

use guest::{Order, Reader, Seen, content};
use options::Config;
pub(crate) use options::{LONG_HELP, Options};

/// The number of the slot, as in the kernel's test.
const SLOT: u32 = 10;

/// What was found.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Found {
    /// Calls to map memory ahead, of all vCPUs.
    calls: u64,
    /// Calls that neither came further nor said why, or whose rest does not follow what was done.
    unclear: u64,
    /// Ranges of which another part was left than no slot has.
    wrong_rest: u64,
    /// Ranges that ended with another error than that there is no slot, or without it.
    wrong_error: u64,
    /// Loads that did not return what the host had stored.
    wrong_loads: u64,
    /// Faults of guests that read what was mapped ahead.
    faults: u64,
}

impl Findings for Found {
    const CLEAN: &'static str = "every call came further or said why not, no fault afterwards";

    fn compared(&self) -> String {
        format!("{} calls", self.calls)
    }

    fn wrong(&self) -> Vec<(u64, &'static str)> {
        vec![
            (self.unclear, "calls neither came further nor said why, or lost their place"),
            (self.wrong_rest, "ranges were not mapped as far as there are slots"),
            (self.wrong_error, "ranges did not end with the error that is due"),
            (self.wrong_loads, "loads did not return what the host had stored"),
            (self.faults, "faults on memory that had been mapped ahead"),
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
        backend @ Backend::Metal => Err(backend.lacks("pre-fault")),
    }
}

fn on_model(options: &Options) -> Result<(), Failure> {
    let Some(mode) = output::chosen(options.mode, guest_mode::list)? else { return Ok(()) };
    let Some(backing) = output::chosen(options.backing, backing::list)? else { return Ok(()) };
    let (layout, config) = options.settle(backing, mode)?;
    let (layout, machine) = (&layout, &options.machine);
    let (model, memory) = model::machine(layout, machine, &config.guest)?;
    let ground = Ground { model: &model, memory: &memory, layout, machine };
    let (phases, check) = with_tables!(layout.kind, T => measure::<T>(ground, &config))?;
    let report = Report {
        workload: "pre-fault",
        backend: "model",
        host: None,
        notes: config.guest.notes(layout),
        summary: Vec::new(),
        config,
        counters: phases.iter().map(|phase| phase.counters).sum(),
        phases,
        results: (),
        check: Some(check),
    };
    output::print(&report, &options.output)
}

/// All phases with one granule, and what was found.
fn measure<T: Tables>(
    ground: Ground<'_>,
    config: &Config,
) -> Result<(Vec<Phase>, Check<Found>), Failure> {
    let pages = config.guest.bytes.0 / config.page;
    for index in 0..pages {
        if let Some(word) = ground.memory.word(index * config.page) {
            word.store(content(index), Ordering::Relaxed);
        }
    }
    let settled = Arc::new(AtomicBool::new(true));
    let reader = |_| Reader::new((config.guest.gpa, config.page, pages), Arc::clone(&settled));
    let readers = (0..config.guest.vcpus).map(reader).collect();
    let host = ModelHost::of(ground.memory);
    let ended = ground.play_without_slots::<T, _, _>(host, readers, 1, |stage| {
        Run { config, settled: &settled, stage }.all()
    })?;
    let mut found = Found::default();
    for &Reader { seen, .. } in &ended.programs {
        let Seen { calls, unclear, wrong_rest, wrong_error, wrong_loads } = seen;
        found.calls += calls;
        found.unclear += unclear;
        found.wrong_rest += wrong_rest;
        found.wrong_error += wrong_error;
        found.wrong_loads += wrong_loads;
    }
    // Of the first reading, what was mapped ahead went with the slot, if that went.
    let read = ended.phases.iter().filter(|phase| phase.name == "read");
    let read = read.skip(usize::from(config.race));
    found.faults = read.map(|phase| phase.counters.faults).sum();
    Ok((ended.phases, ground.judge(found)))
}

/// A run in progress.
struct Run<'a, 'r, 's, 'm, T: Tables> {
    config: &'a Config,
    settled: &'a AtomicBool,
    stage: &'r mut Stage<'s, 'm, T, Reader>,
}

impl<T: Tables> Run<'_, '_, '_, '_, T> {
    fn all(&mut self) -> Result<(), Failure> {
        let steps = self.config.steps();
        self.create()?;
        self.stage.order("misaligned", None, Order::Misaligned(steps[0]))?;
        for (number, step) in (1..).zip(steps) {
            self.step(number, Order::Map(step))?;
        }
        self.stage.order("read", Some(1), Order::Read)?;
        self.delete()?;
        self.create()?;
        self.stage.order("resume", None, Order::MapInterrupted(self.config.whole()))?;
        self.stage.order("read", Some(2), Order::Read)
    }

    /// All vCPUs map a part ahead, and meanwhile the slot goes and comes back, if that was asked for.
    fn step(&mut self, number: u32, order: Order) -> Result<(), Failure> {
        if !self.config.race {
            return self.stage.order("pre-fault", Some(number), order);
        }
        self.settled.store(false, Ordering::Release);
        self.stage.begin("pre-fault", Some(number));
        let start = self.stage.crew.tell(order);
        self.delete()?;
        // Somebody may find it gone.
        thread::yield_now();
        self.create()?;
        self.settled.store(true, Ordering::Release);
        let end = self.stage.crew.wait(|_| {})?;
        self.stage.end("pre-fault", Some(number), end - start);
        Ok(())
    }

    fn create(&mut self) -> Result<(), Failure> {
        let guest = &self.config.guest;
        let slot = SlotConfig::new(Gpa(guest.gpa), guest.bytes.0, Hva(0));
        Ok(self.stage.vm.create_slot(&mut self.stage.worker, SLOT, slot)?)
    }

    fn delete(&mut self) -> Result<(), Failure> {
        Ok(self.stage.vm.delete_slot(&mut self.stage.worker, SLOT)?)
    }
}
