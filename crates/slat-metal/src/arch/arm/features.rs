//! What this CPU can do, by its ID registers, and the guest's tables that fit it.

use slat::format::arm::{K4, Stage2};
use slat::maintenance::Features;

use super::registers::read;
use crate::arch::Wanted;

fn field(register: u64, shift: u32) -> u64 {
    register >> shift & 0xf
}

/// `ID_AA64MMFR1_EL1.HAFDBS`: 1, hardware sets the access flag; 2, and dirty state.
fn hardware_updates() -> u64 {
    field(read!("ID_AA64MMFR1_EL1"), 0)
}

/// FEAT_S2FWB.
fn forced_write_back() -> bool {
    field(read!("ID_AA64MMFR2_EL1"), 40) >= 1
}

/// FEAT_VMID16.
fn wide_vmids() -> bool {
    field(read!("ID_AA64MMFR1_EL1"), 4) >= 2
}

/// Bits of physical addresses.
fn output_bits() -> u32 {
    match field(read!("ID_AA64MMFR0_EL1"), 0) {
        0 => 32,
        1 => 36,
        2 => 40,
        3 => 42,
        4 => 44,
        _ => 48,
    }
}

pub(super) fn format(wanted: Wanted) -> Result<Stage2<K4>, &'static str> {
    let has_access = hardware_updates() >= 1;
    if wanted.hardware_access == Some(true) && !has_access {
        return Err("hardware-access=on: this CPU does not set the access flag");
    }
    if wanted.hardware_dirty && hardware_updates() < 2 {
        return Err("log=hardware: this CPU keeps no dirty state");
    }
    if wanted.address_bits > output_bits() {
        return Err("ipa-bits: more than this CPU has physical address bits");
    }
    let format = Stage2::new(wanted.address_bits).map_err(|_| "ipa-bits: from 32 to 48")?;
    let format = format
        .with_output_bits(output_bits())
        .map_err(|_| "addresses of a width that stage 2 has not")?;
    Ok(format
        .with_fwb(forced_write_back())
        .with_hardware_access(wanted.hardware_access.unwrap_or(has_access))
        .with_hardware_dirty(wanted.hardware_dirty))
}

/// `VTCR_EL2` for tables of this format on this CPU.
pub(super) fn vtcr(format: &Stage2<K4>) -> u64 {
    let vs = 1 << 19;
    if wide_vmids() { format.vtcr() } else { format.vtcr() & !vs }
}

/// `HCR_EL2.FWB`, if the guest's memory is forced to be write-back.
pub(super) fn hcr_fwb() -> u64 {
    u64::from(forced_write_back()) << 46
}

pub(super) fn coherent_data() -> bool {
    forced_write_back()
}

/// `CTR_EL0.DIC`.
pub(super) fn coherent_instructions() -> bool {
    read!("CTR_EL0") >> 29 & 1 == 1
}

pub(super) fn translation() -> Features {
    Features {
        tlb_range: field(read!("ID_AA64ISAR0_EL1"), 56) >= 2,
        ttl: field(read!("ID_AA64MMFR2_EL1"), 48) >= 1,
        bbm_level: field(read!("ID_AA64MMFR2_EL1"), 52) as u8,
    }
}
