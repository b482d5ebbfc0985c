//! Arm VMSAv8-64 stage 2, bit for bit (Arm ARM DDI 0487, D8.2 "Translation process" and D8.3 "Translation table
//! descriptor formats").
//!
//! [`Stage2`] is the format with one of three [granules](Granule). Whatever a descriptor depends on is decided when the
//! format is built and kept as masks, so that making an entry and taking it apart has no branch.
//!
//! ```
//! use slat::format::arm::{K4, Stage2};
//! use slat::{Attributes, Format, Hpa, Level};
//!
//! let format = Stage2::<K4>::new(40)?.with_xnx(true);
//! let template = format.template(Attributes::RWX)?;
//! let entry = format.leaf(Level::LAST, Hpa(0x8000_0000), template);
//! assert_eq!(entry, 0x8000_07ff);
//! assert_eq!(format.vtcr(), 0x800d_3558);
//! # Ok::<(), slat::FormatError>(())
//! ```

use core::marker::PhantomData;

use crate::{Attributes, Dirty, Execute, Format, FormatError, Geometry, Hpa, Level, Memory};

mod descriptor;
mod granule;
mod start;
mod vtcr;

pub use granule::{Granule, K4, K16, K64};

use descriptor::{
    ACCESSED, DBM, DEVICE, FORCED_WRITE_BACK, INNER_SHAREABLE, MEMORY, NON_CACHEABLE, READ,
    S2AP_WRITE, SOFTWARE_SHIFT, TABLE_OR_PAGE, TABLE_OR_PAGE_SHIFT, VALID, WRITE_BACK, XN0, XN1,
};

const MIN_ADDRESS_BITS: u32 = 32;
/// Address width without FEAT_LPA and FEAT_LPA2.
const NARROW: u32 = 48;
/// Address width with them.
const WIDE: u32 = 52;

/// Stage 2 with granule `G`.
///
/// One value describes the trees of one kind of VM on one kind of CPU. The CPU must be told the same:
/// [`vtcr`](Self::vtcr) is what goes to `VTCR_EL2`; FEAT_S2FWB is told in `HCR_EL2.FWB`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stage2<G> {
    geometry: Geometry,
    /// Entry bits that hold the same bits of an output address.
    in_place: u64,
    /// Entry bits that hold output address bits from further up; none in a narrow format.
    high: u64,
    /// What every template has.
    base: u64,
    /// MemAttr of ordinary memory.
    normal: u64,
    output_bits: u32,
    wide: bool,
    xnx: bool,
    hardware_access: bool,
    hardware_dirty: bool,
    granule: PhantomData<G>,
}

impl<G: Granule> Stage2<G> {
    /// Guest-physical addresses of `address_bits` bits, 32 to 48, and output addresses of 48 bits, with no optional
    /// feature.
    ///
    /// The root starts at the lowest level that resolves the addresses with up to 16 concatenated tables (D8.2.2), but
    /// not below level 2: the choice that costs a walk the fewest steps.
    ///
    /// # Errors
    /// [`FormatError::AddressBits`] outside 32 to 48.
    pub const fn new(address_bits: u32) -> Result<Self, FormatError> {
        Self::build(address_bits, false)
    }

    /// Guest-physical addresses of `address_bits` bits, 32 to 52, and output addresses of 52 bits; otherwise as
    /// [`new`](Self::new).
    ///
    /// Needs FEAT_LPA2 with granules of 4 KiB and 16 KiB: `VTCR_EL2.DS` is set and shareability is for the whole tree,
    /// not for each entry. Needs FEAT_LPA with 64 KiB (D8.1.7).
    ///
    /// # Errors
    /// [`FormatError::AddressBits`] outside 32 to 52.
    pub const fn wide(address_bits: u32) -> Result<Self, FormatError> {
        Self::build(address_bits, true)
    }

    const fn build(address_bits: u32, wide: bool) -> Result<Self, FormatError> {
        let output_bits = if wide { WIDE } else { NARROW };
        if address_bits < MIN_ADDRESS_BITS || address_bits > output_bits {
            return Err(FormatError::AddressBits {
                bits: address_bits,
                min: MIN_ADDRESS_BITS,
                max: output_bits,
            });
        }
        let geometry = match Self::lowest_start(address_bits) {
            Ok(geometry) => geometry,
            Err(error) => return Err(error),
        };
        let in_place_end = if wide { G::IN_PLACE_END } else { NARROW };
        Ok(Self {
            geometry,
            in_place: (1 << in_place_end) - (1 << G::SHIFT),
            high: if wide { G::HIGH } else { 0 },
            base: if wide && G::LPA2 { VALID } else { VALID | INNER_SHAREABLE },
            normal: WRITE_BACK,
            output_bits,
            wide,
            xnx: false,
            hardware_access: false,
            hardware_dirty: false,
            granule: PhantomData,
        })
    }

    /// FEAT_S2FWB, with `HCR_EL2.FWB` set: ordinary memory is write-back whatever the guest's stage 1 says, so that no
    /// cache maintenance is due when it is mapped (D8.6.6). Off at first.
    pub const fn with_fwb(mut self, on: bool) -> Self {
        self.normal = if on { FORCED_WRITE_BACK } else { WRITE_BACK };
        self
    }

    /// FEAT_XNX: [`Execute::Kernel`] and [`Execute::User`] (Table D8-78). Off at first.
    pub const fn with_xnx(mut self, on: bool) -> Self {
        self.xnx = on;
        self
    }

    /// FEAT_HAFDBS: hardware sets the access flag (D8.5.1.2). Off at first; turning it off turns off
    /// [`with_hardware_dirty`](Self::with_hardware_dirty) too.
    pub const fn with_hardware_access(mut self, on: bool) -> Self {
        self.hardware_access = on;
        self.hardware_dirty = self.hardware_dirty && on;
        self
    }

    /// FEAT_HAFDBS: hardware sets dirty state in the entries whose templates ask for it (D8.5.2.1). Off at first;
    /// turning it on turns on [`with_hardware_access`](Self::with_hardware_access) too.
    pub const fn with_hardware_dirty(mut self, on: bool) -> Self {
        self.hardware_dirty = on;
        self.hardware_access = self.hardware_access || on;
        self
    }

    #[inline(always)]
    const fn encode(&self, address: Hpa) -> u64 {
        (address.0 & self.in_place) | (address.0 >> G::HIGH_DOWN & self.high)
    }

    #[inline(always)]
    const fn decode(&self, entry: u64) -> Hpa {
        Hpa((entry & self.in_place) | (entry & self.high) << G::HIGH_DOWN)
    }
}

// SAFETY: bits 1:0 are 0b11 in table entries and, above the last level, in no leaf; `next` masks out the address bits that
// `table` put in; the constants are the granule's, and so is the geometry that `build` computed.
#[expect(unsafe_code, reason = "promises what `Format` asks")]
unsafe impl<G: Granule> Format for Stage2<G> {
    const PAGE_SHIFT: u32 = G::SHIFT;
    const WRITE: u64 = S2AP_WRITE | DBM;
    const DIRTY: u64 = S2AP_WRITE;
    const ACCESSED: u64 = ACCESSED;
    const SOFTWARE_SHIFT: u32 = SOFTWARE_SHIFT;
    type Maintenance = crate::maintenance::arm::Arm;

    #[inline(always)]
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    #[inline(always)]
    fn is_valid(entry: u64) -> bool {
        entry & VALID != 0
    }

    #[inline(always)]
    fn is_table(entry: u64, level: Level) -> bool {
        entry & (VALID | TABLE_OR_PAGE) == VALID | TABLE_OR_PAGE && level != Level::LAST
    }

    #[inline(always)]
    fn leaf_allowed(&self, level: Level) -> bool {
        level.number() >= G::BLOCK_LEVEL
    }

    fn template(&self, attributes: Attributes) -> Result<u64, FormatError> {
        let Attributes { read, write, execute, memory, accessed, dirty, software } = attributes;
        let cached = match memory {
            Memory::Normal => self.normal,
            Memory::NonCacheable => NON_CACHEABLE,
            Memory::Device => DEVICE,
        };
        let never = match execute {
            Execute::No => XN1,
            _ if memory != Memory::Normal => return Err(FormatError::ExecutableDevice),
            Execute::Yes => 0,
            _ if !self.xnx => return Err(FormatError::ExecuteNeedsXnx),
            Execute::Kernel => XN1 | XN0,
            Execute::User => XN0,
        };
        let written = match dirty {
            Dirty::Untracked if write => S2AP_WRITE,
            Dirty::Untracked => 0,
            _ if !write || !self.hardware_dirty => return Err(FormatError::DirtyState),
            Dirty::Clean => DBM,
            Dirty::Dirty => DBM | S2AP_WRITE,
        };
        if software > 15 {
            return Err(FormatError::Software(software));
        }
        Ok(self.base
            | cached
            | if read { READ } else { 0 }
            | written
            | if accessed { ACCESSED } else { 0 }
            | never
            | u64::from(software) << SOFTWARE_SHIFT)
    }

    #[inline(always)]
    fn leaf(&self, level: Level, output: Hpa, template: u64) -> u64 {
        debug_assert!(self.leaf_allowed(level));
        debug_assert!(output.0.is_multiple_of(self.geometry.size(level)));
        debug_assert!(output.0 >> self.output_bits == 0);
        template | self.encode(output) | u64::from(level == Level::LAST) << TABLE_OR_PAGE_SHIFT
    }

    #[inline(always)]
    fn table(&self, table: Hpa) -> u64 {
        debug_assert!(table.0.is_multiple_of(self.geometry.page_size()));
        debug_assert!(table.0 >> NARROW == 0);
        table.0 | VALID | TABLE_OR_PAGE
    }

    #[inline(always)]
    fn next(&self, entry: u64) -> Hpa {
        Hpa(entry & (((1 << NARROW) - 1) & !((1 << G::SHIFT) - 1)))
    }

    #[inline(always)]
    fn output(&self, entry: u64, _level: Level) -> Hpa {
        self.decode(entry)
    }

    #[inline(always)]
    fn template_of(&self, entry: u64, _level: Level) -> u64 {
        entry & !(self.in_place | self.high | TABLE_OR_PAGE)
    }

    #[inline(always)]
    fn fits(&self, template: u64) -> bool {
        let cached = template & MEMORY;
        let foreign = self.in_place
            | self.high
            | TABLE_OR_PAGE
            | if self.hardware_dirty { 0 } else { DBM }
            | if self.xnx { 0 } else { XN0 };
        template & foreign == 0
            && template & self.base == self.base
            && (cached == self.normal || cached == NON_CACHEABLE || cached == DEVICE)
    }

    fn attributes(&self, template: u64) -> Attributes {
        Attributes {
            read: template & READ != 0,
            write: Self::is_writable(template),
            execute: match descriptor::never(template) {
                (0, 0) => Execute::Yes,
                (0, _) => Execute::Kernel,
                (_, 0) => Execute::User,
                _ => Execute::No,
            },
            memory: match template & MEMORY {
                DEVICE => Memory::Device,
                NON_CACHEABLE => Memory::NonCacheable,
                _ => Memory::Normal,
            },
            accessed: template & ACCESSED != 0,
            dirty: match (template & DBM != 0, template & S2AP_WRITE != 0) {
                (false, _) => Dirty::Untracked,
                (true, false) => Dirty::Clean,
                (true, true) => Dirty::Dirty,
            },
            software: (template >> SOFTWARE_SHIFT & 0b1111) as u8,
        }
    }

    #[inline(always)]
    fn output_bits(&self) -> u32 {
        self.output_bits
    }

    #[inline(always)]
    fn sets_accessed(&self) -> bool {
        self.hardware_access
    }

    #[inline(always)]
    fn tracks_dirty(&self) -> bool {
        self.hardware_dirty
    }

    #[inline(always)]
    fn is_dirty(entry: u64) -> bool {
        entry & Self::WRITE == Self::WRITE
    }

    #[inline(always)]
    fn tracks_dirty_of(entry: u64) -> bool {
        entry & DBM != 0
    }

    #[inline(always)]
    fn clean(entry: u64) -> u64 {
        entry & !descriptor::tracked(entry)
    }

    #[inline(always)]
    fn relaxed(old: u64, template: u64) -> u64 {
        let write = descriptor::write_bits(descriptor::writable(old) ^ S2AP_WRITE);
        let added = template & (READ | ACCESSED | write);
        let (old1, old0) = descriptor::never(old);
        let (new1, new0) = descriptor::never(template);
        let never = descriptor::never_executable(old);
        let (never1, never0) = (old1 & (new1 | never), old0 & (new0 | never));
        (old & !(XN0 | XN1)) | added | descriptor::execute_never(never1, never0)
    }

    #[inline(always)]
    fn intersect(a: u64, b: u64) -> u64 {
        let lost = (READ & !b) | (Self::WRITE & !descriptor::write_bits(descriptor::writable(b)));
        let (a1, a0) = descriptor::never(a);
        let (b1, b0) = descriptor::never(b);
        (a & !(lost | XN0 | XN1)) | descriptor::execute_never(a1 | b1, a0 | b0)
    }

    #[inline(always)]
    fn absorb(a: u64, b: u64) -> u64 {
        a | (b & ACCESSED) | (descriptor::tracked(a) & b)
    }

    #[inline(always)]
    fn essence(leaf: u64) -> u64 {
        Self::clean(leaf) & !(ACCESSED | TABLE_OR_PAGE | G::ADDRESS)
    }
}
