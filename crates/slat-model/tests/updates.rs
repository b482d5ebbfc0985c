//! Promise: hardware sets the access flag and dirty state where the registers let it, atomically, and nowhere else.

mod by_hand;

use by_hand::*;
use slat::{Gpa, Level};
use slat_model::{FaultKind, Model};

fn hand(vtcr: u64) -> (Hand, u64) {
    let hand = Hand::with(Model::builder(), VTCR_4K | vtcr, 2);
    let (_, third) = hand.tables();
    (hand, third)
}

#[test]
fn without_ha_a_clear_access_flag_faults_and_is_not_cached() {
    let (hand, third) = hand(0);
    let entry = hand.hpa(0) | TABLE | RW & !AF;
    hand.put(third, 0, entry);
    let mut cpu = hand.cpu(0);
    let kind = cpu.read(Gpa(0)).unwrap_err().kind;
    assert_eq!(kind, FaultKind::AccessFlag { level: Level::LAST });
    assert_eq!(hand.get(third, 0), entry);
    hand.put(third, 0, entry | AF);
    assert!(cpu.read(Gpa(0)).is_ok());
    hand.assert_clean();
}

#[test]
fn with_ha_hardware_sets_the_access_flag() {
    let (hand, third) = hand(HA);
    let entry = hand.hpa(0) | TABLE | RW & !AF;
    hand.put(third, 0, entry);
    assert!(hand.cpu(0).read(Gpa(0)).is_ok());
    assert_eq!(hand.get(third, 0), entry | AF);
    hand.assert_clean();
}

#[test]
fn a_clear_access_flag_is_not_set_again_while_the_translation_is_cached() {
    let (hand, third) = hand(HA);
    let entry = hand.hpa(0) | TABLE | RW & !AF;
    hand.put(third, 0, entry);
    let mut cpu = hand.cpu(0);
    cpu.read(Gpa(0)).unwrap();
    hand.put(third, 0, entry);
    cpu.read(Gpa(0)).unwrap();
    assert_eq!(hand.get(third, 0), entry);
    hand.invalidate(0);
    cpu.read(Gpa(0)).unwrap();
    assert_eq!(hand.get(third, 0), entry | AF);
    hand.assert_clean();
}

#[test]
fn with_hd_the_first_write_makes_a_clean_entry_writable_and_a_read_does_not() {
    let (hand, third) = hand(HA | HD);
    let entry = hand.hpa(0) | TABLE | RO | DBM;
    hand.put(third, 0, entry);
    let mut cpu = hand.cpu(0);
    cpu.read(Gpa(0)).unwrap();
    assert_eq!(hand.get(third, 0), entry);
    cpu.write(Gpa(0), 1).unwrap();
    assert_eq!(hand.get(third, 0), entry | W);
    hand.assert_clean();
}

#[test]
fn without_hd_a_dirty_bit_modifier_permits_nothing() {
    let (hand, third) = hand(HA);
    hand.put(third, 0, hand.hpa(0) | TABLE | RO | DBM);
    let kind = hand.cpu(0).write(Gpa(0), 1).unwrap_err().kind;
    assert_eq!(kind, FaultKind::Permission { level: Level::LAST });
    hand.assert_clean();
}

#[test]
fn a_cached_clean_translation_does_not_write_through_an_entry_that_was_protected_since() {
    let (hand, third) = hand(HA | HD);
    let entry = hand.hpa(0) | TABLE | RO | DBM;
    hand.put(third, 0, entry);
    let mut cpu = hand.cpu(0);
    cpu.read(Gpa(0)).unwrap();
    hand.put(third, 0, entry & !DBM);
    assert!(cpu.write(Gpa(0), 1).is_err());
    assert_eq!(hand.get(third, 0), entry & !DBM);
    hand.assert_clean();
}

#[test]
fn dirty_state_of_a_block_covers_the_block() {
    let hand = Hand::with(Model::builder(), VTCR_4K | HA | HD, 2);
    let second = hand.table();
    hand.put(hand.root.0, 0, second | TABLE);
    let entry = hand.hpa(0) | BLOCK | (RO & !AF) | DBM;
    hand.put(second, 0, entry);
    hand.cpu(0).write(Gpa(5 << 12), 1).unwrap();
    assert_eq!(hand.get(second, 0), entry | AF | W);
    hand.assert_clean();
}

#[test]
fn hardware_and_software_updates_of_one_entry_lose_nothing() {
    let (hand, third) = hand(HA | HD);
    let software = 1 << 55;
    let rounds = 2000;
    let (entered, left) = (std::sync::Barrier::new(2), std::sync::Barrier::new(2));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut cpu = hand.cpu(0);
            for _ in 0..rounds {
                entered.wait();
                cpu.write(Gpa(0), 1).unwrap();
                left.wait();
            }
        });
        for _ in 0..rounds {
            hand.put(third, 0, hand.hpa(0) | TABLE | (RO & !AF) | DBM);
            hand.invalidate_all();
            entered.wait();
            hand.put_bits(third, 0, software);
            left.wait();
            let expected = hand.hpa(0) | TABLE | RW | DBM | software;
            assert_eq!(hand.get(third, 0), expected);
        }
    });
    hand.assert_clean();
}
