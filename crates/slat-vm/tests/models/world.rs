//! One execution of a model: a machine, a VM with one slot, and who acts on it.
#![expect(unsafe_code, reason = "threads of loom borrow for 'static what outlives them by a join")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use loom::sync::atomic::AtomicU64;
use slat::{Gpa, GpaRange, Hpa, Lookup, Machine};
use slat_vm::sabotage::{Skip, leave_out};
use slat_vm::{
    Access, Exit, Fault, FaultKind, Host, HostError, HostPage, Hva, SlotConfig, Vcpu, Vm,
    VmOptions, Worker,
};

use crate::format::{PAGE, Tiny};
use crate::machine::Tables;

/// How a model is explored.
#[derive(Clone, Copy)]
pub(crate) struct Model {
    preemptions: usize,
    left_out: Option<Skip>,
    /// Hardware keeps dirty state.
    hardware: bool,
}

impl Model {
    /// At most two preemptions in an execution.
    pub(crate) fn new() -> Self {
        Self { preemptions: 2, left_out: None, hardware: false }
    }

    /// The same, while a step is left out.
    pub(crate) fn without(step: Skip) -> Self {
        Self { left_out: Some(step), ..Self::new() }
    }

    /// On a machine that keeps dirty state.
    pub(crate) fn hardware(self) -> Self {
        Self { hardware: true, ..self }
    }

    /// More of them, where that takes less than a minute, or where a variant needs them to fail.
    pub(crate) fn preemptions(self, preemptions: usize) -> Self {
        Self { preemptions, ..self }
    }

    /// Runs every execution of `model`.
    ///
    /// # Panics
    /// With the first violation, when its execution has ended.
    pub(crate) fn explore(self, model: impl Fn(World) + Send + Sync + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = builder.preemption_bound.max(Some(self.preemptions));
        builder.max_branches = 20_000;
        let executions = Arc::new(AtomicUsize::new(0));
        let (counted, began) = (executions.clone(), Instant::now());
        builder.check(move || {
            counted.fetch_add(1, Ordering::Relaxed);
            leave_out(self.left_out);
            let world = World::new(self.hardware);
            model(world);
            let verdict = world.end();
            leave_out(None);
            if let Some(violation) = verdict {
                panic!("in execution {}: {violation}", counted.load(Ordering::Relaxed));
            }
        });
        let executions = executions.load(Ordering::Relaxed);
        println!("{executions} executions, {:.1} s", began.elapsed().as_secs_f64());
    }
}

/// The host: page `n` of the slot is backed by its page `n`, until it moves page 0.
pub(crate) struct Memory {
    /// What backs page 0.
    first: AtomicU64,
}

impl Host for Memory {
    fn page(&self, hva: Hva, _: Access) -> Result<HostPage, HostError> {
        let output = match hva.0 / PAGE {
            0 => Hpa(self.first.load(Ordering::Acquire)),
            page => host(page),
        };
        Ok(HostPage { output, size: PAGE, writable: true, device: false })
    }
}

impl Memory {
    /// Backs page 0 with another page.
    pub(crate) fn move_first(&self, to: Hpa) {
        self.first.store(to.0, Ordering::Release);
    }
}

pub(crate) type TinyVm = Vm<'static, Tiny, Tables, Memory>;

/// A machine with one VM, for the threads of one execution.
#[derive(Clone, Copy)]
pub(crate) struct World {
    pub(crate) machine: &'static Tables,
    pub(crate) vm: &'static TinyVm,
}

/// The slot of every model: two pages at guest address 0.
pub(crate) const SLOT: u32 = 5;

impl World {
    fn new(hardware: bool) -> Self {
        let format = Tiny::levels(2);
        let format = if hardware { format.with_hardware_dirty() } else { format };
        let machine: &'static Tables = Box::leak(Box::new(Tables::new(format, 3, 1)));
        let memory = Memory { first: AtomicU64::new(host(0).0) };
        let dirty_ring = Some(4);
        let options = VmOptions { coherent_data: true, dirty_ring, ..VmOptions::default() };
        let vm = Box::leak(Box::new(Vm::new(machine, memory, format, 1, options).unwrap()));
        machine.set_root(vm.tree().root());
        let world = Self { machine, vm };
        let config = SlotConfig::new(Gpa(0), 2 * PAGE, Hva(0));
        vm.create_slot(&mut world.worker(), SLOT, config).unwrap();
        world
    }

    /// Frees everything; what went wrong.
    fn end(self) -> Option<String> {
        let (machine, vm) = (&raw const *self.machine, &raw const *self.vm);
        // SAFETY: `new` leaked these boxes; models join all their threads and drop what they made before they return.
        unsafe {
            drop(Box::from_raw(vm.cast_mut()));
            let verdict = (*machine).verdict();
            drop(Box::from_raw(machine.cast_mut()));
            verdict
        }
    }

    pub(crate) fn worker(self) -> Worker<'static, Tables> {
        self.vm.worker().unwrap()
    }

    /// The guest's CPU with its vCPU.
    pub(crate) fn guest(self) -> Guest {
        let kind = FaultKind::Translation;
        Guest { world: self, vcpu: self.vm.vcpu().unwrap(), kind, exits: 0 }
    }

    /// Remembers `what` as a violation, unless `holds`.
    pub(crate) fn expect(self, holds: bool, what: &str) {
        if !holds {
            self.machine.violation(what);
        }
    }

    /// Where page 0 is mapped to, and whether it may be written. Not while anybody changes it.
    pub(crate) fn mapped(self, worker: &Worker<'static, Tables>) -> Option<(Hpa, bool)> {
        match self.vm.tree().look_up(&worker.participant().pin(), Gpa(0)).unwrap() {
            Lookup::Mapped { output, template, .. } => {
                Some((output, self.vm.tree().attributes(template).write))
            }
            _ => None,
        }
    }

    /// Whether the CPU's TLB lets a write to page 0 through.
    pub(crate) fn writes_through(self) -> bool {
        self.machine.caches(Gpa(0), |cached| cached.writes())
    }
}

/// A vCPU on the only CPU.
pub(crate) struct Guest {
    pub(crate) world: World,
    pub(crate) vcpu: Vcpu<'static, Tables>,
    /// How it reports the faults of its writes.
    pub(crate) kind: FaultKind,
    exits: usize,
}

impl Guest {
    /// Runs on a thread of its own.
    pub(crate) fn spawn<T: Send + 'static>(
        mut self,
        act: impl FnOnce(&mut Self) -> T + Send + 'static,
    ) -> Running<T> {
        let act = move || {
            self.world.machine.run_cpu(0);
            let result = act(&mut self);
            (self, result)
        };
        Running(loom::thread::Builder::new().stack_size(0x8000).spawn(act).unwrap())
    }

    /// One fault at page 0.
    pub(crate) fn fault(&mut self, access: Access, kind: FaultKind) -> Exit {
        let fault = Fault { gpa: Gpa(0), access, kind };
        self.vcpu.fault(self.world.vm, fault).unwrap()
    }

    /// Stores to page 0, with faults handled: `with` gets the host address of the page when the store goes through.
    /// Whether it did, before it was an exit of another kind.
    pub(crate) fn write(&mut self, with: impl Fn(Hpa)) -> bool {
        while !self.world.machine.access(0, Gpa(0), true, &with) {
            self.exits += 1;
            if self.exits > 20 {
                self.world.machine.violation("a page faults for ever");
                return false;
            }
            match self.fault(Access::Write, self.kind) {
                Exit::Resume => {}
                Exit::Retry => self.world.machine.relax(),
                _ => return false,
            }
        }
        true
    }
}

/// A vCPU at work.
pub(crate) struct Running<T>(loom::thread::JoinHandle<(Guest, T)>);

impl<T> Running<T> {
    pub(crate) fn join(self) -> (Guest, T) {
        self.0.join().unwrap()
    }
}

pub(crate) fn range(page: u64, pages: u64) -> GpaRange {
    GpaRange::new(Gpa(page * PAGE), pages * PAGE).unwrap()
}

/// Page `number` of the host's memory; even ones are where blocks can begin.
pub(crate) fn host(number: u64) -> Hpa {
    Hpa((1 << 20) + number * PAGE)
}
