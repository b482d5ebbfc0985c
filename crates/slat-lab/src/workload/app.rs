//! `slat app`: a guest touches what one touched that booted and ran an application.

pub(crate) use super::replay::{LONG_HELP, Options};
use crate::failure::Failure;
use crate::trace;

/// Runs the workload and prints its report.
///
/// # Errors
/// See [`Failure`].
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    super::replay::run("app", || Ok(trace::app()), options)
}
