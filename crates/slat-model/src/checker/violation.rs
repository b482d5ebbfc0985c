//! The rules by name, and what is known when one is broken.

use std::fmt;

use slat::maintenance::Instruction;
use slat::{Gpa, Hpa, Level, Promise};

use crate::descriptor::MemoryType;
use crate::regime::Control;

/// A rule that was broken.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Violation {
    /// A walk found a translation, or a table, that contradicts one that a CPU has cached under the same VMID: the
    /// entry was changed without break-before-make, or without invalidating all of what the old one translated
    /// (rule 3; Arm ARM D8.17.1).
    BreakBeforeMake {
        /// The VMID.
        vmid: u16,
        /// The CPU that has the old one cached.
        holder: usize,
        /// What it has cached; a table pointer counts as a leaf of its table's address and size.
        cached: CachedLeaf,
        /// What a walk has found now.
        found: CachedLeaf,
    },
    /// A table was freed while a walk can still reach it, or was used after it was freed (rule 5).
    FreedWhileReachable {
        /// The table.
        table: Hpa,
        /// Who reaches it.
        by: Reach,
    },
    /// Something was freed that was not allocated so, or was freed already.
    BadFree {
        /// The address that was freed.
        first: Hpa,
        /// How many tables from there.
        tables: usize,
    },
    /// An entry of a freed table was written.
    WrittenAfterFree {
        /// The entry.
        entry: Hpa,
        /// What it holds.
        found: u64,
    },
    /// An entry was looked for outside table memory.
    NotATable {
        /// The address.
        address: Hpa,
    },
    /// An operation returned, and a translation that it promised to be gone is still cached.
    StaleTranslation {
        /// The CPU that has it cached.
        cpu: usize,
        /// The translation.
        cached: CachedLeaf,
        /// What was promised.
        promise: Promise,
    },
    /// A store to a table was not published (rules 3 and 12).
    NeverPublished {
        /// The entry.
        entry: Hpa,
        /// What was stored.
        value: u64,
        /// What came first.
        before: Before,
    },
    /// An entry was left LOCKED (rule 3), or DEAD in a table that is still linked (rule 5).
    LockedOutlived {
        /// The entry.
        entry: Hpa,
        /// What came first.
        until: Until,
    },
    /// A LOCKED entry was changed by a thread that had not locked it (rules 2 and 3).
    NotOwner {
        /// The entry.
        entry: Hpa,
        /// What was stored.
        new: u64,
    },
    /// A descriptor has reserved bits set, or a reserved encoding.
    ReservedBits {
        /// The entry.
        entry: Hpa,
        /// Its value.
        value: u64,
        /// The bits that must not be so.
        bits: u64,
        /// Its level.
        level: Level,
        /// The address that it was walked for.
        gpa: Gpa,
    },
    /// The registers of a CPU make no sense.
    BadRegisters {
        /// What was loaded.
        control: Control,
        /// Why.
        why: &'static str,
    },
    /// A guest runs, and its vCPU's gate says that it does not (rule 11).
    OutsideGate {
        /// The CPU.
        cpu: usize,
        /// The address that the guest uses.
        gpa: Gpa,
    },
    /// A guest runs on a CPU that has translations cached that others rely on to be gone: its vCPU entered without
    /// invalidating (rules 11 and 12).
    NotInvalidated {
        /// The CPU.
        cpu: usize,
        /// The address that the guest uses.
        gpa: Gpa,
    },
    /// A CPU loads a root under a VMID under which translations from another root are still cached.
    VmidReused {
        /// The VMID.
        vmid: u16,
        /// The root that is loaded.
        root: Hpa,
        /// The CPU that has the others cached.
        cpu: usize,
        /// Their root.
        cached: Hpa,
    },
    /// Nothing is changing, and what a CPU has cached is not what the tables say.
    Disagreement {
        /// The CPU.
        cpu: usize,
        /// What it has cached; a table pointer counts as a leaf of its table's address and size.
        cached: CachedLeaf,
        /// The entry that the tables have at that level and address; zero if their walk does not get there.
        entry: u64,
    },
    /// A translation leads to a host-physical address where no memory is.
    NoMemory {
        /// The address that was translated.
        gpa: Gpa,
        /// Where it led.
        hpa: Hpa,
    },
    /// An instruction that the model does not know.
    UnknownInstruction {
        /// The instruction.
        instruction: Instruction,
    },
    /// Contexts do not nest, or there is none to invalidate in.
    Context {
        /// What was done.
        what: &'static str,
    },
}

/// A translation of a block or page as a CPU has it cached, or as a walk finds it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CachedLeaf {
    /// The first address that it translates.
    pub gpa: Gpa,
    /// Bytes.
    pub size: u64,
    /// Where to.
    pub output: Hpa,
    /// Whether it is a pointer to a table and not a translation.
    pub table: bool,
    /// Whether it lets writes through.
    pub writable: bool,
    /// The kind of memory.
    pub memory: MemoryType,
}

/// How a table can be reached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reach {
    /// A CPU's walk cache points to it.
    WalkCache {
        /// The CPU.
        cpu: usize,
        /// The address whose walk passed through it.
        gpa: Gpa,
    },
    /// It is the root that a CPU has loaded.
    Root {
        /// The CPU.
        cpu: usize,
    },
    /// A hardware walk has just read it.
    HardwareWalk {
        /// The CPU.
        cpu: usize,
        /// The address that is walked for.
        gpa: Gpa,
    },
    /// The engine has accessed an entry of it.
    Engine {
        /// The entry.
        entry: Hpa,
    },
}

/// What a store should have been published before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Before {
    /// The end of the operation that stored.
    End,
    /// A guest running on the thread that stored.
    Guest,
    /// An invalidation of what the old entry translated: without a publish, a walker may cache it again.
    Invalidation {
        /// The invalidation was for one CPU.
        local: bool,
    },
}

/// What a LOCKED entry should have been settled before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Until {
    /// The end of the operation that locked it.
    End,
    /// The end of the pin.
    Unpinned,
    /// A guest running on the thread that locked it.
    Guest,
    /// A moment when nothing is under way.
    Quiet,
}

impl fmt::Display for CachedLeaf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = if self.table { "table" } else { "translation" };
        write!(f, "{what} {}+{:#x} -> {}", self.gpa, self.size, self.output)?;
        if !self.table {
            write!(
                f,
                " ({:?}, {})",
                self.memory,
                if self.writable { "writable" } else { "read-only" }
            )?;
        }
        Ok(())
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BreakBeforeMake { vmid, holder, cached, found } => write!(
                f,
                "BreakBeforeMake: VMID {vmid}: CPU {holder} has cached {cached}, a walk finds {found}"
            ),
            Self::FreedWhileReachable { table, by } => {
                write!(f, "FreedWhileReachable: table {table} by {by:?}")
            }
            Self::BadFree { first, tables } => {
                write!(f, "BadFree: {tables} tables at {first} were not allocated so")
            }
            Self::WrittenAfterFree { entry, found } => {
                write!(f, "WrittenAfterFree: entry {entry} of a freed table holds {found:#x}")
            }
            Self::NotATable { address } => write!(f, "NotATable: {address} is not table memory"),
            Self::StaleTranslation { cpu, cached, promise } => {
                write!(f, "StaleTranslation: CPU {cpu} has cached {cached} after {promise:?}")
            }
            Self::NeverPublished { entry, value, before } => {
                write!(f, "NeverPublished: {value:#x} in entry {entry}, not before {before:?}")
            }
            Self::LockedOutlived { entry, until } => {
                write!(f, "LockedOutlived: entry {entry} until {until:?}")
            }
            Self::NotOwner { entry, new } => {
                write!(f, "NotOwner: LOCKED entry {entry} of another thread was set to {new:#x}")
            }
            Self::ReservedBits { entry, value, bits, level, gpa } => write!(
                f,
                "ReservedBits: {bits:#x} in {value:#x}, entry {entry} at level {} for {gpa}",
                level.number()
            ),
            Self::BadRegisters { control, why } => {
                write!(f, "BadRegisters: {control:x?}: {why}")
            }
            Self::OutsideGate { cpu, gpa } => {
                write!(f, "OutsideGate: CPU {cpu} uses {gpa} and its vCPU is outside the guest")
            }
            Self::NotInvalidated { cpu, gpa } => write!(
                f,
                "NotInvalidated: CPU {cpu} uses {gpa} and has not answered a request to invalidate"
            ),
            Self::VmidReused { vmid, root, cpu, cached } => write!(
                f,
                "VmidReused: VMID {vmid} with root {root}, but CPU {cpu} has cached from root {cached}"
            ),
            Self::Disagreement { cpu, cached, entry } => {
                write!(f, "Disagreement: CPU {cpu} has cached {cached}, the tables say {entry:#x}")
            }
            Self::NoMemory { gpa, hpa } => {
                write!(f, "NoMemory: {gpa} leads to {hpa}, where no memory is")
            }
            Self::UnknownInstruction { instruction } => {
                write!(f, "UnknownInstruction: {instruction:?}")
            }
            Self::Context { what } => write!(f, "Context: {what}"),
        }
    }
}
