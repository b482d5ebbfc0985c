//! How a report looks to a person: a table of phases, plain enough for a mail.

use std::io::{self, IsTerminal, Write};

use comfy_table::{Attribute, Cell, CellAlignment, Table, presets};

use crate::report::{Check, Counters, Phase, Report};

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
const COLUMNS: [Column; 12] = [
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
pub(crate) fn print<C>(out: &mut impl Write, report: &Report<C>) -> io::Result<()> {
    for note in &report.notes {
        writeln!(out, "note: {note}")?;
    }
    let terminal = io::stdout().is_terminal();
    writeln!(out, "\n{}", phases(&report.phases, &report.counters, terminal))?;
    if !report.summary.is_empty() {
        writeln!(out, "\n{}", report.summary.join("\n"))?;
    }
    if let Some(check) = &report.check {
        writeln!(out, "\n{}", verdict(check))?;
    }
    Ok(())
}

fn phases(phases: &[Phase], total: &Counters, terminal: bool) -> String {
    let columns = COLUMNS.iter().filter(|column| !column.optional || (column.value)(total) > 0);
    let columns: Vec<_> = columns.collect();
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    if !terminal {
        table.force_no_tty();
    }
    let titles = columns.iter().map(|column| column.title);
    let titles = ["\nphase", "\nseconds"].into_iter().chain(titles);
    table.set_header(titles.map(|title| Cell::new(title).add_attribute(Attribute::Bold)));
    let mut row = |name: String, seconds: f64, counters: &Counters| {
        let counts = columns.iter().map(|column| (column.value)(counters).to_string());
        table.add_row([name, format!("{seconds:.9}")].into_iter().chain(counts));
    };
    for phase in phases {
        let name = match phase.iteration {
            Some(iteration) => format!("{} {iteration}", phase.name),
            None => phase.name.to_owned(),
        };
        row(name, phase.seconds, &phase.counters);
    }
    row("total".to_owned(), phases.iter().map(|phase| phase.seconds).sum(), total);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    if let Some(first) = table.column_mut(0) {
        first.set_padding((0, 1));
    }
    table.trim_fmt()
}

fn verdict(check: &Check) -> String {
    let Check { pages, collections, collections_while_running, changed, .. } = check;
    let mut lines = vec![format!(
        "check: {pages} pages, {collections} collections of the log ({collections_while_running} while vCPUs wrote), \
         {changed} changed pages reported",
    )];
    if check.is_clean() {
        lines.push("check: nothing lost, nothing misplaced, no rule broken".to_owned());
        return lines.join("\n");
    }
    let found = [
        (check.lost, "pages changed and were not in the log that covers the change"),
        (check.wrong_loads, "loads did not return what was stored last"),
        (check.misplaced, "pages of host memory do not hold what was stored last"),
        (check.violations, "rules were broken"),
    ];
    for (count, what) in found.into_iter().filter(|(count, _)| *count > 0) {
        lines.push(format!("check: {count} {what}"));
    }
    if !check.lost_pages.is_empty() {
        lines.push(format!("check: lost guest pages, the first: {:?}", check.lost_pages));
    }
    if let Some(violation) = &check.violation {
        lines.push(format!("check: {violation}"));
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn phase(name: &'static str, iteration: Option<u32>, faults: u64) -> Phase {
        let counters = Counters { faults, ..Counters::default() };
        Phase { name, iteration, seconds: 0.25, counters }
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
    fn the_verdict_names_what_was_found() {
        let clean = Check { pages: 4, ..Check::default() };
        assert!(verdict(&clean).contains("nothing lost"));
        let lossy = Check { lost: 2, lost_pages: vec![7, 9], ..clean };
        let text = verdict(&lossy);
        assert!(text.contains("2 pages changed") && text.contains("[7, 9]"), "{text}");
        assert!(!text.contains("nothing lost"));
    }
}
