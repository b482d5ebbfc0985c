//! GICv3, as far as a hypervisor needs it that has two interrupts of its own: a kick from another CPU, and an alarm.
//! (Arm IHI 0069.) Interrupts stay masked at EL2; they only make guests leave.
#![expect(unsafe_code, reason = "device registers")]

use super::registers::{isb, read, write};

/// On QEMU's `virt`: registers of the distributor, and of each CPU's redistributor.
const DISTRIBUTOR: u64 = 0x0800_0000;
const REDISTRIBUTORS: u64 = 0x080a_0000;
const REDISTRIBUTOR_SIZE: u64 = 0x2_0000;

/// Software-generated, to another CPU.
const KICK: u64 = 0;
/// The EL2 physical timer's.
const ALARM: u64 = 26;

/// `GICD_CTLR`: affinity routing, and group 1.
const CONTROL: (u64, u32) = (0x0, 1 << 4 | 1 << 1);
const WAKER: u64 = 0x14;
const PROCESSOR_SLEEP: u32 = 1 << 1;
const CHILDREN_ASLEEP: u32 = 1 << 2;
/// `GICR_IGROUPR0` and `GICR_ISENABLER0`, in the second frame.
const GROUP: u64 = 0x1_0080;
const ENABLE: u64 = 0x1_0100;

fn device_read(at: u64) -> u32 {
    // SAFETY: a register of the GIC, mapped as device memory.
    unsafe { (at as *const u32).read_volatile() }
}

fn device_write(at: u64, value: u32) {
    // SAFETY: as in `device_read`.
    unsafe { (at as *mut u32).write_volatile(value) }
}

/// Lets this CPU have its interrupts.
pub(super) fn prepare(cpu: usize) -> Result<(), &'static str> {
    // `ID_AA64PFR0_EL1.GIC`
    if read!("ID_AA64PFR0_EL1") >> 24 & 0xf == 0 {
        return Err("no GICv3: QEMU has one with -M virt,virtualization=on,gic-version=3");
    }
    let (register, value) = CONTROL;
    device_write(DISTRIBUTOR + register, value);
    let redistributor = REDISTRIBUTORS + cpu as u64 * REDISTRIBUTOR_SIZE;
    let waker = device_read(redistributor + WAKER);
    device_write(redistributor + WAKER, waker & !PROCESSOR_SLEEP);
    while device_read(redistributor + WAKER) & CHILDREN_ASLEEP != 0 {
        core::hint::spin_loop();
    }
    device_write(redistributor + GROUP, u32::MAX);
    device_write(redistributor + ENABLE, 1 << KICK | 1 << ALARM);
    // System registers instead of memory-mapped ones, also for EL1.
    write!("ICC_SRE_EL2", 0b1111);
    isb();
    write!("ICC_PMR_EL1", 0xff);
    write!("ICC_IGRPEN1_EL1", 1);
    isb();
    Ok(())
}

/// Takes the interrupt that has made the guest leave.
pub(super) fn take() {
    let interrupt = read!("ICC_IAR1_EL1");
    if interrupt == ALARM {
        write!("CNTHP_CTL_EL2", 0);
        isb();
    }
    // 1020 and up are no interrupts.
    if interrupt < 1020 {
        write!("ICC_EOIR1_EL1", interrupt);
    }
}

/// Interrupts another CPU. They are numbered by the lowest affinity field.
pub(super) fn kick(cpu: usize) {
    write!("ICC_SGI1R_EL1", KICK << 24 | 1 << cpu);
    isb();
}

/// Interrupts this CPU after so many ticks of the system counter.
pub(super) fn set_alarm(ticks: u64) {
    write!("CNTHP_CVAL_EL2", read!("CNTPCT_EL0") + ticks);
    write!("CNTHP_CTL_EL2", 1);
    isb();
}
