//! What `slat page-table` promises: the stages of the kernel's test, and blocks that are blocks again in the end.

use serde_json::{Value, json};

mod command;

use command::{count, names, slat};

fn report(options: &str) -> Value {
    command::report(&format!("page-table {options}"))
}

/// A checked run in which nothing was wrong.
#[track_caller]
fn checked(options: &str) -> Value {
    let report = report(&format!("--check {options}"));
    let check = &report["check"];
    for count in ["wrong_leaves", "elsewhere", "lost", "wrong_loads", "misplaced", "violations"] {
        assert_eq!(check[count], 0, "{options}: {check}");
    }
    assert_eq!(check["adjusted"]["unmapped"], 0, "{options}: {check}");
    report
}

/// The leaves after a stage, as pairs of size and count.
fn leaves(report: &Value, stage: &str) -> Vec<(u64, u64)> {
    let leaves = report["check"][stage]["leaves"].as_array().unwrap();
    let number = |value: &Value| value.as_u64().unwrap();
    leaves.iter().map(|leaf| (number(&leaf["size"]), number(&leaf["count"]))).collect()
}

const K: u64 = 1 << 10;
const M: u64 = 1 << 20;

#[test]
fn stages_come_in_the_order_of_the_kernels_test() {
    let stages = ["create", "enable", "update", "disable", "collapse", "adjust"];
    assert_eq!(names(&report("-b 1M")), stages);
    let output = slat("page-table -v 3 -b 1M --check");
    assert_eq!(output.status.code(), Some(0));
    let text = String::from_utf8(output.stdout).unwrap();
    for stage in ["CREATE", "UPDATE", "ADJUST"] {
        let line = format!("KVM_{stage}_MAPPINGS: total execution time: ");
        assert!(text.contains(&line), "{line} in {text}");
    }
    assert!(text.contains("nothing lost"), "{text}");
}

#[test]
fn the_report_has_the_documented_shape() {
    let report = report("-v 2 -b 3M -s anonymous_thp -p 0x40000000 --eager-split 2M");
    assert_eq!((&report["workload"], &report["check"]), (&"page-table".into(), &Value::Null));
    let expected = json!({
        "vcpus": 2, "bytes": 4 * M, "backing": "anonymous_thp", "backing_page": 2 * M, "gpa": 1 << 30,
        "arch": "arm", "granule": "4k", "ipa_bits": 40, "eager_split": 2 * M, "fwb": false, "hardware_access": false,
        "clock": "real", "check": false,
        "mode": {
            "number": 6, "name": "P40V48_4K", "physical_bits": 40, "virtual_bits": 48, "page_size": 4096
        },
    });
    assert_eq!(report["config"], expected);
}

#[test]
fn memory_belongs_to_all_vcpus_together() {
    for vcpus in [1, 2, 8] {
        let report = checked(&format!("-v {vcpus} -b 2M"));
        assert_eq!(leaves(&report, "created"), [(4 * K, 512)]);
        assert_eq!(report["config"]["bytes"], 2 * M);
    }
}

#[test]
fn blocks_become_pages_under_the_log_and_blocks_again_after_it() {
    for vcpus in [1, 2, 8] {
        let report = checked(&format!("-v {vcpus} -b 8M -s anonymous_thp"));
        assert_eq!(leaves(&report, "created"), [(2 * M, 4)]);
        assert_eq!(leaves(&report, "updated"), [(4 * K, 2048)]);
        assert_eq!(leaves(&report, "adjusted"), [(2 * M, 4)]);
        assert_eq!(count(&report, "update", "splits"), 4);
        assert_eq!(count(&report, "collapse", "collapses"), 4);
    }
}

#[test]
fn what_was_split_twice_comes_back_twice() {
    let report = checked("-v 2 -b 1G -s shared_hugetlb_1gb");
    assert_eq!(leaves(&report, "updated"), [(4 * K, 512), (2 * M, 511)]);
    assert_eq!(leaves(&report, "adjusted"), [(1024 * M, 1)]);
    assert_eq!(count(&report, "collapse", "collapses"), 2);
}

#[test]
fn a_split_loses_no_translation_so_reads_do_not_fault() {
    let report = report("-b 8M -s anonymous_thp");
    assert_eq!(count(&report, "create", "faults"), 4);
    assert_eq!(count(&report, "update", "faults"), 4);
    assert_eq!(count(&report, "adjust", "faults"), 0);
}

#[test]
fn eager_split_leaves_no_split_to_the_faults() {
    let report = checked("-v 2 -b 8M -s anonymous_thp --eager-split 2M");
    assert_eq!((count(&report, "enable", "splits"), count(&report, "update", "splits")), (4, 0));
    assert_eq!(leaves(&report, "adjusted"), [(2 * M, 4)]);
}

#[test]
fn memory_of_small_pages_is_written_page_by_page() {
    for backing in ["anonymous", "shmem"] {
        let report = report(&format!("-b 2M -s {backing}"));
        assert_eq!(
            (count(&report, "update", "faults"), count(&report, "update", "splits")),
            (512, 0)
        );
    }
}

#[test]
fn leaves_are_right_on_every_granule_backing_and_mode() {
    for granule in ["4k", "16k"] {
        for backing in ["anonymous", "anonymous_thp", "anonymous_hugetlb_64kb", "shared_hugetlb"] {
            checked(&format!("-v 2 -b 4M -s {backing} --granule {granule}"));
        }
    }
    checked("-v 2 -b 512M -s anonymous_thp --granule 64k");
    checked("-v 2 -b 64M -s anonymous_hugetlb_32mb");
    for mode in [0, 2, 4, 5, 12, 15] {
        checked(&format!("-v 2 -b 2M -s anonymous_thp -m {mode}"));
    }
    checked("-v 2 -b 4M -s anonymous_thp -p 0x1000");
    checked("-v 2 -b 4M -s anonymous_thp --hardware-access on --fwb");
}
