//! Guests and CPUs that do nothing any more: after some time the machine is given up.

use core::sync::atomic::Ordering;

use slat_metal::program::Mailbox;

use crate::arch::{Arch, Here};
use crate::console;

/// Watches one vCPU's program.
pub(crate) struct Watchdog {
    mailbox: &'static Mailbox,
    /// Ticks that it may take from one touch to the next.
    patience: u64,
    completed: u64,
    deadline: u64,
}

impl Watchdog {
    pub(crate) fn new(mailbox: &'static Mailbox, seconds: u64) -> Self {
        let patience = seconds * Here::ticks_per_second();
        Self { mailbox, patience, completed: 0, deadline: 0 }
    }

    /// The guest is entered with something to do.
    pub(crate) fn start(&mut self) {
        self.deadline = Here::ticks() + self.patience;
        Here::set_alarm(self.patience / 4);
    }

    /// An interrupt has come, perhaps the alarm.
    pub(crate) fn look(&mut self) {
        let (now, completed) = (Here::ticks(), self.mailbox.completed.load(Ordering::Relaxed));
        if completed != self.completed {
            self.completed = completed;
            self.deadline = now + self.patience;
        } else if now > self.deadline {
            console::fail(format_args!("the guest hangs after {completed} touches"));
        }
        Here::set_alarm(self.patience / 4);
    }
}

/// Waits until `done`, but no longer than so many seconds.
pub(crate) fn wait_for(seconds: u64, what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Here::ticks() + seconds * Here::ticks_per_second();
    while !done() {
        if Here::ticks() > deadline {
            console::fail(format_args!("{what}: nothing for {seconds} s"));
        }
        core::hint::spin_loop();
    }
}
