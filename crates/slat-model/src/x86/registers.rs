//! What a CPU is told: the EPTP (Intel SDM vol. 3C, 25.6.11) or nCR3 and ASID (AMD APM vol. 2, 15.25.4).

use crate::arm::registers::Features;
use crate::regime::{Kind, Regime};

/// Bits 51:12: where the root is.
const TABLE: u64 = 0xf_ffff_ffff_f000;
const PAGE_SHIFT: u32 = 12;

/// Intel: what a VMCS says of the tables.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct EptRegisters {
    /// The EPTP.
    pub eptp: u64,
    /// The "mode-based execute control for EPT".
    pub mode_based: bool,
}

impl EptRegisters {
    pub(crate) fn table(self) -> u64 {
        self.eptp & TABLE
    }
}

/// AMD: what a VMCB, and the host's paging, say of the tables.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct NptRegisters {
    /// nCR3.
    pub ncr3: u64,
    /// The guest's ASID.
    pub asid: u16,
    /// The host's `CR4.LA57`.
    pub five_levels: bool,
}

impl Regime {
    /// Takes an EPTP apart; translations are cached under `tag`, which stands for its table.
    pub(crate) fn ept(
        registers: EptRegisters,
        tag: u16,
        features: Features,
        page_shift: u32,
    ) -> (Self, Option<&'static str>) {
        let EptRegisters { eptp, mode_based } = registers;
        let levels = (eptp >> 3 & 0b111) + 1;
        let complaint = if !matches!(eptp & 0b111, 0 | 6) {
            Some("the memory type of the EPTP is neither 0 nor 6")
        } else if !matches!(levels, 4 | 5) {
            Some("a walk has four or five levels")
        } else if eptp >> 7 & 0b1_1111 != 0 || eptp >> 52 != 0 {
            Some("a reserved bit of the EPTP is set")
        } else {
            None
        };
        let kind = Kind::Ept { mode_based };
        let flags = eptp >> 6 & 1 == 1;
        let regime = Self::x86(kind, eptp & TABLE, tag, levels == 5, flags, features, page_shift);
        (regime, complaint.or(granule(page_shift)))
    }

    pub(crate) fn npt(
        registers: NptRegisters,
        features: Features,
        page_shift: u32,
    ) -> (Self, Option<&'static str>) {
        let NptRegisters { ncr3, asid, five_levels } = registers;
        let complaint = if asid == 0 {
            Some("ASID 0 is the host's")
        } else if ncr3 & !TABLE != 0 {
            Some("a reserved bit of nCR3 is set")
        } else {
            None
        };
        let regime =
            Self::x86(Kind::Npt, ncr3 & TABLE, asid, five_levels, true, features, page_shift);
        (regime, complaint.or(granule(page_shift)))
    }

    fn x86(
        kind: Kind,
        root: u64,
        tag: u16,
        five_levels: bool,
        flags: bool,
        features: Features,
        page_shift: u32,
    ) -> Self {
        Self {
            kind,
            root,
            vmid: tag,
            page_shift,
            start: if five_levels { -1 } else { 0 },
            input_bits: if five_levels { 52 } else { 48 },
            output_bits: features.address_bits,
            ds: false,
            hardware_access: flags,
            hardware_dirty: flags,
            features,
            consistent: page_shift == PAGE_SHIFT,
        }
    }
}

fn granule(page_shift: u32) -> Option<&'static str> {
    (page_shift != PAGE_SHIFT).then_some("x86 has no tables but of 4 KiB")
}
