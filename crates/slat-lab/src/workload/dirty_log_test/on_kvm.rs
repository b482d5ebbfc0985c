//! The workload on this host's own KVM. Of all ways of logging, those that the host has not are told, with exit status 4.

use std::time::Duration;

use super::options::{Config, Options, Way};
use super::verify::{Collected, Verifier};
use super::{Found, Mode, Results};
use crate::check::Check;
use crate::failure::Failure;
use crate::kvm::memory::Memory;
use crate::kvm::ring::Ring;
use crate::kvm::stage::{Ended, Stage};
use crate::kvm::stats::KvmCounts;
use crate::kvm::vcpu::{Order, Vcpu};
use crate::kvm::vm::{Plan, Reach, Vm};
use crate::kvm::{self, Kvm};
use crate::layout::Layout;
use crate::report::{Phase, Report};
use crate::{config, output};

/// The number of the only slot.
const SLOT: u32 = 0;

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
    let mut found = Found { pages: layout.size / layout.page, ..Found::default() };
    let (mut phases, mut counters) = (Vec::new(), KvmCounts::default());
    let (mut results, mut missing) = (Results::default(), None);
    let mut notes = config.guest.notes(&layout);
    for &way in &config.log {
        match measure(&kvm, &layout, &config, way) {
            Ok((phase, mode)) => {
                counters.add(&phase.counters);
                phases.push(phase);
                found.add(&mode);
                results.modes.push(mode);
            }
            Err(Failure::Missing(why)) => {
                notes.push(format!("{}: {why}", way.name()));
                missing = Some(Failure::Missing(why));
            }
            Err(failure) => return Err(failure),
        }
    }
    let report = Report {
        workload: "dirty-log-test",
        backend: "kvm",
        host: Some(kvm::facts()),
        notes,
        summary: results.modes.iter().map(Mode::line).collect(),
        config,
        counters,
        phases,
        results,
        check: Some(Check { found, rules: None }),
    };
    if let Some(missing) = missing.take_if(|_| report.phases.is_empty()) {
        return Err(missing);
    }
    output::print(&report, &options.output)?;
    missing.map_or(Ok(()), Err)
}

/// One way of logging, on a VM of its own.
fn measure(
    kvm: &Kvm,
    layout: &Layout,
    config: &Config,
    way: Way,
) -> Result<(Phase<KvmCounts>, Mode), Failure> {
    let memory = Memory::new(layout.host_size, config.guest.backing)?;
    let plan = Plan {
        dirty_ring: (way == Way::DirtyRing).then_some(config.ring_entries),
        manual_protect: way == Way::ClearLog,
        seed: config.seed,
        ..Plan::new(config.guest.vcpus, Reach::of(layout))
    };
    let stage = Stage::new(kvm, plan, 0)?;
    let (ended, (verifier, mismatched, foreign)) = stage.play(|stage| {
        let verifier = Verifier::new(&memory, (layout.page, layout.slot_pages(), 1));
        let log = Collected::new(layout.slot_pages(), stage.rings.len());
        stage.vm.set_slots(layout, &memory, true)?;
        let mut run = Run { config, layout, way, log, verifier, mismatched: 0, foreign: 0 };
        run.all(stage)?;
        Ok((run.verifier, run.mismatched, run.foreign))
    })?;
    let Ended { mut phases, vcpus, .. } = ended;
    let phase = phases.pop().ok_or_else(|| Failure::Run("no round".to_owned()))?;
    let mode = Mode {
        mode: way,
        rounds: config.iterations - 1,
        writes: vcpus.iter().map(Vcpu::accesses).sum(),
        ring_full: vcpus.iter().map(|vcpu| vcpu.met().ring_full).sum(),
        mismatched,
        foreign,
        bits: verifier.bits(),
    };
    Ok((phase, mode))
}

/// A way of logging in progress.
struct Run<'a> {
    config: &'a Config,
    layout: &'a Layout,
    way: Way,
    log: Collected,
    verifier: Verifier<'a>,
    mismatched: u64,
    foreign: u64,
}

impl Run<'_> {
    fn all(&mut self, stage: &mut Stage) -> Result<(), Failure> {
        let name = self.way.name();
        stage.begin(name, None);
        let interval = Duration::from_millis(self.config.interval_milliseconds.into());
        let mut took = Duration::ZERO;
        for round in 1..u64::from(self.config.iterations) {
            let start = self.tell(stage, round);
            self.log.bitmap.fill(0);
            let Stage { crew, vm, rings, .. } = &mut *stage;
            crew.rest(interval, &mut || self.empty(vm, rings))?;
            self.collect(vm, rings)?;
            stage.crew.stop();
            // A vCPU whose ring is full now stops when it has room for its last store.
            let end = stage.wait_with(&mut |vm, rings| self.empty(vm, rings))?;
            took += end - start;
            self.verifier.compare(&self.log, round);
        }
        stage.end(name, None, took)?;
        self.log.bitmap.fill(0);
        self.collect(&stage.vm, &mut stage.rings)?;
        self.verifier.finish(&self.log);
        Ok(())
    }

    /// All guests store the number of the round in pages at random; in the first round each has all of its share first.
    fn tell(&self, stage: &mut Stage, round: u64) -> std::time::Instant {
        let (page, pages) = (self.layout.guest_page, self.layout.guest_pages());
        let (gpa, config) = (self.layout.gpa, self.config.clone());
        stage.crew.set(move |index| {
            let share = config.share(index, pages);
            let store = |first, count| Order {
                value: round,
                ..Order::write(gpa + first * page, page, count)
            };
            let first = store(share.start, share.end - share.start);
            let then = Order { random: true, forever: true, ..store(0, pages) };
            Box::new(move |vcpu, wait| {
                if round == 1 {
                    vcpu.follow(&first, wait)?;
                }
                vcpu.follow(&then, wait)
            })
        })
    }

    /// Puts what is in the log now into the collection.
    fn collect(&mut self, vm: &Vm, rings: &mut [Ring]) -> Result<(), Failure> {
        let pages = self.verifier.pages();
        match self.way {
            Way::DirtyRing => return self.empty(vm, rings),
            Way::ClearLog => {
                vm.dirty_log(SLOT, pages, &mut self.log.bitmap)?;
                vm.clear_dirty_log(SLOT, pages, &self.log.bitmap)?;
            }
            Way::DirtyLog | Way::Hardware => vm.dirty_log(SLOT, pages, &mut self.log.bitmap)?,
        }
        Ok(())
    }

    /// Takes all entries out of the rings, and has their pages protected again.
    fn empty(&mut self, vm: &Vm, rings: &mut [Ring]) -> Result<(), Failure> {
        let (pages, mut taken) = (self.verifier.pages(), 0);
        for (index, ring) in rings.iter_mut().enumerate() {
            taken += Vm::harvest(ring, |slot, page| {
                if slot == SLOT && page < pages {
                    self.log.add(page, index);
                } else {
                    self.foreign += 1;
                }
            });
        }
        self.mismatched += taken.abs_diff(vm.reset_rings()?);
        Ok(())
    }
}
