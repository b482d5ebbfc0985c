//! How the page is written: tables, plots between them, and nothing from elsewhere.

use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::OURS;
use super::figures::Figure;
use crate::repro::{self, Cell, Section, SlatCell};

const STYLE: &str = include_str!("page.css");

/// All of it.
pub(super) fn page(sections: &[Section], figures: &[Figure]) -> Markup {
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="generator" content=(OURS);
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { "slat: published tables, and ours" }
                style { (PreEscaped(STYLE)) }
            }
            body {
                header {
                    h1 { "Published tables, and ours" }
                    p.lead { (repro::verdict(sections)) "." }
                    p {
                        "Figures that were mailed to the kernel's lists, beside what designs of hypervisors give in virtual \
                         time: the engine runs, and each of its steps is charged from a profile of a machine. A cell is "
                        em { "calibrated" } " if a number of the profile was adjusted to it, at most four a machine, "
                        em { "fitted" } " if that is all that is known of the machine, and " em { "predicted" }
                        " otherwise. slat's own design stands below each table, as an interval where the host's memory-map \
                         lock matters: kept .. gone. " code { "slat repro" } " prints the same tables."
                    }
                    nav { @for section in sections { a href={ "#" (name(section)) } { (name(section)) } } }
                }
                main { @for section in sections { (one(section, figures)) } }
            }
        }
    }
}

/// A table's name, which its first line begins with.
fn name(section: &Section) -> &str {
    source(section).0
}

fn source(section: &Section) -> (&str, &str) {
    let first = section.head.first().map_or("", String::as_str);
    first.split_once(": ").unwrap_or((first, ""))
}

fn one(section: &Section, figures: &[Figure]) -> Markup {
    let (name, source) = source(section);
    let figures = figures.iter().filter(|figure| figure.table == name);
    html! {
        section id=(name) {
            h2 { (name) }
            p.source { (source) }
            @for line in section.head.iter().skip(1) { p.setup { (line) } }
            div.figures { @for figure in figures { (drawn(figure)) } }
            div.tables {
                (cells(&section.cells))
                @if !section.slat.is_empty() { (slat(&section.slat)) }
            }
        }
    }
}

fn drawn(figure: &Figure) -> Markup {
    html! {
        figure id=(figure.name) {
            (PreEscaped(&figure.svg))
            figcaption { (figure.caption) }
        }
    }
}

/// Characters of a note that has a line of its own.
const LONG: usize = 40;

fn cells(cells: &[Cell]) -> Markup {
    let beside = cells.iter().any(|cell| !cell.note.is_empty() && cell.note.len() <= LONG);
    let within = match cells {
        [Cell { unit: "s", tolerance, .. }, ..] => format!("within {tolerance} %"),
        [Cell { unit: "%", tolerance, .. }, ..] => format!("within {tolerance} points"),
        _ => String::new(),
    };
    html! {
        div.wide {
            table {
                thead {
                    tr {
                        th scope="col" {}
                        @for title in ["published", "ours", "difference"] { th.number scope="col" { (title) } }
                        th scope="col" {}
                        th scope="col" { (within) }
                        @if beside { th scope="col" {} }
                    }
                }
                @for (series, cells) in grouped(cells, |cell| &cell.cell) {
                    tbody {
                        (heading(series))
                        @for (at, cell) in cells.iter().enumerate() {
                            (row(cell, place(series, &cell.cell), beside))
                            @if cell.note.len() > LONG && cells.get(at + 1).is_none_or(|next| next.note != cell.note) {
                                tr.why { td colspan="6" { div { (cell.note) } } }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Cells that come one after the other and have a name in common before their `at`.
fn grouped<T>(cells: &[T], name: fn(&T) -> &str) -> Vec<(Option<&str>, &[T])> {
    let groups = cells.chunk_by(|a, b| series(name(a)) == series(name(b)));
    groups.map(|group| (group.first().and_then(|cell| series(name(cell))), group)).collect()
}

fn series(cell: &str) -> Option<&str> {
    cell.split_once(" at ").map(|(series, _)| series)
}

fn heading(series: Option<&str>) -> Markup {
    html! { @if let Some(series) = series { tr.series { th colspan="6" scope="rowgroup" { (series) } } } }
}

/// What is left of a cell's name below that of its series.
fn place<'a>(series: Option<&str>, cell: &'a str) -> &'a str {
    let rest = series.and_then(|series| cell.strip_prefix(series)?.strip_prefix(" at "));
    rest.unwrap_or(cell)
}

fn row(cell: &Cell, place: &str, beside: bool) -> Markup {
    let [published, ours, difference, kind, verdict] = cell.figures();
    html! {
        tr.out[verdict == "OUT"] {
            th scope="row" { (place) }
            td.number { (published) }
            td.number { (ours) }
            td.number { (difference) }
            td.kind { (kind) }
            td.verdict { (verdict) }
            @if beside { td.note { @if cell.note.len() <= LONG { (cell.note) } } }
        }
    }
}

fn slat(cells: &[SlatCell]) -> Markup {
    html! {
        div.wide {
            table {
                caption { "slat in the same cells" }
                @for (series, cells) in grouped(cells, |cell| &cell.cell) {
                    tbody {
                        (heading(series))
                        @for cell in cells {
                            tr.out[!cell.reached] {
                                th scope="row" { (place(series, &cell.cell)) }
                                td.number { (cell.figure()) }
                                td.note { (cell.note) }
                            }
                        }
                    }
                }
            }
        }
    }
}
