//! The vCPU loop: into the guest, out of it, and what is done about why it came out.

use slat_metal::options::Clock;
use slat_metal::report::Counters;
use slat_vm::{Exit, Fault, Vcpu};

use crate::arch::{Arch, Here, Left};
use crate::console;
use crate::guest::{Guest, Private};
use crate::machine::{METAL, Metal};
use crate::watchdog::Watchdog;

/// A vCPU on the CPU that has made it.
pub(crate) struct Runner<'g> {
    guest: &'g Guest,
    vcpu: Vcpu<'static, Metal>,
    registers: <Here as Arch>::Vcpu,
    root: u64,
    watchdog: Watchdog,
    /// Whether somebody counts the instructions that the engine takes for faults, and how many they were.
    counts: bool,
    engine: u64,
}

impl<'g> Runner<'g> {
    /// vCPU `index`, which has come to its first call.
    pub(crate) fn new(guest: &'g Guest, index: usize) -> Self {
        let Some(private) = guest.privates.get(index) else {
            console::fail(format_args!("the guest has no vCPU {index}"))
        };
        let vcpu = guest.vm.vcpu().unwrap_or_else(|error| console::fail(format_args!("{error}")));
        METAL.runs_here(vcpu.participant().index());
        Here::prepare_cpu(guest.vm.tree().format());
        let mut runner = Self {
            guest,
            vcpu,
            registers: Here::vcpu(&private.start()),
            root: guest.vm.tree().root_register(),
            watchdog: Watchdog::new(private.mailbox(), guest.options.watchdog),
            counts: guest.options.clock == Clock::Instructions,
            engine: 0,
        };
        runner.map_private(private);
        guest.rings.lock().rings.extend(runner.vcpu.dirty_ring());
        runner.run();
        runner
    }

    /// Runs the guest until it calls.
    pub(crate) fn run(&mut self) {
        self.watchdog.start();
        loop {
            match self.enter() {
                Left::Fault(fault) => self.fault(fault),
                Left::Call => return,
                Left::Interrupt => self.watchdog.look(),
                Left::Other { reason, at } => {
                    console::fail(format_args!("the guest left at {at:#x} because of {reason:#x}"))
                }
            }
        }
    }

    #[inline(always)]
    fn enter(&mut self) -> Left {
        if METAL.drops_invalidations() {
            // Past the gate: nobody asks it to invalidate.
            return Here::enter(&mut self.registers, self.root);
        }
        loop {
            // Whatever is asked of it besides invalidations, it has done so by being outside.
            if let Ok(_inside) = self.vcpu.enter(&self.guest.vm) {
                return Here::enter(&mut self.registers, self.root);
            }
        }
    }

    #[inline(always)]
    fn fault(&mut self, fault: Fault) {
        let start = if self.counts { Here::instructions() } else { 0 };
        let exit = self.vcpu.fault(&self.guest.vm, fault);
        if self.counts {
            self.engine += Here::instructions() - start;
        }
        match exit {
            Ok(Exit::Resume) => {}
            Ok(Exit::Retry) => core::hint::spin_loop(),
            Ok(Exit::DirtyRingFull) => self.empty_ring(),
            Ok(exit) => console::fail(format_args!("{fault:?}: the guest has no {exit:?}")),
            Err(error) => console::fail(format_args!("{fault:?}: {error}")),
        }
    }

    #[cold]
    fn empty_ring(&mut self) {
        let Some(ring) = self.vcpu.dirty_ring() else { return };
        if let Err(error) = self.guest.rings.lock().empty(&self.guest.vm, &ring) {
            console::fail(format_args!("a dirty ring: {error}"));
        }
    }

    /// So that what the program needs for itself is in no count.
    fn map_private(&mut self, private: &Private) {
        let mut rest = private.range();
        while let Some(range) = rest {
            let mapped = self.vcpu.pre_fault(&self.guest.vm, range, || true);
            if let Some(error) = mapped.stopped {
                console::fail(format_args!("the guest's own memory: {error}"));
            }
            rest = mapped.rest;
        }
    }

    /// What it has done.
    pub(crate) fn counters(&self) -> Counters {
        let engine = engine(&self.vcpu.participant().counters);
        Counters { faults: self.vcpu.statistics().faults, ..engine }
    }

    /// Instructions that the engine has taken for its faults.
    pub(crate) fn engine_instructions(&self) -> u64 {
        self.engine
    }
}

/// What a participant has counted itself.
pub(crate) fn engine(counters: &slat::rcu::Counters) -> Counters {
    Counters {
        splits: counters.splits.get(),
        collapses: counters.collapses.get(),
        entries_visited: counters.visited.get(),
        ..Counters::default()
    }
}
