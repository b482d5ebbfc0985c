//! What a run has found, in the shape that `slat ... --json` prints, and the lines of the console that carry it.

use alloc::string::String;
use alloc::vec::Vec;
use core::iter::Sum;
use core::ops::{Add, Sub};

use serde::{Deserialize, Serialize};

/// What every line begins with that whoever has started the machine is to read. After it comes one of [`PROGRESS`],
/// [`RESULT`], [`FAILED`] and [`DONE`]; other lines are for people.
pub const LINE: &str = "slat: ";
/// A phase begins: its name, and its iteration if it has one.
pub const PROGRESS: &str = "progress ";
/// The report, one JSON object.
pub const RESULT: &str = "result ";
/// Nothing goes on: why. The machine is turned off.
pub const FAILED: &str = "failed: ";
/// The last line of a run that came to its end, whatever its check has found.
pub const DONE: &str = "done";

/// A run.
#[derive(Debug, Serialize)]
pub struct Report<C, R, K> {
    /// The workload.
    pub workload: &'static str,
    /// What it ran on.
    pub backend: &'static str,
    /// What was asked for, with all defaults filled in.
    pub config: C,
    /// What no number says.
    pub notes: Vec<String>,
    /// In the order in which they ran.
    pub phases: Vec<Phase>,
    /// Of all phases together.
    pub counters: Counters,
    /// What only this workload measures.
    #[serde(flatten)]
    pub results: R,
    /// What was compared.
    pub check: Option<K>,
}

/// No results of its own.
#[derive(Debug, Serialize)]
pub struct Nothing {}

/// The part of `config` that all workloads have.
#[derive(Clone, Debug, Serialize)]
pub struct GuestConfig {
    /// How many.
    pub vcpus: u32,
    /// Memory of each vCPU, or of all, as the workload counts it.
    pub bytes: u64,
    /// Named as `slat` names it.
    pub backing: &'static str,
    /// Bytes of a page that the host gives.
    pub backing_page: u64,
    /// Addresses and page size of the guest.
    pub mode: Mode,
    /// Where guest memory begins.
    pub gpa: u64,
    /// Whose tables.
    pub arch: &'static str,
    /// Page size of the tables.
    pub granule: u64,
    /// Bits of guest-physical addresses.
    pub ipa_bits: u32,
    /// FEAT_S2FWB.
    pub fwb: bool,
    /// Hardware sets the access flag.
    pub hardware_access: bool,
    /// How time is counted.
    pub clock: crate::options::Clock,
    /// Contents are compared.
    pub check: bool,
    /// Bytes that eager split splits at once.
    pub eager_split: Option<u64>,
    /// Pages that a fault maps.
    pub fault_around: u32,
    /// Invalidations are executed.
    pub invalidate: bool,
}

/// The guest mode of the kernel's tests that the guests are nearest to; their own translation is off.
#[derive(Clone, Debug, Serialize)]
pub struct Mode {
    /// In Linux 6.12.
    pub number: u32,
    /// Its name.
    pub name: &'static str,
    /// Bits of guest-physical addresses.
    pub physical_bits: u32,
    /// Bits of virtual ones.
    pub virtual_bits: u32,
    /// Bytes of a guest page.
    pub page_size: u64,
}

impl Mode {
    /// 4K pages, 40 bits.
    pub const P40V48_4K: Self =
        Self { number: 6, name: "P40V48_4K", physical_bits: 40, virtual_bits: 48, page_size: 4096 };
}

/// One phase.
#[derive(Clone, Debug, Serialize)]
pub struct Phase {
    /// Which.
    pub name: &'static str,
    /// From 1, where it comes more than once.
    pub iteration: Option<u32>,
    /// By the clock of the run.
    pub seconds: f64,
    /// Of all CPUs together, where time is counted in instructions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub instructions: Option<Instructions>,
    /// What was done.
    pub counters: Counters,
}

/// Where instructions went, of guests and hypervisor together.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Instructions {
    /// All.
    pub total: u64,
    /// Those in the engine's calls: faults, and what the hypervisor does to the log.
    pub engine: u64,
}

impl Add for Instructions {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { total: self.total + other.total, engine: self.engine + other.engine }
    }
}

impl Sum for Instructions {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), Add::add)
    }
}

/// What was done, by all vCPUs and the hypervisor together.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Counters {
    /// Faults that vCPUs brought to the hypervisor.
    pub faults: u64,
    /// Blocks that were split.
    pub splits: u64,
    /// Tables that became a block.
    pub collapses: u64,
    /// A root of n tables as n.
    pub tables_allocated: u64,
    /// The same.
    pub tables_freed: u64,
    /// Barriers that make stores visible to table walkers.
    pub publishes: u64,
    /// By kind.
    pub invalidations: Invalidations,
    /// Entries that the engine's walks looked at.
    pub entries_visited: u64,
}

/// Invalidations by kind, each as an instruction.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Invalidations {
    /// One address, on every CPU.
    pub by_ipa: u64,
    /// A range, on every CPU.
    pub by_range: u64,
    /// A guest's combined-stage translations, on every CPU.
    pub combined: u64,
    /// All of a guest's translations, on every CPU.
    pub everything: u64,
    /// One address, or a whole guest, on one CPU.
    pub local: u64,
}

impl Counters {
    /// Nothing.
    pub const NONE: Self = Self {
        faults: 0,
        splits: 0,
        collapses: 0,
        tables_allocated: 0,
        tables_freed: 0,
        publishes: 0,
        invalidations: Invalidations {
            by_ipa: 0,
            by_range: 0,
            combined: 0,
            everything: 0,
            local: 0,
        },
        entries_visited: 0,
    };

    fn zip(self, other: Self, f: impl Fn(u64, u64) -> u64) -> Self {
        let (a, b) = (self.invalidations, other.invalidations);
        Self {
            faults: f(self.faults, other.faults),
            splits: f(self.splits, other.splits),
            collapses: f(self.collapses, other.collapses),
            tables_allocated: f(self.tables_allocated, other.tables_allocated),
            tables_freed: f(self.tables_freed, other.tables_freed),
            publishes: f(self.publishes, other.publishes),
            invalidations: Invalidations {
                by_ipa: f(a.by_ipa, b.by_ipa),
                by_range: f(a.by_range, b.by_range),
                combined: f(a.combined, b.combined),
                everything: f(a.everything, b.everything),
                local: f(a.local, b.local),
            },
            entries_visited: f(self.entries_visited, other.entries_visited),
        }
    }
}

impl Add for Counters {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        self.zip(other, u64::wrapping_add)
    }
}

impl Sub for Counters {
    type Output = Self;

    /// What happened between two moments.
    fn sub(self, earlier: Self) -> Self {
        self.zip(earlier, u64::wrapping_sub)
    }
}

impl Sum for Counters {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), Add::add)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Serialize)]
    struct Config {
        vcpus: u32,
    }

    #[test]
    fn a_report_is_one_line_in_the_shape_of_the_command() {
        let local = Invalidations { local: 2, ..Invalidations::default() };
        let counters = Counters { faults: 3, invalidations: local, ..Counters::default() };
        let phase =
            Phase { name: "dirty", iteration: Some(1), seconds: 0.5, instructions: None, counters };
        let report = Report {
            workload: "dirty-log",
            backend: "metal",
            config: Config { vcpus: 1 },
            notes: Vec::new(),
            phases: [phase].into(),
            counters,
            results: Nothing {},
            check: None::<()>,
        };
        let json = serde_json::to_string(&report).unwrap();
        assert!(!json.contains('\n'));
        let value: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(value["backend"], "metal");
        assert_eq!(value["phases"][0]["counters"]["invalidations"]["local"], 2);
        assert_eq!(value["phases"][0].get("instructions"), None);
        assert_eq!(value["counters"]["faults"], 3);
        assert!(value["check"].is_null());
    }

    #[test]
    fn counters_of_a_phase_are_what_was_counted_since_the_one_before() {
        let at = |faults| Counters { faults, ..Counters::default() };
        assert_eq!(at(5) - at(2) + at(1), at(4));
    }
}
