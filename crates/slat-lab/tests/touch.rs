//! What `slat touch`, `boot` and `app` promise: the faults of each window of fault-around, and traces that say the same
//! when they are replayed.

use std::fs;
use std::path::PathBuf;

use serde_json::Value;

mod command;

use command::{report, slat};

fn faults(report: &Value) -> u64 {
    report["touched"]["faults"].as_u64().unwrap()
}

/// A file of this test process.
fn file(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name)
}

/// A trace of single writes, as the description of the format says.
fn trace(pages: u64, touched: &[u64]) -> Vec<u8> {
    let (memory, touches) = (pages * 4096, touched.len());
    let head =
        format!("slat touches 1\norigin test\npage 4096\nmemory {memory}\ntouches {touches}\n\n");
    let mut bytes = head.into_bytes();
    let mut next = 0_i64;
    for &page in touched {
        let way = page as i64 - next;
        let zigzag = if way < 0 { (-way * 2 - 1) as u64 } else { way as u64 * 2 };
        let mut number = zigzag << 2 | 2;
        while number >= 128 {
            bytes.push((number % 128) as u8 + 128);
            number /= 128;
        }
        bytes.push(number as u8);
        next = page as i64 + 1;
    }
    bytes
}

/// Pages in an order without any.
fn mixed(pages: u64) -> Vec<u64> {
    let mut state = 1_u64;
    let mut touched = Vec::new();
    for _ in 0..2 * pages {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        touched.push((state >> 33) % pages);
    }
    touched
}

/// Faults where a fault fills the runs of empty entries in its window that end before one that is not.
fn faults_with_closed_runs(pages: u64, touched: &[u64]) -> u64 {
    let mut mapped = vec![false; pages as usize];
    let mut faults = 0;
    for &page in touched {
        let page = page as usize;
        if mapped[page] {
            continue;
        }
        faults += 1;
        mapped[page] = true;
        let window = page / 8 * 8..page / 8 * 8 + 8;
        let last = window.clone().rev().find(|page| mapped[*page]).unwrap();
        mapped[window.start..last].fill(true);
    }
    faults
}

#[test]
fn a_window_of_eight_spares_seven_of_eight_faults_and_closed_runs_none_of_them() {
    for arch in ["arm", "ept", "npt"] {
        let count = |around: &str| {
            faults(&report(&format!("touch --size 4M --arch {arch} --fault-around {around}")))
        };
        assert_eq!(["1", "closed-runs", "8", "512"].map(count), [1024, 1024, 128, 2], "{arch}");
    }
}

#[test]
fn an_adaptive_window_spares_more_where_all_is_used() {
    for machine in ["--arch ept", "--arch npt", "--hardware-access on"] {
        let adaptive = report(&format!("touch --size 16M {machine} --fault-around adaptive"));
        assert!(faults(&adaptive) < 100, "{machine}: {}", adaptive["touched"]);
    }
}

#[test]
fn pages_and_vcpus_divide_the_memory() {
    let count = |line: &str| faults(&report(line));
    assert_eq!(count("touch --size 4M --pages 16k --fault-around 1"), 256);
    assert_eq!(count("touch --size 4M -v 2 -w 50"), 128);
}

#[test]
fn closed_runs_fill_what_kvm_filled_in_any_order() {
    let (pages, touched) = (512, mixed(512));
    let path = file("mixed.touches");
    fs::write(&path, trace(pages, &touched)).unwrap();
    let line = format!("boot --trace {} --arch ept --fault-around", path.display());
    let before = faults(&report(&format!("{line} closed-runs")));
    assert_eq!(before, faults_with_closed_runs(pages, &touched));
    let after = faults(&report(&format!("{line} 8")));
    assert_eq!(after, pages / 8);
}

#[test]
fn a_recorded_trace_faults_like_what_it_recorded() {
    let path = file("touch.touches");
    let path = path.display();
    let touched = report(&format!("touch --size 2M -w 30 --record {path}"));
    let replayed = report(&format!("app --trace {path}"));
    assert_eq!(touched["touched"], replayed["touched"]);
    assert!(replayed["config"]["trace"].as_str().unwrap().starts_with("recorded: slat touch"));
    let again = file("again.touches");
    report(&format!("boot --trace {path} --record {}", again.display()));
    assert_eq!(fs::read(file("touch.touches")).unwrap(), fs::read(again).unwrap());
}

#[test]
fn a_trace_says_in_report_and_file_whether_it_was_recorded_or_made_up() {
    for (name, origin) in [("boot", "recorded: slat boot --backend metal"), ("app", "synthetic")] {
        let path = file(&format!("{name}.touches"));
        let output = slat(&format!("{name} --record {}", path.display()));
        let said = String::from_utf8(output.stdout).unwrap();
        assert!(said.contains(&format!("trace {origin}")), "{said}");
        let head = format!("slat touches 1\norigin {origin}");
        assert!(fs::read(path).unwrap().starts_with(head.as_bytes()));
    }
}

#[test]
fn what_is_no_trace_or_makes_no_sense_is_refused() {
    let refused = |line: &str, why: &str| {
        let output = slat(line);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{line}: {said}");
        assert!(said.contains(why), "{line}: {said}");
    };
    let path = file("bad.touches");
    let mut bytes = trace(512, &[1, 2, 300]);
    for (cut, why) in [(0, "says 3"), (1, "middle of a run"), (100, "first line")] {
        bytes.truncate(bytes.len().saturating_sub(cut));
        let bytes = if cut == 0 { [&bytes[..], &[2]].concat() } else { bytes.clone() };
        fs::write(&path, bytes).unwrap();
        refused(&format!("boot --trace {}", path.display()), why);
    }
    fs::write(&path, trace(512, &[512])).unwrap();
    refused(&format!("app --trace {}", path.display()), "outside of the 512 pages");
    refused("boot --trace /nowhere/at/all", "/nowhere/at/all");
    refused("touch --fault-around 3", "power of two");
    refused("touch --fault-around 1024", "1 to 512");
    refused("touch --fault-around adaptive", "--hardware-access on");
    refused("touch --size 4M -v 3", "divided among 3");
    refused("touch -v 2 --record x", "have none");
    refused("touch --size 0", "needs memory");
    refused("touch --size 2T", "40-bit");
}
