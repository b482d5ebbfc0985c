//! A shadowed guest on guest memory of `slat-vm`: what that promises of slots, the host and logs holds for the guest.
#![allow(missing_docs, clippy::precedence)]

#[path = "guest/mod.rs"]
mod guest;

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use guest::{A, D, P, PAGE, U, W};
use slat::format::arm::{K4, Stage2};
use slat::{Gpa, GpaRange, Hpa};
use slat_model::{Backing, HostMemory, LinearAccess, LongMode, LongModeCpu, Model};
use slat_shadow::{
    GuestAccess, GuestMemory, HostBytes, PagingMode, Root, Shadow, ShadowExit, ShadowOptions,
    VmMemory,
};
use slat_vm::{
    Access, Exit, Fault, FaultKind, Host, HostError, HostPage, Hva, LogMode, SlotConfig, Vcpu, Vm,
    VmOptions, Worker,
};

const BYTES: u64 = 4 << 20;
/// A page of the guest's user, and its frame.
const GVA: u64 = 0x1000;
const FRAME: u64 = 100;
const MODE: PagingMode = PagingMode { smap: false, ..PagingMode::LONG };

struct Memory(Arc<HostMemory>);

impl Host for Memory {
    fn page(&self, hva: Hva, _: Access) -> Result<HostPage, HostError> {
        let page = self.0.page(hva.0).ok_or(HostError::NotMapped)?;
        let output = Hpa(page.hpa.0 & !(page.size - 1));
        Ok(HostPage { output, size: page.size, writable: true, device: false })
    }
}

struct Bytes<'m> {
    model: &'m Model,
    cpu: RefCell<LongModeCpu>,
}

impl HostBytes for Bytes<'_> {
    fn word(&self, hpa: Hpa) -> Option<&AtomicU64> {
        self.model.host_word(hpa)
    }

    fn flush(&self) {
        self.cpu.borrow_mut().flush();
    }
}

type TestVm<'m> = Vm<'m, Stage2<K4>, Model, Memory>;

/// One CPU of a guest with one user page.
struct World<'a, 'm> {
    vm: &'a TestVm<'m>,
    vcpu: Vcpu<'m, Model>,
    worker: Worker<'m, Model>,
    looker: Worker<'m, Model>,
    bytes: &'a Bytes<'m>,
    shadow: Shadow<'m, Model>,
    root: Option<Root>,
    /// Faults that the memory below had to see to.
    below: usize,
}

/// Calls `f` in a world whose VM has these options and one slot, of everything.
fn with(backing: Backing, options: VmOptions, f: impl FnOnce(&mut World<'_, '_>)) {
    let model = Model::builder().cpus(1).slots(4).checked(false).build().unwrap();
    let memory = model.host_memory(BYTES, backing).unwrap();
    let table = |frame: u64| frame * PAGE | P | W | U;
    for (gpa, entry) in [(PAGE, table(2)), (2 * PAGE, table(3)), (3 * PAGE, table(4))] {
        memory.word(gpa).unwrap().store(entry, Ordering::Relaxed);
    }
    memory.word(4 * PAGE + 8).unwrap().store(table(FRAME) | A | D, Ordering::Relaxed);
    memory.word(3 * PAGE + 8).unwrap().store(2 << 20 | P | W | U | guest::LARGE, Ordering::Relaxed);
    let vm = Vm::new(&model, Memory(memory), Stage2::<K4>::new(40).unwrap(), 1, options).unwrap();
    let mut worker = vm.worker().unwrap();
    vm.create_slot(&mut worker, 0, SlotConfig::new(Gpa(0), BYTES, Hva(0))).unwrap();
    let bytes = Bytes { model: &model, cpu: RefCell::default() };
    let mut shadow = Shadow::new(&model, ShadowOptions::default()).unwrap();
    shadow.create_slot(GpaRange::new(Gpa(0), BYTES).unwrap()).unwrap();
    let looker = vm.worker().unwrap();
    let vcpu = vm.vcpu().unwrap();
    let mut world =
        World { vm: &vm, vcpu, worker, looker, bytes: &bytes, shadow, root: None, below: 0 };
    f(&mut world);
}

impl<'a, 'm> World<'a, 'm> {
    fn load(&mut self) {
        let memory = VmMemory { vm: self.vm, who: self.looker.participant(), bytes: self.bytes };
        let root = self.shadow.load_root(&memory, MODE, PAGE).unwrap();
        self.bytes.cpu.borrow_mut().flush();
        if let Some(old) = self.root.replace(root) {
            self.shadow.drop_root(&memory, old).unwrap();
        }
    }

    /// Where the guest's access goes.
    fn access(&mut self, gva: u64, kind: Access) -> Hpa {
        if self.root.is_none() {
            self.load();
        }
        let linear = LinearAccess { write: kind == Access::Write, fetch: false, user: true };
        let control = LongMode { smep: true, ..LongMode::default() };
        for _ in 0..20 {
            let root = self.root.as_ref().unwrap();
            let table = root.table();
            let tried =
                self.bytes.cpu.borrow_mut().access(self.bytes.model, table, control, gva, linear);
            if let Ok(hpa) = tried {
                return hpa;
            }
            let memory =
                VmMemory { vm: self.vm, who: self.looker.participant(), bytes: self.bytes };
            match self.shadow.fault(&memory, root, gva, GuestAccess::user(kind)).unwrap() {
                ShadowExit::Resume | ShadowExit::Retry => {}
                ShadowExit::ReloadRoot => self.load(),
                ShadowExit::SecondLevel { gpa, access, permission } => {
                    self.below += 1;
                    let kind =
                        if permission { FaultKind::Permission } else { FaultKind::Translation };
                    let exit = self.vcpu.fault(self.vm, Fault { gpa, access, kind }).unwrap();
                    assert!(matches!(exit, Exit::Resume | Exit::Retry), "{exit:?}");
                }
                other => panic!("{other:?}"),
            }
        }
        panic!("the access to {gva:#x} never gets through");
    }

    fn write(&mut self, value: u64) {
        let hpa = self.access(GVA, Access::Write);
        self.bytes.model.host_word(hpa).unwrap().store(value, Ordering::Relaxed);
    }

    fn shadow(&mut self, f: impl FnOnce(&mut Shadow<'m, Model>, &Below<'_, 'm>)) {
        let memory = VmMemory { vm: self.vm, who: self.looker.participant(), bytes: self.bytes };
        f(&mut self.shadow, &memory);
    }

    /// The frames whose bits a collection gives, after the shadow has been told.
    fn collect(&mut self) -> Vec<u64> {
        let mut bitmap = vec![0; (BYTES / PAGE / 64) as usize];
        self.vm.dirty_log(&mut self.worker, 0, &mut bitmap).unwrap();
        self.shadow(|shadow, memory| shadow.write_protect_pages(memory, Gpa(0), &bitmap));
        (0..BYTES / PAGE)
            .filter(|frame| bitmap[*frame as usize / 64] >> (frame % 64) & 1 == 1)
            .collect()
    }

    fn log(&mut self, mode: LogMode) {
        self.vm.enable_log(&mut self.worker, 0, mode).unwrap();
        let all = GpaRange::new(Gpa(0), BYTES).unwrap();
        self.shadow(|shadow, memory| shadow.write_protect(memory, all));
    }
}

type Below<'a, 'm> = VmMemory<'a, 'm, Stage2<K4>, Model, Memory, Bytes<'m>>;

fn page(frame: u64) -> GpaRange {
    GpaRange::new(Gpa(frame * PAGE), PAGE).unwrap()
}

#[test]
fn accesses_reach_the_hosts_page_and_stores_are_there() {
    with(Backing::Anonymous, VmOptions::default(), |world| {
        world.write(77);
        let host = world.vm.host().0.word(FRAME * PAGE).unwrap();
        assert_eq!(host.load(Ordering::Relaxed), 77);
    });
}

#[test]
fn writes_under_a_log_are_reported_once_a_collection_and_none_is_lost() {
    with(Backing::Anonymous, VmOptions::default(), |world| {
        world.write(1);
        world.log(LogMode::Protect);
        let before = world.below;
        world.access(GVA, Access::Read);
        assert_eq!(world.below, before, "reading needs nothing from below");
        for value in 2..5 {
            world.write(value);
            world.write(value);
            // Frame 4 is the table of the page, in which its CPU would note the first write.
            let dirty: Vec<_> = world.collect().into_iter().filter(|&frame| frame != 4).collect();
            assert_eq!(dirty, [FRAME]);
        }
        assert_eq!(world.collect(), [0; 0]);
    });
}

#[test]
fn what_the_shadow_notes_in_the_guests_tables_is_in_the_log() {
    with(Backing::Anonymous, VmOptions::default(), |world| {
        world.log(LogMode::Protect);
        assert_eq!(world.collect(), [0; 0]);
        world.access(GVA, Access::Read);
        assert_eq!(world.collect(), [1, 2, 3], "accessed flags; that of the page is set");
    });
}

#[test]
fn a_manual_log_reports_until_it_is_cleared() {
    with(Backing::Anonymous, VmOptions::default(), |world| {
        world.write(1);
        world.log(LogMode::Manual { initially_all_set: false });
        world.write(2);
        assert_eq!(world.collect(), [FRAME]);
        assert_eq!(world.collect(), [FRAME]);
        let word = FRAME / 64 * 64;
        let bitmap = [1 << (FRAME - word)];
        world.vm.clear_dirty_log(&mut world.worker, 0, word, 64, &bitmap).unwrap();
        world
            .shadow(|shadow, memory| shadow.write_protect_pages(memory, Gpa(word * PAGE), &bitmap));
        assert_eq!(world.collect(), [0; 0]);
        world.write(3);
        assert_eq!(world.collect(), [FRAME]);
    });
}

#[test]
fn a_ring_has_each_write_after_its_reset() {
    let options = VmOptions { dirty_ring: Some(256), ..VmOptions::default() };
    with(Backing::Anonymous, options, |world| {
        world.write(1);
        world.log(LogMode::Ring { backup: false });
        for value in 2..5 {
            world.write(value);
            let ring = world.vcpu.dirty_ring().unwrap();
            let mut pages = Vec::new();
            ring.harvest(|page| pages.push(page.page));
            assert_eq!(pages, [FRAME]);
            world.vm.reset_dirty_ring(&mut world.worker, &ring).unwrap();
            world.shadow(|shadow, memory| shadow.write_protect(memory, page(FRAME)));
        }
    });
}

#[test]
fn what_the_host_takes_back_no_cpu_reaches_and_the_next_access_faults_it_in() {
    with(Backing::Anonymous, VmOptions::default(), |world| {
        world.write(1);
        let before = world.below;
        let guard = world.vm.invalidate_begin(&mut world.worker, &[page(FRAME)]).unwrap();
        world.shadow(|shadow, memory| shadow.zap(memory, page(FRAME)));
        let cached = world.bytes.cpu.borrow().cached().filter(|(gva, _)| *gva == GVA).count();
        assert_eq!(cached, 0);
        // Meanwhile there is nothing below.
        world.shadow(|_, memory| assert_eq!(memory.below(Gpa(FRAME * PAGE)), None));
        guard.end();
        world.write(2);
        assert_eq!(world.below, before + 1);
    });
}

#[test]
fn blocks_below_are_blocks_in_the_shadow_until_a_log_takes_them_apart() {
    with(Backing::AnonymousThp, VmOptions::default(), |world| {
        let large = 2 << 20;
        world.access(large, Access::Write);
        assert_eq!(world.shadow.histogram().frames[1][1], 1);
        world.log(LogMode::Protect);
        world.access(large + 5 * PAGE, Access::Write);
        let histogram = world.shadow.histogram();
        assert_eq!((histogram.frames[0][1], histogram.frames[1][1]), (1, 0));
        assert_eq!(world.collect(), [512 + 5]);
    });
}

#[test]
fn a_slot_that_goes_takes_its_shadow_along() {
    with(Backing::Anonymous, VmOptions::default(), |world| {
        world.write(1);
        let all = GpaRange::new(Gpa(0), BYTES).unwrap();
        world.vm.delete_slot(&mut world.worker, 0).unwrap();
        world.shadow(|shadow, memory| shadow.delete_slot(memory, all).unwrap());
        assert_eq!(world.bytes.cpu.borrow().cached().count(), 0);
        assert_eq!(world.shadow.statistics().pages, 1, "the root that the CPU holds");
        world.vm.create_slot(&mut world.worker, 0, SlotConfig::new(Gpa(0), BYTES, Hva(0))).unwrap();
        world.shadow.create_slot(all).unwrap();
        world.write(2);
        assert_eq!(world.vm.host().0.word(FRAME * PAGE).unwrap().load(Ordering::Relaxed), 2);
    });
}

#[test]
fn a_frame_is_young_if_either_level_says_so() {
    with(Backing::Anonymous, VmOptions::default(), |world| {
        world.write(1);
        world.vm.clear_young(&mut world.worker, page(FRAME)).unwrap();
        assert!(world.shadow.clear_young(page(FRAME)));
        assert!(!world.shadow.test_young(page(FRAME)));
        world.bytes.flush();
        world.access(GVA, Access::Read);
        assert!(world.shadow.test_young(page(FRAME)));
    });
}
