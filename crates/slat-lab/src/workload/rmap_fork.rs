//! `slat rmap-fork`: a guest forks and reaps many processes that share memory, under shadow paging.

use std::time::{Duration, Instant};

use serde::Serialize;
use slat_shadow::rmap::{Chains, ReverseMaps};
use slat_shadow::{Histogram, ShadowOptions};

use crate::backend::Backend;
use crate::check::{Check, Findings, Rules};
use crate::failure::Failure;
use crate::output;
use crate::report::{Counters, Phase, Report};
use crate::shadowed::{ExitCounts, Ground, Guest};

mod kernel;
mod options;
mod slots;

use kernel::{Kernel, content};
use options::Config;
pub(crate) use options::{Design, LONG_HELP, Options};
use slots::{Counted, HalfLine, Searched, Slots, TwoLines};

/// What only this workload measures.
#[derive(Clone, Debug, Serialize)]
struct Results {
    exit_counts: ExitCounts,
    shadow: Counts,
    /// While all children live.
    reverse_maps: Vec<Lengths>,
}

/// What the shadow counted.
#[derive(Clone, Copy, Debug, Serialize)]
struct Counts {
    mapped: u64,
    pages_made: u64,
    recycled: u64,
    unsynced: u64,
    synchronised: u64,
    overflows: u64,
    flushes: u64,
    most_mappings: usize,
    /// Bytes of all descriptors while all children live.
    descriptor_bytes: usize,
}

/// How many frames have so many mappings, for one page size.
#[derive(Clone, Debug, Serialize)]
struct Lengths {
    page_size: &'static str,
    /// The range of counts, and the frames.
    frames: Vec<(String, u64)>,
}

/// What the check found.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Found {
    /// Words that processes read.
    reads: u64,
    /// Words that were not what they should be.
    wrong: u64,
}

impl Findings for Found {
    const CLEAN: &'static str = "every process read what it should";

    fn compared(&self) -> String {
        format!("{} reads", self.reads)
    }

    fn wrong(&self) -> Vec<(u64, &'static str)> {
        vec![(self.wrong, "words were not those that the process, or its parent, had written")]
    }
}

/// Runs the workload and prints its report.
///
/// # Errors
/// See [`Failure`].
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    match options.on.backend {
        Backend::Model => on_model(options),
        backend @ (Backend::Metal | Backend::Kvm) => Err(backend.lacks("rmap-fork")),
    }
}

fn on_model(options: &Options) -> Result<(), Failure> {
    let config = options.settle()?;
    let ended = play(&config)?;
    let report = Report {
        workload: "rmap-fork",
        backend: "model",
        host: None,
        notes: Vec::new(),
        summary: ended.results.lines(),
        counters: ended.phases.iter().map(|phase| phase.counters).sum(),
        phases: ended.phases,
        results: ended.results,
        check: config.check.then_some(Check { found: ended.found, rules: Some(Rules::default()) }),
        config,
    };
    output::print(&report, &options.output)
}

/// Seconds of a run with all defaults, but for the design and the time of an exit in nanoseconds.
///
/// # Errors
/// See [`Failure`].
pub(crate) fn seconds(design: Design, exit_time: u64) -> Result<f64, Failure> {
    let ended = play(&Config::standard(design, exit_time)?)?;
    Ok(ended.phases.iter().map(|phase| phase.seconds).sum())
}

/// A run that has ended.
struct Ended {
    phases: Vec<Phase>,
    results: Results,
    found: Found,
}

fn play(config: &Config) -> Result<Ended, Failure> {
    match config.design {
        Design::Slots3 => play_with::<Slots<3, Searched, HalfLine>>(config),
        Design::Slots15 => play_with::<Slots<15, Searched, TwoLines>>(config),
        Design::Slots14Counter => play_with::<Slots<14, Counted, TwoLines>>(config),
        Design::Slat => play_with::<Chains>(config),
    }
}

fn play_with<R: ReverseMaps>(config: &Config) -> Result<Ended, Failure> {
    let options = ShadowOptions { pages: config.shadow_pages as usize, ..ShadowOptions::default() };
    let ground = Ground::new(config.guest_bytes.0, options.pages)?;
    let exit_time = Duration::from_nanos(config.exit_time_ns);
    ground.with::<R, _>(options, exit_time, |guest| {
        let kernel = Kernel::boot(guest, config.guest_bytes.0, |gpa, value| {
            ground.poke(gpa, value);
        })?;
        Run { config, guest, kernel, phases: Vec::new(), found: Found::default() }.all()
    })
}

/// A run in progress.
struct Run<'a, 'b, 'c, 'm, R: ReverseMaps> {
    config: &'a Config,
    guest: &'b mut Guest<'c, 'm, R>,
    kernel: Kernel,
    phases: Vec<Phase>,
    found: Found,
}

impl<R: ReverseMaps> Run<'_, '_, '_, '_, R> {
    fn all(mut self) -> Result<Ended, Failure> {
        let (pages, children) = (self.config.pages, self.config.children);
        let parent = self.phase("populate", |run| run.kernel.first(run.guest, pages))?;
        let mut processes = self.phase("fork", |run| {
            (0..children)
                .map(|_| run.kernel.fork(run.guest, &parent, pages))
                .collect::<Result<Vec<_>, _>>()
        })?;
        let written = (pages * u64::from(self.config.write_percent)).div_ceil(100);
        self.phase("touch", |run| {
            for (child, process) in (1..).zip(&mut processes) {
                run.kernel.run(run.guest, process)?;
                for page in 0..pages {
                    run.read(page, content(page))?;
                }
                for page in 0..written {
                    run.kernel.user_write(run.guest, process, page, child)?;
                }
            }
            Ok(())
        })?;
        let histogram = self.guest.shadow.histogram();
        let descriptor_bytes = self.guest.shadow.reverse_maps().bytes();
        if self.config.check {
            for (child, process) in (1..).zip(&processes) {
                self.kernel.run(self.guest, process)?;
                for page in 0..pages {
                    let own = page < written;
                    self.read(page, if own { child } else { content(page) })?;
                }
            }
        }
        self.kernel.run(self.guest, &parent)?;
        self.phase("reap", |run| {
            for process in processes {
                run.kernel.reap(run.guest, process, pages)?;
            }
            run.kernel.run(run.guest, &parent)
        })?;
        for page in 0..pages {
            self.read(page, content(page))?;
        }
        let statistics = self.guest.statistics();
        let shadow = Counts {
            mapped: statistics.mapped,
            pages_made: statistics.pages_made,
            recycled: statistics.recycled,
            unsynced: statistics.unsynced,
            synchronised: statistics.synchronised,
            overflows: statistics.overflows,
            flushes: self.guest.flushes(),
            most_mappings: statistics.most_mappings,
            descriptor_bytes,
        };
        let results =
            Results { exit_counts: self.guest.exits, shadow, reverse_maps: lengths(&histogram) };
        Ok(Ended { phases: self.phases, results, found: self.found })
    }

    fn read(&mut self, page: u64, expected: u64) -> Result<(), Failure> {
        let word = self.kernel.user_read(self.guest, page)?;
        self.found.reads += 1;
        self.found.wrong += u64::from(word != expected);
        Ok(())
    }

    fn phase<T>(
        &mut self,
        name: &'static str,
        work: impl FnOnce(&mut Self) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        // Those of checks between the phases are nobody's.
        self.guest.noted = self.config.exits.then(Box::default);
        let before = self.guest.exits.page_faults;
        let start = Instant::now();
        let done = work(self)?;
        let took = start.elapsed();
        let faults = self.guest.exits.page_faults - before;
        let phase = Phase::new(name, None, took, Counters { faults, ..Counters::default() });
        let exits = self.guest.noted.as_deref_mut().map(std::mem::take);
        self.phases.push(Phase { exits, ..phase });
        Ok(done)
    }
}

fn lengths(histogram: &Histogram) -> Vec<Lengths> {
    let sizes = ["4K", "2M", "1G"];
    let of_size = |(page_size, counts): (&'static str, &[u64; Histogram::BUCKETS])| Lengths {
        page_size,
        frames: counts.iter().enumerate().map(|(n, &frames)| (bucket(n), frames)).collect(),
    };
    sizes.into_iter().zip(&histogram.frames).map(of_size).collect()
}

fn bucket(number: usize) -> String {
    match Histogram::range(number) {
        (first, Some(last)) if first == last => first.to_string(),
        (first, Some(last)) => format!("{first}-{last}"),
        (first, None) => format!("{first}-"),
    }
}

impl Results {
    /// What people look for first.
    fn lines(&self) -> Vec<String> {
        let exits = &self.exit_counts;
        let mut lines = vec![
            format!(
                "exits: {} page faults ({} the guest's own, {} of the memory below), {} stores emulated, {} roots, {} pages \
                 invalidated",
                exits.page_faults,
                exits.injected,
                exits.second_level,
                exits.emulated,
                exits.roots,
                exits.invalidations
            ),
            format!(
                "shadow: {} entries mapped, {} pages made, {} recycled, {} flushes; at most {} mappings of a frame, {} bytes \
                 of descriptors",
                self.shadow.mapped,
                self.shadow.pages_made,
                self.shadow.recycled,
                self.shadow.flushes,
                self.shadow.most_mappings,
                self.shadow.descriptor_bytes
            ),
            String::new(),
            "frames by mappings, while all children live:".to_owned(),
        ];
        let row = |name: &str, cells: Vec<String>| {
            let cells: Vec<_> = cells.iter().map(|cell| format!("{cell:>9}")).collect();
            format!("{name:>4}{}", cells.join(""))
        };
        if let Some(first) = self.reverse_maps.first() {
            lines.push(row("", first.frames.iter().map(|(range, _)| range.clone()).collect()));
        }
        for size in &self.reverse_maps {
            let counts = size.frames.iter().map(|(_, frames)| frames.to_string()).collect();
            lines.push(row(size.page_size, counts));
        }
        lines
    }
}
