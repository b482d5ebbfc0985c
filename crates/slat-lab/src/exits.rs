//! Why vCPUs left their guests, how often, and how long the hypervisor had them: in the columns of the kernel's perf tool,
//! with one more for what an exit mapped.

use std::time::Duration;

use serde::{Serialize, Serializer};
use slat_model::Architecture;
use slat_vm::{Exit, FaultError, FaultKind};

/// Why a vCPU left. What a fault turned out to be comes before how hardware called it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Reason {
    Translation,
    Permission,
    AccessFlag,
    EptViolation,
    NestedPageFault,
    Mmio,
    DirtyRingFull,
    Convert,
    Abort,
    Failed,
    /// Those of a guest whose tables are shadowed: what the shadow lacked, what the guest has to see to itself, what lies
    /// below it, and what it tells its CPU.
    ShadowFault,
    GuestFault,
    SecondLevel,
    EmulatedStore,
    RootLoad,
    PageInvalidation,
}

const REASONS: [Reason; 16] = [
    Reason::Translation,
    Reason::Permission,
    Reason::AccessFlag,
    Reason::EptViolation,
    Reason::NestedPageFault,
    Reason::Mmio,
    Reason::DirtyRingFull,
    Reason::Convert,
    Reason::Abort,
    Reason::Failed,
    Reason::ShadowFault,
    Reason::GuestFault,
    Reason::SecondLevel,
    Reason::EmulatedStore,
    Reason::RootLoad,
    Reason::PageInvalidation,
];

impl Reason {
    fn of(architecture: Architecture, kind: FaultKind, outcome: &Result<Exit, FaultError>) -> Self {
        match (outcome, architecture, kind) {
            (Ok(Exit::Mmio(_)), ..) => Self::Mmio,
            (Ok(Exit::DirtyRingFull), ..) => Self::DirtyRingFull,
            (Ok(Exit::Convert { .. }), ..) => Self::Convert,
            (Ok(Exit::Abort(_)), ..) => Self::Abort,
            (Err(_), ..) => Self::Failed,
            (Ok(_), Architecture::Ept, _) => Self::EptViolation,
            (Ok(_), Architecture::Npt, _) => Self::NestedPageFault,
            (Ok(_), _, FaultKind::Translation) => Self::Translation,
            (Ok(_), _, FaultKind::Permission) => Self::Permission,
            (Ok(_), _, FaultKind::AccessFlag) => Self::AccessFlag,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Translation => "translation fault",
            Self::Permission => "permission fault",
            Self::AccessFlag => "access flag fault",
            Self::EptViolation => "EPT violation",
            Self::NestedPageFault => "nested page fault",
            Self::Mmio => "MMIO",
            Self::DirtyRingFull => "dirty ring full",
            Self::Convert => "convert",
            Self::Abort => "abort",
            Self::Failed => "failed",
            Self::ShadowFault => "shadow fault",
            Self::GuestFault => "guest's page fault",
            Self::SecondLevel => "second-level fault",
            Self::EmulatedStore => "emulated store",
            Self::RootLoad => "CR3 load",
            Self::PageInvalidation => "INVLPG",
        }
    }
}

/// All exits for one reason. Times are nanoseconds.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
struct Tally {
    samples: u64,
    min: f64,
    max: f64,
    mean: f64,
    /// The sum of the squares of what each differs from the mean by.
    squares: f64,
    pages: u64,
}

impl Tally {
    fn one(took: f64, pages: u64) -> Self {
        Self { samples: 1, min: took, max: took, mean: took, squares: 0.0, pages }
    }

    fn total(&self) -> f64 {
        self.mean * self.samples as f64
    }

    /// Both together: mean and squares as if all had been noted in one.
    fn add(&mut self, other: &Self) {
        if other.samples == 0 {
            return;
        }
        if self.samples == 0 {
            *self = *other;
            return;
        }
        let (a, b) = (self.samples as f64, other.samples as f64);
        let apart = other.mean - self.mean;
        self.squares += other.squares + apart * apart * a * b / (a + b);
        self.mean += apart * b / (a + b);
        self.min = self.min.min(other.min);
        self.max = self.max.max(other.max);
        self.samples += other.samples;
        self.pages += other.pages;
    }
}

/// What vCPUs left their guests for.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(crate) struct Exits([Tally; REASONS.len()]);

/// One line: a reason, or all of them.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
struct Row {
    reason: &'static str,
    samples: u64,
    /// Of all samples, and of the time of all.
    samples_percent: f64,
    time_percent: f64,
    min_us: f64,
    max_us: f64,
    mean_us: f64,
    /// The standard deviation of the mean, in per cent of it.
    spread_percent: f64,
    /// Pages that an exit mapped, its own and those round it, as a mean.
    pages: f64,
}

impl Exits {
    /// An exit that the hypervisor had for so long, and in which it mapped so many pages.
    pub(crate) fn note(
        &mut self,
        architecture: Architecture,
        kind: FaultKind,
        outcome: &Result<Exit, FaultError>,
        (took, pages): (Duration, u64),
    ) {
        self.note_for(Reason::of(architecture, kind, outcome), (took, pages));
    }

    /// As [`note`](Self::note), for a reason that is known.
    pub(crate) fn note_for(&mut self, reason: Reason, (took, pages): (Duration, u64)) {
        self.0[reason as usize].add(&Tally::one(took.as_secs_f64() * 1e9, pages));
    }

    /// Counts those of another vCPU or phase too.
    pub(crate) fn add(&mut self, other: &Self) {
        for (tally, other) in self.0.iter_mut().zip(&other.0) {
            tally.add(other);
        }
    }

    fn rows(&self) -> Vec<Row> {
        let samples: u64 = self.0.iter().map(|tally| tally.samples).sum();
        let time: f64 = self.0.iter().map(Tally::total).sum();
        let some = REASONS.iter().zip(&self.0).filter(|(_, tally)| tally.samples > 0);
        let row = |(reason, tally): (&Reason, &Tally)| {
            let count = tally.samples as f64;
            let deviation = match tally.samples {
                1 => 0.0,
                _ => (tally.squares / (count - 1.0) / count).sqrt(),
            };
            let share = |part: f64, all: f64| if all > 0.0 { part / all * 100.0 } else { 0.0 };
            Row {
                reason: reason.name(),
                samples: tally.samples,
                samples_percent: share(count, samples as f64),
                time_percent: share(tally.total(), time),
                min_us: tally.min / 1e3,
                max_us: tally.max / 1e3,
                mean_us: tally.mean / 1e3,
                spread_percent: share(deviation, tally.mean),
                pages: tally.pages as f64 / count,
            }
        };
        let mut rows: Vec<_> = some.map(row).collect();
        rows.sort_by_key(|row| std::cmp::Reverse(row.samples));
        rows
    }

    /// As a table for a person.
    pub(crate) fn lines(&self) -> Vec<String> {
        let title = format!(
            "{:18} {:>9} {:>9} {:>7} {:>8} {:>10} {:>8} {:>7} {:>7}",
            "exits", "samples", "samples%", "time%", "min us", "max us", "mean us", "+-%", "pages"
        );
        let line = |row: &Row| {
            format!(
                "{:18} {:>9} {:>9.2} {:>7.2} {:>8.2} {:>10.2} {:>8.2} {:>7.2} {:>7.2}",
                row.reason,
                row.samples,
                row.samples_percent,
                row.time_percent,
                row.min_us,
                row.max_us,
                row.mean_us,
                row.spread_percent,
                row.pages
            )
        };
        let rows = self.rows();
        let samples: u64 = rows.iter().map(|row| row.samples).sum();
        let time: f64 = self.0.iter().map(Tally::total).sum();
        let mut lines = vec![title];
        lines.extend(rows.iter().map(line));
        lines.push(format!("{samples} exits, {:.6} s in the hypervisor", time / 1e9));
        lines
    }
}

impl Serialize for Exits {
    /// A row for each reason that there was, the most frequent first.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.rows().serialize(serializer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FAULT: FaultKind = FaultKind::Translation;

    fn exits(all: &[(Architecture, u64)]) -> Exits {
        let mut exits = Exits::default();
        for &(architecture, micros) in all {
            let took = (Duration::from_micros(micros), 8);
            exits.note(architecture, FAULT, &Ok(Exit::Resume), took);
        }
        exits
    }

    #[test]
    fn a_row_has_the_share_the_extremes_and_the_spread_of_the_mean() {
        let all = [1, 2, 3, 4].map(|micros| (Architecture::Ept, micros));
        let mut all = exits(&all);
        all.note(
            Architecture::Ept,
            FAULT,
            &Ok(Exit::DirtyRingFull),
            (Duration::from_micros(30), 0),
        );
        let [violations, ring] = all.rows()[..] else { panic!("{:?}", all.rows()) };
        assert_eq!((violations.reason, violations.samples), ("EPT violation", 4));
        assert_eq!((ring.reason, ring.samples, ring.pages), ("dirty ring full", 1, 0.0));
        let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-6, "{a} is not {b}");
        near(violations.samples_percent, 80.0);
        near(violations.time_percent, 25.0);
        near(violations.min_us, 1.0);
        near(violations.max_us, 4.0);
        near(violations.mean_us, 2.5);
        // The variance is 5/3, that of the mean of four a quarter of it.
        near(violations.spread_percent, (5.0_f64 / 12.0).sqrt() / 2.5 * 100.0);
        near(violations.pages, 8.0);
    }

    #[test]
    fn exits_of_two_vcpus_are_as_those_of_one() {
        let all = [(Architecture::Arm, 5), (Architecture::Arm, 9), (Architecture::Arm, 40)];
        let mut together = exits(&all[..1]);
        together.add(&exits(&all[1..]));
        together.add(&Exits::default());
        let (together, alone) = (together.rows(), exits(&all).rows());
        assert_eq!(together[0].samples, alone[0].samples);
        for value in
            [|row: &Row| row.mean_us, |row: &Row| row.spread_percent, |row: &Row| row.max_us]
        {
            assert!((value(&together[0]) - value(&alone[0])).abs() < 1e-6);
        }
    }

    #[test]
    fn each_architecture_calls_a_fault_by_its_name() {
        let name = |architecture| exits(&[(architecture, 1)]).rows()[0].reason;
        assert_eq!(name(Architecture::Arm), "translation fault");
        assert_eq!(name(Architecture::Npt), "nested page fault");
    }

    #[test]
    fn every_reason_has_a_place_of_its_own() {
        for (place, reason) in REASONS.iter().enumerate() {
            assert_eq!(*reason as usize, place);
        }
    }
}
