//! The file of recorded counts, and what new counts say beside it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::process::Command;

/// Instructions by `function.case`.
pub(crate) type Counts = BTreeMap<String, u64>;

/// The same compiler makes the same code of the same sources, anywhere; a change elsewhere may change what it inlines.
const SAME_COMPILER: f64 = 0.02;
const OTHER_COMPILER: f64 = 0.15;

/// What made the machine code.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Toolchain {
    /// Its release, such as `1.90.0`.
    rustc: String,
    /// The target triple.
    target: String,
}

impl Toolchain {
    /// The compiler that cargo uses here.
    pub(crate) fn here() -> Self {
        let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".into());
        let output = Command::new(rustc).arg("-vV").output();
        let text =
            output.map(|o| String::from_utf8_lossy(&o.stdout).into_owned()).unwrap_or_default();
        let line = |start: &str| text.lines().find_map(|line| line.strip_prefix(start));
        let unknown = || "unknown".to_string();
        Self {
            rustc: line("release: ").map_or_else(unknown, Into::into),
            target: line("host: ").map_or_else(unknown, Into::into),
        }
    }
}

impl fmt::Display for Toolchain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rustc {} for {}", self.rustc, self.target)
    }
}

/// The file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Recorded {
    pub(crate) toolchain: Toolchain,
    pub(crate) counts: Counts,
}

impl Recorded {
    /// Reads lines of `name = number`, the toolchain's two of `name = "text"`, and comments.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let (mut counts, mut words) = (Counts::new(), BTreeMap::new());
        for (line, number) in text.lines().zip(1..) {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let wrong = || format!("line {number} is not `name = number`: {line}");
            let (name, value) = line.split_once('=').ok_or_else(wrong)?;
            let (name, value) = (name.trim().to_string(), value.trim());
            match value.strip_prefix('"').and_then(|value| value.strip_suffix('"')) {
                Some(word) => drop(words.insert(name, word.to_string())),
                None => drop(counts.insert(name, value.parse().map_err(|_| wrong())?)),
            }
        }
        let mut word = |name: &str| words.remove(name).ok_or_else(|| format!("no `{name}`"));
        Ok(Self { toolchain: Toolchain { rustc: word("rustc")?, target: word("target")? }, counts })
    }

    /// By how much counts made by `here` may differ, as a part of one. `None`: they cannot be compared.
    pub(crate) fn tolerance(&self, here: &Toolchain) -> Option<f64> {
        if here == &self.toolchain {
            Some(SAME_COMPILER)
        } else {
            (here.target == self.toolchain.target).then_some(OTHER_COMPILER)
        }
    }

    /// Everything that differs by more than `tolerance`, by name.
    pub(crate) fn compare(&self, counts: &Counts, tolerance: f64) -> Vec<Finding> {
        let names: BTreeSet<_> = self.counts.keys().chain(counts.keys()).collect();
        let judge = |name: &String| match (self.counts.get(name), counts.get(name)) {
            (Some(&recorded), Some(&now)) => {
                let name = name.clone();
                match now as f64 / recorded as f64 - 1.0 {
                    change if change > tolerance => Some(Finding::Worse { name, recorded, now }),
                    change if change < -tolerance => Some(Finding::Better { name, recorded, now }),
                    _ => None,
                }
            }
            (None, _) => Some(Finding::New(name.clone())),
            (_, None) => Some(Finding::Gone(name.clone())),
        };
        names.into_iter().filter_map(judge).collect()
    }
}

impl fmt::Display for Recorded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "# Instructions of each benchmark in instructions.rs, written by")?;
        writeln!(f, "#   cargo bench -p slat --bench instructions -- --record")?;
        writeln!(
            f,
            "rustc = \"{}\"\ntarget = \"{}\"\n",
            self.toolchain.rustc, self.toolchain.target
        )?;
        self.counts.iter().try_for_each(|(name, count)| writeln!(f, "{name} = {count}"))
    }
}

/// One difference between the file and new counts.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Finding {
    /// More instructions.
    Worse { name: String, recorded: u64, now: u64 },
    /// Fewer instructions.
    Better { name: String, recorded: u64, now: u64 },
    /// Counted, and not in the file.
    New(String),
    /// In the file, and not counted any more.
    Gone(String),
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = |now: u64, recorded: u64| (now as f64 / recorded as f64 - 1.0) * 100.0;
        match self {
            &Self::Worse { ref name, recorded, now } => {
                write!(f, "WORSE: {name}: {recorded} -> {now} ({:+.1} %)", percent(now, recorded))
            }
            &Self::Better { ref name, recorded, now } => {
                write!(f, "better: {name}: {recorded} -> {now} ({:+.1} %)", percent(now, recorded))
            }
            Self::New(name) => write!(f, "NEW: {name} is not recorded"),
            Self::Gone(name) => write!(f, "GONE: {name} is recorded and was not counted"),
        }
    }
}
