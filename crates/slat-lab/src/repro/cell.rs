//! A cell of a published table beside ours, and what slat's own design gives there.

use serde::Serialize;

use super::series::Series;
use crate::virtual_time::columns;
use crate::virtual_time::profile::Kind;

/// Characters of a note that still stands beside its cell.
const LONG: usize = 40;

/// One published figure and ours.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Cell {
    pub(crate) table: &'static str,
    pub(crate) cell: String,
    pub(crate) unit: &'static str,
    pub(crate) published: Option<f64>,
    pub(crate) ours: Option<f64>,
    pub(crate) kind: Kind,
    /// Per cent of the published figure where that is seconds, points where it is per cent.
    pub(crate) tolerance: f64,
    pub(crate) ok: bool,
    /// Why it is out of tolerance where that is known, or what goes with the figure.
    pub(crate) note: String,
    /// Whether it is said to be within tolerance.
    #[serde(skip)]
    pub(crate) claimed: bool,
}

/// What slat's design gives: one figure, or one with the host's lock kept and one with it gone.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
#[serde(untagged)]
pub(crate) enum Ours {
    One(f64),
    Interval([f64; 2]),
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct SlatCell {
    pub(crate) table: &'static str,
    pub(crate) cell: String,
    pub(crate) ours: Ours,
    pub(crate) note: String,
    /// Whether it reaches what it is to reach; nothing is asked of most.
    #[serde(skip)]
    pub(crate) reached: bool,
}

/// A table: what it is about, and its cells.
#[derive(Clone, Debug, Default)]
pub(crate) struct Section {
    pub(crate) head: Vec<String>,
    pub(crate) cells: Vec<Cell>,
    pub(crate) slat: Vec<SlatCell>,
    /// What can be drawn of it.
    pub(crate) series: Vec<Series>,
}

impl Cell {
    /// Seconds, to be within `percent` of what was published unless there is a reason.
    pub(crate) fn seconds(
        (table, cell, kind): (&'static str, String, Kind),
        (published, ours): (f64, f64),
        percent: f64,
        reason: Option<&str>,
    ) -> Self {
        let ok = (ours / published - 1.0).abs() * 100.0 <= percent;
        let note = reason.filter(|_| !ok).unwrap_or_default().to_owned();
        let claimed = ok || reason.is_none();
        let (published, ours) = (Some(published), Some(ours));
        Self {
            table,
            cell,
            unit: "s",
            published,
            ours,
            kind,
            tolerance: percent,
            ok,
            note,
            claimed,
        }
    }

    /// A change in per cent, to be within so many points.
    pub(crate) fn percent(
        (table, cell, kind): (&'static str, String, Kind),
        (published, ours): (f64, f64),
        points: f64,
        note: String,
    ) -> Self {
        let ok = (ours - published).abs() <= points;
        let (published, ours) = (Some(published), Some(ours));
        let (unit, claimed) = ("%", true);
        Self { table, cell, unit, published, ours, kind, tolerance: points, ok, note, claimed }
    }

    /// The same, but not claimed where it is out of tolerance for a reason.
    pub(crate) fn unless(mut self, reason: Option<&str>) -> Self {
        if let Some(reason) = reason.filter(|_| !self.ok) {
            self.claimed = false;
            self.note = format!("{}; {reason}", self.note);
        }
        self
    }

    /// A number of faults, to be within `percent` of what was published.
    pub(crate) fn count(
        name: (&'static str, String, Kind),
        figures: (f64, f64),
        percent: f64,
        note: String,
    ) -> Self {
        Self { unit: "faults", note, ..Self::seconds(name, figures, percent, None) }
    }

    /// A number of faults, to be less than what was published.
    pub(crate) fn less(
        (table, cell, kind): (&'static str, String, Kind),
        (published, ours): (f64, f64),
        note: String,
    ) -> Self {
        let ok = ours < published;
        let (published, ours, tolerance) = (Some(published), Some(ours), 0.0);
        let (unit, claimed) = ("faults", true);
        Self { table, cell, unit, published, ours, kind, tolerance, ok, note, claimed }
    }

    /// Published, ours, the difference, the kind, and whether it is within tolerance, as text.
    pub(crate) fn figures(&self) -> [String; 5] {
        let figure = |figure: Option<f64>| {
            let digits = if self.unit == "faults" { 0 } else { 2 };
            figure.map_or("-".to_owned(), |figure| format!("{figure:.digits$} {}", self.unit))
        };
        let difference = match (self.published, self.ours, self.unit) {
            (Some(published), Some(ours), "s" | "faults") => {
                format!("{:+.1} %", (ours / published - 1.0) * 100.0)
            }
            (Some(published), Some(ours), _) => format!("{:+.1} points", ours - published),
            _ => "-".to_owned(),
        };
        let (kind, verdict) = match (self.ours, self.kind, self.ok) {
            (None, ..) => ("", ""),
            (_, Kind::Calibrated, ok) => ("calibrated", of(ok)),
            (_, Kind::Predicted, ok) => ("predicted", of(ok)),
            (_, Kind::Fitted, ok) => ("fitted", of(ok)),
        };
        let (published, ours) = (figure(self.published), figure(self.ours));
        [published, ours, difference, kind.to_owned(), verdict.to_owned()]
    }

    /// The row of a table; what is long is told below it, among `remarks`.
    fn row<'a>(&'a self, remarks: &mut Vec<&'a str>) -> [String; 7] {
        let [published, ours, difference, kind, verdict] = self.figures();
        let note =
            if self.note.len() > LONG { mark(remarks, &self.note) } else { self.note.clone() };
        [self.cell.clone(), published, ours, difference, kind, verdict, note]
    }
}

fn of(ok: bool) -> &'static str {
    if ok { "ok" } else { "OUT" }
}

/// The number of a remark, which is told once.
fn mark<'a>(remarks: &mut Vec<&'a str>, remark: &'a str) -> String {
    let known = remarks.iter().position(|known| *known == remark);
    let index = known.unwrap_or_else(|| {
        remarks.push(remark);
        remarks.len() - 1
    });
    format!("[{}]", index + 1)
}

impl SlatCell {
    /// What slat gives, as text.
    pub(crate) fn figure(&self) -> String {
        match self.ours {
            Ours::One(figure) => format!("{figure:.2}"),
            Ours::Interval([kept, gone]) => format!("{kept:.3} .. {gone:.3}"),
        }
    }

    fn row(&self) -> [String; 3] {
        [self.cell.clone(), self.figure(), self.note.clone()]
    }
}

impl Section {
    /// As text for a person.
    pub(crate) fn lines(&self) -> Vec<String> {
        let mut lines = self.head.clone();
        if !self.cells.is_empty() {
            let titles = ["", "published", "ours", "difference", "", "", ""].map(str::to_owned);
            let mut remarks = Vec::new();
            let mut rows = vec![titles];
            rows.extend(self.cells.iter().map(|cell| cell.row(&mut remarks)));
            lines.extend(columns(&rows));
            let remarks = (1..).zip(remarks);
            lines.extend(remarks.map(|(number, remark)| format!("[{number}] {remark}")));
        }
        if !self.slat.is_empty() {
            lines.push("slat in the same cells:".to_owned());
            lines.extend(columns(&self.slat.iter().map(SlatCell::row).collect::<Vec<_>>()));
        }
        lines.push(String::new());
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(ours: f64, reason: Option<&str>) -> Cell {
        let name = ("table", "cell".to_owned(), Kind::Predicted);
        Cell::seconds(name, (2.0, ours), 15.0, reason)
    }

    #[test]
    fn a_cell_is_claimed_unless_it_is_out_of_tolerance_for_a_reason() {
        for ours in [1.71, 2.29] {
            let cell = cell(ours, Some("it rained"));
            assert!(cell.ok && cell.claimed && cell.note.is_empty());
        }
        for ours in [1.69, 2.31] {
            let known = cell(ours, Some("it rained"));
            assert!(!known.ok && !known.claimed && known.note == "it rained");
            let unknown = cell(ours, None);
            assert!(!unknown.ok && unknown.claimed);
        }
    }

    #[test]
    fn a_change_that_is_out_of_tolerance_for_a_reason_is_told_with_it_and_not_claimed() {
        let name = || ("table", "cell".to_owned(), Kind::Predicted);
        let cell = |ours, reason| {
            Cell::percent(name(), (-20.0, ours), 3.0, "10, then 8".to_owned()).unless(reason)
        };
        let near = cell(-22.0, Some("it rained"));
        assert!(near.ok && near.claimed && near.note == "10, then 8");
        let far = cell(-30.0, Some("it rained"));
        assert!(!far.ok && !far.claimed && far.note == "10, then 8; it rained");
        assert!(cell(-30.0, None).claimed);
    }

    #[test]
    fn a_long_remark_is_told_once_below_the_table() {
        let reason = "a reason that is far too long to stand beside a figure";
        let cells = vec![cell(9.0, Some(reason)), cell(8.0, Some(reason)), cell(2.0, None)];
        let lines = Section { cells, ..Section::default() }.lines();
        let text = lines.join("\n");
        assert_eq!(text.matches(reason).count(), 1, "{text}");
        assert_eq!(lines.iter().filter(|line| line.ends_with("OUT  [1]")).count(), 2, "{text}");
    }
}
