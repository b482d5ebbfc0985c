//! Which features of the CPU a guest is told of: those that need nothing of the hypervisor.
//!
//! Hidden is what has state that would have to be switched or memory that would have to be tagged (SVE, SME, MTE), what
//! EL2 would have to configure (pointer authentication, performance monitors, tracing, profiling, activity monitors,
//! memory partitioning), and EL2 itself.

/// An identification register, `CRm` and `op2` of `S3_0_C0_CRm_op2`.
pub type Register = (u64, u64);

const PFR0: Register = (4, 0);
const PFR1: Register = (4, 1);
const ZFR0: Register = (4, 4);
const SMFR0: Register = (4, 5);
const DFR0: Register = (5, 0);
const ISAR1: Register = (6, 1);
const ISAR2: Register = (6, 2);

/// Fields of four bits, by their lowest (Arm ARM, D24.2).
const HIDDEN: [(Register, &[u32]); 5] = [
    // EL2, SVE, MPAM, AMU.
    (PFR0, &[8, 32, 40, 44]),
    // MTE, MPAM_frac, SME, MTE_frac, MTEX.
    (PFR1, &[8, 16, 24, 40, 52]),
    // TraceVer, PMUVer, PMSS, PMSVer, TraceFilt, TraceBuffer, MTPMU, BRBE.
    (DFR0, &[4, 8, 16, 32, 40, 44, 48, 52]),
    // APA, API, GPA, GPI, LS64.
    (ISAR1, &[4, 8, 24, 28, 60]),
    // GPA3, APA3, MOPS.
    (ISAR2, &[8, 12, 16]),
];

/// What the guest reads of a register whose value on this CPU is `value`.
pub fn shown(register: Register, value: u64) -> u64 {
    if register == ZFR0 || register == SMFR0 {
        return 0;
    }
    let hidden = HIDDEN.iter().filter(|(hidden, _)| *hidden == register);
    hidden.flat_map(|(_, fields)| *fields).fold(value, |value, field| value & !(0xf << field))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_sees_no_state_that_nobody_switches_for_it() {
        let all = u64::MAX;
        assert_eq!(shown(PFR0, all) >> 32 & 0xf, 0);
        assert_eq!(shown(PFR1, all) >> 24 & 0xf, 0);
        assert_eq!(shown(ZFR0, all), 0);
        // Floating point and the interrupt controller are its own.
        assert_eq!(shown(PFR0, all) >> 16 & 0xfff, 0xfff);
    }

    #[test]
    fn what_is_not_hidden_is_shown_as_it_is() {
        assert_eq!(shown((7, 0), 0x1234), 0x1234);
    }
}
