//! Manual protection: the caller clears the log section by section, and only what it clears is protected again.

mod guest;

use guest::*;
use slat::{Event, Gpa};
use slat_model::Backing;
use slat_vm::{Hva, LogError, LogMode, SlotConfig, VmOptions, Worker};

const ALL_SET: LogMode = LogMode::Manual { initially_all_set: true };
const MANUAL: LogMode = LogMode::Manual { initially_all_set: false };

fn clear<'m>(
    vm: &TestVm<'m>,
    worker: &mut Worker<'m, Watched>,
    first: u64,
    pages: u64,
    mask: &[u64],
) -> u64 {
    vm.clear_dirty_log(worker, 0, first, pages, mask).unwrap()
}

#[test]
fn without_initially_all_set_manual_mode_protects_everything_at_enable() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, BLOCK, Backing::Anonymous, VmOptions::default());
    let mut guest = Guest::new(&vm, 0);
    guest.write(PAGE, 1);
    vm.enable_log(&mut worker, 0, MANUAL).unwrap();
    assert!(!writable(&vm, &worker, PAGE));
    assert_eq!(collect(&vm, &mut worker, 0, 512), NONE);
    guest.write(PAGE, 2);
    // Collecting copies; only clearing protects.
    assert_eq!(collect(&vm, &mut worker, 0, 512), [1]);
    assert_eq!(collect(&vm, &mut worker, 0, 512), [1]);
    assert!(writable(&vm, &worker, PAGE));
    assert_eq!(clear(&vm, &mut worker, 0, 64, &[0b110]), 1);
    assert!(!writable(&vm, &worker, PAGE));
    assert_eq!(collect(&vm, &mut worker, 0, 512), NONE);
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn initially_all_set_protects_nothing_at_enable_and_every_bit_is_one() {
    let machine = Watched::new(1);
    for options in [VmOptions::default(), eager(BLOCK)] {
        let vm = vm(&machine, 2 * BLOCK, HUGE_2M, options);
        let mut worker = vm.worker().unwrap();
        let pages = 512 + 67;
        vm.create_slot(&mut worker, 0, SlotConfig::new(Gpa(0), pages * PAGE, Hva(0))).unwrap();
        let mut guest = Guest::new(&vm, 0);
        guest.write(0, 1);
        let before = machine.model.counters();
        vm.enable_log(&mut worker, 0, ALL_SET).unwrap();
        let after = machine.model.counters();
        assert_eq!((after.waits, after.publishes), (before.waits, before.publishes));
        assert_eq!(found(&vm, &worker, 0).map(|f| (f.level, f.write)), Some((2, true)));
        assert_eq!(guest.write(BLOCK - 8, 1), 0);
        assert_eq!(collect(&vm, &mut worker, 0, pages), (0..pages).collect::<Vec<_>>());
        drop(guest);
        finish(vm, vec![worker]);
    }
}

#[test]
fn a_block_that_begins_or_ends_where_the_cleared_pages_do_is_not_split() {
    let machine = Watched::new(1);
    // Blocks of 2M in the middle of what a block of 1G would cover.
    let (vm, mut worker) = vm_with_slot(&machine, 3 * BLOCK, HUGE_2M, VmOptions::default());
    let mut guest = Guest::new(&vm, 0);
    (0..3).for_each(|block| _ = guest.write(block * BLOCK, 1));
    vm.enable_log(&mut worker, 0, ALL_SET).unwrap();
    assert_eq!(clear(&vm, &mut worker, 512, 512, &[u64::MAX; 8]), 512);
    let levels: Vec<_> = (0..3).map(|block| level(&vm, &worker, block * BLOCK)).collect();
    assert_eq!(levels, [Some(2); 3]);
    assert!(writable(&vm, &worker, 0) && writable(&vm, &worker, 2 * BLOCK));
    assert!(!writable(&vm, &worker, BLOCK));
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn clearing_one_page_of_a_block_protects_that_page_and_no_other() {
    let machine = Watched::new(1);
    for options in [VmOptions::default(), eager(BLOCK)] {
        for page in [0, 5, 63, 64, 300, 511] {
            let (vm, mut worker) = vm_with_slot(&machine, 2 * BLOCK, HUGE_2M, options);
            let mut guest = Guest::new(&vm, 0);
            guest.write(0, 1);
            guest.write(BLOCK, 1);
            vm.enable_log(&mut worker, 0, ALL_SET).unwrap();
            assert_eq!(clear(&vm, &mut worker, page & !63, 64, &[1 << (page % 64)]), 1);
            for other in 0..512 {
                let at = found(&vm, &worker, other * PAGE).unwrap();
                assert_eq!((at.level, at.write), (LAST, other != page), "{page} {other}");
            }
            assert_eq!(level(&vm, &worker, BLOCK), Some(2));
            assert_eq!(guest.write((page ^ 1) * PAGE, 1), 0);
            assert_eq!(guest.write(page * PAGE, 1), 1);
            drop(guest);
            finish(vm, vec![worker]);
        }
    }
}

#[test]
fn clearing_whole_words_leaves_the_pages_around_them_writable() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, GIB, HUGE_1G, VmOptions::default());
    let mut guest = Guest::new(&vm, 0);
    guest.write(0, 1);
    vm.enable_log(&mut worker, 0, ALL_SET).unwrap();
    // From the middle of one 2M block to the middle of the third.
    let (first, pages) = (256, 1024);
    assert_eq!(clear(&vm, &mut worker, first, pages, &[u64::MAX; 16]), pages);
    for page in [0, 255, 256, 600, 1279, 1280, 2000, 262_143] {
        let protected = (first..first + pages).contains(&page);
        assert_eq!(writable(&vm, &worker, page * PAGE), !protected, "{page}");
    }
    // Without eager split, what is protected whole stays a block.
    assert_eq!(level(&vm, &worker, BLOCK), Some(2));
    assert_eq!(worker.participant().counters.splits.get(), 3);
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn pages_between_cleared_words_whose_bits_stay_set_stay_writable() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, BLOCK, HUGE_2M, VmOptions::default());
    let mut guest = Guest::new(&vm, 0);
    guest.write(0, 1);
    vm.enable_log(&mut worker, 0, ALL_SET).unwrap();
    let mask = [u64::MAX, 0, u64::MAX, !1, 0, 0, u64::MAX, 0];
    assert_eq!(clear(&vm, &mut worker, 0, 512, &mask), 3 * 64 + 63);
    for page in 0..512 {
        let cleared = mask[(page / 64) as usize] >> (page % 64) & 1 == 1;
        assert_eq!(writable(&vm, &worker, page * PAGE), !cleared, "{page}");
    }
    // Now that some are clear, the words between are walked over: what was read-only stays so.
    assert_eq!(clear(&vm, &mut worker, 0, 512, &[u64::MAX; 8]), 512 - 3 * 64 - 63);
    assert!((0..512).all(|page| !writable(&vm, &worker, page * PAGE)));
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn only_pages_whose_bit_was_set_are_protected_by_a_clear() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, BLOCK, Backing::Anonymous, VmOptions::default());
    let mut guest = Guest::new(&vm, 0);
    vm.enable_log(&mut worker, 0, MANUAL).unwrap();
    for page in [1, 2, 70] {
        guest.write(page * PAGE, 1);
    }
    let before = worker.participant().counters.exchanged.get();
    assert_eq!(clear(&vm, &mut worker, 0, 512, &[0b10, 0, 0, 0, 0, 0, 0, 0]), 1);
    assert_eq!(worker.participant().counters.exchanged.get(), before + 1);
    assert!(!writable(&vm, &worker, PAGE) && writable(&vm, &worker, 2 * PAGE));
    assert!(writable(&vm, &worker, 70 * PAGE));
    // Bits that are clear already cost nothing.
    let before = machine.model.counters();
    assert_eq!(clear(&vm, &mut worker, 64, 64, &[1 << 7]), 0);
    assert_eq!(machine.model.counters(), before);
    assert_eq!(collect(&vm, &mut worker, 0, 512), [2, 70]);
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn sections_of_a_slot_that_ends_in_the_middle_of_a_word() {
    let machine = Watched::new(1);
    let vm = vm(&machine, BLOCK, Backing::Anonymous, VmOptions::default());
    let mut worker = vm.worker().unwrap();
    vm.create_slot(&mut worker, 0, SlotConfig::new(Gpa(0), 67 * PAGE, Hva(0))).unwrap();
    // The neighbour must not be touched by what lies beyond the end.
    vm.create_slot(&mut worker, 1, SlotConfig::new(Gpa(67 * PAGE), 5 * PAGE, Hva(67 * PAGE)))
        .unwrap();
    let mut guest = Guest::new(&vm, 0);
    for page in 0..72 {
        guest.write(page * PAGE, 1);
    }
    vm.enable_log(&mut worker, 0, ALL_SET).unwrap();
    let mut try_clear =
        |first, pages, words: &[u64]| vm.clear_dirty_log(&mut worker, 0, first, pages, words);
    assert_eq!(try_clear(65, 2, &[3]), Err(LogError::FirstPage));
    assert_eq!(try_clear(1, 0, &[]), Err(LogError::FirstPage));
    assert_eq!(try_clear(0, 63, &[1]), Err(LogError::PageCount));
    assert_eq!(try_clear(0, 65, &[1, 1]), Err(LogError::PageCount));
    assert_eq!(try_clear(64, 2, &[1]), Err(LogError::PageCount));
    assert_eq!(try_clear(64, 4, &[1]), Err(LogError::BeyondEnd { pages: 67 }));
    assert_eq!(try_clear(128, 0, &[]), Err(LogError::BeyondEnd { pages: 67 }));
    assert_eq!(try_clear(128, 64, &[1]), Err(LogError::BeyondEnd { pages: 67 }));
    assert_eq!(try_clear(0, u64::MAX, &[1]), Err(LogError::BeyondEnd { pages: 67 }));
    assert_eq!(try_clear(u64::MAX - 63, 64, &[1]), Err(LogError::BeyondEnd { pages: 67 }));
    assert_eq!(try_clear(64, 3, &[1, 1]), Err(LogError::BitmapLength { words: 1 }));
    assert_eq!(try_clear(64, 3, &[]), Err(LogError::BitmapLength { words: 1 }));
    assert_eq!(try_clear(0, 0, &[]), Ok(0));
    // Bits beyond the end are ignored.
    assert_eq!(try_clear(64, 3, &[u64::MAX << 1]), Ok(2));
    assert_eq!(vm.dirty_log(&mut worker, 0, &mut [0; 1]), Err(LogError::BitmapLength { words: 2 }));
    assert_eq!(vm.dirty_log(&mut worker, 0, &mut [0; 3]), Err(LogError::BitmapLength { words: 2 }));
    assert_eq!(collect(&vm, &mut worker, 0, 67), (0..65).collect::<Vec<_>>());
    for page in 60..72 {
        assert_eq!(writable(&vm, &worker, page * PAGE), page != 65 && page != 66, "{page}");
    }
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn clearing_a_section_reads_no_more_of_the_bitmap_than_the_section() {
    let machine = Watched::new(1);
    let (vm, mut worker) =
        vm_with_slot(&machine, 4096 * PAGE, Backing::Anonymous, VmOptions::default());
    vm.enable_log(&mut worker, 0, ALL_SET).unwrap();
    // One word is all there is to read.
    assert_eq!(clear(&vm, &mut worker, 1024, 64, &[u64::MAX; 1]), 64);
    let left: Vec<_> = (0..4096).filter(|page| !(1024..1088).contains(page)).collect();
    assert_eq!(collect(&vm, &mut worker, 0, 4096), left);
    finish(vm, vec![worker]);
}

#[test]
fn eager_split_at_clear_splits_the_section_and_nothing_else() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, 4 * BLOCK, HUGE_2M, eager(BLOCK));
    let mut guest = Guest::new(&vm, 0);
    for block in 0..4 {
        guest.write(block * BLOCK, 1);
    }
    vm.enable_log(&mut worker, 0, ALL_SET).unwrap();
    clear(&vm, &mut worker, 512, 1024, &[u64::MAX; 16]);
    let levels: Vec<_> = (0..4).map(|block| level(&vm, &worker, block * BLOCK).unwrap()).collect();
    assert_eq!(levels, [2, 3, 3, 2]);
    assert_eq!((worker.statistics().eager_splits, worker.statistics().protected), (2, 1024));
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn what_a_clear_asked_for_is_reported_again_if_the_slot_moves_meanwhile() {
    let machine = Watched::new(1);
    let (vm, mut worker) =
        vm_with_slot(&machine, 67 * PAGE, Backing::Anonymous, VmOptions::default());
    let mut other = vm.worker().unwrap();
    vm.enable_log(&mut worker, 0, MANUAL).unwrap();
    let mut guest = Guest::new(&vm, 0);
    guest.write(PAGE, 1);
    guest.write(65 * PAGE, 1);
    let (moving, who) = (&vm, &mut other);
    let away = SlotConfig::new(Gpa(BLOCK), 67 * PAGE, Hva(0));
    machine.interrupt(
        |event| event == Event::Begin,
        move || {
            moving.change_slot(who, 0, away).unwrap();
        },
    );
    let mask = [1 << 1, u64::MAX << 1];
    assert_eq!(vm.clear_dirty_log(&mut worker, 0, 0, 67, &mask), Err(LogError::Gone));
    assert!(machine.calm());
    assert_eq!(collect(&vm, &mut worker, 0, 67), [1, 65, 66]);
    assert_eq!(vm.clear_dirty_log(&mut worker, 0, 0, 67, &mask), Ok(3));
    assert_eq!(collect(&vm, &mut worker, 0, 67), NONE);
    drop(guest);
    finish(vm, vec![worker, other]);
}
