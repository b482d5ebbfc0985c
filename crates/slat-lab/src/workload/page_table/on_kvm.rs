//! The workload on this host's own KVM, which collapses by itself: there is no phase for that. Which leaves there are after
//! a stage say its statistics, `pages_4k` and the like. With `--check` the guests also execute a word of every page.

use serde::Serialize;

use super::options::{Config, Options};
use super::summary;
use crate::check::{Check, Findings};
use crate::contents::{self, Words};
use crate::failure::Failure;
use crate::guest::PLAIN;
use crate::kvm;
use crate::kvm::memory::Memory;
use crate::kvm::program::{Compare, JUMP_BACK, What};
use crate::kvm::stage::{Ended, Stage};
use crate::kvm::vcpu::{Order, Vcpu};
use crate::kvm::vm::{Plan, Reach};
use crate::layout::Layout;
use crate::report::Report;
use crate::{config, output};

/// The number of the only slot.
const SLOT: u32 = 0;

/// What `--check` found.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Found {
    /// Guest pages that were watched.
    pages: u64,
    /// Pages that were written and not in the log.
    lost: u64,
    /// Loads that did not return what a guest had stored there.
    wrong_loads: u64,
    /// Pages of host memory that do not hold what was stored, and then what was executed.
    misplaced: u64,
}

impl Findings for Found {
    const CLEAN: &'static str = "nothing lost, nothing misplaced";

    fn compared(&self) -> String {
        format!("{} pages", self.pages)
    }

    fn wrong(&self) -> Vec<(u64, &'static str)> {
        vec![
            (self.lost, "pages were written and not in the log"),
            (self.wrong_loads, "loads did not return what was stored there"),
            (self.misplaced, "pages of host memory do not hold what was stored"),
        ]
    }
}

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
    let memory = Memory::new(layout.host_size, config.guest.backing)?;
    let vcpus = config.guest.vcpus;
    let accesses = layout.guest_pages() * 2 * u64::from(vcpus);
    let stage = Stage::new(&kvm, Plan::new(vcpus, Reach::of(&layout)), accesses)?;
    let (ended, mut found) = stage.play(|stage| play(stage, &layout, &config, &memory))?;
    let Ended { phases, counters, vcpus } = ended;
    found.wrong_loads = vcpus.iter().map(Vcpu::wrong_loads).sum();
    let report = Report {
        workload: "page-table",
        backend: "kvm",
        host: Some(kvm::facts()),
        notes: config.guest.notes(&layout),
        summary: summary(&phases),
        counters,
        phases,
        results: (),
        check: config.guest.check.then_some(Check { found, rules: None }),
        config,
    };
    output::print(&report, &options.output)
}

/// All phases, and what was found, if that was looked for.
fn play(
    stage: &mut Stage,
    layout: &Layout,
    config: &Config,
    memory: &Memory,
) -> Result<Found, Failure> {
    let check = config.guest.check;
    let (gpa, page, pages) = (layout.gpa, layout.guest_page, layout.guest_pages());
    let per_large = config.pages_per_large(layout);
    let with_contents = |order| Order {
        value: if check { 0 } else { PLAIN },
        compare: if check { Compare::WithPage } else { Compare::Nothing },
        ..order
    };
    let large = (per_large * page, pages / per_large);
    stage.vm.set_slots(layout, memory, false)?;
    stage.order("create", None, |index| {
        with_contents(match index % 2 {
            0 => Order::write(gpa, large.0, large.1),
            _ => Order::read(gpa, large.0, large.1),
        })
    })?;
    stage.step("enable", None, |stage| stage.vm.set_slots(layout, memory, true))?;
    stage.order("update", None, |_| {
        with_contents(match config.updates_all {
            true => Order::write(gpa, page, pages),
            false => Order { what: What::Halves, ..Order::write(gpa, large.0, large.1) },
        })
    })?;
    let mut found = Found { pages, ..Found::default() };
    if check {
        found.lost = stage.step("check", None, |stage| {
            let mut log = vec![0; pages.div_ceil(64) as usize];
            stage.vm.dirty_log(SLOT, pages, &mut log)?;
            let reported = |page: u64| log[(page / 64) as usize] >> (page % 64) & 1 == 1;
            let written = config.written_pages(layout);
            Ok(written.filter(|&page| !reported(page) || is_empty(memory, layout, page)).count())
        })? as u64;
    }
    stage.step("disable", None, |stage| stage.vm.set_slots(layout, memory, false))?;
    stage.order("adjust", None, |_| with_contents(Order::read(gpa, page, pages)))?;
    if check {
        found.misplaced = contents::misplaced(memory, layout, &[]);
        let (what, value) = (What::Execute, JUMP_BACK);
        stage.order("execute", None, |_| Order {
            what,
            value,
            ..Order::write(gpa, page, pages)
        })?;
        let word = |page| contents::word(memory, layout, page);
        found.misplaced += (0..pages).filter(|&page| word(page) != JUMP_BACK).count() as u64;
    }
    Ok(found)
}

fn is_empty(memory: &dyn Words, layout: &Layout, page: u64) -> bool {
    contents::word(memory, layout, page) == 0
}
