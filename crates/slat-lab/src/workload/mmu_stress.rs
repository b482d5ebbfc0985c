//! `slat mmu-stress`: all vCPUs write all of a large guest's memory while the host makes it read-only under them, as in the
//! kernel's `mmu_stress_test` (before Linux 6.14 `max_guest_memory_test`).
//!
//! Write everything; load the vCPUs' registers anew; write everything. Then everything is read, and written again and
//! again until the host has made it read-only: from the first write that fails, every one fails with the host's error.
//! The host makes it writable, and everything is written. At last every other slot is deleted, and half of the host's
//! memory unmapped.
//!
//! One stretch of host memory is behind all slots, so that the guest can be larger than the computer.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use serde::Serialize;
use slat::Gpa;
use slat_vm::{Hva, HvaRange, SlotConfig};

use crate::arch::{Tables, with_tables};
use crate::backend::Backend;
use crate::check::{Check, Findings};
use crate::config::GuestConfig;
use crate::failure::Failure;
use crate::model::ModelHost;
use crate::report::{Phase, Report};
use crate::stage::{Ground, Stage};
use crate::{guest_mode, model, output};

mod guest;
mod host;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod on_kvm;
#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
use crate::kvm as on_kvm;
mod options;

use guest::{Order, Region, Writer};
use host::{Protected, ProtectedMemory};
use options::Config;
pub(crate) use options::{LONG_HELP, Options};

/// Phases whose times the kernel's test prints.
const PRINTED: [&str; 5] = ["run1", "reset", "run2", "ro", "rw"];

/// What the host and the guests tell each other while memory becomes read-only.
#[derive(Debug, Default)]
struct Window {
    /// Memory is read-only: a write that begins now fails.
    closed: AtomicBool,
    /// vCPUs that have begun to write.
    writing: AtomicUsize,
}

/// What was found.
#[derive(Clone, Debug, Default, Serialize)]
struct Found {
    /// Guest pages that were written and read.
    pages: u64,
    /// Writes to read-only memory that failed.
    refused: u64,
    /// Writes that did not, though memory was read-only.
    passed: u64,
    /// Pages of host memory that changed while they were read-only; looked for with `--check`.
    changed: u64,
    /// Loads that returned what was never stored there.
    wrong_loads: u64,
    /// Pages of host memory that do not hold what was stored last.
    misplaced: u64,
    /// Accesses to deleted slots or unmapped memory that got through, or to others that did not; looked for with
    /// `--check`.
    misled: u64,
}

impl Findings for Found {
    const CLEAN: &'static str = "no write to read-only memory passed, nothing lost";

    fn compared(&self) -> String {
        let Self { pages, refused, .. } = self;
        format!("{pages} pages; {refused} writes to read-only memory failed")
    }

    fn wrong(&self) -> Vec<(u64, &'static str)> {
        vec![
            (self.passed, "writes to read-only memory did not fail"),
            (self.changed, "pages of host memory changed while they were read-only"),
            (self.wrong_loads, "loads returned what was never stored there"),
            (self.misplaced, "pages of host memory do not hold what was stored last"),
            (self.misled, "accesses after slots were deleted and memory unmapped went wrong"),
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
        backend @ Backend::Metal => Err(backend.lacks("mmu-stress")),
    }
}

fn on_model(options: &Options) -> Result<(), Failure> {
    let Some(mode) = output::chosen(options.mode, guest_mode::list)? else { return Ok(()) };
    let (layout, config) = options.settle(mode)?;
    let (layout, machine) = (&layout, &options.machine);
    let (model, memory) = model::machine(layout, machine, &config.guest)?;
    let ground = Ground { model: &model, memory: &memory, layout, machine };
    let (phases, check) = with_tables!(layout.kind, T => measure::<T>(ground, &config))?;
    let report = Report {
        workload: "mmu-stress",
        backend: "model",
        host: None,
        notes: config.guest.notes(layout),
        summary: vec![summary(&phases)],
        config,
        counters: phases.iter().map(|phase| phase.counters).sum(),
        phases,
        results: (),
        check: Some(check),
    };
    output::print(&report, &options.output)
}

/// The line that the kernel's test ends with.
fn summary<N>(phases: &[Phase<N>]) -> String {
    let printed = phases.iter().filter(|phase| PRINTED.contains(&phase.name));
    let times = printed.map(|phase| format!("{} = {:.9}s", phase.name, phase.seconds));
    times.collect::<Vec<_>>().join(", ")
}

/// All phases with one granule, and what was found.
fn measure<T: Tables>(
    ground: Ground<'_>,
    config: &Config,
) -> Result<(Vec<Phase>, Check<Found>), Failure> {
    let window = Arc::<Window>::default();
    let protected = Arc::new(Protected::new());
    let region = config.region();
    let writer = |index| {
        let part = config.part(index);
        Writer::new(region, part, Arc::clone(&window), config.guest.check)
    };
    let writers = (0..config.guest.vcpus).map(writer).collect();
    let host = ProtectedMemory::new(Arc::clone(ground.memory), Arc::clone(&protected));
    let ended =
        ground.play_without_slots::<T, _, _>(ModelHost::new(host), writers, 4, |stage| {
            let mut run =
                Run { ground, config, region, window: &window, protected: &protected, stage };
            run.all()
        })?;
    let sum = |of: fn(&Writer) -> u64| ended.programs.iter().map(of).sum();
    let found = Found {
        pages: config.pages(),
        refused: sum(|writer| writer.refused),
        passed: sum(|writer| writer.passed),
        wrong_loads: sum(|writer| writer.wrong_loads),
        misled: sum(|writer| writer.misled),
        ..ended.result
    };
    Ok((ended.phases, ground.judge(found)))
}

/// A run in progress.
struct Run<'a, 'r, 's, 'm, T: Tables> {
    ground: Ground<'a>,
    config: &'a Config,
    region: Region,
    window: &'a Window,
    protected: &'a Protected,
    stage: &'r mut Stage<'s, 'm, T, Writer>,
}

impl<T: Tables> Run<'_, '_, '_, '_, T> {
    /// What the host finds.
    fn all(&mut self) -> Result<Found, Failure> {
        for id in self.slots() {
            let slot = SlotConfig::new(self.slot_gpa(id), self.region.slot_size, Hva(0));
            let created = self.stage.vm.create_slot(&mut self.stage.worker, id, slot);
            created.map_err(|error| Failure::Usage(error.to_string()))?;
        }
        let mut found = Found::default();
        self.stage.order("run1", None, Order::Write(1))?;
        found.misplaced += self.misplaced(1);
        self.stage.order("reset", None, Order::Reset)?;
        self.stage.order("run2", None, Order::Write(2))?;
        found.misplaced += self.misplaced(2);
        found.changed = self.read_only()?;
        self.writable()?;
        found.misplaced += self.misplaced(guest::REWRITE);
        self.unmap()?;
        if self.config.guest.check {
            self.stage.order("check", None, Order::Probe)?;
        }
        Ok(found)
    }

    /// Makes memory read-only while vCPUs read and then write it. How many pages changed afterwards.
    fn read_only(&mut self) -> Result<u64, Failure> {
        let Config { guest: GuestConfig { check, vcpus, .. }, .. } = *self.config;
        let Stage { vm, worker, crew, .. } = &mut *self.stage;
        let start = crew.tell(Order::ReadOnly);
        while check && self.window.writing.load(Ordering::Relaxed) < vcpus as usize {
            crew.wait_for_access()?;
        }
        let guard = vm.invalidate_host_begin(worker, first(self.region.slot_size).as_slice())?;
        self.protected.set_writable(false);
        guard.end();
        let before = if check { self.words() } else { Vec::new() };
        self.window.closed.store(true, Ordering::Release);
        self.finish("ro", start)?;
        Ok(before.iter().zip(self.words()).filter(|(before, now)| **before != *now).count() as u64)
    }

    /// Makes memory writable while vCPUs try to write it.
    fn writable(&mut self) -> Result<(), Failure> {
        let start = self.stage.crew.tell(Order::Rewrite);
        self.protected.set_writable(true);
        self.finish("rw", start)
    }

    fn finish(&mut self, name: &'static str, start: Instant) -> Result<(), Failure> {
        self.stage.begin(name, None);
        let end = self.stage.crew.wait(|_| {})?;
        self.stage.end(name, None, end - start);
        Ok(())
    }

    /// Deletes the slots of even numbers and unmaps the first half of the host's memory.
    fn unmap(&mut self) -> Result<(), Failure> {
        let start = Instant::now();
        for id in self.slots().filter(|&id| guest::is_deleted(id)) {
            self.stage.vm.delete_slot(&mut self.stage.worker, id)?;
        }
        let half = first(self.region.unmapped);
        let guard = self.stage.vm.invalidate_host_begin(&mut self.stage.worker, half.as_slice())?;
        self.protected.unmap_below(self.region.unmapped);
        guard.end();
        self.stage.end("unmap", None, start.elapsed());
        Ok(())
    }

    /// The numbers of the slots, from 1 as in the kernel's test.
    fn slots(&self) -> RangeInclusive<u32> {
        1..=self.config.slots
    }

    fn slot_gpa(&self, id: u32) -> Gpa {
        Gpa(self.region.gpa + u64::from(id - 1) * self.region.slot_size)
    }

    /// The first word of every guest page's worth of host memory.
    fn words(&self) -> Vec<u64> {
        let offsets = (0..self.region.slot_size).step_by(self.region.page as usize);
        let words = offsets.filter_map(|offset| self.ground.memory.word(offset));
        words.map(|word| word.load(Ordering::Relaxed)).collect()
    }

    /// Pages of host memory that do not hold what this run has stored through one of the slots.
    fn misplaced(&self, run: u64) -> u64 {
        let words = (0..).zip(self.words());
        let wrong = |&(page, word): &(u64, u64)| {
            !self.region.is_of(word, page * self.region.page) || guest::run_of(word) != run
        };
        words.filter(wrong).count() as u64
    }
}

/// The first bytes of host memory, if any.
fn first(size: u64) -> Option<HvaRange> {
    HvaRange::new(Hva(0), size)
}
