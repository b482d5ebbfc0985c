//! The bits of a block or page descriptor of stage 2 (Arm ARM DDI 0487, D8.3.1.2), and how permissions combine.
//!
//! Write permission has two bits: S2AP\[1\] permits a write, and DBM lets hardware set S2AP\[1\] at the first one.
//! Execute permission is for EL1 and EL0 apart, in an encoding that is no plain set of bits.

pub(super) const VALID: u64 = 1 << 0;
/// Set in a table or page descriptor, clear in a block descriptor.
pub(super) const TABLE_OR_PAGE: u64 = 1 << 1;
pub(super) const TABLE_OR_PAGE_SHIFT: u32 = 1;

/// MemAttr (D8.6.5 without FEAT_S2FWB, D8.6.6 with).
pub(super) const MEMORY: u64 = 0b1111 << 2;
/// Device-nGnRE, the same with FEAT_S2FWB and without.
pub(super) const DEVICE: u64 = 0b0001 << 2;
/// Normal, inner and outer non-cacheable, the same with FEAT_S2FWB and without.
pub(super) const NON_CACHEABLE: u64 = 0b0101 << 2;
/// Normal, inner and outer write-back, unless the guest's stage 1 says less.
pub(super) const WRITE_BACK: u64 = 0b1111 << 2;
/// Normal, write-back whatever stage 1 says (FEAT_S2FWB).
pub(super) const FORCED_WRITE_BACK: u64 = 0b0110 << 2;

/// S2AP\[0\] (D8.4.2.1.1).
pub(super) const READ: u64 = 1 << 6;
/// S2AP\[1\].
pub(super) const S2AP_WRITE: u64 = 1 << 7;
/// SH (D8.6.7). Ignored for memory that is not cacheable, which is outer shareable whatever this says.
pub(super) const INNER_SHAREABLE: u64 = 0b11 << 8;
pub(super) const ACCESSED: u64 = 1 << 10;
/// Dirty bit modifier (D8.5.2.1): without S2AP\[1\] the entry is writable-clean, with it writable-dirty.
pub(super) const DBM: u64 = 1 << 51;
const DBM_FROM_S2AP_WRITE: u32 = 51 - 7;
/// XN\[0\], or reserved without FEAT_XNX.
pub(super) const XN0: u64 = 1 << 53;
/// XN\[1\], or XN without FEAT_XNX.
pub(super) const XN1: u64 = 1 << 54;
/// Bit 55 is NS in Realm state, bit 58 is AssuredOnly where `VTCR_EL2` says so; both are out of scope.
pub(super) const SOFTWARE_SHIFT: u32 = 55;

/// Whether a write is permitted, now or after hardware has noted it, as S2AP\[1\].
#[inline(always)]
pub(super) const fn writable(entry: u64) -> u64 {
    (entry | entry >> DBM_FROM_S2AP_WRITE) & S2AP_WRITE
}

/// Both write bits if S2AP\[1\] is set in `write`, which has no other bit.
#[inline(always)]
pub(super) const fn write_bits(write: u64) -> u64 {
    write | write << DBM_FROM_S2AP_WRITE
}

/// DBM, at the place of S2AP\[1\].
#[inline(always)]
pub(super) const fn tracked(entry: u64) -> u64 {
    entry >> DBM_FROM_S2AP_WRITE & S2AP_WRITE
}

/// Who must not execute: EL1, EL0, each as bit 54 (Tables D8-77 and D8-78). XN is 0b00 for nobody, 0b01 for EL1,
/// 0b10 for both, 0b11 for EL0. Without FEAT_XNX bit 53 is zero and the answers agree.
#[inline(always)]
pub(super) const fn never(entry: u64) -> (u64, u64) {
    ((entry ^ entry << 1) & XN1, entry & XN1)
}

/// XN for everybody if the entry's memory must not be executed: device and non-cacheable memory (the cacheable types,
/// with FEAT_S2FWB or without, have MemAttr\[1\] set).
#[inline(always)]
pub(super) const fn never_executable(entry: u64) -> u64 {
    (!entry >> 3 & 1) * XN1
}

/// The XN field for what [`never`] told.
#[inline(always)]
pub(super) const fn execute_never(el1: u64, el0: u64) -> u64 {
    el0 | (el1 ^ el0) >> 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn execute_permission_survives_taking_apart() {
        for xn in [0, XN0, XN1, XN0 | XN1] {
            let (el1, el0) = never(xn | !(XN0 | XN1));
            assert_eq!(execute_never(el1, el0), xn);
        }
        assert_eq!(never(0), (0, 0));
        assert_eq!(never(XN0), (XN1, 0));
        assert_eq!(never(XN1), (XN1, XN1));
        assert_eq!(never(XN0 | XN1), (0, XN1));
    }

    #[test]
    fn no_permission_overlaps_the_tags_of_invalid_entries() {
        let all = VALID | TABLE_OR_PAGE | MEMORY | READ | S2AP_WRITE | INNER_SHAREABLE | ACCESSED;
        let all = all | DBM | XN0 | XN1 | 0b1111 << SOFTWARE_SHIFT;
        assert_eq!(all & (crate::entry::LOCK_BIT | 0b11111 << 59), 0);
    }
}
