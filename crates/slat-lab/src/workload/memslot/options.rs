//! What `slat memslot` is asked, and what of it makes no sense.

use std::fmt;
use std::time::Duration;

use clap::Args;
use serde::Serialize;

use super::area::{CHUNK, EXTRA, GPA, Test};
use crate::backing::{Backing, Pages};
use crate::config::{self, GuestConfig};
use crate::failure::Failure;
use crate::guest_mode::{self, GuestMode};
use crate::layout::{Layout, Plan};
use crate::options::{
    CheckOption, EagerSplit, MAX_SLOTS, MAX_VCPUS, MachineOptions, MemoryOptions, OrHelp,
    OutputOptions,
};
use crate::size::Size;

/// What follows the options in `--help`.
pub(crate) const LONG_HELP: &str = "\
Letters mean what they mean in the kernel's memslot_perf_test, and so do the numbers of tests: 0 map, 1 unmap, 2 unmap \
chunked, 3 move active area, 4 move inactive area, 5 RW.

--json prints one object of the same form as that of dirty-log, and in it \"tests\": one for each run, with name, run, \
slots, pages_per_slot, refused, iterations, setup_seconds, seconds and average_seconds. Where the slots are too many or \
too few for a test, refused says so, and what follows is null. \"check\" has compared, wrong, loads, wrong_loads, exits, violations and violation.

Exit status: 0 done; 1 the run broke off or the check found something; 2 the command makes no sense; 4 this computer \
cannot do it.";

/// The size of the largest area must be a multiple of this, so that two halves of a quarter are whole chunks.
const MULTIPLE: u64 = 4 * 2 * CHUNK;

/// Options of `memslot`.
#[derive(Clone, Debug, Args)]
pub(crate) struct Options {
    /// Most memslots, one of them for the guest's code; -1: as many as there can be
    #[arg(short = 's', long, value_name = "N", default_value_t = -1, value_parser = slots)]
    slots: i64,

    /// The first test to run, by number
    #[arg(short = 'f', long, value_name = "TEST", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=5))]
    first_test: u32,

    /// The last test to run, by number
    #[arg(short = 'e', long, value_name = "TEST", default_value_t = 5, value_parser = clap::value_parser!(u32).range(0..=5))]
    last_test: u32,

    /// Length of each run; a fraction is possible
    #[arg(short = 'l', long, value_name = "SECONDS", default_value = "5", value_parser = seconds)]
    length: Duration,

    /// Runs of each test
    #[arg(short = 'r', long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,

    /// Compare what guests wrote before it is unmapped, and look for writes through slots that were moved
    #[arg(short = 'd', long)]
    verify: bool,

    /// Also say how memory is divided into slots (not for measurements)
    #[arg(short = 'v', long)]
    verbose: bool,

    /// vCPUs, each a host thread; the kernel's test has one
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=MAX_VCPUS))]
    vcpus: u32,

    /// Memory of the move and RW tests; unmap has a quarter and map a sixteenth of it
    #[arg(long, value_name = "SIZE", default_value = "512M")]
    bytes: Size,

    /// What backs guest memory; `help` lists
    #[arg(long = "source", value_name = "TYPE", default_value = "anonymous")]
    pub(crate) backing: OrHelp<Backing>,

    /// Guest mode by number or name; `help` lists
    #[arg(long, value_name = "MODE", default_value = guest_mode::DEFAULT)]
    pub(crate) mode: OrHelp<GuestMode>,

    #[command(flatten)]
    pub(crate) machine: MachineOptions,

    #[command(flatten)]
    check: CheckOption,

    #[command(flatten)]
    pub(crate) output: OutputOptions,
}

fn slots(text: &str) -> Result<i64, String> {
    match text.parse() {
        Ok(-1) => Ok(-1),
        Ok(slots @ 2..=MAX_SLOTS) => Ok(slots),
        Ok(_) => Err(format!("2..={MAX_SLOTS}, or -1 for as many as there can be")),
        Err(error) => {
            Err(format!("{error}: give a whole number, or -1 for as many as there can be"))
        }
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "give a number of seconds".to_owned())?;
    Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())
}

/// What runs, with every default filled in: the `config` of the report.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Config {
    /// Its `bytes` are those of the largest area.
    #[serde(flatten)]
    pub(crate) guest: GuestConfig,
    /// Slots that guest memory is divided into.
    pub(crate) slots: u32,
    pub(crate) first_test: u32,
    pub(crate) last_test: u32,
    pub(crate) length_seconds: f64,
    pub(crate) runs: u32,
    pub(crate) verify: bool,
    #[serde(skip)]
    pub(crate) length: Duration,
    #[serde(skip)]
    pub(crate) verbose: bool,
}

impl Options {
    /// Where guest memory lies, and everything that was asked for.
    ///
    /// # Errors
    /// [`Failure::Usage`] with what makes no sense.
    pub(crate) fn settle(
        &self,
        backing: Backing,
        mode: GuestMode,
    ) -> Result<(Layout, Config), Failure> {
        let usage = |why: String| Err(Failure::Usage(why));
        let &Self { first_test, last_test, bytes, vcpus, length, runs, verbose, .. } = self;
        if first_test > last_test {
            return usage(format!("-f {first_test} -e {last_test}: the last test comes first"));
        }
        if bytes == Size(0) || !bytes.0.is_multiple_of(MULTIPLE) {
            return usage(format!("--bytes {bytes}: give a multiple of {}", Size(MULTIPLE)));
        }
        // With room for the slot that is moved behind all others.
        let Some(room) = bytes.0.checked_add(EXTRA).and_then(|bytes| bytes.checked_mul(2)) else {
            return usage(format!("--bytes {bytes}: that is more memory than 64 bits can address"));
        };
        // To the layout the whole is one vCPU's and one slot.
        let memory = MemoryOptions {
            vcpus: 1,
            bytes: Size(room),
            backing: OrHelp::Value(backing),
            mode: OrHelp::Value(mode),
        };
        let plan =
            Plan { overlap: true, slots: 1, offset: Some(GPA), eager_split: EagerSplit::Off };
        let (layout, guest) =
            config::settle(&memory, &self.machine, plan, (backing, mode), self.check.check)?;
        let slots = if self.slots < 0 { MAX_SLOTS } else { self.slots };
        let config = Config {
            guest: GuestConfig { vcpus, bytes, ..guest },
            // Without that of the guest's code.
            slots: slots as u32 - 1,
            first_test,
            last_test,
            length_seconds: length.as_secs_f64(),
            runs,
            verify: self.verify || self.check.check,
            length,
            verbose,
        };
        Ok((layout, config))
    }
}

impl Config {
    /// Whether a page that was unmapped is another one afterwards: huge pages stay, since their parts cannot go.
    pub(super) fn exchanges_pages(&self) -> bool {
        self.verify && self.guest.backing.pages == Pages::Base
    }

    pub(super) fn tests(&self) -> impl Iterator<Item = Test> {
        let (first, last) = (self.first_test as usize, self.last_test as usize);
        Test::ALL.into_iter().take(last + 1).skip(first)
    }
}

impl fmt::Display for Config {
    /// Two lines: what is tested; what it runs on.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { guest, slots, runs, length_seconds, .. } = self;
        let plural = if *runs == 1 { "" } else { "s" };
        write!(
            f,
            "{}, {} {} in {slots} slots; {runs} run{plural} of {length_seconds} s each",
            guest.crowd(),
            guest.bytes,
            guest.backing
        )?;
        writeln!(f, "{}", if self.verify { ", verified" } else { "" })?;
        guest.machine_line(f, "")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_of_slots_is_minus_one_or_has_one_for_the_code_and_one_to_test() {
        assert_eq!((slots("-1"), slots("2"), slots("32764")), (Ok(-1), Ok(2), Ok(32764)));
        for text in ["0", "1", "-2", "32765", "many", ""] {
            assert!(slots(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_length_is_a_number_of_seconds() {
        assert_eq!(seconds("0.25"), Ok(Duration::from_millis(250)));
        assert!(seconds("-1").is_err() && seconds("inf").is_err() && seconds("x").is_err());
    }
}
