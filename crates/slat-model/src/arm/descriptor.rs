//! What a descriptor says to the hardware: stage-2 block, page and table descriptors taken apart (Arm ARM DDI 0487,
//! D8.3.1 "VMSAv8-64 descriptor formats", D8.4.2 "Stage 2 data accesses permissions", D8.6 "Memory attributes").

use crate::descriptor::{Descriptor, Leaf, MemoryType, Permissions};
use crate::regime::Regime;

pub(crate) const ACCESS_FLAG: u64 = 1 << 10;
/// S2AP\[1\].
pub(crate) const WRITABLE: u64 = 1 << 7;
const DIRTY_BIT_MODIFIER: u64 = 1 << 51;

impl Regime {
    /// Reads a descriptor at `level` as Arm hardware does.
    pub(crate) fn arm_descriptor(&self, value: u64, level: i8) -> Descriptor {
        match (value & 0b11, level) {
            (0b11, 3) => Descriptor::Leaf(self.arm_leaf(value, level)),
            (0b11, _) => Descriptor::Table(self.address(value, self.page_shift)),
            (0b01, _) if level < 3 && self.block_at(level) => {
                Descriptor::Leaf(self.arm_leaf(value, level))
            }
            _ => Descriptor::Invalid,
        }
    }

    /// The address field from bit `low` up, wherever its upper bits are kept.
    fn address(&self, value: u64, low: u32) -> u64 {
        let below = |bit: u32| (1u64 << bit) - 1;
        if self.ds {
            (value & below(50) & !below(low)) | ((value >> 8) & 0b11) << 50
        } else {
            let high = if self.lpa() { ((value >> 12) & 0xf) << 48 } else { 0 };
            (value & below(48) & !below(low)) | high
        }
    }

    fn arm_leaf(&self, value: u64, level: i8) -> Leaf {
        let mut permissions = Permissions::default();
        if value & (1 << 6) != 0 {
            permissions = permissions.and(Permissions::READ);
        }
        let dirty_managed = self.hardware_dirty && value & DIRTY_BIT_MODIFIER != 0;
        if value & WRITABLE != 0 {
            permissions = permissions.and(Permissions::WRITE);
        }
        let (kernel, user) = match ((value >> 53) & 0b11, self.features.xnx) {
            (0b00, true) => (true, true),
            (0b01, true) => (false, true),
            (0b10, true) => (false, false),
            (_, true) => (true, false),
            (xn, false) => (xn & 0b10 == 0, xn & 0b10 == 0),
        };
        if kernel {
            permissions = permissions.and(Permissions::EXECUTE);
        }
        if user {
            permissions = permissions.and(Permissions::EXECUTE_USER);
        }
        Leaf {
            output: self.address(value, self.shift(level)),
            permissions,
            memory: self.memory_type(value),
            accessed: value & ACCESS_FLAG != 0,
            clean: dirty_managed && value & WRITABLE == 0,
        }
    }

    fn memory_type(&self, value: u64) -> MemoryType {
        let attribute = (value >> 2) & 0xf;
        if self.features.fwb {
            return match attribute & 0b111 {
                0b110 | 0b111 => MemoryType::WriteBack,
                0b100 | 0b101 => MemoryType::NonCacheable,
                _ => MemoryType::Device,
            };
        }
        match (attribute >> 2, attribute & 0b11) {
            (0b00, _) => MemoryType::Device,
            (0b11, 0b11) => MemoryType::WriteBack,
            (0b01, 0b01) => MemoryType::NonCacheable,
            _ => MemoryType::WriteThrough,
        }
    }

    /// The bits of a descriptor with bit 0 set that must not be as they are: zero if there are none.
    pub(crate) fn arm_reserved(&self, value: u64, level: i8) -> u64 {
        let bits = |low: u32, high: u32| (!0u64 >> (63 - high)) & (!0 << low);
        let upper = if self.ds { 1 << 50 } else { bits(48, 50) };
        match self.arm_descriptor(value, level) {
            // Bit 1 is clear where there are no blocks.
            Descriptor::Invalid => value & 1,
            Descriptor::Table(_) => {
                let wide = self.lpa();
                let low =
                    if self.page_shift == 12 || wide { 0 } else { bits(12, self.page_shift - 1) };
                value & (bits(59, 63) | upper | low)
            }
            Descriptor::Leaf(_) => value & self.reserved_in_leaf(value, level, upper),
        }
    }

    fn reserved_in_leaf(&self, value: u64, level: i8, upper: u64) -> u64 {
        let bits = |low: u32, high: u32| (!0u64 >> (63 - high)) & (!0 << low);
        let shift = self.shift(level);
        // Below the address of a block: bits 15 to 12 can be address bits (64K), bit 16 is nT.
        let first = if self.lpa() { 16 } else { 12 };
        let mut low = if shift > first { bits(first, shift - 1) } else { 0 };
        if level < 3 && self.features.block_change {
            low &= !(1 << 16);
        }
        let fnxs = 1 << 11;
        let xn0 = if self.features.xnx { 0 } else { 1 << 53 };
        // Shareability 0b01 is reserved; with DS the field holds address bits.
        let shareability = if !self.ds && (value >> 8) & 0b11 == 0b01 { 1 << 8 } else { 0 };
        let attribute = (value >> 2) & 0xf;
        let bad_attribute = if self.features.fwb {
            attribute & 0b1000 != 0 || attribute & 0b111 == 0b100
        } else {
            attribute & 0b1100 != 0 && attribute & 0b11 == 0
        };
        let memory = if bad_attribute { 0xf << 2 } else { 0 };
        upper | low | fnxs | xn0 | shareability | memory
    }
}
