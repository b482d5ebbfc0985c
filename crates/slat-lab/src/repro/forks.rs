//! The table of reverse maps: a guest that forks 500 processes under shadow paging, on the real clock.

use crate::failure::Failure;
use crate::repro::cell::{Cell, Ours, Section, SlatCell};
use crate::repro::published::RmapCounter;
use crate::virtual_time::profile::Kind;
use crate::workload::rmap_fork::{self, Design};

const TABLE: &str = "rmap-counter";
/// Runs of each design, by turns.
const ROUNDS: usize = 7;
/// Nanoseconds that it takes to leave and to enter the guest: calibrated on slots-15, by the CPU time of runs without exits.
/// The mail does not name its machine.
const EXIT_TIME: u64 = 2000;
/// Per cent of the time of slots-3.
const POINTS: f64 = 10.0;

/// Measures it.
///
/// # Errors
/// A run that broke off.
pub(super) fn reproduce(published: &RmapCounter) -> Result<Section, Failure> {
    let designs = [Design::Slots3, Design::Slots15, Design::Slots14Counter, Design::Slat];
    let mut seconds = [const { Vec::new() }; 4];
    for _ in 0..ROUNDS {
        for (design, seconds) in designs.into_iter().zip(&mut seconds) {
            seconds.push(rmap_fork::seconds(design, EXIT_TIME)?);
        }
    }
    let [slots_3, slots_15, counter, slat] = seconds.map(median);
    let percent = |time: f64, of: f64| (time / of - 1.0) * 100.0;
    let time = &published.fork_time;
    let cell = |name: &str, kind, theirs, ours| {
        let figures = (percent(theirs, time.slots_3), percent(ours, slots_3));
        Cell::percent((TABLE, format!("{name} / slots-3"), kind), figures, POINTS, String::new())
    };
    let spread = &published.fork_spread_percent;
    let (merged, merged_spread) =
        (&published.merged_fork_time, &published.merged_fork_spread_percent);
    let head = vec![
        format!("{TABLE}: {}", published.source),
        format!("  {}", published.setup),
        format!(
            "  time of all phases, change to slots-3; real clock, medians of {ROUNDS} runs by turns: other figures at each \
             run. Exits of {EXIT_TIME} ns"
        ),
        format!(
            "  published spreads: {} %, {} %, {} %",
            spread.slots_3, spread.slots_15, spread.slots_14_counter
        ),
        format!("  measured again: {}", published.merged_source),
        format!(
            "  there slots-15 has {:+.1} % and slots-14-counter {:+.1} %; spreads {} %, {} %, {} %",
            percent(merged.slots_15, merged.slots_3),
            percent(merged.slots_14_counter, merged.slots_3),
            merged_spread.slots_3,
            merged_spread.slots_15,
            merged_spread.slots_14_counter
        ),
    ];
    let cells = vec![
        cell("slots-15", Kind::Calibrated, time.slots_15, slots_15),
        cell("slots-14-counter", Kind::Predicted, time.slots_14_counter, counter),
    ];
    let slat = SlatCell {
        table: TABLE,
        cell: "slat / slots-3".to_owned(),
        ours: Ours::One(percent(slat, slots_3)),
        note: "per cent; what is left is exits and the guest's own work".to_owned(),
        reached: true,
    };
    Ok(Section { head, cells, slat: vec![slat], ..Section::default() })
}

/// Where it is measured, for a report that does not.
pub(super) fn elsewhere(published: &RmapCounter) -> Section {
    let head = vec![
        format!("{TABLE}: {}", published.source),
        format!("  on the real clock, a quarter of a minute: slat repro --only {TABLE}"),
    ];
    Section { head, ..Section::default() }
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}
