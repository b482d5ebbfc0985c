//! What `slat explain` promises: causes that add up to the phase's time, beside the numbers they were charged from.

use serde_json::Value;

mod command;

use command::{report, slat};

const RUN: &str = "explain dirty-log -v 16 -b 4M";

fn text(line: &str) -> String {
    let output = slat(line);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{line}: {said}");
    String::from_utf8(output.stdout).unwrap()
}

#[track_caller]
fn phase(report: &Value, name: &str, iteration: Option<u64>) -> Value {
    let phases = report["phases"].as_array().unwrap().iter();
    let mut found = phases.filter(|phase| phase["name"] == name);
    found.find(|phase| phase["iteration"].as_u64() == iteration).unwrap().clone()
}

fn figure(value: &Value) -> f64 {
    value.as_f64().unwrap()
}

#[test]
fn causes_add_up_to_the_time_of_all_who_work() {
    for design in ["linux-5.18", "linux-5.18+parallel", "slat", "linux-6.12 -g"] {
        let report = report(&format!("{RUN} --design {design}"));
        for phase in report["phases"].as_array().unwrap() {
            let causes = phase["causes"].as_array().unwrap();
            let sum = |key: &str| causes.iter().map(|cause| figure(&cause[key])).sum::<f64>();
            let faults = figure(&phase["faults"]);
            let times = if phase["per"] == "fault" { faults } else { 16.0 * 1024.0 };
            let worked = figure(&phase["seconds"]) * figure(&phase["workers"]) * 1e9;
            let near = |a: f64, b: f64| (a - b).abs() <= 1e-6 * b.max(1.0);
            assert!(near(sum("ns") * times, worked), "{design}: {phase}");
            assert!(causes.is_empty() || near(sum("percent"), 100.0), "{design}: {phase}");
        }
    }
}

#[test]
fn each_fault_of_a_pass_pays_what_the_profile_says() {
    let report = report(&format!("{RUN} --design linux-5.18"));
    let dirty = phase(&report, "dirty", Some(2));
    let of = |name: &str| {
        let causes = dirty["causes"].as_array().unwrap();
        causes.iter().find(|cause| cause["cause"] == name).unwrap()
    };
    let work = of("lock_work");
    assert_eq!((figure(&work["ns"]), figure(&work["count"])), (291.5, 1.0));
    let number = serde_json::json!([{"name": "lock-work", "value": 291.5, "unit": "ns"}]);
    assert_eq!(work["profile"], number);
    assert_eq!(dirty["critical"], "mmu_lock");
    assert!(figure(&dirty["resources"][0]["percent"]) > 95.0);
}

#[test]
fn who_has_no_lock_waits_for_nothing_that_is_shared() {
    let report = report(RUN);
    let dirty = phase(&report, "dirty", Some(2));
    assert_eq!(dirty["critical"], Value::Null);
    let text = text(RUN);
    assert!(text.contains("a vCPU's own time decides"), "{text}");
    assert!(text.contains("fault-outside 499.5 ns"), "{text}");
}

#[test]
fn a_person_reads_design_machine_and_vcpus_first_and_the_same_at_every_run() {
    let first = text(RUN);
    let head: Vec<_> = first.lines().take(2).collect();
    assert!(head[0].contains("16 vCPUs"), "{first}");
    assert!(head[1].contains("profile arm-server-2022, design slat"), "{first}");
    assert!(first.lines().all(|line| line.trim_end() == line && line.is_ascii()));
    assert_eq!(first, text(RUN));
}

#[test]
fn what_has_no_virtual_time_is_refused_with_what_has_it() {
    for line in ["page-table", "memslot", "pre-fault"] {
        let output = slat(&format!("explain {line}"));
        assert_eq!(output.status.code(), Some(2));
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains(line) && said.contains("dirty-log does"), "{said}");
    }
    let output = slat("explain dirty-log --clock real");
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("only virtual time"));
}
