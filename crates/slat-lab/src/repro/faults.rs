//! The tables of "KVM: arm64: Parallelize stage 2 fault handling", of its first and its fifth version.

use super::cell::{Cell, Ours, Section, SlatCell};
use super::published;
use super::series::{Pass, Point, Series};
use crate::failure::Failure;
use crate::virtual_time::design::{Design, HostLock};
use crate::virtual_time::dirty_log::{Scenario, run};
use crate::virtual_time::profile::Profile;

/// Memory of each vCPU in the published runs.
const PUBLISHED: u64 = 4 << 30;
/// How much is run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scale {
    /// Memory of each vCPU in cells that were published.
    bytes: u64,
    /// vCPUs that are more than ever were published, and memory of each.
    many: (u32, u64),
    /// Whether so many run the designs of that time, too: no cell needs it.
    all_many: bool,
}

impl Scale {
    /// The published size.
    pub(crate) const FULL: Self = Self { bytes: PUBLISHED, ..Self::SMALL };
    /// A part that takes seconds.
    pub(crate) const SMALL: Self = Self { bytes: 64 << 20, many: (1024, 8 << 20), all_many: false };
    /// A part that takes seconds in a build for tests.
    #[cfg(test)]
    pub(crate) const TINY: Self = Self { bytes: 2 << 20, many: (64, 2 << 20), all_many: true };

    /// Whether it is the published size.
    pub(crate) fn is_full(self) -> bool {
        self.bytes == PUBLISHED
    }

    /// The same, with as many vCPUs in every design as in slat's.
    pub(crate) fn with_all_many(self) -> Self {
        Self { all_many: true, ..self }
    }
}

/// Per cent.
const TOLERANCE: f64 = 15.0;

const FIRST_TOUCH_RFC: &str = "first touch: the mail's seconds before are 0.295 + 0.125 a vCPU up to 8 vCPUs, and 0.03 + 0.125 from 16 \
     on; these 0.27 s depend neither on vCPUs nor on memory and are not there after, which no cost of a fault gives";
const FIRST_TOUCH_V5: &str = "first touch, as in the first version: 0.04 to 0.06 s that depend neither on vCPUs nor on memory, and are \
     not there at 8 vCPUs";
const VERSIONS_DIFFER: &str =
    "0.04 s more than in the first version's mail, as at 2 and at 8 vCPUs but not at 1 and at 16";

/// Cells that are out of tolerance, and why.
const REASONS: [(&str, &str, &[u32], &str); 3] = [
    ("parallel-faults-rfc", "populate-seconds.before", &[1, 2, 4, 8], FIRST_TOUCH_RFC),
    ("parallel-faults-v5", "populate-seconds.before", &[1, 2], FIRST_TOUCH_V5),
    ("parallel-faults-v5", "populate-seconds.after", &[4], VERSIONS_DIFFER),
];

/// One version's table.
pub(super) struct Setup<'a> {
    pub(super) table: &'static str,
    pub(super) profile: &'static str,
    pub(super) published: &'a published::Faults,
    pub(super) scale: Scale,
}

/// The passes of a run.
#[derive(Clone, Debug)]
struct Passes {
    populate: Point,
    dirty: Point,
}

/// The name of a cell.
fn name(series: &str, vcpus: u32) -> String {
    format!("{series} at {vcpus} vCPU{}", if vcpus == 1 { "" } else { "s" })
}

impl Setup<'_> {
    /// The table in virtual time.
    ///
    /// # Errors
    /// A run broke off, or what is built in is wrong.
    pub(super) fn reproduce(&self) -> Result<Section, Failure> {
        let profile = Profile::load(self.profile)?;
        let mut section = self.compare(&profile)?;
        self.add_slat(&profile, &mut section)?;
        Ok(section)
    }

    /// The designs of that time.
    fn compare(&self, profile: &Profile) -> Result<Section, Failure> {
        let bytes = self.scale.bytes;
        let mut section = Section { head: self.head(profile), ..Section::default() };
        let published::Faults { vcpus, dirty_seconds, populate_seconds, .. } = self.published;
        let designs = [
            ("before", "linux-5.18", &dirty_seconds.before, &populate_seconds.before),
            ("after", "linux-5.18+parallel", &dirty_seconds.after, &populate_seconds.after),
        ];
        let mut populate = Vec::new();
        for (version, design, dirty_published, populate_published) in designs {
            let design = Design::load(design)?;
            let published = dirty_published.iter().zip(populate_published);
            let mut runs = Vec::new();
            for (&vcpus, (&dirty, &populated)) in vcpus.iter().zip(published) {
                let mut ours = passes(profile, &design, (vcpus, bytes))?;
                let series = format!("dirty-seconds.{version}");
                section.cells.push(self.cell(profile, &series, vcpus, (dirty, ours.dirty.seconds)));
                let series = format!("populate-seconds.{version}");
                populate.push(self.cell(
                    profile,
                    &series,
                    vcpus,
                    (populated, ours.populate.seconds),
                ));
                ours.dirty.published = Some(dirty);
                ours.populate.published = Some(populated);
                runs.push(ours);
            }
            if self.scale.all_many {
                runs.push(passes(profile, &design, self.scale.many)?);
            }
            section.series.extend(self.series(&design, runs));
        }
        section.cells.extend(populate);
        Ok(section)
    }

    /// Both passes of runs of a design.
    fn series(&self, design: &Design, runs: Vec<Passes>) -> [Series; 2] {
        let (dirty, populate) = runs.into_iter().map(|run| (run.dirty, run.populate)).unzip();
        [(Pass::Dirty, dirty), (Pass::Populate, populate)].map(|(pass, points)| Series {
            table: self.table,
            pass,
            design: design.name.clone(),
            host_lock: design.host_lock,
            points,
        })
    }

    fn head(&self, profile: &Profile) -> Vec<String> {
        let bytes = self.scale.bytes;
        let factor = PUBLISHED / bytes;
        let memory = match factor {
            1 => "4G a vCPU as published".to_owned(),
            _ => format!(
                "{}M a vCPU, 1/{factor} of the published 4G, seconds times {factor}",
                bytes >> 20
            ),
        };
        vec![
            format!("{}: {}", self.table, self.published.source),
            format!("dirty-log --clock virtual, profile {}; {memory}", profile.name),
            "before: design linux-5.18; after: design linux-5.18+parallel; dirty: the pass that splits blocks"
                .to_owned(),
        ]
    }

    fn cell(&self, profile: &Profile, series: &str, vcpus: u32, figures: (f64, f64)) -> Cell {
        let cell = name(series, vcpus);
        let kind = profile.kind_of(&format!("{} {cell}", self.table));
        let named = |(table, of, at, _): &&(&str, &str, &[u32], &str)| {
            *table == self.table && *of == series && at.contains(&vcpus)
        };
        let reason = REASONS.iter().find(named).map(|(.., reason)| *reason);
        Cell::seconds((self.table, cell, kind), figures, TOLERANCE, reason)
    }

    /// What slat's design gives.
    fn add_slat(&self, profile: &Profile, section: &mut Section) -> Result<(), Failure> {
        let Scale { bytes, many, .. } = self.scale;
        let kept = Design::load("slat")?;
        let designs =
            [HostLock::Kept, HostLock::Gone].map(|host_lock| Design { host_lock, ..kept.clone() });
        let both = |size| {
            let [kept, gone] = &designs;
            Ok::<_, Failure>([passes(profile, kept, size)?, passes(profile, gone, size)?])
        };
        let dirty = |runs: &[Passes; 2]| [0, 1].map(|at| runs[at].dirty.seconds);
        let mut runs = Vec::new();
        for &vcpus in &self.published.vcpus {
            let ours = both((vcpus, bytes))?;
            let cell = name("dirty-seconds", vcpus);
            section.slat.push(self.slat_cell(cell, dirty(&ours), String::new(), None));
            runs.push(ours);
        }
        let clear = profile.faults()?.clear_2m.as_seconds();
        for [kept, gone] in &runs {
            let vcpus = kept.populate.vcpus;
            let bound = clear * (PUBLISHED >> 21) as f64 * f64::from(vcpus);
            let populate = [kept, gone].map(|ours| ours.populate.seconds);
            let note = format!(
                "memory bandwidth allows {bound:.3}; with the host lock kept {:.2} of it",
                populate[0] / bound
            );
            section.slat.push(self.slat_cell(
                name("populate-seconds", vcpus),
                populate,
                note,
                None,
            ));
        }
        let ratio = |more: [f64; 2], one: [f64; 2]| [0, 1].map(|at| more[at] / one[at]);
        if let (Some(one), Some(most)) = (runs.first(), runs.last()) {
            let cell = format!("dirty at {} vCPUs to 1", most[0].dirty.vcpus);
            let (ours, note) = (ratio(dirty(most), dirty(one)), "at most 1.10".to_owned());
            section.slat.push(self.slat_cell(cell, ours, note, Some(1.10)));
        }
        let (small, large) = (both((1, many.1))?, both(many)?);
        let cell = format!("dirty at {} vCPUs to 1", many.0);
        let (ours, note) = (ratio(dirty(&large), dirty(&small)), "at most 1.20".to_owned());
        section.slat.push(self.slat_cell(cell, ours, note, Some(1.20)));
        runs.push(large);
        let (kept, gone) = runs.into_iter().map(|[kept, gone]| (kept, gone)).unzip();
        for (design, runs) in designs.iter().zip([kept, gone]) {
            section.series.extend(self.series(design, runs));
        }
        Ok(())
    }

    fn slat_cell(&self, cell: String, ours: [f64; 2], note: String, most: Option<f64>) -> SlatCell {
        let reached = most.is_none_or(|most| ours.iter().all(|&ours| ours <= most));
        SlatCell { table: self.table, cell, ours: Ours::Interval(ours), note, reached }
    }
}

/// Runs the workload with so many vCPUs and so much memory each.
fn passes(
    profile: &Profile,
    design: &Design,
    (vcpus, bytes): (u32, u64),
) -> Result<Passes, Failure> {
    let scenario =
        Scenario { vcpus, bytes, iterations: 2, manual_protect: true, eager_split: None, seed: 1 };
    let phases = run(&scenario, profile, design)?;
    let last = |name| {
        let phase = phases.iter().rfind(|phase| phase.name == name);
        let phase = phase.ok_or_else(|| Failure::Run(format!("no phase {name}")))?;
        Ok::<_, Failure>(Point {
            vcpus,
            bytes,
            published: None,
            seconds: phase.took.as_seconds() * (PUBLISHED / bytes) as f64,
            faults: phase.counters.faults,
            ledger: phase.ledger,
        })
    };
    Ok(Passes { populate: last("populate")?, dirty: last("dirty")? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::repro::published::Published;

    #[test]
    fn an_exclusive_lock_grows_linearly_and_a_shared_one_turns_up_at_32() {
        let published = Published::load().unwrap().parallel_faults_rfc;
        let (table, profile) = ("parallel-faults-rfc", "arm-server-2022");
        let scale = Scale { bytes: 4 << 20, ..Scale::TINY };
        let setup = Setup { table, profile, published: &published, scale };
        let section = setup.compare(&Profile::load(profile).unwrap()).unwrap();
        let ours = |series: &str| {
            let cells = section.cells.iter().filter(|cell| cell.cell.starts_with(series));
            cells.map(|cell| cell.ours.unwrap()).collect::<Vec<_>>()
        };
        let before = ours("dirty-seconds.before");
        for (index, times) in [(3, 2.0), (4, 4.0), (5, 8.0), (6, 12.0)] {
            let grown = before[index] / before[2];
            assert!((grown / times - 1.0).abs() < 0.05, "{grown} instead of {times}: {before:?}");
        }
        let after = ours("dirty-seconds.after");
        assert!(after[..5].iter().all(|&seconds| seconds < 2.3 * after[0]), "{after:?}");
        assert!(after[5] > 3.5 * after[0] && after[6] > 1.3 * after[5], "{after:?}");
        for cell in section.cells {
            assert!(cell.ok || !cell.claimed, "{cell:?}");
        }
    }
}
