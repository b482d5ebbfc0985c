//! What a monitor writes to guest memory itself is in the dirty log too.

mod guest;

use guest::*;
use slat::Gpa;
use slat_model::Backing;
use slat_vm::{Hva, LogError, LogMode, MonitorLog, SlotConfig, SlotId, VmOptions};

#[test]
fn the_monitors_writes_are_reported_once_beside_the_guests() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, BLOCK, Backing::Anonymous, VmOptions::default());
    let monitor = MonitorLog::new(BLOCK, 12).unwrap();
    vm.attach_monitor(&mut worker, 0, Some(&monitor)).unwrap();
    monitor.mark(100 * PAGE, 1);
    let mut guest = Guest::new(&vm, 0);
    for mode in [LogMode::Protect, LogMode::Manual { initially_all_set: false }] {
        vm.enable_log(&mut worker, 0, mode).unwrap();
        assert_eq!(collect(&vm, &mut worker, 0, 512), NONE, "marked before the log");
        guest.write(5 * PAGE, 1);
        monitor.mark(6 * PAGE - 1, 2);
        monitor.mark(511 * PAGE, 9 * PAGE);
        monitor.mark(0, 0);
        assert_eq!(collect(&vm, &mut worker, 0, 512), [5, 6, 511]);
        if mode != LogMode::Protect {
            let mask = [1 << 6, 0, 0, 0, 0, 0, 0, 1 << 63];
            assert_eq!(vm.clear_dirty_log(&mut worker, 0, 0, 512, &mask), Ok(2));
            assert_eq!(collect(&vm, &mut worker, 0, 512), [5]);
            assert!(!monitor.is_marked(511 * PAGE));
        } else {
            assert_eq!(collect(&vm, &mut worker, 0, 512), NONE);
        }
        vm.disable_log(&mut worker, 0).unwrap();
    }
    vm.attach_monitor(&mut worker, 0, None).unwrap();
    vm.enable_log(&mut worker, 0, LogMode::Protect).unwrap();
    monitor.mark(0, 1);
    assert_eq!(collect(&vm, &mut worker, 0, 512), NONE);
    let small = MonitorLog::new(BLOCK - PAGE, 12).unwrap();
    let wrong = Err(LogError::Monitor { pages: 512, page_shift: 12 });
    assert_eq!(vm.attach_monitor(&mut worker, 0, Some(&small)), wrong);
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn a_monitors_bitmap_is_of_one_slot() {
    let machine = Watched::new(1);
    let options = VmOptions { address_spaces: 2, ..VmOptions::default() };
    let (vm, mut worker) = vm_with_slot(&machine, BLOCK, Backing::Anonymous, options);
    let other = SlotId { space: 1, number: 0 };
    vm.create_slot(&mut worker, other, SlotConfig::new(Gpa(0), BLOCK, Hva(0))).unwrap();
    let monitor = MonitorLog::new(BLOCK, 12).unwrap();
    vm.attach_monitor(&mut worker, 0, Some(&monitor)).unwrap();
    vm.attach_monitor(&mut worker, 0, Some(&monitor.clone())).unwrap();
    let taken = Err(LogError::MonitorTaken { by: SlotId::from(0) });
    assert_eq!(vm.attach_monitor(&mut worker, other, Some(&monitor)), taken);
    vm.attach_monitor(&mut worker, 0, None).unwrap();
    vm.attach_monitor(&mut worker, other, Some(&monitor)).unwrap();
    finish(vm, vec![worker]);
}

#[test]
fn a_region_of_rust_vmm_marks_what_is_written_through_it() {
    use vm_memory::bitmap::Bitmap;
    use vm_memory::mmap::MmapRegionBuilder;
    use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap, GuestRegionMmap};

    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, BLOCK, Backing::Anonymous, VmOptions::default());
    let monitor = MonitorLog::new(BLOCK, 12).unwrap();
    vm.attach_monitor(&mut worker, 0, Some(&monitor)).unwrap();
    vm.enable_log(&mut worker, 0, LogMode::Protect).unwrap();
    let region = MmapRegionBuilder::new_with_bitmap(BLOCK as usize, monitor.clone());
    // Readable and writable, private and anonymous.
    let region = region.with_mmap_prot(0b11).with_mmap_flags(0x22);
    let region = GuestRegionMmap::new(region.build().unwrap(), GuestAddress(0)).unwrap();
    let memory = GuestMemoryMmap::from_regions(vec![region]).unwrap();
    memory.write_obj(7_u64, GuestAddress(5 * PAGE + 8)).unwrap();
    memory.write_slice(&[1; 2 * PAGE as usize], GuestAddress(9 * PAGE + 1)).unwrap();
    let _: u64 = memory.read_obj(GuestAddress(20 * PAGE)).unwrap();
    assert!(monitor.slice_at(4 * PAGE as usize).slice_at(PAGE as usize).dirty_at(0));
    assert_eq!(collect(&vm, &mut worker, 0, 512), [5, 9, 10, 11]);
    finish(vm, vec![worker]);
}
