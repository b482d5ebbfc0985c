//! A guest whose own tables are shadowed: one CPU in long mode on the shadow's tables, and guest memory below them.

use std::cell::{Cell, RefCell};
use std::hint;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use slat::format::npt::Npt;
use slat::{Gpa, GpaRange, Hpa};
use slat_model::{Architecture, HostMemory, LinearAccess, LongMode, LongModeCpu, Model};
use slat_shadow::rmap::ReverseMaps;
use slat_shadow::{
    ErrorCode, GuestAccess, HostBytes, PagingMode, Root, Shadow, ShadowExit, ShadowOptions,
    ShadowStatistics, VmMemory,
};
use slat_vm::{Access, Exit, Fault, FaultKind, Hva, SlotConfig, Vcpu, Vm, VmOptions, Worker};

use crate::exits::{Exits, Reason};
use crate::failure::Failure;
use crate::model::ModelHost;

/// How the guests of the lab page.
const MODE: PagingMode = PagingMode { smap: false, ..PagingMode::LONG };
/// Address bits of the guest memory below.
const GUEST_BITS: u32 = 48;

/// The host's memory, and the CPU whose translations go when the shadow says so.
pub(crate) struct Below<'m> {
    model: &'m Model,
    cpu: RefCell<LongModeCpu>,
    flushes: Cell<u64>,
}

impl HostBytes for Below<'_> {
    fn word(&self, hpa: Hpa) -> Option<&AtomicU64> {
        self.model.host_word(hpa)
    }

    fn flush(&self) {
        self.cpu.borrow_mut().flush();
        self.flushes.set(self.flushes.get() + 1);
    }
}

/// The guest's memory, on the model.
pub(crate) struct Ground {
    model: Model,
    memory: Arc<HostMemory>,
    bytes: u64,
}

impl Ground {
    /// `bytes` of memory in base pages.
    ///
    /// # Errors
    /// [`Failure`] if there is not so much.
    pub(crate) fn new(bytes: u64, pages: usize) -> Result<Self, Failure> {
        // The shadow's own, and those of the tree below.
        let tables = pages as u64 + bytes / (512 * 4096) * 2 + 4096;
        let model = Model::builder()
            .architecture(Architecture::Npt)
            .cpus(1)
            .slots(4)
            .table_limit(tables.min(1 << 24) as u32)
            .checked(false)
            .build()
            .map_err(|error| Failure::Run(error.to_string()))?;
        let memory = model
            .host_memory(bytes, slat_model::Backing::Anonymous)
            .map_err(|error| Failure::Usage(error.to_string()))?;
        Ok(Self { model, memory, bytes })
    }

    /// Stores a word as a loader does, before the guest runs.
    pub(crate) fn poke(&self, gpa: u64, value: u64) {
        if let Some(word) = self.memory.word(gpa) {
            word.store(value, Ordering::Release);
        }
    }

    /// Calls `f` with a guest that has all of the memory from address 0 on, and whose every exit takes so much longer.
    ///
    /// # Errors
    /// [`Failure`] if it cannot be made, or what `f` says.
    pub(crate) fn with<R: ReverseMaps, T>(
        &self,
        options: ShadowOptions,
        exit_time: Duration,
        f: impl FnOnce(&mut Guest<'_, '_, R>) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let run = |error: &dyn std::error::Error| Failure::Run(error.to_string());
        let format = Npt::new(GUEST_BITS).map_err(|error| run(&error))?;
        let vm_options =
            VmOptions { coherent_data: true, coherent_instructions: true, ..VmOptions::default() };
        let host = ModelHost::of(&self.memory);
        let vm = Vm::new(&self.model, host, format, 1, vm_options).map_err(|error| run(&error))?;
        let mut worker = vm.worker().map_err(|error| run(&error))?;
        vm.create_slot(&mut worker, 0, SlotConfig::new(Gpa(0), self.bytes, Hva(0)))?;
        let vcpu = vm.vcpu().map_err(|error| run(&error))?;
        let mut shadow =
            Shadow::with_reverse_maps(&self.model, options).map_err(|error| run(&error))?;
        let whole = GpaRange::new(Gpa(0), self.bytes)
            .ok_or_else(|| Failure::Usage("the guest has no memory".to_owned()))?;
        shadow.create_slot(whole).map_err(|error| run(&error))?;
        let cpu = RefCell::default();
        let bytes = Below { model: &self.model, cpu, flushes: Cell::new(0) };
        let mut guest = Guest {
            vm: &vm,
            vcpu,
            worker,
            shadow,
            bytes: &bytes,
            root: None,
            exit_time,
            exits: ExitCounts::default(),
            noted: None,
        };
        f(&mut guest)
    }
}

/// How often the guest was left, and why.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, serde::Serialize)]
pub(crate) struct ExitCounts {
    /// Page faults of the CPU, whosever they are.
    pub(crate) page_faults: u64,
    /// Those that the guest has to handle itself.
    pub(crate) injected: u64,
    /// Those that the memory below had to see to first.
    pub(crate) second_level: u64,
    /// Stores to tables that were emulated.
    pub(crate) emulated: u64,
    /// Loads of `CR3`.
    pub(crate) roots: u64,
    /// Invalidations of one page.
    pub(crate) invalidations: u64,
}

/// The guest: what its CPU does, and what the hypervisor does for it.
pub(crate) struct Guest<'a, 'm, R: ReverseMaps> {
    vm: &'a Vm<'m, Npt, Model, ModelHost>,
    vcpu: Vcpu<'m, Model>,
    worker: Worker<'m, Model>,
    pub(crate) shadow: Shadow<'m, Model, R>,
    bytes: &'a Below<'m>,
    root: Option<(u64, Root)>,
    exit_time: Duration,
    pub(crate) exits: ExitCounts,
    /// With their times, if somebody wants to know.
    pub(crate) noted: Option<Box<Exits>>,
}

impl<R: ReverseMaps> Guest<'_, '_, R> {
    /// The CPU loads `CR3`.
    pub(crate) fn load(&mut self, cr3: u64) -> Result<(), Failure> {
        self.exits.roots += 1;
        let left = self.leave();
        self.reload(cr3)?;
        self.note(Reason::RootLoad, left);
        Ok(())
    }

    /// What hardware takes to leave the guest and to enter it again. Gives when that was, and what was mapped by then, for
    /// [`note`](Self::note).
    fn leave(&self) -> Option<(Instant, u64)> {
        let left = self.noted.is_some().then(|| (Instant::now(), self.shadow.statistics().mapped));
        if !self.exit_time.is_zero() {
            let start = Instant::now();
            while start.elapsed() < self.exit_time {
                hint::spin_loop();
            }
        }
        left
    }

    /// An exit ends.
    fn note(&mut self, reason: Reason, left: Option<(Instant, u64)>) {
        if let (Some(noted), Some((start, mapped))) = (&mut self.noted, left) {
            let pages = self.shadow.statistics().mapped - mapped;
            noted.note_for(reason, (start.elapsed(), pages));
        }
    }

    fn reload(&mut self, cr3: u64) -> Result<(), Failure> {
        let memory = VmMemory { vm: self.vm, who: self.worker.participant(), bytes: self.bytes };
        let root = self
            .shadow
            .load_root(&memory, MODE, cr3)
            .map_err(|error| Failure::Run(error.to_string()))?;
        self.bytes.cpu.borrow_mut().flush();
        if let Some((_, old)) = self.root.replace((cr3, root)) {
            let dropped = self.shadow.drop_root(&memory, old);
            dropped.map_err(|error| Failure::Run(error.to_string()))?;
        }
        Ok(())
    }

    /// The CPU invalidates one page.
    pub(crate) fn invalidate(&mut self, gva: u64) -> Result<(), Failure> {
        self.exits.invalidations += 1;
        let left = self.leave();
        let memory = VmMemory { vm: self.vm, who: self.worker.participant(), bytes: self.bytes };
        if let Some((_, root)) = &self.root {
            let done = self.shadow.invalidate_page(&memory, root, gva);
            done.map_err(|error| Failure::Run(error.to_string()))?;
        }
        self.bytes.cpu.borrow_mut().invalidate(gva);
        self.note(Reason::PageInvalidation, left);
        Ok(())
    }

    /// The word at `gva`, or the guest's own fault.
    pub(crate) fn read(&mut self, gva: u64, user: bool) -> Result<Result<u64, ErrorCode>, Failure> {
        self.access(gva, GuestAccess { kind: Access::Read, user, user_data_allowed: false }, 0)
    }

    /// Stores a word, or gives the guest's own fault.
    pub(crate) fn write(
        &mut self,
        gva: u64,
        user: bool,
        value: u64,
    ) -> Result<Result<(), ErrorCode>, Failure> {
        let access = GuestAccess { kind: Access::Write, user, user_data_allowed: false };
        Ok(self.access(gva, access, value)?.map(|_| ()))
    }

    fn access(
        &mut self,
        gva: u64,
        access: GuestAccess,
        value: u64,
    ) -> Result<Result<u64, ErrorCode>, Failure> {
        let write = access.kind == Access::Write;
        let linear = LinearAccess { write, fetch: false, user: access.user };
        let control = LongMode { five_level: false, smep: MODE.smep, smap: MODE.smap };
        loop {
            let Some((cr3, root)) = &self.root else {
                return Err(Failure::Run("the guest has loaded no root".to_owned()));
            };
            let cr3 = *cr3;
            let model = self.bytes.model;
            let tried =
                self.bytes.cpu.borrow_mut().access(model, root.table(), control, gva & !7, linear);
            if let Ok(hpa) = tried {
                let Some(word) = model.host_word(hpa) else {
                    return Err(Failure::Run(format!("{gva:#x} leads to {hpa}, where nothing is")));
                };
                if write {
                    word.store(value, Ordering::Release);
                    return Ok(Ok(value));
                }
                return Ok(Ok(word.load(Ordering::Acquire)));
            }
            self.exits.page_faults += 1;
            let left = self.leave();
            let memory =
                VmMemory { vm: self.vm, who: self.worker.participant(), bytes: self.bytes };
            let exit = self
                .shadow
                .fault(&memory, root, gva, access)
                .map_err(|error| Failure::Run(format!("a page fault: {error}")))?;
            match exit {
                ShadowExit::Resume | ShadowExit::Retry => self.note(Reason::ShadowFault, left),
                ShadowExit::ReloadRoot => {
                    self.reload(cr3)?;
                    self.note(Reason::ShadowFault, left);
                }
                ShadowExit::PageFault(code) => {
                    self.exits.injected += 1;
                    self.note(Reason::GuestFault, left);
                    return Ok(Err(code));
                }
                ShadowExit::SecondLevel { gpa, access, permission } => {
                    self.second_level(gpa, access, permission)?;
                    self.note(Reason::SecondLevel, left);
                }
                ShadowExit::EmulateWrite { gpa } => {
                    self.exits.emulated += 1;
                    self.emulate(Gpa(gpa.0 & !7), value)?;
                    self.note(Reason::EmulatedStore, left);
                    return Ok(Ok(value));
                }
                other => return Err(Failure::Run(format!("no way to go on after {other:?}"))),
            }
        }
    }

    fn second_level(&mut self, gpa: Gpa, access: Access, permission: bool) -> Result<(), Failure> {
        self.exits.second_level += 1;
        let kind = if permission { FaultKind::Permission } else { FaultKind::Translation };
        match self.vcpu.fault(self.vm, Fault { gpa, access, kind }) {
            Ok(Exit::Resume | Exit::Retry) => Ok(()),
            Ok(exit) => Err(Failure::Run(format!("the guest's memory at {gpa}: {exit:?}"))),
            Err(error) => Err(Failure::Run(error.to_string())),
        }
    }

    fn emulate(&mut self, gpa: Gpa, value: u64) -> Result<(), Failure> {
        let memory = VmMemory { vm: self.vm, who: self.worker.participant(), bytes: self.bytes };
        let store = |hpa, writable: bool| {
            let word = self.bytes.model.host_word(hpa).filter(|_| writable)?;
            word.store(value, Ordering::Release);
            Some(())
        };
        let stored = self.vm.look_up(self.worker.participant(), gpa, store);
        if stored.ok().flatten().is_none() {
            return Err(Failure::Run(format!("the store to {gpa} has nowhere to go")));
        }
        if let Some(range) = GpaRange::new(gpa, 8) {
            self.shadow.written(&memory, range);
        }
        Ok(())
    }

    /// How often all translations of the CPU were removed for the shadow's sake.
    pub(crate) fn flushes(&self) -> u64 {
        self.bytes.flushes.get()
    }

    /// What the shadow counted.
    pub(crate) fn statistics(&self) -> ShadowStatistics {
        self.shadow.statistics()
    }
}
