//! What `slat memslot-stress` promises: memslots come and go while vCPUs run, and nobody's memory suffers.

use serde_json::Value;

mod command;

use command::{count, names, report, slat};

/// A checked run: nothing found, and guests met the slot both there and not there.
#[track_caller]
fn checked(options: &str) -> Value {
    let report = report(&format!("memslot-stress --check {options}"));
    let check = &report["check"];
    for count in ["stray", "wrong_loads", "misplaced", "violations"] {
        assert_eq!(check[count], 0, "{options}: {check}");
    }
    for count in ["landed", "exits"] {
        assert!(check[count].as_u64().unwrap() > 0, "{options}: {check}");
    }
    report
}

#[test]
fn nothing_is_lost_while_slots_come_and_go() {
    for vcpus in [1, 2, 8] {
        checked(&format!("-v {vcpus} -b 512K"));
        checked(&format!("-v {vcpus} -b 512K -o -i 30"));
    }
}

#[test]
fn nothing_is_lost_on_any_granule_and_with_pages_of_any_size() {
    for options in [
        "-s anonymous_thp -b 4M",
        "-s shmem -d 100",
        "-b 2M --granule 16k",
        "-b 2M --granule 64k -m P40V48_64K",
        "-b 2M -m P36V47_16K",
        "-b 2M -s anonymous_hugetlb_2mb",
    ] {
        checked(&format!("-v 2 {options}"));
    }
}

#[test]
fn the_report_has_one_phase_and_says_where_the_slot_was() {
    let report = report("memslot-stress -v 2 -b 1M -i 3 -d 10");
    assert_eq!(report["workload"], "memslot-stress");
    assert_eq!(names(&report), ["modify"]);
    assert_eq!(report["check"], Value::Null);
    let config = &report["config"];
    let gpa = config["gpa"].as_u64().unwrap();
    assert_eq!(config["slot_gpa"], gpa - 4096);
    assert_eq!(
        (&config["iterations"], &config["delay_microseconds"], &config["slot_size"]),
        (&3.into(), &10.into(), &4096.into())
    );
    assert!(count(&report, "modify", "faults") >= 2);
}

#[test]
fn text_says_how_long_a_slot_takes() {
    let text = String::from_utf8(slat("memslot-stress -b 1M").stdout).unwrap();
    assert!(text.contains("10 slots were created and deleted in"), "{text}");
}
