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

/// The kinds that came, as lines of text; none if time was not counted in instructions. Each iteration writes `pages` pages,
/// or an unknown number.
pub(super) fn lines(phases: &[Phase], arch: Arch, pages: Option<u64>) -> Vec<String> {
    let costs = costs(phases, pages);
    if costs.is_empty() {
        return Vec::new();
    }
    let linux = arch == Arch::Arm;
    let title = if linux { "Linux 6.12" } else { "" };
    let mut lines =
        vec![format!("{:26} {:>9} {:>9} {title:>11}", "instructions per", "engine", "whole")];
    lines.extend(costs.iter().map(|cost| {
        let each = |count: u64| format!("{:.1}", count as f64 / cost.times as f64);
        let Instructions { total, engine } = cost.instructions;
        let linux = if linux { cost.linux.to_string() } else { String::new() };
        let line = format!("{:26} {:>9} {:>9} {linux:>11}", cost.what, each(engine), each(total));
        line.trim_end().to_owned()
    }));
    lines
}

fn costs(phases: &[Phase], pages: Option<u64>) -> Vec<Cost> {
    let faults = |phase: &Phase| phase.counters.faults;
    let split = |phase: &Phase| phase.counters.splits > 0;
    let entries = |phase: &Phase| phase.counters.splits * ENTRIES;
    // A collection gets bits, and clears them at once or in a phase of its own.
    let collects = |phase: &Phase| matches!(phase.name, "get" | "clear");
    let of_split = |phase: &Phase| {
        let clears = |other: &&Phase| collects(other) && other.iteration == phase.iteration;
        phases.iter().filter(clears).any(split)
    };
    let logged = |phase: &Phase| if phase.name == "get" { pages.unwrap_or(0) } else { 0 };
    let cost = |what, linux, is: &dyn Fn(&Phase) -> bool, times: &dyn Fn(&Phase) -> u64| {
        let all = || phases.iter().filter(|phase| is(phase));
        let times = all().map(times).sum();
        let instructions = all().map(|phase| phase.instructions).sum::<Option<_>>()?;
        (times > 0).then_some(Cost { what, linux, instructions, times })
    };
    let all = [
        cost("write-protect fault", 3459, &|phase| phase.name == "dirty" && !split(phase), &faults),
        cost("map fault", 8300, &|phase| phase.name == "populate", &faults),
        cost("eager-split entry", 324, &|phase| phase.name != "dirty" && split(phase), &entries),
        cost("logged page", 81, &|phase| collects(phase) && !of_split(phase), &logged),
    ];
    all.into_iter().flatten().collect()
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
            phase("populate", 0, (2, 0), (400, 2000)),
            phase("enable", 0, (0, 0), (10, 10)),
            phase("dirty", 1, (0, 0), (0, 5000)),
            phase("get", 1, (0, 0), (100, 200)),
            phase("clear", 1, (0, 2), (8192, 10240)),
            phase("dirty", 2, (1024, 0), (512_000, 1_024_000)),
            phase("get", 2, (0, 0), (100, 200)),
            phase("clear", 2, (0, 0), (924, 1848)),
        ]
    }

    #[test]
    fn each_kind_of_work_has_its_own_phases_and_count() {
        let words: Vec<Vec<String>> = lines(&run(), Arch::Arm, Some(1024))
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
    fn linux_stands_beside_its_own_architecture_only_and_nothing_beside_seconds() {
        assert!(!lines(&run(), Arch::Npt, None).concat().contains("3459"));
        let timed: Vec<_> =
            run().into_iter().map(|phase| Phase { instructions: None, ..phase }).collect();
        assert!(lines(&timed, Arch::Arm, Some(1024)).is_empty());
    }
}
