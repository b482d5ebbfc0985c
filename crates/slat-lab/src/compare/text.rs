//! How a comparison looks in a mail: plain, aligned, and as narrow as it can be.

use std::fmt::Write;

use comfy_table::{CellAlignment, Table, presets};
use serde_json::Value;

use super::comparison::{Comparison, Difference, Row, Said};
use super::samples::Summary;
use crate::size::Size;

/// Columns of a mail.
const WIDTH: usize = 80;
/// Numbers that are bytes.
const BYTES: [&str; 6] =
    ["backing_page", "bytes", "eager_split", "granule", "lock_region", "slot_size"];

impl Comparison {
    /// All of it, under a title.
    pub(super) fn text(&self, title: &str) -> String {
        let Self { a, b, .. } = self;
        let runs = |count| format!("{count} run{}", if count == 1 { "" } else { "s" });
        let mut lines = vec![
            title.to_owned(),
            format!("A: {}, {}", a.label, runs(a.runs)),
            format!("B: {}, {}", b.label, runs(b.runs)),
        ];
        lines.extend(self.warnings.iter().flat_map(|warning| wrapped(&format!("NOTE: {warning}"))));
        lines.push(String::new());
        lines.extend(differences(&self.differ));
        lines.extend(wrapped(&format!("the same: {}", self.common())));
        lines.push(String::new());
        lines.extend(table(&self.phases));
        for (side, only) in [("A", &self.only_a), ("B", &self.only_b)] {
            if !only.is_empty() {
                lines.extend(wrapped(&format!("only in {side}: {}", only.join(", "))));
            }
        }
        lines.push(String::new());
        lines.extend(wrapped(&self.how()));
        lines.iter().fold(String::new(), |mut text, line| {
            let _ = writeln!(text, "{line}");
            text
        })
    }

    /// What both sides say alike; not what neither was asked for.
    fn common(&self) -> String {
        let asked = self.same.iter().filter(|(_, said)| {
            let unused = [Value::Null, Value::Bool(false)].map(Said::Once);
            !unused.contains(said)
        });
        asked.map(|(key, said)| format!("{key} {}", said.of(key))).collect::<Vec<_>>().join(", ")
    }

    /// How to read the numbers.
    fn how(&self) -> String {
        let each = |runs| {
            if runs > 1 { "runs, of a run the mean of its iterations" } else { "iterations" }
        };
        let repetitions = match (each(self.a.runs), each(self.b.runs)) {
            (a, b) if a == b => a.to_owned(),
            (a, b) => format!("{a} (A), {b} (B)"),
        };
        let paired = self.phases.iter().filter(|row| row.change.paired).count();
        let pairs = match paired {
            0 => "from those of A and B",
            _ if paired == self.phases.len() => "over pairs",
            _ => "over pairs where there are, else from those of A and B",
        };
        format!(
            "A, B: mean seconds of n repetitions ({repetitions}); sd: standard deviation over them, of the change {pairs}."
        )
    }
}

/// A line for each difference, below the names of the sides.
fn differences(differ: &[Difference]) -> Vec<String> {
    if differ.is_empty() {
        return Vec::new();
    }
    let mut table = plain();
    table.set_header(["differ", "A", "B"]);
    for Difference { key, a, b } in differ {
        table.add_row([key.clone(), a.of(key), b.of(key)]);
    }
    let mut lines = lines(table);
    lines.push(String::new());
    lines
}

fn table(rows: &[Row]) -> Vec<String> {
    let mut table = plain();
    table.set_header(["phase", "n", "A", "sd", "B", "sd", "change", "sd"]);
    for Row { phase, a, b, change } in rows {
        let repetitions = match (a.repetitions, b.repetitions) {
            (a, b) if a == b => a.to_string(),
            (a, b) => format!("{a}/{b}"),
        };
        let percent =
            |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.2}%"));
        let sd = |of: &Summary| {
            percent(
                of.sd_seconds
                    .filter(|_| of.mean_seconds > 0.0)
                    .map(|sd| sd / of.mean_seconds * 100.0),
            )
        };
        let signed = change.change_percent.map(|percent| format!("{percent:+.2}%"));
        table.add_row([
            phase.clone(),
            repetitions,
            seconds(a),
            sd(a),
            seconds(b),
            sd(b),
            signed.unwrap_or_else(|| "-".to_owned()),
            percent(change.sd_percent),
        ]);
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    lines(table)
}

fn seconds(of: &Summary) -> String {
    /// Thirty years: more is nobody's measurement, and its digits would fill the line.
    const LONG: f64 = 1e9;
    if of.mean_seconds < LONG {
        format!("{:.9}", of.mean_seconds)
    } else {
        format!("{:.9e}", of.mean_seconds)
    }
}

fn plain() -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).force_no_tty();
    table
}

fn lines(mut table: Table) -> Vec<String> {
    if let Some(first) = table.column_mut(0) {
        first.set_padding((0, 1));
    }
    table.trim_fmt().lines().map(str::to_owned).collect()
}

impl Said {
    /// As text, by what it is about.
    pub(super) fn of(&self, key: &str) -> String {
        match self {
            Self::Once(value) => shown(key, value),
            Self::Several(values) => match &values[..] {
                [first, .., last] if values.len() > 5 => {
                    format!("{} .. {} ({})", shown(key, first), shown(key, last), values.len())
                }
                values => {
                    values.iter().map(|value| shown(key, value)).collect::<Vec<_>>().join(" ")
                }
            },
        }
    }
}

fn shown(key: &str, value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::Bool(yes) => if *yes { "on" } else { "off" }.to_owned(),
        Value::String(text) => text.clone(),
        value => match value.as_u64() {
            Some(bytes) if BYTES.contains(&key) => Size(bytes).to_string(),
            Some(address) if key.ends_with("gpa") => format!("{address:#x}"),
            _ => value.to_string(),
        },
    }
}

/// Lines of a mail, continued further in.
fn wrapped(text: &str) -> Vec<String> {
    let mut lines = Vec::new();
    let mut line = String::new();
    for word in text.split_whitespace() {
        let full = line.chars().count() + 1 + word.chars().count() > WIDTH;
        if full && !line.trim().is_empty() {
            lines.push(std::mem::replace(&mut line, " ".to_owned()));
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(word);
    }
    lines.push(line);
    lines
}
