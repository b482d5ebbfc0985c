//! Arm stage-2 entries must be what the architecture says: compared with an independent encoder where there is one,
//! and with the tables of the Arm ARM (DDI 0487, "Table D8-…") everywhere.

use std::ops::Range;

use aarch64_paging::descriptor::{PhysicalAddress, Stage2Attributes};
use aarch64_paging::paging::{self, Constraints, MemoryRegion, RootTable};
use aarch64_paging::target::TargetAllocator;
use slat::format::arm::{Granule, K4, K16, K64, Stage2};
use slat::{Attributes, Dirty, Execute, Format, FormatError, Hpa, Level, Memory};

#[path = "format_arm/manual.rs"]
mod manual;

use manual::{Options, bits};

fn level(number: i8) -> Level {
    Level::new(number).unwrap()
}

fn levels(from: i8) -> impl Iterator<Item = Level> {
    (from..=3).map(level)
}

/// xorshift64: enough to try many addresses, the same ones each time.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// An address of at most `width` bits, aligned to `size`.
    fn address(&mut self, width: u32, size: u64) -> Hpa {
        Hpa(self.next() & bits(0..width) & !(size - 1))
    }
}

/// The highest level with blocks, without those that need a wide format.
fn block_level<G: Granule>() -> i8 {
    if G::SHIFT == 12 { 1 } else { 2 }
}

/// Attributes in every combination, sensible or not.
fn all_attributes() -> Vec<Attributes> {
    let mut all = Vec::new();
    for n in 0..8u8 {
        for execute in [Execute::No, Execute::Yes, Execute::Kernel, Execute::User] {
            for memory in [Memory::Normal, Memory::NonCacheable, Memory::Device] {
                for dirty in [Dirty::Untracked, Dirty::Clean, Dirty::Dirty] {
                    for software in [0, 6, 15] {
                        all.push(Attributes {
                            read: n & 1 != 0,
                            write: n & 2 != 0,
                            execute,
                            memory,
                            accessed: n & 4 != 0,
                            dirty,
                            software,
                        });
                    }
                }
            }
        }
    }
    all
}

/// Those that the format can express.
fn expressible<G: Granule>(format: &Stage2<G>) -> Vec<(Attributes, u64)> {
    let each = all_attributes().into_iter();
    let all: Vec<_> = each.filter_map(|a| Some((a, format.template(a).ok()?))).collect();
    assert!(all.len() > 50);
    all
}

fn leaves_are_as_in_the_manual<G: Granule>() {
    let mut random = Random(1);
    for o in Options::all() {
        let format = o.format::<G>();
        for level in levels(block_level::<G>()) {
            for (attributes, template) in expressible(&format) {
                let size = format.geometry().size(level);
                let output = random.address(format.output_bits(), size);
                let entry = format.leaf(level, output, template);
                assert_eq!(
                    entry,
                    manual::leaf::<G>(o, level, output, attributes),
                    "{o:?} {attributes:?}"
                );
                assert_eq!(
                    entry & manual::reserved::<G>(o, level),
                    0,
                    "{o:?} {level:?} {entry:#x}"
                );
            }
        }
    }
}

#[test]
fn leaves_of_every_granule_are_as_in_the_manual_and_set_no_reserved_bit() {
    leaves_are_as_in_the_manual::<K4>();
    leaves_are_as_in_the_manual::<K16>();
    leaves_are_as_in_the_manual::<K64>();
}

fn tables_are_as_in_the_manual<G: Granule>() {
    let mut random = Random(2);
    for o in Options::all() {
        let format = o.format::<G>();
        for _ in 0..1000 {
            // Where `Machine::allocate` promises tables to be.
            let table = random.address(48, 1 << G::SHIFT);
            let entry = format.table(table);
            assert_eq!(entry, manual::table::<G>(o.wide, table));
            assert_eq!(format.next(entry), table);
            assert_eq!(entry & bits(59..64), 0);
            assert_eq!(Stage2::<G>::thaw(Stage2::<G>::freeze(entry)), entry);
            for level in levels(-1) {
                assert_eq!(Stage2::<G>::is_table(entry, level), level != Level::LAST);
            }
        }
    }
}

#[test]
fn tables_of_every_granule_are_as_in_the_manual() {
    tables_are_as_in_the_manual::<K4>();
    tables_are_as_in_the_manual::<K16>();
    tables_are_as_in_the_manual::<K64>();
}

#[test]
fn device_memory_never_becomes_executable() {
    let format = Stage2::<K4>::new(40).unwrap();
    for memory in [Memory::Device, Memory::NonCacheable] {
        let old = format.template(Attributes { memory, ..Attributes::RO }).unwrap();
        let relaxed = Stage2::<K4>::relaxed(old, format.template(Attributes::RWX).unwrap());
        assert_eq!(format.attributes(relaxed), Attributes { memory, ..Attributes::RW });
    }
}

fn leaves_give_back_what_went_in<G: Granule>() {
    let mut random = Random(3);
    for o in Options::all() {
        let format = o.format::<G>();
        for level in levels(block_level::<G>()) {
            for (attributes, template) in expressible(&format) {
                let size = format.geometry().size(level);
                let output = random.address(format.output_bits(), size);
                let entry = format.leaf(level, output, template);
                assert!(Stage2::<G>::is_valid(entry) && !Stage2::<G>::is_valid(entry - 1));
                assert!(!Stage2::<G>::is_table(entry, level));
                assert_eq!(format.output(entry, level), output);
                assert_eq!(format.template_of(entry, level), template);
                assert_eq!(format.attributes(template), attributes);
                assert_eq!(Stage2::<G>::thaw(Stage2::<G>::freeze(entry)), entry);
            }
        }
    }
}

#[test]
fn leaves_of_every_granule_give_back_what_went_in() {
    leaves_give_back_what_went_in::<K4>();
    leaves_give_back_what_went_in::<K16>();
    leaves_give_back_what_went_in::<K64>();
}

#[test]
fn blocks_stand_where_every_cpu_has_them() {
    let at = |allowed: &dyn Fn(Level) -> bool| levels(-1).filter(|&l| allowed(l)).count();
    for wide in [false, true] {
        let o = Options { wide, fwb: true, xnx: true, dirty: true };
        assert_eq!(at(&|l| o.format::<K4>().leaf_allowed(l)), 3);
        assert_eq!(at(&|l| o.format::<K16>().leaf_allowed(l)), 2);
        assert_eq!(at(&|l| o.format::<K64>().leaf_allowed(l)), 2);
    }
}

/// The same attributes for `aarch64-paging`.
fn independent(a: Attributes) -> Stage2Attributes {
    use Stage2Attributes as S;
    let mut flags = S::VALID | S::SH_INNER;
    flags |= match a.memory {
        Memory::Normal => S::MEMATTR_NORMAL_INNER_WB | S::MEMATTR_NORMAL_OUTER_WB,
        Memory::NonCacheable => S::MEMATTR_NORMAL_INNER_NC | S::MEMATTR_NORMAL_OUTER_NC,
        Memory::Device => S::MEMATTR_DEVICE_nGnRE,
    };
    flags |= match (a.read, a.write) {
        (false, false) => S::S2AP_ACCESS_NONE,
        (true, false) => S::S2AP_ACCESS_RO,
        (false, true) => S::S2AP_ACCESS_WO,
        (true, true) => S::S2AP_ACCESS_RW,
    };
    flags.set(S::ACCESS_FLAG, a.accessed);
    flags.set(S::XN, a.execute == Execute::No);
    for (n, flag) in [S::SWFLAG_0, S::SWFLAG_1, S::SWFLAG_2, S::SWFLAG_3].into_iter().enumerate() {
        flags.set(flag, a.software >> n & 1 != 0);
    }
    flags
}

/// A tree that `aarch64-paging` built: the guest addresses `range`, mapped to `range.start + offset` and so on.
struct Foreign {
    format: Stage2<K4>,
    bytes: Vec<u8>,
    base: u64,
    range: Range<u64>,
    offset: u64,
    template: u64,
    /// Leaves that were seen, by level.
    leaves: [usize; 4],
}

impl Foreign {
    /// Compares each entry of the table with what this format would have there.
    fn compare(&mut self, table: Hpa, at: Level, first: u64) {
        let size = self.format.geometry().size(at);
        for index in 0..512 {
            let place = (table.0 - self.base) as usize + 8 * index;
            let entry = u64::from_le_bytes(self.bytes[place..place + 8].try_into().unwrap());
            let start = first + size * index as u64;
            let output = start.wrapping_add(self.offset);
            if start + size <= self.range.start || start >= self.range.end {
                assert_eq!(entry, 0);
            } else if self.format.leaf_allowed(at)
                && self.range.start <= start
                && start + size <= self.range.end
                && output.is_multiple_of(size)
            {
                assert_eq!(entry, self.format.leaf(at, Hpa(output), self.template));
                self.leaves[at.number() as usize] += 1;
            } else {
                assert!(Stage2::<K4>::is_table(entry, at));
                let next = self.format.next(entry);
                assert_eq!(entry, self.format.table(next));
                self.compare(next, at.below(), start);
            }
        }
    }
}

#[test]
fn trees_of_an_independent_encoder_read_the_same_bit_by_bit() {
    let format = Stage2::<K4>::new(39).unwrap();
    assert_eq!(format.geometry().start(), level(1));
    let base = 0x1234_5678_9000;
    // One page and one 2M block before a 1G block, then one 2M block and three pages.
    let range = 0x3fdf_f000..0x8020_3000;
    let offset = 0x5678_4000_0000;
    let mut compared = 0;
    for attributes in all_attributes() {
        let Ok(template) = format.template(attributes) else { continue };
        let mut tree = RootTable::new(TargetAllocator::new(base), 1, paging::Stage2);
        tree.map_range(
            &MemoryRegion::new(range.start as usize, range.end as usize),
            PhysicalAddress((range.start + offset) as usize),
            independent(attributes),
            Constraints::empty(),
        )
        .unwrap();
        let root = Hpa(tree.to_physical().0 as u64);
        let bytes = tree.translation().as_bytes();
        let range = range.clone();
        let mut foreign = Foreign { format, bytes, base, range, offset, template, leaves: [0; 4] };
        foreign.compare(root, level(1), 0);
        assert_eq!(foreign.leaves, [0, 1, 2, 4]);
        compared += 1;
    }
    assert_eq!(compared, 2 * 2 * 2 * 3 * (2 + 1 + 1));
}

#[test]
fn what_cannot_be_expressed_is_refused() {
    let plain = Stage2::<K4>::new(40).unwrap();
    let able = plain.with_xnx(true).with_hardware_dirty(true);
    for a in all_attributes() {
        let untracked = a.dirty == Dirty::Untracked;
        let simple = matches!(a.execute, Execute::No | Execute::Yes);
        let expected = if a.execute != Execute::No && a.memory != Memory::Normal {
            Some(FormatError::ExecutableDevice)
        } else if !untracked && !a.write {
            Some(FormatError::DirtyState)
        } else {
            None
        };
        assert_eq!(able.template(a).err(), expected);
        let expected = match expected {
            Some(FormatError::ExecutableDevice) => expected,
            _ if !simple => Some(FormatError::ExecuteNeedsXnx),
            _ if !untracked => Some(FormatError::DirtyState),
            _ => None,
        };
        assert_eq!(plain.template(a).err(), expected);
    }
    let noted = Attributes { software: 16, ..Attributes::RW };
    assert_eq!(able.template(noted), Err(FormatError::Software(16)));
}

/// Execute permission as a pair: EL1, EL0.
fn who(execute: Execute) -> (bool, bool) {
    match execute {
        Execute::No => (false, false),
        Execute::Yes => (true, true),
        Execute::Kernel => (true, false),
        Execute::User => (false, true),
    }
}

fn execute(who: (bool, bool)) -> Execute {
    [Execute::No, Execute::User, Execute::Kernel, Execute::Yes]
        [usize::from(who.0) << 1 | usize::from(who.1)]
}

/// The functions of two entries, in words.
mod words {
    use super::*;

    pub(super) fn relaxed(old: Attributes, template: Attributes) -> Attributes {
        let (a, mut b) = (who(old.execute), who(template.execute));
        if old.memory != Memory::Normal {
            b = (false, false);
        }
        Attributes {
            read: old.read || template.read,
            write: old.write || template.write,
            execute: execute((a.0 || b.0, a.1 || b.1)),
            accessed: old.accessed || template.accessed,
            dirty: if old.write { old.dirty } else { template.dirty },
            ..old
        }
    }

    pub(super) fn intersect(a: Attributes, b: Attributes) -> Attributes {
        let (x, y) = (who(a.execute), who(b.execute));
        let write = a.write && b.write;
        Attributes {
            read: a.read && b.read,
            write,
            execute: execute((x.0 && y.0, x.1 && y.1)),
            dirty: if write { a.dirty } else { Dirty::Untracked },
            ..a
        }
    }

    pub(super) fn absorb(a: Attributes, b: Attributes) -> Attributes {
        let b_dirty = b.write && b.dirty != Dirty::Clean;
        let dirty = if a.dirty == Dirty::Clean && b_dirty { Dirty::Dirty } else { a.dirty };
        Attributes { accessed: a.accessed || b.accessed, dirty, ..a }
    }
}

#[test]
fn entries_combine_as_their_attributes_do() {
    type F = Stage2<K16>;
    let format = Options { wide: true, fwb: true, xnx: true, dirty: true }.format::<K16>();
    let all = expressible(&format);
    let (at, output) = (level(2), Hpa(0xa_bcde_0000_0000));
    let entry = |a: Attributes| format.leaf(at, output, format.template(a).unwrap());
    for &(a, template) in &all {
        let old = format.leaf(at, output, template);
        for &(b, other) in &all {
            assert_eq!(F::intersect(old, entry(b)), entry(words::intersect(a, b)), "{a:?} {b:?}");
            assert_eq!(F::absorb(old, entry(b)), entry(words::absorb(a, b)), "{a:?} {b:?}");
            if a.memory == b.memory {
                assert_eq!(F::relaxed(old, other), entry(words::relaxed(a, b)), "{a:?} {b:?}");
            }
        }
    }
}

#[test]
fn without_xnx_and_dirty_state_no_combination_sets_their_bits() {
    type F = Stage2<K4>;
    let format = F::new(40).unwrap();
    for (_, a) in expressible(&format) {
        for (_, b) in expressible(&format) {
            let all = F::intersect(a, b) | F::relaxed(a, b) | F::absorb(a, b);
            assert_eq!(all & (bits(51..52) | bits(53..54)), 0);
        }
    }
}

#[test]
fn dirty_state_is_what_hardware_set_and_can_be_cleared() {
    type F = Stage2<K64>;
    let format = Options { wide: true, fwb: false, xnx: true, dirty: true }.format::<K64>();
    assert!(format.tracks_dirty());
    assert!(!format.with_hardware_dirty(false).tracks_dirty());
    for (a, template) in expressible(&format) {
        let cleaned = match a.dirty {
            Dirty::Dirty => Attributes { dirty: Dirty::Clean, ..a },
            _ => a,
        };
        assert_eq!(F::is_dirty(template), a.dirty == Dirty::Dirty);
        assert_eq!(F::tracks_dirty_of(template), a.dirty != Dirty::Untracked);
        assert_eq!(F::is_writable(template), a.write);
        assert_eq!(format.attributes(F::clean(template)), cleaned);
    }
}

#[test]
fn clearing_the_write_bits_protects_for_good() {
    type F = Stage2<K4>;
    let format = Options { wide: false, fwb: true, xnx: true, dirty: true }.format::<K4>();
    for (a, template) in expressible(&format) {
        let protected = template & !F::WRITE;
        assert!(!F::is_writable(protected) && !F::tracks_dirty_of(protected));
        let expected = Attributes { write: false, dirty: Dirty::Untracked, ..a };
        assert_eq!(format.attributes(protected), expected);
        assert_eq!(template & F::ACCESSED != 0, a.accessed);
        assert_eq!(template >> F::SOFTWARE_SHIFT & 0b1111, a.software.into());
    }
}

fn essence_has_no_address<G: Granule>() {
    let mut random = Random(4);
    for o in Options::all() {
        let format = o.format::<G>();
        for level in levels(block_level::<G>()) {
            let size = format.geometry().size(level);
            for (a, template) in expressible(&format) {
                let entry =
                    format.leaf(level, random.address(format.output_bits(), size), template);
                let essence = Stage2::<G>::essence(entry);
                assert_eq!(essence, Stage2::<G>::essence(template));
                let dirty = if a.dirty == Dirty::Dirty { Dirty::Clean } else { a.dirty };
                assert_eq!(format.attributes(essence), Attributes { accessed: false, dirty, ..a });
            }
        }
    }
}

#[test]
fn essence_is_all_but_address_access_flag_and_dirty_state() {
    essence_has_no_address::<K4>();
    essence_has_no_address::<K16>();
    essence_has_no_address::<K64>();
}
