//! What `slat access-tracking` promises: idle after each marking, used after each access, and what that costs.

use serde_json::{Value, json};

mod command;

use command::{count, names, slat};

fn report(options: &str) -> Value {
    command::report(&format!("access-tracking {options}"))
}

/// A checked run in which nothing was wrong.
#[track_caller]
fn checked(options: &str) -> Value {
    let report = report(&format!("--check {options}"));
    let check = &report["check"];
    let wrong = [
        "young_after_mark",
        "idle_after_access",
        "miscounted",
        "elsewhere",
        "wrong_loads",
        "misplaced",
        "violations",
    ];
    for count in wrong {
        assert_eq!(check[count], 0, "{options}: {check}");
    }
    report
}

fn idle(pages: u64, cleared: u64) -> Value {
    json!({"pages": pages, "unmapped": 0, "still_idle": 0, "cleared": cleared})
}

#[test]
fn phases_come_in_the_order_of_the_kernels_test() {
    let phases =
        ["populate", "write", "read", "mark-idle 1", "write-idle", "mark-idle 2", "read-idle"];
    assert_eq!(names(&report("-b 1M")), phases);
    let output = slat("access-tracking -v 2 -b 1M --check");
    assert_eq!(output.status.code(), Some(0));
    let text = String::from_utf8(output.stdout).unwrap();
    let line =
        "Mark memory idle 2: 512 pages, 0 without a translation, 0 idle still, 512 flags cleared";
    for line in [line, "idle after each marking"] {
        assert!(text.contains(line), "{line} in {text}");
    }
}

#[test]
fn the_report_has_the_documented_shape() {
    let report = report("-v 2 -b 1M -s shmem -o --hardware-access on");
    assert_eq!((&report["workload"], &report["check"]), (&"access-tracking".into(), &Value::Null));
    let expected = json!({
        "vcpus": 2, "bytes": 1 << 20, "backing": "shmem", "backing_page": 4096, "overlap": true,
        "flush": true, "gpa": (1u64 << 40) - (2 << 20), "arch": "arm", "granule": "4k", "ipa_bits": 40, "fwb": false,
        "hardware_access": true, "clock": "real", "check": false,
        "mode": {
            "number": 6, "name": "P40V48_4K", "physical_bits": 40, "virtual_bits": 48, "page_size": 4096
        },
    });
    assert_eq!(report["config"], expected);
    assert_eq!(report["idle"], json!([idle(512, 512), idle(512, 512)]));
}

#[test]
fn pages_are_idle_after_a_marking_and_not_after_an_access() {
    for hardware in ["on", "off"] {
        for vcpus in [1, 2, 8] {
            let report = checked(&format!("-v {vcpus} -b 256K --hardware-access {hardware}"));
            let pages = 64 * vcpus;
            assert_eq!(report["idle"], json!([idle(pages, pages), idle(pages, pages)]));
        }
    }
    checked("-v 2 -b 256K -o");
    checked("-v 8 -b 256K -o -s anonymous_thp --hardware-access on");
}

#[test]
fn hardware_that_sets_the_flag_spares_the_faults() {
    let faults = |options: &str| {
        let report = report(options);
        ["write", "read", "write-idle", "read-idle"].map(|phase| count(&report, phase, "faults"))
    };
    assert_eq!(faults("-b 1M"), [0, 0, 256, 256]);
    assert_eq!(faults("-b 4M -s anonymous_thp"), [0, 0, 2, 2]);
    assert_eq!(faults("-b 1M --hardware-access on"), [0; 4]);
}

#[test]
fn a_block_is_idle_or_used_as_a_whole() {
    let report = checked("-v 2 -b 4M -s anonymous_thp");
    assert_eq!(report["idle"], json!([idle(2048, 4), idle(2048, 4)]));
}

#[test]
fn without_a_flush_cached_translations_hide_what_is_used() {
    let report = checked("-b 1M --no-flush");
    assert_eq!(report["idle"][0], idle(256, 256));
    assert_eq!(report["idle"][1]["still_idle"], 256);
    assert_eq!(count(&report, "write-idle", "faults"), 0);
    let notes = report["notes"].as_array().unwrap();
    let warned = |note: &Value| note.as_str().unwrap().contains("256 of 256 pages are idle");
    assert!(notes.iter().any(warned), "{notes:?}");
}

#[test]
fn flags_are_right_on_every_granule_backing_and_mode() {
    for granule in ["4k", "16k", "64k"] {
        for backing in ["anonymous", "anonymous_thp", "shmem", "shared_hugetlb"] {
            for hardware in ["on", "off"] {
                let machine = format!("--granule {granule} --hardware-access {hardware}");
                checked(&format!("-v 2 -b 1M -s {backing} {machine}"));
            }
        }
    }
    for mode in [0, 2, 4, 8, 12, 15] {
        checked(&format!("-v 2 -b 1M -m {mode}"));
    }
}
