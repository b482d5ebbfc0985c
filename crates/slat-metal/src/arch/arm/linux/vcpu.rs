//! A vCPU that runs Linux: what EL1 begins with, and what is done each time that it leaves.

use core::sync::atomic::Ordering::SeqCst;

use slat_metal::linux::exits::Reason;
use slat_vm::{Access, Exit, Fault, FaultKind};

use super::psci::{self, Call};
use super::{Guest, RAM, Start, identification};
use crate::arch::arm::guest::{self, Vcpu};
use crate::arch::arm::registers::{isb, write};
use crate::arch::arm::{RESIDENT, SCTLR_RESET, features};
use crate::arch::{Arch, Here, Left};
use crate::console;

/// `HCR_EL2`: EL1 is AArch64; stage 2 on; calls of the firmware and reads of identification registers come here. Interrupts
/// go to EL1, whose own the interrupt controller is, and waiting for them too.
const HCR: u64 = 1 << 31 | 1 << 19 | 1 << 18 | 1 << 1 | 1;
/// `ICC_SRE_EL2`: EL1 uses the interrupt controller by system registers.
const SYSTEM_REGISTERS: u64 = 0xf;

type Memory<'a> = slat_vm::Vcpu<'a, crate::machine::Metal>;

/// What goes on after an exit.
enum Next {
    Enter,
    Stop,
    Off,
}

/// Runs the vCPU of this CPU, whenever the guest has started it, until the guest ends.
pub(super) fn run(guest: &'static Guest, number: usize) -> ! {
    let mut memory = match guest.vm.vcpu() {
        Ok(memory) => memory,
        Err(why) => console::fail(format_args!("no vCPU: {why}")),
    };
    prepare(guest);
    loop {
        let Start { entry, context } = guest.wait_for_start(number);
        write!("SCTLR_EL1", SCTLR_RESET);
        let mut registers = Vcpu::at(entry, context);
        loop {
            let syndrome = registers.run();
            let left = Here::ticks();
            let (reason, leaves, next) =
                handle(guest, number, &mut memory, &mut registers, syndrome);
            guest.vcpus[number].exits.lock().note(reason, Here::ticks() - left, leaves);
            match next {
                Next::Enter => {}
                Next::Stop => break,
                Next::Off => guest.finish(),
            }
        }
        guest.vcpus[number].on.store(false, SeqCst);
    }
}

/// What a CPU needs before it runs this guest, besides what it has since it came up.
fn prepare(guest: &Guest) {
    let root = guest.vm.tree().root_register();
    RESIDENT.store(root, SeqCst);
    write!("VTCR_EL2", features::vtcr(guest.vm.tree().format()));
    write!("VTTBR_EL2", root);
    write!("HCR_EL2", HCR | features::hcr_fwb());
    write!("ICC_SRE_EL2", SYSTEM_REGISTERS);
    isb();
    // No interrupt is made up for the guest.
    write!("ICH_HCR_EL2", 0);
    isb();
}

fn handle(
    guest: &Guest,
    number: usize,
    memory: &mut Memory<'_>,
    registers: &mut Vcpu,
    syndrome: u64,
) -> (Reason, u64, Next) {
    const HVC: u64 = 0x16;
    const SMC: u64 = 0x17;
    const SYSTEM_REGISTER: u64 = 0x18;
    const INSTRUCTION_ABORT: u64 = 0x20;
    const DATA_ABORT: u64 = 0x24;
    match syndrome >> 26 & 0x3f {
        HVC => (Reason::Firmware, 0, firmware(guest, registers)),
        SMC => {
            registers.elr += 4;
            (Reason::Firmware, 0, firmware(guest, registers))
        }
        SYSTEM_REGISTER => match identification::read(syndrome) {
            Some((target, value)) => {
                // Register 31 is none.
                if let Some(register) = registers.x.get_mut(target) {
                    *register = value;
                }
                registers.elr += 4;
                (Reason::Identification, 0, Next::Enter)
            }
            None => unknown(registers, syndrome),
        },
        class @ (INSTRUCTION_ABORT | DATA_ABORT) => match guest::kind(syndrome) {
            Some(kind) => match guest::fault(syndrome, kind, class == INSTRUCTION_ABORT) {
                Left::Fault(fault) => {
                    let (reason, leaves) = handle_fault(guest, number, memory, fault);
                    (reason, leaves, Next::Enter)
                }
                // The guest's own translation has changed meanwhile: it does it again.
                _ => (Reason::Gone, 0, Next::Enter),
            },
            None => unknown(registers, syndrome),
        },
        _ => unknown(registers, syndrome),
    }
}

fn unknown(registers: &Vcpu, syndrome: u64) -> ! {
    console::fail(format_args!(
        "the guest did what this hypervisor does not know: ESR_EL2 {syndrome:#x} at {:#x}",
        registers.elr
    ))
}

/// A fault of stage 2, and how many leaves were mapped for it.
fn handle_fault(
    guest: &Guest,
    number: usize,
    memory: &mut Memory<'_>,
    fault: Fault,
) -> (Reason, u64) {
    let reason = match (fault.kind, fault.access) {
        (FaultKind::Translation, _) => Reason::Translation,
        (FaultKind::AccessFlag, _) => Reason::AccessFlag,
        (FaultKind::Permission, Access::Execute) => Reason::Execute,
        (FaultKind::Permission, _) => Reason::Write,
    };
    let writes = fault.access == Access::Write;
    if writes {
        guest.count_write(number);
    }
    let before = *memory.statistics();
    let result = memory.fault(&guest.vm, fault);
    if writes {
        guest.count_write(number);
    }
    guest.note_walks(memory.participant(), memory.statistics().collapsed);
    match result {
        Ok(Exit::Resume) => {}
        Ok(Exit::Retry) => return (reason, 0),
        Ok(other) => {
            console::fail(format_args!("the guest's {fault:x?} is not its memory: {other:x?}"))
        }
        Err(why) => console::fail(format_args!("{fault:x?}: {why}")),
    }
    if guest.options.touches && fault.kind == FaultKind::Translation {
        let page = fault.gpa.0.checked_sub(RAM).map(|offset| offset / super::memory::PAGE);
        if let Some(page) = page {
            guest.touches.lock().touch(page, writes);
        }
    }
    let after = memory.statistics();
    (reason, after.fixed - before.fixed + after.ahead - before.ahead)
}

fn firmware(guest: &Guest, registers: &mut Vcpu) -> Next {
    registers.x[0] = match psci::call(&registers.x) {
        Call::Answer(answer) => answer,
        Call::Start { vcpu, entry, context } => guest.start_vcpu(vcpu, Start { entry, context }),
        Call::IsOff { vcpu } => guest.is_off(vcpu),
        Call::Stop => return Next::Stop,
        Call::Off => return Next::Off,
    }
    .cast_unsigned();
    Next::Enter
}
