//! `slat repro`: tables that were mailed to the kernel's lists, beside what virtual time gives for the designs of that
//! time, and what slat's own design gives in the same cells.

use std::io::{self, Write};

use clap::{Args, ValueEnum};
use serde::Serialize;

use crate::failure::Failure;
use crate::options::OutputOptions;

mod cell;
mod faults;
mod forks;
mod prefetch;
mod published;
mod series;
mod walked;
mod walks;

pub(crate) use cell::{Cell, Section, SlatCell};
pub(crate) use faults::Scale;
pub(crate) use series::{Pass, Point, Series};

use published::Published;

/// What follows the options in `--help`.
pub(crate) const LONG_HELP: &str = "\
A cell is calibrated if a number of the machine's profile was adjusted to it (at most four a machine), fitted if that is \
all that is known of the machine, and predicted otherwise. Tolerances are per cent of seconds and of counts, and points of per cent. A \
cell that is out of tolerance for a reason has it beside it and is not claimed. slat's cells are intervals where the host's \
memory-map lock matters: kept .. gone.

--json prints {\"cells\": [{\"table\", \"cell\", \"unit\", \"published\", \"ours\", \"kind\", \"tolerance\", \"ok\", \
\"note\"}], \"slat\": [{\"table\", \"cell\", \"ours\", \"note\"}]}; \"ours\" of slat is a number, or [kept, gone]. Virtual \
time gives the same figures at every run, and so do the faults that trailing-prefetch counts; rmap-counter, which is \
measured on the real clock, is left out unless it is asked for.

Exit status: 0 done; 1 a claimed cell is out of tolerance; 2 the command makes no sense.";

/// Options of `repro`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// One table
    #[arg(long, value_enum, value_name = "NAME")]
    only: Option<Table>,

    /// Memory of the published size, instead of a part that takes seconds
    #[arg(long)]
    full: bool,

    #[command(flatten)]
    output: OutputOptions,
}

/// What can be asked for alone.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Table {
    ParallelFaults,
    SkipLevels,
    MoveBarrier,
    RmapCounter,
    TrailingPrefetch,
}

#[derive(Serialize)]
struct Report<'a> {
    cells: Vec<&'a Cell>,
    slat: Vec<&'a SlatCell>,
}

/// Reproduces what was asked for and prints it.
///
/// # Errors
/// [`Failure::Run`] if a claimed cell is out of tolerance; [`Failure::Output`].
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let tables = match &options.only {
        Some(table) => std::slice::from_ref(table),
        None => Table::value_variants(),
    };
    let scale = if options.full { Scale::FULL } else { Scale::SMALL };
    let published = Published::load()?;
    let mut out = io::stdout().lock();
    let mut sections = Vec::new();
    for table in tables {
        let done = table.reproduce(&published, scale, options.only.is_some())?;
        if !options.output.json {
            // Each table takes a while.
            for line in done.iter().flat_map(Section::lines) {
                writeln!(out, "{line}")?;
            }
            out.flush()?;
        }
        sections.extend(done);
    }
    if options.output.json {
        let cells = sections.iter().flat_map(|section| &section.cells).collect();
        let slat = sections.iter().flat_map(|section| &section.slat).collect();
        serde_json::to_writer(&mut out, &Report { cells, slat }).map_err(io::Error::from)?;
        writeln!(out)?;
    } else {
        writeln!(out, "{}", verdict(&sections))?;
    }
    out.flush()?;
    match missed(&sections) {
        0 => Ok(()),
        1 => Err(Failure::Run("a claimed cell is out of tolerance".to_owned())),
        count => Err(Failure::Run(format!("{count} claimed cells are out of tolerance"))),
    }
}

/// Everything that is published, and ours.
///
/// # Errors
/// A run broke off, or what is built in is wrong.
pub(crate) fn all(scale: Scale) -> Result<Vec<Section>, Failure> {
    let published = Published::load()?;
    let mut sections = Vec::new();
    for table in Table::value_variants() {
        sections.extend(table.reproduce(&published, scale, false)?);
    }
    Ok(sections)
}

impl Table {
    /// `alone`: nothing else was asked for.
    fn reproduce(
        self,
        published: &Published,
        scale: Scale,
        alone: bool,
    ) -> Result<Vec<Section>, Failure> {
        match self {
            Self::ParallelFaults => {
                let setup = |table, profile, published| {
                    faults::Setup { table, profile, published, scale }.reproduce()
                };
                let rfc = &published.parallel_faults_rfc;
                let v5 = &published.parallel_faults_v5;
                Ok(vec![
                    setup("parallel-faults-rfc", "arm-server-2022", rfc)?,
                    setup("parallel-faults-v5", "arm-server-2022-v5", v5)?,
                ])
            }
            Self::SkipLevels => Ok(vec![walks::skip_levels(&published.skip_levels)?]),
            Self::MoveBarrier => Ok(vec![walks::move_barrier(&published.move_barrier)?]),
            Self::RmapCounter if alone => Ok(vec![forks::reproduce(&published.rmap_counter)?]),
            Self::RmapCounter => Ok(vec![forks::elsewhere(&published.rmap_counter)]),
            Self::TrailingPrefetch => {
                Ok(vec![prefetch::reproduce(&published.trailing_prefetch, scale.is_full())?])
            }
        }
    }
}

/// How many claimed cells are out of tolerance.
fn missed(sections: &[Section]) -> usize {
    let cells = sections.iter().flat_map(|section| &section.cells);
    let slat = sections.iter().flat_map(|section| &section.slat);
    cells.filter(|cell| cell.claimed && !cell.ok).count()
        + slat.filter(|cell| !cell.reached).count()
}

/// How many cells are as published, in a line.
pub(crate) fn verdict(sections: &[Section]) -> String {
    let cells = sections.iter().flat_map(|section| &section.cells);
    let cells: Vec<_> = cells.filter(|cell| cell.ours.is_some()).collect();
    let ok = cells.iter().filter(|cell| cell.ok).count();
    let named = cells.iter().filter(|cell| !cell.claimed).count();
    format!(
        "{ok} of {} cells within tolerance, {named} out of it for the reason beside them, {} without one",
        cells.len(),
        missed(sections)
    )
}
