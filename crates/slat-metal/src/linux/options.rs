//! The command line of `workload=linux`: `key=value` words, then `--`, then the guest's own command line.
//!
//! | key | value | default |
//! |---|---|---|
//! | `kernel`, `initrd` | where in memory they have been loaded: `address+bytes` | must be there |
//! | `vcpus` | how many, each on a CPU of its own | 1 |
//! | `bytes` | of the guest's memory | `128M` |
//! | `backing` | pages that the host gives: `4k`, `2m` | `2m` |
//! | `fault-around` | pages that a fault maps | 8 |
//! | `eager-split` | blocks are split ahead of write faults: `on`, `off` | `off` |
//! | `migrate` | one more CPU switches the dirty log on and off and keeps a copy of memory: `on`, `off` | `off` |
//! | `touches` | the pages that the guest touches are told, in order: `on`, `off` | `off` |

use alloc::format;
use alloc::string::String;
use core::ops::Range;

use serde::Serialize;

/// The word that makes a command line one of these.
const WORKLOAD: &str = "workload=linux";

/// Everything that can be asked, with all defaults filled in.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Options {
    /// Where the kernel lies.
    #[serde(skip)]
    pub kernel: Range<u64>,
    /// Where its first file system lies.
    #[serde(skip)]
    pub initrd: Range<u64>,
    /// How many.
    pub vcpus: usize,
    /// Bytes of the guest's memory.
    pub bytes: u64,
    /// Bytes of a page that the host gives.
    pub backing_page: u64,
    /// Pages that a fault maps.
    pub fault_around: u32,
    /// Blocks are split ahead of write faults.
    pub eager_split: bool,
    /// The dirty log goes on and off while the guest runs.
    pub migrate: bool,
    /// Touched pages are told.
    pub touches: bool,
    /// The guest's own command line.
    pub command_line: String,
}

impl Options {
    /// Takes a command line apart.
    ///
    /// # Errors
    /// The first word that makes no sense, and why.
    pub fn parse(line: &str) -> Result<Self, String> {
        let (_, command_line) = line.split_once(" -- ").unwrap_or((line, ""));
        let mut options = Self {
            kernel: 0..0,
            initrd: 0..0,
            vcpus: 1,
            bytes: 128 << 20,
            backing_page: 2 << 20,
            fault_around: 8,
            eager_split: false,
            migrate: false,
            touches: false,
            command_line: command_line.into(),
        };
        options.set_all(line)?;
        Ok(options)
    }

    fn set_all(&mut self, line: &str) -> Result<(), String> {
        for word in line.split_ascii_whitespace().take_while(|&word| word != "--") {
            let known = word.split_once('=').and_then(|(key, value)| self.set(key, value));
            known.ok_or_else(|| format!("{word}: not of the form key=value, or unknown"))?;
        }
        if self.kernel.is_empty() || self.initrd.is_empty() {
            return Err("kernel=address+bytes and initrd=address+bytes must be there".into());
        }
        Ok(())
    }

    fn set(&mut self, key: &str, value: &str) -> Option<()> {
        match key {
            "workload" => {}
            "kernel" => self.kernel = range(value)?,
            "initrd" => self.initrd = range(value)?,
            "vcpus" => self.vcpus = value.parse().ok().filter(|vcpus| (1..=4).contains(vcpus))?,
            "bytes" => {
                self.bytes = value.strip_suffix('M')?.parse::<u64>().ok()?.checked_mul(1 << 20)?
            }
            "backing" => self.backing_page = one_of(value, [("4k", 4 << 10), ("2m", 2 << 20)])?,
            "fault-around" => self.fault_around = value.parse().ok()?,
            "eager-split" => self.eager_split = switch(value)?,
            "migrate" => self.migrate = switch(value)?,
            "touches" => self.touches = switch(value)?,
            _ => return None,
        }
        Some(())
    }
}

fn one_of<T: Copy>(value: &str, choices: [(&str, T); 2]) -> Option<T> {
    choices.iter().find(|(name, _)| *name == value).map(|&(_, choice)| choice)
}

fn switch(value: &str) -> Option<bool> {
    one_of(value, [("on", true), ("off", false)])
}

/// If the command line is one of these: where the first of what was loaded lies, which is where memory ends for the
/// hypervisor itself. Needs no heap.
pub fn loaded_from(line: &str) -> Option<u64> {
    let words = || line.split_ascii_whitespace().take_while(|&word| word != "--");
    if !words().any(|word| word == WORKLOAD) {
        return None;
    }
    let loaded = words().filter_map(|word| match word.split_once('=')? {
        ("kernel" | "initrd", value) => Some(range(value)?.start),
        _ => None,
    });
    Some(loaded.min().unwrap_or(u64::MAX))
}

/// `0x48000000+33000000`.
fn range(value: &str) -> Option<Range<u64>> {
    let (start, bytes) = value.split_once('+')?;
    let start = u64::from_str_radix(start.strip_prefix("0x")?, 16).ok()?;
    Some(start..start.checked_add(bytes.parse().ok()?)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEAST: &str = "workload=linux kernel=0x48000000+100 initrd=0x49000000+10";

    #[test]
    fn other_workloads_are_not_for_linux() {
        assert_eq!(loaded_from("workload=dirty-log bytes=64M"), None);
        assert_eq!(loaded_from("vcpus=1 -- workload=linux kernel=0x1+1"), None);
    }

    #[test]
    fn memory_ends_where_the_guest_was_loaded() {
        assert_eq!(loaded_from(LEAST), Some(0x4800_0000));
    }

    #[test]
    fn what_follows_the_dashes_is_the_guests() {
        let options =
            Options::parse(&format!("{LEAST} vcpus=2 backing=4k -- quiet vcpus=7")).unwrap();
        assert_eq!((options.vcpus, options.backing_page), (2, 4096));
        assert_eq!(options.command_line, "quiet vcpus=7");
        assert_eq!(options.kernel, 0x4800_0000..0x4800_0064);
    }

    #[test]
    fn a_word_that_makes_no_sense_is_named() {
        for word in [
            "vcpus",
            "vcpus=0",
            "vcpus=5",
            "bytes=7",
            "backing=1g",
            "migrate=yes",
            "colour=blue",
            "kernel=1+1",
        ] {
            let why = Options::parse(&format!("{LEAST} {word}")).unwrap_err();
            assert!(why.starts_with(word), "{why}");
        }
    }

    #[test]
    fn nothing_boots_without_a_kernel() {
        assert!(Options::parse("workload=linux initrd=0x49000000+10").is_err());
    }
}
