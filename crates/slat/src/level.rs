//! Where in the tree: levels in Arm's numbering, and the geometry that turns an address into an index.

use crate::Gpa;

/// A level of the tree in Arm's numbering: the last is 3, whose leaf entries are pages; a leaf above it is a
/// block. The root may be at -1 to 2.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Level(i8);

impl Level {
    /// Level 3, where every valid entry is a page.
    pub const LAST: Self = Self(3);
    /// Level -1, the highest there is.
    pub const TOP: Self = Self(-1);

    /// Level `n`; `None` outside -1 to 3.
    pub const fn new(n: i8) -> Option<Self> {
        if n >= -1 && n <= 3 { Some(Self(n)) } else { None }
    }

    /// The number, -1 to 3.
    pub const fn number(self) -> i8 {
        self.0
    }

    /// The next level towards the leaves; the last level is its own.
    pub const fn below(self) -> Self {
        if self.0 < 3 { Self(self.0 + 1) } else { self }
    }

    /// How many levels lie between this one and the last: 0 for the last.
    pub const fn height(self) -> u32 {
        (3 - self.0) as u32
    }
}

/// The shape of a tree: granule, width of the addresses, where the walk starts.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Geometry {
    page_shift: u32,
    index_bits: u32,
    address_bits: u32,
    start: Level,
}

impl Geometry {
    /// The shape with pages of `1 << page_shift` bytes, tables of `1 << index_bits` entries, addresses of
    /// `address_bits` bits and the root at `start`. `None` if the start level cannot resolve the address, or if it
    /// would need more than 16 concatenated root tables (Arm ARM DDI 0487, D8.2.2 "Concatenated translation
    /// tables"), or if the address has no bit to index the root with.
    pub const fn new(
        page_shift: u32,
        index_bits: u32,
        address_bits: u32,
        start: Level,
    ) -> Option<Self> {
        if page_shift > 30 || index_bits > 13 || address_bits > 52 {
            return None;
        }
        let root_shift = page_shift + index_bits * start.height();
        if address_bits <= root_shift || address_bits - root_shift > index_bits + 4 {
            return None;
        }
        Some(Self { page_shift, index_bits, address_bits, start })
    }

    /// log2 of the bytes that one entry at `level` covers.
    #[inline(always)]
    pub const fn shift(&self, level: Level) -> u32 {
        self.page_shift + self.index_bits * level.height()
    }

    /// The bytes that one entry at `level` covers; 0 where that does not fit 64 bits.
    #[inline(always)]
    pub const fn size(&self, level: Level) -> u64 {
        match 1u64.checked_shl(self.shift(level)) {
            Some(size) => size,
            None => 0,
        }
    }

    /// log2 of the granule in bytes.
    pub const fn page_shift(&self) -> u32 {
        self.page_shift
    }

    /// The granule in bytes: the size of a page, and on every real machine of a table.
    pub const fn page_size(&self) -> u64 {
        1 << self.page_shift
    }

    /// Entries of one table.
    pub const fn entries(&self) -> usize {
        1 << self.index_bits
    }

    /// Width of a guest-physical address.
    pub const fn address_bits(&self) -> u32 {
        self.address_bits
    }

    /// The first address that is too large.
    pub const fn limit(&self) -> Gpa {
        Gpa(1 << self.address_bits)
    }

    /// The level of the root.
    pub const fn start(&self) -> Level {
        self.start
    }

    /// Entries of the root, over all its concatenated tables (or the used part of one).
    pub const fn root_entries(&self) -> usize {
        1 << (self.address_bits - self.shift(self.start))
    }

    /// How many tables, contiguous and aligned to their total size, make the root: 1 to 16.
    pub const fn root_tables(&self) -> usize {
        let n = self.root_entries() >> self.index_bits;
        if n == 0 { 1 } else { n }
    }

    /// How many tables, counting from a table at `level` down to the last level, cover `size(level - 1)` bytes in
    /// full: what splitting a block at the level above into entries of level `to` costs.
    pub const fn tables_below(&self, block: Level, to: Level) -> usize {
        let mut tables = 0;
        let mut width = 1;
        let mut level = block;
        while level.0 < to.0 {
            tables += width;
            width <<= self.index_bits;
            level = level.below();
        }
        tables
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn level(n: i8) -> Level {
        Level::new(n).unwrap()
    }

    #[test]
    fn root_concatenates_up_to_sixteen_tables() {
        let g = Geometry::new(12, 9, 40, level(1)).unwrap();
        assert_eq!((g.root_tables(), g.root_entries(), g.size(level(2))), (2, 1024, 2 << 20));
        assert!(Geometry::new(12, 9, 43, level(1)).is_some());
        assert!(Geometry::new(12, 9, 44, level(1)).is_none());
        assert!(Geometry::new(12, 9, 39, level(0)).is_none());
    }

    #[test]
    fn tables_of_a_full_split() {
        let g = Geometry::new(12, 9, 40, level(1)).unwrap();
        assert_eq!(g.tables_below(level(1), Level::LAST), 513);
        assert_eq!(g.tables_below(level(2), Level::LAST), 1);
        assert_eq!(g.tables_below(level(1), level(2)), 1);
    }
}
