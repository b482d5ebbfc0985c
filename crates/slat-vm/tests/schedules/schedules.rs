//! Which schedules of a scenario are tried, and how one is tried again.

use std::time::Instant;
use std::{env, fs, thread};

use shuttle::scheduler::{PctScheduler, RandomScheduler, ReplayScheduler, Scheduler};
use shuttle::{Config, Runner};
use slat_vm::sabotage::{Skip, leave_out};

use crate::world::{self, World};

/// Schedules of each kind that a test tries unless it says otherwise.
const EACH: usize = 20_000;
/// Preemptions of a PCT schedule, and one: the paper's depth.
const DEPTH: usize = 4;

/// How a scenario is explored.
#[derive(Clone, Copy)]
pub(crate) struct Schedules {
    each: usize,
    left_out: Option<Skip>,
}

impl Schedules {
    pub(crate) fn new() -> Self {
        Self { each: EACH, left_out: None }
    }

    /// The same, while a step is left out.
    pub(crate) fn without(step: Skip) -> Self {
        Self { left_out: Some(step), ..Self::new() }
    }

    /// So many of each kind.
    pub(crate) fn each(self, each: usize) -> Self {
        Self { each, ..self }
    }

    /// Runs `scenario` in every schedule.
    ///
    /// # Panics
    /// With the first violation, when its execution has ended.
    pub(crate) fn explore(self, scenario: fn(World<'_, '_>)) {
        if let Ok(file) = env::var("SLAT_SCHEDULE") {
            let schedule = fs::read_to_string(&file).expect("SLAT_SCHEDULE names a file");
            let schedule: String = schedule.split_whitespace().collect();
            let scheduler = ReplayScheduler::new_from_encoded(schedule.trim_matches('"'));
            return self.run("replayed", scheduler, scenario, true);
        }
        let number = |name| env::var(name).ok().and_then(|number| number.parse().ok());
        let each = number("SLAT_SCHEDULES").map_or(self.each, |each: u64| each as usize);
        let seed = number("SLAT_SCHEDULES_SEED").unwrap_or(1);
        self.run("PCT", PctScheduler::new_from_seed(seed, DEPTH, each), scenario, false);
        self.run("random", RandomScheduler::new_from_seed(seed, each), scenario, false);
    }

    fn run(
        self,
        kind: &str,
        scheduler: impl Scheduler + 'static,
        scenario: fn(World<'_, '_>),
        traced: bool,
    ) {
        let began = Instant::now();
        let mut config = Config::default();
        config.stack_size = 1 << 18;
        config.silence_warnings = true;
        let schedules = Runner::new(scheduler, config).run(move || {
            leave_out(self.left_out);
            let verdict = world::play(scenario, traced);
            leave_out(None);
            if let Some(violation) = verdict {
                let test = thread::current().name().unwrap_or_default().to_owned();
                panic!(
                    "{violation}\nto see each step, put the schedule into FILE: SLAT_SCHEDULE=FILE \
                     RUSTFLAGS=\"--cfg shuttle\" cargo test -p slat-vm --release --test schedules {test}"
                );
            }
        });
        println!("{schedules} schedules, {kind}, {:.1} s", began.elapsed().as_secs_f64());
    }
}
