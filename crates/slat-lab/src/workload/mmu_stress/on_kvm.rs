//! The workload on this host's own KVM. Stores tell their page, so that the host can see what is where; the guest's pages are
//! the largest that fit, as in the kernel's test.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::Instant;

use serde::Serialize;

use super::guest::is_deleted;
use super::options::{Config, Options};
use super::summary;
use crate::check::{Check, Findings};
use crate::contents::Words;
use crate::failure::Failure;
use crate::guest::page_of;
use crate::kvm;
use crate::kvm::memory::Memory;
use crate::kvm::stage::{Ended, Stage};
use crate::kvm::vcpu::{IfRefused, Order, Stop};
use crate::kvm::vm::{self, Plan, Reach, Slot};
use crate::layout::Layout;
use crate::report::Report;
use crate::{guest_mode, output};

/// Sizes that guest pages can have.
const PAGES: [u64; 3] = [1 << 30, 2 << 20, 4096];

/// What was found.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Found {
    /// Guest pages that were written.
    pages: u64,
    /// Writes to read-only memory that failed.
    refused: u64,
    /// Pages of host memory that changed while they were read-only.
    changed: u64,
    /// Pages of host memory that do not hold what was stored there through any slot.
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
            (self.changed, "pages of host memory changed while they were read-only"),
            (self.misplaced, "pages of host memory do not hold what was stored there"),
            (self.misled, "accesses after slots were deleted and memory unmapped went wrong"),
        ]
    }
}

/// Runs the workload and prints its report.
///
/// # Errors
/// See [`Failure`].
pub(super) fn run(options: &Options) -> Result<(), Failure> {
    let Some(mode) = output::chosen(options.mode, guest_mode::list)? else { return Ok(()) };
    kvm::check_mode(mode)?;
    let (kvm, machine) = kvm::open(&options.machine)?;
    let mut options = options.clone();
    options.machine = machine;
    let (layout, config) = options.settle(mode)?;
    vm::check_slots(&kvm, config.slots)?;
    let mut memory = Memory::new(layout.host_size, config.guest.backing)?;
    let (gpa, size) = (layout.gpa, layout.size);
    let page = PAGES.into_iter().find(|page| (gpa | size).is_multiple_of(*page)).unwrap_or(4096);
    let plan = Plan::new(config.guest.vcpus, Reach { gpa, size, page });
    let stage = Stage::new(&kvm, plan, config.pages() * 4)?;
    let (ended, mut found) = stage.play(|stage| {
        let mut run = Run { layout: &layout, config: &config, memory: &mut memory, stage };
        run.all()
    })?;
    let Ended { phases, counters, .. } = ended;
    found.pages = config.pages();
    let report = Report {
        workload: "mmu-stress",
        backend: "kvm",
        host: Some(kvm::facts()),
        notes: config.guest.notes(&layout),
        summary: vec![summary(&phases)],
        config,
        counters,
        phases,
        results: (),
        check: Some(Check { found, rules: None }),
    };
    output::print(&report, &options.output)
}

/// A run in progress.
struct Run<'a, 'r> {
    layout: &'a Layout,
    config: &'a Config,
    memory: &'a mut Memory,
    stage: &'r mut Stage,
}

impl Run<'_, '_> {
    fn all(&mut self) -> Result<Found, Failure> {
        for id in 1..=self.config.slots {
            self.stage.vm.set_slot(self.slot(id))?;
        }
        let mut found = Found::default();
        self.write("run1", IfRefused::Break)?;
        found.misplaced += self.misplaced();
        self.reset()?;
        self.write("run2", IfRefused::Break)?;
        found.misplaced += self.misplaced();
        (found.changed, found.refused) = self.read_only()?;
        self.writable()?;
        found.misplaced += self.misplaced();
        self.unmap()?;
        if self.config.guest.check {
            found.misled = self.probe()?;
        }
        Ok(found)
    }

    /// The memory of a slot; numbers begin at 1, as in the kernel's test.
    fn slot(&self, id: u32) -> Slot<'_> {
        let size = self.config.slot_size.0;
        let gpa = self.layout.gpa + u64::from(id - 1) * size;
        Slot { id: id - 1, gpa, size, memory: self.memory, offset: 0, logged: false }
    }

    /// What each vCPU does to its part.
    fn part(&self, order: fn(u64, u64, u64) -> Order) -> impl Fn(u32) -> Order + use<> {
        let (gpa, page) = (self.layout.gpa, self.layout.guest_page);
        let config = self.config.clone();
        move |index| {
            let Range { start, end } = config.part(index);
            order(gpa + start * page, page, end - start)
        }
    }

    fn write(&mut self, name: &'static str, if_refused: IfRefused) -> Result<(), Failure> {
        let part = self.part(Order::write);
        self.stage.order(name, None, |index| Order { if_refused, ..part(index) })
    }

    /// All vCPUs load their registers anew.
    fn reset(&mut self) -> Result<(), Failure> {
        self.stage.begin("reset", None);
        let failed = |error: kvm::Error| Stop::Broken(format!("its registers: {error}"));
        let start = self.stage.crew.set(|_| {
            Box::new(move |vcpu, _| {
                vcpu.reset().map_err(failed)?;
                vcpu.boot()
            })
        });
        let end = self.stage.wait()?;
        self.stage.end("reset", None, end - start)
    }

    /// Makes memory read-only while vCPUs read and then write it: how many pages changed afterwards, and how many
    /// writes failed.
    fn read_only(&mut self) -> Result<(u64, u64), Failure> {
        self.stage.begin("ro", None);
        let (read, write) = (self.part(Order::read), self.part(Order::write));
        let start = self.stage.crew.set(move |index| {
            let read = read(index);
            let if_refused = IfRefused::LeaveOut;
            let write = Order { forever: true, if_refused, ..write(index) };
            Box::new(move |vcpu, wait| {
                vcpu.follow(&read, wait)?;
                vcpu.follow(&write, wait)
            })
        });
        let part = self.config.part(0);
        let pages = part.end - part.start + 1;
        // They have read everything, and begun to write.
        self.stage.crew.wait_for_accesses(pages, &mut || Ok::<_, Failure>(()))?;
        self.set_writable(false)?;
        let before = self.words();
        // From the first write that fails, so must every one; each vCPU tries all its pages.
        self.stage.crew.wait_for_accesses(pages, &mut || Ok::<_, Failure>(()))?;
        self.stage.crew.stop();
        let end = self.stage.wait()?;
        let changed = before.iter().zip(self.words()).filter(|(before, now)| **before != *now);
        let changed = changed.count() as u64;
        self.stage.end("ro", None, end - start)?;
        Ok((changed, self.stage.crew.met().iter().map(|met| met.refused).sum()))
    }

    /// Makes memory writable while vCPUs try to write it.
    fn writable(&mut self) -> Result<(), Failure> {
        self.stage.begin("rw", None);
        let part = self.part(Order::write);
        let order = |index| Order { if_refused: IfRefused::Repeat, ..part(index) };
        let start = self.stage.crew.tell(order);
        self.set_writable(true)?;
        let end = self.stage.wait()?;
        self.stage.end("rw", None, end - start)
    }

    fn set_writable(&self, writable: bool) -> Result<(), Failure> {
        let failed = |error| Failure::Run(format!("the host's memory: {error}"));
        self.memory.set_writable(writable).map_err(failed)
    }

    /// Deletes the slots of even numbers and unmaps the first half of the host's memory.
    fn unmap(&mut self) -> Result<(), Failure> {
        self.stage.begin("unmap", None);
        let start = Instant::now();
        for id in (1..=self.config.slots).filter(|&id| is_deleted(id)) {
            self.stage.vm.set_slot(Slot { size: 0, ..self.slot(id) })?;
        }
        let unmapped = self.config.region().unmapped;
        if unmapped > 0 {
            let failed = |error: std::io::Error| Failure::Run(format!("unmapping: {error}"));
            self.memory.unmap(0..unmapped).map_err(failed)?;
        }
        self.stage.end("unmap", None, start.elapsed())
    }

    /// Tries each slot, whose memory is gone by half: how many accesses went wrong.
    fn probe(&mut self) -> Result<u64, Failure> {
        self.stage.begin("check", None);
        let (unmapped, page) = (self.config.region().unmapped, self.layout.guest_page);
        let slots: Vec<_> = (1..=self.config.slots)
            .map(|id| (is_deleted(id), self.slot(id).gpa, self.config.slot_size.0))
            .collect();
        let before = self.stage.crew.met()[0];
        let deleted = slots.iter().filter(|(deleted, ..)| *deleted).count() as u64;
        let refused = if unmapped > 0 { slots.len() as u64 - deleted } else { 0 };
        let start = self.stage.crew.set(move |index| {
            let slots = if index == 0 { slots.clone() } else { Vec::new() };
            Box::new(move |vcpu, wait| {
                for (deleted, gpa, size) in slots {
                    let first = Order {
                        absent: gpa..if deleted { gpa + size } else { gpa },
                        if_refused: IfRefused::LeaveOut,
                        ..Order::write(gpa, page, 1)
                    };
                    if deleted || unmapped > 0 {
                        vcpu.follow(&first, wait)?;
                    }
                    if !deleted {
                        let rest = (size - unmapped) / page;
                        vcpu.follow(&Order::read(gpa + unmapped, page, rest), wait)?;
                    }
                }
                Ok(())
            })
        });
        let end = self.stage.wait()?;
        let met = self.stage.crew.met()[0];
        self.stage.end("check", None, end - start)?;
        Ok(deleted.abs_diff(met.absent - before.absent)
            + refused.abs_diff(met.refused - before.refused))
    }

    /// The first word of every guest page's worth of host memory.
    fn words(&self) -> Vec<u64> {
        let offsets = (0..self.config.slot_size.0).step_by(self.layout.guest_page as usize);
        let words = offsets.filter_map(|offset| self.memory.word(offset));
        words.map(|word| word.load(Ordering::Relaxed)).collect()
    }

    /// Pages of host memory that do not hold what was stored there through one of the slots.
    fn misplaced(&self) -> u64 {
        let pages = self.config.slot_size.0 / self.layout.guest_page;
        let wrong = |&(page, word): &(u64, u64)| word == 0 || page_of(word) % pages != page;
        (0..).zip(self.words()).filter(wrong).count() as u64
    }
}
