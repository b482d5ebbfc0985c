//! Arm: publish and invalidate at EL2 (Arm ARM DDI 0487, D8.17 "TLB maintenance").

use crate::machine::Machine;
use crate::maintenance::{Context, Instruction, Invalidation, Maintenance};
use crate::{Gpa, Hpa};

/// The sequences of Armv8-A and later.
#[derive(Clone, Copy, Debug)]
pub struct Arm;

impl Maintenance for Arm {
    fn publish<M: Machine>(machine: &M) {
        machine.execute(Instruction::DsbIshst);
    }

    fn invalidate<M: Machine>(machine: &M, context: &Context, what: Invalidation) {
        machine.execute(Instruction::DsbIshst);
        machine.execute(Instruction::EnterContext(context.root));
        match what.range {
            Some(range) if range.size() <= 64 << context.page_shift => {
                let mut ipa = range.start().0;
                while ipa < range.end().0 {
                    machine.execute(Instruction::TlbiIpas2e1is {
                        ipa: Gpa(ipa),
                        page_shift: context.page_shift,
                        level: what.level,
                    });
                    ipa += 1 << context.page_shift;
                }
                machine.execute(Instruction::DsbIsh);
                machine.execute(Instruction::TlbiVmalle1is);
            }
            _ => machine.execute(Instruction::TlbiVmalls12e1is),
        }
        machine.execute(Instruction::DsbIsh);
        machine.execute(Instruction::Isb);
        machine.execute(Instruction::LeaveContext);
    }

    fn invalidate_local<M: Machine>(machine: &M, context: &Context, gpa: Gpa) {
        machine.execute(Instruction::DsbNshst);
        machine.execute(Instruction::EnterContext(context.root));
        machine.execute(Instruction::TlbiIpas2e1 {
            ipa: gpa,
            page_shift: context.page_shift,
            level: None,
        });
        machine.execute(Instruction::DsbNsh);
        machine.execute(Instruction::TlbiVmalle1);
        machine.execute(Instruction::DsbNsh);
        machine.execute(Instruction::Isb);
        machine.execute(Instruction::LeaveContext);
    }

    fn root(table: Hpa, identifier: u16) -> u64 {
        table.0 | u64::from(identifier) << 48
    }
}
