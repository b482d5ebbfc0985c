//! Promise: each way of breaking a rule is caught, and named. Every test is an engine with one step missing.

mod by_hand;

use by_hand::*;
use slat::maintenance::Instruction;
use slat::{Event, Gpa, Hpa, Machine, Promise};
use slat_model::{Before, Features, Model, OnViolation, Reach, Registers, Until, Violation};

/// A page at 0 that both CPUs have cached.
fn page() -> (Hand, u64) {
    let hand = Hand::new();
    let (_, third) = hand.tables();
    hand.put(third, 0, hand.hpa(0) | TABLE | RW);
    for index in 0..2 {
        hand.cpu(index).write(Gpa(0), 1).unwrap();
    }
    (hand, third)
}

fn is_break_before_make(violation: Option<Violation>, holder_wanted: usize) {
    match violation {
        Some(Violation::BreakBeforeMake { vmid: 7, holder, .. }) => {
            assert_eq!(holder, holder_wanted)
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_output_address_that_changes_without_break_before_make_is_caught() {
    let (hand, third) = page();
    // A page that only CPU 0 has cached is changed in place; CPU 1 then walks.
    hand.put(third, 1, hand.hpa(0x1000) | TABLE | RW);
    hand.cpu(0).read(Gpa(0x1000)).unwrap();
    hand.put(third, 1, hand.hpa(0x2000) | TABLE | RW);
    hand.cpu(1).read(Gpa(0x1000)).unwrap();
    is_break_before_make(hand.violation(), 0);
}

#[test]
fn locking_an_entry_without_invalidating_it_is_caught() {
    let (hand, third) = page();
    hand.put(third, 1, hand.hpa(0x1000) | TABLE | RW);
    hand.cpu(0).read(Gpa(0x1000)).unwrap();
    hand.exchange(third, 1, LOCKED);
    hand.publish();
    hand.exchange(third, 1, hand.hpa(0x2000) | TABLE | RW);
    hand.publish();
    hand.cpu(1).read(Gpa(0x1000)).unwrap();
    is_break_before_make(hand.violation(), 0);
}

#[test]
fn a_block_over_cached_pages_is_caught() {
    let hand = Hand::new();
    let (second, third) = hand.tables();
    hand.put(third, 3, hand.hpa(0x3000) | TABLE | RW);
    hand.cpu(0).read(Gpa(0x3000)).unwrap();
    hand.put(second, 0, hand.hpa(0) | BLOCK | RW);
    hand.cpu(1).read(Gpa(0)).unwrap();
    is_break_before_make(hand.violation(), 0);
}

#[test]
fn a_block_over_a_remembered_table_is_caught_also_if_the_table_was_empty() {
    let hand = Hand::new();
    let (second, _) = hand.tables();
    assert!(hand.cpu(0).read(Gpa(0x3000)).is_err());
    hand.put(second, 0, hand.hpa(0) | BLOCK | RW);
    hand.cpu(1).read(Gpa(0)).unwrap();
    is_break_before_make(hand.violation(), 0);
}

#[test]
fn a_table_under_a_cached_block_is_caught_and_allowed_with_bbm_level_2() {
    for block_change in [false, true] {
        let features = Features { block_change, ..Features::default() };
        let hand = Hand::with(Model::builder().features(features), VTCR_4K, 2);
        let second = hand.table();
        hand.put(hand.root.0, 0, second | TABLE);
        hand.put(second, 0, hand.hpa(0) | BLOCK | RW);
        hand.cpu(0).read(Gpa(0)).unwrap();
        let third = hand.table();
        hand.put(third, 4, hand.hpa(0x4000) | TABLE | RW);
        hand.put(second, 0, third | TABLE);
        hand.cpu(1).read(Gpa(0x4000)).unwrap();
        match block_change {
            false => is_break_before_make(hand.violation(), 0),
            true => assert_eq!(hand.violation(), None),
        }
    }
}

#[test]
fn one_table_in_the_place_of_another_is_caught() {
    let hand = Hand::new();
    let (second, third) = hand.tables();
    hand.put(third, 0, hand.hpa(0) | TABLE | RW);
    hand.cpu(0).read(Gpa(0)).unwrap();
    let other = hand.table();
    hand.put(other, 0, hand.hpa(0) | TABLE | RW);
    hand.put(second, 0, other | TABLE);
    hand.cpu(1).read(Gpa(0)).unwrap();
    is_break_before_make(hand.violation(), 0);
}

#[test]
fn a_memory_type_that_changes_in_place_is_caught() {
    let hand = Hand::new();
    let (_, third) = hand.tables();
    hand.put(third, 0, hand.hpa(0) | TABLE | RW);
    hand.cpu(0).read(Gpa(0)).unwrap();
    hand.put(third, 0, hand.hpa(0) | TABLE | (RW & !(0b1111 << 2)) | 0b0001 << 2);
    hand.cpu(1).read(Gpa(0)).unwrap();
    is_break_before_make(hand.violation(), 0);
}

#[test]
fn an_invalidation_of_one_page_of_a_detached_table_is_not_enough() {
    let hand = Hand::new();
    let (second, third) = hand.tables();
    for index in 0..2 {
        hand.put(third, index, hand.hpa(index << 12) | TABLE | RW);
        hand.cpu(0).read(Gpa(index << 12)).unwrap();
    }
    hand.exchange(second, 0, LOCKED);
    hand.invalidate(0);
    hand.exchange(second, 0, hand.hpa(0) | BLOCK | RW);
    hand.publish();
    hand.cpu(1).read(Gpa(0)).unwrap();
    is_break_before_make(hand.violation(), 0);
}

#[test]
fn a_table_that_a_walk_cache_holds_is_not_freed() {
    let (hand, third) = page();
    hand.put(hand.root.0, 0, EMPTY);
    let _cpu = hand.cpu(1);
    hand.free(third);
    assert_eq!(
        hand.violation(),
        Some(Violation::FreedWhileReachable {
            table: Hpa(third),
            by: Reach::WalkCache { cpu: 0, gpa: Gpa(0) }
        })
    );
}

#[test]
fn a_level_hint_leaves_the_pointer_to_a_detached_table() {
    let (hand, third) = page();
    let _cpu = hand.cpu(0);
    hand.put(hand.root.0, 0, EMPTY);
    hand.execute(&[
        hand.enter(),
        Instruction::TlbiIpas2e1is { ipa: Gpa(0), page_shift: 12, level: Some(slat::Level::LAST) },
        Instruction::DsbIsh,
        Instruction::TlbiVmalle1is,
        Instruction::DsbIsh,
        Instruction::LeaveContext,
    ]);
    hand.free(third);
    assert!(matches!(hand.violation(), Some(Violation::FreedWhileReachable { .. })));
}

#[test]
fn a_root_that_a_cpu_has_loaded_is_not_freed() {
    let hand = Hand::with(Model::builder(), (VTCR_4K & !63) | (64 - 39), 1);
    let cpu = hand.cpu(1);
    hand.free(hand.root.0);
    let by = Reach::Root { cpu: 1 };
    assert_eq!(hand.violation(), Some(Violation::FreedWhileReachable { table: hand.root, by }));
    drop(cpu);
}

#[test]
fn a_walk_that_reaches_a_freed_table_is_caught() {
    let hand = Hand::new();
    let (_, third) = hand.tables();
    hand.free(third);
    assert_eq!(hand.violation(), None, "nothing holds it, but it is still linked");
    assert!(hand.cpu(0).read(Gpa(0)).is_err());
    let by = Reach::HardwareWalk { cpu: 0, gpa: Gpa(0) };
    let table = Hpa(third);
    assert_eq!(hand.violation(), Some(Violation::FreedWhileReachable { table, by }));
}

#[test]
fn an_engine_that_touches_a_freed_table_is_caught() {
    let hand = Hand::new();
    let table = hand.table();
    hand.free(table);
    let entry = Hpa(table + 8);
    for event in [
        Event::Load { entry },
        Event::Store { entry, new: 0 },
        Event::Exchange { entry, old: 0, new: 0, done: true },
    ] {
        hand.model.observe(event);
        let by = Reach::Engine { entry };
        let table = Hpa(table);
        assert_eq!(hand.violation(), Some(Violation::FreedWhileReachable { table, by }));
    }
    hand.model.observe(Event::Load { entry: Hpa(0x1000) });
    assert_eq!(hand.violation(), Some(Violation::NotATable { address: Hpa(0x1000) }));
}

#[test]
fn what_was_not_allocated_or_is_free_already_is_not_freed() {
    let hand = Hand::new();
    let table = hand.table();
    hand.free(table);
    let is_bad = || matches!(hand.violation(), Some(Violation::BadFree { .. }));
    for first in [table, table + 8, hand.root.0, hand.root.0 + 4096, 0x1000] {
        hand.free(first);
        assert!(is_bad(), "{first:#x}");
    }
}

#[test]
fn a_write_into_a_freed_table_is_caught() {
    let hand = Hand::new();
    let table = hand.table();
    hand.free(table);
    hand.model.check_freed();
    assert_eq!(hand.violation(), None);
    hand.put(table, 3, 5);
    hand.model.check_freed();
    let entry = Hpa(table + 24);
    assert_eq!(hand.violation(), Some(Violation::WrittenAfterFree { entry, found: 5 }));
}

fn stale(hand: &Hand) -> Option<(usize, Gpa)> {
    match hand.violation() {
        Some(Violation::StaleTranslation { cpu, cached, .. }) => Some((cpu, cached.gpa)),
        None => None,
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_unmap_that_did_not_invalidate_is_caught() {
    let (hand, third) = page();
    hand.begin();
    hand.exchange(third, 0, EMPTY);
    hand.publish();
    hand.end(Promise::Gone(range(0, 4096)));
    assert_eq!(stale(&hand), Some((0, Gpa(0))));
}

#[test]
fn an_invalidation_without_its_last_barrier_is_caught() {
    let (hand, third) = page();
    hand.begin();
    hand.exchange(third, 0, EMPTY);
    hand.execute(&[
        Instruction::DsbIshst,
        hand.enter(),
        hand.ipa(0),
        Instruction::DsbIsh,
        Instruction::TlbiVmalle1is,
        Instruction::LeaveContext,
    ]);
    hand.end(Promise::Gone(range(0, 4096)));
    assert_eq!(stale(&hand), Some((0, Gpa(0))));
}

#[test]
fn an_invalidation_under_another_vmid_is_caught() {
    let (hand, third) = page();
    hand.begin();
    hand.exchange(third, 0, EMPTY);
    hand.execute(&[
        Instruction::DsbIshst,
        Instruction::EnterContext(8 << 48),
        Instruction::TlbiVmalls12e1is,
        Instruction::DsbIsh,
        Instruction::LeaveContext,
    ]);
    hand.end(Promise::Gone(range(0, 4096)));
    assert_eq!(stale(&hand), Some((0, Gpa(0))));
}

#[test]
fn a_write_protect_that_invalidated_one_cpu_only_is_caught() {
    let (hand, third) = page();
    hand.begin();
    hand.exchange(third, 0, hand.hpa(0) | TABLE | RO);
    hand.cpu(0).bind();
    hand.execute(&[
        Instruction::DsbIshst,
        hand.enter(),
        Instruction::TlbiIpas2e1 { ipa: Gpa(0), page_shift: 12, level: None },
        Instruction::DsbNsh,
        Instruction::TlbiVmalle1,
        Instruction::DsbNsh,
        Instruction::LeaveContext,
    ]);
    hand.end(Promise::ReadOnlyPages { first: Gpa(0), mask: 0b10, page_size: 4096 });
    assert_eq!(stale(&hand), None, "page 1 was promised, and is not cached");
    hand.begin();
    hand.end(Promise::ReadOnly(range(0, 4096)));
    assert_eq!(stale(&hand), Some((1, Gpa(0))));
    hand.begin();
    hand.end(Promise::ReadOnlyPages { first: Gpa(0), mask: 0b1, page_size: 4096 });
    assert_eq!(stale(&hand), Some((1, Gpa(0))));
}

fn unpublished(hand: &Hand) -> Option<(u64, Before)> {
    match hand.violation() {
        Some(Violation::NeverPublished { entry, before, .. }) => Some((entry.0, before)),
        None => None,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_map_that_is_not_published_before_it_ends_is_caught() {
    let (hand, third) = page();
    hand.exchange(hand.root.0, 1, third | TABLE);
    hand.publish();
    hand.begin();
    hand.exchange(third, 5, hand.hpa(0x5000) | TABLE | RW);
    hand.end(Promise::Nothing);
    assert_eq!(unpublished(&hand), Some((third + 40, Before::End)));
}

#[test]
fn a_map_that_is_not_published_before_its_guest_runs_is_caught() {
    let (hand, third) = page();
    hand.exchange(hand.root.0, 1, third | TABLE);
    hand.publish();
    hand.exchange(third, 5, hand.hpa(0x5000) | TABLE | RW);
    hand.cpu(0).read(Gpa(0)).unwrap();
    assert_eq!(unpublished(&hand), Some((third + 40, Before::Guest)));
}

#[test]
fn an_invalidation_before_the_removal_is_published_is_caught() {
    let (hand, third) = page();
    hand.exchange(hand.root.0, 1, third | TABLE);
    hand.publish();
    hand.exchange(third, 0, EMPTY);
    hand.execute(&[hand.enter(), hand.ipa(0), Instruction::DsbIsh, Instruction::LeaveContext]);
    let before = Before::Invalidation { local: false };
    assert_eq!(unpublished(&hand), Some((third, before)));
}

#[test]
fn a_publish_for_one_cpu_is_none_for_the_others() {
    let (hand, third) = page();
    hand.exchange(hand.root.0, 1, third | TABLE);
    hand.publish();
    hand.begin();
    hand.exchange(third, 5, hand.hpa(0x5000) | TABLE | RW);
    hand.execute(&[Instruction::DsbNshst]);
    hand.end(Promise::Nothing);
    assert_eq!(unpublished(&hand), Some((third + 40, Before::End)));
}

#[test]
fn an_entry_that_stays_locked_is_caught_at_each_place_where_it_may_not_be() {
    let locked = |until: fn(&Hand)| {
        let (hand, third) = page();
        hand.begin();
        hand.exchange(third, 1, LOCKED);
        hand.publish();
        until(&hand);
        (hand.violation(), Hpa(third + 8))
    };
    let (violation, entry) = locked(|hand| hand.model.observe(Event::Unpinned));
    assert_eq!(violation, Some(Violation::LockedOutlived { entry, until: Until::Unpinned }));
    let (violation, entry) = locked(|hand| hand.end(Promise::Nothing));
    assert_eq!(violation, Some(Violation::LockedOutlived { entry, until: Until::End }));
    let (violation, entry) = locked(|hand| assert!(hand.cpu(0).read(Gpa(0)).is_ok()));
    assert_eq!(violation, Some(Violation::LockedOutlived { entry, until: Until::Guest }));
    let (violation, entry) = locked(|hand| hand.model.check_quiet(hand.registers()));
    assert_eq!(violation, Some(Violation::LockedOutlived { entry, until: Until::Quiet }));
}

#[test]
fn a_dead_entry_in_a_linked_table_is_found_at_a_quiet_point() {
    let (hand, third) = page();
    hand.put(third, 9, DEAD);
    hand.model.check_quiet(hand.registers());
    let entry = Hpa(third + 72);
    let until = Until::Quiet;
    assert_eq!(hand.violation(), Some(Violation::LockedOutlived { entry, until }));
}

#[test]
fn another_threads_locked_entry_is_not_settled() {
    let (hand, third) = page();
    hand.exchange(hand.root.0, 1, third | TABLE);
    hand.publish();
    hand.exchange(third, 1, LOCKED);
    std::thread::scope(|scope| {
        scope.spawn(|| hand.exchange(third, 1, EMPTY));
    });
    let entry = Hpa(third + 8);
    assert_eq!(hand.violation(), Some(Violation::NotOwner { entry, new: EMPTY }));
}

#[test]
fn what_is_cached_must_be_what_the_tables_say_when_all_is_quiet() {
    let (hand, third) = page();
    hand.model.check_quiet(hand.registers());
    assert_eq!(hand.violation(), None);
    for wrong in [EMPTY, hand.hpa(0) | TABLE | RO, hand.hpa(0x1000) | TABLE | RW] {
        hand.put(third, 0, wrong);
        hand.model.check_quiet(hand.registers());
        match hand.violation() {
            Some(Violation::Disagreement { cached, entry, .. }) => {
                assert_eq!((cached.gpa, entry), (Gpa(0), wrong));
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_vmid_that_another_tree_still_has_cached_is_not_loaded() {
    let (hand, _) = page();
    let other = hand.model.allocate(2).unwrap();
    let registers = Registers { vttbr: other.0 | VMID << 48, vtcr: VTCR_4K };
    drop(hand.model.cpu(0, registers));
    let (root, cached) = (other, hand.root);
    let vmid = VMID as u16;
    assert_eq!(hand.violation(), Some(Violation::VmidReused { vmid, root, cpu: 0, cached }));
    hand.invalidate_all();
    drop(hand.model.cpu(0, registers));
    assert_eq!(hand.violation(), None);
}

#[test]
fn contexts_nest() {
    let hand = Hand::new();
    let is_context = || matches!(hand.violation(), Some(Violation::Context { .. }));
    hand.execute(&[Instruction::LeaveContext]);
    assert!(is_context());
    hand.execute(&[Instruction::TlbiVmalls12e1is]);
    assert!(is_context(), "no context, and no CPU");
    hand.begin();
    hand.execute(&[hand.enter()]);
    hand.end(Promise::Nothing);
    assert!(is_context());
    hand.end(Promise::Nothing);
    assert!(is_context(), "ended twice");
}

#[test]
fn a_machine_that_stops_names_the_rule_and_what_the_thread_did() {
    let model = Model::builder().on_violation(OnViolation::Stop).build().unwrap();
    let payload = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        model.execute(Instruction::Isb);
        model.execute(Instruction::LeaveContext);
    }))
    .unwrap_err();
    let text = payload.downcast_ref::<String>().unwrap();
    assert!(text.starts_with("Context: left a context"), "{text}");
    assert!(text.contains("Instruction(Isb)"), "{text}");
    let waits = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| model.relax()));
    assert!(waits.is_err(), "others stop too");
    assert_eq!(model.violations(), 1);
}
