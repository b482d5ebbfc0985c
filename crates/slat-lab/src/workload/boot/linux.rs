//! Linux boots on slat's own hypervisor: how long it takes, and what it leaves its guest for.

use std::fmt;
use std::path::Path;

use serde::Serialize;

use super::Options;
use crate::around::Around;
use crate::check::{Check, Findings};
use crate::config::Emulated;
use crate::failure::Failure;
use crate::metal::linux::{Asked, Exit, MEMORY, Migration, PAGE, Ready, Seen, is_bad};
use crate::metal::refusal;
use crate::output;
use crate::report::{Phase, Report};
use crate::size::Size;
use crate::trace::Trace;

/// Pages of the windows that are compared.
const WINDOWS: [u32; 3] = [1, 8, 64];
/// That of a run with a check.
const WINDOW: u32 = 8;
/// What the guest is told to do to its memory: MiB, processes, rounds.
const MEMORY_CHECK: &str = "memory-check 32 3 20";

/// What runs: the `config` of the report.
#[derive(Clone, Debug, Serialize)]
struct Config {
    vcpus: u32,
    bytes: Size,
    backing_page: Size,
    /// The packages that the guest is from.
    guest: String,
    /// Eager split and dirty log go on and off meanwhile.
    migrate: bool,
    check: bool,
    emulated: Emulated,
}

/// One boot.
#[derive(Clone, Debug, Serialize)]
struct Boot {
    fault_around: u32,
    /// From the first instruction to the first line of the first program, and to the shell's prompt, as seen from outside.
    init_seconds: f64,
    prompt_seconds: f64,
    vcpus_started: u32,
    exits: Vec<Exit>,
    migration: Option<Migration>,
}

#[derive(Clone, Debug, Serialize)]
struct Boots {
    boots: Vec<Boot>,
}

/// What guest and hypervisor found of the guest's memory.
#[derive(Clone, Debug, Serialize)]
struct Found {
    /// The guest's own verdict, and how many of its pages or processes were bad.
    verdict: Option<String>,
    bad: u64,
    /// vCPUs that the guest did not start.
    vcpus_missing: u64,
    #[serde(flatten)]
    migration: Migration,
}

impl Findings for Found {
    const CLEAN: &'static str = "the guest found its memory as it left it, no write went unlogged";

    fn compared(&self) -> String {
        let Migration { rounds, collections, dirty, compared, changed, .. } = self.migration;
        format!(
            "guest: {}; {rounds} rounds of the log, {collections} collections of {dirty} dirty pages, {compared} pages \
             compared, {changed} of them had changed",
            self.verdict.as_deref().unwrap_or("no verdict")
        )
    }

    fn wrong(&self) -> Vec<(u64, &'static str)> {
        vec![
            (u64::from(self.verdict.is_none()), "verdict of the guest is missing"),
            (self.bad, "pages or processes of the guest were bad"),
            (self.migration.lost, "pages were written and not logged"),
            (u64::from(self.migration.changed == 0), "log saw no page change"),
            (self.vcpus_missing, "vCPUs were not started"),
        ]
    }
}

impl fmt::Display for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { vcpus, bytes, backing_page, guest, migrate, emulated, .. } = self;
        let s = if *vcpus == 1 { "" } else { "s" };
        let migrate = if *migrate { ", eager split and dirty log on and off" } else { "" };
        writeln!(f, "{vcpus} vCPU{s}, {bytes} of pages of {backing_page}{migrate}")?;
        writeln!(f, "guest {guest}")?;
        write!(f, "on slat's hypervisor, {} of QEMU {}", emulated.cpu, emulated.qemu)
    }
}

/// Boots as often as asked, and prints the report.
///
/// # Errors
/// See [`Failure`].
pub(super) fn run(options: &Options) -> Result<(), Failure> {
    let vcpus = options.vcpus.unwrap_or(1);
    let check = options.check.check;
    let record = options.replay.for_metal()?;
    let windows = match options.replay.around() {
        Some(Around::Pages(pages)) => vec![pages],
        Some(other) => {
            return Err(refusal(&format!("--fault-around {other}: windows of pages are there")));
        }
        None if record.is_some() => vec![1],
        None if check => vec![WINDOW],
        None => WINDOWS.to_vec(),
    };
    if record.is_some() && (check || windows != [1]) {
        let why = "--record: each page is to fault, so without --check and other windows than 1";
        return Err(refusal(why));
    }
    let ready = Ready::new(&options.metal)?;
    let mut phases = Vec::new();
    let mut boots = Vec::new();
    let mut verdicts = Vec::new();
    for around in windows {
        let asked = Asked {
            vcpus,
            around,
            large_pages: check,
            migrate: check,
            touches: record.is_some(),
            commands: if check { vec![MEMORY_CHECK.to_owned()] } else { Vec::new() },
        };
        let seen = ready.boot(&asked)?;
        if let Some(file) = record {
            save(file, &seen, vcpus, ready.version())?;
        }
        phases.extend(seen.told.phases.iter().map(|phase| Phase {
            // A run has a few, and one run is what this process does.
            name: String::leak(format!("around {around}")),
            ..phase.clone()
        }));
        boots.push(Boot {
            fault_around: around,
            init_seconds: seen.to_init.as_secs_f64(),
            prompt_seconds: seen.to_prompt.as_secs_f64(),
            vcpus_started: seen.told.results.vcpus_started,
            exits: seen.told.results.exits,
            migration: seen.told.results.migration,
        });
        verdicts.extend(seen.verdicts);
    }
    let found = check.then(|| found(&boots, &verdicts, vcpus));
    let report = Report {
        workload: "boot",
        backend: "metal",
        host: None,
        config: Config {
            vcpus,
            bytes: MEMORY,
            backing_page: Size(if check { 2 << 20 } else { PAGE }),
            guest: ready.version().to_owned(),
            migrate: check,
            check,
            emulated: ready.emulated(),
        },
        notes: Vec::new(),
        summary: boots.iter().flat_map(Boot::lines).collect(),
        counters: phases.iter().map(|phase| phase.counters).sum(),
        phases,
        results: Boots { boots },
        check: found,
    };
    output::print(&report, &options.replay.output)
}

fn found(boots: &[Boot], verdicts: &[String], vcpus: u32) -> Check<Found> {
    let missing = boots.iter().map(|boot| u64::from(vcpus.saturating_sub(boot.vcpus_started)));
    let found = Found {
        verdict: verdicts.last().cloned(),
        bad: verdicts.iter().filter(|verdict| is_bad(verdict)).count() as u64,
        vcpus_missing: missing.sum(),
        migration: boots.iter().filter_map(|boot| boot.migration).sum(),
    };
    // Nobody sees what is done to tables.
    Check { found, rules: None }
}

impl Boot {
    fn lines(&self) -> Vec<String> {
        let Self { fault_around, init_seconds, prompt_seconds, exits, .. } = self;
        let mut lines = vec![format!(
            "fault-around {fault_around}: {init_seconds:.3} s to the first program, {prompt_seconds:.3} s to its prompt"
        )];
        lines.extend(Exit::lines(exits));
        lines
    }
}

fn save(file: &Path, seen: &Seen, vcpus: u32, version: &str) -> Result<(), Failure> {
    let s = if vcpus == 1 { "" } else { "s" };
    let origin = format!(
        "recorded: slat boot --backend metal: {version}, {vcpus} vCPU{s}, to its shell prompt and off"
    );
    let (page, pages, runs) = (PAGE, MEMORY.0 / PAGE, seen.touches.clone());
    Trace { origin, page, pages, runs }.save(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(verdicts: &[&str], migration: Migration, started: u32) -> Check<Found> {
        let boot = Boot {
            fault_around: 8,
            init_seconds: 2.0,
            prompt_seconds: 2.5,
            vcpus_started: started,
            exits: Vec::new(),
            migration: Some(migration),
        };
        let verdicts: Vec<_> = verdicts.iter().map(|&verdict| verdict.to_owned()).collect();
        found(&[boot], &verdicts, 2)
    }

    const GOOD: Migration =
        Migration { rounds: 2, collections: 8, dirty: 100, compared: 64, changed: 9, lost: 0 };
    const OK: &str = "memory ok: 32 MiB, 3 processes, 20 rounds";

    #[test]
    fn both_the_guest_and_the_hypervisor_must_be_content() {
        assert!(checked(&[OK], GOOD, 2).is_clean());
        assert!(!checked(&[], GOOD, 2).is_clean());
        assert!(!checked(&["memory BAD: 1 of 3 processes"], GOOD, 2).is_clean());
        assert!(!checked(&["memory BAD at 0x1000: 0x0 instead of 0x1", OK], GOOD, 2).is_clean());
        assert!(!checked(&[OK], Migration { lost: 1, ..GOOD }, 2).is_clean());
    }

    #[test]
    fn a_check_that_had_nothing_to_find_is_none() {
        assert!(!checked(&[OK], Migration { changed: 0, ..GOOD }, 2).is_clean());
        assert!(!checked(&[OK], GOOD, 1).is_clean());
    }
}
