//! The tables about walks of the hypervisor's thread: "Optimize S2 page splitting", and "Move data barrier to end of split
//! walk".

use super::cell::{Cell, Ours, Section, SlatCell};
use super::published::{self, Mean};
use crate::failure::Failure;
use crate::random::Dice;
use crate::virtual_time::design::Design;
use crate::virtual_time::profile::{Profile, Walker};
use crate::virtual_time::walks::{Found, Walks};

const GIB: u64 = 1 << 18;
/// Guest modes by how many host pages a guest page takes: 4K and 64K, with 40 and with 36 bits.
const MODES: [u64; 4] = [1, 16, 1, 16];
const SEEDS: u64 = 25;

/// What is done, and what memory is mapped with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Scenario {
    /// The log is enabled without manual protect: everything is split and protected at once.
    Enable,
    /// The log is cleared twice with manual protect, by sections.
    Clear,
}

/// Nanoseconds; guests write one of `written` pages.
fn takes(walks: &Walks, design: &Design, scenario: Scenario, found: Found, written: u64) -> f64 {
    match scenario {
        Scenario::Enable => walks.protect_all(found) + walks.split_all(design, found),
        Scenario::Clear => {
            let second = Found { blocks: false, every: written, cleared: written, ..found };
            walks.clear(design, found, true) + walks.clear(design, second, true)
        }
    }
}

fn change(before: f64, after: f64) -> f64 {
    (after / before - 1.0) * 100.0
}

fn mean(all: &[f64]) -> Mean {
    let value = all.iter().sum::<f64>() / all.len() as f64;
    let squares: f64 = all.iter().map(|one| (one - value).powi(2)).sum();
    Mean { value, sd: (squares / (all.len() - 1) as f64).sqrt() }
}

/// "Optimize S2 page splitting": design linux-skip-levels against linux-6.12.
///
/// # Errors
/// What is built in is wrong.
pub(super) fn skip_levels(published: &published::SkipLevels) -> Result<Section, Failure> {
    let table = "skip-levels";
    let profile = Profile::load("thunderx2")?;
    let mut section = Section {
        head: vec![
            format!("{table}: {}", published.source),
            format!(
                "16G, profile {}, mean over 4 guest modes and {SEEDS} seeds; linux-skip-levels against linux-6.12; 1G as 2M blocks",
                profile.name
            ),
        ],
        ..Section::default()
    };
    let scenarios = [
        ("enable-percent", Scenario::Enable, &published.enable_percent),
        ("clear-percent", Scenario::Clear, &published.clear_percent),
    ];
    let others = [("linux-skip-levels", Walker::General), ("slat", Walker::Engine)];
    for (series, scenario, figures) in scenarios {
        let backings = [
            ("already-4k", false, figures.already_4k),
            ("thp", true, figures.thp),
            ("hugetlb-1g", true, figures.hugetlb_1g),
        ];
        for (backing, blocks, figure) in backings {
            let cell = format!("{series}.{backing}");
            let [ours, slat] = others.map(|other| skipping(&profile, scenario, blocks, other));
            let (ours, slat) = (ours?, slat?);
            let kind = profile.kind_of(&format!("{table} {cell}"));
            let note = format!("sd {:.2}, published {:.2}", ours.sd, figure.sd);
            let figures = (figure.value, ours.value);
            section.cells.push(Cell::percent((table, cell.clone(), kind), figures, 5.0, note));
            let note = format!("against linux-6.12; sd {:.2}", slat.sd);
            let ours = Ours::One(slat.value);
            section.slat.push(SlatCell { table, cell, ours, note, reached: true });
        }
    }
    Ok(section)
}

/// The change from linux-6.12 to another design, over guest modes and seeds.
fn skipping(
    profile: &Profile,
    scenario: Scenario,
    blocks: bool,
    (design, walker): (&str, Walker),
) -> Result<Mean, Failure> {
    let (old, new) = (Design::load("linux-6.12")?, Design::load(design)?);
    let (before, after) = (profile.walks(Walker::General)?, profile.walks(walker)?);
    let spread = profile.walk_spread()?;
    let mut changes = Vec::new();
    for seed in 0..SEEDS {
        for (mode, written) in (0..).zip(MODES) {
            let dice = &mut Dice::new(seed << 8, mode);
            let every = if blocks { 1 } else { written };
            let found = Found { pages: 16 * GIB, blocks, every, cleared: 1 };
            let old = takes(&before.drawn(spread, dice), &old, scenario, found, written);
            let new = takes(&after.drawn(spread, dice), &new, scenario, found, written);
            changes.push(change(old, new));
        }
    }
    Ok(mean(&changes))
}

/// "Move data barrier to end of split walk": design linux-6.12 against linux-6.11. vCPUs stand while the log is cleared.
///
/// # Errors
/// What is built in is wrong.
pub(super) fn move_barrier(published: &published::MoveBarrier) -> Result<Section, Failure> {
    let table = "move-barrier";
    let profile = Profile::load("barrier-server-2024")?;
    let head = vec![
        format!("{table}: {}", published.source),
        format!(
            "clear-dirty-log with eager split, profile {}: what a barrier costs is fitted; linux-6.12 against linux-6.11",
            profile.name
        ),
    ];
    let mut section = Section { head, ..Section::default() };
    let load = |design, walker| Ok::<_, Failure>((Design::load(design)?, profile.walks(walker)?));
    let old = load("linux-6.11", Walker::General)?;
    let new = load("linux-6.12", Walker::General)?;
    let slat = load("slat", Walker::Engine)?;
    for vcpus in [1, 8, 64] {
        for memory in [1, 16, 64] {
            let found = Found { pages: memory * GIB, blocks: true, every: 1, cleared: 1 };
            let [old, new, slat] = [&old, &new, &slat]
                .map(|(design, walks)| takes(walks, design, Scenario::Clear, found, 1));
            let plural = if vcpus == 1 { "" } else { "s" };
            let cell = format!("clear-dirty-log-percent at {vcpus} vCPU{plural}, {memory} GiB");
            let kind = profile.kind_of(&format!("{table} {cell}"));
            let figures = (published.clear_dirty_log_percent, change(old, new));
            let note = String::new();
            section.cells.push(Cell::percent((table, cell.clone(), kind), figures, 10.0, note));
            let (ours, note) = (Ours::One(change(old, slat)), "against linux-6.11".to_owned());
            section.slat.push(SlatCell { table, cell, ours, note, reached: true });
        }
    }
    Ok(section)
}
