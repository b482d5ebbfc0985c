//! Every workload runs on x86 tables as on Arm's, with its check, and in the same report.

use serde_json::Value;

mod command;

use command::{count, report};

/// EPT with accessed and dirty flags and without, and nested page tables.
const MACHINES: [&str; 3] = ["--arch ept", "--arch ept --hardware-access off", "--arch npt"];

#[track_caller]
fn checked(line: &str) -> Value {
    let report = report(&format!("{line} --check"));
    let check = &report["check"];
    assert_eq!(check["violations"], 0, "{line}: {check}");
    for count in ["lost", "wrong_loads", "misplaced"].map(|name| &check[name]) {
        assert!(count.is_null() || *count == 0, "{line}: {check}");
    }
    report
}

#[test]
fn no_log_of_any_kind_loses_a_write() {
    for machine in MACHINES {
        for log in ["bitmap", "bitmap -g", "ring --ring 256", "hardware"] {
            let line = format!("dirty-log -v 2 -b 1M -s anonymous_thp --log {log} {machine}");
            let report = checked(&line);
            assert!(report["check"]["changed"].as_u64().unwrap() > 0, "{line}");
        }
        checked(&format!("dirty-log -v 2 -b 4M -s anonymous_thp --eager-split 2M {machine}"));
        checked(&format!("dirty-log -v 8 -b 512K -o -e -m P52V48_4K {machine}"));
    }
}

#[test]
fn where_the_cpu_keeps_no_dirty_flags_writes_are_logged_by_faults_and_a_note_says_so() {
    let with = report("dirty-log -v 2 -b 4M --arch ept --log hardware");
    assert_eq!(count(&with, "dirty 2", "faults"), 0);
    assert!(with["notes"].as_array().unwrap().is_empty());
    let without = report("dirty-log -v 2 -b 4M --arch ept --log hardware --hardware-access off");
    assert_eq!(count(&without, "dirty 2", "faults"), 2048);
    assert!(without["notes"][0].as_str().unwrap().contains("no dirty flags"));
}

#[test]
fn every_other_workload_passes_its_check() {
    for machine in MACHINES {
        for line in [
            "page-table -v 2 -b 4M -s anonymous_thp",
            "demand-paging -v 2 -b 1M -u MISSING -r 2",
            "access-tracking -v 2 -b 2M",
            "dirty-log-test -v 2 -b 2M -i 4 -c 256 -I 2",
            "memslot --vcpus 2 -s 64 -l 0.02 --bytes 64M",
            "memslot-stress -v 2 -b 2M -i 3",
            "mmu-stress -c 2 -m 32M -s 16M",
            "pre-fault --vcpus 2 --race",
        ] {
            let report = checked(&format!("{line} {machine}"));
            let arch = if machine.contains("ept") { "ept" } else { "npt" };
            assert_eq!(report["config"]["arch"], arch);
        }
    }
}

#[test]
fn a_vcpu_invalidates_for_itself_and_nobody_publishes_by_instruction() {
    let report = report("dirty-log -v 2 -b 4M -s anonymous_thp --eager-split 2M --arch ept");
    let invalidations = &report["counters"]["invalidations"];
    assert!(invalidations["local"].as_u64().unwrap() > 0);
    for broadcast in ["by_ipa", "by_range", "combined", "everything"] {
        assert_eq!(invalidations[broadcast], 0, "{broadcast}");
    }
}
