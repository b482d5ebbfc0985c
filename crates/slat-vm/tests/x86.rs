//! Guest memory on x86 tables: what is promised everywhere holds there too, and what only x86 asks for is there.

mod guest;

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use guest::{BLOCK, PAGE, TestHost, Watched, range};
use slat::format::ept::{Ept, InHardware, InSoftware};
use slat::format::npt::Npt;
use slat::gate::Requests;
use slat::{Attributes, Gpa, Lookup, Tree};
use slat_model::{Architecture, Backing, Cpu, Fault, Model, Modelled};
use slat_vm::{
    EntryError, Exit, Hva, LogError, LogMode, SlotConfig, SlotId, Vcpu, Vm, VmOptions, Worker,
};

type X86Vm<'m, F> = Vm<'m, F, Watched, TestHost>;

/// The formats that hardware keeps flags in, and the one that it does not.
trait Tables: Modelled {
    fn tables() -> Self;
}

impl Tables for Ept<InHardware> {
    fn tables() -> Self {
        Self::new(48).unwrap().with_hardware_dirty(true)
    }
}

impl Tables for Ept<InSoftware> {
    fn tables() -> Self {
        Self::new(48).unwrap()
    }
}

impl Tables for Npt {
    fn tables() -> Self {
        Self::new(48).unwrap().with_hardware_dirty(true)
    }
}

fn machine(architecture: Architecture, cpus: usize) -> Watched {
    let builder = Model::builder().architecture(architecture).cpus(cpus).slots(8);
    Watched::of(builder.table_limit(1 << 13).memory_limit(64 << 30).build().unwrap())
}

/// A VM with one slot at 0, and pages at hand.
fn vm<F: Tables>(
    machine: &Watched,
    backing: Backing,
    options: VmOptions,
) -> (X86Vm<'_, F>, Worker<'_, Watched>) {
    let memory = machine.model.host_memory(2 * BLOCK, backing).unwrap();
    let host = TestHost::new(memory);
    host.at_hand.store(true, Ordering::Relaxed);
    let options = VmOptions { coherent_data: true, coherent_instructions: true, ..options };
    let vm = Vm::new(machine, host, F::tables(), 7, options).unwrap();
    let mut worker = vm.worker().unwrap();
    vm.create_slot(&mut worker, 0, SlotConfig::new(Gpa(0), 2 * BLOCK, Hva(0))).unwrap();
    (vm, worker)
}

/// A vCPU that enters for each access.
struct Guest<'v, 'm, F: Tables> {
    vm: &'v X86Vm<'m, F>,
    vcpu: Vcpu<'m, Watched>,
    cpu: Cpu<'m>,
    faults: u64,
}

impl<'v, 'm, F: Tables> Guest<'v, 'm, F> {
    fn new(vm: &'v X86Vm<'m, F>, cpu: usize) -> Self {
        Self::in_space(vm, cpu, 0)
    }

    fn in_space(vm: &'v X86Vm<'m, F>, cpu: usize, space: u16) -> Self {
        let tree = vm.tree_of(space).unwrap();
        let mut cpu = vm.machine().model.cpu(cpu, F::control_of(tree)).unwrap();
        let mut vcpu = vm.vcpu().unwrap();
        vcpu.switch_space(vm, space).unwrap();
        cpu.attend(vcpu.participant().index());
        Self { vm, vcpu, cpu, faults: 0 }
    }

    fn access<R>(&mut self, mut access: impl FnMut(&mut Cpu<'m>) -> Result<R, Fault>) -> R {
        loop {
            self.cpu.bind();
            let result = match self.vcpu.enter(self.vm) {
                Ok(_inside) => access(&mut self.cpu),
                Err(_) => continue,
            };
            let fault = match result {
                Ok(done) => return done,
                Err(fault) => fault,
            };
            self.faults += 1;
            let exit = self.vcpu.fault(self.vm, guest::translate(fault)).unwrap();
            assert!(matches!(exit, Exit::Resume | Exit::Retry), "{exit:?}");
        }
    }

    fn write(&mut self, gpa: u64, value: u64) {
        self.access(|cpu| cpu.write(Gpa(gpa), value));
    }

    fn read(&mut self, gpa: u64) -> u64 {
        self.access(|cpu| cpu.read(Gpa(gpa)))
    }
}

fn attributes<F: Tables>(
    vm: &X86Vm<'_, F>,
    worker: &Worker<'_, Watched>,
    gpa: u64,
) -> Option<Attributes> {
    let tree: &Tree<'_, F, Watched> = vm.tree();
    match tree.look_up(&worker.participant().pin(), Gpa(gpa)).unwrap() {
        Lookup::Mapped { template, .. } => Some(tree.attributes(template)),
        _ => None,
    }
}

fn dirty<'m, F: Tables>(vm: &X86Vm<'m, F>, worker: &mut Worker<'m, Watched>) -> Vec<u64> {
    let mut bitmap = vec![0; 1024 / 64];
    vm.dirty_log(worker, 0, &mut bitmap).unwrap();
    (0..1024).filter(|page| bitmap[(page / 64) as usize] >> (page % 64) & 1 == 1).collect()
}

/// Nothing is left, and no rule was broken.
fn finish<F: Tables>(vm: X86Vm<'_, F>, worker: Worker<'_, Watched>) {
    let machine = vm.machine();
    (0..vm.options().address_spaces)
        .for_each(|space| machine.model.check_quiet(F::control_of(vm.tree_of(space).unwrap())));
    drop((worker, vm));
    machine.model.check_freed();
    assert_eq!(machine.model.counters().tables_in_use, 0);
    assert_eq!(machine.model.violations(), 0);
}

fn prefetched_pages_are_not_accessed_and_end_where_the_host_has_none<F: Tables>() {
    let machine = machine(F::ARCHITECTURE, 1);
    let (vm, mut worker) = vm::<F>(&machine, Backing::Anonymous, VmOptions::default());
    vm.host().answer(22 * PAGE, Err(slat_vm::HostError::Again));
    let mut guest = Guest::new(&vm, 0);
    // At a multiple of eight, the next seven empty.
    guest.write(8 * PAGE, 1);
    let mapped = |page: u64| attributes(&vm, &worker, page * PAGE);
    assert!((8..16).all(|page| mapped(page).is_some()) && mapped(7).or(mapped(16)).is_none());
    let flags = vm.tree().format().sets_accessed();
    assert!(mapped(8).unwrap().accessed);
    assert!((9..16).all(|page| mapped(page).unwrap().accessed != flags));
    guest.write(20 * PAGE, 1);
    assert!((16..22).all(|page| mapped(page).is_some()) && mapped(22).or(mapped(23)).is_none());
    assert_eq!(guest.faults, 2);
    vm.enable_log(&mut worker, 0, LogMode::Protect).unwrap();
    guest.write(40 * PAGE, 1);
    let mapped = |page: u64| attributes(&vm, &worker, page * PAGE);
    assert!(mapped(40).is_some() && mapped(41).is_none());
    drop(guest);
    finish(vm, worker);
}

fn a_write_after_a_collection_is_in_the_next_one<F: Tables>() {
    let hugetlb = Backing::AnonymousHugetlb { page_size: BLOCK };
    for mode in [LogMode::Protect, LogMode::Hardware] {
        let machine = machine(F::ARCHITECTURE, 2);
        let (vm, mut worker) = vm::<F>(&machine, hugetlb, VmOptions::default());
        let (mut first, mut second) = (Guest::new(&vm, 0), Guest::new(&vm, 1));
        first.write(0, 1);
        second.write(BLOCK, 1);
        let enabled = vm.enable_log(&mut worker, 0, mode);
        if mode == LogMode::Hardware && !vm.tree().format().tracks_dirty() {
            // No flag that could be cleared: a log by write-protection is there.
            assert!(matches!(enabled, Err(LogError::NoHardware)), "{enabled:?}");
        } else {
            enabled.unwrap();
            vm.split(&mut worker, range(0, 2 * BLOCK)).unwrap();
            dirty(&vm, &mut worker);
            for round in 2..5 {
                first.write(3 * PAGE, round);
                second.write(3 * PAGE + 8, round);
                second.write(BLOCK + round * PAGE, round);
                assert_eq!(dirty(&vm, &mut worker), [3, 512 + round]);
                assert_eq!(dirty(&vm, &mut worker), [0; 0]);
            }
        }
        drop((first, second));
        finish(vm, worker);
    }
}

/// Aging while another vCPU gains the permission to write.
fn write_and_dirty_survive_aging<F: Tables>() {
    let machine = machine(F::ARCHITECTURE, 1);
    let (vm, mut worker) = vm::<F>(&machine, Backing::Anonymous, VmOptions::default());
    let mut other = vm.worker().unwrap();
    vm.enable_log(&mut worker, 0, LogMode::Protect).unwrap();
    let done = AtomicBool::new(false);
    let mut guest = Guest::new(&vm, 0);
    let faults = thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                vm.clear_young(&mut other, range(0, 64 * PAGE)).unwrap();
            }
        });
        for round in 0..50 {
            for page in 0..64 {
                guest.write(page * PAGE, round);
                assert!(attributes(&vm, &worker, page * PAGE).unwrap().write);
            }
            assert_eq!(dirty(&vm, &mut worker), (0..64).collect::<Vec<_>>());
        }
        done.store(true, Ordering::Relaxed);
        guest.faults
    });
    assert!(faults >= 50 * 64);
    drop((guest, other));
    finish(vm, worker);
}

fn an_aged_page_is_young_again_after_its_next_use<F: Tables>() {
    let machine = machine(F::ARCHITECTURE, 1);
    let (vm, mut worker) = vm::<F>(&machine, Backing::Anonymous, VmOptions::default());
    let mut guest = Guest::new(&vm, 0);
    guest.write(0, 1);
    let all = range(0, BLOCK);
    vm.clear_flush_young(&mut worker, all).unwrap();
    assert_eq!(vm.test_young(&mut worker, all), Ok(0));
    let before = guest.faults;
    assert_eq!(guest.read(0), 1);
    assert_eq!(vm.test_young(&mut worker, all), Ok(1));
    assert!(attributes(&vm, &worker, 0).unwrap().write);
    assert_eq!(guest.faults - before, u64::from(!vm.tree().format().sets_accessed()));
    drop(guest);
    finish(vm, worker);
}

fn address_spaces_have_roots_that_hardware_takes<F: Tables>() {
    let machine = machine(F::ARCHITECTURE, 2);
    let options = VmOptions { address_spaces: 2, ..VmOptions::default() };
    let (vm, mut worker) = vm::<F>(&machine, Backing::Anonymous, options);
    let second = SlotId { space: 1, number: 0 };
    let config = SlotConfig::new(Gpa(0), BLOCK, Hva(BLOCK));
    vm.create_slot(&mut worker, second, config).unwrap();
    let (mut first, mut other) = (Guest::new(&vm, 0), Guest::in_space(&vm, 1, 1));
    first.write(0, 1);
    other.write(0, 2);
    assert_eq!((first.read(0), other.read(0)), (1, 2));
    drop((first, other));
    finish(vm, worker);
}

fn entering_answers_invalidations_and_passes_other_requests_on<F: Tables>() {
    let machine = machine(F::ARCHITECTURE, 1);
    let (vm, mut worker) = vm::<F>(&machine, Backing::Anonymous, VmOptions::default());
    let mut guest = Guest::new(&vm, 0);
    guest.write(0, 1);
    let mine = Requests::embedder(3).unwrap();
    assert!(!guest.vcpu.gate().request(mine));
    vm.clear_flush_young(&mut worker, range(0, PAGE)).unwrap();
    let refused = guest.vcpu.enter(&vm).err();
    assert_eq!(refused, Some(EntryError::Requests(mine)));
    assert!(guest.vcpu.enter(&vm).is_ok());
    guest.vcpu.moved();
    assert_eq!(guest.vcpu.enter(&vm).err(), Some(EntryError::Requests(Requests::NONE)));
    let (another, second) = self::vm::<F>(&machine, Backing::Anonymous, VmOptions::default());
    assert_eq!(guest.vcpu.enter(&another).err(), Some(EntryError::OtherMachine));
    drop((another, second, guest));
    finish(vm, worker);
}

/// Each test on each format.
macro_rules! tests {
    ($($test:ident)*) => {
        tests!(ept: Ept<InHardware>: $($test)*);
        tests!(ept_without_flags: Ept<InSoftware>: $($test)*);
        tests!(npt: Npt: $($test)*);
    };
    ($module:ident: $format:ty: $($test:ident)*) => {
        mod $module {
            use super::*;

            $(#[test]
            fn $test() {
                super::$test::<$format>();
            })*
        }
    };
}

tests! {
    prefetched_pages_are_not_accessed_and_end_where_the_host_has_none
    a_write_after_a_collection_is_in_the_next_one
    write_and_dirty_survive_aging
    an_aged_page_is_young_again_after_its_next_use
    address_spaces_have_roots_that_hardware_takes
    entering_answers_invalidations_and_passes_other_requests_on
}
