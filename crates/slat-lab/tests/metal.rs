//! What `--backend metal` promises, first with a stand-in for QEMU that plays the hypervisor's console, then with slat's own
//! hypervisor under QEMU, for each architecture.
//!
//! Where there is no QEMU or no toolchain for bare metal, the second part is skipped, and says so; `SLAT_METAL=required`
//! makes that a failure.

use std::env;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

mod command;

use command::{count, names, slat};

/// A directory with a QEMU that is a shell script.
struct StandIn(PathBuf);

impl StandIn {
    /// One whose console says what `script` prints. In it, `$*` is QEMU's command line.
    fn new(test: &str, script: &str) -> Self {
        let directory = env::temp_dir().join(format!("slat-metal-{test}-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let program = directory.join("qemu-system-aarch64");
        let version = "if [ \"$1\" = --version ]; then echo 'QEMU emulator version 9.8.7 (a script)'; exit; fi";
        fs::write(&program, format!("#!/bin/sh\n{version}\n{script}\n")).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let mut image = [0; 64];
        image[..5].copy_from_slice(b"\x7fELF\x02");
        image[18] = 183;
        fs::write(directory.join("image"), image).unwrap();
        Self(directory)
    }

    fn command(&self, line: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_slat"));
        command.args(line.split_whitespace()).args(["--backend", "metal", "--image"]);
        command.arg(self.0.join("image")).stdin(Stdio::null());
        let path = env::var("PATH").unwrap_or_default();
        command.env("PATH", format!("{}:{path}", self.0.display()));
        command
    }

    fn run(&self, line: &str) -> Output {
        self.command(line).output().unwrap()
    }
}

impl Drop for StandIn {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The console of a run of `dirty-log`, with what its check has found.
fn console(check: &str) -> String {
    let counters = r#"{"faults": 5, "splits": 0, "collapses": 0, "tables_allocated": 1, "tables_freed": 0, "publishes": 5, "invalidations": {"by_ipa": 0, "by_range": 0, "combined": 0, "everything": 0, "local": 7}, "entries_visited": 9}"#;
    let phase = |name: &str, iteration: &str| {
        format!(
            r#"{{"name": "{name}", "iteration": {iteration}, "seconds": 0.5, "counters": {counters}}}"#
        )
    };
    let report = format!(
        r#"{{"workload": "dirty-log", "backend": "metal", "config": {{}}, "notes": ["a word"], "phases": [{}, {}], "counters": {counters}, "check": {check}}}"#,
        phase("populate", "null"),
        phase("dirty", "1"),
    );
    format!(
        "echo booting\r\nprintf 'slat: progress populate\\r\\n'\ncat <<'END'\nslat: result {report}\r\nslat: done\nEND\nexec sleep 600"
    )
}

const FOUND: &str = r#"{"pages": 256, "collections": 4, "collections_while_running": 2, "changed": 300, "lost": 0, "lost_pages": [], "wrong_loads": 0, "misplaced": 0, "violations": 0, "violation": null}"#;

#[track_caller]
fn said(output: &Output, status: i32) -> String {
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(status), "{said}");
    assert!(!said.contains("panicked"), "{said}");
    said
}

#[test]
fn the_hypervisors_report_is_the_commands() {
    let qemu = StandIn::new("report", &console(FOUND));
    let output = qemu.run("dirty-log -b 1M --check --json --cpu cortex-a57");
    assert_eq!(said(&output, 0), "");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["backend"], "metal");
    let config = &report["config"];
    assert_eq!((&config["cpu"], &config["qemu"]), (&"cortex-a57".into(), &"9.8.7".into()));
    assert_eq!(
        (&config["arch"], &config["vcpus"], &config["clock"]),
        (&"arm".into(), &1.into(), &"real".into())
    );
    assert_eq!(names(&report), ["populate", "dirty 1"]);
    assert_eq!(count(&report, "dirty 1", "faults"), 5);
    assert_eq!(report["check"]["pages"], 256);
    assert!(report["notes"].as_array().unwrap().contains(&"a word".into()));

    let table = String::from_utf8(qemu.run("dirty-log -b 1M --check").stdout).unwrap();
    assert!(table.contains("cpu max of QEMU 9.8.7") && table.contains("nothing lost"), "{table}");
}

#[test]
fn what_its_check_found_is_the_status() {
    let lost =
        FOUND.replace(r#""lost": 0, "lost_pages": []"#, r#""lost": 3, "lost_pages": [7, 8, 9]"#);
    let qemu = StandIn::new("lost", &console(&lost));
    let output = qemu.run("dirty-log -b 1M --check");
    assert!(said(&output, 1).contains("the check failed"));
    assert!(String::from_utf8_lossy(&output.stdout).contains("3 pages changed"));
}

#[test]
fn qemu_is_told_what_was_asked_for() {
    let qemu = StandIn::new("told", "echo \"slat: failed: $*\"; exec sleep 600");
    let told =
        said(&qemu.run("dirty-log -v 2 -b 64M -s anonymous_thp --eager-split 2M -g -i 3 -r 7"), 1);
    for part in [
        "-M virt,virtualization=on",
        "-cpu max",
        "-smp 2",
        "thread=multi",
        "workload=dirty-log",
        "vcpus=2",
        "bytes=67108864",
        "backing=2m",
        "eager-split=2097152",
        "manual-protect=off",
        "iterations=3",
        "seed=7",
        "check=off",
        "gpa=0xfff8000000",
    ] {
        assert!(told.contains(part), "{part}: {told}");
    }
    assert!(!told.contains("-icount") && !told.contains("invalidate"), "{told}");
    let told = said(
        &qemu.run("page-table -b 3M -s shared_hugetlb --deterministic --sabotage invalidate"),
        1,
    );
    for part in [
        "-icount shift=0,sleep=off",
        "-seed 1",
        "thread=single",
        "clock=instructions",
        "invalidate=off",
        "bytes=4194304",
    ] {
        assert!(told.contains(part), "{part}: {told}");
    }
}

#[test]
fn the_hypervisors_failure_is_the_error_with_its_last_lines() {
    let qemu = StandIn::new(
        "failed",
        "echo one; echo 'slat: failed: cpu 1: panicking at the seam'; exec sleep 600",
    );
    let error = said(&qemu.run("dirty-log -b 1M"), 1);
    assert!(error.contains("cpu 1: panicking at the seam") && error.contains("one"), "{error}");
    let qemu = StandIn::new("ended", "echo one; echo no such CPU >&2; exit 1");
    let error = said(&qemu.run("dirty-log -b 1M"), 1);
    assert!(error.contains("without a result") && error.contains("no such CPU"), "{error}");
    let qemu = StandIn::new("garbage", "echo 'slat: result {\"phases\": 7}'; echo 'slat: done'");
    assert!(said(&qemu.run("dirty-log -b 1M"), 1).contains("none of this version's"));
}

#[test]
fn a_report_of_bare_metal_compares_with_one_of_the_model() {
    let qemu = StandIn::new("compare", &console("null"));
    let (model, metal) = (qemu.0.join("model.json"), qemu.0.join("metal.json"));
    fs::write(&metal, qemu.run("dirty-log -b 1M --json").stdout).unwrap();
    fs::write(&model, slat("dirty-log -b 1M --json").stdout).unwrap();
    let output = slat(&format!("compare {} {}", model.display(), metal.display()));
    assert_eq!(said(&output, 0), "");
    let text = String::from_utf8(output.stdout).unwrap();
    for part in ["backend  model", "metal", "populate", "dirty", "only in A: "] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(!text.contains("counts instructions"), "{text}");
    fs::write(&metal, qemu.run("dirty-log -b 1M --json --deterministic").stdout).unwrap();
    let output = slat(&format!("compare {} {}", model.display(), metal.display()));
    assert!(String::from_utf8(output.stdout).unwrap().contains("B counts instructions"));
}

/// Whether a process is there.
fn lives(pid: &str) -> bool {
    Command::new("kill").args(["-0", pid]).stderr(Stdio::null()).status().unwrap().success()
}

#[test]
fn a_hypervisor_that_hangs_is_killed_at_the_time_limit() {
    let qemu = StandIn::new("hangs", "echo $$; exec sleep 600");
    let error = said(&qemu.run("dirty-log -b 1M --time-limit 1"), 1);
    assert!(error.contains("killed"), "{error}");
    assert!(!lives(error.lines().last().unwrap().trim()), "{error}");
}

#[test]
fn whoever_ends_the_command_ends_qemu() {
    for signal in ["-INT", "-TERM"] {
        let qemu = StandIn::new(signal, "echo $$ >\"$0.pid\"; exec sleep 600");
        let mut child = qemu.command("dirty-log -b 1M").stderr(Stdio::null()).spawn().unwrap();
        let started = Instant::now();
        let pid = loop {
            let pid =
                fs::read_to_string(qemu.0.join("qemu-system-aarch64.pid")).unwrap_or_default();
            if pid.ends_with('\n') {
                break pid.trim().to_owned();
            }
            assert!(started.elapsed() < Duration::from_secs(60), "it does not start");
            thread::sleep(Duration::from_millis(10));
        };
        assert!(lives(&pid));
        Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
        let status = child.wait().unwrap();
        assert!(!status.success() && !lives(&pid), "{signal}: {status}");
    }
}

#[test]
fn where_there_is_no_qemu_one_command_installs_it() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_slat"));
    command.env("PATH", "/nowhere").stdin(Stdio::null()).args([
        "dirty-log",
        "-b",
        "1M",
        "--backend",
        "metal",
    ]);
    let output = command.output().unwrap();
    assert!(said(&output, 4).contains("apt-get install qemu-system-arm"));
    let output = command.args(["--arch", "npt"]).output().unwrap();
    assert!(said(&output, 4).contains("apt-get install qemu-system-x86"));
}

/// Whether the hypervisor can be run here, for an architecture. If not it is said once for each test, past the test harness,
/// unless it must be.
fn can_run(arch: &str) -> bool {
    let output = slat(&format!("dirty-log -b 1M --backend metal --arch {arch}"));
    if output.status.code() != Some(4) {
        return true;
    }
    let why = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    assert_ne!(env::var("SLAT_METAL").as_deref(), Ok("required"), "{why}");
    let name = thread::current().name().unwrap_or_default().to_owned();
    let _ = writeln!(io::stderr(), "NOT TESTED: {name} on {arch}: {why}");
    false
}

const ARCHES: [&str; 2] = ["arm", "npt"];

/// What a run says. QEMU's SVM loses the state of a guest that is kicked now and then, and the hypervisor gives up (see
/// crates/slat-metal/README.md): such a run is repeated, and that is said. What a check finds is never repeated.
fn run(line: &str) -> Output {
    let mut output = slat(line);
    for _ in 0..3 {
        let said = String::from_utf8_lossy(&output.stderr);
        if !line.contains("--arch npt") || !said.contains("on bare metal: cpu ") {
            break;
        }
        let _ = writeln!(io::stderr(), "REPEATED: {line}: {said}");
        output = slat(line);
    }
    output
}

/// The report of a run that went well.
#[track_caller]
fn measured(line: &str) -> Value {
    let output = run(&format!("{line} --json"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{line}: {said}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// A checked run on slat's own hypervisor, which finds nothing.
#[track_caller]
fn checked(line: &str) -> Value {
    let report = measured(&format!("{line} --backend metal --check"));
    assert_eq!(report["backend"], "metal");
    let check = report["check"].as_object().unwrap();
    for wrong in [
        "lost",
        "wrong_loads",
        "misplaced",
        "wrong_leaves",
        "elsewhere",
        "unserved",
        "unasked",
        "miscounted",
        "unfilled",
        "missing",
        "stale",
        "early",
        "mismatched",
    ] {
        assert_eq!(check.get(wrong).and_then(Value::as_u64).unwrap_or(0), 0, "{line}: {check:?}");
    }
    report
}

#[test]
fn no_write_is_lost_on_hardware_whatever_log_and_backing() {
    for arch in ARCHES.into_iter().filter(|arch| can_run(arch)) {
        for options in [
            "",
            "-g",
            "-s anonymous_thp --eager-split 2M",
            "-s anonymous_thp",
            "--log ring --ring 256",
            "--log hardware",
            "-s anonymous_thp --log hardware --eager-split 2M -e",
            "-o -a -w 50 -x 2",
        ] {
            let report = checked(&format!("dirty-log --arch {arch} -v 2 -b 8M {options}"));
            let check = &report["check"];
            assert!(
                check["collections_while_running"].as_u64().unwrap() >= 4,
                "{options}: {check}"
            );
            assert!(
                check["changed"].as_u64().unwrap() >= check["pages"].as_u64().unwrap(),
                "{options}: {check}"
            );
            assert!(count(&report, "populate", "faults") > 0);
        }
    }
}

#[test]
fn every_workload_is_right_on_hardware() {
    for arch in ARCHES.into_iter().filter(|arch| can_run(arch)) {
        let report = checked(&format!("page-table --arch {arch} -v 2 -b 8M -s anonymous_thp"));
        assert_eq!(
            report["check"]["created"]["leaves"],
            serde_json::json!([{"size": 2 << 20, "count": 4}])
        );
        checked(&format!("page-table --arch {arch} -v 2 -b 8M"));
        let report = checked(&format!("demand-paging --arch {arch} -v 2 -b 4M -u MISSING"));
        assert_eq!(report["demand"]["userfault"]["served"], 2048);
        checked(&format!("demand-paging --arch {arch} -v 2 -b 4M -s shmem -u MINOR -o"));
        let report = checked(&format!("dirty-log-test --arch {arch} -v 2 -b 2M -i 6"));
        assert_eq!(report["modes"].as_array().unwrap().len(), 4);
        for mode in report["modes"].as_array().unwrap() {
            assert!(
                mode["writes"].as_u64().unwrap() > 0 && mode["dirty"].as_u64().unwrap() > 0,
                "{mode}"
            );
        }
    }
}

#[test]
fn a_gigabyte_is_one_leaf_on_hardware() {
    if can_run("arm") {
        let report = checked("page-table -b 1G -s shared_hugetlb_1gb");
        assert_eq!(
            report["check"]["created"]["leaves"],
            serde_json::json!([{"size": 1 << 30, "count": 1}])
        );
    }
}

#[test]
fn cpus_with_other_features_are_right_too() {
    if can_run("arm") {
        for options in ["--cpu neoverse-n1 --log hardware", "--cpu neoverse-n1", "--cpu cortex-a57"]
        {
            let report = checked(&format!("dirty-log -v 2 -b 4M {options}"));
            assert!(options.contains(report["config"]["cpu"].as_str().unwrap()));
        }
    }
}

/// The negative control: a check that cannot fail shows nothing. A guest that faults leaves, and QEMU's SVM drops all of its
/// translations then: there is little memory, so that nothing but a collection makes it fault.
#[test]
fn without_invalidations_the_check_reports_lost_writes() {
    for arch in ARCHES.into_iter().filter(|arch| can_run(arch)) {
        let output = run(&format!(
            "dirty-log --backend metal --arch {arch} -v 2 -b 256K --check --sabotage invalidate --json"
        ));
        assert!(said(&output, 1).contains("the check failed"), "{arch}");
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert!(report["check"]["lost"].as_u64().unwrap() > 0, "{arch}: {}", report["check"]);
    }
}

#[test]
fn counted_instructions_are_the_same_at_every_run() {
    for arch in ARCHES.into_iter().filter(|arch| can_run(arch)) {
        let run = || {
            let output = slat(&format!(
                "dirty-log --backend metal --arch {arch} -v 2 -b 4M --deterministic --json"
            ));
            assert_eq!(said(&output, 0), "");
            output.stdout
        };
        let first = run();
        assert_eq!(first, run());
        let report: Value = serde_json::from_slice(&first).unwrap();
        assert_eq!(report["config"]["clock"], "instructions");
        for phase in report["phases"].as_array().unwrap() {
            let (seconds, instructions) = (&phase["seconds"], &phase["instructions"]);
            let total = instructions["total"].as_u64().unwrap();
            assert!(total > 0 && instructions["engine"].as_u64().unwrap() <= total, "{phase}");
            assert!(seconds.as_f64().unwrap() > 0.0, "{phase}");
        }
    }
}

/// What the README says it costs, with room for another compiler.
#[test]
fn faults_and_pages_cost_few_instructions() {
    for arch in ARCHES.into_iter().filter(|arch| can_run(arch)) {
        let costs = |options: &str| {
            let line =
                format!("dirty-log --backend metal --arch {arch} -b 16M --deterministic {options}");
            String::from_utf8(slat(&line).stdout).unwrap()
        };
        let (pages, blocks) = (costs(""), costs("-s anonymous_thp --eager-split 2M"));
        for (table, kind, engine, whole) in [
            (&pages, "write-protect fault", 500.0, 750.0),
            (&pages, "map fault", 900.0, 1150.0),
            (&pages, "logged page", 40.0, 40.0),
            (&blocks, "eager-split entry", 5.0, 5.0),
        ] {
            let row = table.lines().find_map(|line| line.strip_prefix(kind));
            let row = row.unwrap_or_else(|| panic!("{kind}: {table}"));
            let figures: Vec<f64> =
                row.split_whitespace().map(|word| word.parse().unwrap()).collect();
            assert!(figures[0] > 1.0 && figures[0] <= engine, "{arch} {kind}: {row}");
            assert!(figures[1] >= figures[0] && figures[1] <= whole, "{arch} {kind}: {row}");
        }
    }
}
