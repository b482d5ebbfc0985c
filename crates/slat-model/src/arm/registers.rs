//! What the control registers say: `VTTBR_EL2` and `VTCR_EL2` taken apart (Arm ARM DDI 0487, D24.2 "VTCR_EL2, VTTBR_EL2";
//! start levels and concatenation as in the pseudocode `AArch64.S2StartLevel`, `S2InvalidSL`, `S2InconsistentSL` and
//! `S2TTBaseAddress`).

use crate::regime::{Kind, Regime};

/// The stage-2 registers of one CPU while it runs a guest.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Registers {
    /// `VTTBR_EL2`: the root and the VMID.
    pub vttbr: u64,
    /// `VTCR_EL2`: the shape of the tree and what hardware may update in it.
    pub vtcr: u64,
}

/// What the modelled CPUs implement.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Features {
    /// FEAT_S2FWB, enabled: MemAttr overrides the guest's attributes.
    pub fwb: bool,
    /// FEAT_XNX: execute permission by exception level.
    pub xnx: bool,
    /// The physical address width in bits, 32 to 52.
    pub address_bits: u32,
    /// FEAT_BBM level 2: the size of a translation may change without break-before-make.
    pub block_change: bool,
    /// FEAT_TLBIRANGE: invalidation by range.
    pub tlb_range: bool,
    /// FEAT_TTL: level hints in invalidations, which spare all other levels.
    pub ttl: bool,
}

impl Default for Features {
    /// XNX, 52-bit addresses, invalidation by range and with level hints, as a recent server has them; no FWB, no relaxed
    /// break-before-make.
    fn default() -> Self {
        Self {
            fwb: false,
            xnx: true,
            address_bits: 52,
            block_change: false,
            tlb_range: true,
            ttl: true,
        }
    }
}

impl Regime {
    /// Takes the registers apart. The complaint names a setting that an architecture-conforming hypervisor does not
    /// make; hardware still does something.
    pub(crate) fn arm(
        registers: Registers,
        features: Features,
        page_shift: u32,
    ) -> (Self, Option<&'static str>) {
        let Registers { vttbr, vtcr } = registers;
        let mut complaint = None;
        let mut complain = |what, if_so: bool| {
            if if_so && complaint.is_none() {
                complaint = Some(what);
            }
        };
        let ds = field(vtcr, 32, 1) == 1;
        let granule = match field(vtcr, 14, 2) {
            0b00 => 12,
            0b01 => 16,
            0b10 => 14,
            _ => 0,
        };
        complain("TG0 is not the granule of the table memory", granule != page_shift);
        complain("RES1 bit 31 is zero", field(vtcr, 31, 1) == 0);
        complain("a RES0 bit is set", vtcr & RESERVED != 0);
        let input_bits = 64 - field(vtcr, 0, 6) as u32;
        let widest = if page_shift == 16 || ds { 52 } else { 48 };
        complain("T0SZ is out of range", !(25..=widest).contains(&input_bits));
        complain("T0SZ exceeds the physical address width", input_bits > features.address_bits);
        complain("DS with the 64K granule", ds && page_shift == 16);
        let (hardware_access, hardware_dirty) = (field(vtcr, 21, 1) == 1, field(vtcr, 22, 1) == 1);
        complain("HD without HA", hardware_dirty && !hardware_access);

        let wanted = match field(vtcr, 16, 3) {
            0b000 => 32,
            0b001 => 36,
            0b010 => 40,
            0b011 => 42,
            0b100 => 44,
            0b101 => 48,
            0b110 => 52,
            _ => 56,
        };
        complain("PS exceeds the physical address width", wanted > features.address_bits);
        let widest_output = if page_shift == 16 || ds { 52 } else { 48 };
        complain("PS of 52 bits without 52-bit descriptors", wanted > widest_output);
        let output_bits = wanted.min(features.address_bits).min(widest_output);

        let start = start_level(vtcr, page_shift, ds, features.address_bits);
        complain("SL0 and SL2 name no start level", start.is_none());
        let level = start.unwrap_or(0);
        let stride = page_shift - 3;
        let resolved = page_shift + stride * (3 - level) as u32;
        let consistent =
            start.is_some() && (resolved + 1..=resolved + stride + 4).contains(&input_bits);
        complain("T0SZ does not fit the start level", start.is_some() && !consistent);

        let wide = ds || (page_shift == 16 && wanted == 52);
        let root_bits = (input_bits.saturating_sub(resolved) + 3).max(if wide { 6 } else { 4 });
        let address = if wide {
            (field(vttbr, 2, 4) << 48) | (vttbr & 0xffff_ffff_ffc0)
        } else {
            vttbr & 0xffff_ffff_fffe
        };
        let root = address & !((1 << root_bits) - 1);
        complain("the root is not aligned to its size", root != address);
        let vmid16 = field(vtcr, 19, 1) == 1;
        let vmid = if vmid16 { field(vttbr, 48, 16) } else { field(vttbr, 48, 8) } as u16;
        complain("a VMID above 255 without VS", !vmid16 && field(vttbr, 56, 8) != 0);
        let regime = Self {
            kind: Kind::Arm,
            root,
            vmid,
            page_shift,
            start: level,
            input_bits,
            output_bits,
            ds,
            hardware_access,
            hardware_dirty,
            features,
            consistent: consistent && granule == page_shift,
        };
        (regime, complaint)
    }

    /// Descriptors of the 64K granule that hold address bits 51 to 48.
    pub(crate) fn lpa(&self) -> bool {
        self.page_shift == 16 && self.features.address_bits == 52
    }

    /// Whether the granule has blocks at `level`.
    pub(crate) fn block_at(&self, level: i8) -> bool {
        match self.page_shift {
            12 => level == 2 || level == 1 || (level == 0 && self.ds),
            14 => level == 2 || (level == 1 && self.ds),
            _ => level == 2 || (level == 1 && self.lpa()),
        }
    }
}

/// Bits of `VTCR_EL2` that no feature of the model gives a meaning: bits 20, 23 and 24, and 34 up
/// (S2PIE and later ones).
const RESERVED: u64 = 1 << 20 | 0b11 << 23 | !0 << 34;

fn field(register: u64, low: u32, bits: u32) -> u64 {
    (register >> low) & ((1 << bits) - 1)
}

fn start_level(vtcr: u64, page_shift: u32, ds: bool, address_bits: u32) -> Option<i8> {
    let (sl0, sl2) = (field(vtcr, 6, 2), ds && field(vtcr, 33, 1) == 1);
    match (page_shift, sl2, sl0) {
        (12, true, 0b00) => Some(-1),
        (12, true, _) => None,
        (12, _, 0b00) => Some(2),
        (12, _, 0b01) => Some(1),
        (12, _, 0b10) => (address_bits >= 44).then_some(0),
        (12, _, _) => Some(3),
        (14, _, 0b00) => Some(3),
        (14, _, 0b01) => Some(2),
        (14, _, 0b10) => (address_bits >= 42).then_some(1),
        (14, _, _) => ds.then_some(0),
        (_, _, 0b00) => Some(3),
        (_, _, 0b01) => Some(2),
        (_, _, 0b10) => (address_bits >= 44).then_some(1),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RES1: u64 = 1 << 31;

    fn regime(vtcr: u64, page_shift: u32) -> (Regime, Option<&'static str>) {
        let registers = Registers { vttbr: 0x00ab_0000_4000_0000, vtcr };
        Regime::arm(registers, Features::default(), page_shift)
    }

    #[test]
    fn the_usual_4k_settings_start_at_level_one_with_two_roots() {
        let (regime, complaint) = regime(RES1 | 1 << 19 | 0b010 << 16 | 0b01 << 6 | 24, 12);
        assert_eq!(complaint, None);
        assert_eq!((regime.start, regime.input_bits, regime.output_bits), (1, 40, 40));
        assert_eq!((regime.root, regime.vmid), (0x4000_0000, 0xab));
        assert_eq!(regime.entry_offset(1, 0xff_ffff_ffff), 8 * 1023);
    }

    #[test]
    fn start_levels_follow_granule_sl0_and_sl2() {
        let start = |granule: u64, shift, sl0: u64, t0sz: u64, extra: u64| {
            let vtcr = RES1 | granule << 14 | 0b101 << 16 | sl0 << 6 | t0sz | extra;
            let (regime, complaint) = regime(vtcr, shift);
            assert_eq!(complaint, None, "{granule} {sl0}");
            regime.start
        };
        let ds = 1 << 32;
        assert_eq!(start(0b00, 12, 0b00, 64 - 34, 0), 2);
        assert_eq!(start(0b00, 12, 0b10, 64 - 48, 0), 0);
        assert_eq!(start(0b00, 12, 0b00, 64 - 52, ds | 1 << 33), -1);
        assert_eq!(start(0b10, 14, 0b01, 64 - 40, 0), 2);
        assert_eq!(start(0b10, 14, 0b10, 64 - 48, 0), 1);
        assert_eq!(start(0b10, 14, 0b11, 64 - 52, ds), 0);
        assert_eq!(start(0b01, 16, 0b01, 64 - 42, 0), 2);
        assert_eq!(start(0b01, 16, 0b10, 64 - 48, 0), 1);
    }

    #[test]
    fn wrong_settings_are_named() {
        let complaint = |vtcr| regime(vtcr, 12).1;
        let good = RES1 | 0b010 << 16 | 0b01 << 6 | 24;
        assert_eq!(complaint(good), None);
        assert!(complaint(good & !RES1).is_some());
        assert!(complaint(good | 0b01 << 14).is_some());
        assert!(complaint(good | 1 << 22).is_some());
        assert!(complaint((good & !63) | 16).is_some());
        assert!(complaint(good | 0b110 << 16).is_some());
    }

    #[test]
    fn a_wide_root_keeps_its_high_bits_in_the_low_ones() {
        let registers = Registers {
            vttbr: 0x0001_0000_8000_0000 | 0b1001 << 2,
            vtcr: RES1 | 0b01 << 14 | 0b110 << 16 | 0b10 << 6 | (64 - 48),
        };
        let (regime, complaint) = Regime::arm(registers, Features::default(), 16);
        assert_eq!((complaint, regime.root), (None, 0x9_0000_8000_0000));
    }
}
