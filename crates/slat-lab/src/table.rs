//! How a report looks to a person: a table of phases, plain enough for a mail.

use std::fmt;
use std::io::{self, IsTerminal, Write};

use comfy_table::{Attribute, Cell, CellAlignment, Table, presets};

use crate::check::Findings;
use crate::report::{Counters, Counts, HostFacts, Instructions, Phase, Report};

/// One column of counts.
struct Column {
    title: &'static str,
    value: fn(&Counters) -> u64,
    /// Left out if it has nothing but zeroes.
    optional: bool,
}

const fn always(title: &'static str, value: fn(&Counters) -> u64) -> Column {
    Column { title, value, optional: false }
}

const fn optional(title: &'static str, value: fn(&Counters) -> u64) -> Column {
    Column { title, value, optional: true }
}

/// Titles have two lines, so that a row fits into a mail.
static COLUMNS: [Column; 12] = [
    always("\nfaults", |counters| counters.faults),
    always("\nsplits", |counters| counters.splits),
    optional("\ncollapses", |counters| counters.collapses),
    always("tables\nnew", |counters| counters.tables_allocated),
    always("tables\nfreed", |counters| counters.tables_freed),
    always("\npublishes", |counters| counters.publishes),
    optional("inv.\nIPA", |counters| counters.invalidations.by_ipa),
    optional("inv.\nrange", |counters| counters.invalidations.by_range),
    optional("inv.\nVMID", |counters| counters.invalidations.everything),
    optional("inv.\ncombined", |counters| counters.invalidations.combined),
    optional("inv.\nlocal", |counters| counters.invalidations.local),
    always("entries\nvisited", |counters| counters.entries_visited),
];

/// Writes notes, the table of phases, and what the check found.
///
/// # Errors
/// The output is closed or full.
pub(crate) fn print<C, R, F: Findings, N: Counts>(
    out: &mut impl Write,
    report: &Report<C, R, F, N>,
) -> io::Result<()> {
    if let Some(host) = &report.host {
        writeln!(out, "{host}")?;
    }
    for note in &report.notes {
        writeln!(out, "note: {note}")?;
    }
    let terminal = io::stdout().is_terminal();
    writeln!(out, "\n{}", phases(&report.phases, &report.counters, terminal))?;
    if !report.summary.is_empty() {
        writeln!(out, "\n{}", report.summary.join("\n"))?;
    }
    if let Some(exits) = report.exits() {
        writeln!(out, "\n{}", exits.lines().join("\n"))?;
    }
    if let Some(check) = &report.check {
        writeln!(out)?;
        for line in check.verdict() {
            writeln!(out, "check: {line}")?;
        }
    }
    Ok(())
}

impl fmt::Display for HostFacts {
    /// Two lines.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kernel, cpu, modules, paging, transparent_hugepage, parameters } = self;
        writeln!(f, "host {kernel}, {cpu}; {modules}: {paging}; THP {transparent_hugepage}")?;
        let parameters = parameters.iter().map(|(name, value)| format!("{name}={value}"));
        f.write_str(&parameters.collect::<Vec<_>>().join(" "))
    }
}

impl Counts for Counters {
    fn titles(total: &Self) -> Vec<String> {
        columns(total).map(|column| column.title.to_owned()).collect()
    }

    fn cells(&self, total: &Self) -> Vec<u64> {
        columns(total).map(|column| (column.value)(self)).collect()
    }
}

fn columns(total: &Counters) -> impl Iterator<Item = &'static Column> {
    COLUMNS.iter().filter(|column| !column.optional || (column.value)(total) > 0)
}

fn phases<N: Counts>(phases: &[Phase<N>], total: &N, terminal: bool) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    if !terminal {
        table.force_no_tty();
    }
    let counted = phases.iter().any(|phase| phase.instructions.is_some());
    let times: &[_] = if counted { &["\ninstructions", "\nengine"] } else { &["\nseconds"] };
    let titles = ["\nphase"].iter().chain(times).map(|title| (*title).to_owned());
    let titles = titles.chain(N::titles(total));
    table.set_header(titles.map(|title| Cell::new(title).add_attribute(Attribute::Bold)));
    let mut row = |name: String, seconds: f64, instructions: Instructions, counters: &N| {
        let Instructions { total: all, engine } = instructions;
        let times = match counted {
            true => vec![all.to_string(), engine.to_string()],
            false => vec![format!("{seconds:.9}")],
        };
        let counts = counters.cells(total).into_iter().map(|count| count.to_string());
        table.add_row([name].into_iter().chain(times).chain(counts));
    };
    for phase in phases {
        let name = match phase.iteration {
            Some(iteration) => format!("{} {iteration}", phase.name),
            None => phase.name.to_owned(),
        };
        row(name, phase.seconds, phase.instructions.unwrap_or_default(), &phase.counters);
    }
    // From 0.0: the sum of nothing is -0.0 otherwise.
    let seconds = phases.iter().fold(0.0, |sum, phase| sum + phase.seconds);
    let instructions = phases.iter().filter_map(|phase| phase.instructions).sum();
    row("total".to_owned(), seconds, instructions, total);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    if let Some(first) = table.column_mut(0) {
        first.set_padding((0, 1));
    }
    table.trim_fmt()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn phase(name: &'static str, iteration: Option<u32>, faults: u64) -> Phase {
        let counters = Counters { faults, ..Counters::default() };
        Phase { name, iteration, seconds: 0.25, instructions: None, counters, exits: None }
    }

    #[test]
    fn a_piped_table_is_plain_aligned_and_without_columns_of_zeroes() {
        let all = [phase("populate", None, 5), phase("dirty", Some(1), 7)];
        let total = all.iter().map(|phase| phase.counters).sum();
        let text = phases(&all, &total, false);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len(), 5);
        assert!(lines[1].contains("faults") && !text.contains("local"));
        assert_eq!(
            lines[3].split_whitespace().collect::<Vec<_>>()[..4],
            ["dirty", "1", "0.250000000", "7"]
        );
        assert_eq!(
            lines[4].split_whitespace().collect::<Vec<_>>()[..3],
            ["total", "0.500000000", "12"]
        );
        assert!(text.is_ascii() && lines.iter().all(|line| *line == line.trim_end()));
    }

    #[test]
    fn instructions_stand_in_for_seconds_where_they_are_counted() {
        let counted = |name, total, engine| Phase {
            instructions: Some(Instructions { total, engine }),
            ..phase(name, None, 1)
        };
        let all = [counted("populate", 12_345, 300), counted("dirty", 55, 20)];
        let text = phases(&all, &Counters::default(), false);
        assert!(text.contains("instructions") && !text.contains("seconds"), "{text}");
        let last: Vec<_> = text.lines().last().unwrap().split_whitespace().take(3).collect();
        assert_eq!(last, ["total", "12400", "320"]);
    }
}
