//! What the benchmark was asked for, counting by gungraun, and the table of what it counted.

use std::process::{Command, ExitCode, Stdio};

use serde_json::{Deserializer, Value};

use crate::recorded::{Counts, Finding, Recorded, Toolchain};

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/instructions.toml");
const RECORD: &str = "cargo bench -p slat --bench instructions -- --record";

/// What this program was started for.
pub(crate) enum Asked {
    /// To count and compare with the file.
    Compare,
    /// To count and write the file.
    Record,
    /// To be gungraun: by its runner, or by a user with arguments of gungraun's.
    Gungraun,
    /// By `cargo test`, which is not the time to count.
    Nothing,
}

impl Asked {
    pub(crate) fn from_arguments() -> Self {
        let arguments: Vec<String> = std::env::args().skip(1).collect();
        match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
            [] => Self::Nothing,
            ["--bench"] => Self::Compare,
            ["--record", "--bench"] => Self::Record,
            _ => Self::Gungraun,
        }
    }
}

/// One operation: the name of its count, that of the direct loop beside it (or nothing), and what both are called.
pub(crate) type Row = (&'static str, &'static str, &'static str);

/// Counts, prints, and compares with the file or, to `record`, writes it. Fails on a regression, and where a benchmark
/// is new or gone.
pub(crate) fn run(rows: &[Row], entries: u64, record: bool) -> ExitCode {
    if !(runs("valgrind") && runs(option_env!("GUNGRAUN_RUNNER").unwrap_or("gungraun-runner"))) {
        return tools_are_missing();
    }
    let file = std::fs::read_to_string(FILE).map_err(|error| error.to_string());
    let recorded = file.and_then(|text| Recorded::parse(&text));
    let counts = match count() {
        Ok(counts) => counts,
        Err(error) => return failed(&format!("gungraun: {error}")),
    };
    print(rows, entries, &counts, recorded.as_ref().ok());
    if record {
        let recorded = Recorded { toolchain: Toolchain::here(), counts };
        return match std::fs::write(FILE, recorded.to_string()) {
            Ok(()) => done(&format!("recorded in {FILE}")),
            Err(error) => failed(&format!("{FILE}: {error}")),
        };
    }
    match recorded {
        Ok(recorded) => compare(&recorded, &counts),
        Err(error) => failed(&format!("{FILE}: {error}; to record: {RECORD}")),
    }
}

fn compare(recorded: &Recorded, counts: &Counts) -> ExitCode {
    let here = Toolchain::here();
    let Some(tolerance) = recorded.tolerance(&here) else {
        return done(&format!(
            "NOT COMPARED: counted for {here}, recorded for {}",
            recorded.toolchain
        ));
    };
    if here != recorded.toolchain {
        println!(
            "NOTE: ANOTHER COMPILER: counted with {here}, recorded with {}.",
            recorded.toolchain
        );
        println!("NOTE: only great changes are seen; record anew: {RECORD}");
    }
    let findings = recorded.compare(counts, tolerance);
    for finding in &findings {
        println!("{finding}");
    }
    let percent = tolerance * 100.0;
    if !findings.iter().all(|finding| matches!(finding, Finding::Better { .. })) {
        return failed(&format!("differ by more than {percent:.0} %; if that is meant: {RECORD}"));
    }
    if !findings.is_empty() {
        println!("NOTE: fewer than recorded, so that a regression could hide: {RECORD}");
    }
    done(&format!("no regression beyond {percent:.0} %, {here}"))
}

fn done(what: &str) -> ExitCode {
    println!("instruction counts: {what}");
    ExitCode::SUCCESS
}

fn failed(why: &str) -> ExitCode {
    println!("instruction counts: FAILED: {why}");
    ExitCode::FAILURE
}

/// A user who runs all benchmarks may lack the tools; CI may not.
fn tools_are_missing() -> ExitCode {
    println!("instruction counts need valgrind, and the runner of exactly gungraun's version:");
    println!("  cargo install --locked gungraun-runner@$(cargo pkgid gungraun | sed 's/.*@//')");
    if std::env::var_os("CI").is_some() { failed("no tools") } else { done("skipped") }
}

fn runs(program: &str) -> bool {
    let mut command = Command::new(program);
    command.arg("--version").stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// Runs this program once more as gungraun, and collects the instructions of each `function.case`.
fn count() -> Result<Counts, String> {
    let mut command = Command::new(std::env::current_exe().map_err(|error| error.to_string())?);
    command.args(["--bench", "--output-format=json", "--nosummary", "--parallel"]);
    let output = command.stderr(Stdio::inherit()).output().map_err(|error| error.to_string())?;
    if !output.status.success() {
        return Err(format!("{}{}", String::from_utf8_lossy(&output.stdout), output.status));
    }
    let summaries = Deserializer::from_slice(&output.stdout).into_iter::<Value>();
    summaries
        .map(|summary| {
            let summary = summary.map_err(|error| error.to_string())?;
            named_count(&summary).ok_or_else(|| format!("no instructions in {summary}"))
        })
        .collect()
}

/// The fields of gungraun's summary that are needed here (its schema, version 6: `BenchmarkSummary`).
fn named_count(summary: &Value) -> Option<(String, u64)> {
    let name = format!("{}.{}", summary["function_name"].as_str()?, summary["id"].as_str()?);
    let metrics = &summary["profiles"][0]["data"]["total"]["metrics"];
    Some((name, metrics["Ir"]["values"]["new"].as_u64()?))
}

fn print(rows: &[Row], entries: u64, counts: &Counts, recorded: Option<&Recorded>) {
    println!(
        "{:<32} {:>9} {:>9} {:>7} {:>9}  recorded",
        "instructions per 4K entry", "slat", "direct", "ratio", "total"
    );
    for &(name, beside, called) in rows {
        let Some(&total) = counts.get(name) else { continue };
        let each = total as f64 / entries as f64;
        print!("{called:<32} {each:>9.3}");
        match counts.get(beside) {
            Some(&direct) => {
                let ratio = total as f64 / direct as f64;
                print!(" {:>9.3} {ratio:>7.3}", direct as f64 / entries as f64);
            }
            None => print!(" {:>9} {:>7}", "", ""),
        }
        print!(" {total:>9}");
        match recorded.and_then(|recorded| recorded.counts.get(name)) {
            Some(&then) => {
                println!("  {then} ({:+.2} %)", (total as f64 / then as f64 - 1.0) * 100.0)
            }
            None => println!("  no"),
        }
    }
}
