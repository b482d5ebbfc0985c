//! `slat compare`: what changed between the results of two sets of runs.

use std::fs;
use std::io::{self, Write};
use std::path::PathBuf;

use clap::Args;

use crate::failure::Failure;
use crate::options::OutputOptions;

mod comparison;
mod results;
mod samples;
mod text;

use comparison::Comparison;
pub(crate) use results::Side;

/// What follows the options in `--help`.
pub(crate) const LONG_HELP: &str = "\
A file has what a workload printed with --json, once or several times, all of one configuration but for the seed. \
Repetitions of a phase are the runs of a file, of each the mean of its iterations; or the iterations, if there is one run.

change: of the mean of B against that of A. sd, the standard deviation over repetitions: of a side, per cent of its mean; \
of the change, points of per cent over pairs, the first of A and the first of B and so on; or, if A and B have not as many, \
as of two means that have nothing to do with each other.

--json prints {\"a\": {\"label\", \"runs\"}, \"b\": {\u{2026}}, \"warnings\": [\"\u{2026}\"], \"differ\": [{\"key\", \"a\", \
\"b\"}], \"same\": {\u{2026}}, \"phases\": [{\"phase\", \"a\": {\"repetitions\", \"mean_seconds\", \"sd_seconds\"}, \"b\": \
{\u{2026}}, \"change_percent\", \"sd_percent\", \"paired\"}], \"only_a\": [\"\u{2026}\"], \"only_b\": [\"\u{2026}\"]}; a \
deviation of one repetition is null.

Exit status: 0 done; 1 the result could not be written; 2 a file has no results, or the sides no phase in common.";

/// Options of `compare`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Results before
    #[arg(value_name = "A.json")]
    a: PathBuf,

    /// Results after
    #[arg(value_name = "B.json")]
    b: PathBuf,

    #[command(flatten)]
    shown: ShownOptions,
}

/// How a comparison is shown.
#[derive(Debug, Args)]
pub(crate) struct ShownOptions {
    /// Each iteration of a phase by itself: only runs are repetitions
    #[arg(long)]
    by_iteration: bool,

    #[command(flatten)]
    pub(crate) output: OutputOptions,
}

/// Compares two files.
///
/// # Errors
/// [`Failure::Usage`] if there is nothing to compare; [`Failure::Output`].
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let [a, b] = [&options.a, &options.b].map(|path| {
        let label = path.display().to_string();
        let text = fs::read_to_string(path)
            .map_err(|error| Failure::Usage(format!("{label}: cannot be read: {error}")))?;
        Side::parse(label, &text)
    });
    options.shown.print("slat compare", &[a?, b?], options.shown.output.json)
}

impl ShownOptions {
    /// Prints, under a title, how the sides compare, as text or as JSON.
    ///
    /// # Errors
    /// As [`run`].
    pub(crate) fn print(&self, title: &str, sides: &[Side; 2], json: bool) -> Result<(), Failure> {
        let comparison = Comparison::new(sides, self.by_iteration)?;
        let mut out = io::stdout().lock();
        if json {
            serde_json::to_writer(&mut out, &comparison).map_err(io::Error::from)?;
            writeln!(out)?;
        } else {
            write!(out, "{}", comparison.text(title))?;
        }
        Ok(out.flush()?)
    }
}
