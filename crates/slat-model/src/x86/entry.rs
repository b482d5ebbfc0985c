//! What an entry says to the hardware (Intel SDM vol. 3C, tables 29-1 to 29-7 and 29.3.3.1 "EPT Misconfigurations"; AMD APM
//! vol. 2, 5.4 and 15.25.6).

use crate::descriptor::{Descriptor, Leaf, MemoryType, Permissions};
use crate::regime::{Kind, Regime};

pub(crate) const EPT_ACCESSED: u64 = 1 << 8;
pub(crate) const EPT_DIRTY: u64 = 1 << 9;
pub(crate) const NPT_ACCESSED: u64 = 1 << 5;
pub(crate) const NPT_DIRTY: u64 = 1 << 6;

/// A block, at levels 1 and 2; reserved above.
const PAGE_SIZE: u64 = 1 << 7;

fn bits(low: u32, end: u32) -> u64 {
    if low >= end { 0 } else { !0 >> (64 - end) & !0 << low }
}

impl Regime {
    fn leaf_at(value: u64, level: i8) -> bool {
        level == 3 || value & PAGE_SIZE != 0
    }

    fn output_at(&self, value: u64, level: i8) -> u64 {
        value & bits(self.shift(level), 52)
    }

    /// Bits that are reserved in every present entry at `level`, by their place in the address.
    fn reserved_address(&self, value: u64, level: i8, first: u32) -> u64 {
        let beyond = bits(self.features.address_bits, 52);
        let inside = if Self::leaf_at(value, level) { bits(first, self.shift(level)) } else { 0 };
        let no_block = if level < 1 { PAGE_SIZE } else { 0 };
        beyond | inside | no_block
    }

    /// What a present EPT entry permits by itself.
    fn ept_permissions(&self, value: u64) -> Permissions {
        let by_mode = matches!(self.kind, Kind::Ept { mode_based: true });
        let user = if by_mode { 10 } else { 2 };
        let all = [
            (0, Permissions::READ),
            (1, Permissions::WRITE),
            (2, Permissions::EXECUTE),
            (user, Permissions::EXECUTE_USER),
        ];
        all.into_iter()
            .filter(|(bit, _)| value >> bit & 1 == 1)
            .fold(Permissions::default(), |sum, (_, permission)| sum.and(permission))
    }

    pub(crate) fn ept_entry(&self, value: u64, level: i8) -> Descriptor {
        let permissions = self.ept_permissions(value);
        if permissions == Permissions::default() {
            return Descriptor::Invalid;
        }
        if !Self::leaf_at(value, level) {
            return Descriptor::Table(value & bits(12, 52));
        }
        // Without the flags hardware notes nothing; a write that it has to note is no permission to cache.
        let flags = self.hardware_access;
        let clean = flags && permissions.has(Permissions::WRITE) && value & EPT_DIRTY == 0;
        Descriptor::Leaf(Leaf {
            output: self.output_at(value, level),
            permissions: if clean { permissions.except(Permissions::WRITE) } else { permissions },
            memory: match value >> 3 & 0b111 {
                6 => MemoryType::WriteBack,
                4 | 5 => MemoryType::WriteThrough,
                1 => MemoryType::NonCacheable,
                _ => MemoryType::Device,
            },
            accessed: !flags || value & EPT_ACCESSED != 0,
            clean,
        })
    }

    /// The bits of an EPT entry that make it misconfigured.
    pub(crate) fn ept_reserved(&self, value: u64, level: i8) -> u64 {
        let permissions = self.ept_permissions(value);
        if permissions == Permissions::default() {
            return 0;
        }
        let unreadable = permissions.has(Permissions::WRITE) && !permissions.has(Permissions::READ);
        let write_only = if unreadable { 0b11 } else { 0 };
        let rest = if Self::leaf_at(value, level) {
            let reserved_type = matches!(value >> 3 & 0b111, 2 | 3 | 7);
            if reserved_type { value & 0b111 << 3 } else { 0 }
        } else {
            value & bits(3, 8)
        };
        value & (self.reserved_address(value, level, 12) | write_only) | rest
    }

    pub(crate) fn npt_entry(&self, value: u64, level: i8) -> Descriptor {
        if value & 1 == 0 {
            return Descriptor::Invalid;
        }
        if !Self::leaf_at(value, level) {
            return Descriptor::Table(value & bits(12, 52));
        }
        // A nested walk is a user access.
        let mut permissions = Permissions::default();
        let user = value >> 2 & 1 == 1;
        let writable = user && value >> 1 & 1 == 1;
        let clean = writable && value & NPT_DIRTY == 0;
        let executable = Permissions::EXECUTE.and(Permissions::EXECUTE_USER);
        for (given, permission) in [
            (user, Permissions::READ),
            (writable && !clean, Permissions::WRITE),
            (user && value >> 63 == 0, executable),
        ] {
            if given {
                permissions = permissions.and(permission);
            }
        }
        Descriptor::Leaf(Leaf {
            output: self.output_at(value, level),
            permissions,
            // PAT as at reset; bit 2 of the index is clear in every entry that this model takes.
            memory: match value >> 3 & 0b11 {
                0b00 => MemoryType::WriteBack,
                0b01 => MemoryType::WriteThrough,
                0b10 => MemoryType::NonCacheable,
                _ => MemoryType::Device,
            },
            accessed: value & NPT_ACCESSED != 0,
            clean,
        })
    }

    pub(crate) fn npt_reserved(&self, value: u64, level: i8) -> u64 {
        if value & 1 == 0 {
            return 0;
        }
        // Bit 12 of a block is the third bit of its PAT index, as bit 7 of a page is: neither is expected.
        let pat = if level == 3 { PAGE_SIZE } else { 0 };
        value & (self.reserved_address(value, level, 12) | pat)
    }

    /// What a table entry takes away from everything below it.
    pub(crate) fn table_permissions(&self, value: u64) -> Permissions {
        let execute = Permissions::EXECUTE.and(Permissions::EXECUTE_USER);
        let all = Permissions::ALL;
        match self.kind {
            Kind::Arm => all,
            Kind::Ept { .. } => self.ept_permissions(value),
            Kind::Npt if value >> 2 & 1 == 0 => Permissions::default(),
            Kind::Npt => {
                let lost =
                    if value >> 1 & 1 == 0 { Permissions::WRITE } else { Permissions::default() };
                let never = if value >> 63 == 1 { execute } else { Permissions::default() };
                all.except(lost).except(never)
            }
        }
    }

    /// A table entry after hardware's update.
    pub(crate) fn table_updated(&self, value: u64) -> u64 {
        match self.kind {
            Kind::Arm => value,
            _ if !self.hardware_access => value,
            Kind::Ept { .. } => value | EPT_ACCESSED,
            Kind::Npt => value | NPT_ACCESSED,
        }
    }
}
