//! The system counter, and one that counts instructions where they are what time is counted in.

use super::registers::{isb, read, write};

/// Ticks in a second of a counter that goes up once a nanosecond.
const NANOSECONDS: u64 = 1_000_000_000;

pub(super) fn ticks() -> u64 {
    isb();
    read!("CNTPCT_EL0")
}

#[inline(always)]
pub(super) fn ticks_per_second() -> u64 {
    read!("CNTFRQ_EL0")
}

/// The system counter where it is fine enough (Armv8.6 and later), otherwise the cycle counter: QEMU's goes up once a
/// nanosecond too. Where instructions are what time is counted in they are executed one after the other: no barrier.
#[inline(always)]
pub(super) fn instructions() -> u64 {
    if ticks_per_second() == NANOSECONDS { read!("CNTPCT_EL0") } else { read!("PMCCNTR_EL0") }
}

/// Lets the cycle counter run on this CPU, at EL1 and EL2.
pub(super) fn prepare() {
    // `ID_AA64DFR0_EL1.PMUVer`: none, or one that is no Arm PMU.
    let version = read!("ID_AA64DFR0_EL1") >> 8 & 0xf;
    if version == 0 || version == 0xf {
        return;
    }
    let (enable, long, reset, cycle_counter, at_el2) = (1, 1 << 6, 1 << 2, 1 << 31, 1 << 27);
    write!("PMCCFILTR_EL0", at_el2);
    write!("PMCNTENSET_EL0", cycle_counter);
    write!("PMCR_EL0", enable | long | reset);
    isb();
}
