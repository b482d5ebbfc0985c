//! Has somebody asked for the end, by Ctrl-C or `kill`? And the signal with which vCPUs are kicked.

use std::ffi::c_int;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};

use super::crew::Trouble;
use crate::failure::Failure;

static ASKED: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// What a shell says of a command that was interrupted.
const INTERRUPTED: c_int = 130;

/// From now on a request is noted, and a second one ends everything at once.
///
/// # Errors
/// [`Failure::Run`].
pub(crate) fn watch() -> Result<(), Failure> {
    if ASKED.get().is_some() {
        return Ok(());
    }
    let asked = ASKED.get_or_init(Arc::default);
    let register = || -> io::Result<()> {
        for signal in [SIGINT, SIGTERM] {
            flag::register_conditional_shutdown(signal, INTERRUPTED, Arc::clone(asked))?;
            flag::register(signal, Arc::clone(asked))?;
        }
        Ok(())
    };
    register().map_err(failed)
}

/// From now on the signal of kicks does no more than arrive.
///
/// # Errors
/// [`Failure::Run`].
pub(crate) fn let_kicks_arrive() -> Result<(), Failure> {
    register_signal_handler(SIGRTMIN(), ignore).map_err(|error| failed(error.into()))
}

fn failed(error: io::Error) -> Failure {
    Failure::Run(format!("signals: {error}"))
}

/// Whether it was asked for.
pub(crate) fn is_asked() -> bool {
    ASKED.get().is_some_and(|asked| asked.load(Ordering::Relaxed))
}

/// For what takes long and waits for no guest.
///
/// # Errors
/// [`Failure::Run`]: it was asked for.
pub(crate) fn check() -> Result<(), Failure> {
    if is_asked() { Err(Trouble::Interrupted.into()) } else { Ok(()) }
}

extern "C" fn ignore(_: c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}
