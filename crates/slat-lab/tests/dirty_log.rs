//! What `slat dirty-log` promises: its phases, its report, and a clean check on every granule, backing and mode.

use serde_json::Value;

mod command;

use command::{count, names, slat};

#[track_caller]
fn report(options: &str) -> Value {
    command::report(&format!("dirty-log {options}"))
}

/// A checked run: nothing found, every page watched, and the log collected while vCPUs wrote.
#[track_caller]
fn checked(options: &str) -> Value {
    let report = report(&format!("--check {options}"));
    let check = &report["check"];
    for count in ["lost", "wrong_loads", "misplaced", "violations"] {
        assert_eq!(check[count], 0, "{options}: {check}");
    }
    assert!(check["collections_while_running"].as_u64().unwrap() >= 4, "{options}: {check}");
    assert!(check["changed"].as_u64().unwrap() >= check["pages"].as_u64().unwrap(), "{options}");
    report
}

#[test]
fn phases_come_in_the_order_of_the_kernels_test() {
    assert_eq!(
        names(&report("-b 1M")),
        [
            "populate", "enable", "dirty 1", "get 1", "clear 1", "dirty 2", "get 2", "clear 2",
            "disable"
        ]
    );
    assert_eq!(
        names(&report("-b 1M -g -i 3")),
        [
            "populate", "enable", "dirty 1", "get 1", "dirty 2", "get 2", "dirty 3", "get 3",
            "disable"
        ]
    );
    assert!(names(&checked("-b 1M")).contains(&"check".to_owned()));
    assert_eq!(names(&report("-b 1M --log ring")), names(&report("-b 1M")));
    assert_eq!(names(&report("-b 1M --log hardware")), names(&report("-b 1M -g")));
}

#[test]
fn the_report_has_the_documented_shape() {
    let report = report("-v 2 -b 4M -s anonymous_thp -g -r 7 -w 50 -a -o -x 2 -e");
    assert_eq!((&report["workload"], &report["backend"]), (&"dirty-log".into(), &"model".into()));
    let config = &report["config"];
    let expected = serde_json::json!({
        "vcpus": 2, "bytes": 4 << 20, "iterations": 2, "write_percent": 50, "random_order": true,
        "seed": 7, "log": "bitmap", "ring_entries": null, "manual_protect": false, "run_while_disabling": true, "overlap": true, "slots": 2,
        "backing": "anonymous_thp", "backing_page": 2 << 20, "arch": "arm", "granule": "4k", "ipa_bits": 40,
        "eager_split": null, "split_threads": null, "pinning": null, "fwb": false, "hardware_access": false, "clock": "real", "check": false,
        "gpa": (1u64 << 40) - (8 << 20),
        "mode": {
            "number": 6, "name": "P40V48_4K", "physical_bits": 40, "virtual_bits": 48, "page_size": 4096
        },
    });
    assert_eq!(*config, expected);
    assert_eq!(report["check"], Value::Null);
    assert!(report["notes"].as_array().unwrap().is_empty());
    let counters = |of: &Value| {
        let keys = [
            "faults",
            "splits",
            "collapses",
            "tables_allocated",
            "tables_freed",
            "publishes",
            "entries_visited",
        ];
        let kinds = ["by_ipa", "by_range", "combined", "everything", "local"];
        assert!(keys.iter().all(|key| of[key].is_u64()), "{of}");
        assert!(kinds.iter().all(|kind| of["invalidations"][kind].is_u64()), "{of}");
        of["faults"].as_u64().unwrap()
    };
    let phases = report["phases"].as_array().unwrap();
    assert!(phases.iter().all(|phase| phase["seconds"].as_f64().unwrap() >= 0.0));
    let sum: u64 = phases.iter().map(|phase| counters(&phase["counters"])).sum();
    assert_eq!(counters(&report["counters"]), sum);
}

#[test]
fn text_has_a_row_for_each_phase_and_is_plain_when_piped() {
    let output = slat("dirty-log -b 2M --check");
    assert_eq!(output.status.code(), Some(0));
    assert!(output.stderr.is_empty());
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.chars().all(|c| c == '\n' || c.is_ascii_graphic() || c == ' '), "{text:?}");
    for wanted in
        ["populate", "clear 2", "total", "Get dirty log over 2 iterations took", "nothing lost"]
    {
        assert!(text.contains(wanted), "{wanted} in {text}");
    }
}

#[test]
fn populating_faults_once_for_each_leaf() {
    assert_eq!(count(&report("-b 4M"), "populate", "faults"), 1024);
    assert_eq!(count(&report("-b 4M -s anonymous_thp"), "populate", "faults"), 2);
    assert_eq!(count(&report("-b 4M -s shared_hugetlb_1gb"), "populate", "faults"), 2);
    assert_eq!(count(&report("-b 64M -s anonymous_thp --granule 16k"), "populate", "faults"), 2);
    assert_eq!(count(&report("-b 4M -m P40V48_64K"), "populate", "faults"), 64);
    assert_eq!(count(&report("-b 4M -s anonymous_thp -p 0x1000"), "populate", "faults"), 1024);
}

#[test]
fn eager_split_leaves_no_split_to_the_faults() {
    let lazy = report("-b 4M -s anonymous_thp -g");
    assert_eq!((count(&lazy, "enable", "splits"), count(&lazy, "dirty 1", "splits")), (0, 2));
    let eager = report("-b 4M -s anonymous_thp -g --eager-split 2M");
    assert_eq!((count(&eager, "enable", "splits"), count(&eager, "dirty 1", "splits")), (2, 0));
    let manual = report("-b 4M -s anonymous_thp --eager-split 2M");
    assert_eq!((count(&manual, "enable", "splits"), count(&manual, "clear 1", "splits")), (0, 2));
}

#[test]
fn without_manual_protect_every_write_after_a_collection_faults_once() {
    let report = report("-b 4M -g");
    assert_eq!(
        (count(&report, "dirty 1", "faults"), count(&report, "dirty 2", "faults")),
        (1024, 1024)
    );
    let manual = self::report("-b 4M");
    assert_eq!(
        (count(&manual, "dirty 1", "faults"), count(&manual, "dirty 2", "faults")),
        (0, 1024)
    );
}

#[test]
fn reads_dirty_nothing() {
    let report = report("-b 4M -g -w 0");
    assert_eq!((count(&report, "dirty 1", "faults"), count(&report, "dirty 2", "faults")), (0, 0));
}

#[test]
fn nothing_is_lost_on_any_granule_backing_and_kind_of_log() {
    for granule in ["4k", "4k --eager-split 2M", "16k", "64k"] {
        for backing in ["anonymous", "anonymous_thp", "anonymous_hugetlb_1gb", "shmem"] {
            for log in ["", "-g"] {
                checked(&format!("-v 2 -b 2M -s {backing} --granule {granule} {log}"));
            }
        }
    }
}

#[test]
fn nothing_is_lost_where_whole_blocks_are_split() {
    checked("-v 2 -b 32M -s anonymous_thp --granule 16k --eager-split 32M");
    checked("-v 2 -b 32M -s anonymous_thp --granule 16k -g");
    let options = "-v 2 -b 256M -s anonymous_thp --granule 64k -m P40V48_64K";
    let blocks = checked(&format!("{options} --eager-split 512M"));
    assert_eq!(count(&blocks, "clear 1", "splits"), 1);
    assert!(count(&checked(&format!("{options} -g")), "dirty 1", "splits") >= 1);
}

#[test]
fn nothing_is_lost_in_any_guest_mode() {
    for mode in [0, 1, 2, 3, 4, 5, 12, 13, 14, 15] {
        checked(&format!("-v 2 -b 2M -s anonymous_thp -m {mode}"));
    }
    // Smaller, equal and larger guest pages than the host's; the widest addresses of each granule.
    for granule in ["16k", "64k"] {
        for mode in [0, 2, 6, 7, 8] {
            checked(&format!("-v 2 -b 2M -s anonymous_thp -m {mode} --granule {granule}"));
        }
    }
}

#[test]
fn nothing_is_lost_when_vcpus_overlap_are_many_or_run_on_while_disabling() {
    for options in [
        "-v 2 -b 2M -o",
        "-v 2 -b 2M -o -g -e -s anonymous_thp",
        "-v 8 -b 512K -e",
        "-v 8 -b 512K -o -s anonymous_thp --eager-split 2M",
        "-v 2 -b 1M -x 8",
        "-v 1 -b 268K -g",
        "-v 3 -b 268K -x 67 -o -e",
        "-v 2 -b 2M -a -w 30 -r 5 -i 5",
        "-v 2 -b 2M -s anonymous_thp -p 0x201000",
        "-v 2 -b 2M --fwb --ipa-bits 36",
    ] {
        checked_changing(options);
    }
}

#[test]
fn nothing_is_lost_in_dirty_rings_and_in_hardwares_state_whatever_the_number_of_vcpus() {
    for vcpus in [1, 2, 8] {
        for log in ["ring", "ring --ring 256 -s anonymous_thp -e", "hardware -o"] {
            checked_changing(&format!("-v {vcpus} -b 1M --log {log}"));
        }
    }
}

#[test]
fn nothing_is_lost_in_dirty_rings_and_in_hardwares_state_on_any_granule_and_in_many_slots() {
    for log in ["ring --ring 256", "hardware"] {
        for options in ["--granule 16k", "--granule 64k -s anonymous_thp", "-x 8 -a -w 50"] {
            checked_changing(&format!("-v 2 -b 2M {options} --log {log}"));
        }
    }
}

#[test]
fn a_full_ring_is_emptied_while_its_vcpu_waits_and_every_page_is_in_it_once_a_pass() {
    let report = report("-b 4M --log ring --ring 256");
    // One fault for each page; the one that fills 192 of the entries is protected before its write, and faults again.
    for pass in ["dirty 1", "dirty 2"] {
        assert_eq!(count(&report, pass, "faults"), 1024 + 1024 / 192, "{pass}");
        assert!(count(&report, pass, "entries_visited") >= 1024 - 256, "{pass}");
    }
    let roomy = self::report("-b 4M --log ring");
    assert_eq!(count(&roomy, "dirty 1", "entries_visited"), 0);
    assert_eq!(count(&roomy, "clear 1", "entries_visited"), 1024);
    assert_eq!(roomy["config"]["ring_entries"], 65536);
}

#[test]
fn where_hardware_keeps_dirty_state_no_write_faults_under_the_log() {
    let report = report("-v 2 -b 4M --log hardware");
    assert_eq!(report["config"]["hardware_access"], true);
    assert_eq!((count(&report, "dirty 1", "faults"), count(&report, "dirty 2", "faults")), (0, 0));
    assert_eq!(count(&report, "get 1", "entries_visited"), 2048);
}

#[test]
fn split_threads_leave_no_split_to_clears_and_faults_in_any_log() {
    for log in ["bitmap", "bitmap -g", "ring", "hardware"] {
        for threads in [1, 2, 8] {
            let options = "-v 2 -b 8M -s anonymous_thp --eager-split 2M -x 2";
            let report = report(&format!("{options} --log {log} --split-threads {threads}"));
            assert_eq!(count(&report, "enable", "splits"), 8, "{log}, {threads} threads");
            assert_eq!(report["counters"]["splits"], 8, "{log}, {threads} threads");
            assert_eq!(report["config"]["split_threads"], threads);
        }
        checked(&format!("-b 4M -s anonymous_thp --eager-split 2M --log {log} --split-threads 3"));
    }
}

/// As `checked`, for runs that do not write every page in every pass.
#[track_caller]
fn checked_changing(options: &str) {
    let report = report(&format!("--check {options}"));
    let check = &report["check"];
    for count in ["lost", "wrong_loads", "misplaced", "violations"] {
        assert_eq!(check[count], 0, "{options}: {check}");
    }
    assert!(check["changed"].as_u64().unwrap() > 0, "{options}: {check}");
}
