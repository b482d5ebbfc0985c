//! Arm stage-2 entries must be what the architecture says: compared with an independent encoder where there is one,
//! and with the tables of the Arm ARM (DDI 0487, "Table D8-…") everywhere.

use std::ops::Range;

use aarch64_paging::descriptor::{PhysicalAddress, Stage2Attributes};
use aarch64_paging::paging::{self, Constraints, MemoryRegion, RootTable};
use aarch64_paging::target::TargetAllocator;
use slat::format::arm::{Granule, K4, K16, K64, Stage2};
use slat::{Attributes, Dirty, Execute, Format, FormatError, Hpa, Level, Memory};

fn level(number: i8) -> Level {
    Level::new(number).unwrap()
}

fn levels(from: i8) -> impl Iterator<Item = Level> {
    (from..=3).map(level)
}

/// The bits of a half-open range.
fn bits(range: Range<u32>) -> u64 {
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

/// The features that decide how entries look.
#[derive(Clone, Copy, Debug)]
struct Options {
    wide: bool,
    fwb: bool,
    xnx: bool,
    dirty: bool,
}

impl Options {
    fn all() -> impl Iterator<Item = Self> {
        (0..16).map(|n| Self {
            wide: n & 1 != 0,
            fwb: n & 2 != 0,
            xnx: n & 4 != 0,
            dirty: n & 8 != 0,
        })
    }

    fn format<G: Granule>(self) -> Stage2<G> {
        let format = if self.wide { Stage2::wide(52) } else { Stage2::new(48) };
        format.unwrap().with_fwb(self.fwb).with_xnx(self.xnx).with_hardware_dirty(self.dirty)
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

/// A block or page descriptor by Table D8-53, from the highest field to the lowest.
fn manual<G: Granule>(o: Options, level: Level, output: Hpa, a: Attributes) -> u64 {
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
fn manual_table<G: Granule>(wide: bool, table: Hpa) -> u64 {
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
fn reserved<G: Granule>(o: Options, level: Level) -> u64 {
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
                    manual::<G>(o, level, output, attributes),
                    "{o:?} {attributes:?}"
                );
                assert_eq!(entry & reserved::<G>(o, level), 0, "{o:?} {level:?} {entry:#x}");
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
            let table = random.address(format.output_bits(), 1 << G::SHIFT);
            let entry = format.table(table);
            assert_eq!(entry, manual_table::<G>(o.wide, table));
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

fn leaves_give_back_what_went_in<G: Granule>() {
    let mut random = Random(3);
    for o in Options::all() {
        let format = o.format::<G>();
        for level in levels(block_level::<G>()) {
            for (attributes, template) in expressible(&format) {
                let size = format.geometry().size(level);
                let output = random.address(format.output_bits(), size);
                let entry = format.leaf(level, output, template);
                assert!(Stage2::<G>::is_valid(entry));
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
        let (a, b) = (who(old.execute), who(template.execute));
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
