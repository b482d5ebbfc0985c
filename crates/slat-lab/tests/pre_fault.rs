//! What `slat pre-fault` promises: memory is mapped ahead as far as there are slots, in calls that can be resumed.

use serde_json::Value;

mod command;

use command::{count, names, report, slat};

/// A run whose check found nothing.
#[track_caller]
fn clean(options: &str) -> Value {
    let report = report(&format!("pre-fault {options}"));
    let check = &report["check"];
    for count in ["unclear", "wrong_rest", "wrong_error", "wrong_loads", "faults", "violations"] {
        assert_eq!(check[count], 0, "{options}: {check}");
    }
    report
}

#[test]
fn memory_is_mapped_as_far_as_there_are_slots() {
    for vcpus in [1, 2, 8] {
        clean(&format!("--vcpus {vcpus} --check"));
        clean(&format!("--vcpus {vcpus} --check --race"));
    }
}

#[test]
fn memory_is_mapped_ahead_on_any_granule_and_backing() {
    for options in [
        "--source anonymous_thp",
        "--source shared_hugetlb_2mb --hardware-access on",
        "--granule 16k",
        "--granule 64k",
        "--granule 64k --mode P40V48_64K",
        "--mode P48V48_16K --fwb",
        "--ipa-bits 32",
    ] {
        clean(&format!("--vcpus 2 --check {options}"));
        clean(&format!("--vcpus 2 --check --race {options}"));
    }
}

#[test]
fn steps_are_those_of_the_kernels_test_and_then_nothing_faults() {
    let report = clean("");
    let phases =
        ["misaligned", "pre-fault 1", "pre-fault 2", "pre-fault 3", "read 1", "resume", "read 2"];
    assert_eq!(names(&report), phases);
    assert_eq!((count(&report, "read 1", "faults"), count(&report, "read 2", "faults")), (0, 0));
    assert_eq!(report["config"]["bytes"], (2 << 20) + 4096);
    assert_eq!(report["config"]["gpa"], (1u64 << 40) - (4 << 20));
    // Two ranges refused, three steps of which the second ends in the middle, and one call for each page.
    assert_eq!(report["check"]["calls"], 2 + 4 + 513);
}

#[test]
fn a_block_is_mapped_in_one_step() {
    let blocks = clean("--source anonymous_thp");
    assert_eq!(count(&blocks, "pre-fault 1", "publishes"), 1);
    assert_eq!(blocks["check"]["calls"], 2 + 4 + 2);
}

#[test]
fn text_says_what_was_compared() {
    let text = String::from_utf8(slat("pre-fault").stdout).unwrap();
    assert!(text.contains("519 calls") && text.contains("no fault afterwards"), "{text}");
}
