//! What every test here runs on: the model machine, watched; a host whose answers a test can change; and a guest that
//! accesses memory and has its faults handled.
#![allow(dead_code, reason = "each test uses some of it")]
#![expect(unsafe_code, reason = "implements `slat::Machine` by passing everything on to the model")]

use std::cell::Cell;
use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use slat::format::arm::{K4, Stage2};
use slat::maintenance::Instruction;
use slat::{Entry, Event, Format, Gpa, GpaRange, Hpa, Level, Lookup, Machine};
use slat_model::{Backing, Cpu, HostMemory, Model, Registers};
use slat_vm::{
    Access, Exit, Fault, FaultKind, Host, HostError, HostPage, Hva, SlotConfig, Vcpu, Vm,
    VmOptions, Worker,
};

pub(crate) const PAGE: u64 = 4096;
pub(crate) const BLOCK: u64 = 2 << 20;
pub(crate) const GIB: u64 = 1 << 30;
/// No pages.
pub(crate) const NONE: [u64; 0] = [];

/// What a test does at an event of the engine, once: it runs in the middle of an operation of another participant.
type Interruption = Box<dyn FnOnce() + Send>;

/// Which event to interrupt at, and what to do.
type Armed = (Box<dyn FnMut(Event) -> bool + Send>, Interruption);

/// The model, and what it was asked beside tables and barriers.
pub(crate) struct Watched {
    pub(crate) model: Model,
    pub(crate) cleaned: Mutex<Vec<(Hpa, u64)>>,
    pub(crate) synced: Mutex<Vec<(Hpa, u64)>>,
    armed: AtomicBool,
    interruption: Mutex<Option<Armed>>,
}

impl Watched {
    pub(crate) fn new(cpus: usize) -> Self {
        let builder = Model::builder().cpus(cpus).slots(16).table_limit(1 << 13);
        Self::of(builder.memory_limit(64 << 30).build().unwrap())
    }

    pub(crate) fn of(model: Model) -> Self {
        Self {
            model,
            cleaned: Mutex::default(),
            synced: Mutex::default(),
            armed: AtomicBool::new(false),
            interruption: Mutex::default(),
        }
    }

    /// At the first event that `when` agrees to, does `what`.
    pub(crate) fn interrupt<'a>(
        &'a self,
        when: impl FnMut(Event) -> bool + Send + 'static,
        what: impl FnOnce() + Send + 'a,
    ) {
        let what: Box<dyn FnOnce() + Send + 'a> = Box::new(what);
        // SAFETY: tests wait for the interruption, or take it back with `calm`, before what it borrows goes away.
        let what =
            unsafe { std::mem::transmute::<Box<dyn FnOnce() + Send + 'a>, Interruption>(what) };
        *self.interruption.lock().unwrap() = Some((Box::new(when), what));
        self.armed.store(true, Ordering::SeqCst);
    }

    /// Whether the interruption has happened; it will not any more.
    pub(crate) fn calm(&self) -> bool {
        self.armed.store(false, Ordering::SeqCst);
        self.interruption.lock().unwrap().take().is_none()
    }
}

thread_local! {
    static IN_MODEL: Cell<bool> = const { Cell::new(false) };
}

/// Whether the calling thread is in the model or takes a note for a test, which allocate as they like.
pub(crate) fn in_model() -> bool {
    IN_MODEL.try_with(Cell::get).unwrap_or(true)
}

/// What the model, or a test, allocates is not counted.
pub(crate) fn inside<R>(f: impl FnOnce() -> R) -> R {
    let before = IN_MODEL.replace(true);
    let result = f();
    IN_MODEL.set(before);
    result
}

// SAFETY: everything is the model's, which keeps the contract.
unsafe impl Machine for Watched {
    fn allocate(&self, tables: usize) -> Option<Hpa> {
        inside(|| self.model.allocate(tables))
    }

    unsafe fn free(&self, first: Hpa, tables: usize) {
        // SAFETY: as the caller promised.
        inside(|| unsafe { self.model.free(first, tables) })
    }

    fn entries(&self, table: Hpa) -> NonNull<Entry> {
        self.model.entries(table)
    }

    fn slots(&self) -> &[slat::Slot] {
        self.model.slots()
    }

    fn execute(&self, instruction: Instruction) {
        inside(|| self.model.execute(instruction));
    }

    fn relax(&self) {
        inside(|| self.model.relax());
    }

    fn clean_data(&self, from: Hpa, size: u64) {
        inside(|| self.cleaned.lock().unwrap().push((from, size)));
    }

    fn sync_instructions(&self, from: Hpa, size: u64) {
        inside(|| self.synced.lock().unwrap().push((from, size)));
    }

    fn observe(&self, event: Event) {
        inside(|| self.model.observe(event));
        if self.armed.load(Ordering::Relaxed) {
            let mut interruption = self.interruption.lock().unwrap();
            if let Some((_, what)) = interruption.take_if(|(when, _)| when(event)) {
                self.armed.store(false, Ordering::SeqCst);
                drop(interruption);
                // On a thread of its own: what a thread has locked and not published yet is known by thread.
                std::thread::scope(|scope| scope.spawn(what).join().unwrap());
            }
        }
    }
}

/// What the host does when it is asked, before it answers.
type Hook = Box<dyn FnMut(Hva, Access) + Send>;

/// A host with one memory; offset 0 is host address 0.
pub(crate) struct TestHost {
    pub(crate) memory: Arc<HostMemory>,
    /// Answers that a test has changed, by page.
    pub(crate) answers: Mutex<HashMap<u64, Result<HostPage, HostError>>>,
    pub(crate) hook: Mutex<Option<Hook>>,
    pub(crate) asked: Mutex<Vec<(Hva, Access)>>,
    /// Whether pages are at hand for fault-around.
    pub(crate) at_hand: AtomicBool,
}

impl TestHost {
    pub(crate) fn new(memory: Arc<HostMemory>) -> Self {
        Self {
            memory,
            answers: Mutex::default(),
            hook: Mutex::default(),
            asked: Mutex::default(),
            at_hand: AtomicBool::new(false),
        }
    }

    /// What the memory itself says.
    pub(crate) fn natural(&self, hva: Hva) -> Result<HostPage, HostError> {
        let page = self.memory.page(hva.0).ok_or(HostError::NotMapped)?;
        let output = Hpa(page.hpa.0 & !(page.size - 1));
        Ok(HostPage { output, size: page.size, writable: true, device: false })
    }

    /// From now on the page at `hva` is answered like this.
    pub(crate) fn answer(&self, hva: u64, answer: Result<HostPage, HostError>) {
        self.answers.lock().unwrap().insert(hva / PAGE, answer);
    }

    /// Changes the natural answer for the page at `hva`.
    pub(crate) fn alter(&self, hva: u64, alter: impl FnOnce(&mut HostPage)) {
        let mut page = self.natural(Hva(hva)).unwrap();
        alter(&mut page);
        self.answer(hva, Ok(page));
    }

    /// Does `what` the next time a page is asked for, before the answer is looked up.
    pub(crate) fn once<'a>(&'a self, what: impl FnOnce() + Send + 'a) {
        let what: Box<dyn FnOnce() + Send + 'a> = Box::new(what);
        // SAFETY: tests make the fault that asks before what the hook borrows goes away.
        let what =
            unsafe { std::mem::transmute::<Box<dyn FnOnce() + Send + 'a>, Interruption>(what) };
        let mut what = Some(what);
        *self.hook.lock().unwrap() = Some(Box::new(move |_, _| {
            if let Some(what) = what.take() {
                what();
            }
        }));
    }
}

impl Host for TestHost {
    fn page(&self, hva: Hva, access: Access) -> Result<HostPage, HostError> {
        let mut asked = self.asked.lock().unwrap();
        if asked.len() < 100_000 {
            inside(|| asked.push((hva, access)));
        }
        drop(asked);
        let hook = self.hook.lock().unwrap().take();
        // The answer is looked up first: what the hook changes makes it outdated.
        let answer = self.answers.lock().unwrap().get(&(hva.0 / PAGE)).copied();
        let answer = answer.unwrap_or_else(|| self.natural(hva));
        if let Some(mut hook) = hook {
            hook(hva, access);
        }
        answer
    }

    fn present(&self, hva: Hva) -> Option<HostPage> {
        if !self.at_hand.load(Ordering::Relaxed) {
            return None;
        }
        let answer = self.answers.lock().unwrap().get(&(hva.0 / PAGE)).copied();
        answer.unwrap_or_else(|| self.natural(hva)).ok()
    }
}

pub(crate) type Arm = Stage2<K4>;
pub(crate) type TestVm<'m, F = Arm> = Vm<'m, F, Watched, TestHost>;

/// 40-bit addresses, 4K granule, start at level 1.
pub(crate) fn arm() -> Arm {
    Stage2::new(40).unwrap()
}

/// A VM whose host has `size` bytes.
pub(crate) fn vm<'m>(
    machine: &'m Watched,
    size: u64,
    backing: Backing,
    options: VmOptions,
) -> TestVm<'m> {
    vm_of(machine, arm(), size, backing, options)
}

/// A VM in another format.
pub(crate) fn vm_of<'m>(
    machine: &'m Watched,
    format: Arm,
    size: u64,
    backing: Backing,
    options: VmOptions,
) -> TestVm<'m> {
    let memory = machine.model.host_memory(size, backing).unwrap();
    Vm::new(machine, TestHost::new(memory), format, 7, options).unwrap()
}

/// What a CPU needs to run in an address space.
pub(crate) fn registers(vm: &TestVm<'_>, space: u16) -> Registers {
    let tree = vm.tree_of(space).unwrap();
    Registers { vttbr: tree.root_register(), vtcr: tree.format().vtcr() }
}

/// The same with one slot: all of the memory, at guest address 0.
pub(crate) fn vm_with_slot<'m>(
    machine: &'m Watched,
    size: u64,
    backing: Backing,
    options: VmOptions,
) -> (TestVm<'m>, Worker<'m, Watched>) {
    let vm = vm(machine, size, backing, options);
    let mut worker = vm.worker().unwrap();
    vm.create_slot(&mut worker, 0, SlotConfig::new(Gpa(0), size, Hva(0))).unwrap();
    (vm, worker)
}

pub(crate) const HUGE_2M: Backing = Backing::AnonymousHugetlb { page_size: BLOCK };
pub(crate) const HUGE_1G: Backing = Backing::AnonymousHugetlb { page_size: GIB };

pub(crate) fn eager(chunk: u64) -> VmOptions {
    VmOptions { eager_split: Some(chunk), ..VmOptions::default() }
}

pub(crate) fn range(start: u64, size: u64) -> GpaRange {
    GpaRange::new(Gpa(start), size).unwrap()
}

/// A vCPU on a CPU of the model.
pub(crate) struct Guest<'v, 'm> {
    pub(crate) vm: &'v TestVm<'m>,
    pub(crate) vcpu: Vcpu<'m, Watched>,
    pub(crate) cpu: Cpu<'m>,
    /// Faults handled.
    pub(crate) faults: u64,
}

impl<'v, 'm> Guest<'v, 'm> {
    pub(crate) fn new(vm: &'v TestVm<'m>, cpu: usize) -> Self {
        Self::in_space(vm, cpu, 0)
    }

    /// The same in another address space.
    pub(crate) fn in_space(vm: &'v TestVm<'m>, cpu: usize, space: u16) -> Self {
        let cpu = vm.machine().model.cpu(cpu, registers(vm, space)).unwrap();
        let mut vcpu = vm.vcpu().unwrap();
        vcpu.switch_space(vm, space).unwrap();
        Self { vm, vcpu, cpu, faults: 0 }
    }

    /// The fault as the model's CPU reports it, handed to the VM.
    pub(crate) fn handle(&mut self, fault: slat_model::Fault) -> Exit {
        self.faults += 1;
        assert!(self.faults < 10_000_000, "faults for ever: {fault:?}");
        self.vcpu.fault(self.vm, translate(fault)).unwrap()
    }

    /// Stores, with faults handled; how many there were. Anything but memory is a failure.
    pub(crate) fn write(&mut self, gpa: u64, value: u64) -> u64 {
        let before = self.faults;
        while let Err(fault) = self.cpu.write(Gpa(gpa), value) {
            self.memory(fault);
        }
        self.faults - before
    }

    pub(crate) fn read(&mut self, gpa: u64) -> u64 {
        loop {
            match self.cpu.read(Gpa(gpa)) {
                Ok(value) => return value,
                Err(fault) => self.memory(fault),
            }
        }
    }

    pub(crate) fn execute(&mut self, gpa: u64) {
        while let Err(fault) = self.cpu.fetch(Gpa(gpa)) {
            self.memory(fault);
        }
    }

    fn memory(&mut self, fault: slat_model::Fault) {
        let exit = self.handle(fault);
        assert!(matches!(exit, Exit::Resume | Exit::Retry), "{fault:?}: {exit:?}");
    }

    /// A fault that no CPU has taken.
    pub(crate) fn fault(&mut self, gpa: u64, access: Access) -> Exit {
        let fault = Fault { gpa: Gpa(gpa), access, kind: FaultKind::Translation };
        self.vcpu.fault(self.vm, fault).unwrap()
    }
}

pub(crate) fn translate(fault: slat_model::Fault) -> Fault {
    use slat_model::FaultKind as Kind;
    Fault {
        gpa: fault.gpa,
        access: match fault.access {
            slat_model::Access::Read => Access::Read,
            slat_model::Access::Write => Access::Write,
            slat_model::Access::Execute => Access::Execute,
        },
        kind: match fault.kind {
            Kind::Translation { .. } => FaultKind::Translation,
            Kind::Permission { .. } => FaultKind::Permission,
            Kind::AccessFlag { .. } => FaultKind::AccessFlag,
            other => panic!("no fault of a guest: {other:?}"),
        },
    }
}

/// What stands at a guest address, in the tree itself: level, output, write and execute permission.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Found {
    pub(crate) level: i8,
    pub(crate) output: u64,
    pub(crate) write: bool,
    pub(crate) execute: bool,
}

pub(crate) fn found<'m, F: Format>(
    vm: &TestVm<'m, F>,
    worker: &Worker<'m, Watched>,
    gpa: u64,
) -> Option<Found> {
    let pin = worker.participant().pin();
    match vm.tree().look_up(&pin, Gpa(gpa)).unwrap() {
        Lookup::Mapped { output, level, template } => {
            let attributes = vm.tree().attributes(template);
            Some(Found {
                level: level.number(),
                output: output.0,
                write: attributes.write,
                execute: attributes.execute != slat::Execute::No,
            })
        }
        _ => None,
    }
}

pub(crate) fn level(vm: &TestVm<'_>, worker: &Worker<'_, Watched>, gpa: u64) -> Option<i8> {
    let pin = worker.participant().pin();
    match vm.tree().look_up(&pin, Gpa(gpa)).unwrap() {
        Lookup::Mapped { level, .. } => Some(level.number()),
        _ => None,
    }
}

pub(crate) fn writable(vm: &TestVm<'_>, worker: &Worker<'_, Watched>, gpa: u64) -> bool {
    found_write(vm, worker, gpa).unwrap_or(false)
}

fn found_write(vm: &TestVm<'_>, worker: &Worker<'_, Watched>, gpa: u64) -> Option<bool> {
    let pin = worker.participant().pin();
    match vm.tree().look_up(&pin, Gpa(gpa)).unwrap() {
        Lookup::Mapped { template, .. } => Some(vm.tree().attributes(template).write),
        _ => None,
    }
}

/// The dirty pages of slot `id`, which has `pages` pages, by number.
pub(crate) fn collect<'m>(
    vm: &TestVm<'m>,
    worker: &mut Worker<'m, Watched>,
    id: u32,
    pages: u64,
) -> Vec<u64> {
    let mut bitmap = vec![0; pages.div_ceil(64) as usize];
    let count = vm.dirty_log(worker, id, &mut bitmap).unwrap();
    let dirty: Vec<_> = (0..pages.next_multiple_of(64))
        .filter(|page| bitmap[(page / 64) as usize] >> (page % 64) & 1 == 1)
        .collect();
    assert_eq!(count, dirty.len() as u64);
    dirty
}

/// Nothing is left when everything is gone, and no rule was broken.
pub(crate) fn finish(vm: TestVm<'_>, workers: Vec<Worker<'_, Watched>>) {
    let machine = vm.machine();
    for space in 0..vm.options().address_spaces {
        machine.model.check_quiet(registers(&vm, space));
    }
    drop(workers);
    drop(vm);
    machine.model.check_freed();
    assert_eq!(machine.model.counters().tables_in_use, 0);
}

pub(crate) const LAST: i8 = Level::LAST.number();
