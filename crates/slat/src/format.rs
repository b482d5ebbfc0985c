//! What an entry says: the trait that a format of entries implements, and attributes in words.

use core::fmt;

use crate::entry::LOCK_BIT;
use crate::maintenance::Maintenance;
use crate::{Geometry, Hpa, Level, Owner};

pub mod arm;
pub mod ept;
pub mod npt;
mod x86;

/// Who may execute from a page.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Execute {
    /// Nobody.
    #[default]
    No,
    /// Every privilege level of the guest.
    Yes,
    /// The guest's kernel only (Arm: EL1, needs FEAT_XNX; Intel: supervisor mode, needs mode-based execute control).
    Kernel,
    /// The guest's user programs only (Arm: EL0, needs FEAT_XNX; Intel: user mode, needs mode-based execute control).
    User,
}

/// How a page is cached.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Memory {
    /// Ordinary memory, write-back.
    #[default]
    Normal,
    /// Ordinary memory, not cached.
    NonCacheable,
    /// Device registers: no caching, gathering or reordering, never executable.
    Device,
}

/// What a writable entry knows about writes that went through it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Dirty {
    /// Hardware keeps no dirty state for this entry: it counts as dirty if it is writable.
    #[default]
    Untracked,
    /// Hardware sets the entry to `Dirty` at the first write.
    Clean,
    /// A write went through since the entry was clean.
    Dirty,
}

/// What a leaf entry permits and remembers, in words.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Attributes {
    /// Loads are permitted.
    pub read: bool,
    /// Stores are permitted (for `Dirty::Clean`: after hardware has noted the first one).
    pub write: bool,
    /// Who may execute.
    pub execute: Execute,
    /// How the page is cached.
    pub memory: Memory,
    /// The access flag. Where hardware does not set it, an access to an entry without it faults.
    pub accessed: bool,
    /// Dirty state; only `Untracked` goes with `write: false`.
    pub dirty: Dirty,
    /// Four bits for the embedder, 0 to 15, ignored by hardware.
    pub software: u8,
}

impl Attributes {
    /// Ordinary memory that may be read, written and executed, access flag set.
    pub const RWX: Self = Self {
        read: true,
        write: true,
        execute: Execute::Yes,
        memory: Memory::Normal,
        accessed: true,
        dirty: Dirty::Untracked,
        software: 0,
    };
    /// Ordinary memory that may be read and written, access flag set.
    pub const RW: Self = Self { execute: Execute::No, ..Self::RWX };
    /// Ordinary memory that may be read, access flag set.
    pub const RO: Self = Self { write: false, ..Self::RW };
    /// Device registers that may be read and written, access flag set.
    pub const DEVICE: Self = Self { memory: Memory::Device, ..Self::RW };
}

/// Why a format cannot express some attributes, or a tree of some shape.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FormatError {
    /// The address width is not one that this format and granule have; the supported widths.
    AddressBits {
        /// What was asked for.
        bits: u32,
        /// The smallest width.
        min: u32,
        /// The largest width.
        max: u32,
    },
    /// The root cannot start at this level for this address width (too many root tables, or no bit left).
    StartLevel(Level),
    /// Device or non-cacheable memory must not be executable.
    ExecutableDevice,
    /// `Execute::Kernel` or `Execute::User` without the feature that distinguishes them.
    ExecuteNeedsXnx,
    /// Something other than reading is permitted, and reading is not, which this format (as it is configured) has not.
    Unreadable,
    /// Dirty state on an entry that is not writable, or in a format that keeps none.
    DirtyState,
    /// A software value above 15.
    Software(u8),
}

impl fmt::Display for FormatError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AddressBits { bits, min, max } => {
                write!(f, "{bits}-bit guest addresses are not supported here: use {min} to {max}")
            }
            Self::StartLevel(level) => {
                write!(
                    f,
                    "the root cannot start at level {} for this address width",
                    level.number()
                )
            }
            Self::ExecutableDevice => {
                f.write_str("device and non-cacheable memory cannot be executable")
            }
            Self::ExecuteNeedsXnx => {
                f.write_str(
                    "execute permission by privilege level needs FEAT_XNX, or mode-based execute control",
                )
            }
            Self::Unreadable => f.write_str(
                "this format has no pages that can be written or executed and not be read",
            ),
            Self::DirtyState => {
                f.write_str("dirty state needs a writable entry and a format that keeps it")
            }
            Self::Software(value) => write!(f, "software value {value} does not fit four bits"),
        }
    }
}

impl core::error::Error for FormatError {}

/// A bit-exact format of entries. The engine is written once, over this trait.
///
/// All functions are pure and small; they are inlined into every walk. Entries that this trait is asked to build or
/// take apart are valid ones, except in [`is_valid`](Self::is_valid) and [`is_table`](Self::is_table).
///
/// # Safety
/// The engine follows table addresses that it reads out of entries, and so does hardware. The implementor promises that
/// [`is_table`](Self::is_table) is true of what [`table`](Self::table) makes and of nothing else that this trait makes,
/// that [`next`](Self::next) gives back its address, that a table has `1 << INDEX_BITS` entries, that
/// [`thaw`](Self::thaw) undoes [`freeze`](Self::freeze), and that the geometry is that of these constants.
#[expect(
    unsafe_code,
    reason = "the engine follows the addresses that a format takes out of entries"
)]
pub unsafe trait Format: Copy + PartialEq + Send + Sync + 'static {
    /// log2 of the granule in bytes.
    const PAGE_SHIFT: u32;
    /// log2 of the entries of one table.
    const INDEX_BITS: u32 = Self::PAGE_SHIFT - 3;
    /// The bits whose clearing takes every way to write away from a leaf, now and by hardware later (rule 8).
    const WRITE: u64;
    /// Bits without which a leaf is not dirty; others may have them too.
    const DIRTY: u64;
    /// A bit that every valid entry has and no invalid one.
    const VALID: u64 = 1;
    /// What every entry has that is not present as far as hardware can see.
    const ABSENT: u64 = 0;
    /// An entry with no translation and no note.
    const EMPTY: u64 = Self::ABSENT;
    /// A LOCKED entry that carries nothing.
    const LOCKED: u64 = LOCK_BIT | Self::ABSENT;
    /// The access flag.
    const ACCESSED: u64;
    /// Where the four software bits begin.
    const SOFTWARE_SHIFT: u32;
    /// Barriers and TLB maintenance of the architecture (rule 12).
    type Maintenance: Maintenance;

    /// The shape of a tree in this format.
    fn geometry(&self) -> &Geometry;
    /// What [`Maintenance::root`] takes beside the root table of a tree that was given this number.
    #[inline(always)]
    fn identifier(&self, number: u16) -> u16 {
        number
    }
    /// Whether a walker may use the entry.
    fn is_valid(entry: u64) -> bool;
    /// Whether the entry at `level` is valid and points to a table.
    fn is_table(entry: u64, level: Level) -> bool;
    /// Whether a leaf may stand at `level` (a page always, a block where the granule has one).
    fn leaf_allowed(&self, level: Level) -> bool;
    /// The bits of a leaf entry that do not depend on address or level.
    ///
    /// # Errors
    /// What the format cannot express.
    fn template(&self, attributes: Attributes) -> Result<u64, FormatError>;
    /// The leaf entry at `level` for `output`, which must be aligned to the level's size.
    fn leaf(&self, level: Level, output: Hpa, template: u64) -> u64;
    /// The entry that points to a table.
    fn table(&self, table: Hpa) -> u64;
    /// The table that a table entry points to.
    fn next(&self, entry: u64) -> Hpa;
    /// The output address of a leaf entry at `level`.
    fn output(&self, entry: u64, level: Level) -> Hpa;
    /// The template that a leaf entry was made with (access flag and dirty state as they are now).
    fn template_of(&self, entry: u64, level: Level) -> u64;
    /// Whether a template has nothing that this format, as it is configured, never gives one. It is asked at each fault, so
    /// it looks at single bits and at what the engine relies on, and not at every combination.
    fn fits(&self, template: u64) -> bool;
    /// A template in words.
    fn attributes(&self, template: u64) -> Attributes;
    /// The largest output address width, in bits.
    fn output_bits(&self) -> u32;

    /// Whether a write through this leaf is permitted without a fault: now, or by hardware that notes it first.
    #[inline(always)]
    fn is_writable(entry: u64) -> bool {
        entry & Self::WRITE != 0
    }
    /// Whether this format's hardware sets the access flag; otherwise an access to an entry without it faults.
    fn sets_accessed(&self) -> bool;
    /// Whether this format's hardware keeps dirty state in the tree's entries (the templates may ask for it).
    fn tracks_dirty(&self) -> bool;
    /// Whether hardware has noted a write in this leaf.
    fn is_dirty(entry: u64) -> bool;
    /// Whether clearing the dirty state of this leaf is possible (hardware keeps one for it).
    fn tracks_dirty_of(entry: u64) -> bool;
    /// The leaf with its dirty state clear (no change where hardware keeps none).
    fn clean(entry: u64) -> u64;
    /// The leaf with its access flag clear.
    #[inline(always)]
    fn old(leaf: u64) -> u64 {
        leaf & !Self::ACCESSED
    }
    /// The leaf with its access flag set.
    #[inline(always)]
    fn young(leaf: u64) -> u64 {
        leaf | Self::ACCESSED
    }
    /// The leaf `old` with every permission added that `template` has (never one taken away, nothing else changed),
    /// and with the access flag set if `template` has it.
    fn relaxed(old: u64, template: u64) -> u64;
    /// The permissions that both entries have, with everything else of `a`.
    fn intersect(a: u64, b: u64) -> u64;
    /// `a` with the access flag and dirty state of `b` added.
    fn absorb(a: u64, b: u64) -> u64;
    /// A leaf's bits without address, access flag and dirty state: what must agree before entries may become one block.
    fn essence(leaf: u64) -> u64;

    /// A LOCKED value that still carries `entry`, which may be valid, empty or a note. Hardware sees nothing present.
    #[inline(always)]
    fn freeze(entry: u64) -> u64 {
        entry & !Self::VALID | LOCK_BIT
    }
    /// The entry that a LOCKED value carries.
    #[inline(always)]
    fn thaw(locked: u64) -> u64 {
        let entry = locked & !LOCK_BIT;
        if entry == Self::EMPTY || Owner::of(entry).is_some() { entry } else { entry | Self::VALID }
    }
}
