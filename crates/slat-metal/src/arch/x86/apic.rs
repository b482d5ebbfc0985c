//! The local APIC (AMD APM vol. 2, chapter 16): interrupts from CPU to CPU, and an alarm.
#![expect(unsafe_code, reason = "device registers")]

use core::sync::atomic::{AtomicU32, Ordering};

/// Its registers, for the CPU that reads or writes them.
const BASE: u64 = 0xfee0_0000;
const IDENTIFIER: u64 = 0x20;
const SPURIOUS: u64 = 0xf0;
const COMMAND: u64 = 0x300;
const COMMAND_TARGET: u64 = 0x310;
const TIMER: u64 = 0x320;
const TIMER_INITIAL: u64 = 0x380;
const TIMER_CURRENT: u64 = 0x390;
const TIMER_DIVIDE: u64 = 0x3e0;
/// What a handler writes to when it is done.
pub(super) const END_OF_INTERRUPT: u64 = BASE + 0xb0;

const ENABLED: u32 = 1 << 8;
/// Delivery modes, with "assert".
const FIXED: u32 = 1 << 14;
const INIT: u32 = 1 << 14 | 5 << 8;
const START_UP: u32 = 1 << 14 | 6 << 8;
const SENDING: u32 = 1 << 12;
/// The slowest: so a count of 32 bits lasts for minutes.
const DIVIDE_BY_128: u32 = 0b1010;

/// The vector of kicks and alarms, and of interrupts that are withdrawn.
pub(super) const KICK: u8 = 0xf0;
pub(super) const SPURIOUS_VECTOR: u8 = 0xff;

fn register(offset: u64) -> &'static AtomicU32 {
    // SAFETY: the registers are there, mapped, and behave as words that somebody else changes at any time.
    unsafe { &*((BASE + offset) as *const AtomicU32) }
}

pub(super) fn own_identifier() -> u8 {
    (register(IDENTIFIER).load(Ordering::Relaxed) >> 24) as u8
}

/// Lets this CPU get interrupts.
pub(super) fn enable() {
    register(SPURIOUS).store(ENABLED | u32::from(SPURIOUS_VECTOR), Ordering::Relaxed);
    register(TIMER).store(KICK.into(), Ordering::Relaxed);
    register(TIMER_DIVIDE).store(DIVIDE_BY_128, Ordering::Relaxed);
}

/// Interrupts this CPU when its timer has counted so far.
pub(super) fn set_alarm(count: u32) {
    register(TIMER_INITIAL).store(count, Ordering::Relaxed);
}

/// How far the alarm is away.
pub(super) fn until_alarm() -> u32 {
    register(TIMER_CURRENT).load(Ordering::Relaxed)
}

fn send(target: u8, command: u32) {
    register(COMMAND_TARGET).store(u32::from(target) << 24, Ordering::Relaxed);
    register(COMMAND).store(command, Ordering::Release);
    while register(COMMAND).load(Ordering::Relaxed) & SENDING != 0 {
        core::hint::spin_loop();
    }
}

/// Interrupts a CPU so that it leaves its guest.
pub(super) fn kick(target: u8) {
    send(target, FIXED | u32::from(KICK));
}

/// Resets a CPU; it waits for `start_up`.
pub(super) fn initialise(target: u8) {
    send(target, INIT);
}

/// Starts it in real mode at the beginning of this page.
pub(super) fn start_up(target: u8, page: u8) {
    send(target, START_UP | u32::from(page));
}
