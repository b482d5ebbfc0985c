//! Every granule: blocks, the log's pages, and the way back to blocks.

mod guest;

use guest::*;
use slat::format::arm::{Granule, K4, K16, K64, Stage2};
use slat::{Format, Gpa, Level, Lookup};
use slat_model::{Backing, Model, Registers};
use slat_vm::{Access, Exit, Fault, FaultKind, Hva, LogMode, SlotConfig, Vcpu, Vm, VmOptions};

struct Granuled<'v, 'm, G: Granule> {
    vm: &'v TestVm<'m, Stage2<G>>,
    vcpu: Vcpu<'m, Watched>,
}

impl<G: Granule> Granuled<'_, '_, G> {
    fn write(&mut self, gpa: u64) {
        let fault = Fault { gpa: Gpa(gpa), access: Access::Write, kind: FaultKind::Translation };
        assert_eq!(self.vcpu.fault(self.vm, fault), Ok(Exit::Resume));
    }

    fn level(&self, gpa: u64) -> Option<Level> {
        let pin = self.vcpu.participant().pin();
        match self.vm.tree().look_up(&pin, Gpa(gpa)).unwrap() {
            Lookup::Mapped { level, .. } => Some(level),
            _ => None,
        }
    }
}

fn block_to_pages_to_block<G: Granule>(bits: u32, eager_split: bool) {
    let format = Stage2::<G>::new(bits).unwrap();
    let page = 1u64 << <Stage2<G> as Format>::PAGE_SHIFT;
    let block = page * (page / 8);
    let model = Model::builder().page_shift(page.trailing_zeros()).table_limit(1 << 13);
    let machine = Watched::of(model.memory_limit(64 << 30).build().unwrap());
    let backing = Backing::AnonymousHugetlb { page_size: block };
    let memory = machine.model.host_memory(2 * block, backing).unwrap();
    let options = VmOptions { eager_split: eager_split.then_some(block), ..VmOptions::default() };
    let vm: TestVm<'_, Stage2<G>> =
        Vm::new(&machine, TestHost::new(memory), format, 3, options).unwrap();
    let mut worker = vm.worker().unwrap();
    vm.create_slot(&mut worker, 0, SlotConfig::new(Gpa(0), 2 * block, Hva(0))).unwrap();
    let mut guest = Granuled { vm: &vm, vcpu: vm.vcpu().unwrap() };
    let level = Level::new(2).unwrap();
    guest.write(block + 5);
    assert_eq!((guest.level(0), guest.level(block)), (None, Some(level)));
    for _ in 0..3 {
        vm.enable_log(&mut worker, 0, LogMode::Protect).unwrap();
        let expected = if eager_split { Level::LAST } else { level };
        assert_eq!(guest.level(block), Some(expected));
        let pages = block / page;
        for n in [0, 1, 64, pages - 1] {
            guest.write(block + n * page);
        }
        assert_eq!(guest.level(block), Some(Level::LAST));
        let mut bitmap = vec![0; (2 * pages / 64) as usize];
        assert_eq!(vm.dirty_log(&mut worker, 0, &mut bitmap), Ok(4));
        let words = (pages / 64) as usize;
        assert_eq!(bitmap[words..words + 2], [3, 1]);
        assert_eq!(bitmap[2 * words - 1], 1 << 63);
        vm.disable_log(&mut worker, 0).unwrap();
        guest.write(block);
        assert_eq!(guest.level(block), Some(level));
    }
    let registers = Registers { vttbr: vm.tree().root_register(), vtcr: format.vtcr() };
    machine.model.check_quiet(registers);
    drop((guest, worker));
    drop(vm);
    machine.model.check_freed();
    assert_eq!(machine.model.counters().tables_in_use, 0);
}

#[test]
fn a_block_becomes_pages_under_a_log_and_a_block_again_after_it() {
    for eager_split in [false, true] {
        block_to_pages_to_block::<K4>(40, eager_split);
        block_to_pages_to_block::<K4>(48, eager_split);
        block_to_pages_to_block::<K16>(40, eager_split);
        block_to_pages_to_block::<K16>(47, eager_split);
        // Two levels only.
        block_to_pages_to_block::<K64>(42, eager_split);
        block_to_pages_to_block::<K64>(48, eager_split);
    }
}
