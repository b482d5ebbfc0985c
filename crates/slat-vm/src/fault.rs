//! The fault path: from an access that the tables do not permit to an entry that does, or to an exit.
//!
//! # The order
//! Sample the count of ended invalidations (rule 7). Find the slot, in a pin, and copy out what is needed. Ask the host
//! for the page; it may block. Choose the leaf. Do the cache maintenance. Top up the reserve. Pin. Check that the slot
//! is the version that was copied (rule 10), and that the host has taken nothing of it back (rule 7). Install. Mark the
//! page in the log, in the same pin, after the entry is writable (rule 8). Unpin, and let the guest run.
//!
//! What cannot be decided here and now sends the guest back to fault again, if it still does. Nothing on this path waits
//! for another thread, and nothing is shared with another vCPU but the entry and the word of the log.

use slat::{Error, Format, Installed, Leaf, Level, Lookup, Machine, Template};

use crate::leaf::Wanted;
use crate::progress::Sample;
use crate::sabotage::{Skip, skips};
use crate::slot::{Facts, Version};
use crate::vcpu::VcpuStatistics;
use crate::{
    Abort, Access, Exit, Fault, FaultError, FaultKind, Host, HostError, HostPage, Mmio, ReadOnly,
    Vcpu, Vm,
};

/// Everything that was decided before the pin in which the entry changes.
struct Plan {
    sample: Sample,
    facts: Facts,
    wanted: Wanted,
    template: Template,
    writable: bool,
    write: bool,
}

/// What is to be done about a fault.
enum Decision {
    Install(Plan),
    Exit(Exit),
}

/// How an attempt to install ended.
enum Step {
    Done(Installed, Level),
    /// The guest goes back.
    Retry,
    /// More tables are needed.
    Tables(usize),
    /// Too many tables wait to be freed.
    Reclaim,
    Failed(Error),
}

impl<'m, M: Machine> Vcpu<'m, M> {
    /// Handles a fault of this vCPU. May block in [`Host::page`] and in [`Machine::allocate`]; otherwise waits for
    /// nobody, unless so many tables wait to be freed that it has to help, with a grace period.
    ///
    /// Costs, besides those two, two pins, a search among the slots (none if it is the slot of the fault before), one
    /// descent and one exchange.
    ///
    /// # Errors
    /// [`FaultError`]: the guest cannot go on; nothing has changed.
    pub fn fault<F: Format, H: Host>(
        &mut self,
        vm: &Vm<'m, F, M, H>,
        fault: Fault,
    ) -> Result<Exit, FaultError> {
        vm.admit(self.participant.machine())?;
        self.statistics.faults += 1;
        let result = self.handle(vm, &fault);
        let VcpuStatistics { retried, mmio, aborted, failed, .. } = &mut self.statistics;
        match result {
            Ok(Exit::Resume) => {}
            Ok(Exit::Retry) => *retried += 1,
            Ok(Exit::Mmio(_)) => *mmio += 1,
            Ok(Exit::Abort(_)) => *aborted += 1,
            Err(_) => *failed += 1,
        }
        result
    }

    fn handle<F: Format, H: Host>(
        &mut self,
        vm: &Vm<'m, F, M, H>,
        fault: &Fault,
    ) -> Result<Exit, FaultError> {
        let limit = vm.tree().geometry().limit();
        if fault.gpa >= limit {
            return Ok(Exit::Abort(Abort::AddressSize { limit }));
        }
        if fault.kind == FaultKind::AccessFlag {
            match vm.tree().mark_young(&self.participant.pin(), fault.gpa) {
                Ok(true) => {
                    self.statistics.young += 1;
                    return Ok(Exit::Resume);
                }
                Ok(false) => {}
                Err(Error::Retry) => return Ok(Exit::Retry),
                Err(error) => return Err(FaultError::Tree(error)),
            }
        }
        loop {
            let plan = match self.decide(vm, fault)? {
                Decision::Install(plan) => plan,
                Decision::Exit(exit) => return Ok(exit),
            };
            match self.install(vm, &plan) {
                Step::Done(installed, level) => {
                    self.count(installed);
                    tell_host(vm, &plan, level);
                    return Ok(Exit::Resume);
                }
                Step::Retry => return Ok(Exit::Retry),
                Step::Tables(tables) => {
                    // One table a level is enough to go on, also where a block could be split further at once.
                    let have = self.reserve.len();
                    let want = tables.min(levels_below_root(vm)).max(have + 1);
                    self.reserve.top_up(want).map_err(FaultError::NoMemory)?;
                }
                Step::Reclaim => {
                    vm.tree().reclaim(&mut self.participant);
                    return Ok(Exit::Retry);
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
    ) -> Result<Decision, FaultError> {
        let &Fault { gpa, access, kind } = fault;
        // Rule 7: before the slot is read and the host is asked.
        let sample = vm.progress.sample();
        let mmio = |slot| Ok(Decision::Exit(Exit::Mmio(Mmio { gpa, access, slot })));
        let facts = {
            let pin = self.participant.pin();
            vm.slots.read(&pin)?.find(gpa, &mut self.hit).map(|version| version.facts())
        };
        let Some(facts) = facts else { return mmio(None) };
        let hva = facts.hva_of(gpa);
        let write = access == Access::Write;
        if write && facts.read_only {
            return mmio(Some(ReadOnly { id: facts.id, hva }));
        }
        let page = match vm.host.page(hva, access) {
            Ok(page) => page,
            Err(HostError::Again) => return Ok(Decision::Exit(Exit::Retry)),
            Err(error) => return Err(FaultError::Host { gpa, hva, error }),
        };
        if page.device && access == Access::Execute {
            return Ok(Decision::Exit(Exit::Abort(Abort::ExecuteDevice)));
        }
        let wanted = Wanted::new(vm.tree().format(), &facts, gpa, &page);
        let wanted = wanted.filter(|_| page.writable || !write);
        let wanted = wanted.ok_or(FaultError::HostPage(page))?;
        // Under a log, a page that is only read stays read-only, so that its first write is noticed.
        let writable = page.writable && !facts.read_only && (write || !facts.logged);
        let template = vm.template(page.device, writable, access);
        self.maintain_caches(vm, &wanted, &page, access, kind);
        // Failing here is no failure yet: the entry may need no table.
        let _ = self.reserve.top_up(levels_below_root(vm));
        Ok(Decision::Install(Plan { sample, facts, wanted, template, writable, write }))
    }

    /// Before the page can be seen by the guest at all, and before it can be executed.
    fn maintain_caches<F: Format, H: Host>(
        &self,
        vm: &Vm<'m, F, M, H>,
        wanted: &Wanted,
        page: &HostPage,
        access: Access,
        kind: FaultKind,
    ) {
        if page.device {
            return;
        }
        let geometry = vm.tree().geometry();
        let (output, size) = (wanted.leaf_output(geometry), geometry.size(wanted.level));
        if !vm.options.coherent_data {
            // After a permission fault the page is mapped already, and so is the rest of the leaf, unless the leaf is
            // larger than the one that is there.
            let mapped = kind == FaultKind::Permission && {
                let found = vm.tree().look_up(&self.participant.pin(), wanted.gpa);
                matches!(found, Ok(Lookup::Mapped { output, level, .. })
                    if output == wanted.output && level <= wanted.level)
            };
            if !mapped {
                vm.machine().clean_data(output, size);
            }
        }
        if access == Access::Execute && !vm.options.coherent_instructions {
            vm.machine().sync_instructions(output, size);
        }
    }

    /// One pin: check, install, mark.
    fn install<F: Format, H: Host>(&mut self, vm: &Vm<'m, F, M, H>, plan: &Plan) -> Step {
        let geometry = *vm.tree().geometry();
        let mut wanted = plan.wanted;
        let pin = self.participant.pin();
        // Rule 10: the version that the plan was made from is still there, and stays for as long as the pin.
        let found = vm.slots.read(&pin).ok().and_then(|map| map.find(wanted.gpa, &mut self.hit));
        let current = |version: &&Version| version.number == plan.facts.version;
        let Some(version) = found.filter(|version| current(version) || skips(Skip::Version)) else {
            return Step::Retry;
        };
        loop {
            let Some(range) = wanted.range(&geometry) else { return Step::Retry };
            // Rule 7. A block of which the host takes back another part is not installed, but the page may be.
            if !vm.progress.untouched(&pin, plan.sample, range) && !skips(Skip::Untouched) {
                if wanted.level == Level::LAST {
                    return Step::Retry;
                }
                wanted.level = Level::LAST;
                continue;
            }
            let output = wanted.leaf_output(&geometry);
            let leaf =
                Leaf { gpa: range.start(), level: wanted.level, output, template: plan.template };
            // Rule 8: a page is marked after its entry is writable, also if another vCPU made it so and has not marked
            // it yet.
            let log = version.log.as_ref().filter(|_| plan.facts.logged);
            let page = (wanted.gpa.0 - version.range.start().0) >> F::PAGE_SHIFT;
            let mark = || log.is_some_and(|log| log.bitmap.mark(page));
            if skips(Skip::MarkLast) && plan.write {
                mark();
            }
            match vm.tree().install(&pin, &mut self.reserve, &leaf) {
                Ok(installed) => {
                    let dirty = match installed {
                        Installed::Replaced { dirty } | Installed::Collapsed { dirty } => dirty,
                        _ => false,
                    };
                    if (plan.write || dirty) && !skips(Skip::MarkLast) && mark() {
                        self.statistics.marked += 1;
                    }
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

    fn count(&mut self, installed: Installed) {
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

fn levels_below_root<F: Format, M: Machine, H: Host>(vm: &Vm<'_, F, M, H>) -> usize {
    vm.tree().geometry().start().height() as usize
}

fn tell_host<F: Format, M: Machine, H: Host>(vm: &Vm<'_, F, M, H>, plan: &Plan, level: Level) {
    let geometry = vm.tree().geometry();
    let wanted = Wanted { level, ..plan.wanted };
    if let Some(range) = wanted.range(geometry) {
        let hva = plan.facts.hva_of(range.start());
        vm.host.accessed(hva, range.size());
        if plan.writable {
            vm.host.dirtied(hva, range.size());
        }
    }
}
