//! The `slat` command: which workload is asked for, and with which status it ends.

use std::ffi::OsString;
use std::io::{self, Write};
use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod ab;
mod arch;
mod around;
mod backend;
mod backing;
mod check;
mod compare;
mod config;
mod contents;
mod crew;
mod exits;
mod explain;
mod failure;
mod granule;
mod guest;
mod guest_mode;
#[cfg_attr(not(all(target_os = "linux", target_arch = "x86_64")), path = "elsewhere.rs")]
mod kvm;
mod layout;
mod metal;
mod model;
mod options;
mod output;
mod page;
mod pinning;
mod progress;
mod random;
mod report;
mod repro;
mod shadowed;
mod size;
mod soak;
mod stage;
mod table;
mod trace;
mod translations;
mod virtual_time;
mod workload;

use failure::Failure;
use workload::Workload;

/// Runs the workloads of KVM's own tests on slat, and measures.
#[derive(Debug, Parser)]
#[command(name = "slat", version, arg_required_else_help = true)]
struct Line {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    #[command(flatten)]
    Workload(Workload),

    /// Everything at once under the rule checker, until the time is over or something is found
    #[command(after_long_help = soak::LONG_HELP, args_override_self = true, allow_negative_numbers = true)]
    Soak(Box<soak::Options>),

    /// One line for each workload: its name, the kernel's test that it follows, what it does
    List,

    /// Published tables beside what virtual time gives: status 1 if a claimed cell is out of tolerance
    #[command(after_long_help = repro::LONG_HELP)]
    Repro(repro::Options),

    /// Where the virtual time of one fault goes, by cause: a workload with its options, in virtual time
    #[command(after_long_help = explain::LONG_HELP)]
    Explain {
        #[command(subcommand)]
        workload: Workload,
    },

    /// One page for a browser: what `repro` prints, plots of it, and where time goes
    #[command(after_long_help = page::LONG_HELP)]
    Report(page::Options),

    /// What changed from one file of a workload's results to another, ready for a mail
    #[command(after_long_help = compare::LONG_HELP)]
    Compare(compare::Options),

    /// What this host's KVM offers: capabilities, modules and their parameters, limits, statistics, huge pages
    KvmInfo,

    /// Runs a workload in two ways by turns and compares them: `slat ab --design X --vs Y WORKLOAD ...`
    #[command(after_long_help = ab::LONG_HELP)]
    Ab(ab::Options),

    /// The designs that virtual time knows, what each of them chooses, and the machines
    #[command(after_long_help = virtual_time::FILES)]
    Designs,
}

/// Does what the arguments of this process ask for.
pub fn main() -> ExitCode {
    let done = match Line::parse().command {
        Command::Workload(workload) => workload.run(),
        Command::Soak(options) => soak::run(&options),
        Command::List => output::line(&workload::list()),
        Command::Repro(options) => repro::run(&options),
        Command::Explain { workload } => workload.explain(),
        Command::Report(options) => page::run(&options),
        Command::Compare(options) => compare::run(&options),
        Command::KvmInfo => kvm::print_info(),
        Command::Ab(options) => ab::run(&options),
        Command::Designs => virtual_time::list().and_then(|text| output::line(&text)),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) if failure.is_closed_pipe() => ExitCode::FAILURE,
        Err(failure) => {
            complain(&failure);
            failure.status()
        }
    }
}

/// Whether the command understands these arguments, the first of which is its name; nothing is run.
///
/// # Errors
/// What it would print and end with instead: what is wrong, or the help or version that was asked for.
pub fn parse<A>(arguments: impl IntoIterator<Item = A>) -> Result<(), String>
where
    A: Into<OsString> + Clone,
{
    Line::try_parse_from(arguments).map(|_| ()).map_err(|refusal| refusal.to_string())
}

/// Says on standard error what went wrong; if nobody listens, the status still tells.
fn complain(failure: &Failure) {
    let _ = writeln!(io::stderr(), "error: {failure}");
}
