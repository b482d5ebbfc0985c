//! What this CPU can do, by CPUID, and the guest's tables that fit it.

use core::arch::x86_64::__cpuid;

use slat::format::npt::Npt;

use super::guest_tables;
use crate::arch::Wanted;

const EXTENDED: u32 = 0x8000_0001;
const ADDRESS_SIZES: u32 = 0x8000_0008;
const SVM: u32 = 0x8000_000a;

/// Guests on nested tables (Fn8000_0001_ECX\[2\], Fn8000_000A_EDX\[0\]).
pub(super) fn runs_guests() -> bool {
    __cpuid(EXTENDED).ecx >> 2 & 1 == 1 && __cpuid(SVM).edx & 1 == 1
}

/// `vmrun` can flush the translations of one ASID (Fn8000_000A_EDX\[6\]).
pub(super) fn flushes_by_asid() -> bool {
    __cpuid(SVM).edx >> 6 & 1 == 1
}

pub(super) fn format(wanted: Wanted) -> Result<Npt, &'static str> {
    if !runs_guests() {
        return Err("this CPU runs no guests on nested tables: -cpu max,+svm,+npt");
    }
    if wanted.hardware_access == Some(false) {
        return Err("hardware-access=off: x86 always sets the access flag");
    }
    if wanted.address_bits > guest_tables::ADDRESS_BITS {
        return Err("ipa-bits: at most 40, which guests here map for themselves");
    }
    let gigabytes = __cpuid(EXTENDED).edx >> 26 & 1 == 1;
    let format = Npt::new(wanted.address_bits).map_err(|_| "ipa-bits: at least 40")?;
    let output_bits = __cpuid(ADDRESS_SIZES).eax & 0xff;
    let format = format.with_output_bits(output_bits).map_err(|_| "addresses too wide for NPT")?;
    Ok(format.with_gigabyte_blocks(gigabytes).with_hardware_dirty(wanted.hardware_dirty))
}
