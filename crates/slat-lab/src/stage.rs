//! What every workload plays on: a VM on the model, the threads of its vCPUs, and a count of what each phase took.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use slat_model::{HostMemory, Model};
use slat_vm::{DirtyRing, Worker};

use crate::arch::Tables;
use crate::check::{Check, Rules};
use crate::crew::{Board, Crew, Guest, RunOn};
use crate::failure::Failure;
use crate::guest::{Order, Pass, Program};
use crate::layout::Layout;
use crate::model::{self, Equipment, ModelHost, ModelVcpu, ModelVm};
use crate::options::MachineOptions;
use crate::progress::Progress;
use crate::report::{Counters, Phase};

/// The machine and where guest memory lies.
#[derive(Clone, Copy)]
pub(crate) struct Ground<'a> {
    pub(crate) model: &'a Model,
    pub(crate) memory: &'a Arc<HostMemory>,
    pub(crate) layout: &'a Layout,
    pub(crate) machine: &'a MachineOptions,
}

/// A VM with its memslots, whose vCPUs wait for their first order.
pub(crate) struct Stage<'s, 'm, T: Tables, P: Guest = Program> {
    pub(crate) vm: &'s ModelVm<'m, T>,
    pub(crate) worker: Worker<'m, Model>,
    pub(crate) crew: Crew<'s, P>,
    /// The vCPUs' dirty rings, if the VM has any.
    pub(crate) rings: Vec<DirtyRing>,
    model: &'m Model,
    slots: u32,
    /// What workers other than `worker` have done so far, as the workload last said.
    pub(crate) others: Counters,
    progress: Progress,
    phases: Vec<Phase>,
    /// Counters when the last phase ended.
    before: Counters,
}

/// What is left when the vCPUs have ended.
pub(crate) struct Ended<R, P> {
    pub(crate) phases: Vec<Phase>,
    /// What the guests remember.
    pub(crate) programs: Vec<P>,
    /// What the workload returned.
    pub(crate) result: R,
}

impl<'m> Ground<'m> {
    /// Builds a VM with the memslots of the layout and one vCPU for each program, and lets `workload` play on it. The bar
    /// is full after `passes` passes.
    ///
    /// # Errors
    /// What the workload returned; [`Failure::Usage`] if such a VM cannot be had; [`Failure::Run`] if a vCPU broke
    /// off or there are not enough threads.
    pub(crate) fn play<T: Tables, P, R>(
        self,
        programs: Vec<P>,
        passes: u32,
        workload: impl FnOnce(&mut Stage<'_, 'm, T, P>) -> Result<R, Failure>,
    ) -> Result<Ended<R, P>, Failure>
    where
        P: for<'v> RunOn<ModelVcpu<'v, 'm, T>>,
    {
        self.play_on(ModelHost::of(self.memory), programs, passes, workload)
    }

    /// As [`play`](Self::play), with guest memory from a host of its own, whose addresses are offsets into it.
    ///
    /// # Errors
    /// As [`play`](Self::play).
    pub(crate) fn play_on<T: Tables, P, R>(
        self,
        equipment: impl Into<Equipment>,
        programs: Vec<P>,
        passes: u32,
        workload: impl FnOnce(&mut Stage<'_, 'm, T, P>) -> Result<R, Failure>,
    ) -> Result<Ended<R, P>, Failure>
    where
        P: for<'v> RunOn<ModelVcpu<'v, 'm, T>>,
    {
        self.play_without_slots(equipment, programs, passes, |stage| {
            model::create_slots(stage.vm, &mut stage.worker, self.layout)?;
            stage.before = stage.counters();
            workload(stage)
        })
    }

    /// As [`play_on`](Self::play_on), for workloads that create the memslots.
    ///
    /// # Errors
    /// As [`play`](Self::play).
    pub(crate) fn play_without_slots<T: Tables, P, R>(
        self,
        equipment: impl Into<Equipment>,
        programs: Vec<P>,
        passes: u32,
        workload: impl FnOnce(&mut Stage<'_, 'm, T, P>) -> Result<R, Failure>,
    ) -> Result<Ended<R, P>, Failure>
    where
        P: for<'v> RunOn<ModelVcpu<'v, 'm, T>>,
    {
        let Self { model, layout, machine, .. } = self;
        let broken = |error: &dyn std::error::Error| Failure::Run(error.to_string());
        let mut equipment = equipment.into();
        let pinning = equipment.pinning.take();
        if let Some(pinning) = &pinning {
            pinning.pin_main().map_err(Failure::Run)?;
        }
        let vm = model::vm::<T>(model, equipment, layout, machine)?;
        let worker = vm.worker().map_err(|error| broken(&error))?;
        let accesses: u64 = programs.iter().map(Guest::accesses).sum();
        let board = Board::new(programs.len(), model.is_checked()).pinned(pinning);
        let vcpu = |(index, program)| {
            let mut vcpu = ModelVcpu::new(&vm, index)?;
            if machine.exits {
                vcpu.note_exits();
            }
            Ok((vcpu, program))
        };
        let vcpus = programs.into_iter().enumerate().map(vcpu);
        let vcpus = vcpus.collect::<Result<Vec<_>, Failure>>()?;
        let rings = vcpus.iter().filter_map(|(vcpu, _)| vcpu.dirty_ring()).collect();
        thread::scope(|scope| {
            let crew = Crew::start(scope, &board, vcpus);
            let crew =
                crew.map_err(|error| Failure::Run(format!("no thread for a vCPU: {error}")))?;
            let progress = Progress::new(accesses * u64::from(passes));
            let (phases, others, before) = (Vec::new(), Counters::default(), Counters::default());
            let slots = layout.slots;
            let vm = &vm;
            let mut stage =
                Stage { vm, worker, crew, rings, model, slots, others, progress, phases, before };
            stage.before = stage.counters();
            let played = workload(&mut stage);
            let Stage { crew, phases, .. } = stage;
            let result = played.map_err(|failure| self.blame(failure))?;
            let programs = crew.dismiss().map_err(|stopped| self.blame(stopped.into()))?;
            Ok(Ended { phases, programs, result })
        })
    }

    /// What was found, with what the machine's own checker says.
    pub(crate) fn judge<F>(self, found: F) -> Check<F> {
        let violation = self.model.violation().map(|report| report.to_string());
        let rules = Rules { violations: self.model.violations(), violation };
        Check { found, rules: Some(rules) }
    }

    /// A run that broke off after a rule was broken broke off because of that.
    fn blame(self, failure: Failure) -> Failure {
        match self.model.violation() {
            Some(report) => Failure::Run(format!("{failure}\nafter a rule was broken: {report}")),
            None => failure,
        }
    }
}

impl<T: Tables, P: Guest<Order = Order>> Stage<'_, '_, T, P> {
    /// A phase in which every vCPU makes one pass.
    ///
    /// # Errors
    /// A vCPU that could not go on.
    pub(crate) fn pass(
        &mut self,
        name: &'static str,
        iteration: Option<u32>,
        pass: Pass,
    ) -> Result<(), Failure> {
        self.order(name, iteration, Order::Pass(pass))
    }
}

impl<'m, T: Tables, P: Guest> Stage<'_, 'm, T, P> {
    /// A phase in which every vCPU does what it is told.
    ///
    /// # Errors
    /// A vCPU that could not go on.
    pub(crate) fn order(
        &mut self,
        name: &'static str,
        iteration: Option<u32>,
        order: P::Order,
    ) -> Result<(), Failure> {
        self.begin(name, iteration);
        let start = self.crew.tell(order);
        let end = self.crew.wait(|done| self.progress.set(done))?;
        self.end(name, iteration, end - start);
        Ok(())
    }

    /// A phase in which the hypervisor does something to each memslot in turn.
    ///
    /// # Errors
    /// What `step` returned.
    pub(crate) fn each_slot<E>(
        &mut self,
        name: &'static str,
        iteration: Option<u32>,
        mut step: impl FnMut(&ModelVm<'m, T>, &mut Worker<'m, Model>, u32) -> Result<(), E>,
    ) -> Result<(), E> {
        let slots = self.slots;
        self.step(name, iteration, |vm, worker| (0..slots).try_for_each(|id| step(vm, worker, id)))
    }

    /// A phase in which the hypervisor does something.
    ///
    /// # Errors
    /// What `step` returned.
    pub(crate) fn step<E>(
        &mut self,
        name: &'static str,
        iteration: Option<u32>,
        step: impl FnOnce(&ModelVm<'m, T>, &mut Worker<'m, Model>) -> Result<(), E>,
    ) -> Result<(), E> {
        self.begin(name, iteration);
        let start = Instant::now();
        step(self.vm, &mut self.worker)?;
        self.end(name, iteration, start.elapsed());
        Ok(())
    }

    /// Shows that a phase begins.
    pub(crate) fn begin(&self, name: &'static str, iteration: Option<u32>) {
        self.progress.phase(name, iteration);
    }

    /// Notes a phase that took so long, with everything that was done since the one before.
    pub(crate) fn end(&mut self, name: &'static str, iteration: Option<u32>, took: Duration) {
        let now = self.counters();
        let exits = self.crew.take_exits();
        let phase = Phase::new(name, iteration, took, now - self.before);
        self.phases.push(Phase { exits, ..phase });
        self.before = now;
    }

    /// Counts for the last phase what vCPUs did that ran on meanwhile, and what other workers did.
    pub(crate) fn settle(&mut self) {
        let now = self.counters();
        if let Some(phase) = self.phases.last_mut() {
            phase.counters = phase.counters + (now - self.before);
            if let Some(exits) = self.crew.take_exits() {
                phase.exits.get_or_insert_default().add(&exits);
            }
        }
        self.before = now;
    }

    fn counters(&self) -> Counters {
        model::counters(self.model, &self.worker) + self.crew.counters() + self.others
    }
}
