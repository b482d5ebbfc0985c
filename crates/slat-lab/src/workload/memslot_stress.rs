//! `slat memslot-stress`: a memslot comes and goes just below the guest's memory while all vCPUs run, as in the kernel's
//! `memslot_modification_stress_test`.
//!
//! With `--check` the guests also store into the slot that comes and goes. Each of these stores lands in it or is an
//! exit; once the slot is deleted none lands, and meanwhile nothing that was stored in the guest's own memory is lost.

use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;
use slat::Gpa;
use slat_vm::{Hva, SlotConfig};

use crate::arch::{Tables, with_tables};
use crate::backend::Backend;
use crate::check::{Check, Findings};
use crate::failure::Failure;
use crate::guest::{Pass, Program};
use crate::random::Dice;
use crate::report::{Phase, Report};
use crate::stage::{Ground, Stage};
use crate::{config, contents, model, output};

mod guest;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod on_kvm;
#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
use crate::kvm as on_kvm;
mod options;

use guest::Intruder;
use options::Config;
pub(crate) use options::{LONG_HELP, Options};

/// The number of the slot that comes and goes.
const PASSING: u32 = 7;
/// What the kernel's guests do.
const WRITE: Pass = Pass { write_percent: 100, random: false };
/// What they do with `--check`: stores, and loads that see whether the stores are there.
const STORM: Pass = Pass { write_percent: 75, random: true };

/// What `--check` found.
#[derive(Clone, Debug, Default, Serialize)]
struct Found {
    /// Guest pages that were watched.
    pages: u64,
    /// Stores into the slot that came and went.
    landed: u64,
    /// Stores at its addresses that were exits, as it was not there.
    exits: u64,
    /// Times that something was stored into the slot after it had been deleted.
    stray: u64,
    /// Loads that did not return what the guest had stored.
    wrong_loads: u64,
    /// Pages of host memory that hold what was stored elsewhere, or not what was stored last.
    misplaced: u64,
}

impl Findings for Found {
    const CLEAN: &'static str = "nothing lost, nothing misplaced, nothing stored in a deleted slot";

    fn compared(&self) -> String {
        let Self { pages, landed, exits, .. } = self;
        format!("{pages} pages; {landed} stores into the slot while it was there, {exits} exits")
    }

    fn wrong(&self) -> Vec<(u64, &'static str)> {
        vec![
            (self.stray, "deleted slots were stored into"),
            (self.wrong_loads, "loads did not return what was stored last"),
            (self.misplaced, "pages of host memory do not hold what was stored last"),
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
        backend @ Backend::Metal => Err(backend.lacks("memslot-stress")),
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
        workload: "memslot-stress",
        backend: "model",
        host: None,
        notes: config.guest.notes(layout),
        summary: summary(&phases, config.iterations),
        config,
        counters: phases.iter().map(|phase| phase.counters).sum(),
        phases,
        results: (),
        check,
    };
    output::print(&report, &options.output)
}

fn summary<N>(phases: &[Phase<N>], iterations: u32) -> Vec<String> {
    let line = |phase: &Phase<N>| {
        let (total, average) = (phase.seconds, phase.seconds / f64::from(iterations));
        format!(
            "{iterations} slots were created and deleted in {total:.9}s. (Avg {average:.9}s/slot)"
        )
    };
    phases.iter().map(line).collect()
}

/// The phase with one granule, and what the check found.
fn measure<T: Tables>(
    ground: Ground<'_>,
    config: &Config,
) -> Result<(Vec<Phase>, Option<Check<Found>>), Failure> {
    let layout = ground.layout;
    let checked = config.guest.check;
    let guest = |index: u32| {
        let dice = Dice::new(1, index);
        let program = Program::new(layout.gpa, layout.guest_page, layout.part(index), dice);
        let program = match checked {
            true => program.checked(index, config.guest.vcpus, !config.overlap),
            false => program,
        };
        Intruder::new(program, checked.then_some(config.slot_gpa))
    };
    let guests = (0..config.guest.vcpus).map(guest).collect();
    let ended = ground.play::<T, _, _>(guests, 0, |stage| modify(stage, ground, config))?;
    let check = checked.then(|| {
        let landed = ended.programs.iter().map(|guest| guest.landed).sum();
        let exits = ended.programs.iter().map(|guest| guest.exits).sum();
        let programs: Vec<_> = ended.programs.into_iter().map(|guest| guest.program).collect();
        ground.judge(Found {
            pages: layout.guest_pages(),
            landed,
            exits,
            stray: ended.result,
            wrong_loads: contents::wrong_loads(&programs),
            misplaced: contents::misplaced(ground.memory, layout, &programs),
        })
    });
    Ok((ended.phases, check))
}

/// Creates and deletes the slot while all vCPUs run; how often something was stored into it afterwards.
fn modify<T: Tables>(
    stage: &mut Stage<'_, '_, T, Intruder>,
    ground: Ground<'_>,
    config: &Config,
) -> Result<u64, Failure> {
    let hva = Hva(config.slot_hva);
    let slot = SlotConfig::new(Gpa(config.slot_gpa), config.slot_size.0, hva);
    let word = || ground.memory.word(hva.0).map(|word| word.load(Ordering::Relaxed));
    let mut stray = 0;
    stage.begin("modify", None);
    stage.crew.tell(if config.guest.check { STORM } else { WRITE });
    let mut took = Duration::ZERO;
    for _ in 0..config.iterations {
        let start = Instant::now();
        thread::sleep(config.delay());
        stage.vm.create_slot(&mut stage.worker, PASSING, slot)?;
        if config.guest.check {
            // The access under way, and one that begins when the slot is there.
            stage.crew.wait_for_accesses(2)?;
        }
        stage.vm.delete_slot(&mut stage.worker, PASSING)?;
        took += start.elapsed();
        if config.guest.check {
            let deleted = word();
            stage.crew.wait_for_accesses(2)?;
            stray += u64::from(word() != deleted);
        }
    }
    stage.crew.stop();
    stage.crew.wait(|_| {})?;
    stage.end("modify", None, took);
    Ok(stray)
}
