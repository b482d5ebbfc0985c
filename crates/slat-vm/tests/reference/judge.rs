//! Does operations on the machine and on the reference, and compares everything.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use slat::format::arm::{Granule, K4, K16, K64, Stage2};
use slat::format::ept::{Ept, InHardware, InSoftware};
use slat::format::npt::Npt;
use slat::{Execute, Gpa, GpaRange, Lookup};
use slat_model::{Control, Cpu, Model, Modelled};
use slat_vm::{
    Access, Exit, Fault, FaultKind, Guard, Hva, HvaRange, MonitorLog, SlotId, Vcpu, Vm, VmOptions,
    Worker,
};

use super::host::{Answers, SharedHost};
use super::operation::{CPUS, Operation, Setup, Tables};
use super::{At, EXECUTE, Leaf, Outcome, READ, Reference, Shape, Taken, WRITE, YOUNG};

/// A fault may find that another CPU has been there before, and then take what was missing.
const FAULTS: usize = 3;
/// Width of guest-physical addresses.
const BITS: u32 = 40;

impl Setup {
    /// The reference before the first operation.
    pub(crate) fn reference(&self) -> Reference {
        let page = 1 << self.page_shift;
        let sizes: &[u64] = match self.page_shift {
            12 => &[2 << 20, 1 << 30],
            14 => &[32 << 20],
            _ => &[512 << 20],
        };
        let shape = Shape {
            spaces: self.spaces,
            page,
            blocks: sizes.to_vec(),
            limit: 1 << BITS,
            coherent_instructions: self.coherent_instructions,
            hardware_ages: match self.tables {
                Tables::Arm => self.hardware_marks,
                Tables::Ept | Tables::Npt => true,
                Tables::PlainEpt => false,
            },
            hardware_marks: self.hardware_marks,
            around: page * u64::from(self.around),
        };
        let unit = match self.backing {
            slat_model::Backing::AnonymousHugetlb { page_size } => page_size,
            slat_model::Backing::AnonymousThp => sizes[0],
            _ => page,
        };
        let (units, spare) = match unit / page {
            1 => (320, 64),
            2..64 => (24, 8),
            _ => (3, 2),
        };
        Reference::new(shape, Answers::new(unit, units, spare))
    }
}

/// Does what `next` says until it has nothing more to say.
///
/// # Panics
/// If anything is not as the reference says.
pub(crate) fn run(setup: &Setup, next: impl FnMut(&Reference) -> Option<Operation>) {
    let marks = setup.hardware_marks;
    match (setup.tables, setup.page_shift) {
        (Tables::Ept, _) => {
            let format = Ept::<InHardware>::new(BITS).unwrap();
            run_on(setup, format.with_hardware_dirty(marks), next);
        }
        (Tables::PlainEpt, _) => run_on(setup, Ept::<InSoftware>::new(BITS).unwrap(), next),
        (Tables::Npt, _) => {
            run_on(setup, Npt::new(BITS).unwrap().with_hardware_dirty(marks), next);
        }
        (Tables::Arm, 12) => run_on(setup, arm::<K4>(marks), next),
        (Tables::Arm, 14) => run_on(setup, arm::<K16>(marks), next),
        (Tables::Arm, _) => run_on(setup, arm::<K64>(marks), next),
    }
}

fn arm<G: Granule>(marks: bool) -> Stage2<G> {
    Stage2::new(BITS).unwrap().with_hardware_dirty(marks)
}

fn run_on<F: Modelled>(
    setup: &Setup,
    format: F,
    mut next: impl FnMut(&Reference) -> Option<Operation>,
) {
    let reference = setup.reference();
    let model = Model::builder().architecture(F::ARCHITECTURE).page_shift(setup.page_shift);
    let model = model.cpus(CPUS).slots(CPUS + 2);
    let model = model.table_limit(1 << 13).memory_limit(64 << 30).build().unwrap();
    let size = reference.host.targets as u64 * reference.host.unit;
    let memory = model.host_memory(size, setup.backing).unwrap();
    let host = SharedHost { memory, answers: Arc::new(Mutex::new(reference.host.clone())) };
    let options = VmOptions {
        eager_split: setup.eager.then_some(reference.shape.blocks[0]),
        coherent_instructions: setup.coherent_instructions,
        dirty_ring: Some(256),
        address_spaces: setup.spaces,
        fault_around: setup.around,
        ..VmOptions::default()
    };
    {
        let vm = Vm::new(&model, host.clone(), format, 7, options).unwrap();
        let guest = |cpu| {
            let vcpu = vm.vcpu().unwrap();
            let mut cpu = model.cpu(cpu, control(&vm, 0)).unwrap();
            cpu.attend(vcpu.participant().index());
            Guest { vcpu, cpu, space: 0 }
        };
        let mut judge = Judge {
            worker: vm.worker().unwrap(),
            guests: (0..CPUS).map(guest).collect(),
            guards: Vec::new(),
            stored: Vec::new(),
            monitors: BTreeMap::new(),
            model: &model,
            vm: &vm,
            host,
            reference,
        };
        let mut count = 0;
        while let Some(operation) = next(&judge.reference) {
            judge.step(count, &operation);
            count += 1;
        }
        judge.guards.clear();
        (0..setup.spaces).for_each(|space| model.check_quiet(control(&vm, space)));
        for Guest { vcpu, .. } in &judge.guests {
            let s = vcpu.statistics();
            let parts = [
                s.fixed,
                s.spurious,
                s.retried,
                s.mmio,
                s.converted,
                s.ring_full,
                s.young,
                s.aborted,
                s.failed,
            ];
            assert_eq!(s.faults, parts.iter().sum::<u64>());
        }
    }
    model.check_freed();
    assert_eq!(model.counters().tables_in_use, 0, "every table came back");
    assert_eq!(model.violations(), 0);
}

type TheVm<'m, F> = Vm<'m, F, Model, SharedHost>;

fn control<F: Modelled>(vm: &TheVm<'_, F>, space: u16) -> Control {
    F::control_of(vm.tree_of(space).expect("the VM has so many"))
}

/// A vCPU, and the CPU that it runs on.
struct Guest<'m> {
    vcpu: Vcpu<'m, Model>,
    cpu: Cpu<'m>,
    space: u16,
}

impl<'m> Guest<'m> {
    fn switch<F: Modelled>(&mut self, vm: &TheVm<'m, F>, space: u16) {
        if self.space != space {
            self.vcpu.switch_space(vm, space).unwrap();
            self.cpu.load(control(vm, space));
            self.space = space;
        }
    }

    /// Inside the guest, for one access.
    fn run<F: Modelled, R>(
        &mut self,
        vm: &TheVm<'m, F>,
        access: impl FnOnce(&mut Cpu<'m>) -> R,
    ) -> R {
        // One thread runs all vCPUs.
        self.cpu.bind();
        loop {
            if let Ok(_inside) = self.vcpu.enter(vm) {
                return access(&mut self.cpu);
            }
        }
    }
}

struct Judge<'v, 'm, F: Modelled> {
    model: &'m Model,
    vm: &'v TheVm<'m, F>,
    host: SharedHost,
    worker: Worker<'m, Model>,
    guests: Vec<Guest<'m>>,
    guards: Vec<Vec<Guard<'v, Model>>>,
    /// Places that have held something.
    stored: Vec<u64>,
    /// The bitmaps that the monitor marks.
    monitors: BTreeMap<SlotId, MonitorLog>,
    reference: Reference,
}

impl<F: Modelled> Judge<'_, '_, F> {
    fn step(&mut self, number: usize, operation: &Operation) {
        let expected = self.reference.apply(operation);
        let outcome = self.perform(operation);
        assert!(
            self.reference.admits(&expected, &outcome),
            "operation {number}, {operation:x?}, must return {expected:x?}: {outcome:x?}"
        );
        let adopted = self.reference.adopt(&self.leaves());
        if let Err(wrong) = adopted {
            panic!("after operation {number}, {operation:x?}: {wrong}");
        }
        self.compare_slots();
    }

    fn perform(&mut self, operation: &Operation) -> Outcome {
        let Self { vm, worker, .. } = self;
        match operation {
            &Operation::Access { cpu, at, access } => self.access(cpu, at, access),
            &Operation::Fault { cpu, space, fault, private } => {
                let guest = &mut self.guests[cpu];
                guest.switch(vm, space);
                Outcome::Exit(match private {
                    Some(private) => guest.vcpu.fault_in(vm, fault, private),
                    None => guest.vcpu.fault(vm, fault),
                })
            }
            &Operation::LookUp { at: (space, gpa) } => {
                let used = |hpa, write| (hpa, write);
                let found = vm.look_up_in(worker.participant(), space, Gpa(gpa), used);
                let place = |hpa| self.host.memory.offset_of(hpa).expect("host memory");
                Outcome::Found(found.map(|(hpa, write)| (place(hpa), write)))
            }
            &Operation::Create { id, config } => Outcome::Slot(vm.create_slot(worker, id, config)),
            &Operation::Change { id, config } => {
                Outcome::Changed(vm.change_slot(worker, id, config))
            }
            &Operation::Delete { id } => Outcome::Slot(vm.delete_slot(worker, id)),
            &Operation::Convert { id, range, private } => {
                Outcome::Converted(vm.set_private(worker, id, range, private))
            }
            &Operation::Enable { id, mode } => Outcome::Log(vm.enable_log(worker, id, mode)),
            &Operation::Disable { id } => Outcome::Log(vm.disable_log(worker, id)),
            &Operation::Collect { id, words } => {
                let mut bitmap = vec![0; words];
                Outcome::Collected(vm.dirty_log(worker, id, &mut bitmap), bitmap)
            }
            Operation::Clear { id, first, pages, bitmap } => {
                Outcome::Cleared(vm.clear_dirty_log(worker, *id, *first, *pages, bitmap))
            }
            Operation::Rings => self.harvest(),
            &Operation::Emulate { cpu, at: (space, gpa) } => {
                let guest = &mut self.guests[cpu];
                guest.switch(vm, space);
                Outcome::Log(guest.vcpu.mark_dirty(vm, Gpa(gpa)))
            }
            &Operation::Mark { space, range } => Outcome::Log(vm.mark_dirty(worker, space, range)),
            &Operation::Attach { id, pages } => {
                let geometry = vm.tree().geometry();
                let (page, shift) = (geometry.page_size(), geometry.page_size().ilog2());
                let monitor = pages.map(|pages| MonitorLog::new(pages * page, shift).unwrap());
                let attached = vm.attach_monitor(worker, id, monitor.as_ref());
                if let (Ok(()), Some(monitor)) = (attached, monitor) {
                    self.monitors.insert(id, monitor);
                }
                Outcome::Log(attached)
            }
            &Operation::Monitor { id, offset, bytes } => {
                self.monitors.get(&id).inspect(|monitor| monitor.mark(offset, bytes));
                Outcome::Done
            }
            &Operation::Collapse { id } => Outcome::Collapsed(vm.collapse(worker, id).map(|_| ())),
            &Operation::Trim { range } => {
                vm.trim(worker, range).unwrap();
                Outcome::Done
            }
            &Operation::PreFault { cpu, space, range } => {
                let guest = &mut self.guests[cpu];
                guest.switch(vm, space);
                Outcome::PreFaulted(guest.vcpu.pre_fault(vm, range, || true))
            }
            &Operation::Age { range: Taken::Guest(start, end), clear } => {
                let range = guest_range(start, end);
                let aged = if clear {
                    vm.clear_young(worker, range)
                } else {
                    vm.test_young(worker, range)
                };
                Outcome::Aged(aged.unwrap())
            }
            &Operation::Age { range: Taken::Host(start, end), clear } => {
                let range = host_range(start, end);
                let aged = if clear {
                    vm.clear_host_young(worker, range)
                } else {
                    vm.test_host_young(worker, range)
                };
                Outcome::Aged(aged.unwrap())
            }
            &Operation::Split { range } => Outcome::Split(vm.split(worker, range).unwrap()),
            Operation::Begin { ranges } => {
                let mut guards = Vec::new();
                let mut begin = |range: &Taken| {
                    let guard = match *range {
                        Taken::Guest(start, end) => {
                            vm.invalidate_begin(worker, &[guest_range(start, end)])
                        }
                        Taken::Host(start, end) => {
                            vm.invalidate_host_begin(worker, &[host_range(start, end)])
                        }
                    };
                    guard.map(|guard| guards.push(guard))
                };
                let begun = ranges.iter().map(&mut begin).collect();
                self.guards.push(guards);
                Outcome::Begun(begun)
            }
            &Operation::Back { unit, .. } => {
                self.host.answers.lock().unwrap().clone_from(&self.reference.host);
                self.move_contents(unit);
                Outcome::Done
            }
            &Operation::End { invalidation } => {
                if invalidation < self.guards.len() {
                    self.guards.remove(invalidation).into_iter().for_each(Guard::end);
                }
                Outcome::Done
            }
        }
    }

    /// Reads and resets the rings of all vCPUs.
    fn harvest(&mut self) -> Outcome {
        let mut all = BTreeSet::new();
        for Guest { vcpu, .. } in &self.guests {
            let ring = vcpu.dirty_ring().expect("every vCPU has one");
            let pages = ring.harvest(|page| _ = all.insert((page.slot, page.page)));
            assert_eq!(self.vm.reset_dirty_ring(&mut self.worker, &ring), Ok(pages));
            assert_eq!(ring.used(), 0);
        }
        Outcome::Harvested(all)
    }

    fn access(&mut self, cpu: usize, at: At, access: Access) -> Outcome {
        let (space, gpa) = at;
        self.guests[cpu].switch(self.vm, space);
        let guest = &mut self.guests[cpu];
        let value = self.reference.stores;
        for _ in 0..=FAULTS {
            let result = guest.run(self.vm, |cpu| match access {
                Access::Read => cpu.read(Gpa(gpa)),
                Access::Write => cpu.write(Gpa(gpa), value).map(|()| value),
                Access::Execute => cpu.fetch(Gpa(gpa)),
            });
            let fault = match result {
                Ok(value) => {
                    if access == Access::Write {
                        self.stored.extend(self.reference.place(at));
                    }
                    return Outcome::Value(value);
                }
                Err(fault) => translate(fault, access),
            };
            match guest.vcpu.fault(self.vm, fault) {
                Ok(Exit::Resume) => {}
                other => return Outcome::Exit(other),
            }
        }
        panic!("{access:?} of {gpa:#x} faults again and again");
    }

    /// What the guest has stored in a unit follows it to where it is now.
    fn move_contents(&mut self, unit: usize) {
        let Reference { host, contents, .. } = &self.reference;
        let hvas = host.range(unit);
        let Some(place) = host.place(hvas.start) else { return };
        let store = |place, value| {
            self.host.memory.word(place).expect("inside").store(value, Ordering::Relaxed);
        };
        let inside = place..place + host.unit;
        self.stored.iter().filter(|stored| inside.contains(stored)).for_each(|&at| store(at, 0));
        for (hva, &value) in contents.range(hvas.clone()) {
            let at = place + (hva - hvas.start);
            store(at, value);
            self.stored.push(at);
        }
    }

    /// Everything that the tables translate, in order.
    fn leaves(&self) -> Vec<Leaf> {
        let spaces = 0..self.reference.shape.spaces;
        spaces.flat_map(|space| self.leaves_in(space)).collect()
    }

    fn leaves_in(&self, space: u16) -> Vec<Leaf> {
        let tree = self.vm.tree_of(space).expect("the VM has so many");
        let geometry = tree.geometry();
        let mut leaves = Vec::new();
        let pin = self.worker.participant().pin();
        let mut at = 0;
        while at < geometry.limit().0 {
            at += match tree.look_up(&pin, Gpa(at)).unwrap() {
                Lookup::Mapped { output, level, template } => {
                    let attributes = tree.attributes(template);
                    let execute = attributes.execute != Execute::No;
                    let rights = READ
                        | if attributes.write { WRITE } else { 0 }
                        | if execute { EXECUTE } else { 0 }
                        | if attributes.accessed { YOUNG } else { 0 };
                    let size = geometry.size(level);
                    let place = self.host.memory.offset_of(output).expect("host memory");
                    leaves.push(Leaf { space, gpa: at, size, place, rights });
                    size
                }
                Lookup::Empty { level } => geometry.size(level),
                Lookup::Owned { .. } => panic!("nobody owns {at:#x}"),
            };
        }
        leaves
    }

    fn compare_slots(&self) {
        let ids = (0..self.reference.shape.spaces)
            .flat_map(|space| (0..4).map(move |number| SlotId { space, number }));
        for id in ids {
            let found = self.vm.slot(&self.worker, id);
            let slot = self.reference.slots.get(&id);
            assert_eq!(found.is_some(), slot.is_some(), "slot {id}");
            let (Some(found), Some(slot)) = (found, slot) else { continue };
            let config = slot.config;
            assert_eq!((found.range, found.hva), (slot.range(), config.hva));
            assert_eq!((found.read_only, found.logged), (config.read_only, slot.log.is_some()));
            let last = Gpa(slot.range().end().0 - 1);
            assert_eq!(self.vm.slot_at(&self.worker, id.space, last), Some(found));
            let private = config.private.map(|_| slot.pages.last().expect("not empty").private);
            assert_eq!(self.vm.is_private(&self.worker, id.space, last), private);
        }
    }
}

fn guest_range(start: u64, end: u64) -> GpaRange {
    GpaRange::new(Gpa(start), end - start).expect("not empty")
}

fn host_range(start: u64, end: u64) -> HvaRange {
    HvaRange::new(Hva(start), end - start).expect("not empty")
}

fn translate(fault: slat_model::Fault, access: Access) -> Fault {
    use slat_model::FaultKind as Kind;
    let kind = match fault.kind {
        Kind::Translation { .. } => FaultKind::Translation,
        Kind::Permission { .. } => FaultKind::Permission,
        Kind::AccessFlag { .. } => FaultKind::AccessFlag,
        other => panic!("no fault of a guest: {other:?}"),
    };
    Fault { gpa: fault.gpa, access, kind }
}
