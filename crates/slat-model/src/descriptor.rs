//! What an entry says, whatever the architecture: table, block or page, nothing; and what a leaf permits.

use crate::arm;
use crate::regime::{Kind, Regime};
use crate::x86;

/// Permissions and other properties of a leaf, as the TLB keeps them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Permissions(u8);

impl Permissions {
    pub(crate) const READ: Self = Self(1);
    pub(crate) const WRITE: Self = Self(2);
    /// Execution by the guest's kernel (Arm: EL1; x86: supervisor mode).
    pub(crate) const EXECUTE: Self = Self(4);
    /// Execution by the guest's programs (Arm: EL0; x86: user mode).
    pub(crate) const EXECUTE_USER: Self = Self(8);

    pub(crate) const ALL: Self = Self(15);

    /// Whether every permission of `other` is there.
    #[inline(always)]
    pub(crate) fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    pub(crate) fn only(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    pub(crate) fn except(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    pub(crate) fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    pub(crate) fn bits(self) -> u8 {
        self.0
    }
}

/// The kind of memory behind a leaf.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum MemoryType {
    /// Normal memory, write-back on both levels (or left to the guest).
    #[default]
    WriteBack,
    /// Normal memory, cached in some other way.
    WriteThrough,
    /// Normal memory, not cached.
    NonCacheable,
    /// Device memory.
    Device,
}

/// A block or page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Leaf {
    pub(crate) output: u64,
    pub(crate) permissions: Permissions,
    pub(crate) memory: MemoryType,
    pub(crate) accessed: bool,
    /// Not writable, and hardware makes it so at the first write.
    pub(crate) clean: bool,
}

/// What a walker makes of an entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Descriptor {
    Invalid,
    Table(u64),
    Leaf(Leaf),
}

impl Regime {
    /// Reads an entry at `level` as hardware does.
    pub(crate) fn descriptor(&self, value: u64, level: i8) -> Descriptor {
        match self.kind {
            Kind::Arm => self.arm_descriptor(value, level),
            Kind::Ept { .. } => self.ept_entry(value, level),
            Kind::Npt => self.npt_entry(value, level),
        }
    }

    /// The bits of a present entry that must not be as they are: zero if there are none.
    pub(crate) fn reserved(&self, value: u64, level: i8) -> u64 {
        match self.kind {
            Kind::Arm => self.arm_reserved(value, level),
            Kind::Ept { .. } => self.ept_reserved(value, level),
            Kind::Npt => self.npt_reserved(value, level),
        }
    }

    /// The leaf after hardware's updates for an access that needs `needed`; `None` if its access flag is clear and
    /// hardware does not set it.
    pub(crate) fn updated(&self, value: u64, leaf: &Leaf, needed: Permissions) -> Option<u64> {
        let written = leaf.clean && needed == Permissions::WRITE;
        match self.kind {
            Kind::Arm if !leaf.accessed && !self.hardware_access => None,
            Kind::Arm => {
                let accessed = value | arm::descriptor::ACCESS_FLAG;
                Some(accessed | if written { arm::descriptor::WRITABLE } else { 0 })
            }
            // On x86 an access that is not permitted updates nothing.
            _ if !self.hardware_access || !(written || leaf.permissions.has(needed)) => Some(value),
            Kind::Ept { .. } => {
                Some(value | x86::EPT_ACCESSED | if written { x86::EPT_DIRTY } else { 0 })
            }
            Kind::Npt => Some(value | x86::NPT_ACCESSED | if written { x86::NPT_DIRTY } else { 0 }),
        }
    }
}
