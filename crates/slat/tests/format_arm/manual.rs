//! A second encoder of stage-2 descriptors, field by field from the tables of the Arm ARM (DDI 0487): slow and plain.

use std::ops::Range;

use slat::format::arm::{Granule, Stage2};
use slat::{Attributes, Dirty, Execute, Hpa, Level, Memory};

/// The bits of a half-open range.
pub(crate) fn bits(range: Range<u32>) -> u64 {
    range.map(|bit| 1 << bit).sum()
}

/// A register or descriptor put together from fields `(highest bit, lowest bit, value)`.
fn fields(list: &[(u32, u32, u64)]) -> u64 {
    let mut sum = 0;
    for &(high, low, value) in list {
        assert_eq!(value & !bits(0..high + 1 - low), 0, "value of [{high}:{low}] too wide");
        assert_eq!(sum & bits(low..high + 1), 0, "[{high}:{low}] overlaps");
        sum |= value << low;
    }
    sum
}

/// The features that decide how entries look.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    pub(crate) wide: bool,
    pub(crate) fwb: bool,
    pub(crate) xnx: bool,
    pub(crate) dirty: bool,
}

impl Options {
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        (0..16).map(|n| Self {
            wide: n & 1 != 0,
            fwb: n & 2 != 0,
            xnx: n & 4 != 0,
            dirty: n & 8 != 0,
        })
    }

    pub(crate) fn format<G: Granule>(self) -> Stage2<G> {
        let format = if self.wide { Stage2::wide(52) } else { Stage2::new(48) };
        format.unwrap().with_fwb(self.fwb).with_xnx(self.xnx).with_hardware_dirty(self.dirty)
    }
}

/// A block or page descriptor by Table D8-53.
pub(crate) fn leaf<G: Granule>(o: Options, level: Level, output: Hpa, a: Attributes) -> u64 {
    let shift = G::SHIFT + (G::SHIFT - 3) * level.height();
    let output = output.0;
    let mut list = vec![
        // Reserved for software use. Bit 58 is so while VTCR_EL2.AssuredOnly is 0, bit 55 outside Realm state.
        (58, 55, a.software.into()),
        // Contiguous: not used.
        (52, 52, 0),
        // AF: clear until the first access.
        (10, 10, a.accessed.into()),
        // S2AP[0], Table D8-76: 0b01 read-only, 0b10 write-only, 0b11 read and write.
        (6, 6, a.read.into()),
        // Descriptor type: page at level 3, else block.
        (1, 1, (level == Level::LAST).into()),
        (0, 0, 1),
    ];
    // XN[1:0] with FEAT_XNX, Table D8-78. Without it, Table D8-77: bit 54 is XN, bit 53 is RES0.
    list.push(match a.execute {
        Execute::Yes => (54, 53, 0b00),
        Execute::User => (54, 53, 0b01),
        Execute::No => (54, 53, 0b10),
        Execute::Kernel => (54, 53, 0b11),
    });
    // DBM and S2AP[1], D8.5.2.1: writable-clean is DBM without S2AP[1], writable-dirty is both. DBM 0: no update.
    let (dbm, s2ap1) = match a.dirty {
        Dirty::Untracked => (0, a.write.into()),
        Dirty::Clean => (1, 0),
        Dirty::Dirty => (1, 1),
    };
    list.extend([(51, 51, dbm), (7, 7, s2ap1)]);
    // MemAttr. Table D8-96: 1111 write-back both, 0101 non-cacheable both, 0001 Device-nGnRE. Tables D8-100 and
    // D8-101: bit 5 is RES0; 110 is write-back in any case, 101 non-cacheable, 001 Device-nGnRE.
    list.push(match (a.memory, o.fwb) {
        (Memory::Normal, false) => (5, 2, 0b1111),
        (Memory::Normal, true) => (5, 2, 0b0110),
        (Memory::NonCacheable, _) => (5, 2, 0b0101),
        (Memory::Device, _) => (5, 2, 0b0001),
    });
    // SH, Table D8-102: inner shareable. Not there in the wide formats of the 4K and 16K granules.
    let shareable = (9, 8, 0b11);
    // Output address.
    match (G::SHIFT, o.wide) {
        // OAB[47:shift] in place.
        (_, false) => list.extend([shareable, (47, shift, output >> shift)]),
        // 64K with FEAT_LPA: OAB[51:48] in bits [15:12].
        (16, true) => list.extend([
            shareable,
            (47, shift, output >> shift & bits(0..48 - shift)),
            (15, 12, output >> 48),
        ]),
        // 4K and 16K with VTCR_EL2.DS: OAB[49:shift] in place, OAB[51:50] in bits [9:8].
        (_, true) => {
            list.extend([(49, shift, output >> shift & bits(0..50 - shift)), (9, 8, output >> 50)])
        }
    }
    fields(&list)
}

/// A table descriptor by Table D8-51: nothing but valid, type and address.
pub(crate) fn table<G: Granule>(wide: bool, table: Hpa) -> u64 {
    let (shift, table) = (G::SHIFT, table.0);
    let mut list = vec![(1, 0, 0b11)];
    match (shift, wide) {
        (_, false) => list.push((47, shift, table >> shift)),
        (16, true) => {
            list.extend([(47, shift, table >> shift & bits(0..48 - shift)), (15, 12, table >> 48)])
        }
        (_, true) => {
            list.extend([(49, shift, table >> shift & bits(0..50 - shift)), (9, 8, table >> 50)])
        }
    }
    fields(&list)
}

/// Bits of a block or page descriptor that Table D8-53 reserves, and those whose feature is off.
pub(crate) fn reserved<G: Granule>(o: Options, level: Level) -> u64 {
    let shift = G::SHIFT + (G::SHIFT - 3) * level.height();
    // 63; 62:59 are for a system MMU, PBHA or POIndex; Contiguous; 50; FnXS.
    let mut mask = bits(59..64) | bits(52..53) | bits(50..51) | bits(11..12);
    if !o.xnx {
        mask |= bits(53..54);
    }
    if !o.dirty {
        mask |= bits(51..52);
    }
    if o.fwb {
        mask |= bits(5..6);
    }
    // Bit 16 of a block is nT, with FEAT_BBML1.
    mask | match (G::SHIFT, o.wide) {
        (_, false) => bits(48..50) | bits(12..shift),
        (16, true) => bits(48..50) | bits(16..shift),
        (_, true) => bits(12..shift),
    }
}
