//! How the tests here run the command, and what they read out of its report.
#![allow(dead_code, reason = "each test uses some of it")]

use std::process::{Command, Output, Stdio};

use serde_json::Value;

/// Runs a command line to its end.
pub(crate) fn slat(line: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_slat"));
    command.args(line.split_whitespace()).stdin(Stdio::null()).output().unwrap()
}

/// The report of a run that must succeed.
#[track_caller]
pub(crate) fn report(line: &str) -> Value {
    let output = slat(&format!("{line} --json"));
    let said = String::from_utf8_lossy(&output.stderr);
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{line}: {said}{text}");
    assert!(said.is_empty(), "{line}: {said}");
    serde_json::from_str(&text).unwrap()
}

/// The phases in order, with their iterations.
pub(crate) fn names(report: &Value) -> Vec<String> {
    let phase = |phase: &Value| {
        let name = phase["name"].as_str().unwrap();
        match phase["iteration"].as_u64() {
            Some(iteration) => format!("{name} {iteration}"),
            None => name.to_owned(),
        }
    };
    report["phases"].as_array().unwrap().iter().map(phase).collect()
}

/// What was counted in a phase.
#[track_caller]
pub(crate) fn count(report: &Value, phase: &str, counter: &str) -> u64 {
    let at = names(report).iter().position(|name| name == phase).unwrap();
    report["phases"][at]["counters"][counter].as_u64().unwrap()
}
