//! What `slat compare` and `slat ab` promise: changes of phases with their deviations, what differs beside them, and a
//! reason where there is nothing to compare.

use std::fs;
use std::path::PathBuf;

use serde_json::Value;

mod command;

use command::{report, slat};

/// Files of one test, which go when it ends.
struct Files(PathBuf);

impl Files {
    fn new(test: &str) -> Self {
        let directory = std::env::temp_dir().join(format!("slat-{test}-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        Self(directory)
    }

    fn with(&self, name: &str, text: &str) -> String {
        let path = self.0.join(name);
        fs::write(&path, text).unwrap();
        path.display().to_string()
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A run whose phases took so many seconds, with more in its head.
fn run(config: &str, head: &str, phases: &[(&str, u32, f64)]) -> String {
    let phase = |(name, iteration, seconds): &(&str, u32, f64)| {
        format!(r#"{{"name": "{name}", "iteration": {iteration}, "seconds": {seconds}}}"#)
    };
    let phases: Vec<_> = phases.iter().map(phase).collect();
    let (config, phases) = (format!(r#"{{"vcpus": 4, {config}}}"#), phases.join(", "));
    format!(
        r#"{{"workload": "dirty-log", "backend": "model", "config": {config}, {head} "phases": [{phases}]}}"#
    ) + "\n"
}

/// What a comparison that must succeed prints.
#[track_caller]
fn text(line: &str) -> String {
    let output = slat(line);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{line}: {said}");
    String::from_utf8(output.stdout).unwrap()
}

#[track_caller]
fn refused(line: &str, why: &str) {
    let output = slat(line);
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{line}: {said}");
    assert!(output.stdout.is_empty() && said.contains(why), "{line}: {said}");
}

/// The row of a phase, word by word.
#[track_caller]
fn row<'a>(text: &'a str, phase: &str) -> Vec<&'a str> {
    let line = text.lines().find(|line| line.starts_with(&format!("{phase} ")));
    let line = line.unwrap_or_else(|| panic!("{phase}: {text}"));
    line[phase.len()..].split_whitespace().collect()
}

#[test]
fn a_phase_changes_by_its_mean_with_the_deviation_of_pairs_of_runs() {
    let files = Files::new("pairs");
    let phases = |all: [(f64, f64); 2]| {
        let runs = all.map(|(first, second)| {
            run("\"bytes\": 4096", "", &[("dirty", 1, first), ("dirty", 2, second)])
        });
        runs.concat()
    };
    // Means of the runs are 2 and 4 before, 1 and 3 after.
    let a = files.with("a.json", &phases([(1.0, 3.0), (2.0, 6.0)]));
    let b = files.with("b.json", &phases([(0.5, 1.5), (2.0, 4.0)]));
    let text = text(&format!("compare {a} {b}"));
    let expected = ["2", "3.000000000", "47.14%", "2.000000000", "70.71%", "-33.33%", "17.68%"];
    assert_eq!(row(&text, "dirty"), expected, "{text}");
    let json = report(&format!("compare {a} {b}"));
    let phase = &json["phases"][0];
    assert_eq!(phase["phase"], "dirty");
    assert!((phase["change_percent"].as_f64().unwrap() + 100.0 / 3.0).abs() < 1e-9);
    assert_eq!((&phase["a"]["repetitions"], &phase["paired"]), (&2.into(), &true.into()));
    assert!(json["differ"].as_array().unwrap().is_empty());
}

#[test]
fn iterations_are_repetitions_of_a_single_run_and_can_stand_alone() {
    let files = Files::new("iterations");
    let a =
        files.with("a.json", &run("\"bytes\": 4096", "", &[("dirty", 1, 1.0), ("dirty", 2, 3.0)]));
    let b =
        files.with("b.json", &run("\"bytes\": 4096", "", &[("dirty", 1, 2.0), ("dirty", 2, 3.0)]));
    let together = text(&format!("compare {a} {b}"));
    assert_eq!(row(&together, "dirty")[5..], ["+25.00%", "70.71%"], "{together}");
    let apart = text(&format!("compare {a} {b} --by-iteration"));
    assert_eq!(row(&apart, "dirty 1")[5..], ["+100.00%", "-"], "{apart}");
    assert_eq!(row(&apart, "dirty 2")[5..], ["+0.00%", "-"], "{apart}");
}

#[test]
fn what_differs_is_shown_whatever_it_is_called() {
    let files = Files::new("differ");
    let phases = [("dirty", 1, 1.0)];
    let config = "\"design\": \"x\", \"bytes\": 268435456";
    let head = "\"host\": {\"machine\": \"virt\", \"kernel\": \"6.12\"}, \"hz\": 250, \"traces\": {\"a\": null},";
    let a = files.with("a.json", &run(config, "", &phases));
    let b =
        files.with("b.json", &run("\"bytes\": 268435456", head, &phases).replace("model", "kvm"));
    let text = text(&format!("compare {a} {b}"));
    assert_eq!(row(&text, "backend"), ["model", "kvm"]);
    assert_eq!(row(&text, "design"), ["x", "-"]);
    assert_eq!(row(&text, "host.kernel"), ["-", "6.12"]);
    assert_eq!(row(&text, "hz"), ["-", "250"]);
    assert!(text.contains("the same: bytes 256M, vcpus 4"), "{text}");
    assert!(!text.contains("NOTE"), "{text}");
}

#[test]
fn sides_that_measure_different_things_are_compared_with_a_note() {
    let files = Files::new("different");
    let a =
        files.with("a.json", &run("\"bytes\": 4096", "", &[("dirty", 1, 1.0), ("get", 1, 1.0)]));
    let b =
        files.with("b.json", &run("\"bytes\": 8192", "", &[("dirty", 1, 1.0), ("clear", 1, 1.0)]));
    let text = text(&format!("compare {a} {b}"));
    assert!(
        text.contains("NOTE: the sides measure different things: bytes 4K against 8K"),
        "{text}"
    );
    assert!(text.contains("only in A: get") && text.contains("only in B: clear"), "{text}");
    let none = files.with("none.json", &run("\"bytes\": 4096", "", &[("create", 1, 1.0)]));
    refused(&format!("compare {a} {none}"), "no phase in common: dirty, get against create");
}

#[test]
fn times_of_a_checked_run_are_called_no_measurement() {
    let files = Files::new("checked");
    let a = files.with("a.json", &run("\"check\": true", "", &[("dirty", 1, 1.0)]));
    let b = files.with("b.json", &run("\"check\": false", "", &[("dirty", 1, 1.0)]));
    let text = text(&format!("compare {a} {b}"));
    assert!(text.contains("NOTE: A ran with --check: its times are no measurement"), "{text}");
    assert!(!text.contains("B ran"), "{text}");
}

#[test]
fn seconds_of_a_thousand_years_do_not_fill_the_line() {
    let files = Files::new("long");
    let file = |name, seconds| files.with(name, &run("\"seed\": 1", "", &[("dirty", 1, seconds)]));
    let text = text(&format!("compare {} {}", file("a.json", 1e300), file("b.json", 2.5e8)));
    let row = row(&text, "dirty");
    assert_eq!((row[1], row[3]), ("1.000000000e300", "250000000.000000000"), "{text}");
}

#[test]
fn a_file_without_results_is_refused_with_its_name_and_the_reason() {
    let files = Files::new("bad");
    let good = files.with("good.json", &run("\"bytes\": 4096", "", &[("dirty", 1, 1.0)]));
    let bad = |text: &str, why: &str| {
        let file = files.with("bad.json", text);
        refused(&format!("compare {good} {file}"), &format!("bad.json: {why}"));
    };
    refused(&format!("compare {good} {}/missing", files.0.display()), "missing: cannot be read");
    bad("", "empty");
    bad("phase seconds", "no JSON");
    bad("{\"workload\": \"dirty-log\"", "no JSON");
    bad("[]", "run 1 is not what a workload prints with --json");
    bad(
        "{\"cells\": [], \"slat\": []}",
        "run 1 is not what a workload prints with --json: missing field",
    );
    let negative = run("\"bytes\": 4096", "", &[("dirty", 1, -1.0)]);
    bad(&negative, "run 1 is not what a workload prints with --json: phase dirty took -1 seconds");
    let two = run("\"seed\": 1", "", &[("dirty", 1, 1.0)])
        + &run("\"seed\": 2", "", &[("dirty", 1, 1.0)]);
    bad(
        &(two.clone() + &run("\"seed\": 1, \"slots\": 2", "", &[("dirty", 1, 1.0)])),
        "run 3 differs from run 1 in slots",
    );
    let repeated = files.with("two.json", &two);
    assert_eq!(row(&text(&format!("compare {good} {repeated}")), "dirty")[0], "1/2");
}

const VIRTUAL: &str = "dirty-log --clock virtual -v 2 -b 4M";

#[test]
fn designs_are_compared_over_seeds_that_both_have() {
    let line = format!("ab --design linux-5.18 --vs slat --repeat 2 {VIRTUAL} -r 7");
    let found = text(&line);
    assert_eq!(found, text(&line));
    assert!(
        found.contains("A: --design linux-5.18, 2 runs\nB: --design slat, 2 runs\n"),
        "{found}"
    );
    assert_eq!(row(&found, "design"), ["linux-5.18", "slat"]);
    let widest = found.lines().map(str::len).max();
    assert!(widest <= Some(80), "{found}");
    let json = report(&format!(
        "ab --design linux-5.18 --vs slat --repeat 2 --by-iteration {VIRTUAL} -r 7"
    ));
    assert_eq!(json["same"]["seed"], Value::from(vec![7, 8]));
    let by_hand = |design: &str, seed: u32| {
        let run = report(&format!("{VIRTUAL} --design {design} -r {seed}"));
        let phases = run["phases"].as_array().unwrap().clone();
        let last = phases.into_iter().rfind(|phase| phase["name"] == "dirty").unwrap();
        last["seconds"].as_f64().unwrap()
    };
    let mean = |design| (by_hand(design, 7) + by_hand(design, 8)) / 2.0;
    let dirty =
        json["phases"].as_array().unwrap().iter().find(|row| row["phase"] == "dirty 2").unwrap();
    assert_eq!(dirty["a"]["mean_seconds"], mean("linux-5.18"));
    assert_eq!(dirty["b"]["mean_seconds"], mean("slat"));
    assert!(dirty["change_percent"].as_f64().unwrap() < 0.0);
}

#[test]
fn repetitions_of_virtual_time_with_the_same_seed_have_no_deviation_and_that_is_said() {
    let files = Files::new("steady");
    let run = text(&format!("{VIRTUAL} --json"));
    let [a, b] = ["a", "b"].map(|name| files.with(name, &format!("{run}{run}")));
    let found = text(&format!("compare {a} {b}"));
    assert!(found.contains("NOTE: virtual time is the same at every repetition"), "{found}");
    assert_eq!(row(&found, "dirty")[5..], ["+0.00%", "0.00%"], "{found}");
}

#[test]
fn any_option_can_be_what_differs_with_the_real_clock_too() {
    let json = report(
        "ab --with=--eager-split=off --vs=--eager-split=2M --repeat 2 dirty-log -b 2M -s anonymous_thp",
    );
    assert_eq!((&json["a"]["runs"], &json["b"]["runs"]), (&2.into(), &2.into()));
    assert_eq!(json["differ"][0]["key"], "eager_split");
    assert_eq!(json["same"]["clock"], "real");
    let names: Vec<_> =
        json["phases"].as_array().unwrap().iter().map(|row| row["phase"].clone()).collect();
    assert_eq!(names, ["populate", "enable", "dirty", "get", "clear", "disable"]);
}

#[test]
fn ways_that_make_no_sense_are_refused_before_anything_runs() {
    refused("ab dirty-log", "--design <X>");
    refused("ab --design slat dirty-log", "--vs <Y>");
    refused("ab --design slat --profile thunderx2 --vs x dirty-log", "cannot be used with");
    refused("ab --design slat --vs linux-5.18 list", "unexpected argument");
    refused("ab --with -v --vs --check soak", "unexpected argument");
    refused("ab --with= --vs= list", "list is no workload");
    refused("ab --with= --vs=--such dirty-log", "--such");
    let output = slat("ab --design none --vs slat dirty-log --clock virtual -b 2M");
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("design none: not one of") && said.contains("run 1 of A"), "{said}");
}
