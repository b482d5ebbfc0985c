//! Seconds by vCPUs, a line for each design, on logarithmic axes.

use plotters::chart::LabelAreaPosition;
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::colour::{BLUE, FAINT, GREEN, GRID, INK, PAPER, VERMILION};
use crate::repro::Series;
use crate::virtual_time::design::HostLock;

const SIZE: (u32, u32) = (600, 400);
/// Pixels at the right, for names of lines.
const NAMES: u32 = 146;
/// Pixels from one name to the next.
const APART: i32 = 18;

type Wrong<'a> = DrawingAreaErrorKind<<SVGBackend<'a> as DrawingBackend>::ErrorType>;

/// Draws lines, with marks where something was published.
pub(super) fn draw(series: &[&Series]) -> Result<String, String> {
    let mut svg = String::new();
    draw_into(&mut svg, series).map_err(|error| error.to_string())?;
    Ok(svg)
}

fn draw_into<'a>(svg: &'a mut String, series: &[&Series]) -> Result<(), Wrong<'a>> {
    let root = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    root.fill(&PAPER)?;
    let points = || series.iter().flat_map(|series| &series.points);
    let vcpus = points().map(|point| f64::from(point.vcpus));
    let most = vcpus.fold(1.0, f64::max);
    let seconds = points().flat_map(|point| [Some(point.seconds), point.published]).flatten();
    let (low, high) = seconds.fold((f64::MAX, 0.0f64), |(low, high), s| (low.min(s), high.max(s)));
    let powers = (0..).map(|power| f64::from(1u32 << power)).take_while(|power| *power <= most);
    let across = (1.0 / 1.15..most * 1.15).log_scale().with_key_points(powers.collect());
    let up = (low / 1.4..high * 1.4).log_scale().with_key_points(steps(low / 1.4, high * 1.4));
    let mut chart = ChartBuilder::on(&root)
        .margin_top(14)
        .margin_right(NAMES)
        .set_label_area_size(LabelAreaPosition::Left, 58)
        .set_label_area_size(LabelAreaPosition::Bottom, 50)
        .build_cartesian_2d(across, up)?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(GRID)
        .axis_style(FAINT)
        .label_style(text(15, FAINT))
        .axis_desc_style(text(15, FAINT))
        .x_desc("vCPUs")
        .y_desc("seconds")
        .x_label_formatter(&|vcpus| format!("{vcpus:.0}"))
        .y_label_formatter(&|seconds| format!("{seconds}"))
        .draw()?;
    let mut names = Vec::new();
    for line in series.iter().filter(|line| line.host_lock == HostLock::Gone) {
        let kept = series
            .iter()
            .find(|other| other.design == line.design && other.host_lock == HostLock::Kept);
        let band = kept.iter().flat_map(|kept| ours(kept)).chain(ours(line).into_iter().rev());
        let style = colour(&line.design).mix(0.3).filled();
        chart.draw_series([Polygon::new(band.collect::<Vec<_>>(), style)])?;
    }
    // slat's, which some others cover, is the broader one below them.
    let (below, above): (Vec<&Series>, Vec<_>) =
        series.iter().copied().partition(|line| line.design == "slat");
    for line in below.into_iter().chain(above) {
        let colour = colour(&line.design);
        let width = if line.design == "slat" { 4 } else { 2 };
        chart.draw_series(LineSeries::new(ours(line), colour.stroke_width(width)))?;
        let published =
            line.points.iter().filter_map(|point| Some((f64::from(point.vcpus), point.published?)));
        chart.draw_series(published.map(|at| Circle::new(at, 4, colour.filled())))?;
        if let Some(end) = ours(line).last().filter(|_| line.host_lock == HostLock::Kept) {
            let (_, y) = chart.backend_coord(end);
            names.push((y, line.design.clone(), colour));
        }
    }
    let x = (SIZE.0 - NAMES) as i32 + 10;
    for (y, name, colour) in spread(names) {
        root.draw(&Text::new(name, (x, y), text(15, colour).pos(LEFT)))?;
    }
    legend(&root)?;
    root.present()
}

/// What dots and lines are, in the corner where there are none.
fn legend<'a>(root: &DrawingArea<SVGBackend<'a>, Shift>) -> Result<(), Wrong<'a>> {
    let (x, y) = (78, 34);
    root.draw(&Circle::new((x + 10, y), 4, FAINT.filled()))?;
    root.draw(&Text::new("published", (x + 28, y), text(15, INK).pos(LEFT)))?;
    let line = vec![(x, y + 22), (x + 20, y + 22)];
    root.draw(&PathElement::new(line, FAINT.stroke_width(2)))?;
    root.draw(&Text::new("ours, in virtual time", (x + 28, y + 22), text(15, INK).pos(LEFT)))
}

const LEFT: Pos = Pos { h_pos: HPos::Left, v_pos: VPos::Center };

fn text(size: i32, colour: RGBColor) -> TextStyle<'static> {
    ("sans-serif", size).into_font().color(&colour)
}

fn colour(design: &str) -> RGBColor {
    match design {
        "linux-5.18" => VERMILION,
        "linux-5.18+parallel" => BLUE,
        _ => GREEN,
    }
}

fn ours(line: &Series) -> Vec<(f64, f64)> {
    line.points.iter().map(|point| (f64::from(point.vcpus), point.seconds)).collect()
}

/// 1, 2, 5, 10 and so on, from `low` to `high`.
fn steps(low: f64, high: f64) -> Vec<f64> {
    let decades = (-6..7).flat_map(|power| [1, 2, 5].map(|step| (step, power)));
    let values = decades.map(|(step, power)| match power {
        0.. => f64::from(step) * 10f64.powi(power),
        _ => f64::from(step) / 10f64.powi(-power),
    });
    values.filter(|value| (low..=high).contains(value)).collect()
}

/// Names from the top down, moved as far as they would cover each other.
fn spread<T>(mut names: Vec<(i32, T, RGBColor)>) -> Vec<(i32, T, RGBColor)> {
    names.sort_by_key(|(y, ..)| *y);
    for at in 1..names.len() {
        names[at].0 = names[at].0.max(names[at - 1].0 + APART);
    }
    names
}
