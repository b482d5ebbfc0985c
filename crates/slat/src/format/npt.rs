//! AMD nested page tables, bit for bit (AMD APM vol. 2, 5.4 "Page-Translation-Table Entry Fields" and 15.25 "Nested
//! Paging").
//!
//! They are the host's own long-mode tables, walked as user accesses: every entry has the user bit. Hardware always keeps
//! accessed and dirty flags. A page that is mapped can always be read. Bits 55:52 are the embedder's, and bit 56 says that
//! a log asks for the dirty flag; hardware ignores both.
//!
//! ```
//! use slat::format::npt::Npt;
//! use slat::{Attributes, Format, Hpa, Level};
//!
//! let format = Npt::new(48)?;
//! let template = format.template(Attributes::RWX)?;
//! // Present, writable, user, accessed, dirty.
//! assert_eq!(format.leaf(Level::LAST, Hpa(0x8000_0000), template), 0x8000_0067);
//! # Ok::<(), slat::FormatError>(())
//! ```

use crate::format::x86;
use crate::maintenance::x86::Npt as Maintenance;
use crate::{Attributes, Dirty, Execute, Format, FormatError, Geometry, Hpa, Level, Memory};

const PRESENT: u64 = 1 << 0;
const WRITE: u64 = 1 << 1;
const USER: u64 = 1 << 2;
/// PWT and PCD: an index into the host's PAT, whose third bit (7 in a page, 12 in a block) is clear.
const MEMORY: u64 = 0b11 << 3;
/// Index 0, at reset: write-back.
const WRITE_BACK: u64 = 0b00 << 3;
/// Index 2, at reset: uncacheable unless an MTRR says write-combining (UC-).
const NON_CACHEABLE: u64 = 0b10 << 3;
/// Index 3, at reset: uncacheable.
const UNCACHEABLE: u64 = 0b11 << 3;
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
const BLOCK: u64 = 1 << 7;
/// Available to software: somebody asks for the dirty flag.
const TRACKED: u64 = 1 << 56;
const NO_EXECUTE: u64 = 1 << 63;

/// What every leaf has.
const BASE: u64 = PRESENT | USER;

/// Nested page tables.
///
/// One value describes the trees of one kind of VM on one kind of CPU. The host's paging must agree: `EFER.NXE` is set,
/// `CR4.LA57` if the walk has five levels, and entries 0, 2 and 3 of its PAT are those of reset (write-back, UC-,
/// uncacheable). The guest mode execute trap (GMET) is off in the VMCB: it would forbid the guest's kernel to execute what
/// has the user bit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Npt {
    geometry: Geometry,
    output_bits: u32,
    largest: Level,
    tracks_dirty: bool,
}

impl Npt {
    /// Guest-physical addresses of `address_bits` bits: a walk of four tables for 40 to 48, of five for 49 to 52, as the
    /// host's own paging has them. Blocks of 2 MiB and 1 GiB.
    ///
    /// # Errors
    /// [`FormatError::AddressBits`] outside 40 to 52.
    pub const fn new(address_bits: u32) -> Result<Self, FormatError> {
        match x86::geometry(address_bits) {
            Ok(geometry) => Ok(Self {
                geometry,
                output_bits: x86::MAX_BITS,
                largest: x86::GIGABYTE,
                tracks_dirty: false,
            }),
            Err(error) => Err(error),
        }
    }

    /// Output addresses of at most `bits` bits: what CPUID Fn8000_0008_EAX\[7:0\] says. Bits above are reserved. At first
    /// 52.
    ///
    /// # Errors
    /// [`FormatError::AddressBits`] outside 32 to 52.
    pub const fn with_output_bits(mut self, bits: u32) -> Result<Self, FormatError> {
        match x86::output_bits(bits) {
            Ok(bits) => {
                self.output_bits = bits;
                Ok(self)
            }
            Err(error) => Err(error),
        }
    }

    /// Blocks of 1 GiB (CPUID Fn8000_0001_EDX\[26\]). On at first.
    pub const fn with_gigabyte_blocks(mut self, on: bool) -> Self {
        self.largest = if on { x86::GIGABYTE } else { x86::MEGABYTES };
        self
    }

    /// A log may ask for the dirty flags that the CPU sets: [`Dirty::Clean`] and [`Dirty::Dirty`]. Off at first.
    pub const fn with_hardware_dirty(mut self, on: bool) -> Self {
        self.tracks_dirty = on;
        self
    }
}

// SAFETY: `table` sets PRESENT and not BLOCK, and no leaf above the last level lacks BLOCK; `next` masks out the address
// that `table` put in; the geometry is that of `x86::geometry`, for the same constants; `freeze` and `thaw` are those of the
// trait.
#[expect(unsafe_code, reason = "promises what `Format` asks")]
unsafe impl Format for Npt {
    const PAGE_SHIFT: u32 = x86::PAGE_SHIFT;
    const WRITE: u64 = WRITE | DIRTY | TRACKED;
    const DIRTY: u64 = DIRTY;
    const ACCESSED: u64 = ACCESSED;
    const SOFTWARE_SHIFT: u32 = x86::SOFTWARE_SHIFT;
    type Maintenance = Maintenance;

    #[inline(always)]
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    #[inline(always)]
    fn is_valid(entry: u64) -> bool {
        entry & PRESENT != 0
    }

    #[inline(always)]
    fn is_table(entry: u64, level: Level) -> bool {
        entry & (PRESENT | BLOCK) == PRESENT && level != Level::LAST
    }

    #[inline(always)]
    fn leaf_allowed(&self, level: Level) -> bool {
        level >= self.largest
    }

    fn template(&self, attributes: Attributes) -> Result<u64, FormatError> {
        let Attributes { read, write, execute, memory, accessed, dirty, software } = attributes;
        if !read {
            return Err(FormatError::Unreadable);
        }
        let cached = match memory {
            Memory::Normal => WRITE_BACK,
            Memory::NonCacheable => NON_CACHEABLE,
            Memory::Device => UNCACHEABLE,
        };
        let never = match execute {
            Execute::No => NO_EXECUTE,
            _ if memory != Memory::Normal => return Err(FormatError::ExecutableDevice),
            Execute::Yes => 0,
            _ => return Err(FormatError::ExecuteNeedsXnx),
        };
        let written = match dirty {
            // The flag is set beforehand, so that no walk has to.
            Dirty::Untracked if write => WRITE | DIRTY,
            Dirty::Untracked => 0,
            _ if !write || !self.tracks_dirty => return Err(FormatError::DirtyState),
            Dirty::Clean => WRITE | TRACKED,
            Dirty::Dirty => WRITE | TRACKED | DIRTY,
        };
        if software > 15 {
            return Err(FormatError::Software(software));
        }
        Ok(BASE
            | cached
            | written
            | if accessed { ACCESSED } else { 0 }
            | never
            | u64::from(software) << x86::SOFTWARE_SHIFT)
    }

    #[inline(always)]
    fn leaf(&self, level: Level, output: Hpa, template: u64) -> u64 {
        debug_assert!(self.leaf_allowed(level));
        debug_assert!(output.0.is_multiple_of(self.geometry.size(level)));
        debug_assert!(output.0 >> self.output_bits == 0);
        template | output.0 & x86::ADDRESS | if level == Level::LAST { 0 } else { BLOCK }
    }

    /// Everything is permitted, and the access flag is set so that no walk has to.
    #[inline(always)]
    fn table(&self, table: Hpa) -> u64 {
        debug_assert!(table.0 & !x86::ADDRESS == 0);
        table.0 | PRESENT | WRITE | USER | ACCESSED
    }

    #[inline(always)]
    fn next(&self, entry: u64) -> Hpa {
        Hpa(entry & x86::ADDRESS)
    }

    #[inline(always)]
    fn output(&self, entry: u64, _level: Level) -> Hpa {
        Hpa(entry & x86::ADDRESS)
    }

    #[inline(always)]
    fn template_of(&self, entry: u64, _level: Level) -> u64 {
        entry & !(x86::ADDRESS | BLOCK)
    }

    #[inline(always)]
    fn fits(&self, template: u64) -> bool {
        let known = BASE
            | WRITE
            | MEMORY
            | ACCESSED
            | DIRTY
            | if self.tracks_dirty { TRACKED } else { 0 }
            | 0b1111 << x86::SOFTWARE_SHIFT
            | NO_EXECUTE;
        // Index 1 is write-through at reset, which nobody asks for.
        template & !known == 0 && template & BASE == BASE && template & MEMORY != 0b01 << 3
    }

    fn attributes(&self, template: u64) -> Attributes {
        Attributes {
            read: true,
            write: template & WRITE != 0,
            execute: if template & NO_EXECUTE == 0 { Execute::Yes } else { Execute::No },
            memory: match template & MEMORY {
                UNCACHEABLE => Memory::Device,
                NON_CACHEABLE => Memory::NonCacheable,
                _ => Memory::Normal,
            },
            accessed: template & ACCESSED != 0,
            dirty: x86::dirty(template, TRACKED, DIRTY),
            software: (template >> x86::SOFTWARE_SHIFT & 0b1111) as u8,
        }
    }

    #[inline(always)]
    fn output_bits(&self) -> u32 {
        self.output_bits
    }

    #[inline(always)]
    fn is_writable(entry: u64) -> bool {
        entry & WRITE != 0
    }

    #[inline(always)]
    fn sets_accessed(&self) -> bool {
        true
    }

    #[inline(always)]
    fn tracks_dirty(&self) -> bool {
        self.tracks_dirty
    }

    #[inline(always)]
    fn is_dirty(entry: u64) -> bool {
        entry & (TRACKED | DIRTY) == TRACKED | DIRTY
    }

    #[inline(always)]
    fn tracks_dirty_of(entry: u64) -> bool {
        entry & TRACKED != 0
    }

    #[inline(always)]
    fn clean(entry: u64) -> u64 {
        if Self::tracks_dirty_of(entry) { entry & !DIRTY } else { entry }
    }

    #[inline(always)]
    fn relaxed(old: u64, template: u64) -> u64 {
        let written = if old & WRITE == 0 { WRITE | DIRTY | TRACKED } else { 0 };
        let never = if old & MEMORY == WRITE_BACK { NO_EXECUTE & !template } else { 0 };
        old & !never | template & (ACCESSED | written)
    }

    #[inline(always)]
    fn intersect(a: u64, b: u64) -> u64 {
        let written = if b & WRITE == 0 { WRITE | DIRTY | TRACKED } else { 0 };
        a & !written | b & NO_EXECUTE
    }

    #[inline(always)]
    fn absorb(a: u64, b: u64) -> u64 {
        a | b & (ACCESSED | if Self::tracks_dirty_of(a) { DIRTY } else { 0 })
    }

    #[inline(always)]
    fn essence(leaf: u64) -> u64 {
        leaf & !(ACCESSED | DIRTY | BLOCK | x86::ADDRESS)
    }
}
