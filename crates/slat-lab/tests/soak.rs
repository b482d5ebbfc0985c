//! What `slat soak` promises: rounds that find nothing where nothing is wrong, a seed that brings a round back, and words
//! for what makes no sense.

mod command;

use command::slat;

/// What a soak that must find nothing has printed.
#[track_caller]
fn clean(options: &str) -> Vec<String> {
    let output = slat(&format!("soak {options}"));
    let said = String::from_utf8_lossy(&output.stderr);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0), "{options}: {said}{text}");
    assert!(said.is_empty(), "{options}: {said}");
    text.lines().map(str::to_owned).collect()
}

#[test]
fn a_few_rounds_on_four_threads_find_nothing() {
    let lines = clean("--minutes 2 --rounds 4 --seed 11");
    assert_eq!(lines.len(), 5, "{lines:?}");
    let sum: Vec<&str> = lines[4].split(", ").collect();
    assert_eq!((sum[0], sum[3]), ("4 rounds", "0 violations"));
    for many in [sum[1], sum[2]] {
        let many: u64 = many.split(' ').next().unwrap().parse().unwrap();
        assert!(many > 10_000, "{}", lines[4]);
    }
}

#[test]
fn rounds_on_each_architecture_find_nothing() {
    for (arch, shown) in [("arm", "granule"), ("ept", "EPT"), ("npt", "NPT")] {
        let lines = clean(&format!("--minutes 2 --rounds 2 --seed 3 --arch {arch}"));
        assert!(lines[..2].iter().all(|line| line.contains(shown)), "{lines:?}");
        assert!(lines[2].ends_with("0 violations"), "{lines:?}");
    }
}

#[test]
fn the_seed_of_a_round_brings_its_vm_back() {
    let config = |line: &str| line.split_once(": ").unwrap().1.to_owned();
    let lines = clean("--minutes 2 --rounds 2 --seed 5 --threads 3");
    let seed = lines[1].split(' ').nth(3).unwrap().trim_end_matches(':');
    let again = clean(&format!("--rounds 1 --seed {seed} --threads 3"));
    assert_eq!(config(&lines[1]), config(&again[0]));
}

#[test]
fn nonsense_is_refused() {
    for (options, why) in [
        ("--minutes 0", "above 0"),
        ("--minutes -1", "above 0"),
        ("--minutes soon", "above 0"),
        ("--threads 1", "2..=64"),
        ("--threads 65", "2..=64"),
        ("--rounds 0", "1.."),
        ("--seed -1", "invalid"),
        ("--arch amd", "invalid"),
    ] {
        let output = slat(&format!("soak {options}"));
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{options}: {said}");
        assert!(output.stdout.is_empty() && said.contains(why), "{options}: {said}");
    }
}
