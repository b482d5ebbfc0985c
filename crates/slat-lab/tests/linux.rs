//! What `slat boot --backend metal` promises: Debian's kernel comes to its shell prompt under slat's own hypervisor, and its
//! memory is right while the dirty log goes on and off.
//!
//! Where there is no QEMU, no toolchain for bare metal, or no way to fetch the kernel, the boots are skipped, and say so;
//! `SLAT_METAL=required` makes that a failure.

use std::env;
use std::io::{self, Write};

use serde_json::Value;

mod command;

use command::slat;

/// The report of a run, or `None` if this computer cannot do it.
#[track_caller]
fn booted(line: &str) -> Option<Value> {
    let output = slat(&format!("boot --backend metal --json --time-limit 400 {line}"));
    let said = String::from_utf8_lossy(&output.stderr);
    if output.status.code() == Some(4) {
        assert_ne!(env::var("SLAT_METAL").as_deref(), Ok("required"), "{said}");
        // Past the capture of tests, which shows nothing of those that pass.
        let _ = writeln!(io::stderr(), "SKIPPED, Linux is not booted here: {said}");
        return None;
    }
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{line}: {said}{text}");
    Some(serde_json::from_str(&text).unwrap())
}

fn memory_is_right_on(vcpus: u64) {
    let Some(report) = booted(&format!("-v {vcpus} --check")) else { return };
    let check = &report["check"];
    let count = |name: &str| check[name].as_u64().unwrap();
    assert_eq!((count("lost"), count("bad")), (0, 0), "{check}");
    assert!(check["verdict"].as_str().unwrap().starts_with("memory ok"), "{check}");
    assert!(count("rounds") > 0 && count("changed") > 0, "{check}");
    assert_eq!(report["boots"][0]["vcpus_started"], vcpus);
    let counters = &report["counters"];
    // The log splits blocks, and puts them together again.
    assert!(counters["splits"].as_u64() > Some(0), "{counters}");
    assert!(counters["collapses"].as_u64() > Some(0), "{counters}");
}

#[test]
fn linux_comes_to_its_prompt_and_loses_no_write_while_the_log_goes_on_and_off() {
    memory_is_right_on(1);
    memory_is_right_on(2);
}

#[test]
fn what_a_boot_has_not_is_refused() {
    for (line, why) in [
        ("boot -v 2", "--vcpus: only with --backend metal"),
        ("boot --check", "--check: only with --backend metal"),
        ("boot --backend metal --trace /dev/null", "nothing is replayed"),
        ("boot --backend metal --arch ept", "--arch"),
        ("boot --backend metal --fault-around adaptive", "--fault-around adaptive"),
        ("boot --backend metal --record /dev/null --check", "--record"),
        ("boot --backend metal --deterministic", "--deterministic"),
        ("boot --backend kvm", "not yet"),
    ] {
        let output = slat(line);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{line}: {said}");
        assert!(said.contains(why), "{line}: {said}");
    }
}
