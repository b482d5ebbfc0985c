//! The guest's files: Debian's kernel, and a small first file system.

use std::fs;
use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::failure::Failure;

/// The script that fetches and makes them, in the sources that this command was built from.
const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/guest-linux.sh");

/// What is loaded, each with its size in bytes.
pub(super) struct Files {
    pub(super) kernel: (PathBuf, u64),
    pub(super) initrd: (PathBuf, u64),
    /// The packages that they are from.
    pub(super) version: String,
}

impl Files {
    /// Those that are there, or that are fetched now.
    pub(super) fn fetch() -> Result<Self, Failure> {
        let seen = io::stderr().is_terminal();
        let stderr = if seen { Stdio::inherit() } else { Stdio::piped() };
        let output = Command::new(SCRIPT).stdin(Stdio::null()).stderr(stderr).output();
        let output = output
            .map_err(|error| Failure::Missing(format!("{SCRIPT} does not start: {error}")))?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            return Err(Failure::Missing(format!("{SCRIPT} got no guest\n{}", said.trim_end())));
        }
        let directory = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
        let missing = |error| Failure::Missing(format!("{}: {error}", directory.display()));
        let sized = |name: &str| {
            let file = directory.join(name);
            fs::metadata(&file).map(|found| (file, found.len())).map_err(missing)
        };
        let version = fs::read_to_string(directory.join("version")).map_err(missing)?;
        let version = version.lines().rev().collect::<Vec<_>>().join(", ");
        Ok(Self { kernel: sized("Image")?, initrd: sized("initrd")?, version })
    }
}
