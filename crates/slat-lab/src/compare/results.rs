//! What files of results have in them: runs of a workload, as it prints them with `--json`.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::failure::Failure;

/// Objects that say what was measured, not what was run.
const MEASURED: [&str; 3] = ["check", "counters", "demand"];

pub(super) type Facts = BTreeMap<String, Value>;

/// One run.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Run {
    /// Workload, backend and the parts of `config`, by name.
    pub(super) asked: Facts,
    /// Whatever else the report says of the run.
    pub(super) said: Facts,
    /// In their order.
    pub(super) phases: Vec<Phase>,
}

/// One phase.
#[derive(Clone, PartialEq, Debug, Deserialize)]
pub(super) struct Phase {
    pub(super) name: String,
    pub(super) iteration: Option<u64>,
    pub(super) seconds: f64,
}

/// A report, of this version or of any other.
#[derive(Deserialize)]
struct Report {
    workload: String,
    backend: String,
    config: Map<String, Value>,
    phases: Vec<Phase>,
    #[serde(flatten)]
    more: Map<String, Value>,
}

impl Run {
    fn new(report: Report) -> Result<Self, String> {
        let Report { workload, backend, config, phases, more } = report;
        if let Some(phase) = phases.iter().find(|phase| phase.seconds < 0.0) {
            return Err(format!("phase {} took {} seconds", phase.name, phase.seconds));
        }
        let mut asked = Facts::new();
        config.into_iter().for_each(|(name, value)| note(&mut asked, name, value));
        asked.insert("workload".to_owned(), workload.into());
        asked.insert("backend".to_owned(), backend.into());
        let mut said = Facts::new();
        let more = more.into_iter().filter(|(name, value)| {
            !value.is_null() && !value.is_array() && !MEASURED.contains(&name.as_str())
        });
        more.for_each(|(name, value)| note(&mut said, name, value));
        Ok(Self { asked, said, phases })
    }

    /// A fact in which it is no repetition of `other`: another seed is none.
    fn differs_from<'a>(&'a self, other: &'a Self) -> Option<&'a str> {
        let mut facts = self.asked.keys().chain(other.asked.keys());
        facts
            .find(|&fact| fact != "seed" && self.asked.get(fact) != other.asked.get(fact))
            .map(String::as_str)
    }

    fn fact(&self, name: &str) -> Option<&Value> {
        self.asked.get(name).or_else(|| self.said.get(name))
    }
}

/// Notes a fact; an object is one fact for each of its parts, and a guest mode goes by its name.
fn note(facts: &mut Facts, name: String, value: Value) {
    match value {
        Value::Object(parts) => match parts.get("name") {
            Some(known) if name == "mode" => {
                facts.insert(name, known.clone());
            }
            _ => parts
                .into_iter()
                .for_each(|(part, value)| note(facts, format!("{name}.{part}"), value)),
        },
        value => {
            facts.insert(name, value);
        }
    }
}

/// Repetitions of one configuration.
#[derive(Clone, Debug)]
pub(crate) struct Side {
    /// Where they come from.
    pub(super) label: String,
    /// At least one.
    pub(super) runs: Vec<Run>,
}

impl Side {
    /// Reads reports, one after the other.
    ///
    /// # Errors
    /// [`Failure::Usage`]: they are none, or not of one configuration.
    pub(crate) fn parse(label: String, text: &str) -> Result<Self, Failure> {
        let wrong = |why: String| Failure::Usage(format!("{label}: {why}"));
        let mut runs: Vec<Run> = Vec::new();
        for (number, value) in (1..).zip(serde_json::Deserializer::from_str(text).into_iter()) {
            let value: Value = value.map_err(|error| wrong(format!("no JSON: {error}")))?;
            let run = serde_json::from_value(value).map_err(|error| error.to_string());
            let run = run.and_then(Run::new).map_err(|why| {
                wrong(format!("run {number} is not what a workload prints with --json: {why}"))
            })?;
            if let Some(fact) = runs.first().and_then(|first| run.differs_from(first)) {
                let why = "a file has repetitions of one configuration, with other seeds at most";
                return Err(wrong(format!("run {number} differs from run 1 in {fact}: {why}")));
            }
            runs.push(run);
        }
        if runs.is_empty() {
            return Err(wrong("empty: it has the results of no run".to_owned()));
        }
        Ok(Self { label, runs })
    }

    /// What its runs say about something: each value once.
    pub(super) fn values(&self, fact: &str) -> Vec<&Value> {
        let mut values = Vec::new();
        for value in self.runs.iter().filter_map(|run| run.fact(fact)) {
            if !values.contains(&value) {
                values.push(value);
            }
        }
        values
    }

    /// Everything that its runs say something about.
    pub(super) fn facts(&self) -> impl Iterator<Item = &str> {
        let facts = self.runs.iter().flat_map(|run| run.asked.keys().chain(run.said.keys()));
        facts.map(String::as_str)
    }
}
