//! Promise: the hardware walker finds what the architecture manual says for descriptors written bit by bit.

mod by_hand;

use by_hand::*;
use slat::{Gpa, Hpa, Level};
use slat_model::{Access, FaultKind, Features, MemoryType, Model, Violation};

fn level(number: i8) -> Level {
    Level::new(number).unwrap()
}

/// One walk from a root at `start` to a leaf at `leaf` level for `gpa`: every table and its entry made by hand.
struct Path {
    shift: u32,
    vtcr: u64,
    roots: usize,
    start: i8,
    leaf: i8,
    gpa: u64,
}

fn wide_bits(hand: &Hand, hpa: u64, ds: bool) -> u64 {
    let shift = hand.model.page_shift();
    if ds {
        (hpa & ((1 << 50) - 1)) | ((hpa >> 50) & 0b11) << 8
    } else if shift == 16 {
        (hpa & ((1 << 48) - 1)) | ((hpa >> 48) & 0xf) << 12
    } else {
        hpa
    }
}

impl Path {
    fn check(&self, builder: slat_model::Builder) {
        let hand = Hand::with(builder.page_shift(self.shift), self.vtcr, self.roots);
        let ds = self.vtcr >> 32 & 1 == 1;
        let stride = self.shift - 3;
        let bits = |level: i8| self.shift + stride * (3 - level) as u32;
        let mut table = hand.root.0;
        for at in self.start..self.leaf {
            let index = self.gpa >> bits(at);
            let index = if at == self.start { index } else { index & ((1 << stride) - 1) };
            let next = hand.table();
            hand.put(table, index, wide_bits(&hand, next, ds) | TABLE);
            table = next;
        }
        let index = self.gpa >> bits(self.leaf);
        let index = if self.leaf == self.start { index } else { index & ((1 << stride) - 1) };
        // With DS, bits 9 and 8 are address bits.
        let attributes = if ds { RW & !(0b11 << 8) } else { RW };
        let kind = if self.leaf == 3 { TABLE } else { BLOCK };
        let size = 1u64 << bits(self.leaf);
        let output = hand.hpa(0) & !(size - 1);
        hand.put(table, index, wide_bits(&hand, output, ds) | attributes | kind);

        let inside = (hand.hpa(0) - output) + 0x1238 % size;
        let gpa = Gpa((self.gpa & !(size - 1)) + inside);
        let mut cpu = hand.cpu(0);
        cpu.write(gpa, 0x0123_4567_89ab_cdef).unwrap();
        let word = hand.model.host_word(Hpa(output + inside)).unwrap();
        assert_eq!(word.load(std::sync::atomic::Ordering::Relaxed), 0x0123_4567_89ab_cdef);
        let beyond = cpu.read(Gpa(1 << (64 - (self.vtcr & 63)))).unwrap_err();
        assert_eq!(beyond.kind, FaultKind::Translation { level: level(0) });
        drop(cpu);
        hand.assert_clean();
    }
}

const PS48: u64 = 0b101 << 16;
const PS52: u64 = 0b110 << 16;
const G16: u64 = 0b10 << 14;
const G64: u64 = 0b01 << 14;
const DS: u64 = 1 << 32;
const SL2: u64 = 1 << 33;

#[test]
fn pages_and_blocks_of_4k_translate_from_every_start_level() {
    let builder = Model::builder;
    let last = 0xff_ffff_f000;
    for leaf in [1, 2, 3] {
        let (vtcr, roots) = (VTCR_4K, 2);
        Path { shift: 12, vtcr, roots, start: 1, leaf, gpa: last }.check(builder());
        let (vtcr, roots) = (VTCR | PS48 | 0b10 << 6 | (64 - 48), 1);
        Path { shift: 12, vtcr, roots, start: 0, leaf, gpa: 0xffff_ffff_f000 }.check(builder());
    }
    for leaf in [2, 3] {
        let vtcr = VTCR | PS48 | (64 - 34);
        Path { shift: 12, vtcr, roots: 16, start: 2, leaf, gpa: 0x3_ffff_f000 }.check(builder());
    }
}

#[test]
fn pages_and_blocks_of_16k_and_64k_translate() {
    let builder = || Model::builder().table_limit(256);
    for leaf in [2, 3] {
        let (vtcr, roots) = (VTCR | PS48 | G16 | 0b01 << 6 | (64 - 40), 16);
        Path { shift: 14, vtcr, roots, start: 2, leaf, gpa: 0xff_ffff_c000 }.check(builder());
        let (vtcr, roots) = (VTCR | PS48 | G16 | 0b10 << 6 | (64 - 48), 2);
        Path { shift: 14, vtcr, roots, start: 1, leaf, gpa: 0xffff_ffff_c000 }.check(builder());
        let (vtcr, roots) = (VTCR | PS48 | G64 | 0b01 << 6 | (64 - 42), 1);
        Path { shift: 16, vtcr, roots, start: 2, leaf, gpa: 0x3ff_ffff_0000 }.check(builder());
        let (vtcr, roots) = (VTCR | PS48 | G64 | 0b10 << 6 | (64 - 48), 1);
        Path { shift: 16, vtcr, roots, start: 1, leaf, gpa: 0xffff_ffff_0000 }.check(builder());
    }
}

#[test]
fn addresses_of_52_bits_keep_their_high_bits_where_each_granule_puts_them() {
    let high = |shift: u32| {
        Model::builder().table_limit(256).table_base(Hpa(if shift == 16 {
            0xd << 48
        } else {
            0x3 << 50
        }))
    };
    for leaf in [2, 3] {
        let vtcr = VTCR | DS | SL2 | PS52 | (64 - 52);
        Path { shift: 12, vtcr, roots: 1, start: -1, leaf, gpa: 0xf_ffff_ffff_f000 }
            .check(high(12));
        let vtcr = VTCR | DS | PS52 | G16 | 0b11 << 6 | (64 - 52);
        Path { shift: 14, vtcr, roots: 1, start: 0, leaf, gpa: 0xf_ffff_ffff_c000 }.check(high(14));
        let vtcr = VTCR | PS52 | G64 | 0b10 << 6 | (64 - 52);
        Path { shift: 16, vtcr, roots: 1, start: 1, leaf, gpa: 0xf_ffff_ffff_0000 }.check(high(16));
    }
}

#[test]
fn invalid_entries_fault_at_their_level() {
    let hand = Hand::new();
    let mut cpu = hand.cpu(0);
    let kind = |cpu: &mut slat_model::Cpu<'_>| cpu.read(Gpa(0x1000)).unwrap_err().kind;
    assert_eq!(kind(&mut cpu), FaultKind::Translation { level: level(1) });
    let (second, third) = (hand.table(), hand.table());
    hand.put(hand.root.0, 0, second | TABLE);
    assert_eq!(kind(&mut cpu), FaultKind::Translation { level: level(2) });
    hand.put(second, 0, third | TABLE);
    assert_eq!(kind(&mut cpu), FaultKind::Translation { level: level(3) });
    for invalid in [LOCKED, DEAD, 1 << 60 | 5 << 16] {
        hand.put(third, 1, invalid);
        assert_eq!(kind(&mut cpu), FaultKind::Translation { level: level(3) });
    }
    assert_eq!(hand.violation(), None);
    assert_eq!(cpu.read(Gpa(0x1004)).unwrap_err().kind, FaultKind::Alignment);
}

#[test]
fn permissions_are_those_of_the_leaf() {
    let hand = Hand::new();
    let (_, third) = hand.tables();
    let page = hand.hpa(0) | TABLE;
    // XN 00: both levels execute; 01: EL0 only; 10: none; 11: EL1 only.
    for (index, xn, kernel, user) in [
        (0, 0b00, true, true),
        (1, 0b01, false, true),
        (2, 0b10, false, false),
        (3, 0b11, true, false),
    ] {
        hand.put(third, index, page | RO | xn << 53);
        let mut cpu = hand.cpu(0);
        let gpa = Gpa(index << 12);
        assert_eq!((cpu.fetch(gpa).is_ok(), cpu.fetch_user(gpa).is_ok()), (kernel, user), "{xn}");
        assert!(cpu.read(gpa).is_ok());
        assert_eq!(cpu.write(gpa, 1).unwrap_err().kind, FaultKind::Permission { level: level(3) });
    }
    hand.put(third, 4, page | RW & !(1 << 6));
    let mut cpu = hand.cpu(1);
    assert!(cpu.write(Gpa(0x4000), 1).is_ok());
    assert_eq!(cpu.read(Gpa(0x4000)).unwrap_err().kind, FaultKind::Permission { level: level(3) });
    hand.assert_clean();
}

#[test]
fn without_xnx_one_bit_forbids_execution() {
    let features = Features { xnx: false, ..Features::default() };
    let hand = Hand::with(Model::builder().features(features), VTCR_4K, 2);
    let (_, third) = hand.tables();
    hand.put(third, 0, hand.hpa(0) | TABLE | RO);
    hand.put(third, 1, hand.hpa(0) | TABLE | RO | 1 << 54);
    let mut cpu = hand.cpu(0);
    assert!(cpu.fetch(Gpa(0)).is_ok() && cpu.fetch_user(Gpa(0)).is_ok());
    assert!(cpu.fetch(Gpa(0x1000)).is_err() && cpu.fetch_user(Gpa(0x1000)).is_err());
    hand.assert_clean();
}

#[test]
fn memory_types_are_those_of_the_attributes_with_and_without_fwb() {
    let types = |fwb, attributes: &[(u64, MemoryType)]| {
        let features = Features { fwb, ..Features::default() };
        let hand = Hand::with(Model::builder().features(features), VTCR_4K, 2);
        let (_, third) = hand.tables();
        let mut cpu = hand.cpu(0);
        for (index, &(attribute, memory)) in attributes.iter().enumerate() {
            let (index, rest) = (index as u64, RO & !(0b1111 << 2));
            hand.put(third, index, hand.hpa(0) | TABLE | rest | attribute << 2);
            let found = cpu.translate(Access::Read, Gpa(index << 12)).unwrap();
            assert_eq!((found.memory, found.level), (memory, level(3)), "{attribute:#b}");
            assert_eq!(found.hpa, Hpa(hand.hpa(0)));
        }
        hand.assert_clean();
    };
    types(
        false,
        &[
            (0b1111, MemoryType::WriteBack),
            (0b0101, MemoryType::NonCacheable),
            (0b1010, MemoryType::WriteThrough),
            (0b0000, MemoryType::Device),
            (0b0001, MemoryType::Device),
        ],
    );
    types(
        true,
        &[
            (0b0110, MemoryType::WriteBack),
            (0b0111, MemoryType::WriteBack),
            (0b0101, MemoryType::NonCacheable),
            (0b0001, MemoryType::Device),
        ],
    );
}

#[test]
fn outputs_beyond_the_configured_size_are_address_size_faults() {
    let hand = Hand::new();
    let (second, third) = hand.tables();
    hand.put(third, 0, 1 << 40 | TABLE | RO);
    hand.put(second, 1, 1 << 40 | BLOCK | RO);
    hand.put(second, 2, 1 << 40 | TABLE);
    let mut cpu = hand.cpu(0);
    let mut kind = |gpa| cpu.read(Gpa(gpa)).unwrap_err().kind;
    assert_eq!(kind(0), FaultKind::AddressSize { level: level(3) });
    assert_eq!(kind(2 * MIB), FaultKind::AddressSize { level: level(2) });
    assert_eq!(kind(4 * MIB), FaultKind::AddressSize { level: level(2) });
}

#[test]
fn reserved_bits_are_reported_at_the_entry_that_has_them() {
    let reserved = |second_entry: Option<u64>, third_entry: u64| {
        let hand = Hand::new();
        let (second, third) = hand.tables();
        if let Some(entry) = second_entry {
            hand.put(second, 0, entry | third);
        }
        hand.put(third, 0, third_entry | if third_entry & 1 == 1 { hand.hpa(0) } else { 0 });
        let _ = hand.cpu(0).read(Gpa(0));
        match hand.violation() {
            Some(Violation::ReservedBits { bits, level, .. }) => Some((bits, level.number())),
            other => {
                assert_eq!(other, None);
                None
            }
        }
    };
    assert_eq!(reserved(None, TABLE | RW), None);
    assert_eq!(reserved(None, TABLE | RW | DBM | 0xf << 55 | 0b11 << 53 | 1 << 52), None);
    assert_eq!(reserved(None, TABLE | RW | 1 << 50), Some((1 << 50, 3)));
    assert_eq!(reserved(None, TABLE | RW | 1 << 48), Some((1 << 48, 3)));
    assert_eq!(reserved(None, TABLE | RW | 1 << 11), Some((1 << 11, 3)));
    // A block at level 3, shareability 0b01, and MemAttr with an inner part of zero.
    assert_eq!(reserved(None, BLOCK | RW), Some((1, 3)));
    assert_eq!(reserved(None, TABLE | RW & !(1 << 9)), Some((1 << 8, 3)));
    assert_eq!(reserved(None, TABLE | RW & !(0b11 << 2)), Some((0b1100 << 2, 3)));
    assert_eq!(reserved(Some(TABLE), TABLE | RW), None);
    assert_eq!(reserved(Some(TABLE | 1 << 63), TABLE | RW), Some((1 << 63, 2)));
    // Invalid entries say what they like.
    assert_eq!(reserved(None, LOCKED | 1 << 50), None);
}

#[test]
fn registers_that_make_no_sense_are_reported_and_fault() {
    let hand = Hand::new();
    let mut registers = hand.registers();
    registers.vtcr = (VTCR_4K & !63) | (64 - 48);
    let fault = hand.model.cpu(0, registers).unwrap().read(Gpa(0)).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Translation { level: level(0) });
    assert!(matches!(hand.violation(), Some(Violation::BadRegisters { .. })));
    let mut registers = hand.registers();
    registers.vttbr += 0x1000;
    drop(hand.model.cpu(0, registers));
    assert!(matches!(hand.violation(), Some(Violation::BadRegisters { .. })));
}

#[test]
fn a_translation_to_where_no_memory_is_is_reported() {
    let hand = Hand::new();
    let (_, third) = hand.tables();
    hand.put(third, 0, hand.root.0 | TABLE | RW);
    assert_eq!(hand.cpu(0).read(Gpa(8)).unwrap_err().kind, FaultKind::External);
    let hpa = Hpa(hand.root.0 + 8);
    assert_eq!(hand.violation(), Some(Violation::NoMemory { gpa: Gpa(8), hpa }));
}
