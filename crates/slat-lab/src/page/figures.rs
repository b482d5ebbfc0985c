//! Which plots there are, and what stands below each.

use super::{OURS, curves, shares};
use crate::failure::Failure;
use crate::repro::{Pass, Section, Series};
use crate::size::Size;

/// One plot.
#[derive(Clone, Debug)]
pub(super) struct Figure {
    /// Of its file, and of its element on the page.
    pub(super) name: String,
    /// Of the table that it belongs to.
    pub(super) table: &'static str,
    pub(super) caption: String,
    /// Complete.
    pub(super) svg: String,
}

/// All that can be drawn of the tables.
///
/// # Errors
/// [`Failure::Run`]: the plotting crate refuses.
pub(super) fn of(sections: &[Section]) -> Result<Vec<Figure>, Failure> {
    let refused = |why: String| Failure::Run(format!("a plot: {why}"));
    let mut figures = Vec::new();
    for Section { series, .. } in sections {
        let Some(Series { table, .. }) = series.first() else { continue };
        let passes = [
            (Pass::Dirty, "dirty", "dirty pass that splits blocks"),
            (Pass::Populate, "populate", "first touch of memory"),
        ];
        let more = series
            .iter()
            .find_map(|series| series.points.last())
            .map_or_else(String::new, |last| {
                format!(" The last point of each line has {} a vCPU.", Size(last.bytes))
            });
        let of = |pass| series.iter().filter(|series| series.pass == pass).collect::<Vec<_>>();
        for (pass, short, long) in passes {
            figures.push(Figure {
                name: format!("{table}-{short}"),
                table,
                caption: format!(
                    "Seconds of the {long} by vCPUs, both axes logarithmic. Dots were published, lines are ours; slat's band \
                     reaches from the host's memory-map lock kept to it gone, and is as thin as a line where that is no matter.{more}"
                ),
                svg: titled(&format!("{table}: {long}"), &curves::draw(&of(pass)).map_err(refused)?),
            });
        }
        for (pass, short, long) in passes {
            figures.push(Figure {
                name: format!("{table}-{short}-time"),
                table,
                caption: format!(
                    "Where the time of a fault goes in the {long}, as shares of what stands at the right: microseconds of a \
                     vCPU for one fault. Lock is everything under the MMU lock and waiting for it; line transfers are of the \
                     host's memory-map lock and of entries, waiting included."
                ),
                svg: titled(&format!("{table}: where time goes, {long}"), &shares::draw(&of(pass)).map_err(refused)?),
            });
        }
    }
    Ok(figures)
}

/// A plot under a title that is read aloud, and that shows where the mouse rests.
fn titled(title: &str, svg: &str) -> String {
    let (open, rest) = svg.split_once('>').unwrap_or((svg, ""));
    format!("{open} role=\"img\">\n<title>{title}</title>\n<desc>{OURS}</desc>{rest}")
}
