//! Does operations on the machine and on the reference, and compares everything.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use slat::format::arm::{Granule, K4, K16, K64, Stage2};
use slat::{Execute, Gpa, GpaRange, Lookup};
use slat_model::{Cpu, Model, Registers};
use slat_vm::{Access, Exit, Fault, FaultKind, Guard, Hva, HvaRange, Vcpu, Vm, VmOptions, Worker};

use super::host::{Answers, SharedHost};
use super::operation::{CPUS, Operation, Setup};
use super::{EXECUTE, Leaf, Outcome, READ, Reference, Shape, Taken, WRITE, YOUNG};

/// A fault may find that another CPU has been there before, and then take what was missing.
const FAULTS: usize = 3;

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
            page,
            blocks: sizes.to_vec(),
            limit: 1 << 40,
            coherent_instructions: self.coherent_instructions,
            hardware_marks: self.hardware_marks,
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
    match setup.page_shift {
        12 => run_on::<K4>(setup, next),
        14 => run_on::<K16>(setup, next),
        _ => run_on::<K64>(setup, next),
    }
}

fn run_on<G: Granule>(setup: &Setup, mut next: impl FnMut(&Reference) -> Option<Operation>) {
    let reference = setup.reference();
    let model = Model::builder().page_shift(setup.page_shift).cpus(CPUS).slots(CPUS + 2);
    let model = model.table_limit(1 << 13).memory_limit(64 << 30).build().unwrap();
    let size = reference.host.targets as u64 * reference.host.unit;
    let memory = model.host_memory(size, setup.backing).unwrap();
    let host = SharedHost { memory, answers: Arc::new(Mutex::new(reference.host.clone())) };
    let options = VmOptions {
        eager_split: setup.eager.then_some(reference.shape.blocks[0]),
        coherent_instructions: setup.coherent_instructions,
        dirty_ring: Some(256),
        ..VmOptions::default()
    };
    let format = Stage2::<G>::new(40).unwrap().with_hardware_dirty(setup.hardware_marks);
    {
        let vm = Vm::new(&model, host.clone(), format, 7, options).unwrap();
        let registers = Registers { vttbr: vm.tree().root_register(), vtcr: format.vtcr() };
        let guest = |cpu| (vm.vcpu().unwrap(), model.cpu(cpu, registers).unwrap());
        let mut judge = Judge {
            worker: vm.worker().unwrap(),
            guests: (0..CPUS).map(guest).collect(),
            guards: Vec::new(),
            stored: Vec::new(),
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
        model.check_quiet(registers);
        for (vcpu, _) in &judge.guests {
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
            assert_eq!(s.faults, parts.iter().sum());
        }
    }
    model.check_freed();
    assert_eq!(model.counters().tables_in_use, 0, "every table came back");
    assert_eq!(model.violations(), 0);
}

type TheVm<'m, G> = Vm<'m, Stage2<G>, Model, SharedHost>;

struct Judge<'v, 'm, G: Granule> {
    model: &'m Model,
    vm: &'v TheVm<'m, G>,
    host: SharedHost,
    worker: Worker<'m, Model>,
    guests: Vec<(Vcpu<'m, Model>, Cpu<'m>)>,
    guards: Vec<Vec<Guard<'v, Model>>>,
    /// Places that have held something.
    stored: Vec<u64>,
    reference: Reference,
}

impl<G: Granule> Judge<'_, '_, G> {
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
            &Operation::Access { cpu, gpa, access } => self.access(cpu, gpa, access),
            &Operation::Fault { cpu, fault } => Outcome::Exit(self.guests[cpu].0.fault(vm, fault)),
            &Operation::LookUp { gpa } => {
                let found = vm.look_up(worker.participant(), Gpa(gpa), |hpa, write| (hpa, write));
                let place = |hpa| self.host.memory.offset_of(hpa).expect("host memory");
                Outcome::Found(found.map(|(hpa, write)| (place(hpa), write)))
            }
            &Operation::Create { id, config } => Outcome::Slot(vm.create_slot(worker, id, config)),
            &Operation::Change { id, config } => {
                Outcome::Changed(vm.change_slot(worker, id, config))
            }
            &Operation::Delete { id } => Outcome::Slot(vm.delete_slot(worker, id)),
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
            &Operation::Collapse { id } => Outcome::Collapsed(vm.collapse(worker, id).map(|_| ())),
            &Operation::Trim { range } => {
                vm.trim(worker, range).unwrap();
                Outcome::Done
            }
            &Operation::PreFault { cpu, range } => {
                Outcome::PreFaulted(self.guests[cpu].0.pre_fault(vm, range, || true))
            }
            &Operation::Age { range, clear: true } => {
                Outcome::Aged(vm.clear_young(worker, range).unwrap())
            }
            &Operation::Age { range, clear: false } => {
                Outcome::Aged(vm.test_young(worker, range).unwrap())
            }
            &Operation::Split { range } => Outcome::Split(vm.split(worker, range).unwrap()),
            Operation::Begin { ranges } => {
                let begin = |range: &Taken| match *range {
                    Taken::Guest(start, end) => {
                        let range = GpaRange::new(Gpa(start), end - start).unwrap();
                        vm.invalidate_begin(worker, &[range]).unwrap()
                    }
                    Taken::Host(start, end) => {
                        let range = HvaRange::new(Hva(start), end - start).unwrap();
                        vm.invalidate_host_begin(worker, &[range]).unwrap()
                    }
                };
                self.guards.push(ranges.iter().map(begin).collect());
                Outcome::Done
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
        for (vcpu, _) in &self.guests {
            let ring = vcpu.dirty_ring().expect("every vCPU has one");
            let pages = ring.harvest(|page| _ = all.insert((page.slot.number, page.page)));
            assert_eq!(self.vm.reset_dirty_ring(&mut self.worker, &ring), Ok(pages));
            assert_eq!(ring.used(), 0);
        }
        Outcome::Harvested(all)
    }

    fn access(&mut self, cpu: usize, gpa: u64, access: Access) -> Outcome {
        let (vcpu, cpu) = &mut self.guests[cpu];
        let value = self.reference.stores;
        for _ in 0..=FAULTS {
            let result = match access {
                Access::Read => cpu.read(Gpa(gpa)),
                Access::Write => cpu.write(Gpa(gpa), value).map(|()| value),
                Access::Execute => cpu.fetch(Gpa(gpa)),
            };
            let fault = match result {
                Ok(value) => {
                    if access == Access::Write {
                        self.stored.extend(self.reference.place(gpa));
                    }
                    return Outcome::Value(value);
                }
                Err(fault) => translate(fault, access),
            };
            match vcpu.fault(self.vm, fault) {
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
        let tree = self.vm.tree();
        let geometry = tree.geometry();
        let mut leaves = Vec::new();
        let mut at = 0;
        while at < geometry.limit().0 {
            let pin = self.worker.participant().pin();
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
                    leaves.push(Leaf { gpa: at, size, place, rights });
                    size
                }
                Lookup::Empty { level } => geometry.size(level),
                Lookup::Owned { .. } => panic!("nobody owns {at:#x}"),
            };
        }
        leaves
    }

    fn compare_slots(&self) {
        for id in 0..4 {
            let found = self.vm.slot(&self.worker, id);
            let slot = self.reference.slots.get(&id);
            assert_eq!(found.is_some(), slot.is_some(), "slot {id}");
            let (Some(found), Some(slot)) = (found, slot) else { continue };
            let config = slot.config;
            assert_eq!((found.range, found.hva), (slot.range(), config.hva));
            assert_eq!((found.read_only, found.logged), (config.read_only, slot.log.is_some()));
            let last = Gpa(slot.range().end().0 - 1);
            assert_eq!(self.vm.slot_at(&self.worker, 0, last), Some(found));
        }
    }
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
