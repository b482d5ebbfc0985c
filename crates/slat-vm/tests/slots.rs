//! Memslots come and go, and what is wrong with one is said before anything changes.

mod guest;

use guest::*;
use slat::Gpa;
use slat_model::Backing;
use slat_vm::{Access, Exit, Hva, SlotConfig, SlotError, VmError, VmOptions};

#[test]
fn a_slot_that_cannot_be_is_refused_with_the_reason() {
    let machine = Watched::new(1);
    let vm = vm(&machine, 4 * BLOCK, Backing::Anonymous, VmOptions::default());
    let mut worker = vm.worker().unwrap();
    let good = SlotConfig::new(Gpa(BLOCK), BLOCK, Hva(0));
    vm.create_slot(&mut worker, 1, good).unwrap();
    let misaligned = Err(SlotError::Misaligned { to: PAGE });
    let overlaps = Err(SlotError::Overlaps { other: 1.into() });
    let limit = Gpa(1 << 40);
    let free = SlotConfig::new(Gpa(4 * BLOCK), BLOCK, Hva(0));
    for (config, expected) in [
        (SlotConfig { size: 0, ..free }, Err(SlotError::Empty)),
        (SlotConfig { size: PAGE + 1, ..free }, misaligned),
        (SlotConfig { gpa: Gpa(4 * BLOCK + 8), ..free }, misaligned),
        (SlotConfig { hva: Hva(512), ..free }, misaligned),
        (SlotConfig { gpa: Gpa(u64::MAX - PAGE + 1), ..free }, Err(SlotError::Wraps)),
        (SlotConfig { hva: Hva(u64::MAX - PAGE + 1), ..free }, Err(SlotError::Wraps)),
        (SlotConfig { gpa: Gpa((1 << 40) - PAGE), ..free }, Err(SlotError::OutOfRange { limit })),
        (SlotConfig { gpa: Gpa(1 << 50), ..free }, Err(SlotError::OutOfRange { limit })),
        (
            SlotConfig { max_page_size: Some(PAGE - 1), ..free },
            Err(SlotError::MaxPageSize { granule: PAGE }),
        ),
        (SlotConfig { gpa: Gpa(BLOCK), ..free }, overlaps),
        (SlotConfig { gpa: Gpa(2 * BLOCK - PAGE), ..free }, overlaps),
        (SlotConfig { gpa: Gpa(PAGE), ..free }, overlaps),
        (SlotConfig { gpa: Gpa(0), size: 4 * BLOCK, ..free }, overlaps),
        // Beside it is not over it.
        (SlotConfig { gpa: Gpa(0), ..free }, Ok(())),
        (SlotConfig { gpa: Gpa(2 * BLOCK), ..free }, Err(SlotError::Exists)),
    ] {
        assert_eq!(vm.create_slot(&mut worker, 2, config), expected, "{config:?}");
    }
    assert_eq!(vm.delete_slot(&mut worker, 7), Err(SlotError::NotFound));
    finish(vm, vec![worker]);
}

#[test]
fn a_slot_has_no_more_pages_than_kvm_admits() {
    let machine = Watched::new(1);
    let memory = machine.model.host_memory(BLOCK, Backing::Anonymous).unwrap();
    let format = slat::format::arm::Stage2::<slat::format::arm::K4>::new(48).unwrap();
    let vm: TestVm<'_> =
        slat_vm::Vm::new(&machine, TestHost::new(memory), format, 1, VmOptions::default()).unwrap();
    let mut worker = vm.worker().unwrap();
    let max = ((1 << 31) - 1) * PAGE;
    let config = SlotConfig::new(Gpa(0), max, Hva(0));
    let larger = SlotConfig { size: max + PAGE, ..config };
    assert_eq!(vm.create_slot(&mut worker, 0, larger), Err(SlotError::TooLarge { max }));
    vm.create_slot(&mut worker, 0, config).unwrap();
}

#[test]
fn a_chunk_for_eager_split_must_be_a_block_of_the_granule() {
    let machine = Watched::new(1);
    let make = |chunk| {
        let memory = machine.model.host_memory(BLOCK, Backing::Anonymous).unwrap();
        slat_vm::Vm::new(&machine, TestHost::new(memory), arm(), 1, eager(chunk)).map(|_| ())
    };
    for chunk in [BLOCK, GIB] {
        assert_eq!(make(chunk), Ok(()));
    }
    for chunk in [0, 1, PAGE, 2 * BLOCK, 512 * GIB] {
        let refused = VmError::EagerSplit { chunk, smallest: BLOCK, largest: GIB };
        assert_eq!(make(chunk), Err(refused));
    }
    assert_eq!(
        make(4096).unwrap_err().to_string(),
        "eager split in chunks of 0x1000 bytes: a chunk must be a block size of the format, 0x200000 to 0x40000000"
    );
}

#[test]
fn a_deleted_slot_is_gone_from_every_tlb_and_its_neighbours_stay() {
    let machine = Watched::new(1);
    let vm = vm(&machine, 4 * BLOCK, HUGE_2M, VmOptions::default());
    let mut worker = vm.worker().unwrap();
    // Three slots of one and a half blocks: two of their ends lie inside of blocks of the host.
    let size = BLOCK + BLOCK / 2;
    for id in 0..2 {
        let start = u64::from(id) * size;
        vm.create_slot(&mut worker, id, SlotConfig::new(Gpa(start), size, Hva(start))).unwrap();
    }
    let mut guest = Guest::new(&vm, 0);
    for page in 0..2 * size / PAGE {
        guest.write(page * PAGE, page);
    }
    let faults = guest.faults;
    vm.delete_slot(&mut worker, 1).unwrap();
    for page in 0..size / PAGE {
        assert_eq!(guest.cpu.read(Gpa(page * PAGE)), Ok(page));
        let fault = guest.cpu.read(Gpa(size + page * PAGE)).unwrap_err();
        assert!(matches!(guest.handle(fault), Exit::Mmio(_)));
    }
    assert_eq!(guest.faults, faults + size / PAGE);
    assert_eq!(vm.slot(&worker, 1), None);
    // The same guest addresses, other memory.
    vm.create_slot(&mut worker, 1, SlotConfig::new(Gpa(size), PAGE, Hva(4 * BLOCK - PAGE)))
        .unwrap();
    assert_eq!(guest.read(size), 0);
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn a_fault_that_looked_up_a_slot_before_it_is_deleted_installs_nothing() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, BLOCK, HUGE_2M, VmOptions::default());
    let mut guest = Guest::new(&vm, 0);
    vm.host().once(|| vm.delete_slot(&mut worker, 0).unwrap());
    assert_eq!(guest.fault(PAGE, Access::Write), Exit::Retry);
    assert!(matches!(guest.fault(PAGE, Access::Write), Exit::Mmio(_)));
    assert_eq!(level(&vm, &worker, PAGE), None);
    // Deleted and made again with other memory behind it: another version, another answer.
    vm.create_slot(&mut worker, 0, SlotConfig::new(Gpa(0), PAGE, Hva(0))).unwrap();
    vm.host().once(|| {
        vm.delete_slot(&mut worker, 0).unwrap();
        vm.create_slot(&mut worker, 0, SlotConfig::new(Gpa(0), PAGE, Hva(PAGE))).unwrap();
    });
    assert_eq!(guest.fault(0, Access::Write), Exit::Retry);
    assert_eq!(level(&vm, &worker, 0), None);
    assert_eq!(guest.fault(0, Access::Write), Exit::Resume);
    assert_eq!(found(&vm, &worker, 0).unwrap().output % BLOCK, PAGE);
    assert_eq!(guest.vcpu.statistics().retried, 2);
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn a_change_of_another_slot_neither_delays_nor_retries_a_fault() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, BLOCK, HUGE_2M, VmOptions::default());
    let mut guest = Guest::new(&vm, 0);
    vm.host().once(|| {
        vm.create_slot(&mut worker, 1, SlotConfig::new(Gpa(GIB), BLOCK, Hva(0))).unwrap();
    });
    assert_eq!(guest.fault(PAGE, Access::Write), Exit::Resume);
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn each_of_very_many_slots_is_found() {
    let machine = Watched::new(1);
    let vm = vm(&machine, BLOCK, Backing::Anonymous, VmOptions::default());
    let mut worker = vm.worker().unwrap();
    // Every second page, created in an order that jumps.
    let slots = 1021;
    let gpa = |id: u32| Gpa(u64::from(id) * 2 * PAGE);
    for n in 0..slots {
        let id = n * 377 % slots;
        vm.create_slot(&mut worker, id, SlotConfig::new(gpa(id), PAGE, Hva(0))).unwrap();
    }
    for id in (0..slots).filter(|id| id % 3 == 1) {
        vm.delete_slot(&mut worker, id).unwrap();
    }
    for id in 0..slots {
        let there = id % 3 != 1;
        let inside = vm.slot_at(&worker, 0, Gpa(gpa(id).0 + 8));
        assert_eq!(inside.map(|slot| slot.id.number), there.then_some(id));
        assert_eq!(vm.slot_at(&worker, 0, Gpa(gpa(id).0 + PAGE)), None);
        assert_eq!(vm.slot(&worker, id).map(|slot| slot.range.start()), there.then_some(gpa(id)));
    }
    finish(vm, vec![worker]);
}
