//! Two sides: what they have in common, in what they differ, and by how much their phases do.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use serde_json::Value;

use super::results::Side;
use super::samples::{self, Change, Samples, Summary};
use crate::failure::Failure;

/// What two runs must have in common to measure the same thing.
const MEASURE: [&str; 3] = ["workload", "vcpus", "bytes"];

/// Everything that is said about two sides.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Comparison {
    pub(super) a: Header,
    pub(super) b: Header,
    /// What forbids to take the changes for what they seem.
    pub(super) warnings: Vec<String>,
    pub(super) differ: Vec<Difference>,
    pub(super) same: BTreeMap<String, Said>,
    pub(super) phases: Vec<Row>,
    pub(super) only_a: Vec<String>,
    pub(super) only_b: Vec<String>,
}

#[derive(Clone, Debug, Serialize)]
pub(super) struct Header {
    pub(super) label: String,
    pub(super) runs: usize,
}

#[derive(Clone, Debug, Serialize)]
pub(super) struct Difference {
    pub(super) key: String,
    pub(super) a: Said,
    pub(super) b: Said,
}

/// What the runs of a side say about something.
#[derive(Clone, PartialEq, Debug, Serialize)]
#[serde(untagged)]
pub(super) enum Said {
    /// All the same; null if nothing.
    Once(Value),
    Several(Vec<Value>),
}

#[derive(Clone, PartialEq, Debug, Serialize)]
pub(super) struct Row {
    pub(super) phase: String,
    pub(super) a: Summary,
    pub(super) b: Summary,
    #[serde(flatten)]
    pub(super) change: Change,
}

impl Comparison {
    /// Compares `a` with `b`.
    ///
    /// # Errors
    /// [`Failure::Usage`]: they have no phase in common.
    pub(crate) fn new([a, b]: &[Side; 2], by_iteration: bool) -> Result<Self, Failure> {
        let ours = samples::phases(a, by_iteration);
        let theirs = samples::phases(b, by_iteration);
        let rows: Vec<_> = ours
            .iter()
            .filter_map(|(phase, samples)| {
                let (_, others) = theirs.iter().find(|(other, _)| other == phase)?;
                Some(row(phase, samples, others))
            })
            .collect();
        if rows.is_empty() {
            let names = |all: &[(String, Samples)]| match all {
                [] => "none".to_owned(),
                all => all.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(", "),
            };
            return Err(Failure::Usage(format!(
                "{} and {} have no phase in common: {} against {}",
                a.label,
                b.label,
                names(&ours),
                names(&theirs)
            )));
        }
        let only = |mine: &[(String, Samples)]| {
            let names = mine.iter().map(|(name, _)| name);
            names.filter(|name| !rows.iter().any(|row| row.phase == **name)).cloned().collect()
        };
        let (mut differ, mut same) = (Vec::new(), BTreeMap::new());
        for key in a.facts().chain(b.facts()).collect::<BTreeSet<_>>() {
            let (said, other) = (Said::by(a, key), Said::by(b, key));
            if said == other {
                same.insert(key.to_owned(), said);
            } else {
                differ.push(Difference { key: key.to_owned(), a: said, b: other });
            }
        }
        Ok(Self {
            a: Header { label: a.label.clone(), runs: a.runs.len() },
            b: Header { label: b.label.clone(), runs: b.runs.len() },
            warnings: warnings(&[a, b], &differ, &rows),
            differ,
            same,
            only_a: only(&ours),
            only_b: only(&theirs),
            phases: rows,
        })
    }
}

fn row(phase: &str, a: &Samples, b: &Samples) -> Row {
    Row { phase: phase.to_owned(), a: a.summary(), b: b.summary(), change: a.change(b) }
}

fn warnings(sides: &[&Side; 2], differ: &[Difference], rows: &[Row]) -> Vec<String> {
    let others = differ.iter().filter(|of| MEASURE.contains(&of.key.as_str()));
    let others: Vec<_> = others
        .map(|of| format!("{} {} against {}", of.key, of.a.of(&of.key), of.b.of(&of.key)))
        .collect();
    let mut warnings = Vec::new();
    if !others.is_empty() {
        warnings.push(format!("the sides measure different things: {}", others.join(", ")));
    }
    let is = |side: &Side, fact: &str, value: Value| side.values(fact).contains(&&value);
    for (name, side) in ["A", "B"].into_iter().zip(sides) {
        if is(side, "check", true.into()) {
            warnings.push(format!("{name} ran with --check: its times are no measurement"));
        }
        if is(side, "clock", "instructions".into()) {
            warnings
                .push(format!("{name} counts instructions: its seconds are a nanosecond for each"));
        }
    }
    let repeated = rows.iter().any(|row| row.a.repetitions > 1 || row.b.repetitions > 1);
    let varied = |of: Summary| of.sd_seconds.is_some_and(|sd| sd > 0.0);
    let steady = !rows.iter().any(|row| varied(row.a) || varied(row.b));
    if repeated && steady && sides.iter().all(|side| is(side, "clock", "virtual".into())) {
        let why = "virtual time is the same at every repetition, as nothing was varied";
        warnings.push(format!("{why}: deviations are 0"));
    }
    warnings
}

impl Said {
    fn by(side: &Side, key: &str) -> Self {
        match side.values(key)[..] {
            [] => Self::Once(Value::Null),
            [value] => Self::Once(value.clone()),
            ref several => Self::Several(several.iter().map(|value| (*value).clone()).collect()),
        }
    }
}
