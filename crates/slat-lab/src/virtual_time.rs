//! Virtual time in the lab: machines and designs from files, and the workloads that run on them.

use std::fs;

use crate::failure::Failure;
use design::Design;
use profile::Profile;

pub(crate) mod design;
pub(crate) mod dirty_log;
pub(crate) mod ground;
pub(crate) mod profile;
pub(crate) mod walks;

/// What `slat designs --help` says of files.
pub(crate) const FILES: &str = "\
A design of one's own is a file in TOML, given as --design FILE:

  name = \"regions\"
  summary = \"an exclusive lock for each gigabyte\"
  lock = \"exclusive\"          exclusive, shared or none
  lock-region = \"1G\"          a lock for each so much guest memory (default: one for all)
  lock-writes = 2             how often a fault writes the line of a lock that it shares
  reference-counts = 0        atomic counts that a fault changes beyond those of the profile's fault
  maintenance = \"outside\"     caches are cleaned under-lock, outside of it, or none
  barrier = \"per-block\"       per-entry, per-block or per-walk
  skip-levels = \"off\"         off, on or child
  eager-split = \"off\"         or a size, unless --eager-split is given
  host-lock = \"kept\"          kept or gone

lock-region, lock-writes, reference-counts, eager-split and host-lock may be left out. A machine is a file too, given as \
--profile FILE: each number has a value, a unit and an origin; those in crates/slat-lab/data/profiles are examples.";

/// Designs with their choices, and machines.
///
/// # Errors
/// None, unless what is built in is wrong.
pub(crate) fn list() -> Result<String, Failure> {
    let head =
        ["design", "MMU lock", "barrier", "skip levels", "eager split", "cleaning", "host lock"];
    let mut rows = vec![head.map(str::to_owned)];
    let designs = Design::list()?;
    rows.extend(designs.iter().map(|design| {
        [
            design.name.clone(),
            design.lock.name().to_owned(),
            design.barrier.name().to_owned(),
            design.skip_levels.name().to_owned(),
            design.eager_split.to_string(),
            design.maintenance.name().to_owned(),
            design.host_lock.name().to_owned(),
        ]
    }));
    let mut lines = columns(&rows);
    lines.push(String::new());
    let profiles = Profile::list()?;
    let about = designs.into_iter().map(|design| [design.name, design.summary]);
    let about = about.chain(profiles.into_iter().map(|machine| [machine.name, machine.summary]));
    lines.extend(columns(&about.collect::<Vec<_>>()));
    Ok(lines.join("\n"))
}

/// Rows as lines, with columns as wide as what is in them.
pub(crate) fn columns<const N: usize>(rows: &[[String; N]]) -> Vec<String> {
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let widths: Vec<_> = (0..N).map(width).collect();
    let line = |row: &[String; N]| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}"));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

/// The text of something that is built in under a name, or that stands in a file, and how to call it in a message.
fn data(kind: &str, name: &str, built_in: &[(&str, &str)]) -> Result<(String, String), Failure> {
    if let Some((_, text)) = built_in.iter().find(|(known, _)| *known == name) {
        return Ok(((*text).to_owned(), format!("{kind} {name}")));
    }
    let text = fs::read_to_string(name).map_err(|error| {
        let names: Vec<_> = built_in.iter().map(|(known, _)| *known).collect();
        Failure::Usage(format!(
            "{kind} {name}: not one of {}, and no file ({error})",
            names.join(", ")
        ))
    })?;
    Ok((text, format!("{kind} {name}")))
}
