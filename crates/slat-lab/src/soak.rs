//! `slat soak`: real threads do everything at once on a checked machine, round after round, until the time is over or
//! something is found.
//!
//! Each round has a fresh VM, whose shape and whose threads' operations are drawn from the round's seed. Threads are not
//! deterministic: the same seed gives the same VM and the same operations, in another interleaving. (Whole
//! interleavings are repeated under shuttle, in the tests of `slat-vm`.)

use std::process;
use std::time::{Duration, Instant};

use clap::Args;

use crate::arch::{Arch, with_tables};
use crate::failure::Failure;
use crate::output;
use crate::random::Dice;

mod config;
mod guest;
mod memory;
mod migration;
mod place;
mod round;
mod work;

use config::Config;
use round::Outcome;

/// What follows the options in `--help`.
pub(crate) const LONG_HELP: &str = "\
A round is a VM of its own: architecture, granule, backing, features of the CPU, eager split and memslots are drawn from the round's \
seed, and so is what its threads do. Half of the threads are vCPUs that load, store and fetch, and compare what they \
find; the others collect dirty logs in every mode, split blocks, move host pages, delete and create memslots, pinned and \
private ones among them, convert and age pages, and free empty tables. The first round has the seed of --seed.

Threads are not deterministic: the command that a failure ends with repeats the VM and the operations of its round, not \
the interleaving. --rounds with a larger number tries further rounds after it.

Exit status: 0 nothing was found; 1 a rule was broken, contents were wrong, a write was lost, a table leaked, or nothing \
went on any more; 2 the command makes no sense.";

/// The most that a round may stand still.
const PATIENCE: Duration = Duration::from_secs(120);

/// Options of `soak`.
#[derive(Clone, Debug, Args)]
pub(crate) struct Options {
    /// Minutes to go on for, such as 10 or 0.5; the round that is under way is finished
    #[arg(long, value_name = "N", default_value = "1", value_parser = minutes)]
    minutes: Duration,

    /// Seed of the first round, from which the seeds of the others follow
    #[arg(long, value_name = "SEED", default_value_t = 1)]
    seed: u64,

    /// Threads of a round: vCPUs, and as many or one less that do all the rest
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(2..=64))]
    threads: u32,

    /// Whose second-level tables all rounds have, instead of one or the other: arm, ept or npt
    #[arg(long, value_enum, value_name = "arm|ept|npt", hide_possible_values = true)]
    arch: Option<Arch>,

    /// End after so many rounds, if the time is not over before
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    rounds: Option<u64>,
}

fn minutes(text: &str) -> Result<Duration, String> {
    let wanted = "minutes must be a number above 0 and no more than a million, such as 10 or 0.5";
    let minutes: f64 = text.parse().map_err(|_| wanted.to_owned())?;
    if minutes > 0.0 && minutes <= 1e6 {
        Ok(Duration::from_secs_f64(minutes * 60.0))
    } else {
        Err(wanted.to_owned())
    }
}

/// What all rounds have done.
#[derive(Debug, Default)]
struct Sum {
    rounds: u64,
    operations: u64,
    faults: u64,
}

/// Runs rounds, a line for each, and prints their sum.
///
/// # Errors
/// [`Failure::Check`] if a round found something; see [`Failure`] for the others.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let began = Instant::now();
    let mut sum = Sum::default();
    let mut seeds = Seeds::new(options.seed);
    let limit = options.rounds.unwrap_or(u64::MAX);
    let mut finding = None;
    while finding.is_none()
        && sum.rounds < limit
        && (sum.rounds == 0 || began.elapsed() < options.minutes)
    {
        let seed = seeds.next();
        let config = Config::draw(seed, options.threads, options.arch);
        let round = sum.rounds + 1;
        output::line(&format!("round {round}, seed {seed}: {config}"))?;
        let outcome = play(&config, seed, || {
            // The threads cannot be ended; the process can.
            let _ = report(options, &sum, seed, "nothing goes on any more");
            process::exit(1)
        })?;
        sum.rounds = round;
        sum.operations += outcome.operations;
        sum.faults += outcome.faults;
        finding = outcome.finding.map(|finding| (seed, finding));
    }
    match finding {
        None => {
            output::line(&total(&sum, 0))?;
            Ok(())
        }
        Some((seed, finding)) => {
            report(options, &sum, seed, &finding)?;
            Err(Failure::Check)
        }
    }
}

/// The seeds of rounds: the first is the one that was asked for.
struct Seeds {
    next: u64,
    dice: Dice,
}

impl Seeds {
    fn new(first: u64) -> Self {
        Self { next: first, dice: Dice::new(first, u32::MAX) }
    }

    fn next(&mut self) -> u64 {
        std::mem::replace(&mut self.next, self.dice.below(u64::MAX))
    }
}

fn play(config: &Config, seed: u64, stuck: impl Fn()) -> Result<Outcome, Failure> {
    with_tables!(config.kind(), T => round::play::<T>(config, seed, PATIENCE, stuck))
}

fn total(sum: &Sum, violations: u32) -> String {
    let Sum { rounds, operations, faults } = sum;
    format!("{rounds} rounds, {operations} operations, {faults} faults, {violations} violations")
}

/// What was found, and how to look for it again.
fn report(options: &Options, sum: &Sum, seed: u64, finding: &str) -> Result<(), Failure> {
    let threads = options.threads;
    let arch = options.arch.map_or_else(String::new, |arch| format!(" --arch {arch}"));
    output::line(&format!(
        "FOUND: {finding}\n{}\nthe same VM and operations again, in another interleaving: \
         slat soak --seed {seed} --rounds 1 --threads {threads}{arch}",
        total(sum, 1)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_is_repeated_by_its_seed() {
        let mut seeds = Seeds::new(7);
        assert_eq!(seeds.next(), 7);
        let second = seeds.next();
        assert_ne!(second, 7);
        assert_eq!(Seeds::new(second).next(), second);
        assert_eq!(Config::draw(second, 4, None), Config::draw(second, 4, None));
    }

    #[test]
    fn minutes_are_a_positive_number() {
        assert_eq!(minutes("0.5"), Ok(Duration::from_secs(30)));
        for nonsense in ["0", "-1", "NaN", "inf", "", "1e7", "ten"] {
            assert!(minutes(nonsense).is_err(), "{nonsense}");
        }
    }
}
