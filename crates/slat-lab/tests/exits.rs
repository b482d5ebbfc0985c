//! What `--exits` promises: every workload says what its vCPUs left their guests for, and nothing of it without the option.

use serde_json::Value;

mod command;

use command::{report, slat};

const KEYS: [&str; 9] = [
    "max_us",
    "mean_us",
    "min_us",
    "pages",
    "reason",
    "samples",
    "samples_percent",
    "spread_percent",
    "time_percent",
];

fn rows(report: &Value) -> &[Value] {
    report["exits"].as_array().unwrap()
}

fn samples(rows: &[Value]) -> u64 {
    rows.iter().map(|row| row["samples"].as_u64().unwrap()).sum()
}

fn reasons(report: &Value) -> Vec<&str> {
    rows(report).iter().map(|row| row["reason"].as_str().unwrap()).collect()
}

#[test]
fn every_workload_has_a_row_for_each_reason_and_every_fault_in_one() {
    for line in [
        "dirty-log -v 2 -b 2M -i 2",
        "dirty-log-test -v 2 -b 2M -i 4 -c 256 -I 2 -M dirty-log",
        "page-table -v 2 -b 4M -s anonymous_thp",
        "demand-paging -v 2 -b 1M -u MISSING",
        "access-tracking -v 2 -b 2M",
        "memslot --vcpus 2 -s 64 -l 0.02 --bytes 64M",
        "memslot-stress -v 2 -b 2M -i 3",
        "mmu-stress -c 2 -m 32M -s 16M",
        "touch --size 2M",
    ] {
        let report = report(&format!("{line} --exits"));
        let rows = rows(&report);
        assert_eq!(samples(rows), report["counters"]["faults"].as_u64().unwrap(), "{line}");
        for row in rows {
            assert_eq!(row.as_object().unwrap().keys().collect::<Vec<_>>(), KEYS);
            let figure = |key: &str| row[key].as_f64().unwrap();
            assert!(figure("min_us") <= figure("mean_us") && figure("mean_us") <= figure("max_us"));
        }
        for key in ["samples_percent", "time_percent"] {
            let sum: f64 = rows.iter().map(|row| row[key].as_f64().unwrap()).sum();
            assert!((sum - 100.0).abs() < 1e-6, "{line}: {sum} {key}");
        }
        let phases = report["phases"].as_array().unwrap();
        let phases = phases.iter().filter_map(|phase| phase["exits"].as_array());
        assert_eq!(phases.map(|rows| samples(rows)).sum::<u64>(), samples(rows), "{line}");
    }
}

#[test]
fn reasons_are_those_of_the_architecture_and_of_what_was_found() {
    let of = |line: &str| report(&format!("{line} --exits"));
    let arm = of("dirty-log -b 1M --log ring --ring 256");
    for reason in ["translation fault", "permission fault"] {
        assert!(reasons(&arm).contains(&reason), "{}", arm["exits"]);
    }
    assert!(reasons(&of("access-tracking -b 1M")).contains(&"access flag fault"));
    assert_eq!(reasons(&of("touch --size 1M --arch ept")), ["EPT violation"]);
    assert_eq!(reasons(&of("touch --size 1M --arch npt")), ["nested page fault"]);
    let moved = of("memslot -s 32 -l 0.05 --bytes 64M -d -f 3 -e 3");
    assert!(reasons(&moved).contains(&"MMIO"), "{}", moved["exits"]);
}

#[test]
fn a_guest_whose_tables_are_shadowed_has_reasons_of_its_own() {
    let report = report("rmap-fork 20 -b 128K -w 10 --exits");
    let expected = [
        "CR3 load",
        "INVLPG",
        "emulated store",
        "guest's page fault",
        "second-level fault",
        "shadow fault",
    ];
    let mut found = reasons(&report);
    found.sort_unstable();
    assert_eq!(found, expected);
    let faults = rows(&report)
        .iter()
        .filter(|row| !matches!(row["reason"].as_str(), Some("CR3 load" | "INVLPG")));
    let faults: u64 = faults.map(|row| row["samples"].as_u64().unwrap()).sum();
    assert_eq!(faults, report["counters"]["faults"].as_u64().unwrap());
}

#[test]
fn an_exit_maps_a_page_or_the_whole_window() {
    for (around, pages) in [("closed-runs", 1.0), ("8", 8.0)] {
        let report = report(&format!("touch --size 2M --arch ept --fault-around {around} --exits"));
        assert_eq!(rows(&report)[0]["pages"], pages);
    }
}

#[test]
fn without_the_option_there_is_nothing_of_it() {
    let plain = report("touch --size 1M");
    assert!(plain.get("exits").is_none() && plain["phases"][0].get("exits").is_none());
    let text = |line: &str| String::from_utf8(slat(line).stdout).unwrap();
    assert!(!text("touch --size 1M").contains("mean us"));
    let with = text("touch --size 1M --exits");
    assert!(with.contains("mean us") && with.contains("32 exits"), "{with}");
    let refused = slat("dirty-log --clock virtual --exits");
    assert_eq!(refused.status.code(), Some(2));
}
