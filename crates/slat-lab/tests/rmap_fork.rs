//! What `slat rmap-fork` promises: processes read what they should, however reverse maps are kept, and are counted alike.

use serde_json::Value;

mod command;

use command::{report, slat};

const DESIGNS: [&str; 4] = ["slots-3", "slots-15", "slots-14-counter", "slat"];

/// The frames of 4K with the range of counts.
fn frames(report: &Value, range: &str) -> u64 {
    let sizes = report["reverse_maps"].as_array().unwrap();
    assert_eq!(sizes[0]["page_size"], "4K");
    let frames = sizes[0]["frames"].as_array().unwrap();
    let found = frames.iter().find(|pair| pair[0] == range);
    found.unwrap_or_else(|| panic!("no range {range}"))[1].as_u64().unwrap()
}

#[test]
fn every_design_maps_the_same_and_loses_nothing() {
    let reports = DESIGNS
        .map(|design| report(&format!("rmap-fork 40 -b 128K -w 10 --design {design} --check")));
    for report in &reports {
        assert_eq!(report["check"]["wrong"], 0);
        for key in ["exit_counts", "reverse_maps"] {
            assert_eq!(report[key], reports[0][key]);
        }
        for key in ["mapped", "most_mappings", "pages_made", "synchronised"] {
            assert_eq!(report["shadow"][key], reports[0]["shadow"][key], "{key}");
        }
    }
    let bytes = reports.map(|report| report["shadow"]["descriptor_bytes"].as_u64().unwrap());
    assert!(bytes[3] < bytes[0].min(bytes[1]).min(bytes[2]), "{bytes:?}");
}

#[test]
fn a_page_is_mapped_by_every_process_that_did_not_copy_it() {
    let report = report("rmap-fork 40 -b 128K -w 25");
    // 8 of 32 pages are copied by all; the others are the parent's and the children's.
    assert_eq!(frames(&report, "32-63"), 24);
    assert_eq!(report["shadow"]["most_mappings"], 41);
    let names: Vec<_> =
        report["phases"].as_array().unwrap().iter().map(|phase| phase["name"].clone()).collect();
    assert_eq!(names, ["populate", "fork", "touch", "reap"]);
}

#[test]
fn few_shadow_pages_are_recycled_and_nothing_is_lost() {
    let report = report("rmap-fork 60 -b 64K -w 50 --shadow-pages 64 --check");
    assert!(report["shadow"]["recycled"].as_u64().unwrap() > 0);
    assert_eq!(report["check"]["wrong"], 0);
}

#[test]
fn what_makes_no_sense_is_refused() {
    for (line, why) in [
        ("rmap-fork 0", "1..=10000"),
        ("rmap-fork -b 0", "whole pages"),
        ("rmap-fork -b 5000", "whole pages"),
        ("rmap-fork -b 2G", "up to 1G"),
        ("rmap-fork 10000 -b 1G -w 100", "fewer or smaller"),
        ("rmap-fork -w 101", "0..=100"),
        ("rmap-fork --shadow-pages 5", "64.."),
        ("rmap-fork --design slots-4", "slots-3"),
    ] {
        let output = slat(line);
        assert_eq!(output.status.code(), Some(2), "{line}");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains(why), "{line}: {said}");
    }
}
