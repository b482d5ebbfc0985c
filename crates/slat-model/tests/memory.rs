//! Promise: table memory and host memory are what the engine and a host are told they are.

mod by_hand;

use std::collections::HashSet;
use std::sync::atomic::Ordering;

use by_hand::*;
use slat::format::arm::{K4, Stage2};
use slat::{Attributes, Gpa, GpaRange, Hpa, Level, Machine, NoMemory, Participant, Reserve, Tree};
use slat_model::{Backing, BuildError, HostMemoryError, Model};

const GIB: u64 = 1 << 30;

#[test]
fn tables_are_zeroed_whole_and_aligned_to_their_total_size() {
    for (shift, checked) in [(12, true), (14, false), (16, true)] {
        let model = Model::builder().page_shift(shift).checked(checked).build().unwrap();
        for tables in [1, 2, 4, 8, 16] {
            let first = model.allocate(tables).unwrap();
            assert_ne!(first, Hpa(0));
            assert_eq!(first.0 % ((tables as u64) << shift), 0);
        }
        assert_eq!(model.allocate(3), None);
        assert_eq!(model.allocate(32), None);
        assert_eq!(model.counters().tables_in_use, 31);
    }
}

#[test]
fn a_table_is_zeroed_again_when_it_is_given_out_again() {
    for checked in [false, true] {
        let hand = Hand::with(Model::builder().checked(checked).table_limit(32), VTCR_4K, 2);
        let mut tables = Vec::new();
        while let Some(table) = hand.model.allocate(1) {
            hand.put(table.0, 511, 5);
            tables.push(table.0);
        }
        assert_eq!(tables.len(), 30);
        tables.iter().for_each(|&table| hand.free(table));
        let again: HashSet<u64> = (0..30).map(|_| hand.table()).collect();
        assert_eq!(again, tables.iter().copied().collect());
        assert!(again.iter().all(|&table| hand.get(table, 511) == 0));
        assert_eq!(hand.model.allocate(1), None);
    }
}

#[test]
fn a_freed_table_is_reused_as_late_as_possible_while_rules_are_checked() {
    let hand = Hand::new();
    let table = hand.table();
    hand.free(table);
    assert!((0..1000).all(|_| hand.table() != table));
    hand.assert_clean();
}

#[test]
fn threads_allocate_and_free_at_once_and_no_table_is_given_twice() {
    for checked in [false, true] {
        let hand = Hand::with(Model::builder().checked(checked), VTCR_4K, 2);
        std::thread::scope(|scope| {
            for number in 1..=4u64 {
                let hand = &hand;
                scope.spawn(move || {
                    for _ in 0..50 {
                        let tables: Vec<u64> = (0..50).map(|_| hand.table()).collect();
                        tables.iter().for_each(|&table| hand.put(table, 7, number << 1));
                        assert!(tables.iter().all(|&table| hand.get(table, 7) == number << 1));
                        tables.iter().for_each(|&table| hand.free(table));
                    }
                });
            }
        });
        assert_eq!(hand.model.counters().tables_in_use, 2);
        hand.assert_clean();
    }
}

#[test]
fn an_allocation_that_fails_on_purpose_reaches_the_engine_and_nothing_is_lost() {
    let model = Model::builder().build().unwrap();
    let memory = model.host_memory(4 << 20, Backing::Anonymous).unwrap();
    let format = Stage2::<K4>::new(40).unwrap();
    for n in 0.. {
        model.fail_after(n);
        let missing = |error: NoMemory| error.missing;
        let result = Tree::new(&model, format, 1).map_err(missing).and_then(|tree| {
            let who = Participant::register(&model).unwrap();
            let mut reserve = Reserve::new(&model);
            reserve.top_up(2).map_err(missing)?;
            let template = tree.template(Attributes::RW).unwrap();
            let range = GpaRange::new(Gpa(0), 4096).unwrap();
            let output = memory.page(0).unwrap().hpa;
            tree.map(&who, &mut reserve, range, output, template, Level::LAST).unwrap();
            Ok(())
        });
        model.stop_failing();
        assert_eq!(model.counters().tables_in_use, 0, "failed at {n}");
        if result.is_ok() {
            assert!(n >= 3, "a root and two tables");
            break;
        }
    }
}

#[test]
fn what_a_guest_writes_the_host_reads_at_the_offset_that_backs_it() {
    for backing in [
        Backing::Anonymous,
        Backing::AnonymousThp,
        Backing::AnonymousHugetlb { page_size: 2 << 20 },
        Backing::Shmem,
        Backing::SharedHugetlb { page_size: 64 << 10 },
    ] {
        let hand = Hand::new();
        let memory = hand.model.host_memory(4 << 20, backing).unwrap();
        assert_eq!(memory.backing(), backing);
        let (_, third) = hand.tables();
        let mut cpu = hand.cpu(0);
        for page in (0..512).step_by(37) {
            let offset = (2 << 20) + (page << 12);
            let hpa = memory.page(offset).unwrap().hpa;
            hand.put(third, page, hpa.0 | TABLE | RW);
            cpu.write(Gpa((page << 12) + 16), page + 1).unwrap();
            assert_eq!(memory.word(offset + 16).unwrap().load(Ordering::Relaxed), page + 1);
            let word = hand.model.host_word(Hpa(hpa.0 + 16)).unwrap();
            assert_eq!(word.load(Ordering::Relaxed), page + 1);
            let pointer = hand.model.host_pointer(Hpa(hpa.0 + 17)).unwrap();
            assert_eq!(pointer.as_ptr() as usize, std::ptr::from_ref(word) as usize + 1);
        }
        hand.assert_clean();
    }
}

#[test]
fn memories_are_apart_and_outside_them_is_nothing() {
    let model = Model::builder().build().unwrap();
    let size = 3 << 20;
    let memories: Vec<_> =
        (0..4).map(|_| model.host_memory(size, Backing::Anonymous).unwrap()).collect();
    let mut pages = HashSet::new();
    for memory in &memories {
        for offset in (0..size).step_by(4096) {
            let hpa = memory.page(offset).unwrap().hpa;
            assert!(pages.insert(hpa));
            assert_eq!(memory.offset_of(hpa), Some(offset));
            assert!(memories.iter().filter(|other| other.offset_of(hpa).is_some()).count() == 1);
        }
    }
    assert!(model.host_word(Hpa(0)).is_none());
    assert!(model.host_word(model.allocate(1).unwrap()).is_none());
    assert!(model.host_word(Hpa(1 << 51)).is_none());
}

#[test]
fn sizes_far_beyond_the_computer_need_a_limit_that_says_so() {
    let model = Model::builder().build().unwrap();
    match model.host_memory(8 << 40, Backing::AnonymousThp) {
        Err(HostMemoryError::NotEnough { wanted, available }) => {
            assert_eq!(wanted, 8 << 40);
            assert!(available < wanted);
        }
        Ok(_) => panic!("this computer has 8 TiB"),
        Err(error) => panic!("{error}"),
    }
    let model = Model::builder().memory_limit(9 << 40).build().unwrap();
    let memory = model.host_memory(8 << 40, Backing::AnonymousHugetlb { page_size: GIB }).unwrap();
    let last = memory.word((8 << 40) - 8).unwrap();
    last.store(1, Ordering::Relaxed);
    assert_eq!(memory.page((8 << 40) - 8).unwrap().size, GIB);
    let error = model.host_memory(2 << 40, Backing::Anonymous).unwrap_err();
    assert!(error.to_string().contains("10485760 MiB of guest memory"), "{error}");
}

#[test]
fn machines_that_cannot_be_are_refused() {
    let refused = |result: Result<Model, BuildError>| result.is_err();
    assert!(refused(Model::builder().page_shift(13).build()));
    assert!(refused(Model::builder().table_base(Hpa(0)).build()));
    assert!(refused(Model::builder().table_base(Hpa(4096)).build()));
    assert!(refused(Model::builder().table_base(Hpa((1 << 52) - GIB)).build()));
    let model = Model::builder().cpus(1).build().unwrap();
    let registers = slat_model::Registers { vttbr: GIB, vtcr: VTCR_4K };
    let cpu = model.cpu(0, registers).unwrap();
    assert!(model.cpu(0, registers).is_none() && model.cpu(1, registers).is_none());
    drop(cpu);
    assert!(model.cpu(0, registers).is_some());
}
