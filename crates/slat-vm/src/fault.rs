//! The fault path: from an access that the tables do not permit to an entry that does, or to an exit.
//!
//! # The order
//! Sample the count of ended invalidations (rule 7). Find the slot, in a pin, and copy out what is needed. Ask the host
//! for the page; it may block. Choose the leaf. Do the cache maintenance. Top up the reserve. Pin. Check that the slot
//! is the version that was copied (rule 10), and that the host has taken nothing of it back (rule 7). Install. Mark the
//! page in the log, in the same pin, after the entry is writable (rule 8). Unpin, and let the guest run. A write to a
//! page that is mapped and known to be writable in the host takes the short way in `fast.rs`.
//!
//! What cannot be decided here and now sends the guest back to fault again, if it still does. Nothing on this path waits
//! for another thread, and nothing is shared with another vCPU but the entry and the word of the log.

use slat::{Error, Format, Gpa, Installed, Leaf, Level, Lookup, Machine, Pin, Template};

use crate::chunks::At;
use crate::fast::Fast;
use crate::hands::Hands;
use crate::leaf::Wanted;
use crate::log::Mark;
use crate::progress::{Sample, Touch};
use crate::sabotage::{Skip, skips};
use crate::slot::{Facts, Version};
use crate::template::LeafKind;
use crate::vcpu::VcpuStatistics;
use crate::{
    Abort, Access, Exit, Fault, FaultError, FaultKind, Host, HostError, HostPage, HvaRange, Mmio,
    ReadOnly, Vm,
};

/// How the mapping of a page is asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Purpose {
    /// Whether the access says that it is one to private or to shared memory.
    pub(crate) private: Option<bool>,
    /// Nobody has accessed the page yet: its access flag stays clear where hardware sets it.
    pub(crate) ahead: bool,
}

/// Everything that was decided before the pin in which the entry changes.
pub(crate) struct Plan {
    pub(crate) sample: Sample,
    pub(crate) facts: Facts,
    pub(crate) wanted: Wanted,
    template: Template,
    writable: bool,
    write: bool,
}

/// What is to be done about a fault.
pub(crate) enum Decision {
    Install(Plan),
    Exit(Exit),
}

/// How an attempt to install ended.
pub(crate) enum Step {
    Done(Installed, Level),
    /// The guest goes back.
    Retry,
    /// There is no place in the dirty ring.
    RingFull,
    /// More tables are needed.
    Tables(usize),
    /// Too many tables wait to be freed.
    Reclaim,
    Failed(Error),
}

impl<'m, M: Machine> Hands<'m, M> {
    pub(crate) fn fault<F: Format, H: Host>(
        &mut self,
        vm: &Vm<'m, F, M, H>,
        fault: &Fault,
        purpose: Purpose,
    ) -> Result<Exit, FaultError> {
        vm.admit_hands(self)?;
        self.statistics.faults += 1;
        let result = self.handle(vm, fault, purpose);
        let VcpuStatistics { retried, mmio, converted, ring_full, aborted, failed, .. } =
            &mut self.statistics;
        match result {
            Ok(Exit::Resume) => {}
            Ok(Exit::Retry) => *retried += 1,
            Ok(Exit::Mmio(_)) => *mmio += 1,
            Ok(Exit::Convert { .. }) => *converted += 1,
            Ok(Exit::DirtyRingFull) => *ring_full += 1,
            Ok(Exit::Abort(_)) => *aborted += 1,
            Err(_) => *failed += 1,
        }
        match result {
            Ok(Exit::Resume) if self.ring_is_full() => Ok(Exit::DirtyRingFull),
            result => result,
        }
    }

    /// Whether the vCPU must not enter the guest before its ring is reset.
    pub(crate) fn ring_is_full(&self) -> bool {
        self.ring.as_ref().is_some_and(|ring| ring.is_full())
    }

    fn handle<F: Format, H: Host>(
        &mut self,
        vm: &Vm<'m, F, M, H>,
        fault: &Fault,
        purpose: Purpose,
    ) -> Result<Exit, FaultError> {
        let limit = vm.tree().geometry().limit();
        if fault.gpa >= limit {
            return Ok(Exit::Abort(Abort::AddressSize { limit }));
        }
        match fault.kind {
            FaultKind::AccessFlag if purpose.private.is_none() => {
                if let Some(exit) = self.set_young(vm, fault)? {
                    return Ok(exit);
                }
            }
            FaultKind::Permission if fault.access == Access::Write && purpose.private.is_none() => {
                match self.write_fast(vm, fault.gpa) {
                    Fast::Done(installed, hva) => {
                        self.count(installed);
                        self.statistics.fast += u64::from(installed == Installed::Relaxed);
                        vm.host.accessed(hva, 1 << F::PAGE_SHIFT);
                        vm.host.dirtied(hva, 1 << F::PAGE_SHIFT);
                        return Ok(Exit::Resume);
                    }
                    Fast::Retry => return Ok(Exit::Retry),
                    Fast::No => {}
                }
            }
            _ => {}
        }
        Ok(match self.map_one(vm, fault, purpose)? {
            Ok(_) => Exit::Resume,
            Err(exit) => exit,
        })
    }

    /// An access-flag fault; `None` if there is no leaf any more.
    fn set_young<F: Format, H: Host>(
        &mut self,
        vm: &Vm<'m, F, M, H>,
        fault: &Fault,
    ) -> Result<Option<Exit>, FaultError> {
        for tree in vm.trees(self.space) {
            match tree.mark_young(&self.participant.pin(), fault.gpa) {
                Ok(true) => {
                    self.statistics.young += 1;
                    return Ok(Some(Exit::Resume));
                }
                Ok(false) => {}
                Err(Error::Retry) => return Ok(Some(Exit::Retry)),
                Err(error) => return Err(FaultError::Tree(error)),
            }
        }
        Ok(None)
    }

    /// Maps what the access needs, and for an access that was made also what lies round it: the level that the leaf has,
    /// or the exit that it is instead.
    pub(crate) fn map_one<F: Format, H: Host>(
        &mut self,
        vm: &Vm<'m, F, M, H>,
        fault: &Fault,
        purpose: Purpose,
    ) -> Result<Result<Level, Exit>, FaultError> {
        loop {
            // By reference: a plan is not copied about.
            let mut decided = self.decide(vm, fault, purpose);
            let plan = match &mut decided {
                Ok(Decision::Install(plan)) => plan,
                Ok(Decision::Exit(exit)) => return Ok(Err(*exit)),
                Err(error) => return Err(*error),
            };
            match self.install(vm, plan) {
                Step::Done(installed, level) => {
                    plan.wanted.level = level;
                    tell_host(vm, plan);
                    if !purpose.ahead {
                        self.count(installed);
                        if vm.options.fault_around > 1 || vm.options.adaptive_around.is_some() {
                            self.map_around(vm, fault, plan);
                        }
                    }
                    return Ok(Ok(level));
                }
                Step::Retry => return Ok(Err(Exit::Retry)),
                Step::RingFull => return Ok(Err(Exit::DirtyRingFull)),
                Step::Tables(tables) => {
                    // One table a level is enough to go on, also where a block could be split further at once.
                    let have = self.reserve.len();
                    let want = tables.min(levels_below_root(vm)).max(have + 1);
                    self.reserve.top_up(want).map_err(FaultError::NoMemory)?;
                }
                Step::Reclaim => {
                    for tree in vm.trees(self.space) {
                        tree.reclaim(&mut self.participant);
                    }
                    return Ok(Err(Exit::Retry));
                }
                Step::Failed(error) => return Err(FaultError::Tree(error)),
            }
        }
    }

    /// Everything before the pin: slot, host page, leaf, cache maintenance, tables.
    fn decide<F: Format, H: Host>(
        &mut self,
        vm: &Vm<'m, F, M, H>,
        fault: &Fault,
        purpose: Purpose,
    ) -> Result<Decision, FaultError> {
        let &Fault { gpa, access, kind } = fault;
        // Rule 7: before the slot is read and the host is asked.
        let sample = vm.progress.sample();
        let exit = |exit| Ok(Decision::Exit(exit));
        let mmio = |slot| exit(Exit::Mmio(Mmio { gpa, access, slot }));
        let found = {
            let pin = self.participant.pin();
            let version = vm.slots.read(&pin)?.find(self.space, gpa, &mut self.hit);
            version.map(|version| facts_at::<F>(version, gpa))
        };
        let Some((facts, private)) = found else { return mmio(None) };
        if purpose.private.is_some_and(|wanted| wanted != private) {
            return exit(Exit::Convert { gpa, private: !private });
        }
        let hva = facts.hva_of(gpa);
        let write = access == Access::Write;
        if write && facts.read_only {
            return mmio(Some(ReadOnly { id: facts.id, hva }));
        }
        let page = match vm.host.page(hva, access) {
            Ok(page) => page,
            Err(HostError::Again) => return exit(Exit::Retry),
            Err(error) => return Err(FaultError::Host { gpa, hva, error }),
        };
        if page.device && access == Access::Execute {
            return exit(Exit::Abort(Abort::ExecuteDevice));
        }
        let wanted = Wanted::new(vm.tree().format(), &facts, gpa, &page);
        let wanted = wanted.filter(|_| page.writable || !write);
        let wanted = wanted.ok_or(FaultError::HostPage(page))?;
        let bits = vm.tree().format().output_bits();
        if page.output.0.checked_add(page.size).is_none_or(|end| end > 1 << bits) {
            return Err(FaultError::Tree(Error::OutputTooLarge { bits }));
        }
        // Under a log, a page that is only read stays read-only, so that its first write is noticed.
        let permitted = page.writable && !facts.read_only;
        let writable = permitted && (write || !facts.protects());
        let template = vm.template(LeafKind {
            device: page.device,
            write: writable,
            host_writable: permitted && !page.device,
            execute: access == Access::Execute || vm.options.coherent_instructions,
            old: purpose.ahead && vm.tree().format().sets_accessed(),
        });
        self.maintain_caches(vm, &wanted, &page, access, kind);
        // Failing here is no failure yet: the entry may need no table.
        let _ = self.reserve.top_up(levels_below_root(vm));
        Ok(Decision::Install(Plan { sample, facts, wanted, template, writable, write }))
    }

    /// Before the page can be seen by the guest at all, and before it can be executed.
    #[inline]
    fn maintain_caches<F: Format, H: Host>(
        &self,
        vm: &Vm<'m, F, M, H>,
        wanted: &Wanted,
        page: &HostPage,
        access: Access,
        kind: FaultKind,
    ) {
        let fetches = access == Access::Execute && !vm.options.coherent_instructions;
        if page.device || vm.options.coherent_data && !fetches {
            return;
        }
        let geometry = vm.tree().geometry();
        let (output, size) = (wanted.leaf_output(geometry), geometry.size(wanted.level));
        if !vm.options.coherent_data {
            // After a permission fault the page is mapped already, and so is the rest of the leaf, unless the leaf is
            // larger than the one that is there.
            let mapped = kind == FaultKind::Permission
                && vm.trees(self.space).iter().any(|tree| {
                    let found = tree.look_up(&self.participant.pin(), wanted.gpa);
                    matches!(found, Ok(Lookup::Mapped { output, level, .. })
                        if output == wanted.output && level <= wanted.level)
                });
            if !mapped {
                vm.machine().clean_data(output, size);
            }
        }
        if fetches {
            vm.machine().sync_instructions(output, size);
        }
    }

    /// One pin: check, install, mark.
    fn install<F: Format, H: Host>(&mut self, vm: &Vm<'m, F, M, H>, plan: &Plan) -> Step {
        let Self { participant, reserve, space, hit, ring, statistics, .. } = self;
        let pin = participant.pin();
        // Rule 10: the version that the plan was made from is still there, and stays for as long as the pin.
        let Some(version) = current(vm, &pin, *space, plan, hit) else { return Step::Retry };
        // Rule 8: a page is marked after its entry is writable, also if another vCPU made it so and has not marked it
        // yet.
        let log = version.writes().filter(|_| plan.facts.log.is_some());
        // What another leaf takes the place of may be dirty from before the slot became read-only.
        let before = version.log.as_ref();
        let before =
            before.map(|log| Mark::new(log, version, plan.wanted.gpa, F::PAGE_SHIFT, ring));
        let mark = log.map(|log| Mark::new(log, version, plan.wanted.gpa, F::PAGE_SHIFT, ring));
        if mark.as_ref().is_some_and(|mark| plan.write && !mark.has_room()) {
            return Step::RingFull;
        }
        let mut wanted = plan.wanted;
        let touch = |wanted: &Wanted| plan.touch(wanted, vm.tree().geometry());
        loop {
            // Rule 7. A block of which the host takes back another part is not installed, but the page may be.
            let untouched = vm.progress.untouched(&pin, plan.sample, || touch(&wanted));
            if !untouched && !skips(Skip::Untouched) {
                if wanted.level == Level::LAST {
                    return Step::Retry;
                }
                wanted.level = Level::LAST;
                continue;
            }
            let Some(leaf) = plan.leaf(&wanted, vm.tree().geometry()) else { return Step::Retry };
            if let (true, true, Some(mark)) = (skips(Skip::MarkLast), plan.write, &mark) {
                mark.written(Installed::New);
            }
            let Some(tree) = vm.trees(*space).first() else { return Step::Retry };
            match tree.install(&pin, reserve, &leaf) {
                Ok(installed) => {
                    let write = plan.write && !skips(Skip::MarkLast);
                    let written = mark.is_some_and(|mark| write && mark.written(installed));
                    let taken = before.is_some_and(|mark| mark.taken(installed));
                    statistics.marked += u64::from(written || taken);
                    return Step::Done(installed, wanted.level);
                }
                Err(Error::Level(_)) if wanted.level < Level::LAST => {
                    wanted.level = wanted.level.below();
                }
                Err(Error::Retry) => return Step::Retry,
                Err(Error::NeedTables { tables, .. }) => return Step::Tables(tables),
                Err(Error::Backlog) => return Step::Reclaim,
                Err(error) => return Step::Failed(error),
            }
        }
    }

    pub(crate) fn count(&mut self, installed: Installed) {
        match installed {
            Installed::Present => self.statistics.spurious += 1,
            Installed::Collapsed { .. } => {
                self.statistics.fixed += 1;
                self.statistics.collapsed += 1;
            }
            _ => self.statistics.fixed += 1,
        }
    }
}

/// The version that a plan was made from, if it is still there.
pub(crate) fn current<'p, F: Format, M: Machine, H: Host>(
    vm: &'p Vm<'_, F, M, H>,
    pin: &'p Pin<'_, M>,
    space: u16,
    plan: &Plan,
    hit: &mut At,
) -> Option<&'p Version> {
    let found = vm.slots.read(pin).ok()?.find(space, plan.wanted.gpa, hit);
    found.filter(|version| version.number == plan.facts.version || skips(Skip::Version))
}

/// What is needed of a slot for the page at `gpa`, and whether the page is private.
pub(crate) fn facts_at<F: Format>(version: &Version, gpa: Gpa) -> (Facts, bool) {
    let mut facts = version.facts();
    let Some(pages) = &version.private else { return (facts, false) };
    let page = version.page_of(gpa, F::PAGE_SHIFT);
    let limit = 1 << (2 * F::INDEX_BITS);
    let (private, uniform) = pages.around(page, gpa.0 >> F::PAGE_SHIFT, limit);
    if let (true, Some(hva)) = (private, version.config.private) {
        facts.hva = hva;
    }
    facts.uniform = uniform << F::PAGE_SHIFT;
    (facts, private)
}

#[inline]
fn levels_below_root<F: Format, M: Machine, H: Host>(vm: &Vm<'_, F, M, H>) -> usize {
    vm.tree().geometry().start().height() as usize
}

impl Plan {
    /// What a leaf of the wanted level would map.
    #[inline]
    pub(crate) fn touch(&self, wanted: &Wanted, geometry: &slat::Geometry) -> Option<Touch> {
        let guest = wanted.range(geometry)?;
        let host = HvaRange::new(self.facts.hva_of(guest.start()), guest.size())?;
        Some(Touch { guest, host })
    }

    #[inline]
    fn leaf(&self, wanted: &Wanted, geometry: &slat::Geometry) -> Option<Leaf> {
        let gpa = wanted.range(geometry)?.start();
        let (level, output) = (wanted.level, wanted.leaf_output(geometry));
        Some(Leaf { gpa, level, output, template: self.template })
    }
}

#[inline]
fn tell_host<F: Format, M: Machine, H: Host>(vm: &Vm<'_, F, M, H>, plan: &Plan) {
    if let Some(touch) = plan.touch(&plan.wanted, vm.tree().geometry()) {
        let (hva, size) = (touch.host.start(), touch.host.size());
        vm.host.accessed(hva, size);
        if plan.writable {
            vm.host.dirtied(hva, size);
        }
    }
}
