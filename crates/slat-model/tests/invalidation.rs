//! Promise: nothing cached is forgotten before an instruction takes it, and each instruction takes as little and as
//! late as the architecture allows.

mod by_hand;

use by_hand::*;
use slat::maintenance::Instruction;
use slat::{Gpa, Level};
use slat_model::{Cpu, Model};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// One page at 0 and one at 0x1000, cached by both CPUs, then taken out of the table behind their backs.
fn cached() -> (Hand, u64) {
    let hand = Hand::new();
    let (_, third) = hand.tables();
    hand.put(third, 0, hand.hpa(0) | TABLE | RW);
    hand.put(third, 1, hand.hpa(0x1000) | TABLE | RW);
    for index in 0..2 {
        let mut cpu = hand.cpu(index);
        cpu.read(Gpa(0)).unwrap();
        cpu.read(Gpa(0x1000)).unwrap();
    }
    hand.put(third, 0, EMPTY);
    hand.put(third, 1, EMPTY);
    (hand, third)
}

fn sees(cpu: &mut Cpu<'_>, gpa: u64) -> bool {
    cpu.read(Gpa(gpa)).is_ok()
}

#[test]
fn a_tlb_never_forgets_by_itself() {
    let builder = Model::builder().checked(false).memory_limit(1 << 40);
    let hand = Hand::with(builder, VTCR_4K, 2);
    let memory = hand.model.host_memory(1 << 30, slat_model::Backing::Anonymous).unwrap();
    let second = hand.table();
    hand.put(hand.root.0, 0, second | TABLE);
    let mut tables = Vec::new();
    for index in 0..512 {
        let third = hand.table();
        hand.put(second, index, third | TABLE);
        for page in 0..512 {
            let hpa = memory.page(index << 21 | page << 12).unwrap().hpa.0;
            hand.put(third, page, hpa | TABLE | RO);
        }
        tables.push(third);
    }
    let mut cpu = hand.cpu(0);
    (0..1 << 18).step_by(7).for_each(|page| assert!(sees(&mut cpu, page << 12)));
    hand.put(hand.root.0, 0, EMPTY);
    (0..1 << 18).step_by(7).for_each(|page| assert!(sees(&mut cpu, page << 12)));
    let counters = hand.model.counters();
    assert_eq!(counters.fills, (1u64 << 18).div_ceil(7));
    assert_eq!(counters.walks, counters.fills);
    // Another CPU has cached nothing.
    assert!(!sees(&mut hand.cpu(1), 0));
}

#[test]
fn a_walk_cache_never_forgets_by_itself() {
    let hand = Hand::new();
    let (second, third) = hand.tables();
    hand.put(third, 0, hand.hpa(0) | TABLE | RW);
    hand.put(third, 1, hand.hpa(0x1000) | TABLE | RW);
    let mut cpu = hand.cpu(0);
    assert!(sees(&mut cpu, 0));
    hand.put(second, 0, EMPTY);
    assert!(sees(&mut cpu, 0x1000), "through the remembered table");
    hand.invalidate(0x5000);
    assert!(!sees(&mut cpu, 0x2000), "any address below the table takes the pointer");
    assert!(sees(&mut cpu, 0x1000), "but not the pages");
}

#[test]
fn the_sequence_for_one_address_takes_it_from_every_cpu_and_takes_no_other() {
    let (hand, _) = cached();
    hand.invalidate(0);
    for index in 0..2 {
        let mut cpu = hand.cpu(index);
        assert_eq!((sees(&mut cpu, 0), sees(&mut cpu, 0x1000)), (false, true));
    }
}

#[test]
fn nothing_is_invalidated_before_the_barrier() {
    let (hand, _) = cached();
    let mut cpu = hand.cpu(0);
    hand.execute(&[hand.enter(), Instruction::TlbiVmalls12e1is, Instruction::DsbIshst]);
    assert!(sees(&mut cpu, 0));
    hand.execute(&[Instruction::DsbNsh]);
    assert!(sees(&mut cpu, 0), "a barrier for one CPU does not wait for all");
    std::thread::scope(|scope| {
        scope.spawn(|| hand.execute(&[Instruction::DsbIsh]));
    });
    assert!(sees(&mut cpu, 0), "another CPU's barrier does not wait for this one's invalidation");
    hand.execute(&[Instruction::DsbIsh]);
    assert!(!sees(&mut cpu, 0));
}

#[test]
fn by_ipa_alone_leaves_the_combined_translation() {
    let (hand, _) = cached();
    let mut cpu = hand.cpu(0);
    hand.execute(&[hand.enter(), hand.ipa(0), Instruction::DsbIsh]);
    assert!(sees(&mut cpu, 0));
    hand.execute(&[Instruction::TlbiVmalle1is, Instruction::DsbIsh]);
    assert!(!sees(&mut cpu, 0));
    assert!(sees(&mut cpu, 0x1000), "its stage-2 part was not invalidated");
}

#[test]
fn combined_translations_are_invalidated_in_vain_before_the_stage_2_part_is_gone() {
    for barrier in [None, Some(Instruction::DsbIsh)] {
        let (hand, _) = cached();
        let mut cpu = hand.cpu(0);
        hand.execute(&[hand.enter(), Instruction::TlbiVmalle1is]);
        barrier.into_iter().for_each(|barrier| hand.execute(&[barrier]));
        hand.execute(&[hand.ipa(0), Instruction::DsbIsh]);
        assert!(sees(&mut cpu, 0));
    }
    let (hand, _) = cached();
    let mut cpu = hand.cpu(0);
    hand.execute(&[hand.enter(), hand.ipa(0), Instruction::TlbiVmalle1is, Instruction::DsbIsh]);
    assert!(sees(&mut cpu, 0), "no barrier between them orders them");
}

#[test]
fn a_level_hint_takes_leaves_of_that_level_only_and_no_table_pointers() {
    let hint = |number| {
        let (hand, _) = cached();
        let ipa = Gpa(0);
        let level = Level::new(number);
        hand.execute(&[
            hand.enter(),
            Instruction::TlbiIpas2e1is { ipa, page_shift: 12, level },
            Instruction::DsbIsh,
            Instruction::TlbiVmalle1is,
            Instruction::DsbIsh,
        ]);
        let found = sees(&mut hand.cpu(0), 0);
        (hand, found)
    };
    assert!(hint(2).1);
    let (hand, found) = hint(3);
    assert!(!found);
    // The walk that just failed began at the remembered table: the root is not needed.
    hand.put(hand.root.0, 0, EMPTY);
    let fault = hand.cpu(0).read(Gpa(0x2000)).unwrap_err();
    assert_eq!(fault.kind, slat_model::FaultKind::Translation { level: Level::LAST });
}

#[test]
fn a_block_goes_whole_with_any_of_its_addresses() {
    let hand = Hand::new();
    let second = hand.table();
    hand.put(hand.root.0, 0, second | TABLE);
    hand.put(second, 0, hand.hpa(0) | BLOCK | RW);
    let mut cpu = hand.cpu(0);
    assert!(sees(&mut cpu, 0) && sees(&mut cpu, 5 << 12));
    hand.put(second, 0, EMPTY);
    hand.invalidate(9 << 12);
    assert!(!sees(&mut cpu, 0) && !sees(&mut cpu, 5 << 12));
    assert_eq!(hand.violation(), None);
}

#[test]
fn a_range_covers_num_plus_one_times_two_to_the_five_scale_plus_one_granules() {
    let hand = Hand::new();
    let (second, third) = hand.tables();
    let fourth = hand.table();
    hand.put(second, 1, fourth | TABLE);
    for index in 0..512 {
        hand.put(third, index, hand.hpa(index << 12) | TABLE | RW);
        hand.put(fourth, index, hand.hpa(index << 12) | TABLE | RW);
    }
    let mut cpu = hand.cpu(0);
    assert!((0..1024).all(|page| sees(&mut cpu, page << 12)));
    (0..512).for_each(|index| hand.put(third, index, EMPTY));
    (0..512).for_each(|index| hand.put(fourth, index, EMPTY));
    let range = |ipa, scale, num| {
        let ipa = Gpa(ipa);
        hand.execute(&[
            hand.enter(),
            Instruction::TlbiRipas2e1is { ipa, page_shift: 12, scale, num, level: None },
            Instruction::DsbIsh,
            Instruction::TlbiVmalle1is,
            Instruction::DsbIsh,
        ]);
    };
    range(0x10_000, 0, 2);
    let gone: Vec<u64> = (0..1024).filter(|page| !sees(&mut cpu, page << 12)).collect();
    assert_eq!(gone, (0x10..0x16).collect::<Vec<_>>());
    range(0x100_000, 1, 1);
    let gone = (0..1024).filter(|page| !sees(&mut cpu, page << 12)).count();
    assert_eq!(gone, 6 + 128);
}

#[test]
fn an_invalidation_acts_on_the_vmid_of_its_context() {
    let (hand, _) = cached();
    let mut cpu = hand.cpu(0);
    let other = Instruction::EnterContext(hand.registers().vttbr + (1 << 48));
    hand.execute(&[other, Instruction::TlbiVmalls12e1is, Instruction::DsbIsh]);
    assert!(sees(&mut cpu, 0));
    hand.execute(&[Instruction::LeaveContext]);
    hand.execute(&[Instruction::TlbiVmalls12e1is, Instruction::DsbIsh]);
    assert!(!sees(&mut cpu, 0), "without a context, that of the CPU counts");
    let (hand, _) = cached();
    std::thread::scope(|scope| {
        scope.spawn(|| hand.execute(&[Instruction::TlbiAlle1is, Instruction::DsbIsh]));
    });
    assert!(!sees(&mut hand.cpu(0), 0));
}

#[test]
fn a_local_invalidation_acts_on_the_cpu_that_the_thread_runs_on() {
    let (hand, _) = cached();
    let (mut first, mut second) = (hand.cpu(0), hand.cpu(1));
    let local = |hand: &Hand| {
        hand.execute(&[
            hand.enter(),
            Instruction::TlbiIpas2e1 { ipa: Gpa(0), page_shift: 12, level: None },
            Instruction::DsbNsh,
            Instruction::TlbiVmalle1,
            Instruction::DsbNsh,
            Instruction::LeaveContext,
        ]);
    };
    second.bind();
    local(&hand);
    assert_eq!((sees(&mut first, 0), sees(&mut second, 0)), (true, false));
    std::thread::scope(|scope| {
        scope.spawn(|| local(&hand));
    });
    assert!(sees(&mut first, 0), "a thread that runs on no CPU has no TLB");
    local(&hand);
    assert!(!sees(&mut first, 0), "the CPU of the last access");
}

#[test]
fn a_barrier_waits_for_accesses_that_use_the_old_translation() {
    let (hand, _) = cached();
    let (inside, done) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut cpu = hand.cpu(0);
            cpu.access(slat_model::Access::Write, Gpa(0), |_| {
                inside.store(true, Ordering::SeqCst);
                std::thread::sleep(Duration::from_millis(50));
                assert!(!done.load(Ordering::SeqCst));
            })
            .unwrap();
        });
        while !inside.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        hand.invalidate(0);
        done.store(true, Ordering::SeqCst);
    });
    assert!(!sees(&mut hand.cpu(0), 0));
}

#[test]
fn a_permission_fault_repeats_until_the_cpu_s_own_translation_is_gone() {
    let hand = Hand::new();
    let (_, third) = hand.tables();
    hand.put(third, 0, hand.hpa(0) | TABLE | RO);
    let mut cpu = hand.cpu(0);
    assert!(sees(&mut cpu, 0));
    hand.put(third, 0, hand.hpa(0) | TABLE | RW);
    assert!(cpu.write(Gpa(0), 1).is_err() && cpu.write(Gpa(0), 1).is_err());
    hand.invalidate(0);
    assert!(cpu.write(Gpa(0), 1).is_ok());
    hand.assert_clean();
}

#[test]
fn instructions_are_counted_by_kind() {
    let hand = Hand::new();
    let before = hand.model.counters();
    hand.invalidate(0);
    hand.invalidate_all();
    let after = hand.model.counters();
    assert_eq!(after.publishes - before.publishes, 2);
    assert_eq!(after.by_ipa - before.by_ipa, 1);
    assert_eq!(after.combined - before.combined, 1);
    assert_eq!(after.everything - before.everything, 1);
    assert_eq!(after.waits - before.waits, 3);
}
