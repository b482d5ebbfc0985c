//! `page-table`: what it takes to create, update and adjust translations while all vCPUs touch the same memory, as in the
//! kernel's `kvm_page_table_test`.
//!
//! Create: each vCPU touches each page of the backing; those with an even number write, the others read. The log goes on.
//! Update: of memory in small pages every page is written; otherwise the first page of each large one is written and its
//! second half is read. The log goes off. What was split becomes blocks again, in place. Adjust: every page is read.

use alloc::collections::BTreeMap;
use alloc::string::{String, ToString};
use alloc::vec::Vec;

use serde::Serialize;
use slat::{Gpa, Lookup};
use slat_metal::layout::Layout;
use slat_metal::options::Options;
use slat_metal::program::{Order, PAGE};
use slat_metal::report::{GuestConfig, Nothing};
use slat_vm::LogMode;

use crate::guest::{Equipment, Guest};
use crate::stage::{Stage, config, play};

const SLOT: u32 = 0;

#[derive(Serialize)]
struct Config {
    #[serde(flatten)]
    guest: GuestConfig,
}

/// The tables after each stage, and what was wrong.
#[derive(Debug, Default, Serialize)]
struct Found {
    created: Survey,
    updated: Survey,
    adjusted: Survey,
    /// Touched pages without a leaf, or whose leaf is not as large as it must be.
    wrong_leaves: u64,
    /// Translations that lead elsewhere than to the page.
    elsewhere: u64,
    /// Pages that were written and not in the log.
    lost: u64,
    wrong_loads: u64,
    misplaced: u64,
    violations: u64,
    violation: Option<&'static str>,
}

/// All of guest memory.
#[derive(Debug, Default, Serialize)]
struct Survey {
    leaves: Vec<Leaves>,
    unmapped: u64,
}

#[derive(Debug, Serialize)]
struct Leaves {
    size: u64,
    count: u64,
}

/// Runs the workload and prints its report.
pub(super) fn run(options: &Options, layout: &Layout) -> Result<(), String> {
    let guest = Guest::new(Equipment {
        options,
        layout,
        hardware_dirty: false,
        dirty_ring: None,
        served: None,
    })?;
    let config = Config { guest: config(options, &guest) };
    let (phases, found) = play(guest, |stage| all(stage, options))?;
    super::print(options, config, phases, Nothing {}, options.check.then_some(found))
}

fn all(stage: &mut Stage<'_>, options: &Options) -> Result<Found, String> {
    let (check, large) = (options.check, options.backing);
    let mut found = Found::default();
    stage.order("create", None, |stage, index| {
        let writes = if index.is_multiple_of(2) { 100 } else { 0 };
        let stretch = large / PAGE;
        Order { stretch, read_from: stretch, ..stage.pass_of(index, writes) }
    });
    if check {
        found.created = found.survey(stage, |offset| offset.is_multiple_of(large).then_some(large));
    }
    stage
        .each_slot("enable", None, |vm, worker, id| vm.enable_log(worker, id, LogMode::Protect))?;
    stage.order("update", None, |stage, index| {
        let stretch = large / PAGE;
        let read_from = if stretch == 1 { 1 } else { stretch / 2 };
        Order { stretch, read_from, ..stage.pass_of(index, 100) }
    });
    if check {
        found.collect(stage, large)?;
        found.updated = found.survey(stage, |offset| offset.is_multiple_of(large).then_some(PAGE));
    }
    stage.each_slot("disable", None, |vm, worker, id| vm.disable_log(worker, id))?;
    stage.each_slot("collapse", None, |vm, worker, id| vm.collapse(worker, id).map(drop))?;
    stage.order("adjust", None, |stage, index| stage.pass_of(index, 0));
    if check {
        found.adjusted = found.survey(stage, |_| Some(large));
        found.wrong_loads = stage.wrong_loads();
        found.misplaced += stage.misplaced();
    }
    Ok(found)
}

impl Found {
    /// Every page that was written is in the log, and has what was written. A phase of its own, so that no other counts
    /// what it does.
    fn collect(&mut self, stage: &mut Stage<'_>, large: u64) -> Result<(), String> {
        stage.begin("check", None);
        let start = stage.now();
        let mut log = alloc::vec![0; stage.guest.layout.slot_pages().div_ceil(64) as usize];
        let collected = stage.guest.vm.dirty_log(&mut stage.worker, SLOT, &mut log);
        collected.map_err(|error| error.to_string())?;
        for page in (0..stage.guest.layout.pages()).step_by((large / PAGE) as usize) {
            let reported = log[(page / 64) as usize] >> (page % 64) & 1 == 1;
            self.lost += u64::from(!reported);
            self.misplaced += u64::from(stage.vm().host().first_word(page) == 0);
        }
        let took = stage.now() - start;
        stage.end("check", None, took);
        Ok(())
    }

    /// Looks at the leaf of every page, which must be of the size that `expected` says for its offset, if it says one.
    fn survey(&mut self, stage: &Stage<'_>, expected: impl Fn(u64) -> Option<u64>) -> Survey {
        let (tree, layout) = (stage.vm().tree(), &stage.guest.layout);
        let (mut leaves, mut unmapped) = (BTreeMap::<u64, u64>::new(), 0);
        for offset in (0..layout.size).step_by(PAGE as usize) {
            let gpa = layout.gpa + offset;
            let found = tree.look_up(&stage.worker.participant().pin(), Gpa(gpa));
            let Ok(Lookup::Mapped { output, level, .. }) = found else {
                self.wrong_leaves += u64::from(expected(offset).is_some());
                unmapped += 1;
                continue;
            };
            let size = tree.geometry().size(level);
            self.wrong_leaves +=
                u64::from(expected(offset).is_some_and(|expected| expected != size));
            self.elsewhere += u64::from(stage.vm().host().output(offset) != Some(output));
            if offset == 0 || gpa.is_multiple_of(size) {
                *leaves.entry(size).or_default() += 1;
            }
        }
        let leaves = leaves.into_iter().map(|(size, count)| Leaves { size, count }).collect();
        Survey { leaves, unmapped }
    }
}
