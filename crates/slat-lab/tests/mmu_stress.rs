//! What `slat mmu-stress` promises: no write passes while host memory is read-only, and none is lost before or after.

use serde_json::Value;

mod command;

use command::{count, names, report, slat};

/// A run whose check found nothing; every vCPU's writes were refused while memory was read-only.
#[track_caller]
fn clean(options: &str) -> Value {
    let report = report(&format!("mmu-stress {options}"));
    let check = &report["check"];
    for count in ["passed", "changed", "wrong_loads", "misplaced", "misled", "violations"] {
        assert_eq!(check[count], 0, "{options}: {check}");
    }
    let number = |name: &str| check[name].as_u64().unwrap();
    assert!(number("refused") >= number("pages"), "{options}: {check}");
    report
}

#[test]
fn no_write_passes_a_read_only_window() {
    for vcpus in [1, 2, 8] {
        clean(&format!("-c {vcpus} -m 8M -s 2M --check"));
        clean(&format!("-c {vcpus} -m 16M -s 4M -H --check"));
    }
}

#[test]
fn no_write_passes_on_any_granule_or_guest_page() {
    for options in [
        "--granule 16k",
        "--granule 64k",
        "--granule 64k --mode P40V48_64K",
        "--mode P48V48_16K",
        "--hardware-access on --fwb",
    ] {
        clean(&format!("-c 2 -m 8M -s 4M --check {options}"));
    }
}

#[test]
fn phases_come_in_the_order_of_the_kernels_test() {
    let phases = ["run1", "reset", "run2", "ro", "rw", "unmap"];
    let report = clean("-c 2 -m 4M -s 1M");
    assert_eq!(names(&report), phases);
    assert_eq!(names(&clean("-c 2 -m 4M -s 1M --check"))[6..], ["check"]);
    assert_eq!(count(&report, "run1", "faults"), 1024);
    assert_eq!(count(&report, "run2", "faults"), 0);
}

#[test]
fn slots_share_one_stretch_of_host_memory() {
    let report = clean("-c 2 -m 64M -s 1M");
    let config = &report["config"];
    assert_eq!((&config["slots"], &config["bytes"]), (&64.into(), &(64 << 20).into()));
    assert_eq!(config["slot_size"], 1 << 20);
    assert_eq!(config["gpa"], 4u64 << 30);
    // What is left of the last slot belongs to it.
    assert_eq!(clean("-c 1 -m 3M -s 2M")["config"]["bytes"], 4 << 20);
}

#[test]
fn text_ends_with_the_kernels_line() {
    let text = String::from_utf8(slat("mmu-stress -c 1 -m 1M -s 1M").stdout).unwrap();
    for wanted in ["run1 = ", ", reset = ", ", run2 = ", ", ro = ", ", rw = "] {
        assert!(text.contains(wanted), "{wanted} in {text}");
    }
}
