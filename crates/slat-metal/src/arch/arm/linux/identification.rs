//! Identification registers: the guest's reads of them trap, and it is told what `features` shows.
#![expect(unsafe_code, reason = "the instructions that read them")]

use crate::arch::arm::registers::read_by_number;
use slat_metal::linux::features;

/// What a guest reads of the register of this trap; `None` if the trap is of another register, or of a write.
pub(super) fn read(syndrome: u64) -> Option<(usize, u64)> {
    let field = |shift: u32, bits: u32| syndrome >> shift & ((1 << bits) - 1);
    let (op0, op2, op1, crn) = (field(20, 2), field(17, 3), field(14, 3), field(10, 4));
    let (target, crm, reads) = (field(5, 5), field(1, 4), field(0, 1) == 1);
    if !reads || (op0, op1, crn) != (3, 0, 0) {
        return None;
    }
    Some((target as usize, features::shown((crm, op2), value(crm, op2)?)))
}

/// `S3_0_C0_CRm_op2` of this CPU.
fn value(crm: u64, op2: u64) -> Option<u64> {
    macro_rules! of {
        ($($crm:literal: $($op2:literal)+;)+) => {
            match (crm, op2) {
                $($(($crm, $op2) => Some(read_by_number!("S3_0_C0_C", $crm, "_", $op2)),)+)+
                _ => None,
            }
        };
    }
    of! {
        1: 0 1 2 3 4 5 6 7;
        2: 0 1 2 3 4 5 6 7;
        3: 0 1 2 3 4 5 6 7;
        4: 0 1 2 3 4 5 6 7;
        5: 0 1 2 3 4 5 6 7;
        6: 0 1 2 3 4 5 6 7;
        7: 0 1 2 3 4 5 6 7;
    }
}
