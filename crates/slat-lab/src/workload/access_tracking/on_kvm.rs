//! The workload on this host's own KVM, where the kernel tells which pages are idle: `/sys/kernel/mm/page_idle/bitmap`.
//!
//! That goes by page frames, which `/proc/self/pagemap` has. Marking clears the access flags of the host's tables and, by
//! KVM, of the guest's, and flushes no TLB.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;

use serde::Serialize;

use super::idle::Idle;
use super::options::{Config, Options};
use super::{READ, Results, WRITE};
use crate::check::{Check, Findings};
use crate::contents;
use crate::failure::Failure;
use crate::guest::Pass;
use crate::kvm;
use crate::kvm::memory::Memory;
use crate::kvm::stage::{Ended, Stage};
use crate::kvm::vcpu::{Order, Vcpu};
use crate::kvm::vm::{Plan, Reach};
use crate::layout::Layout;
use crate::report::Report;
use crate::{config, output};

/// Where the kernel says which page frames are idle, a bit each.
const IDLE: &str = "/sys/kernel/mm/page_idle/bitmap";
/// Bits of an entry of a page map: there is a page, and its frame.
const PRESENT: u64 = 1 << 63;
const FRAME: u64 = (1 << 55) - 1;

/// What `--check` found.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Found {
    /// Guest pages that were looked at.
    pages: u64,
    /// Loads that did not return what a guest had stored there.
    wrong_loads: u64,
    /// Pages of host memory that do not hold what was stored last.
    misplaced: u64,
}

impl Findings for Found {
    const CLEAN: &'static str = "nothing misplaced";

    fn compared(&self) -> String {
        format!("{} pages", self.pages)
    }

    fn wrong(&self) -> Vec<(u64, &'static str)> {
        vec![
            (self.wrong_loads, "loads did not return what was stored last"),
            (self.misplaced, "pages of host memory do not hold what was stored last"),
        ]
    }
}

/// Runs the workload and prints its report.
///
/// # Errors
/// See [`Failure`].
pub(super) fn run(options: &Options) -> Result<(), Failure> {
    let Some(chosen) = config::choose(&options.memory)? else { return Ok(()) };
    kvm::check_mode(chosen.1)?;
    let (kvm, machine) = kvm::open(&options.machine)?;
    let tracker = Tracker::new()?;
    let mut options = options.clone();
    options.machine = machine;
    let (layout, mut config) = options.settle(chosen)?;
    config.flush = false;
    let memory = Memory::new(layout.host_size, config.guest.backing)?;
    let vcpus = config.guest.vcpus;
    let accesses = layout.part(0).count() as u64 * u64::from(vcpus) * 5;
    let stage = Stage::new(&kvm, Plan::new(vcpus, Reach::of(&layout)), accesses)?;
    let (ended, (idle, warnings)) = stage.play(|stage| {
        let (idle, warnings) = (Vec::new(), Vec::new());
        let (layout, config, memory) = (&layout, &config, &memory);
        let mut run = Run { layout, config, memory, tracker: &tracker, stage, idle, warnings };
        run.all()?;
        Ok((run.idle, run.warnings))
    })?;
    let Ended { phases, counters, vcpus } = ended;
    let found = Found {
        pages: layout.guest_pages(),
        wrong_loads: vcpus.iter().map(Vcpu::wrong_loads).sum(),
        misplaced: contents::misplaced(&memory, &layout, &[]),
    };
    let mut notes = config.guest.notes(&layout);
    notes.extend(warnings);
    let marked = (1..).zip(&idle).map(|(n, idle)| format!("Mark memory idle {n}: {idle}"));
    let report = Report {
        workload: "access-tracking",
        backend: "kvm",
        host: Some(kvm::facts()),
        notes,
        summary: marked.collect(),
        check: config.guest.check.then_some(Check { found, rules: None }),
        config,
        counters,
        phases,
        results: Results { idle },
    };
    output::print(&report, &options.output)
}

/// A run in progress.
struct Run<'a, 'r> {
    layout: &'a Layout,
    config: &'a Config,
    memory: &'a Memory,
    tracker: &'a Tracker,
    stage: &'r mut Stage,
    idle: Vec<Idle>,
    warnings: Vec<String>,
}

impl Run<'_, '_> {
    fn all(&mut self) -> Result<(), Failure> {
        self.stage.vm.set_slots(self.layout, self.memory, false)?;
        self.access("populate", WRITE)?;
        self.access("write", WRITE)?;
        self.access("read", READ)?;
        self.mark_idle(1)?;
        self.access("write-idle", WRITE)?;
        self.mark_idle(2)?;
        self.access("read-idle", READ)
    }

    /// A phase in which every vCPU uses each of its pages.
    fn access(&mut self, name: &'static str, pass: Pass) -> Result<(), Failure> {
        let (layout, check) = (self.layout, self.config.guest.check);
        self.stage.order(name, None, |index| Order::pass(layout, index, pass, check))
    }

    /// Marks all pages idle, after it was seen which are so still.
    fn mark_idle(&mut self, iteration: u32) -> Result<(), Failure> {
        let mut all = Idle::default();
        let broken = |error: io::Error| Failure::Run(format!("idle pages: {error}"));
        let Self { layout, memory, tracker, .. } = *self;
        let mut frames = Vec::new();
        for vcpu in 0..self.config.owners() {
            let part = layout.part(vcpu);
            let of_part = tracker.frames(memory, part.start..part.end).map_err(broken)?;
            let idle = tracker.look(&of_part).map_err(broken)?;
            idle.check_mapped(vcpu)?;
            match idle.check_used(vcpu) {
                // As in the kernel's test: TLBs of a hypervisor below keep what they have.
                Err(why) if is_guest() => self.warnings.push(format!(
                    "{why}; this host is a guest itself, so that idle memory was not measured"
                )),
                checked => checked.map_err(Failure::Run)?,
            }
            all += idle;
            frames.extend(of_part.into_iter().flatten());
        }
        all.cleared = frames.len() as u64;
        self.stage.step("mark-idle", Some(iteration), |_| tracker.mark(&frames).map_err(broken))?;
        self.idle.push(all);
        Ok(())
    }
}

/// Whether this computer is a guest itself.
fn is_guest() -> bool {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    text.lines().any(|line| line.starts_with("flags") && line.contains(" hypervisor"))
}

/// The two files.
struct Tracker {
    idle: File,
    frames: File,
}

impl Tracker {
    /// # Errors
    /// [`Failure::Missing`]: this kernel does not tell.
    fn new() -> Result<Self, Failure> {
        let missing = |path: &str, error: io::Error| {
            Failure::Missing(format!(
                "{path}: {error}; a kernel with CONFIG_IDLE_PAGE_TRACKING has it, for root"
            ))
        };
        let idle = OpenOptions::new().read(true).write(true).open(IDLE);
        let idle = idle.map_err(|error| missing(IDLE, error))?;
        let map = "/proc/self/pagemap";
        let frames = File::open(map).map_err(|error| missing(map, error))?;
        Ok(Self { idle, frames })
    }

    /// The frames of pages of memory; none where there is no page.
    fn frames(&self, memory: &Memory, pages: std::ops::Range<u64>) -> io::Result<Vec<Option<u64>>> {
        let first = memory.address() / 4096 + pages.start;
        let mut bytes = vec![0; 8 * (pages.end - pages.start) as usize];
        self.frames.read_exact_at(&mut bytes, 8 * first)?;
        let entry = |bytes: &[u8]| u64::from_ne_bytes(std::array::from_fn(|byte| bytes[byte]));
        let frame = |entry| (entry & PRESENT != 0 && entry & FRAME != 0).then_some(entry & FRAME);
        Ok(bytes.chunks_exact(8).map(|bytes| frame(entry(bytes))).collect())
    }

    /// Which of them are idle.
    fn look(&self, frames: &[Option<u64>]) -> io::Result<Idle> {
        let mut all = Idle { pages: frames.len() as u64, ..Idle::default() };
        for frame in frames {
            let Some(frame) = frame else {
                all.unmapped += 1;
                continue;
            };
            let mut word = [0; 8];
            self.idle.read_exact_at(&mut word, frame / 64 * 8)?;
            all.still_idle += u64::from_ne_bytes(word) >> (frame % 64) & 1;
        }
        Ok(all)
    }

    fn mark(&self, frames: &[u64]) -> io::Result<()> {
        frames.iter().try_for_each(|frame| {
            let word = 1u64 << (frame % 64);
            self.idle.write_all_at(&word.to_ne_bytes(), frame / 64 * 8)
        })
    }
}
