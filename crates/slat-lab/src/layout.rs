//! Where guest memory lies: its place in guest-physical space, its memslots, and each vCPU's part of it.
//!
//! As in the kernel's tests it ends where guest-physical space ends and begins at a multiple of the backing's page
//! size, so that a large page of the host can become a block of the guest.

use std::ops::Range;

use crate::arch::{Arch, Kind};
use crate::backend::Backend;
use crate::backing::Backing;
use crate::granule::{self, GranuleSize};
use crate::guest_mode::GuestMode;
use crate::options::{EagerSplit, MachineOptions, MemoryOptions};
use crate::size::Size;

/// What a workload chooses about its memory beyond [`MemoryOptions`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    /// Every vCPU uses all of it.
    pub(crate) overlap: bool,
    /// Memslots of one size.
    pub(crate) slots: u32,
    /// Where it begins; at the top if nobody cares.
    pub(crate) offset: Option<u64>,
    pub(crate) eager_split: EagerSplit,
}

impl Plan {
    /// One slot at the top, each vCPU with a part of its own.
    pub(crate) const PLAIN: Self =
        Self { overlap: false, slots: 1, offset: None, eager_split: EagerSplit::Off };
}

/// A layout that holds together.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    pub(crate) kind: Kind,
    pub(crate) granule: GranuleSize,
    /// Width of guest-physical addresses in the tables.
    pub(crate) ipa_bits: u32,
    /// Where guest memory begins.
    pub(crate) gpa: u64,
    /// Bytes of guest memory.
    pub(crate) size: u64,
    /// Bytes of host memory below it: whole pages of the backing.
    pub(crate) host_size: u64,
    /// How many memslots of one size.
    pub(crate) slots: u32,
    /// Bytes of a guest page.
    pub(crate) guest_page: u64,
    /// Bytes of a page of the host.
    pub(crate) page: u64,
    pub(crate) eager_split: EagerSplit,
    /// Whether every vCPU uses all of it.
    overlap: bool,
    /// Bytes of one vCPU's part.
    part: u64,
}

/// Options that cannot be had together, or at all.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub(crate) enum Misfit {
    #[error(
        "--granule {granule}: tables of --arch {arch} are of 4K; --arch arm has other granules"
    )]
    Granule { arch: Arch, granule: Size },
    #[error(
        "--fwb is a feature of Arm; with --arch {arch} memory is write-back whatever the guest says"
    )]
    Fwb { arch: Arch },
    #[error(
        "--hardware-access off: nested page tables always have accessed flags; EPT can do without"
    )]
    Flags,
    #[error("--ipa-bits {bits}: tables of --arch {arch} translate {least} bits at least")]
    NarrowTables { arch: Arch, bits: u32, least: u32 },
    #[error("-b 0: a vCPU needs memory to touch")]
    NoMemory,
    #[error("-b {bytes} is not a whole number of {what} of {page}")]
    Fraction { bytes: Size, what: &'static str, page: Size },
    #[error("{vcpus} vCPUs with {bytes} each are more memory than 64 bits can address")]
    Overflow { vcpus: u32, bytes: Size },
    #[error(
        "{size} of guest memory do not fit below the end of {bits}-bit guest-physical addresses, {limit}; \
         {how} the width"
    )]
    AddressBits { size: Size, bits: u32, limit: Size, how: &'static str },
    #[error(
        "guest memory from {offset:#x} on would end at {end:#x}, beyond {bits}-bit guest-physical addresses \
         ({limit:#x}); {how} the width"
    )]
    OffsetBits { offset: u64, end: u128, bits: u32, limit: u64, how: &'static str },
    #[error("-p {offset:#x} is not a multiple of the page size, {page}")]
    OffsetAlign { offset: u64, page: Size },
    #[error("-x {slots} does not divide {pages} pages of {page} into slots of whole pages")]
    Slots { slots: u32, pages: u64, page: Size },
    #[error("-s {backing}: a {granule} host has no pages of {size}; its smallest is {page}")]
    SmallBacking { backing: Backing, granule: Size, size: Size, page: Size },
    #[error(
        "--eager-split {chunk}: tables of the {granule} granule have no block of that size here, but {sizes}"
    )]
    Chunk { chunk: Size, granule: Size, sizes: String },
}

impl Layout {
    /// Lays guest memory out.
    ///
    /// # Errors
    /// The first [`Misfit`] among the options.
    pub(crate) fn new(
        memory: &MemoryOptions,
        machine: &MachineOptions,
        plan: Plan,
        backing: Backing,
        mode: GuestMode,
    ) -> Result<Self, Misfit> {
        let granule = machine.granule();
        let (page, guest_page) = (granule.page_size(), mode.page_size);
        check_arch(machine)?;
        let least = machine.arch().least_bits();
        let ipa_bits = machine.ipa_bits.unwrap_or(mode.physical_bits.max(least));
        check_chunk(plan.eager_split, granule, ipa_bits)?;
        let backing_page = backing.page_size(granule);
        if backing_page < page {
            return Err(Misfit::SmallBacking { backing, granule: page, size: backing_page, page });
        }
        let part = memory.bytes;
        if part == Size(0) {
            return Err(Misfit::NoMemory);
        }
        for (what, page) in [("guest pages", guest_page), ("host pages", page)] {
            if !part.0.is_multiple_of(page.0) {
                return Err(Misfit::Fraction { bytes: part, what, page });
            }
        }
        let overflow = Misfit::Overflow { vcpus: memory.vcpus, bytes: part };
        let size = part.0.checked_mul(memory.vcpus.into()).ok_or(overflow.clone())?;
        let host_size = size.checked_next_multiple_of(backing_page.0).ok_or(overflow)?;
        let pages = size / page.0;
        if !pages.is_multiple_of(plan.slots.into()) {
            return Err(Misfit::Slots { slots: plan.slots, pages, page });
        }
        let bits = ipa_bits.min(mode.physical_bits);
        let align = page.max(guest_page);
        let how = match machine.backend() {
            Backend::Kvm => "guest mode chooses",
            Backend::Model | Backend::Metal => "guest mode and --ipa-bits choose",
        };
        let gpa = match plan.offset {
            Some(offset) => at_offset(offset, size, (bits, how), align)?,
            None => at_top(size, (bits, how), align.max(backing_page))?,
        };
        Ok(Self {
            kind: Kind::of(machine),
            granule,
            ipa_bits,
            gpa,
            size,
            host_size,
            slots: plan.slots,
            guest_page: guest_page.0,
            page: page.0,
            eager_split: plan.eager_split,
            overlap: plan.overlap,
            part: part.0,
        })
    }

    /// Guest pages of all guest memory.
    pub(crate) fn guest_pages(&self) -> u64 {
        self.size / self.guest_page
    }

    /// The guest pages that vCPU `index` uses.
    pub(crate) fn part(&self, index: u32) -> Range<u64> {
        if self.overlap {
            return 0..self.guest_pages();
        }
        let pages = self.part / self.guest_page;
        let first = u64::from(index) * pages;
        first..first + pages
    }

    /// The vCPU that alone uses a guest page; `None` if all may.
    pub(crate) fn owner(&self, guest_page: u64) -> Option<usize> {
        let pages = self.part / self.guest_page;
        (!self.overlap).then_some((guest_page / pages) as usize)
    }

    /// Bytes of one memslot.
    pub(crate) fn slot_size(&self) -> u64 {
        self.size / u64::from(self.slots)
    }

    /// Pages of the host in one memslot: bits of its dirty log.
    pub(crate) fn slot_pages(&self) -> u64 {
        self.slot_size() / self.page
    }

    /// Bytes of the leaves that map guest memory where nothing forbids large ones.
    pub(crate) fn leaf_size(&self, backing: Backing) -> Size {
        let congruent = |block: &Size| self.gpa.is_multiple_of(block.0);
        self.fitting_blocks(backing).rev().find(congruent).unwrap_or(Size(self.page))
    }

    /// The blocks that are not larger than a page of the backing, ascending.
    fn fitting_blocks(&self, backing: Backing) -> impl DoubleEndedIterator<Item = Size> + use<> {
        let backing_page = backing.page_size(self.granule);
        let blocks = self.granule.block_sizes(self.ipa_bits).into_iter();
        blocks.filter(move |block| *block <= backing_page)
    }

    /// Why guest memory is mapped with smaller leaves than its backing would allow; `None` if it is not.
    pub(crate) fn remark(&self, backing: Backing) -> Option<String> {
        let backing_page = backing.page_size(self.granule);
        if backing_page.0 == self.page {
            return None;
        }
        let Some(block) = self.fitting_blocks(backing).next_back() else {
            return Some(format!(
                "{backing_page} pages back guest memory, but the {} granule has no block that small ({}): \
                 it is mapped by pages",
                Size(self.page),
                granule::list(&self.granule.block_sizes(self.ipa_bits)),
            ));
        };
        if !self.gpa.is_multiple_of(block.0) {
            return Some(format!(
                "guest memory at {:#x} is not congruent with its {backing_page} pages: no blocks of {block}",
                self.gpa
            ));
        }
        None
    }
}

/// Refuses what only another architecture has.
fn check_arch(machine: &MachineOptions) -> Result<(), Misfit> {
    let arch = machine.arch();
    match machine.ipa_bits {
        _ if arch == Arch::Arm => Ok(()),
        _ if machine.granule() != GranuleSize::K4 => {
            Err(Misfit::Granule { arch, granule: machine.granule().page_size() })
        }
        _ if machine.fwb => Err(Misfit::Fwb { arch }),
        _ if arch == Arch::Npt && !machine.hardware_access() => Err(Misfit::Flags),
        Some(bits) if bits < arch.least_bits() => {
            Err(Misfit::NarrowTables { arch, bits, least: arch.least_bits() })
        }
        _ => Ok(()),
    }
}

fn check_chunk(split: EagerSplit, granule: GranuleSize, bits: u32) -> Result<(), Misfit> {
    let sizes = granule.block_sizes(bits);
    match split {
        EagerSplit::Chunk(chunk) if !sizes.contains(&chunk) => {
            Err(Misfit::Chunk { chunk, granule: granule.page_size(), sizes: granule::list(&sizes) })
        }
        _ => Ok(()),
    }
}

/// The highest multiple of `align` from which `size` bytes end within `bits` bits.
fn at_top(size: u64, (bits, how): (u32, &'static str), align: Size) -> Result<u64, Misfit> {
    let limit = 1u64 << bits;
    match limit.checked_sub(size) {
        Some(highest) => Ok(highest - highest % align.0),
        None => Err(Misfit::AddressBits { size: Size(size), bits, limit: Size(limit), how }),
    }
}

fn at_offset(
    offset: u64,
    size: u64,
    (bits, how): (u32, &'static str),
    align: Size,
) -> Result<u64, Misfit> {
    if !offset.is_multiple_of(align.0) {
        return Err(Misfit::OffsetAlign { offset, page: align });
    }
    let (end, limit) = (u128::from(offset) + u128::from(size), 1u64 << bits);
    if end > u128::from(limit) {
        return Err(Misfit::OffsetBits { offset, end, bits, limit, how });
    }
    Ok(offset)
}

/// For tests: the options of a command line, laid out.
#[cfg(test)]
fn try_lay_out(line: &str) -> Result<(Layout, Backing), Misfit> {
    use clap::Parser;

    use crate::options::{EagerSplitOption, OffsetOption, OrHelp, OverlapOption, SlotsOption};

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        memory: MemoryOptions,
        #[command(flatten)]
        overlap: OverlapOption,
        #[command(flatten)]
        slots: SlotsOption,
        #[command(flatten)]
        offset: OffsetOption,
        #[command(flatten)]
        split: EagerSplitOption,
        #[command(flatten)]
        machine: MachineOptions,
    }

    let words = std::iter::once("slat").chain(line.split_whitespace());
    let Line { memory, overlap, slots, offset, split, machine } =
        Line::try_parse_from(words).unwrap();
    let plan = Plan {
        overlap: overlap.overlap,
        slots: slots.slots,
        offset: offset.offset,
        eager_split: split.chosen(),
    };
    let (OrHelp::Value(backing), OrHelp::Value(mode)) = (memory.backing, memory.mode) else {
        panic!("help was asked for");
    };
    Layout::new(&memory, &machine, plan, backing, mode).map(|layout| (layout, backing))
}

/// For tests: the layout of a command line that makes sense.
#[cfg(test)]
pub(crate) fn lay_out(line: &str) -> Layout {
    try_lay_out(line).unwrap().0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_ends_where_guest_physical_space_ends() {
        let layout = lay_out("-v 2 -b 256M");
        assert_eq!((layout.gpa, layout.size), ((1 << 40) - (512 << 20), 512 << 20));
        assert_eq!(lay_out("-b 1G -m P36V48_4K").gpa, (1 << 36) - (1 << 30));
        assert_eq!(lay_out("-b 1G -m 0").gpa, (1 << 52) - (1 << 30));
        assert_eq!(lay_out("-b 1G -m 0 --ipa-bits 44").gpa, (1 << 44) - (1 << 30));
        assert_eq!(lay_out("-b 1G --ipa-bits 44").gpa, (1 << 40) - (1 << 30));
    }

    #[test]
    fn memory_begins_at_a_page_of_its_backing() {
        let layout = lay_out("-b 5M -s anonymous_hugetlb_1gb");
        assert_eq!((layout.gpa, layout.size), ((1 << 40) - (1 << 30), 5 << 20));
        assert_eq!(layout.host_size, 1 << 30);
        assert_eq!(lay_out("-b 5M -s anonymous_thp").gpa, (1 << 40) - (6 << 20));
        assert_eq!(lay_out("-b 32M -s anonymous_thp --granule 16k").gpa, (1 << 40) - (32 << 20));
        assert_eq!(lay_out("-b 12K").gpa, (1 << 40) - (12 << 10));
        assert_eq!(lay_out("-b 1M -p 0x201000").gpa, 0x20_1000);
    }

    #[test]
    fn each_vcpu_has_its_part_and_overlapping_ones_have_all() {
        let layout = lay_out("-v 3 -b 1M -m P40V48_64K");
        assert_eq!((layout.part(0), layout.part(2)), (0..16, 32..48));
        assert_eq!(
            (layout.owner(15), layout.owner(16), layout.owner(47)),
            (Some(0), Some(1), Some(2))
        );
        let layout = lay_out("-v 3 -b 1M -o");
        assert_eq!((layout.part(0), layout.part(2)), (0..768, 0..768));
        assert_eq!(layout.owner(700), None);
    }

    #[test]
    fn slots_divide_memory_into_whole_pages() {
        let layout = lay_out("-v 2 -b 256M -x 4");
        assert_eq!((layout.slot_size(), layout.slot_pages()), (128 << 20, 32768));
        assert_eq!(lay_out("-b 12K -x 3").slot_pages(), 1);
        assert_eq!(
            try_lay_out("-b 12K -x 4").unwrap_err(),
            Misfit::Slots { slots: 4, pages: 3, page: Size(4096) }
        );
        assert!(matches!(try_lay_out("-b 1M -x 3"), Err(Misfit::Slots { .. })));
    }

    #[test]
    fn nonsense_is_named() {
        let refused = |line: &str| try_lay_out(line).unwrap_err();
        assert_eq!(refused("-b 0"), Misfit::NoMemory);
        assert!(matches!(refused("-b 4097"), Misfit::Fraction { what: "guest pages", .. }));
        assert!(matches!(
            refused("-b 4K --granule 64k"),
            Misfit::Fraction { what: "host pages", .. }
        ));
        assert!(matches!(
            refused("-b 4K -m P40V48_64K"),
            Misfit::Fraction { what: "guest pages", .. }
        ));
        assert!(matches!(refused("-v 2 -b 9223372036854775808"), Misfit::Overflow { .. }));
        assert!(matches!(refused("-v 1024 -b 2G"), Misfit::AddressBits { bits: 40, .. }));
        assert!(matches!(refused("-b 16G --ipa-bits 32"), Misfit::AddressBits { bits: 32, .. }));
        assert!(matches!(refused("-b 1G -p 0xfffff00000"), Misfit::OffsetBits { bits: 40, .. }));
        assert!(matches!(refused("-p 0xfffffffffffff000"), Misfit::OffsetBits { .. }));
        assert!(matches!(refused("-p 0x800"), Misfit::OffsetAlign { .. }));
        assert!(matches!(
            refused("-s anonymous_hugetlb_16kb --granule 64k"),
            Misfit::SmallBacking { .. }
        ));
        assert!(matches!(refused("--eager-split 1M"), Misfit::Chunk { .. }));
        assert!(matches!(refused("--eager-split 2M --granule 16k"), Misfit::Chunk { .. }));
        assert!(matches!(refused("--eager-split 1G --ipa-bits 32"), Misfit::Chunk { .. }));
    }

    #[test]
    fn the_largest_leaf_is_what_backing_granule_and_place_allow() {
        let leaf = |line: &str| {
            let (layout, backing) = try_lay_out(line).unwrap();
            layout.leaf_size(backing).to_string()
        };
        assert_eq!(leaf("-s anonymous"), "4K");
        assert_eq!(leaf("-s anonymous_thp"), "2M");
        assert_eq!(leaf("-s anonymous_hugetlb_1gb"), "1G");
        assert_eq!(leaf("-s anonymous_hugetlb_1gb --granule 16k"), "32M");
        assert_eq!(leaf("-s anonymous_hugetlb_64kb"), "4K");
        assert_eq!(leaf("-s anonymous_hugetlb_32mb"), "2M");
        assert_eq!(leaf("-s anonymous_thp -p 0x1000"), "4K");
        assert_eq!(leaf("-s anonymous_hugetlb_1gb -p 0x200000"), "2M");
    }

    #[test]
    fn backings_that_cannot_become_blocks_are_remarked() {
        let remark =
            |line: &str| try_lay_out(line).map(|(layout, backing)| layout.remark(backing)).unwrap();
        assert_eq!(remark("-s anonymous_thp"), None);
        assert_eq!(remark("-s anonymous --granule 16k"), None);
        assert_eq!(remark("-s anonymous_hugetlb_1gb --granule 64k"), None);
        assert!(remark("-s anonymous_hugetlb_64kb").is_some());
        assert!(remark("-s anonymous_hugetlb_2mb --granule 16k").is_some());
        assert!(remark("-s anonymous_thp -p 0x1000").is_some());
    }
}
