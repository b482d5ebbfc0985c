//! Where the time of a fault goes: a bar for each design and number of vCPUs, divided by cause.

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use slat_model::clock::Cause;

use super::colour::{
    BLUE, FAINT, GREEN, INK, ORANGE, PAPER, PINK, SILVER, SKY, STEEL, VERMILION, YELLOW,
};
use crate::repro::{Point, Series};
use crate::virtual_time::design::HostLock;

const WIDTH: u32 = 600;
/// Where bars begin and end.
const BARS: (i32, i32) = (88, 512);
const ROW: i32 = 26;
const HEADING: i32 = 32;
const LEGEND: i32 = 84;

/// Causes that are told as one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Part {
    Lock,
    Lines,
    Barriers,
    Invalidations,
    Clearing,
    Caches,
    Outside,
    Rest,
}

const PARTS: [(Part, &str, RGBColor); 8] = [
    (Part::Lock, "lock", VERMILION),
    (Part::Lines, "line transfers", ORANGE),
    (Part::Barriers, "barriers", SKY),
    (Part::Invalidations, "invalidations", BLUE),
    (Part::Clearing, "clearing", PINK),
    (Part::Caches, "cache maintenance", YELLOW),
    (Part::Outside, "exit, host look-up, entry", STEEL),
    (Part::Rest, "rest", SILVER),
];

impl Part {
    /// What a cause is told as; nothing if it is no work.
    fn of(cause: Cause) -> Option<Self> {
        use Cause as C;
        Some(match cause {
            C::LockWait | C::HandOver | C::LockLine | C::LockWork | C::SharedExtra => Self::Lock,
            C::HostLock | C::HostLockWait | C::Line | C::LineWait => Self::Lines,
            C::Barrier | C::WalkBarrier => Self::Barriers,
            C::InvalidateLocal | C::Broadcast | C::Interconnect | C::InterconnectWait => {
                Self::Invalidations
            }
            C::PageClear | C::PageWait | C::TableClear => Self::Clearing,
            C::Caches => Self::Caches,
            C::Outside => Self::Outside,
            C::Guest
            | C::PageAllocate
            | C::References
            | C::Engine
            | C::Pin
            | C::Load
            | C::Exchange
            | C::TableAllocate
            | C::Section
            | C::Visit
            | C::Protect
            | C::Split
            | C::Spin => Self::Rest,
            C::Idle => return None,
        })
    }
}

/// Microseconds of a vCPU for one fault, by part.
fn parts(point: &Point) -> [f64; PARTS.len()] {
    PARTS.map(|(part, ..)| {
        let causes = Cause::ALL.into_iter().filter(|&cause| Part::of(cause) == Some(part));
        let ns: f64 = causes.map(|cause| point.ledger.time(cause).as_ns()).sum();
        ns / 1000.0 / point.faults.max(1) as f64
    })
}

/// The least number of vCPUs, a middle one, the largest that was published, and more than that.
fn chosen(points: &[Point]) -> Vec<&Point> {
    let last = points.len().saturating_sub(1);
    let mut at = vec![0, last / 2, last.saturating_sub(1), last];
    at.dedup();
    at.into_iter().filter_map(|at| points.get(at)).collect()
}

/// Draws bars.
pub(super) fn draw(series: &[&Series]) -> Result<String, String> {
    let mut svg = String::new();
    let rows: usize = series.iter().map(|line| chosen(&line.points).len()).sum();
    let height = LEGEND + ROW * rows as i32 + HEADING * series.len() as i32 + 12;
    draw_into(&mut svg, height.unsigned_abs(), series).map_err(|error| error.to_string())?;
    Ok(svg)
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Wrong<'a> = DrawingAreaErrorKind<<SVGBackend<'a> as DrawingBackend>::ErrorType>;

fn draw_into<'a>(svg: &'a mut String, height: u32, series: &[&Series]) -> Result<(), Wrong<'a>> {
    let root = SVGBackend::with_string(svg, (WIDTH, height)).into_drawing_area();
    root.fill(&PAPER)?;
    legend(&root)?;
    let mut y = LEGEND;
    for line in series {
        let host = match (line.host_lock, line.design.as_str()) {
            (HostLock::Kept, "slat") => ", host lock kept",
            (HostLock::Kept, _) => "",
            (HostLock::Gone, _) => ", host lock gone",
        };
        let name = format!("{}{host}", line.design);
        root.draw(&Text::new(name, (8, y + HEADING - 12), text(15, INK, HPos::Left)))?;
        y += HEADING;
        for point in chosen(&line.points) {
            bar(&root, y, point)?;
            y += ROW;
        }
    }
    root.present()
}

fn bar<'a>(root: &Area<'a>, y: i32, point: &Point) -> Result<(), Wrong<'a>> {
    let plural = if point.vcpus == 1 { "" } else { "s" };
    let label = format!("{} vCPU{plural}", point.vcpus);
    let middle = y + ROW / 2;
    root.draw(&Text::new(label, (BARS.0 - 10, middle), text(15, FAINT, HPos::Right)))?;
    let parts = parts(point);
    let total: f64 = parts.iter().sum();
    let x = |sum: f64| BARS.0 + (f64::from(BARS.1 - BARS.0) * sum / total).round() as i32;
    let mut sum = 0.0;
    for (part, (_, _, colour)) in parts.into_iter().zip(PARTS) {
        let (from, to) = (x(sum), x(sum + part));
        sum += part;
        if to > from {
            let corners = [(from, y + 3), (to, y + ROW - 3)];
            root.draw(&Rectangle::new(corners, colour.filled()))?;
        }
        if to - from > 38 {
            let share = format!("{:.0} %", part / total * 100.0);
            let style = text(13, on(colour), HPos::Center);
            root.draw(&Text::new(share, ((from + to) / 2, middle), style))?;
        }
    }
    let figure = match total {
        100.0.. => format!("{total:.0}"),
        10.0.. => format!("{total:.1}"),
        _ => format!("{total:.2}"),
    };
    root.draw(&Text::new(
        format!("{figure} \u{b5}s"),
        (BARS.1 + 10, middle),
        text(15, INK, HPos::Left),
    ))
}

/// Squares with what they are, in three lines.
fn legend<'a>(root: &Area<'a>) -> Result<(), Wrong<'a>> {
    for (at, (_, name, colour)) in (0..).zip(PARTS) {
        let (x, y) = (8 + at % 3 * 196, 14 + at / 3 * 24);
        root.draw(&Rectangle::new([(x, y - 6), (x + 12, y + 6)], colour.filled()))?;
        root.draw(&Text::new(name, (x + 19, y), text(15, INK, HPos::Left)))?;
    }
    Ok(())
}

/// What can be read on a colour.
fn on(colour: RGBColor) -> RGBColor {
    match colour {
        VERMILION | BLUE | GREEN => BRIGHT,
        _ => DARK,
    }
}

/// On colours, which are the same on every page.
const BRIGHT: RGBColor = RGBColor(0xfe, 0xfe, 0xfe);
const DARK: RGBColor = RGBColor(0x10, 0x10, 0x10);

fn text(size: i32, colour: RGBColor, side: HPos) -> TextStyle<'static> {
    ("sans-serif", size).into_font().color(&colour).pos(Pos::new(side, VPos::Center))
}
