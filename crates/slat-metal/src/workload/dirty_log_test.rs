//! `dirty-log-test`: whether dirty logs are true, as in the kernel's `dirty_log_test`.
//!
//! Each way of logging on a guest of its own: the log is on before anything is mapped; guests write the number of the
//! round into pages at random; meanwhile the log is collected, then the guests are stopped and memory is compared with
//! what was reported. The first vCPU writes before the collection and after it, the others all the time.

use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::sync::atomic::Ordering;

use serde::Serialize;
use slat_metal::audit::Log;
use slat_metal::layout::Layout;
use slat_metal::options::{Options, Way};
use slat_metal::program::{Order, Values};
use slat_metal::report::{GuestConfig, Phase};
use slat_metal::rounds::{Bits, Verifier};
use slat_vm::LogMode;

use crate::guest::{Equipment, Guest};
use crate::stage::{Stage, config, play};

const SLOT: u32 = 0;
/// Writes of the first vCPU between two collections.
const LOOP: u64 = 1024;

#[derive(Serialize)]
struct Config {
    #[serde(flatten)]
    guest: GuestConfig,
    log: Vec<Way>,
    iterations: u32,
    interval_milliseconds: u32,
    ring_entries: u32,
    seed: u64,
}

#[derive(Serialize)]
struct Results {
    modes: Vec<Mode>,
}

/// What one way of logging gave.
#[derive(Serialize)]
struct Mode {
    mode: Way,
    rounds: u32,
    writes: u64,
    /// Entries of rings that named no page, or were reset or taken but not both.
    mismatched: u64,
    #[serde(flatten)]
    bits: Bits,
}

/// What was found, in all ways together.
#[derive(Default, Serialize)]
struct Found {
    pages: u64,
    #[serde(flatten)]
    bits: Bits,
    mismatched: u64,
    violations: u64,
    violation: Option<&'static str>,
}

/// Runs the workload and prints its report.
pub(super) fn run(options: &Options, layout: &Layout) -> Result<(), String> {
    let ways = options.way.map_or(Way::ALL.to_vec(), |way| [way].into());
    let iterations = options.iterations.unwrap_or(32);
    let (mut phases, mut modes) = (Vec::new(), Vec::new());
    let mut found = Found { pages: layout.pages(), ..Found::default() };
    let mut guest_config = None;
    for &way in &ways {
        let guest = Guest::new(Equipment {
            options,
            layout,
            hardware_dirty: way == Way::Hardware,
            dirty_ring: (way == Way::DirtyRing).then_some(options.ring),
            served: None,
        })?;
        guest_config = Some(config(options, &guest));
        let (played, mode) = play(guest, |stage| measure(stage, way, iterations))?;
        phases.extend::<Vec<Phase>>(played);
        found.bits.add(&mode.bits);
        found.mismatched += mode.mismatched;
        modes.push(mode);
    }
    let Some(guest) = guest_config else { return Err("no way of logging".to_string()) };
    let config = Config {
        guest,
        log: ways,
        iterations,
        // Rounds end when the first vCPU has written so much, not after a time.
        interval_milliseconds: 0,
        ring_entries: options.ring,
        seed: options.seed,
    };
    super::print(options, config, phases, Results { modes }, Some(found))
}

/// One way of logging.
fn measure(stage: &mut Stage<'_>, way: Way, iterations: u32) -> Result<Mode, String> {
    let mode = match way {
        Way::DirtyLog => LogMode::Protect,
        Way::ClearLog => LogMode::Manual { initially_all_set: true },
        Way::DirtyRing => LogMode::Ring { backup: false },
        Way::Hardware => LogMode::Hardware,
    };
    let Guest { vm, layout, privates, rings, .. } = stage.guest;
    vm.enable_log(&mut stage.worker, SLOT, mode).map_err(|error| error.to_string())?;
    stage.begin(way.name(), None);
    let start = stage.now();
    let mut log = Log::new(1, layout.slot_pages());
    let mut verifier = Verifier::new(layout.pages(), 1, |page| vm.host().first_word(page));
    let mut burst = share(stage, 0);
    for round in 1..u64::from(iterations) {
        for private in privates {
            private.mailbox().round.store(round, Ordering::Relaxed);
        }
        // Its share first, and from then on any page.
        let write = |stage: &Stage<'_>, index| {
            if round == 1 { share(stage, index) } else { any(stage, index) }
        };
        stage.begin_running(write);
        stage.burst(&burst);
        burst = any(stage, 0);
        collect(stage, way, &mut log)?;
        stage.burst(&burst);
        stage.stop();
        verifier.compare(|page| log.has(page), |_, _| false, round);
    }
    let took = stage.now() - start;
    stage.end(way.name(), None, took);
    collect(stage, way, &mut log)?;
    verifier.finish(|page| log.has(page));
    let completed =
        |private: &crate::guest::Private| private.mailbox().completed.load(Ordering::Relaxed);
    Ok(Mode {
        mode: way,
        rounds: iterations - 1,
        writes: privates.iter().map(completed).sum(),
        mismatched: rings.lock().broken,
        bits: verifier.bits,
    })
}

/// Replaces the log by what is in it now.
fn collect(stage: &mut Stage<'_>, way: Way, log: &mut Log) -> Result<(), String> {
    let (vm, worker) = (&stage.guest.vm, &mut stage.worker);
    if way == Way::DirtyRing {
        return stage.guest.rings.lock().collect(vm, log).map_err(|error| error.to_string());
    }
    let (pages, bitmap) = (stage.guest.layout.slot_pages(), &mut log.slots[0]);
    vm.dirty_log(worker, SLOT, bitmap).map_err(|error| error.to_string())?;
    if way == Way::ClearLog {
        let cleared = vm.clear_dirty_log(worker, SLOT, 0, pages, bitmap);
        cleared.map_err(|error| error.to_string())?;
    }
    Ok(())
}

/// The vCPU's share of all pages, each once.
fn share(stage: &Stage<'_>, index: usize) -> Order {
    let (pages, vcpus) = (stage.guest.layout.pages(), stage.guest.privates.len() as u64);
    let share = |index: u64| pages * index / vcpus;
    let first = share(index as u64);
    let pages = share(index as u64 + 1) - first;
    Order { first, pages, values: Values::Round, ..stage.pass_of(index, 100) }
}

/// Any page, at random.
fn any(stage: &Stage<'_>, index: usize) -> Order {
    Order { random: LOOP, values: Values::Round, ..stage.pass_of(index, 100) }
}
