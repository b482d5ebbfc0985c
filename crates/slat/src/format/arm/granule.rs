//! The translation granules: what differs between their trees, descriptors and control fields.

use core::fmt::Debug;

/// A translation granule: [`K4`], [`K16`] or [`K64`] (Arm ARM DDI 0487, D8.1.1).
pub trait Granule: Layout + Copy + Eq + Debug + Send + Sync + 'static {
    /// log2 of the size of a page and of a table, in bytes.
    const SHIFT: u32;
}

/// 4 KiB pages and tables, blocks of 2 MiB and 1 GiB.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct K4;

/// 16 KiB pages and tables, blocks of 32 MiB.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct K16;

/// 64 KiB pages and tables, blocks of 512 MiB.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct K64;

/// What the format needs to know of a granule. Nobody else can name it, so nobody can add a granule.
pub trait Layout {
    /// The highest level at which a block may stand. The blocks that only a wide format has (512 GiB, 64 GiB, 4 TiB)
    /// are not used.
    const BLOCK_LEVEL: i8;
    /// `VTCR_EL2.TG0`.
    const TG0: u64;
    /// The start level that `VTCR_EL2.SL0` calls zero; the levels above count up.
    const SL0_LEVEL: i8;
    /// The physical address width that start levels -1, 0, 1 and 2 need (Table D8-9); none has `u32::MAX`.
    const START_NEEDS: [u32; 4];
    /// The wide format: whether it is that of FEAT_LPA2, with `VTCR_EL2.DS`, and not that of FEAT_LPA.
    const LPA2: bool;
    /// The wide format: output addresses stand in place below this bit.
    const IN_PLACE_END: u32;
    /// The wide format: the entry bits that hold the output address from `IN_PLACE_END` up.
    const HIGH: u64;
    /// The wide format: how far those address bits are shifted down.
    const HIGH_DOWN: u32;
    /// Entry bits that hold an address in either format, or else shareability, which never differs.
    const ADDRESS: u64 = ((1 << Self::IN_PLACE_END) - (1 << 12)) | Self::HIGH;
}

impl Granule for K4 {
    const SHIFT: u32 = 12;
}

impl Layout for K4 {
    const BLOCK_LEVEL: i8 = 1;
    const TG0: u64 = 0b00;
    const SL0_LEVEL: i8 = 2;
    const START_NEEDS: [u32; 4] = [52, 44, 32, 32];
    const LPA2: bool = true;
    const IN_PLACE_END: u32 = 50;
    const HIGH: u64 = 0b11 << 8;
    const HIGH_DOWN: u32 = 50 - 8;
}

impl Granule for K16 {
    const SHIFT: u32 = 14;
}

impl Layout for K16 {
    const BLOCK_LEVEL: i8 = 2;
    const TG0: u64 = 0b10;
    const SL0_LEVEL: i8 = 3;
    const START_NEEDS: [u32; 4] = [u32::MAX, 52, 42, 32];
    const LPA2: bool = true;
    const IN_PLACE_END: u32 = 50;
    const HIGH: u64 = 0b11 << 8;
    const HIGH_DOWN: u32 = 50 - 8;
}

impl Granule for K64 {
    const SHIFT: u32 = 16;
}

impl Layout for K64 {
    const BLOCK_LEVEL: i8 = 2;
    const TG0: u64 = 0b01;
    const SL0_LEVEL: i8 = 3;
    const START_NEEDS: [u32; 4] = [u32::MAX, u32::MAX, 44, 32];
    const LPA2: bool = false;
    const IN_PLACE_END: u32 = 48;
    const HIGH: u64 = 0b1111 << 12;
    const HIGH_DOWN: u32 = 48 - 12;
}
