//! Entries of long-mode page tables, the guest's and the shadow's (Intel SDM vol. 3, 5.5 "4-level paging and 5-level
//! paging"; AMD APM vol. 2, 5.3).

use core::ops::{BitAnd, BitOr};

use slat::Level;

pub(crate) const PRESENT: u64 = 1 << 0;
pub(crate) const WRITE: u64 = 1 << 1;
pub(crate) const USER: u64 = 1 << 2;
/// Page-level write-through and cache-disable: together, with the reset value of the PAT, not cached at all.
pub(crate) const UNCACHED: u64 = 1 << 3 | 1 << 4;
pub(crate) const ACCESSED: u64 = 1 << 5;
pub(crate) const DIRTY: u64 = 1 << 6;
/// The entry maps a page at a level that could hold a table.
pub(crate) const LARGE: u64 = 1 << 7;
pub(crate) const NO_EXECUTE: u64 = 1 << 63;
/// The bits that say who may do what.
pub(crate) const RIGHTS: u64 = WRITE | USER | NO_EXECUTE;
/// Bits 51:12.
pub(crate) const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// What an entry that links a table has: everything is permitted here, and the last entry says what is.
pub(crate) const LINK: u64 = PRESENT | WRITE | USER | ACCESSED;

/// log2 of a page.
pub(crate) const PAGE_SHIFT: u32 = 12;
/// log2 of the entries of a table.
pub(crate) const INDEX_BITS: u32 = 9;
/// Entries of a table.
pub(crate) const ENTRIES: usize = 512;

/// log2 of the bytes that an entry at `level` maps.
pub(crate) const fn shift(level: Level) -> u32 {
    PAGE_SHIFT + INDEX_BITS * level.height()
}

/// Pages that an entry at `level` maps.
pub(crate) const fn pages(level: Level) -> u64 {
    1 << (INDEX_BITS * level.height())
}

/// Which entry of a table at `level` translates `address`.
pub(crate) const fn index(address: u64, level: Level) -> usize {
    (address >> shift(level)) as usize & (ENTRIES - 1)
}

/// Whether a present entry at `level` maps a page.
pub(crate) fn is_leaf(entry: u64, level: Level) -> bool {
    level == Level::LAST || entry & LARGE != 0
}

/// What may be done with a page: a set. Reading always may.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Rights(u8);

impl Rights {
    /// Reading, by the guest's kernel.
    pub const NONE: Self = Self(0);
    /// Writing.
    pub const WRITE: Self = Self(1);
    /// By the guest's user programs too.
    pub const USER: Self = Self(2);
    /// Fetching instructions.
    pub const EXECUTE: Self = Self(4);
    /// All of it.
    pub const ALL: Self = Self(7);

    /// Those of an entry.
    pub(crate) const fn of(entry: u64) -> Self {
        let write_user = (entry >> 1 & 3) as u8;
        Self(write_user | if entry & NO_EXECUTE == 0 { 4 } else { 0 })
    }

    /// The bits that say so in an entry.
    pub(crate) const fn bits(self) -> u64 {
        ((self.0 & 3) as u64) << 1 | if self.0 & 4 == 0 { NO_EXECUTE } else { 0 }
    }

    /// Whether all of `other` is among these.
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// These without `other`.
    pub(crate) const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
}

impl BitAnd for Rights {
    type Output = Self;

    fn bitand(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
}

impl BitOr for Rights {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_are_what_the_bits_of_an_entry_say() {
        for bits in 0..8 {
            let rights = Rights(bits);
            assert_eq!(Rights::of(rights.bits()), rights);
        }
        assert_eq!(Rights::of(PRESENT | WRITE | USER), Rights::ALL);
        assert_eq!(Rights::of(PRESENT | NO_EXECUTE), Rights::NONE);
    }
}
