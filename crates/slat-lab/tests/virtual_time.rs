//! What virtual time promises: the same bytes at every run and on every computer, designs and machines from files, and
//! a reason for what it has not.

use std::fs;

mod command;

use command::{count, names, report, slat};

const RUN: &str = "dirty-log --clock virtual -v 4 -b 8M";

/// FNV-1a.
fn digest(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    })
}

#[track_caller]
fn printed(line: &str) -> Vec<u8> {
    let output = slat(line);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{line}: {said}");
    output.stdout
}

/// Seconds of the last dirty phase.
fn dirty(options: &str) -> f64 {
    let report = report(&format!("{RUN} {options}"));
    let at = names(&report).iter().position(|name| name == "dirty 2").unwrap();
    report["phases"][at]["seconds"].as_f64().unwrap()
}

#[test]
fn the_same_command_prints_the_same_bytes_everywhere() {
    let digests = RECORDED.map(|(options, _)| {
        let line = format!("{RUN} {options}");
        let first = printed(&line);
        assert_eq!(first, printed(&line), "{line}");
        (options, digest(&first))
    });
    assert_eq!(digests, RECORDED);
}

/// Digests of what is printed; whoever changes a profile, a design or the engine's steps records them anew.
const RECORDED: [(&str, u64); 4] = [
    ("", 0x6897_08d4_4896_c69c),
    ("--design linux-5.18 --json", 0xc991_cefd_0822_2eba),
    ("--design linux-5.18+parallel -g", 0xe25d_926d_2185_beac),
    ("--eager-split 2M -i 3 --json", 0xd8b4_f063_c488_ef30),
];

#[test]
fn another_seed_gives_other_times() {
    assert_ne!(printed(RUN), printed(&format!("{RUN} -r 2")));
}

#[test]
fn phases_and_counts_are_those_of_the_workload_in_real_time() {
    let virtual_time = report(&format!("{RUN} -s anonymous_thp"));
    let real = report("dirty-log -v 4 -b 8M -s anonymous_thp");
    assert_eq!(names(&virtual_time), names(&real));
    for phase in ["populate", "dirty 1", "clear 1", "dirty 2", "clear 2"] {
        for counter in ["faults", "splits", "publishes"] {
            let (ours, theirs) =
                (count(&virtual_time, phase, counter), count(&real, phase, counter));
            assert_eq!(ours, theirs, "{counter} of {phase}");
        }
    }
    assert_eq!(virtual_time["backend"], "virtual");
    assert_eq!(virtual_time["time"].as_array().unwrap().len(), names(&virtual_time).len());
}

#[test]
fn designs_differ_where_they_choose_differently() {
    let (exclusive, shared) = (dirty("--design linux-5.18"), dirty("--design linux-5.18+parallel"));
    assert!(exclusive > 2.0 * shared && shared > dirty("--design slat"));
    assert_eq!(dirty("--design linux-5.18+parallel --lock exclusive"), exclusive);
    let gone = dirty("--design linux-5.18+parallel --host-lock gone");
    assert!(gone < shared);
}

#[test]
fn a_design_in_a_file_needs_no_compiler() {
    let directory = std::env::temp_dir().join(format!("slat-design-{}", std::process::id()));
    fs::create_dir_all(&directory).unwrap();
    let file = directory.join("regions.toml");
    let text = "name = \"regions\"\nsummary = \"a lock for each vCPU's memory\"\nlock = \"exclusive\"\n\
                lock-region = \"8M\"\nmaintenance = \"outside\"\nbarrier = \"per-block\"\n\
                skip-levels = \"off\"\n";
    fs::write(&file, text).unwrap();
    let options = format!("--design {}", file.display());
    assert!(dirty(&options) < dirty("--design linux-5.18") / 2.0);
    let costly = format!("{text}reference-counts = 100\n");
    let cheap = dirty(&options);
    fs::write(&file, costly).unwrap();
    assert!(dirty(&options) > cheap);
    fs::write(&file, text.replace("\"regions\"", "\"slat\"")).unwrap();
    let output = slat(&format!("{RUN} {options}"));
    assert_eq!(output.status.code(), Some(2));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("its name is slat, which is built in"), "{said}");
    fs::write(&file, format!("{text}colour = \"red\"\n")).unwrap();
    let output = slat(&format!("{RUN} {options}"));
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("colour"));
    fs::remove_dir_all(&directory).unwrap();
}

#[test]
fn designs_and_machines_are_listed() {
    let text = String::from_utf8(printed("designs")).unwrap();
    for name in [
        "linux-5.18",
        "linux-5.18+parallel",
        "linux-6.11",
        "linux-6.12",
        "linux-skip-levels",
        "linux-child-skip",
        "slat",
        "arm-server-2022",
    ] {
        assert!(text.lines().any(|line| line.starts_with(&format!("{name} "))), "{name}: {text}");
    }
}

#[test]
fn a_machine_in_a_file_is_the_same_as_one_by_name() {
    let by_name = printed(&format!("{RUN} --profile arm-server-2022-v5"));
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/data/profiles/arm-server-2022-v5.toml");
    assert_eq!(printed(&format!("{RUN} --profile {file}")), by_name);
    assert_ne!(printed(RUN), by_name);
    let output = slat(&format!("{RUN} --profile thunderx2"));
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("is missing"));
}
