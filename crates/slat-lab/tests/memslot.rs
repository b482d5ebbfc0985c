//! What `slat memslot` promises: the kernel's six tests, measured and verified, with as many slots as can be.

use serde_json::Value;

mod command;

use command::{names, report, slat};

const NAMES: [&str; 6] =
    ["map", "unmap", "unmap chunked", "move active area", "move inactive area", "RW"];

/// A run whose check found nothing, and in which each test that could run did something.
#[track_caller]
fn clean(options: &str) -> Value {
    let report = report(&format!("memslot --bytes 16M -l 0.05 {options}"));
    let check = &report["check"];
    for count in ["wrong", "wrong_loads", "violations"] {
        assert_eq!(check[count], 0, "{options}: {check}");
    }
    for test in report["tests"].as_array().unwrap() {
        let ran = test["iterations"].as_u64().is_some_and(|iterations| iterations > 0);
        assert!(ran || test["refused"].is_string(), "{options}: {test}");
    }
    report
}

#[test]
fn every_test_reads_back_what_was_stored() {
    for vcpus in [1, 2, 8] {
        let report = clean(&format!("-s 32 --check --vcpus {vcpus}"));
        let tests = report["tests"].as_array().unwrap();
        assert_eq!(tests.iter().map(|test| &test["name"]).collect::<Vec<_>>(), NAMES);
        let check = &report["check"];
        for count in ["compared", "loads", "exits"] {
            assert!(check[count].as_u64().unwrap() > 0, "{count}: {check}");
        }
    }
}

#[test]
fn slots_can_be_two_or_very_many_and_pages_of_any_size() {
    for options in [
        "-s 2",
        "-s 1000",
        "-s 32 --source anonymous_thp",
        "-s 32 --granule 16k",
        "-s 8 --granule 64k --mode P40V48_64K",
        "-s 16 --source shared_hugetlb_2mb --hardware-access on",
    ] {
        clean(&format!("-d --vcpus 2 {options}"));
    }
}

#[test]
fn only_writes_to_the_slot_that_moves_are_exits() {
    let exits = |test| clean(&format!("-s 32 -d -f {test} -e {test}"))["check"]["exits"].clone();
    assert!(exits(3).as_u64().unwrap() > 0);
    for test in [0, 1, 2, 4, 5] {
        assert_eq!(exits(test), 0, "{test}");
    }
}

/// Why none of the tests runs.
#[track_caller]
fn refused(options: &str) -> String {
    let output = slat(&format!("memslot --bytes 16M -l 0.05 {options}"));
    assert_eq!(output.status.code(), Some(2), "{options}");
    assert!(output.stdout.is_empty(), "{options}");
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn tests_with_fewer_pages_than_slots_say_how_many_there_can_be() {
    let report = clean("-s 500 -f 0 -e 1");
    let tests = report["tests"].as_array().unwrap();
    assert_eq!((&tests[0]["slots"], &tests[1]["refused"]), (&499.into(), &Value::Null));
    // 64K and a sixteenth of 16M, and the slot of the guest's code.
    assert!(tests[0]["refused"].as_str().unwrap().contains("-s 273"), "{}", tests[0]);
    assert!(tests[0]["iterations"].is_null() && tests[0]["seconds"].is_null());
    assert_eq!(report["notes"].as_array().unwrap().len(), 1);
    assert_eq!(names(&report), ["unmap setup", "unmap"]);
    assert!(clean("-s 273 -f 0 -e 0")["tests"][0]["refused"].is_null());
}

#[test]
fn who_can_run_no_test_is_told_why() {
    // The other test has a quarter.
    let said = refused("-f 0 -e 1");
    assert!(
        said.contains("map: ") && said.contains("-s 273") && said.contains("-s 1041"),
        "{said}"
    );
}

#[test]
fn slots_too_small_to_be_moved_are_refused() {
    let last = refused("-s 515 -f 3 -e 3 --granule 16k");
    assert!(last.contains("last slot is smaller"), "{last}");
    assert!(refused("-s 2 -f 4 -e 4").contains("larger -s"));
    assert!(clean("-s 3 -f 4 -e 4")["tests"][0]["refused"].is_null());
}

#[test]
fn each_run_has_its_phases() {
    let phases =
        ["unmap chunked setup 1", "unmap chunked 1", "unmap chunked setup 2", "unmap chunked 2"];
    assert_eq!(names(&clean("-s 32 -f 2 -e 2 -r 2")), phases);
    assert_eq!(names(&clean("-s 32 -f 5")), ["RW setup", "RW"]);
}

#[test]
fn text_has_the_kernels_lines() {
    let output = slat("memslot --bytes 16M -l 0.05 -s 32 -f 4 -r 2 -v");
    let text = String::from_utf8(output.stdout).unwrap();
    for wanted in [
        "note: RW: 31 slots of 132 pages",
        "for slot setup +",
        "iterations, avg",
        "move inactive area: best runtime result was",
        "RW: best runtime result was",
        "best slot setup time for the whole test area was",
    ] {
        assert!(text.contains(wanted), "{wanted} in {text}");
    }
    let none = String::from_utf8(slat("memslot --bytes 16M -l 0 -s 32 -f 5").stdout).unwrap();
    assert!(none.contains("no full iteration"), "{none}");
}
