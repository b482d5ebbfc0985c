//! `slat explain`: where the virtual time of one fault goes.
//!
//! A phase is told by cause: nanoseconds a fault, how often the cause came, and the profile's numbers that it was charged
//! from, so that the arithmetic can be followed. Phases without faults are told for a page.

use std::fmt::Display;
use std::io::{self, Write};

use serde::Serialize;
use slat_model::clock::Cause;

use crate::failure::Failure;
use crate::options::OutputOptions;
use crate::virtual_time::columns;
use crate::virtual_time::design::Design;
use crate::virtual_time::dirty_log::Phase;
use crate::virtual_time::profile::{Numbered, Profile};

/// What follows the options in `--help`.
pub(crate) const LONG_HELP: &str = "\
The options are those of the workload with --clock virtual. Each phase has a table of causes: ns a fault (mean over all \
vCPUs, their waiting included), share, how often a fault had the cause, ns each time, and the numbers of the profile that it \
was charged from; they add up to the phase's time, times those who worked in it. What only one can use at a time is \
critical if it was in use four fifths of the time.

--json prints one object: {\"workload\", \"config\", \"phases\": [{\"name\", \"iteration\", \"seconds\", \"workers\", \
\"faults\", \"per\": \"fault\" or \"page\", \"ns\", \"critical\", \"resources\": [{\"resource\", \"percent\", \"ns\"}], \
\"causes\": [{\"cause\", \"words\", \"ns\", \"percent\", \"count\", \"profile\": [{\"name\", \"value\", \"unit\"}]}]}]}.";

/// From so much of its time on something that only one can use is what a phase waits for.
const CRITICAL: f64 = 80.0;

/// A run, explained.
#[derive(Serialize)]
pub(crate) struct Explanation<C> {
    workload: &'static str,
    config: C,
    phases: Vec<Explained>,
}

/// One phase. Figures are for a fault, or where there was none, for a page.
#[derive(Clone, Debug, Serialize)]
struct Explained {
    name: &'static str,
    iteration: Option<u32>,
    seconds: f64,
    workers: u32,
    faults: u64,
    per: &'static str,
    /// What a fault took of the time of all who worked.
    ns: f64,
    /// What was in use most of the time.
    critical: Option<&'static str>,
    resources: Vec<Resource>,
    causes: Vec<Line>,
}

/// What only one can use at a time.
#[derive(Clone, Copy, Debug, Serialize)]
struct Resource {
    resource: &'static str,
    #[serde(skip)]
    words: &'static str,
    /// Of the phase.
    percent: f64,
    ns: f64,
}

/// One cause.
#[derive(Clone, Debug, Serialize)]
struct Line {
    cause: &'static str,
    words: &'static str,
    ns: f64,
    percent: f64,
    count: f64,
    profile: Vec<Numbered>,
}

/// The numbers of a profile that a cause is charged from.
fn numbers(cause: Cause) -> &'static [&'static str] {
    match cause {
        Cause::Guest => &["guest-access"],
        Cause::Outside => &["fault-outside"],
        Cause::HostLock | Cause::LockLine | Cause::Line => &["transfer"],
        Cause::PageAllocate => &["populate-2m"],
        Cause::PageClear | Cause::PageWait => &["memory"],
        Cause::HandOver => &["handover-lines", "handover-short", "transfer"],
        Cause::LockWork => &["lock-work"],
        Cause::SharedExtra => &["shared-extra"],
        Cause::References | Cause::Exchange => &["exchange"],
        Cause::Engine => &["fault-engine"],
        Cause::Pin => &["pin"],
        Cause::Load => &["load"],
        Cause::Barrier => &["barrier", "barrier-store"],
        Cause::InvalidateLocal => &["tlbi-local"],
        Cause::Broadcast => &["tlbi-broadcast"],
        Cause::Interconnect => &["tlbi-shared"],
        Cause::TableAllocate => &["table-allocate"],
        Cause::TableClear => &["table-clear"],
        Cause::Caches => &["maintain-2m"],
        Cause::Section => &["walk-section"],
        Cause::Visit => &["walk-visit"],
        Cause::Protect => &["walk-protect"],
        Cause::Split => &["walk-split", "walk-visit"],
        Cause::WalkBarrier => &["walk-barrier"],
        Cause::Spin => &["barrier"],
        Cause::HostLockWait
        | Cause::LockWait
        | Cause::LineWait
        | Cause::InterconnectWait
        | Cause::Idle => &[],
    }
}

impl<C: Serialize + Display> Explanation<C> {
    /// Explains what `phases` took, in which `pages` pages were written.
    pub(crate) fn new(
        (workload, config): (&'static str, C),
        phases: &[Phase],
        (profile, design): (&Profile, &Design),
        pages: u64,
    ) -> Self {
        let explain = |phase| Explained::new(phase, profile, design, pages);
        Self { workload, config, phases: phases.iter().map(explain).collect() }
    }

    /// # Errors
    /// [`Failure::Output`].
    pub(crate) fn print(&self, options: &OutputOptions) -> Result<(), Failure> {
        let mut out = io::stdout().lock();
        if options.json {
            serde_json::to_writer(&mut out, self).map_err(io::Error::from)?;
            writeln!(out)?;
        } else {
            writeln!(out, "slat explain {}: {}", self.workload, self.config)?;
            for line in self.phases.iter().flat_map(Explained::lines) {
                writeln!(out, "{line}")?;
            }
        }
        Ok(out.flush()?)
    }
}

impl Explained {
    fn new(phase: &Phase, profile: &Profile, design: &Design, pages: u64) -> Self {
        let faults = phase.counters.faults;
        let (per, times) = if faults > 0 { ("fault", faults) } else { ("page", pages) };
        let each = |figure: f64| figure / times.max(1) as f64;
        let share = |part: f64, of: f64| if of > 0.0 { part / of * 100.0 } else { 0.0 };
        let total = phase.ledger.total().as_ns();
        let line = |cause: Cause| {
            let (ns, count) = (phase.ledger.time(cause).as_ns(), phase.ledger.count(cause));
            let said = numbers(cause).iter().filter_map(|name| profile.said(name));
            Line {
                cause: cause.key(),
                words: cause.words(),
                ns: each(ns),
                percent: share(ns, total),
                count: each(count as f64),
                profile: said.collect(),
            }
        };
        let resource = |(resource, words, busy): (_, _, slat_model::clock::Time)| Resource {
            resource,
            words,
            percent: share(busy.as_ns(), phase.took.as_ns()),
            ns: each(busy.as_ns()),
        };
        let mut resources: Vec<_> =
            phase.busy.resources(design).into_iter().map(resource).collect();
        resources.retain(|resource| resource.ns > 0.0);
        resources.sort_by(|a, b| b.percent.total_cmp(&a.percent));
        let mut causes: Vec<_> = Cause::ALL.map(line).into_iter().collect();
        causes.retain(|line| line.ns > 0.0);
        causes.sort_by(|a, b| b.ns.total_cmp(&a.ns));
        let most = resources.first().filter(|most| most.percent >= CRITICAL);
        Self {
            name: phase.name,
            iteration: phase.iteration,
            seconds: phase.took.as_seconds(),
            workers: phase.workers,
            faults,
            per,
            ns: each(total),
            critical: most.map(|most| most.resource),
            resources,
            causes,
        }
    }

    fn lines(&self) -> Vec<String> {
        let Self { seconds, workers, faults, per, ns, .. } = self;
        let iteration = self.iteration.map(|number| format!(" {number}")).unwrap_or_default();
        let name = format!("{}{iteration}", self.name);
        if self.causes.is_empty() {
            return vec![String::new(), format!("{name}: no time")];
        }
        let (crowd, whose) = match (self.is_pass(), workers) {
            (true, 1) => ("1 vCPU".to_owned(), String::new()),
            (true, workers) => {
                (format!("{workers} vCPUs"), format!(", of the {workers} vCPUs' time together"))
            }
            (false, _) => ("the hypervisor's thread".to_owned(), String::new()),
        };
        let mut lines = vec![
            String::new(),
            format!("{name}: {crowd}, {seconds:.9} s, {faults} faults; {ns:.1} ns a {per}{whose}"),
            format!("critical: {}", self.verdict()),
        ];
        let titles = [
            String::new(),
            format!("{:>12}", format!("ns/{per}")),
            format!("{:>7}", "share"),
            format!("{:>12}", format!("times/{per}")),
            format!("{:>12}", "ns/time"),
            "charged from".to_owned(),
        ];
        let mut rows = vec![titles];
        rows.extend(self.causes.iter().map(Line::row));
        let total = [
            "sum".to_owned(),
            format!("{ns:>12.1}"),
            format!("{:>5.1} %", 100.0),
            String::new(),
            String::new(),
            String::new(),
        ];
        rows.push(total);
        lines.extend(columns(&rows));
        lines
    }

    fn is_pass(&self) -> bool {
        matches!(self.name, "populate" | "dirty")
    }

    /// What limits the phase.
    fn verdict(&self) -> String {
        let said = |Resource { words, percent, ns, .. }: &Resource| {
            format!("{words}, in use {percent:.1} % of the time, {ns:.1} ns a {}", self.per)
        };
        match (self.is_pass(), self.critical, self.resources.first()) {
            (false, ..) => "the thread works alone".to_owned(),
            (true, Some(_), Some(most)) => said(most),
            (true, None, Some(most)) => {
                format!("nothing shared; a vCPU's own time decides. Busiest: {}", said(most))
            }
            (true, _, None) => "nothing is shared".to_owned(),
        }
    }
}

impl Line {
    fn row(&self) -> [String; 6] {
        let Self { words, ns, percent, count, profile, .. } = self;
        let each = if *count > 0.0 { ns / count } else { 0.0 };
        let numbers: Vec<_> = profile.iter().map(ToString::to_string).collect();
        [
            (*words).to_owned(),
            format!("{ns:>12.1}"),
            format!("{percent:>5.1} %"),
            format!("{count:>12.3}"),
            format!("{each:>12.1}"),
            numbers.join(", "),
        ]
    }
}
