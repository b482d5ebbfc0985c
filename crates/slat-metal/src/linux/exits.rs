//! Why a vCPU left its guest, how often, and how long the hypervisor had it.

use alloc::vec::Vec;

use serde::Serialize;

/// Why.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reason {
    /// Nothing was mapped.
    Translation,
    /// What was mapped may not be written.
    Write,
    /// What was mapped may not be executed.
    Execute,
    /// The access flag was clear.
    AccessFlag,
    /// A call of the firmware.
    Firmware,
    /// It read an identification register.
    Identification,
    /// The fault was gone when it was looked at.
    Gone,
}

const NAMES: [&str; 7] = [
    "translation fault",
    "permission fault, write",
    "permission fault, fetch",
    "access flag fault",
    "PSCI call",
    "ID register",
    "fault gone",
];

/// Of one vCPU; times in ticks of the counter.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    samples: u64,
    total: u64,
    min: u64,
    max: u64,
    leaves: u64,
}

/// One row of the report: a reason that there was.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Row {
    /// Which.
    pub reason: &'static str,
    /// How often.
    pub samples: u64,
    /// Of all exits.
    pub samples_percent: f64,
    /// Of the time in the hypervisor.
    pub time_percent: f64,
    /// The shortest.
    pub min_us: f64,
    /// The longest.
    pub max_us: f64,
    /// The mean.
    pub mean_us: f64,
    /// Leaves that an exit mapped, as a mean.
    pub leaves: f64,
}

/// All exits.
#[derive(Clone, Copy, Debug, Default)]
pub struct Exits([Tally; NAMES.len()]);

impl Exits {
    /// An exit that took so many ticks and mapped so many leaves.
    pub fn note(&mut self, reason: Reason, ticks: u64, leaves: u64) {
        let tally = &mut self.0[reason as usize];
        tally.min = if tally.samples == 0 { ticks } else { tally.min.min(ticks) };
        tally.max = tally.max.max(ticks);
        tally.samples += 1;
        tally.total += ticks;
        tally.leaves += leaves;
    }

    /// Those of another vCPU too.
    pub fn add(&mut self, other: &Self) {
        for (tally, other) in self.0.iter_mut().zip(&other.0).filter(|(_, other)| other.samples > 0)
        {
            tally.min = if tally.samples == 0 { other.min } else { tally.min.min(other.min) };
            tally.max = tally.max.max(other.max);
            tally.samples += other.samples;
            tally.total += other.total;
            tally.leaves += other.leaves;
        }
    }

    /// How many were faults on memory.
    pub fn faults(&self) -> u64 {
        let faults =
            [Reason::Translation, Reason::Write, Reason::Execute, Reason::AccessFlag, Reason::Gone];
        faults.iter().map(|&reason| self.0[reason as usize].samples).sum()
    }

    /// A row for each reason that there was, the most frequent first.
    pub fn rows(&self, ticks_per_second: u64) -> Vec<Row> {
        let samples: u64 = self.0.iter().map(|tally| tally.samples).sum();
        let time: u64 = self.0.iter().map(|tally| tally.total).sum();
        let micros = |ticks: u64| ticks as f64 * 1e6 / ticks_per_second as f64;
        let share =
            |part: u64, all: u64| if all > 0 { part as f64 / all as f64 * 100.0 } else { 0.0 };
        let some = NAMES.iter().zip(&self.0).filter(|(_, tally)| tally.samples > 0);
        let mut rows: Vec<_> = some
            .map(|(&reason, tally)| Row {
                reason,
                samples: tally.samples,
                samples_percent: share(tally.samples, samples),
                time_percent: share(tally.total, time),
                min_us: micros(tally.min),
                max_us: micros(tally.max),
                mean_us: micros(tally.total) / tally.samples as f64,
                leaves: tally.leaves as f64 / tally.samples as f64,
            })
            .collect();
        rows.sort_by_key(|row| core::cmp::Reverse(row.samples));
        rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_has_the_share_the_extremes_and_the_mean() {
        let (mut first, mut second) = (Exits::default(), Exits::default());
        first.note(Reason::Translation, 20, 8);
        first.note(Reason::Firmware, 40, 0);
        second.note(Reason::Translation, 10, 4);
        second.note(Reason::Translation, 30, 0);
        first.add(&second);
        let rows = first.rows(10_000_000);
        assert_eq!(rows.len(), 2);
        let faults = &rows[0];
        assert_eq!(
            (faults.reason, faults.samples, faults.samples_percent),
            ("translation fault", 3, 75.0)
        );
        assert_eq!((faults.time_percent, faults.min_us, faults.max_us), (60.0, 1.0, 3.0));
        assert_eq!((faults.mean_us, faults.leaves), (2.0, 4.0));
        assert_eq!(rows[1].reason, "PSCI call");
    }

    #[test]
    fn every_reason_has_a_name_of_its_own() {
        assert_eq!(NAMES[Reason::Translation as usize], "translation fault");
        assert_eq!(NAMES[Reason::Gone as usize], "fault gone");
    }
}
