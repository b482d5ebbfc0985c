//! The tables about walks of the hypervisor's thread: "Optimize S2 page splitting", and "Move data barrier to end of split
//! walk". Each walk is walked once on real tables, fewer of them than in the published runs; what differs from run to run
//! is what its steps cost, so that other seeds price the same steps anew.

use slat_model::clock::{Cause, Ledger};

use super::cell::{Cell, Ours, Section, SlatCell};
use super::published::{self, Mean};
use super::walked::{Backing, Scenario, Walked};
use crate::failure::Failure;
use crate::random::Dice;
use crate::virtual_time::design::Design;
use crate::virtual_time::profile::Profile;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// Guest modes by how many host pages a guest page takes: 4K and 64K, with 40 and with 36 bits.
const MODES: [u64; 4] = [1, 16, 1, 16];
const SEEDS: u64 = 25;
/// What move-barrier's memory is divided by here, but for what remains at least: with less, the one barrier of a walk
/// would count.
const FACTOR: u64 = 64;
const LEAST: u64 = 64 * MIB;

/// How often each step of a walk came, and what it costs.
struct Steps(Vec<(u64, f64)>);

impl Steps {
    fn of(walked: &Walked<'_>) -> Result<Self, Failure> {
        let ledger: Ledger = walked.walk()?;
        let counted = |(cause, price): (Cause, f64)| (ledger.count(cause), price);
        Ok(Self(walked.prices()?.map(counted).to_vec()))
    }

    /// Nanoseconds.
    fn mean(&self) -> f64 {
        self.0.iter().map(|(count, price)| *count as f64 * price).sum()
    }

    /// The same in one run, in which each price differs by up to `spread` per cent from its mean.
    fn drawn(&self, spread: f64, dice: &mut Dice) -> f64 {
        let mut draw = |&(count, price): &(u64, f64)| {
            let off = dice.below(2001) as f64 / 1000.0 - 1.0;
            count as f64 * price * (1.0 + off * spread / 100.0)
        };
        self.0.iter().map(&mut draw).sum()
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
/// What is built in is wrong, or a walk broke off.
pub(super) fn skip_levels(published: &published::SkipLevels) -> Result<Section, Failure> {
    let table = "skip-levels";
    let profile = Profile::load("thunderx2")?;
    let mut section = Section {
        head: vec![
            format!("{table}: {}", published.source),
            format!(
                "profile {}, mean over 4 guest modes and {SEEDS} seeds; linux-skip-levels against linux-6.12",
                profile.name
            ),
            "64M, 1/256 of the published 16G, and 1G of hugetlb-1g; linux-child-skip, which was not posted with figures, beside it"
                .to_owned(),
        ],
        ..Section::default()
    };
    let scenarios = [
        ("enable-percent", Scenario::Enable, &published.enable_percent),
        ("clear-percent", Scenario::Clear, &published.clear_percent),
    ];
    for (series, scenario, figures) in scenarios {
        let backings = [
            ("already-4k", Backing::Pages, 64 * MIB, figures.already_4k),
            ("thp", Backing::Blocks, 64 * MIB, figures.thp),
            ("hugetlb-1g", Backing::Gigabytes, GIB, figures.hugetlb_1g),
        ];
        for (backing, mapped, size, figure) in backings {
            let cell = format!("{series}.{backing}");
            let [ours, child, slat] = skipping(&profile, scenario, (mapped, size))?;
            let kind = profile.kind_of(&format!("{table} {cell}"));
            let Mean { value, sd } = figure;
            let note = format!("sd {:.2} ({sd:.2}); child-skip {:.2}", ours.sd, child.value);
            section.cells.push(Cell::percent(
                (table, cell.clone(), kind),
                (value, ours.value),
                5.0,
                note,
            ));
            let note = format!("against linux-6.12; sd {:.2}", slat.sd);
            let ours = Ours::One(slat.value);
            section.slat.push(SlatCell { table, cell, ours, note, reached: true });
        }
    }
    Ok(section)
}

/// The changes from linux-6.12 to linux-skip-levels, linux-child-skip and slat, over guest modes and seeds.
fn skipping(
    profile: &Profile,
    scenario: Scenario,
    (backing, size): (Backing, u64),
) -> Result<[Mean; 3], Failure> {
    let designs = ["linux-6.12", "linux-skip-levels", "linux-child-skip", "slat"];
    let spread = profile.walk_spread()?;
    let mut changes = [const { Vec::new() }; 3];
    for written in [MODES[0], MODES[1]] {
        let mut steps = Vec::new();
        for design in designs {
            let design = &Design::load(design)?;
            steps.push(Steps::of(&Walked { profile, design, scenario, backing, size, written })?);
        }
        let modes = (0..).zip(MODES).filter(|(_, mode)| *mode == written);
        for (mode, seed) in modes.flat_map(|(mode, _)| (0..SEEDS).map(move |seed| (mode, seed))) {
            let dice = &mut Dice::new(seed << 8, mode);
            let taken: Vec<_> = steps.iter().map(|steps| steps.drawn(spread, dice)).collect();
            for (changes, after) in changes.iter_mut().zip(&taken[1..]) {
                changes.push(change(taken[0], *after));
            }
        }
    }
    Ok(changes.map(|changes| mean(&changes)))
}

/// "Move data barrier to end of split walk": design linux-6.12 against linux-6.11. vCPUs stand while the log is cleared.
///
/// # Errors
/// What is built in is wrong, or a walk broke off.
pub(super) fn move_barrier(published: &published::MoveBarrier) -> Result<Section, Failure> {
    let table = "move-barrier";
    let profile = &Profile::load("barrier-server-2024")?;
    let head = vec![
        format!("{table}: {}", published.source),
        format!(
            "clear-dirty-log with eager split, profile {}: what a barrier costs is fitted; linux-6.12 against linux-6.11; memory 1/{FACTOR}, at least 64M",
            profile.name
        ),
    ];
    let mut section = Section { head, ..Section::default() };
    let taken = [1, 16, 64].map(|memory| {
        let (scenario, backing, written) = (Scenario::Clear, Backing::Blocks, 1);
        let size = (memory * GIB / FACTOR).max(LEAST);
        let takes = |design| {
            let design = &Design::load(design)?;
            let walked = Walked { profile, design, scenario, backing, size, written };
            Ok::<_, Failure>(Steps::of(&walked)?.mean())
        };
        Ok::<_, Failure>((memory, [takes("linux-6.11")?, takes("linux-6.12")?, takes("slat")?]))
    });
    let taken: Vec<_> = taken.into_iter().collect::<Result<_, _>>()?;
    for vcpus in [1, 8, 64] {
        for &(memory, [old, new, slat]) in &taken {
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
