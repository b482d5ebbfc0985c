//! Intel EPT, bit for bit (Intel SDM vol. 3C, 29.3 "The Extended Page Table Mechanism", tables 29-1 to 29-7).
//!
//! # Where an entry keeps what
//! Hardware takes an entry as present if it permits anything: reading (bit 0), writing (1) or executing (2; with
//! mode-based execute control also 10). A page that may only be executed has bit 0 clear, so the engine's own mark of a
//! valid entry is bit 11, which hardware ignores; so it does the software bits 55:52, and bit 56, which says that a log
//! asks for the dirty flag. An entry that must not be present moves its permissions aside, to bits 59:57 and 4, where
//! hardware sees nothing (bit 4 says nothing that bit 5 does not, for the memory types that are used). LOCKED entries do
//! so; and without accessed flags in hardware, entries whose access flag is clear, so that the next access faults. An entry
//! that is present has 59:57 clear, which asks for neither guest-paging verification (57) nor paging-write access (58),
//! where a VMCS turns those controls on; in one that permits nothing they are ignored (SDM vol. 3C, 29.3.2).
//!
//! ```
//! use slat::format::ept::Ept;
//! use slat::{Attributes, Format, Hpa, Level};
//!
//! let format = <Ept>::new(48)?;
//! let template = format.template(Attributes::RWX)?;
//! // Readable, writable, executable, write-back whatever the guest's PAT says, accessed and dirty; bit 11 is the engine's.
//! assert_eq!(format.leaf(Level::LAST, Hpa(0x8000_0000), template), 0x8000_0b77);
//! # Ok::<(), slat::FormatError>(())
//! ```

use core::fmt;
use core::marker::PhantomData;

use crate::entry::LOCK_BIT;
use crate::format::x86;
use crate::maintenance::x86::Ept as Maintenance;
use crate::{Attributes, Dirty, Execute, Format, FormatError, Geometry, Hpa, Level, Memory, Owner};

const READ: u64 = 1 << 0;
const WRITE: u64 = 1 << 1;
/// With mode-based execute control: for supervisor-mode linear addresses.
const EXECUTE: u64 = 1 << 2;
/// With mode-based execute control: for user-mode linear addresses; otherwise ignored.
const EXECUTE_USER: u64 = 1 << 10;
const ACCESS: u64 = READ | WRITE | EXECUTE;

/// Memory type, bits 5:3 (table 29-6).
const MEMORY: u64 = 0b111 << 3;
const UNCACHEABLE: u64 = 0 << 3;
const WRITE_COMBINING: u64 = 1 << 3;
const WRITE_BACK: u64 = 6 << 3;
/// The lower of the two bits of the memory type that are always equal here.
const SPARE: u64 = 1 << 4;
/// The memory type above is all that counts, whatever the guest's PAT says.
const IGNORE_PAT: u64 = 1 << 6;
const BLOCK: u64 = 1 << 7;
const ACCESSED: u64 = 1 << 8;
const DIRTY: u64 = 1 << 9;
/// Ignored by hardware: the entry is one of the engine's valid ones.
const VALID: u64 = 1 << 11;
/// Ignored by hardware: somebody asks for the dirty flag.
const TRACKED: u64 = 1 << 56;
const SUPPRESS_VE: u64 = 1 << 63;
/// What invalid entries are tagged with, [`LOCK_BIT`] among them; in hardware supervisor shadow stacks (60) and sub-page
/// permissions (61).
const TAGS: u64 = 0b111 << 60;

/// From bits 2:0 to where they are kept aside.
const ASIDE: u32 = 57;
const ASIDE_WRITE: u64 = WRITE << ASIDE;
/// From bit 10 to bit 4.
const ASIDE_USER: u32 = 6;

/// Who keeps accessed and dirty flags: [`InHardware`] or [`InSoftware`].
pub trait Flags: Copy + PartialEq + Send + Sync + fmt::Debug + 'static {
    /// Bit 6 of the EPTP is set.
    const IN_HARDWARE: bool;
}

/// The CPU sets them (`IA32_VMX_EPT_VPID_CAP\[21\]`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct InHardware;

impl Flags for InHardware {
    const IN_HARDWARE: bool = true;
}

/// The CPU does not: an entry whose access flag is clear lets nothing through, and the fault sets it. There is no dirty
/// flag.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct InSoftware;

impl Flags for InSoftware {
    const IN_HARDWARE: bool = false;
}

/// Where EPT violations go when the guest has virtualization exceptions: [`Convertible`] or [`Suppressed`].
pub trait Violations: Copy + PartialEq + Send + Sync + fmt::Debug + 'static {
    /// Bit 63 of every entry, of empty ones too.
    const SUPPRESS_VE: bool;
}

/// To the guest, as #VE, if the "EPT-violation #VE" control is set; otherwise to the hypervisor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Convertible;

impl Violations for Convertible {
    const SUPPRESS_VE: bool = false;
}

/// To the hypervisor, whatever the control says: every entry suppresses #VE.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Suppressed;

impl Violations for Suppressed {
    const SUPPRESS_VE: bool = true;
}

/// EPT, with flags kept by `A` and violations that go where `V` says.
///
/// One value describes the trees of one kind of VM on one kind of CPU. The CPU must be told the same:
/// [`Tree::root_register`](crate::Tree::root_register) is the EPTP, whatever identifier the tree was made with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ept<A = InHardware, V = Convertible> {
    geometry: Geometry,
    output_bits: u32,
    largest: Level,
    mode_based: bool,
    execute_only: bool,
    tracks_dirty: bool,
    kinds: PhantomData<(A, V)>,
}

impl<A: Flags, V: Violations> Ept<A, V> {
    /// Guest-physical addresses of `address_bits` bits: a walk of four tables for 40 to 48, of five for 49 to 52. Blocks
    /// of 2 MiB and 1 GiB, pages that are only executed, and no other optional feature.
    ///
    /// # Errors
    /// [`FormatError::AddressBits`] outside 40 to 52.
    pub const fn new(address_bits: u32) -> Result<Self, FormatError> {
        match x86::geometry(address_bits) {
            Ok(geometry) => Ok(Self {
                geometry,
                output_bits: x86::MAX_BITS,
                largest: x86::GIGABYTE,
                mode_based: false,
                execute_only: true,
                tracks_dirty: false,
                kinds: PhantomData,
            }),
            Err(error) => Err(error),
        }
    }

    /// Output addresses of at most `bits` bits: what CPUID.80000008H:EAX\[7:0\] says. Bits above are reserved, and a CPU
    /// that finds one set takes the entry as misconfigured. At first 52.
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

    /// Blocks of 1 GiB (`IA32_VMX_EPT_VPID_CAP\[17\]`). On at first.
    pub const fn with_gigabyte_blocks(mut self, on: bool) -> Self {
        self.largest = if on { x86::GIGABYTE } else { x86::MEGABYTES };
        self
    }

    /// Pages that may be executed and not read (`IA32_VMX_EPT_VPID_CAP\[0\]`). On at first.
    pub const fn with_execute_only(mut self, on: bool) -> Self {
        self.execute_only = on;
        self
    }

    /// The "mode-based execute control for EPT": [`Execute::Kernel`] and [`Execute::User`]. Off at first.
    pub const fn with_mode_based_execute(mut self, on: bool) -> Self {
        self.mode_based = on;
        self
    }

    /// Whether it has been turned on: the VMCS has to say the same.
    pub const fn has_mode_based_execute(&self) -> bool {
        self.mode_based
    }

    /// Bits 11:0 of the EPTP: tables in write-back memory, the length of a walk, accessed and dirty flags (table 25-9).
    const fn eptp(&self) -> u16 {
        let levels = if self.geometry.start().number() < 0 {
            Maintenance::FIVE_LEVELS
        } else {
            Maintenance::FOUR_LEVELS
        };
        let flags = if A::IN_HARDWARE { Maintenance::ACCESSED_DIRTY } else { 0 };
        Maintenance::WRITE_BACK | levels | flags
    }

    /// What every leaf has.
    const BASE: u64 = VALID | IGNORE_PAT | Self::ABSENT_BITS;
    const ABSENT_BITS: u64 = if V::SUPPRESS_VE { SUPPRESS_VE } else { 0 };

    /// Whether a valid entry keeps its permissions aside: it must not be present before it is used again.
    #[inline(always)]
    const fn is_aside(entry: u64) -> bool {
        !A::IN_HARDWARE && entry & ACCESSED == 0
    }

    /// A valid entry with its permissions where hardware looks for them.
    #[inline(always)]
    const fn present(entry: u64) -> u64 {
        if Self::is_aside(entry) { back(entry) } else { entry }
    }

    /// The opposite: where the entry's access flag says that they belong.
    #[inline(always)]
    const fn placed(entry: u64) -> u64 {
        if Self::is_aside(entry) { aside(entry) } else { entry }
    }
}

impl Ept<InHardware, Convertible> {
    /// A log may ask for the dirty flags that the CPU sets: [`Dirty::Clean`] and [`Dirty::Dirty`]. Off at first.
    pub const fn with_hardware_dirty(self, on: bool) -> Self {
        Self { tracks_dirty: on, ..self }
    }
}

impl Ept<InHardware, Suppressed> {
    /// A log may ask for the dirty flags that the CPU sets: [`Dirty::Clean`] and [`Dirty::Dirty`]. Off at first.
    pub const fn with_hardware_dirty(self, on: bool) -> Self {
        Self { tracks_dirty: on, ..self }
    }
}

/// An entry, valid or not, that permits nothing as far as hardware can see.
#[inline(always)]
const fn aside(entry: u64) -> u64 {
    let rest = entry & !(ACCESS | EXECUTE_USER | SPARE);
    rest | (entry & ACCESS) << ASIDE | (entry & EXECUTE_USER) >> ASIDE_USER
}

/// What [`aside`] was given.
#[inline(always)]
const fn back(entry: u64) -> u64 {
    let rest = entry & !(ACCESS << ASIDE | SPARE);
    rest | entry >> ASIDE & ACCESS | (entry & SPARE) << ASIDE_USER | entry >> 1 & SPARE
}

// SAFETY: `table` sets VALID and not BLOCK, and no leaf above the last level lacks BLOCK; `next` masks out the address that
// `table` put in; the geometry is that of `x86::geometry`, for the same constants. `freeze` of a valid entry moves its
// permissions aside, unless they are there already, and `thaw` moves them back under the same condition, which the access
// flag tells and neither changes.
#[expect(unsafe_code, reason = "promises what `Format` asks")]
unsafe impl<A: Flags, V: Violations> Format for Ept<A, V> {
    const PAGE_SHIFT: u32 = x86::PAGE_SHIFT;
    const WRITE: u64 = WRITE | DIRTY | TRACKED | if A::IN_HARDWARE { 0 } else { ASIDE_WRITE };
    const DIRTY: u64 = DIRTY;
    const VALID: u64 = VALID;
    const ABSENT: u64 = Self::ABSENT_BITS;
    const ACCESSED: u64 = ACCESSED;
    const SOFTWARE_SHIFT: u32 = x86::SOFTWARE_SHIFT;
    type Maintenance = Maintenance;

    #[inline(always)]
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// The EPTP is the same for every tree, but for the root's address.
    #[inline(always)]
    fn identifier(&self, _: u16) -> u16 {
        self.eptp()
    }

    #[inline(always)]
    fn is_valid(entry: u64) -> bool {
        entry & VALID != 0
    }

    #[inline(always)]
    fn is_table(entry: u64, level: Level) -> bool {
        entry & (VALID | BLOCK) == VALID && level != Level::LAST
    }

    #[inline(always)]
    fn leaf_allowed(&self, level: Level) -> bool {
        level >= self.largest
    }

    fn template(&self, attributes: Attributes) -> Result<u64, FormatError> {
        let Attributes { read, write, execute, memory, accessed, dirty, software } = attributes;
        let cached = match memory {
            Memory::Normal => WRITE_BACK,
            Memory::NonCacheable => WRITE_COMBINING,
            Memory::Device => UNCACHEABLE,
        };
        let executable = match execute {
            Execute::No => 0,
            _ if memory != Memory::Normal => return Err(FormatError::ExecutableDevice),
            Execute::Yes if self.mode_based => EXECUTE | EXECUTE_USER,
            Execute::Yes => EXECUTE,
            _ if !self.mode_based => return Err(FormatError::ExecuteNeedsXnx),
            Execute::Kernel => EXECUTE,
            Execute::User => EXECUTE_USER,
        };
        // Either is a misconfiguration (29.3.3.1).
        if !read && (write || executable != 0 && !self.execute_only) {
            return Err(FormatError::Unreadable);
        }
        let written = match dirty {
            // The flag is set beforehand, so that no walk has to.
            Dirty::Untracked if write && A::IN_HARDWARE => WRITE | DIRTY,
            Dirty::Untracked if write => WRITE,
            Dirty::Untracked => 0,
            _ if !write || !self.tracks_dirty => return Err(FormatError::DirtyState),
            Dirty::Clean => WRITE | TRACKED,
            Dirty::Dirty => WRITE | TRACKED | DIRTY,
        };
        if software > 15 {
            return Err(FormatError::Software(software));
        }
        Ok(Self::placed(
            Self::BASE
                | cached
                | if read { READ } else { 0 }
                | written
                | executable
                | if accessed { ACCESSED } else { 0 }
                | u64::from(software) << x86::SOFTWARE_SHIFT,
        ))
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
        let user = if self.mode_based { EXECUTE_USER } else { 0 };
        table.0 | ACCESS | user | ACCESSED | VALID | Self::ABSENT_BITS
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
        let template = Self::present(template);
        let memory = template & MEMORY;
        let foreign = x86::ADDRESS
            | BLOCK
            | TAGS
            | ACCESS << ASIDE
            | if self.mode_based { 0 } else { EXECUTE_USER }
            | if self.tracks_dirty { 0 } else { TRACKED }
            | if A::IN_HARDWARE { 0 } else { DIRTY }
            | !Self::BASE & SUPPRESS_VE;
        let executed = template & (EXECUTE | EXECUTE_USER) != 0;
        template & foreign == 0
            && template & Self::BASE == Self::BASE
            && (memory == WRITE_BACK || memory == UNCACHEABLE || memory == WRITE_COMBINING)
            && (self.execute_only || !executed || template & READ != 0)
    }

    fn attributes(&self, template: u64) -> Attributes {
        let template = Self::present(template);
        let (kernel, user) = (template & EXECUTE != 0, template & EXECUTE_USER != 0);
        Attributes {
            read: template & READ != 0,
            write: template & WRITE != 0,
            execute: match (kernel, user || !self.mode_based) {
                (true, true) => Execute::Yes,
                (true, false) => Execute::Kernel,
                (false, true) if self.mode_based => Execute::User,
                _ => Execute::No,
            },
            memory: match template & MEMORY {
                UNCACHEABLE => Memory::Device,
                WRITE_COMBINING => Memory::NonCacheable,
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
        Self::present(entry) & WRITE != 0
    }

    #[inline(always)]
    fn sets_accessed(&self) -> bool {
        A::IN_HARDWARE
    }

    #[inline(always)]
    fn tracks_dirty(&self) -> bool {
        self.tracks_dirty
    }

    #[inline(always)]
    fn is_dirty(entry: u64) -> bool {
        A::IN_HARDWARE && entry & (TRACKED | DIRTY) == TRACKED | DIRTY
    }

    #[inline(always)]
    fn tracks_dirty_of(entry: u64) -> bool {
        A::IN_HARDWARE && entry & TRACKED != 0
    }

    #[inline(always)]
    fn clean(entry: u64) -> u64 {
        if Self::tracks_dirty_of(entry) { entry & !DIRTY } else { entry }
    }

    #[inline(always)]
    fn old(leaf: u64) -> u64 {
        if A::IN_HARDWARE {
            leaf & !ACCESSED
        } else {
            Self::placed(Self::present(leaf) & !ACCESSED)
        }
    }

    #[inline(always)]
    fn young(leaf: u64) -> u64 {
        Self::present(leaf) | ACCESSED
    }

    #[inline(always)]
    fn relaxed(old: u64, template: u64) -> u64 {
        let (old, template) = (Self::present(old), Self::present(template));
        let written = if old & WRITE == 0 { WRITE | DIRTY | TRACKED } else { 0 };
        let executed = if old & MEMORY == WRITE_BACK { EXECUTE | EXECUTE_USER } else { 0 };
        Self::placed(old | template & (READ | ACCESSED | executed | written))
    }

    #[inline(always)]
    fn intersect(a: u64, b: u64) -> u64 {
        let (a, b) = (Self::present(a), Self::present(b));
        let written = if b & WRITE == 0 { WRITE | DIRTY | TRACKED } else { 0 };
        Self::placed(a & !((READ | EXECUTE | EXECUTE_USER) & !b | written))
    }

    #[inline(always)]
    fn absorb(a: u64, b: u64) -> u64 {
        let tracked = if Self::tracks_dirty_of(a) { DIRTY } else { 0 };
        Self::placed(Self::present(a) | b & (ACCESSED | tracked))
    }

    #[inline(always)]
    fn essence(leaf: u64) -> u64 {
        Self::present(leaf) & !(ACCESSED | DIRTY | BLOCK | x86::ADDRESS)
    }

    #[inline(always)]
    fn freeze(entry: u64) -> u64 {
        let entry =
            if Self::is_valid(entry) && !Self::is_aside(entry) { aside(entry) } else { entry };
        entry & !VALID | LOCK_BIT
    }

    #[inline(always)]
    fn thaw(locked: u64) -> u64 {
        let entry = locked & !LOCK_BIT;
        if entry == Self::EMPTY || Owner::of(entry).is_some() {
            return entry;
        }
        Self::present_or_aside(entry | VALID)
    }
}

impl<A: Flags, V: Violations> Ept<A, V> {
    /// A valid entry that was put aside for being LOCKED, where its access flag says that it belongs.
    #[inline(always)]
    const fn present_or_aside(entry: u64) -> u64 {
        if Self::is_aside(entry) { entry } else { back(entry) }
    }
}
