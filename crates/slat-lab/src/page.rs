//! `slat report`: one page with the published tables, ours, and what can be drawn of them.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use clap::Args;

use crate::failure::Failure;
use crate::output;
use crate::repro::{self, Scale, Section};

#[cfg(test)]
mod browser;
mod colour;
mod curves;
mod document;
mod figures;
mod shares;

use figures::Figure;

/// What follows the options in `--help`.
pub(crate) const LONG_HELP: &str = "\
The page has what `slat repro` prints, plots of it, and where time went in virtual time. It is one file that needs no \
network and no scripts; the same command writes the same bytes. A file of that name is replaced if it is such a page or \
plot, and refused otherwise.

Exit status: 0 written, whatever the cells are like; 1 a run broke off or a file cannot be written; 2 the command makes no \
sense, or a file is in the way.";

/// What every page and every plot has near its beginning.
const OURS: &str = "slat report";

/// Options of `report`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The page
    #[arg(long, value_name = "FILE", default_value = "slat-report.html")]
    output: PathBuf,

    /// Each plot in a file of its own, too
    #[arg(long, value_name = "DIRECTORY")]
    svg: Option<PathBuf>,

    /// Memory of the published size, instead of a part that takes seconds
    #[arg(long)]
    full: bool,
}

/// Writes the page.
///
/// # Errors
/// [`Failure::Usage`] if something else has its name; [`Failure::Run`] if a run broke off or a file cannot be written.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    check_free(&options.output)?;
    if let Some(directory) = &options.svg {
        fs::create_dir_all(directory).map_err(|error| cannot_write(directory, &error))?;
    }
    let scale = if options.full { Scale::FULL } else { Scale::SMALL };
    let sections = repro::all(scale.with_all_many())?;
    let figures = figures::of(&sections)?;
    if let Some(directory) = &options.svg {
        for Figure { name, svg, .. } in &figures {
            let path = directory.join(format!("{name}.svg"));
            check_free(&path)?;
            write(&path, svg)?;
        }
    }
    write(&options.output, &page(&sections, &figures))?;
    output::line(&format!(
        "{}: {} plots; {}",
        options.output.display(),
        figures.len(),
        repro::verdict(&sections)
    ))
}

fn page(sections: &[Section], figures: &[Figure]) -> String {
    document::page(sections, figures).into_string()
}

/// Says no where a file has the name that is not ours, or where there can be none.
fn check_free(path: &Path) -> Result<(), Failure> {
    let mut start = Vec::new();
    let directory = path.parent().filter(|directory| !directory.as_os_str().is_empty());
    match File::open(path).and_then(|file| file.take(1024).read_to_end(&mut start)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => match directory {
            Some(directory) if !directory.is_dir() => Err(cannot_write(path, &error)),
            _ => Ok(()),
        },
        Err(error) => Err(cannot_write(path, &error)),
        Ok(_) if start.is_empty() || String::from_utf8_lossy(&start).contains(OURS) => Ok(()),
        Ok(_) => Err(Failure::Usage(format!(
            "{}: there is a file of this name that slat report has not written; remove it, or choose another name",
            path.display()
        ))),
    }
}

fn write(path: &Path, text: &str) -> Result<(), Failure> {
    fs::write(path, text).map_err(|error| cannot_write(path, &error))
}

fn cannot_write(path: &Path, error: &io::Error) -> Failure {
    Failure::Run(format!("{}: cannot be written: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_own_files_are_replaced() {
        let directory = std::env::temp_dir().join(format!("slat-page-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let path = directory.join("page.html");
        let status = |path: &Path| check_free(path).map_err(|failure| failure.to_string());
        assert_eq!(status(&path), Ok(()));
        for ours in
            [&page(&[], &[]), "", "<svg width=\"1\" role=\"img\"><desc>slat report</desc></svg>"]
        {
            fs::write(&path, ours).unwrap();
            assert_eq!(status(&path), Ok(()));
        }
        let letter = format!("Dear list,\n{}slat report", "-".repeat(1024));
        fs::write(&path, letter).unwrap();
        assert!(status(&path).unwrap_err().contains("has not written"));
        assert!(status(&directory).unwrap_err().contains("cannot be written"));
        assert!(
            status(&directory.join("none/page.html")).unwrap_err().contains("cannot be written")
        );
        fs::remove_dir_all(&directory).unwrap();
    }
}
