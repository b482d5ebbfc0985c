//! The table about faults that prefetch spares: "Complete prefetch for trailing SPTEs". Faults are counted, one guest on EPT
//! with nothing of chance in it, so that every run counts the same.

use std::sync::Arc;

use super::cell::{Cell, Ours, Section, SlatCell};
use super::published::{Stats, TrailingPrefetch};
use crate::around::Around;
use crate::failure::Failure;
use crate::size::Size;
use crate::trace::{self, Trace};
use crate::virtual_time::profile::Kind;
use crate::workload::{replay, touch};

const TABLE: &str = "trailing-prefetch";
const WHOLE: u64 = 6 << 30;
/// What memory is divided by unless all of it is asked for. Every window is touched alike, so that counts are exact.
const FACTOR: u64 = 256;
/// The window before and after, and slat's that adapts.
const WINDOWS: [Around; 3] = [Around::ClosedRuns, Around::Pages(8), Around::Adaptive];

/// Why a boot of today's Linux is not the published one.
const OTHER_BOOT: &str = "this guest touches each of 53 MiB once, mostly upwards, where closed-runs takes a fault for each page; \
    the published one left 1.2 million times, almost a hundred times as often, and mostly for what no prefetch spares";

/// Counts the faults of all rows.
///
/// # Errors
/// A run broke off.
pub(super) fn reproduce(published: &TrailingPrefetch, full: bool) -> Result<Section, Failure> {
    let factor = if full { 1 } else { FACTOR };
    let head = vec![
        format!("{TABLE}: {}", published.source),
        format!(
            "model on EPT, closed-runs against windows of 8; touch-6g with memory 1/{factor}, counts x {factor}; boot with a recorded trace, app with a synthetic one"
        ),
    ];
    let mut section = Section { head, ..Section::default() };
    touch_6g(published, factor, &mut section)?;
    let rows = [
        ("boot", trace::boot()?, Kind::Predicted, Some(OTHER_BOOT), &published.boot),
        ("app", trace::app(), Kind::Fitted, None, &published.app),
    ];
    for (name, trace, kind, reason, figures) in rows {
        let row = Row { name, trace: Arc::new(trace), kind, reason };
        replayed(&row, (figures.before, figures.after), &mut section)?;
    }
    Ok(section)
}

fn touch_6g(
    published: &TrailingPrefetch,
    factor: u64,
    section: &mut Section,
) -> Result<(), Failure> {
    let counts = WINDOWS.map(|window| touch::faults(Size(WHOLE / factor), window));
    let [before, after, adaptive] = counts.map(|count| count.map(|count| (count * factor) as f64));
    let (before, after, figures) = (before?, after?, &published.touch_6g.faults);
    let name = |when| (TABLE, format!("touch-6g.faults {when}"), Kind::Predicted);
    // Faults of the published guest that touched no page of the 6 GiB, and how many of them prefetch must have spared.
    let others = figures.before - before;
    let left = figures.after_less_than - after;
    let note = format!(
        "the guest's other {others:.0} faults (its kernel, its page tables) are missing here"
    );
    section.cells.push(Cell::count(name("before"), (figures.before, before), 15.0, note));
    let note = format!(
        "published as less than that, with at most {left:.0} of the guest's other faults: prefetch spared {:.0} of those too; \
         without them it is 1/8",
        others - left
    );
    section.cells.push(Cell::less(name("after"), (figures.after_less_than, after), note));
    let slat = |cell: &str, faults, note: &str| SlatCell {
        table: TABLE,
        cell: cell.to_owned(),
        ours: Ours::One(faults),
        note: note.to_owned(),
        reached: true,
    };
    section.slat.push(slat("touch-6g.faults, window of 8", after, "its default"));
    section.slat.push(slat("touch-6g.faults, adaptive", adaptive?, "up to a whole table"));
    Ok(())
}

/// A guest whose touches are replayed.
struct Row {
    name: &'static str,
    trace: Arc<Trace>,
    kind: Kind,
    /// Why it is not what was published, if it is not.
    reason: Option<&'static str>,
}

fn replayed(
    Row { name, trace, kind, reason }: &Row,
    (before, after): (Stats, Stats),
    section: &mut Section,
) -> Result<(), Failure> {
    let counts = WINDOWS.map(|window| replay::faults(trace, window));
    let [old, new, adaptive] = counts.map(|count| count.map(|count| count as f64));
    let (old, new, adaptive) = (old?, new?, adaptive?);
    let change = |before: f64, after: f64| (after / before - 1.0) * 100.0;
    let figures = (change(before.samples, after.samples), change(old, new));
    let (what, _) = trace.origin.split_once([':', ' ']).unwrap_or_default();
    let note = format!("{what} trace: {old:.0}, then {new:.0}");
    let cell = (TABLE, format!("{name}.exits-percent"), *kind);
    section.cells.push(Cell::percent(cell, figures, 3.0, note).unless(*reason));
    let note = format!("against closed-runs; {what} trace: {adaptive:.0}");
    let (cell, ours) =
        (format!("{name}.exits-percent, adaptive"), Ours::One(change(old, adaptive)));
    section.slat.push(SlatCell { table: TABLE, cell, ours, note, reached: true });
    Ok(())
}
