//! QEMU's `virt`: console, device tree, and the firmware that starts CPUs and turns the machine off.
#![expect(
    unsafe_code,
    reason = "device registers, the firmware's call, and memory that the boot loader has filled"
)]

use core::arch::asm;
use core::ops::Range;

use dtoolkit::fdt::Fdt;
use dtoolkit::{Node, Property};

use crate::arch::{Boot, MAX_CPUS};

/// The data register of the PL011.
const UART_DATA: u64 = 0x0900_0000;
/// Where QEMU puts the device tree if the kernel is an ELF: at the beginning of memory.
const DEVICE_TREE: u64 = 0x4000_0000;

const SYSTEM_OFF: u64 = 0x8400_0008;
const CPU_ON: u64 = 0xc400_0003;

unsafe extern "C" {
    static __image_end: u8;
    fn _secondary();
}

pub(super) fn put(byte: u8) {
    // SAFETY: the register is there, mapped as device memory; QEMU takes bytes as fast as they come.
    unsafe { (UART_DATA as *mut u32).write_volatile(byte.into()) }
}

/// Calls the firmware (PSCI over SMC, Arm DEN 0022).
fn firmware(function: u64, arguments: [u64; 3]) -> i64 {
    let [a, b, c] = arguments;
    let result: i64;
    // SAFETY: the SMC calling convention lets the firmware change x0 to x17; it changes no memory of ours.
    unsafe {
        asm!("smc #0", inout("x0") function => result, inout("x1") a => _, inout("x2") b => _, inout("x3") c => _,
            lateout("x4") _, lateout("x5") _, lateout("x6") _, lateout("x7") _, lateout("x8") _, lateout("x9") _,
            lateout("x10") _, lateout("x11") _, lateout("x12") _, lateout("x13") _, lateout("x14") _, lateout("x15") _,
            lateout("x16") _, lateout("x17") _, options(nostack));
    }
    result
}

pub(super) fn power_off() -> ! {
    firmware(SYSTEM_OFF, [0; 3]);
    loop {
        core::hint::spin_loop();
    }
}

/// CPUs are numbered by the lowest affinity field, as QEMU does up to 8 of them.
pub(super) fn start_cpu(cpu: usize) -> Result<(), &'static str> {
    let entry = _secondary as *const () as u64;
    match firmware(CPU_ON, [cpu as u64, entry, cpu as u64]) {
        0 => Ok(()),
        -4 => Err("it runs already"),
        _ => Err("the firmware does not start it: is virtualization=on, and are there so many?"),
    }
}

/// The board's device tree.
pub(super) fn device_tree() -> Result<Fdt<'static>, &'static str> {
    // SAFETY: QEMU puts a device tree there; from here on nobody writes to it.
    let tree = unsafe { Fdt::from_raw(DEVICE_TREE as *const u8) };
    tree.map_err(|_| "no device tree at the start of memory")
}

/// What the device tree says.
pub(super) fn boot() -> Result<Boot, &'static str> {
    let tree = device_tree()?;
    let command_line = tree
        .find_node("/chosen")
        .and_then(|chosen| chosen.property("bootargs"))
        .and_then(|arguments| arguments.value_as::<&'static str>().ok());
    let cpus = tree.cpus().map_err(|_| "the device tree has no CPUs")?.cpus().count();
    let image_end = &raw const __image_end as u64;
    let memory = largest_memory(tree, image_end).ok_or("the device tree has no memory")?;
    Ok(Boot { memory, command_line: command_line.unwrap_or(""), cpus: cpus.min(MAX_CPUS) })
}

fn largest_memory(tree: Fdt<'_>, image_end: u64) -> Option<Range<u64>> {
    let memory = tree.memory().ok()?;
    let ranges = memory.reg().ok()??.filter_map(|reg| {
        let (start, size) = (reg.address::<u64>().ok()?, reg.size::<u64>().ok()?);
        let end = start.checked_add(size)?;
        // The image and the device tree lie in one of them, at its beginning.
        let start = if (start..end).contains(&image_end) { image_end } else { start };
        Some(start..end)
    });
    ranges.max_by_key(|range| range.end - range.start)
}
