//! What the machine says, line by line.
//!
//! Lines begin with `slat: `, so that whoever reads them can tell them from what others print. See [`crate::protocol`].

use core::fmt::{self, Write};

use spin::Mutex;

use crate::arch::{Arch, Here};

struct Console;

/// So that lines of several CPUs do not mix.
static LINE: Mutex<()> = Mutex::new(());

impl Write for Console {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            if byte == b'\n' {
                Here::put(b'\r');
            }
            Here::put(byte);
        }
        Ok(())
    }
}

/// Prints a line.
pub(crate) fn line(text: fmt::Arguments<'_>) {
    let _line = LINE.lock();
    // The console fails for no text.
    let _ = writeln!(Console, "slat: {text}");
}

/// Prints a line whoever else is in the middle of one, for a CPU that cannot go on.
fn last_line(text: fmt::Arguments<'_>) {
    let _line = LINE.try_lock();
    let _ = writeln!(Console, "slat: {text}");
}

/// Prints why nothing goes on, and turns the machine off.
pub(crate) fn fail(why: fmt::Arguments<'_>) -> ! {
    last_line(format_args!("failed: cpu {}: {why}", Here::cpu()));
    Here::power_off(true)
}

#[panic_handler]
fn panic(info: &core::panic::PanicInfo<'_>) -> ! {
    fail(format_args!("{info}"))
}
