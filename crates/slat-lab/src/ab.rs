//! `slat ab`: a workload run in two ways by turns, and what changed from one to the other.

use std::env;
use std::process::{Command, Stdio};

use clap::{ArgGroup, Args, CommandFactory, FromArgMatches};

use crate::compare::{ShownOptions, Side};
use crate::failure::Failure;
use crate::{Command as Chosen, Line};

/// What follows the options in `--help`.
pub(crate) const LONG_HELP: &str = "\
  slat ab --design linux-6.11 --vs slat dirty-log --clock virtual -v 8 -b 64M
  slat ab --profile arm-server-2022 --vs arm-server-2022-v5 dirty-log --clock virtual
  slat ab --with '--eager-split off' --vs '--eager-split 2M' dirty-log -v 2 -b 256M -s anonymous_thp

Runs take turns, A B B A A B B A, each in a process of its own; each pair has a seed of its own, from that of the workload \
on, where the workload has one. The comparison is that of `slat compare`, and so is --json.

Exit status: 0 done; 1 a run broke off, or its check found something; 2 the command makes no sense.";

/// Options of `ab`.
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("ours").required(true)))]
pub(crate) struct Options {
    /// A's design; --vs names B's
    #[arg(long, value_name = "X", group = "ours")]
    design: Option<String>,

    /// A's machine; --vs names B's
    #[arg(long, value_name = "X", group = "ours")]
    profile: Option<String>,

    /// A's options, in quotes, divided by blanks; --vs has B's
    #[arg(long, value_name = "X", group = "ours", allow_hyphen_values = true)]
    with: Option<String>,

    /// The same of B
    #[arg(long, value_name = "Y", allow_hyphen_values = true)]
    vs: String,

    /// Runs of each
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repeat: u32,

    #[command(flatten)]
    shown: ShownOptions,

    /// A workload, and options that both have
    #[arg(
        value_name = "WORKLOAD",
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    workload: Vec<String>,
}

/// One of the two ways.
struct Way {
    name: &'static str,
    /// What only it has.
    own: Vec<String>,
    /// The whole command line.
    line: Vec<String>,
    /// What its runs have printed.
    printed: String,
}

/// What the command line of a workload says that matters here.
struct Asked {
    seed: Option<u64>,
    json: bool,
}

/// Runs both ways and prints the comparison.
///
/// # Errors
/// A command line that makes no sense, or a run that failed.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let [mut a, mut b] = options.ways();
    let (asked, _) = (asked(&a.line)?, asked(&b.line)?);
    for round in 0..options.repeat {
        let seed = asked.seed.map(|seed| seed.wrapping_add(u64::from(round)));
        let [first, second] = if round % 2 == 0 { [&mut a, &mut b] } else { [&mut b, &mut a] };
        first.run(round, seed)?;
        second.run(round, seed)?;
    }
    let json = options.shown.output.json || asked.json;
    let title = format!("slat ab: {}", options.workload.join(" "));
    options.shown.print(&title, &[a.side()?, b.side()?], json)
}

impl Options {
    fn ways(&self) -> [Way; 2] {
        let Self { design, profile, with, .. } = self;
        let given = [(Some("--design"), design), (Some("--profile"), profile), (None, with)];
        let given = given.into_iter().find_map(|(option, ours)| Some((option, ours.as_ref()?)));
        let (option, ours) = given.unwrap_or((None, &self.vs));
        [("A", ours), ("B", &self.vs)].map(|(name, value)| {
            let own: Vec<_> = match option {
                Some(option) => vec![option.to_owned(), value.clone()],
                None => value.split_whitespace().map(str::to_owned).collect(),
            };
            let line = self.workload.iter().chain(&own).cloned().collect();
            Way { name, own, line, printed: String::new() }
        })
    }
}

/// What a workload's command line asks for.
///
/// # Errors
/// [`Failure::Usage`]: it is none. One that the command does not understand, or that asks for help, ends the process as
/// it would have done alone.
fn asked(line: &[String]) -> Result<Asked, Failure> {
    let words = ["slat"].into_iter().chain(line.iter().map(String::as_str));
    let matches = Line::command().try_get_matches_from(words);
    let parsed = matches.and_then(|matches| Ok((Line::from_arg_matches(&matches)?, matches)));
    let (parsed, matches) = parsed.unwrap_or_else(|refusal| refusal.exit());
    let (Chosen::Workload(_), Some((_, options))) = (parsed.command, matches.subcommand()) else {
        let why = format!("{} is no workload: `slat list` has them", line.join(" "));
        return Err(Failure::Usage(why));
    };
    let seed = options.try_get_one("seed").ok().flatten().copied();
    Ok(Asked { seed, json: options.get_flag("json") })
}

impl Way {
    /// Runs it once more.
    fn run(&mut self, round: u32, seed: Option<u64>) -> Result<(), Failure> {
        let failed = |why: String| {
            let (name, line) = (self.name, self.line.join(" "));
            Failure::Run(format!("run {} of {name} (slat {line}) {why}", round + 1))
        };
        let seed = seed.map(|seed| format!("--seed={seed}"));
        let mut command = Command::new(env::current_exe()?);
        command.args(&self.line).args(seed).arg("--json");
        command.stdin(Stdio::null()).stderr(Stdio::inherit());
        let output = command.output().map_err(|error| failed(format!("did not start: {error}")))?;
        if !output.status.success() {
            return Err(failed(format!("failed: {}", output.status)));
        }
        self.printed += &String::from_utf8_lossy(&output.stdout);
        Ok(())
    }

    fn side(&self) -> Result<Side, Failure> {
        let own = if self.own.is_empty() { "nothing more".to_owned() } else { self.own.join(" ") };
        Side::parse(own, &self.printed)
    }
}
