//! What `slat demand-paging` promises: every page comes once, with its contents, when a guest asks for it.

use serde_json::{Value, json};

mod command;

use command::{count, names, slat};

fn report(options: &str) -> Value {
    command::report(&format!("demand-paging {options}"))
}

/// A checked run in which nothing was wrong.
#[track_caller]
fn checked(options: &str) -> Value {
    let report = report(&format!("--check {options}"));
    let check = &report["check"];
    let wrong = [
        "unserved",
        "unasked",
        "miscounted",
        "elsewhere",
        "unfilled",
        "wrong_loads",
        "misplaced",
        "violations",
    ];
    for count in wrong {
        assert_eq!(check[count], 0, "{options}: {check}");
    }
    report
}

/// Requests, pages served, and requests for pages that were there already.
fn served(report: &Value) -> (u64, u64, u64) {
    let count = |name: &str| report["demand"]["userfault"][name].as_u64().unwrap();
    (count("requests"), count("served"), count("duplicates"))
}

#[test]
fn phases_and_lines_are_those_of_the_kernels_test() {
    assert_eq!(names(&report("-b 1M")), ["demand"]);
    assert_eq!(names(&report("-b 1M -u MISSING")), ["demand"]);
    assert_eq!(names(&report("-b 1M -u MINOR -s shmem")), ["fill", "demand"]);
    assert_eq!(names(&checked("-b 1M -u MISSING")), ["demand", "check"]);
    let output = slat("demand-paging -v 2 -b 1M -u MISSING --check");
    assert_eq!(output.status.code(), Some(0));
    let text = String::from_utf8(output.stdout).unwrap();
    for line in [
        "Total guest execution time: ",
        "Per-vcpu demand paging rate: ",
        "Overall demand paging rate: ",
        "Userfault: 512 requests, 512 served, 0 duplicates",
        "every page served once",
    ] {
        assert!(text.contains(line), "{line} in {text}");
    }
}

#[test]
fn the_report_has_the_documented_shape() {
    let report = report("-v 2 -b 1M -u MISSING -a -d 1 -r 2");
    assert_eq!((&report["workload"], &report["check"]), (&"demand-paging".into(), &Value::Null));
    let expected = json!({
        "vcpus": 2, "bytes": 1 << 20, "backing": "anonymous", "backing_page": 4096, "overlap": false,
        "userfault": "MISSING", "single": true, "delay_microseconds": 1, "readers": 2, "pinning": null,
        "gpa": (1u64 << 40) - (2 << 20), "arch": "arm", "granule": "4k", "ipa_bits": 40, "fwb": false,
        "hardware_access": false, "clock": "real", "check": false,
        "mode": {
            "number": 6, "name": "P40V48_4K", "physical_bits": 40, "virtual_bits": 48, "page_size": 4096
        },
    });
    assert_eq!(report["config"], expected);
    let demand = &report["demand"];
    let rate = |name: &str| demand[name].as_f64().unwrap();
    let each = rate("pages_per_second_per_vcpu");
    assert!(each > 0.0 && (rate("pages_per_second") - 2.0 * each).abs() < 1e-3 * each);
    assert!(self::report("-b 1M")["demand"]["userfault"].is_null());
}

#[test]
fn each_page_is_served_once_for_any_number_of_vcpus() {
    for mode in ["-u MISSING", "-u MISSING -s shmem", "-u MINOR -s shmem"] {
        for vcpus in [1, 2, 8] {
            for queues in ["", "-a", "-r 3"] {
                let options = format!("-v {vcpus} -b 256K {mode} {queues}");
                assert_eq!(served(&checked(&options)), (64 * vcpus, 64 * vcpus, 0), "{options}");
            }
        }
    }
}

#[test]
fn pages_that_several_vcpus_ask_for_are_served_once_all_the_same() {
    for mode in ["-u MISSING", "-u MINOR -s shmem"] {
        for vcpus in [2, 8] {
            let report = checked(&format!("-v {vcpus} -b 256K -o -r 4 {mode}"));
            assert_eq!(report["config"]["single"], true);
            let (requests, served, duplicates) = served(&report);
            assert_eq!((served, requests), (64 * vcpus, served + duplicates));
        }
    }
}

#[test]
fn a_page_is_what_the_backing_gives() {
    let report = checked("-v 2 -b 8M -u MISSING -s anonymous_thp");
    assert_eq!((served(&report), count(&report, "demand", "faults")), ((8, 8, 0), 8));
    let report = checked("-v 2 -b 1M -u MINOR -s shared_hugetlb_2mb");
    let (_, served, _) = served(&report);
    assert_eq!(served, 1, "one page for both vCPUs");
    checked("-v 2 -b 4M -u MISSING -s anonymous_hugetlb_64kb");
    checked("-v 2 -b 32M -u MISSING -s anonymous_thp --granule 16k");
}

#[test]
fn what_no_guest_touches_is_not_served() {
    // Guest pages of 64K on a host with pages of 4K: fifteen of sixteen are never asked for.
    let report = checked("-v 2 -b 1M -u MISSING -m P40V48_64K");
    assert_eq!(served(&report), (32, 32, 0));
    // And sixteen guest pages in a page of a 64K host.
    let report = checked("-v 2 -b 1M -u MINOR -s shmem --granule 64k");
    assert_eq!(served(&report), (32, 32, 0));
}

#[test]
fn without_a_handler_the_host_has_every_page() {
    for vcpus in [1, 2, 8] {
        let report = checked(&format!("-v {vcpus} -b 256K"));
        assert_eq!(count(&report, "demand", "faults"), 64 * vcpus);
    }
    let report = report("-b 256K -d 5");
    assert!(report["notes"][0].as_str().unwrap().contains("mean nothing without -u"));
}

#[test]
fn a_handler_that_is_slow_serves_all_the_same() {
    let report = checked("-v 2 -b 128K -u MISSING -d 200 -r 2");
    assert_eq!(served(&report), (64, 64, 0));
}
