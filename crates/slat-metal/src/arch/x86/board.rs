//! QEMU's `q35`: console, memory, clock, power, and how the other CPUs start.
#![expect(
    unsafe_code,
    reason = "code that is copied to where CPUs start, and the linker's symbols"
)]

use core::sync::atomic::{AtomicU32, Ordering};

use spin::Once;

use super::firmware::{Board, StartInfo};
use super::registers::{read_port_8, read_port_32, time_stamp, write_port_8, write_port_16};
use super::{TRAMPOLINE, apic};
use crate::arch::Boot;

/// The first serial port.
const SERIAL_DATA: u16 = 0x3f8;
const SERIAL_STATUS: u16 = 0x3fd;
const SERIAL_EMPTY: u8 = 1 << 5;
/// Masks of the two interrupt controllers of old, whose timer runs when firmware has been there.
const OLD_MASKS: [u16; 2] = [0x21, 0xa1];
/// QEMU's `isa-debug-exit`, if it was asked for: ends it with status `2 * value + 1`.
const DEBUG_EXIT: u16 = 0xf4;
/// SLP_EN, and the sleep type of "off" on this board, 0.
const POWER_OFF: u16 = 1 << 13;
/// The power-management timer (ACPI specification 6.5, 4.8.3.3): 24 bits are always there.
const TIMER_RATE: u64 = 3_579_545;
const TIMER_MASK: u32 = 0xff_ffff;
/// How often a CPU is told to start, a second each: under emulation it may have to wait for its turn.
const START_ATTEMPTS: u32 = 10;
/// Readings of the clocks of which the quickest counts.
const READINGS: u32 = 16;
/// Time enough to calibrate the time-stamp counter by: 5 ms.
const CALIBRATION: u32 = 17_898;

/// Counts in a second.
struct Clocks {
    ticks: u64,
    alarm: u64,
}

unsafe extern "C" {
    static __image_end: u8;
    static trampoline: u8;
    static trampoline_end: u8;
}

static BOARD: Once<Board> = Once::new();
static CLOCKS: Once<Clocks> = Once::new();
/// Number of the CPU that is being started; 0 once it has come up.
pub(super) static STARTING: AtomicU32 = AtomicU32::new(0);

pub(super) fn put(byte: u8) {
    while read_port_8(SERIAL_STATUS) & SERIAL_EMPTY == 0 {
        core::hint::spin_loop();
    }
    write_port_8(SERIAL_DATA, byte);
}

/// The machine goes off some time after the request: nothing may follow it.
pub(super) fn power_off(failed: bool) -> ! {
    match BOARD.get() {
        Some(board) if !failed => write_port_16(board.control, POWER_OFF),
        _ => write_port_8(DEBUG_EXIT, 1),
    }
    loop {
        core::hint::spin_loop();
    }
}

/// What the boot loader has left at this address, and what firmware says.
pub(super) fn boot(start_info: u64) -> Result<Boot, &'static str> {
    OLD_MASKS.iter().for_each(|&port| write_port_8(port, u8::MAX));
    let info = StartInfo::new(start_info).ok_or("not started by PVH, or without a memory map")?;
    let board = info.board().ok_or("no CPUs, or no timer, in ACPI's tables")?;
    let board = BOARD.call_once(|| board);
    if apic::own_identifier() != board.apics[0] {
        return Err("the first CPU of ACPI's tables is not the one that was started");
    }
    CLOCKS.call_once(|| calibrate(board.timer));
    let memory = info.largest_memory(&raw const __image_end as u64);
    let memory = memory.ok_or("no memory above the image")?;
    Ok(Boot { memory, command_line: info.command_line().unwrap_or(""), cpus: board.cpus })
}

pub(super) fn ticks_per_second() -> u64 {
    CLOCKS.get().map_or(0, |clocks| clocks.ticks)
}

/// How often in a second the time-stamp counter counts, and the timer of alarms: by the timer whose rate is known.
fn calibrate(timer: u16) -> Clocks {
    apic::set_alarm(u32::MAX);
    let before = Reading::take(timer);
    loop {
        let after = Reading::take(timer);
        let passed = after.timer.wrapping_sub(before.timer) & TIMER_MASK;
        if passed >= CALIBRATION {
            apic::set_alarm(0);
            let per_second = |count: u64| count * TIMER_RATE / u64::from(passed);
            let alarm = u64::from(before.alarm - after.alarm);
            return Clocks {
                ticks: per_second(after.ticks - before.ticks),
                alarm: per_second(alarm),
            };
        }
    }
}

/// All clocks at one moment.
struct Reading {
    timer: u32,
    alarm: u32,
    ticks: u64,
    /// Ticks that it took.
    took: u64,
}

impl Reading {
    /// The quickest of several: an emulated CPU may lose its turn in the midst of one.
    fn take(timer: u16) -> Self {
        let read = |_| {
            let ticks = time_stamp();
            let (timer, alarm) = (read_port_32(timer), apic::until_alarm());
            Self { timer, alarm, ticks, took: time_stamp() - ticks }
        };
        let first = read(0);
        (1..READINGS)
            .map(read)
            .fold(first, |best, next| if next.took < best.took { next } else { best })
    }
}

/// Interrupts this CPU after so many ticks of the time-stamp counter.
pub(super) fn set_alarm(ticks: u64) {
    let Some(&Clocks { ticks: rate, alarm }) = CLOCKS.get() else { return };
    let count = u128::from(ticks) * u128::from(alarm) / u128::from(rate.max(1));
    apic::set_alarm(u32::try_from(count).unwrap_or(u32::MAX).max(1));
}

/// The local APIC of a CPU.
pub(super) fn apic_of(cpu: usize) -> Option<u8> {
    let board = BOARD.get()?;
    board.apics.get(..board.cpus)?.get(cpu).copied()
}

/// Starts a CPU as the Intel SDM says (vol. 3, 10.4.4 "MP Initialization Example"), and waits until it is up.
pub(super) fn start_cpu(cpu: usize) -> Result<(), &'static str> {
    let apic = apic_of(cpu).ok_or("there are not so many CPUs")?;
    let code = &raw const trampoline;
    let size = &raw const trampoline_end as usize - code as usize;
    // SAFETY: the page is below what the memory map gives to anybody; no CPU is starting there now.
    unsafe { core::ptr::copy_nonoverlapping(code, TRAMPOLINE as *mut u8, size) }
    STARTING.store(cpu as u32, Ordering::SeqCst);
    apic::initialise(apic);
    wait(10_000, || false);
    for _ in 0..START_ATTEMPTS {
        apic::start_up(apic, (TRAMPOLINE >> 12) as u8);
        if wait(1_000_000, || STARTING.load(Ordering::Acquire) == 0) {
            return Ok(());
        }
    }
    Err("it does not come up")
}

/// The CPU that was started says that it is up.
pub(super) fn has_started() {
    STARTING.store(0, Ordering::Release);
}

/// Waits for something, at most so many microseconds; tells whether it has come.
fn wait(microseconds: u64, mut done: impl FnMut() -> bool) -> bool {
    let end = time_stamp() + ticks_per_second() / 1_000_000 * microseconds;
    loop {
        if done() {
            return true;
        }
        if time_stamp() > end {
            return false;
        }
        core::hint::spin_loop();
    }
}
