//! What goes to standard output: one JSON object, or text; and lists that were asked for.

use std::fmt::Display;
use std::io::{self, Write};

use serde::Serialize;

use crate::check::Findings;
use crate::exits::Exits;
use crate::failure::Failure;
use crate::options::{OrHelp, OutputOptions};
use crate::report::{Counts, Report};
use crate::table;

/// A report with what its phases have together.
#[derive(Serialize)]
struct Whole<'a, T> {
    #[serde(flatten)]
    report: &'a T,
    #[serde(skip_serializing_if = "Option::is_none")]
    exits: Option<Exits>,
}

/// Prints a report as it was asked for.
///
/// # Errors
/// [`Failure::Output`], or [`Failure::Check`] if the report's check found something.
pub(crate) fn print<C: Serialize + Display, R: Serialize, F: Findings, N: Counts>(
    report: &Report<C, R, F, N>,
    options: &OutputOptions,
) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    if options.json {
        let whole = Whole { report, exits: report.exits() };
        serde_json::to_writer(&mut out, &whole).map_err(io::Error::from)?;
        writeln!(out)?;
    } else {
        writeln!(out, "slat {}: {}", report.workload, report.config)?;
        table::print(&mut out, report)?;
    }
    out.flush()?;
    match &report.check {
        Some(check) if !check.is_clean() => Err(Failure::Check),
        _ => Ok(()),
    }
}

/// The value that was chosen, or `None` after `list` was printed because `help` was.
///
/// # Errors
/// [`Failure::Output`].
pub(crate) fn chosen<T: Copy>(
    choice: OrHelp<T>,
    list: impl FnOnce() -> String,
) -> Result<Option<T>, Failure> {
    match choice {
        OrHelp::Value(value) => Ok(Some(value)),
        OrHelp::Help => {
            line(&list())?;
            Ok(None)
        }
    }
}

/// Prints a text that was asked for.
///
/// # Errors
/// [`Failure::Output`].
pub(crate) fn line(text: &str) -> Result<(), Failure> {
    Ok(writeln!(io::stdout().lock(), "{text}")?)
}
