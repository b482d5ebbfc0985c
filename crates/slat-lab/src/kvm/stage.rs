//! What every workload plays on: a VM, the threads of its vCPUs, and a count of what each phase took.

use std::time::{Duration, Instant};

use kvm_ioctls::Kvm;

use super::crew::{Crew, PATIENCE, Trouble};
use super::ring::Ring;
use super::stats::{KvmCounts, Statistics};
use super::vcpu::{Order, Vcpu};
use super::vm::{Plan, Vm};
use crate::failure::Failure;
use crate::progress::Progress;
use crate::report::Phase;

/// What is done while a vCPU waits because its dirty ring is full.
type Full<'a> = dyn FnMut(&Vm, &mut [Ring]) -> Result<(), Failure> + 'a;

/// A VM whose vCPUs wait for their first order.
#[derive(Debug)]
pub(crate) struct Stage {
    /// Before the VM, so that it ends first.
    pub(crate) crew: Crew,
    pub(crate) vm: Vm,
    /// The vCPUs' dirty rings, if the VM has any.
    pub(crate) rings: Vec<Ring>,
    statistics: Statistics,
    progress: Progress,
    phase: String,
    phases: Vec<Phase<KvmCounts>>,
    /// Statistics when the last phase ended.
    before: KvmCounts,
}

/// What is left when the vCPUs have ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) phases: Vec<Phase<KvmCounts>>,
    /// Of all phases together.
    pub(crate) counters: KvmCounts,
    pub(crate) vcpus: Vec<Vcpu>,
}

impl From<Trouble> for Failure {
    fn from(trouble: Trouble) -> Self {
        Self::Run(trouble.to_string())
    }
}

impl Stage {
    /// A VM as planned, without memslots. `accesses` is how many there will be, for the bar.
    ///
    /// # Errors
    /// What the host has not, or refuses.
    pub(crate) fn new(kvm: &Kvm, plan: Plan, accesses: u64) -> Result<Self, Failure> {
        super::capability::BINARY_STATS_FD.require(kvm)?;
        let (ring_entries, pinning) = (plan.dirty_ring, plan.pinning.clone());
        if let Some(pinning) = &pinning {
            pinning.pin_main().map_err(Failure::Run)?;
        }
        let vm = Vm::new(kvm, plan)?;
        let vcpus = vm.vcpus()?;
        let rings =
            ring_entries.map(|entries| vcpus.iter().map(|vcpu| vcpu.ring(entries)).collect());
        let rings = rings.unwrap_or_else(|| Ok(Vec::new()));
        let rings = rings.map_err(|error| Failure::Run(format!("a dirty ring: {error}")))?;
        let statistics = Statistics::new(&vm, &vcpus)?;
        let before = statistics.read()?;
        let crew = Crew::start(vcpus, pinning.as_ref(), PATIENCE)?;
        let (progress, phases) = (Progress::new(accesses), Vec::new());
        let phase = "set-up".to_owned();
        Ok(Self { crew, vm, rings, statistics, progress, phase, phases, before })
    }

    /// Does `play`, and says of what went wrong in which phase that was.
    ///
    /// # Errors
    /// What `play` returned.
    pub(crate) fn play<R>(
        mut self,
        play: impl FnOnce(&mut Self) -> Result<R, Failure>,
    ) -> Result<(Ended, R), Failure> {
        let played = play(&mut self).map_err(|failure| match failure {
            Failure::Run(why) => Failure::Run(format!("{why} (in phase {})", self.phase)),
            failure => failure,
        })?;
        let Self { crew, phases, .. } = self;
        let mut counters = KvmCounts::default();
        phases.iter().for_each(|phase| counters.add(&phase.counters));
        Ok((Ended { phases, counters, vcpus: crew.dismiss() }, played))
    }

    /// A phase in which every vCPU follows an order. `full` empties the dirty rings when one is full.
    ///
    /// # Errors
    /// A vCPU that could not go on, or what `full` returned.
    pub(crate) fn order(
        &mut self,
        name: &'static str,
        iteration: Option<u32>,
        order: impl Fn(u32) -> Order,
    ) -> Result<(), Failure> {
        self.order_with(name, iteration, order, &mut |_, _| Ok(()))
    }

    /// As [`order`](Self::order), where rings may be full: `full` is given VM and rings then.
    ///
    /// # Errors
    /// As [`order`](Self::order), or what `full` returned.
    pub(crate) fn order_with(
        &mut self,
        name: &'static str,
        iteration: Option<u32>,
        order: impl Fn(u32) -> Order,
        full: &mut Full<'_>,
    ) -> Result<(), Failure> {
        self.begin(name, iteration);
        let start = self.crew.tell(order);
        let end = self.wait_with(full)?;
        self.end(name, iteration, end - start)
    }

    /// Waits until all vCPUs have done what they were told.
    ///
    /// # Errors
    /// A vCPU that could not go on.
    pub(crate) fn wait(&mut self) -> Result<Instant, Failure> {
        self.wait_with(&mut |_, _| Ok(()))
    }

    /// As [`wait`](Self::wait), where rings may be full.
    ///
    /// # Errors
    /// A vCPU that could not go on, or what `full` returned.
    pub(crate) fn wait_with(&mut self, full: &mut Full<'_>) -> Result<Instant, Failure> {
        let Self { crew, vm, rings, progress, .. } = self;
        crew.wait(&mut |accesses| progress.set(accesses), &mut || full(vm, rings))
    }

    /// A phase in which the hypervisor does something.
    ///
    /// # Errors
    /// What `step` returned.
    pub(crate) fn step<R>(
        &mut self,
        name: &'static str,
        iteration: Option<u32>,
        step: impl FnOnce(&mut Self) -> Result<R, Failure>,
    ) -> Result<R, Failure> {
        self.begin(name, iteration);
        let start = Instant::now();
        let done = step(self)?;
        self.end(name, iteration, start.elapsed())?;
        Ok(done)
    }

    /// A phase begins.
    pub(crate) fn begin(&mut self, name: &'static str, iteration: Option<u32>) {
        self.progress.phase(name, iteration);
        self.phase = match iteration {
            Some(iteration) => format!("{name} {iteration}"),
            None => name.to_owned(),
        };
    }

    /// Notes a phase that took so long, with everything that was done since the one before.
    ///
    /// # Errors
    /// [`Failure::Run`]: statistics that cannot be read; or somebody asked for the end.
    pub(crate) fn end(
        &mut self,
        name: &'static str,
        iteration: Option<u32>,
        took: Duration,
    ) -> Result<(), Failure> {
        let now = self.statistics.read()?;
        self.phases.push(Phase::new(name, iteration, took, now.since(&self.before)));
        self.before = now;
        self.crew.look_up()?;
        Ok(())
    }
}
