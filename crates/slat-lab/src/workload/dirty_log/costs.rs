//! What a fault, a split entry and a logged page cost in instructions, beside what Linux takes for them.
//!
//! Linux's are those of KVM of Linux 6.12 for arm64 on the same emulated machine, with one vCPU and 64M: all that its host
//! does between two instructions of the guest, memory management of the host's processes included.

use crate::arch::Arch;
use crate::report::{Instructions, Phase};

/// Entries of a table that a block is split into.
const ENTRIES: u64 = 512;

/// One kind of work.
struct Cost {
    what: &'static str,
    linux: u64,
    instructions: Instructions,
    times: u64,
}

/// The kinds that came, as lines of text; none if time was not counted in instructions. Guest memory has so many pages;
/// `writes_all`: each iteration writes all of them.
pub(super) fn lines(phases: &[Phase], arch: Arch, pages: u64, writes_all: bool) -> Vec<String> {
    let costs = costs(phases, pages, writes_all);
    if costs.is_empty() {
        return Vec::new();
    }
    let linux = |figure: String| if arch == Arch::Arm { figure } else { String::new() };
    let line = |what: &str, engine: String, whole: String, figure: String| {
        let line = format!("{what:22} {engine:>9} {whole:>9} {:>11}", linux(figure));
        line.trim_end().to_owned()
    };
    let title = line("instructions per", "engine".into(), "whole".into(), "Linux 6.12".into());
    let rows = costs.iter().map(|cost| {
        let each = |count: u64| format!("{:.1}", count as f64 / cost.times as f64);
        let Instructions { total, engine } = cost.instructions;
        line(cost.what, each(engine), each(total), cost.linux.to_string())
    });
    [title].into_iter().chain(rows).collect()
}

fn costs(phases: &[Phase], pages: u64, writes_all: bool) -> Vec<Cost> {
    let splits = |phase: &Phase| phase.counters.splits > 0;
    let named = |name: &'static str, split: bool| {
        phases.iter().filter(move |phase| phase.name == name && splits(phase) == split)
    };
    let cost = |what, linux, (instructions, times): (Option<Instructions>, u64)| {
        (times > 0).then_some(Cost { what, linux, instructions: instructions?, times })
    };
    let faults = |name, least| {
        let phases = || named(name, false).filter(|phase| phase.counters.faults >= least);
        (sum(phases()), phases().map(|phase| phase.counters.faults).sum())
    };
    // Of a run whose pages are mapped by larger leaves, most is the guest's, which goes on without faults.
    let all = [
        cost("write-protect fault", 3459, faults("dirty", 1)),
        cost("map fault", 8300, faults("populate", pages)),
        cost("eager-split entry", 324, split(named("clear", true), named("clear", false))),
        cost("logged page", 81, logged(phases, if writes_all { pages } else { 0 })),
    ];
    all.into_iter().flatten().collect()
}

fn sum<'p>(phases: impl Iterator<Item = &'p Phase>) -> Option<Instructions> {
    phases.map(|phase| phase.instructions).sum()
}

/// What phases that also split took more than one that does not, and how many entries they made.
fn split<'p>(
    with: impl Iterator<Item = &'p Phase> + Clone,
    mut without: impl Iterator<Item = &'p Phase>,
) -> (Option<Instructions>, u64) {
    let entries = with.clone().map(|phase| phase.counters.splits * ENTRIES).sum();
    let Some(plain) = without.next().and_then(|phase| phase.instructions) else { return (None, 0) };
    let more = with.map(|phase| {
        let Instructions { total, engine } = phase.instructions?;
        let [total, engine] = [(total, plain.total), (engine, plain.engine)]
            .map(|(split, plain)| split.saturating_sub(plain));
        Some(Instructions { total, engine })
    });
    (more.sum(), entries)
}

/// Collections of `pages` pages that split nothing: they get bits, and clear them at once or in a phase of its own.
fn logged(phases: &[Phase], pages: u64) -> (Option<Instructions>, u64) {
    let collects = |phase: &&Phase| matches!(phase.name, "get" | "clear");
    let plain = |phase: &&Phase| {
        let mut same =
            phases.iter().filter(collects).filter(|other| other.iteration == phase.iteration);
        same.all(|other| other.counters.splits == 0)
    };
    let all = || phases.iter().filter(collects).filter(plain);
    (sum(all()), all().filter(|phase| phase.name == "get").count() as u64 * pages)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Counters;

    fn phase(
        name: &'static str,
        iteration: u32,
        (faults, splits): (u64, u64),
        (engine, total): (u64, u64),
    ) -> Phase {
        Phase {
            name,
            iteration: (iteration > 0).then_some(iteration),
            seconds: 0.0,
            instructions: Some(Instructions { total, engine }),
            counters: Counters { faults, splits, ..Counters::default() },
            exits: None,
        }
    }

    /// A run of two blocks' worth of pages.
    fn run() -> Vec<Phase> {
        vec![
            phase("populate", 0, (1024, 0), (204_800, 1_024_000)),
            phase("enable", 0, (0, 0), (10, 10)),
            phase("dirty", 1, (0, 0), (0, 5000)),
            phase("get", 1, (0, 0), (100, 200)),
            phase("clear", 1, (0, 2), (9116, 12_088)),
            phase("dirty", 2, (1024, 0), (512_000, 1_024_000)),
            phase("get", 2, (0, 0), (100, 200)),
            phase("clear", 2, (0, 0), (924, 1848)),
        ]
    }

    #[test]
    fn each_kind_of_work_has_its_own_phases_and_count() {
        let words: Vec<Vec<String>> = lines(&run(), Arch::Arm, 1024, true)
            .iter()
            .map(|line| line.split_whitespace().map(str::to_owned).collect())
            .collect();
        assert_eq!(words[0][..4], ["instructions", "per", "engine", "whole"]);
        assert_eq!(words[1], ["write-protect", "fault", "500.0", "1000.0", "3459"]);
        assert_eq!(words[2], ["map", "fault", "200.0", "1000.0", "8300"]);
        assert_eq!(words[3], ["eager-split", "entry", "8.0", "10.0", "324"]);
        assert_eq!(words[4], ["logged", "page", "1.0", "2.0", "81"]);
        assert_eq!(words.len(), 5);
    }

    #[test]
    fn what_a_guest_does_without_faults_is_no_cost_of_one() {
        let mut run = run();
        run[0].counters.faults = 2;
        let text = lines(&run, Arch::Arm, 1024, false).join("\n");
        assert!(text.contains("write-protect fault"), "{text}");
        assert!(!text.contains("map fault") && !text.contains("logged page"), "{text}");
        run.pop();
        assert!(!lines(&run, Arch::Arm, 1024, true).concat().contains("eager-split"));
    }

    #[test]
    fn linux_stands_beside_its_own_architecture_only_and_nothing_beside_seconds() {
        assert!(!lines(&run(), Arch::Npt, 1024, true).concat().contains("3459"));
        let timed: Vec<_> =
            run().into_iter().map(|phase| Phase { instructions: None, ..phase }).collect();
        assert!(lines(&timed, Arch::Arm, 1024, true).is_empty());
    }
}
