//! What `slat dirty-log-test` promises: by each way of logging, what is reported fits what is in memory.

use serde_json::Value;

mod command;

use command::{count, names, report, slat};

const WAYS: [&str; 4] = ["dirty-log", "clear-log", "dirty-ring", "hardware"];

/// A run whose check found nothing, and in which every way of logging reported pages.
#[track_caller]
fn clean(options: &str) -> Value {
    let report = report(&format!("dirty-log-test -I 2 {options}"));
    let check = &report["check"];
    for count in ["missing", "stale", "early", "mismatched", "foreign", "violations"] {
        assert_eq!(check[count], 0, "{options}: {check}");
    }
    for mode in report["modes"].as_array().unwrap() {
        assert!(mode["dirty"].as_u64().unwrap() > 0, "{options}: {mode}");
        assert!(mode["writes"].as_u64().unwrap() > 0, "{options}: {mode}");
    }
    report
}

#[test]
fn reports_fit_memory_by_every_way_of_logging() {
    for (vcpus, bytes) in [(1, "4M"), (2, "1M"), (8, "128K")] {
        let report = clean(&format!("-v {vcpus} -b {bytes} -i 12 --check"));
        assert_eq!(names(&report), WAYS);
        let modes = report["modes"].as_array().unwrap();
        assert_eq!(modes.iter().map(|mode| &mode["mode"]).collect::<Vec<_>>(), WAYS);
        assert!(modes.iter().all(|mode| mode["rounds"] == 11));
    }
}

#[test]
fn reports_fit_memory_on_any_granule_guest_page_and_backing() {
    for options in [
        "-s anonymous_thp",
        "-s shmem -p 0x201000",
        "--granule 16k",
        "--granule 64k",
        "--granule 64k -m P40V48_64K",
        "-m P36V47_16K --hardware-access on",
        "-s shared_hugetlb_2mb --fwb",
    ] {
        clean(&format!("-v 2 -b 2M -i 5 --check {options}"));
    }
}

#[test]
fn rings_that_fill_hold_their_vcpus_until_they_are_reset() {
    let report = clean("-b 4M -i 12 -M dirty-ring -c 256 --check");
    assert!(report["modes"][0]["ring_full"].as_u64().unwrap() > 0);
    assert_eq!(report["config"]["ring_entries"], 256);
}

#[test]
fn memory_that_was_written_under_a_hardware_log_faults_no_more() {
    let report = clean("-b 2M -i 8 -M hardware");
    assert_eq!(count(&report, "hardware", "faults"), 512 + 3);
    assert!(report["modes"][0]["writes"].as_u64().unwrap() > 515);
    let protected = clean("-b 2M -i 8 -M dirty-log");
    assert!(count(&protected, "dirty-log", "faults") > 515);
}

#[test]
fn memory_has_three_pages_more_and_rings_are_powers_of_two() {
    let config = &clean("-b 2M -i 3 -c 700")["config"];
    assert_eq!(config["bytes"], (2 << 20) + 3 * 4096);
    assert_eq!(config["ring_entries"], 512);
    assert_eq!(config["log"], serde_json::json!(WAYS));
    let config = &clean("-v 2 -b 1M -i 3 --granule 64k -M clear-log")["config"];
    assert_eq!(config["bytes"], (2 << 20) + 65536);
}

#[test]
fn text_has_the_kernels_line_for_each_way() {
    let text = String::from_utf8(slat("dirty-log-test -b 1M -i 3 -I 1").stdout).unwrap();
    for way in WAYS {
        let line = format!("{way}: Total bits checked: dirty (");
        assert!(text.contains(&line), "{line} in {text}");
    }
    assert!(text.contains("track_next (") && text.contains("all reports fit memory"), "{text}");
}
