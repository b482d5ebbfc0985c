//! What a workload runs on: the model machine, its host memory, a VM with memslots, and vCPUs whose loads and stores
//! go through TLB and tables to that memory.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use slat::{Gpa, GpaRange, Hpa, Machine};
use slat_model::{Architecture, Cpu, Features, HostMemory, HostMemoryError, Model, OnViolation};
use slat_vm::{
    Access, DirtyRing, Exit, FaultError, Host, HostError, HostPage, Hva, PreFault, SlotConfig,
    Vcpu, Vm, VmOptions, Worker,
};

use crate::arch::Tables;
use crate::around::Around;
use crate::config::GuestConfig;
use crate::crew;
use crate::exits::Exits;
use crate::failure::Failure;
use crate::guest::GuestMemory;
use crate::layout::Layout;
use crate::options::MachineOptions;
use crate::pinning::Pinning;
use crate::report::{Counters, Invalidations};

const MAX_TABLES: u32 = 1 << 24;
/// Participants besides vCPUs.
const WORKERS: usize = 2;
/// The VMID of the only guest.
const VMID: u16 = 1;

/// A VM on the model.
pub(crate) type ModelVm<'m, T> = Vm<'m, T, Model, ModelHost>;

/// The machine for a layout, and its host memory.
///
/// # Errors
/// [`Failure::Usage`] if there is not so much memory, or not of this backing.
pub(crate) fn machine(
    layout: &Layout,
    options: &MachineOptions,
    config: &GuestConfig,
) -> Result<(Model, Arc<HostMemory>), Failure> {
    machine_for(layout, options, config, 0)
}

/// As [`machine`], with places for so many more workers than a workload has by itself.
///
/// # Errors
/// As [`machine`].
pub(crate) fn machine_for(
    layout: &Layout,
    options: &MachineOptions,
    config: &GuestConfig,
    workers: u32,
) -> Result<(Model, Arc<HostMemory>), Failure> {
    let vcpus = config.vcpus;
    let features = Features { fwb: options.fwb, ..Features::default() };
    let model = Model::builder()
        .architecture(options.arch().of_model())
        .page_shift(layout.page.ilog2())
        .cpus(vcpus as usize)
        .slots(vcpus as usize + WORKERS + workers as usize)
        .table_limit(table_limit(layout, vcpus + workers))
        .features(features)
        .checked(config.check)
        .on_violation(OnViolation::Record)
        .build()
        .map_err(|error| Failure::Run(error.to_string()))?;
    let memory = model.host_memory(layout.host_size, config.backing.of_model(layout.granule));
    let memory = memory.map_err(|error| match error {
        HostMemoryError::System(_) => Failure::Run(error.to_string()),
        HostMemoryError::NotEnough { wanted, available } => Failure::Usage(format!(
            "{} MiB of guest memory are more than this computer has: {} MiB are available; \
             -v and -b choose how much",
            wanted >> 20,
            available >> 20
        )),
        _ => Failure::Usage(error.to_string()),
    })?;
    Ok((model, memory))
}

/// Enough tables to map everything by pages twice over, as while tables wait to be freed, and for every reserve; but
/// no more than memory of any real size needs.
fn table_limit(layout: &Layout, participants: u32) -> u32 {
    let covered = layout.page * (layout.page / 8);
    let tables = layout.size.div_ceil(covered).saturating_mul(3);
    let tables = tables.saturating_add(8192 + 64 * u64::from(participants));
    u32::try_from(tables).unwrap_or(MAX_TABLES).min(MAX_TABLES)
}

/// What a VM has that only some workloads need.
pub(crate) struct Equipment {
    pub(crate) host: ModelHost,
    /// Entries of each vCPU's dirty ring.
    pub(crate) dirty_ring: Option<u32>,
    /// Hardware keeps dirty state in the entries.
    pub(crate) hardware_dirty: bool,
    /// How far a fault maps round its page, if the host has anything there at hand.
    pub(crate) around: Option<Around>,
    /// Where the threads stay.
    pub(crate) pinning: Option<Pinning>,
}

impl From<ModelHost> for Equipment {
    /// Neither rings nor dirty state, the engine's own window, and threads that go where they like.
    fn from(host: ModelHost) -> Self {
        Self { host, dirty_ring: None, hardware_dirty: false, around: None, pinning: None }
    }
}

/// The VM, without memslots.
///
/// # Errors
/// [`Failure::Usage`] if tables of this shape cannot be had.
pub(crate) fn vm<'m, T: Tables>(
    model: &'m Model,
    equipment: Equipment,
    layout: &Layout,
    options: &MachineOptions,
) -> Result<ModelVm<'m, T>, Failure> {
    let usage = |error: &dyn std::error::Error| Failure::Usage(error.to_string());
    let Equipment { host, dirty_ring, hardware_dirty, around, .. } = equipment;
    let format = T::tables(layout.ipa_bits, options, hardware_dirty);
    let format = format.map_err(|error| usage(&error))?;
    let eager_split = layout.eager_split.chunk().map(|chunk| chunk.0);
    // On x86 no guest bypasses the caches, nor has any of its own for instructions.
    let x86 = T::ARCHITECTURE != Architecture::Arm;
    let (coherent_data, coherent_instructions) = (options.fwb || x86, x86);
    let options = VmOptions {
        eager_split,
        coherent_data,
        coherent_instructions,
        dirty_ring,
        ..VmOptions::default()
    };
    let entries = (layout.page / 8) as u32;
    let options = around.map_or(options, |around| around.options(entries, options));
    Vm::new(model, host, format, VMID, options).map_err(|error| usage(&error))
}

/// Gives the guest its memory, slot by slot; slot `n` has number `n`.
///
/// # Errors
/// [`Failure::Usage`] if a slot cannot be of this size.
pub(crate) fn create_slots<'m, T: Tables>(
    vm: &ModelVm<'m, T>,
    worker: &mut Worker<'m, Model>,
    layout: &Layout,
) -> Result<(), Failure> {
    let size = layout.slot_size();
    for id in 0..layout.slots {
        let offset = u64::from(id) * size;
        let config = SlotConfig::new(Gpa(layout.gpa + offset), size, Hva(offset));
        vm.create_slot(worker, id, config).map_err(|error| Failure::Usage(error.to_string()))?;
    }
    Ok(())
}

/// Whoever answers for the guest's memory.
pub(crate) struct ModelHost(Arc<dyn Host + Send + Sync>);

impl ModelHost {
    /// A host of this kind.
    pub(crate) fn new(host: impl Host + Send + 'static) -> Self {
        Self(Arc::new(host))
    }

    /// A host that others look at too.
    pub(crate) fn shared(host: Arc<impl Host + Send + 'static>) -> Self {
        Self(host)
    }

    /// A host that gives every page of `memory` at once.
    pub(crate) fn of(memory: &Arc<HostMemory>) -> Self {
        Self::new(HostPages { memory: Arc::clone(memory) })
    }
}

impl fmt::Debug for ModelHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ModelHost")
    }
}

impl Host for ModelHost {
    fn page(&self, hva: Hva, access: Access) -> Result<HostPage, HostError> {
        self.0.page(hva, access)
    }

    fn present(&self, hva: Hva) -> Option<HostPage> {
        self.0.present(hva)
    }

    fn dirtied(&self, hva: Hva, size: u64) {
        self.0.dirtied(hva, size);
    }

    fn accessed(&self, hva: Hva, size: u64) {
        self.0.accessed(hva, size);
    }
}

/// Host memory that is always there. A host address is an offset into it.
#[derive(Debug)]
struct HostPages {
    memory: Arc<HostMemory>,
}

impl Host for HostPages {
    fn page(&self, hva: Hva, _access: Access) -> Result<HostPage, HostError> {
        page(&self.memory, hva)
    }
}

/// The page of `memory` that backs a host address.
///
/// # Errors
/// [`HostError::NotMapped`] beyond its end.
pub(crate) fn page(memory: &HostMemory, hva: Hva) -> Result<HostPage, HostError> {
    let page = memory.page(hva.0).ok_or(HostError::NotMapped)?;
    let output = Hpa(page.hpa.0 & !(page.size - 1));
    Ok(HostPage { output, size: page.size, writable: true, device: false })
}

/// A fault of the model as the fault path takes it; `None` if it is none that a hypervisor mends.
pub(crate) fn fault(fault: slat_model::Fault) -> Option<slat_vm::Fault> {
    let kind = match fault.kind {
        slat_model::FaultKind::Translation { .. } => slat_vm::FaultKind::Translation,
        slat_model::FaultKind::Permission { .. } => slat_vm::FaultKind::Permission,
        slat_model::FaultKind::AccessFlag { .. } => slat_vm::FaultKind::AccessFlag,
        _ => return None,
    };
    let access = match fault.access {
        slat_model::Access::Read => Access::Read,
        slat_model::Access::Write => Access::Write,
        slat_model::Access::Execute => Access::Execute,
    };
    Some(slat_vm::Fault { gpa: fault.gpa, access, kind })
}

/// A vCPU: a CPU of the model, and what the hypervisor keeps for it.
#[derive(Debug)]
pub(crate) struct ModelVcpu<'a, 'm, T: Tables> {
    vm: &'a ModelVm<'m, T>,
    cpu: Cpu<'m>,
    vcpu: Vcpu<'m, Model>,
    /// The CPU knows whose gate it is behind.
    attended: bool,
    /// What it left the guest for since that was last asked, if anybody asks.
    exits: Option<Box<Exits>>,
}

/// Why a guest's access could not be completed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Broken {
    #[error(transparent)]
    Fault(#[from] FaultError),
    #[error("a fault of the guest that no hypervisor mends: {0:?}")]
    Hardware(slat_model::Fault),
    #[error("the access has no memory behind it: {0:?}")]
    Exit(Exit),
}

impl<'a, 'm, T: Tables> ModelVcpu<'a, 'm, T> {
    /// vCPU `index`, on the CPU of that number.
    ///
    /// # Errors
    /// [`Failure::Run`] if the CPU is taken or the machine has no place for another participant.
    pub(crate) fn new(vm: &'a ModelVm<'m, T>, index: usize) -> Result<Self, Failure> {
        let vcpu = vm.vcpu().map_err(|error| Failure::Run(error.to_string()))?;
        let tree = vm.tree();
        let cpu = vm.machine().cpu(index, T::control_of(tree));
        let cpu = cpu.ok_or_else(|| Failure::Run(format!("the machine has no CPU {index}")))?;
        Ok(Self { vm, cpu, vcpu, attended: false, exits: None })
    }

    /// Notes from now on what it leaves the guest for.
    pub(crate) fn note_exits(&mut self) {
        self.exits = Some(Box::default());
    }

    /// Maps memory ahead of any access, as far as `go_on` agrees.
    pub(crate) fn pre_fault(&mut self, range: GpaRange, go_on: impl FnMut() -> bool) -> PreFault {
        self.vcpu.pre_fault(self.vm, range, go_on)
    }

    /// Its dirty ring, if the VM has any.
    pub(crate) fn dirty_ring(&self) -> Option<DirtyRing> {
        self.vcpu.dirty_ring()
    }

    /// Whether the guest must not be entered before the dirty ring was reset.
    pub(crate) fn is_ring_full(&self) -> bool {
        self.vcpu.is_ring_full()
    }

    /// Loads the registers of the guest anew, as after a change of what they say.
    pub(crate) fn reload(&mut self) {
        self.cpu.load(self.cpu.control());
    }

    /// Inside the guest. Where invalidations are broadcast nobody asks whether a vCPU is there, so its gate stays shut.
    #[inline]
    fn in_guest<R>(&mut self, f: impl FnOnce(&mut Cpu<'m>) -> R) -> R {
        if T::ARCHITECTURE == Architecture::Arm {
            return f(&mut self.cpu);
        }
        if !self.attended {
            self.attended = true;
            self.cpu.attend(self.vcpu.participant().index());
        }
        loop {
            if let Ok(_inside) = self.vcpu.enter(self.vm) {
                return f(&mut self.cpu);
            }
        }
    }

    /// Leaves the guest, has the fault mended, and may enter again.
    #[cold]
    fn mend(&mut self, fault: slat_model::Fault) -> Result<(), Broken> {
        let mendable = self::fault(fault).ok_or(Broken::Hardware(fault))?;
        match self.handle(mendable)? {
            Exit::Resume => Ok(()),
            Exit::Retry => {
                // Whoever is in the way may need the processor.
                std::thread::yield_now();
                Ok(())
            }
            exit => Err(Broken::Exit(exit)),
        }
    }

    /// What the hypervisor does outside of the guest.
    fn handle(&mut self, fault: slat_vm::Fault) -> Result<Exit, FaultError> {
        let Self { vm, vcpu, exits: Some(exits), .. } = self else {
            return self.vcpu.fault(self.vm, fault);
        };
        let mapped = |vcpu: &Vcpu<'_, Model>| vcpu.statistics().fixed + vcpu.statistics().ahead;
        let (before, start) = (mapped(vcpu), Instant::now());
        let outcome = vcpu.fault(vm, fault);
        let took = (start.elapsed(), mapped(vcpu) - before);
        exits.note(T::ARCHITECTURE, fault.kind, &outcome, took);
        outcome
    }
}

impl<T: Tables> GuestMemory for ModelVcpu<'_, '_, T> {
    type Error = Broken;

    #[inline]
    fn load(&mut self, gpa: u64) -> Result<u64, Broken> {
        loop {
            match self.in_guest(|cpu| cpu.read(Gpa(gpa))) {
                Ok(value) => return Ok(value),
                Err(fault) => self.mend(fault)?,
            }
        }
    }

    #[inline]
    fn store(&mut self, gpa: u64, value: u64) -> Result<(), Broken> {
        loop {
            match self.in_guest(|cpu| cpu.write(Gpa(gpa), value)) {
                Ok(()) => return Ok(()),
                Err(fault) => self.mend(fault)?,
            }
        }
    }
}

impl<T: Tables> crew::Vcpu for ModelVcpu<'_, '_, T> {
    fn counters(&self) -> Counters {
        let engine = engine(&self.vcpu.participant().counters);
        Counters { faults: self.vcpu.statistics().faults, ..engine }
    }

    fn take_exits(&mut self) -> Option<Exits> {
        self.exits.as_deref_mut().map(std::mem::take)
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

/// What the machine and one worker have done so far; vCPUs report for themselves.
pub(crate) fn counters<M: Machine>(model: &Model, worker: &Worker<'_, M>) -> Counters {
    let machine = model.counters();
    Counters {
        tables_allocated: machine.tables_allocated,
        tables_freed: machine.tables_freed,
        publishes: machine.publishes,
        invalidations: Invalidations {
            by_ipa: machine.by_ipa,
            by_range: machine.by_range,
            combined: machine.combined,
            everything: machine.everything,
            local: machine.local,
        },
        ..engine(&worker.participant().counters)
    }
}
