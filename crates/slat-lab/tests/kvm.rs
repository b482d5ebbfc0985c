//! What workloads promise on this host's own KVM. Where there is none, they are skipped, loudly.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

use std::fs::OpenOptions;
use std::io::Write;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use serde_json::Value;

mod command;

use command::{count, names, report, slat};

/// Says loudly that something is not tested: past what collects the output of tests that pass.
fn skipped(why: &str) {
    let _ = writeln!(std::io::stderr(), "SKIPPED: {}", why.trim_end());
}

/// Whether there is a KVM to test.
fn is_there() -> bool {
    let opened = OpenOptions::new().read(true).write(true).open("/dev/kvm");
    if let Err(error) = &opened {
        skipped(&format!("no /dev/kvm that can be used: {error}"));
    }
    opened.is_ok()
}

/// The report of a run on KVM, or nothing where there is none.
#[track_caller]
fn on_kvm(line: &str) -> Option<Value> {
    is_there().then(|| report(&format!("{line} --backend kvm")))
}

#[test]
fn a_dirty_log_finds_every_write() {
    for how in ["", "-g -x 2", "-a -w 50", "-o", "-s shmem", "-s anonymous_thp -e", "-p 0x80000000"]
    {
        let Some(report) = on_kvm(&format!("dirty-log -v 2 -b 4M --check {how}")) else { return };
        assert_eq!((&report["backend"], &report["check"]["lost"]), (&"kvm".into(), &0.into()));
        assert_eq!(report["check"]["misplaced"], 0, "{how}");
        assert!(report["check"]["changed"].as_u64().unwrap() > 0, "{how}");
        assert!(report["check"].get("violations").is_none(), "nobody sees KVM's rules");
        assert!(!report["host"]["kernel"].as_str().unwrap().is_empty());
    }
}

#[test]
fn a_dirty_ring_does_so_too_even_if_it_is_often_full() {
    if !is_there() {
        return;
    }
    let output = slat("dirty-log -v 2 -b 8M --check --log ring --ring 1024 --backend kvm --json");
    if output.status.code() == Some(4) {
        skipped(&String::from_utf8_lossy(&output.stderr));
        return;
    }
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (&report["check"]["lost"], &report["config"]["ring_entries"]),
        (&0.into(), &1024.into())
    );
    assert!(names(&report).contains(&"clear 2".to_owned()));
}

#[test]
fn faults_are_those_that_kvm_counts() {
    let Some(report) = on_kvm("dirty-log -b 4M") else { return };
    assert!(count(&report, "populate", "pf_taken") >= 1024);
    assert_eq!(count(&report, "get 2", "pf_taken"), 0);
    assert!(count(&report, "populate", "pages_4k") >= 1024);
    assert!(report["counters"].get("splits").is_none(), "KVM does not count splits");
    assert!(report["config"].get("granule").is_none(), "tables are not slat's");
}

#[test]
fn what_dirty_logs_report_fits_memory() {
    if !is_there() {
        return;
    }
    let output = slat("dirty-log-test -v 2 -b 2M -i 6 -I 5 -c 256 --backend kvm --json");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    for wrong in ["missing", "stale", "early", "mismatched", "foreign"] {
        assert_eq!(report["check"][wrong], 0, "{report}");
    }
    assert!(report["check"]["dirty"].as_u64().unwrap() > 0);
    assert!(report["modes"].as_array().unwrap().len() >= 2);
    // With a way that this host has not, the others are reported all the same.
    let complete = report["modes"].as_array().unwrap().len() == 3;
    assert_eq!(output.status.code(), Some(if complete { 0 } else { 4 }));
}

#[test]
fn pages_are_mapped_and_written_under_a_log() {
    for backing in ["anonymous", "anonymous_thp", "shmem"] {
        let line = format!("page-table -v 2 -b 8M -s {backing} --check");
        let Some(report) = on_kvm(&line) else { return };
        assert_eq!(
            (&report["check"]["lost"], &report["check"]["misplaced"]),
            (&0.into(), &0.into())
        );
        let phases = ["create", "enable", "update", "check", "disable", "adjust", "execute"];
        assert_eq!(names(&report), phases);
        assert!(count(&report, "update", "pf_taken") > 0);
    }
}

#[test]
fn every_page_is_served_once() {
    for how in
        ["-u MISSING", "-u MISSING -o -r 2", "-s shmem -u MINOR", "-s shmem -u MISSING -a", ""]
    {
        let Some(report) = on_kvm(&format!("demand-paging -v 2 -b 1M --check {how}")) else {
            return;
        };
        assert_eq!(report["check"]["misplaced"], 0, "{how}");
        if how.contains("-u") {
            assert_eq!(report["demand"]["userfault"]["served"], 512, "{how}");
        }
    }
}

#[test]
fn memslots_move_and_come_and_go_while_guests_write() {
    let Some(report) = on_kvm("memslot -s 40 -l 0.05 --bytes 16M --vcpus 2 -d") else { return };
    assert_eq!(
        (&report["check"]["wrong"], &report["check"]["wrong_loads"]),
        (&0.into(), &0.into())
    );
    assert_eq!(report["tests"].as_array().unwrap().len(), 6);
    let Some(report) = on_kvm("memslot-stress -v 2 -b 1M -i 5 --check") else { return };
    assert_eq!((&report["check"]["stray"], &report["check"]["misplaced"]), (&0.into(), &0.into()));
    assert!(report["check"]["landed"].as_u64().unwrap() > 0);
}

#[test]
fn no_write_passes_while_memory_is_read_only() {
    let Some(report) = on_kvm("mmu-stress -c 2 -m 16M -s 4M --check") else { return };
    for wrong in ["changed", "misplaced", "misled"] {
        assert_eq!(report["check"][wrong], 0, "{report}");
    }
    assert!(report["check"]["refused"].as_u64().unwrap() >= 4096);
    assert_eq!(names(&report), ["run1", "reset", "run2", "ro", "rw", "unmap", "check"]);
}

#[test]
fn what_some_hosts_have_runs_or_is_named() {
    if !is_there() {
        return;
    }
    for (line, name) in [
        ("access-tracking -v 2 -b 1M --check", "page_idle"),
        ("pre-fault --vcpus 2", "KVM_CAP_PRE_FAULT_MEMORY (capability 236)"),
        ("pre-fault --race", "KVM_CAP_PRE_FAULT_MEMORY (capability 236)"),
    ] {
        let output = slat(&format!("{line} --backend kvm --json"));
        let said = String::from_utf8(output.stderr).unwrap();
        if output.status.code() == Some(4) {
            assert!(said.contains(name) && output.stdout.is_empty(), "{said}");
            skipped(&said);
            continue;
        }
        assert_eq!(output.status.code(), Some(0), "{said}");
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(
            (&report["backend"], &report["check"]["wrong_loads"]),
            (&"kvm".into(), &0.into())
        );
    }
}

#[test]
fn one_page_says_what_the_host_has() {
    if !is_there() {
        return;
    }
    let output = slat("kvm-info");
    let page = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0));
    for word in
        ["Linux", "MANUAL_DIRTY_LOG_PROTECT2", "NR_MEMSLOTS", "pf_taken", "userfaultfd", "hugetlb"]
    {
        assert!(page.contains(word), "{word}: {page}");
    }
}

#[track_caller]
fn refused(line: &str, status: i32, why: &str) {
    let output = slat(line);
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(status), "{line}: {said}");
    assert!(output.stdout.is_empty() && said.contains(why), "{line}: {said}");
}

#[test]
fn what_cannot_be_chosen_on_a_host_is_refused_with_the_reason() {
    for (options, why) in [
        ("--arch ept", "--arch"),
        ("--granule 4k", "pages of an x86 host"),
        ("--ipa-bits 40", "--ipa-bits"),
        ("--fwb", "a feature of Arm"),
        ("--hardware-access on", "kvm-info shows it"),
        ("--clock virtual", "takes the time"),
        ("--exits", "perf kvm stat"),
        ("--log hardware", "--log bitmap reads it"),
        ("--eager-split 2M", "eager_page_split"),
        ("-m P40V48_64K", "pages of 4K"),
    ] {
        refused(&format!("dirty-log -b 4M --backend kvm {options}"), 2, why);
    }
    refused("dirty-log-test -M hardware --backend kvm", 2, "-M dirty-log reads it");
    refused("page-table --eager-split 2M --backend kvm", 2, "eager_page_split");
}

#[test]
fn what_the_host_has_not_is_named_and_nothing_is_run() {
    if is_there() {
        refused(
            "dirty-log -b 4M -s anonymous_hugetlb_16kb --backend kvm",
            4,
            "no hugetlb pages of 16K",
        );
        refused(
            "dirty-log -b 4000T -m P40V48_4K --backend kvm",
            2,
            "; guest mode chooses the width",
        );
    }
}

#[test]
fn more_memslots_than_the_host_has_are_refused_by_the_capability() {
    if is_there() {
        // With that of the guest's program it is one too many for the largest limit there is.
        let why = "KVM_CAP_NR_MEMSLOTS (capability 10)";
        refused("dirty-log -b 131056K -x 32764 --backend kvm", 4, why);
    }
}

#[test]
fn open_files_are_allowed_as_far_as_they_can_be() {
    if !is_there() {
        return;
    }
    let with = |limit: &str| {
        let run =
            format!("ulimit {limit} && exec \"$0\" dirty-log -v 40 -b 1M --backend kvm --json");
        let mut shell = Command::new("sh");
        shell.args(["-c", &run, env!("CARGO_BIN_EXE_slat")]).output().unwrap()
    };
    let output = with("-n 64");
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(4), "{said}");
    assert!(output.stdout.is_empty() && said.contains("ulimit -n 152"), "{said}");
    let raised = with("-Sn 64");
    assert!(raised.status.success(), "{}", String::from_utf8_lossy(&raised.stderr));
}

#[test]
fn who_interrupts_is_told_in_which_phase() {
    if !is_there() {
        return;
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_slat"));
    command.args("dirty-log --backend kvm -b 64M -i 100000 --json".split(' '));
    let run = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    thread::sleep(Duration::from_millis(700));
    let kill = Command::new("kill").args(["-INT", &run.id().to_string()]).status().unwrap();
    let output = run.wait_with_output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(kill.success() && output.stdout.is_empty());
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("interrupted (in phase "), "{said}");
}

#[test]
fn runs_of_kvm_and_of_the_model_are_compared_phase_by_phase() {
    if !is_there() {
        return;
    }
    let directory = std::env::temp_dir().join(format!("slat-kvm-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let file = |name: &str, options: &str| {
        let path = directory.join(name);
        let output = slat(&format!("dirty-log -b 4M --json {options}"));
        std::fs::write(&path, output.stdout).unwrap();
        path.display().to_string()
    };
    let (model, kvm) = (file("model", ""), file("kvm", "--backend kvm"));
    let other = file("other", "--backend kvm -g");
    let against_model = report(&format!("compare {model} {kvm}"));
    let against_other = report(&format!("compare {kvm} {other}"));
    std::fs::remove_dir_all(&directory).unwrap();
    let differ = |comparison: &Value| -> Vec<String> {
        let differ = comparison["differ"].as_array().unwrap().iter();
        differ.map(|difference| difference["key"].as_str().unwrap().to_owned()).collect()
    };
    let keys = differ(&against_model);
    for key in ["backend", "granule", "host.kernel", "host.paging"] {
        assert!(keys.contains(&key.to_owned()), "{key}: {keys:?}");
    }
    assert_eq!(differ(&against_other), ["manual_protect"]);
    let phase = |row: &Value| row["phase"].as_str().unwrap().to_owned();
    let phases: Vec<_> = against_model["phases"].as_array().unwrap().iter().map(phase).collect();
    assert_eq!(phases, ["populate", "enable", "dirty", "get", "clear", "disable"]);
    assert_eq!(against_other["only_a"], serde_json::json!(["clear"]));
}
