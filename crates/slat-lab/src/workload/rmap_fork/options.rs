//! What `slat rmap-fork` is asked, and what of it makes no sense.

use std::fmt;

use clap::{Args, ValueEnum};
use serde::Serialize;

use super::kernel::PAGE;
use crate::backend::BackendOption;
use crate::failure::Failure;
use crate::options::{CheckOption, OutputOptions};
use crate::size::Size;

/// What follows the options in `--help`.
pub(crate) const LONG_HELP: &str = "\
A guest kernel, whose page tables are shadowed, runs a process that forks N children, which share its memory \
copy-on-write. Each child reads all of it and writes a part, and all are reaped at the end. So a page of the guest is \
mapped by up to N + 1 shadow entries, and the time depends on how they are found again: the reverse maps. Shadow paging is \
x86's: there is no --arch.

Designs of the reverse maps: slots-3, slots-15 and slots-14-counter are those that KVM went through, chains of descriptors \
that are searched; slat knows the place of each entry.

--json prints one object of the same form as that of dirty-log, with exits by reason, what the shadow counted, and the \
histogram of the lengths of the reverse maps by page size while all children live. --check compares everything that is read \
with what was written: reads and wrong.

Exit status: 0 done; 1 the run broke off or the check found something; 2 the command makes no sense.";

/// How reverse maps are kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Design {
    /// Chains of 3 slots, searched (KVM until 5.14)
    #[value(name = "slots-3")]
    #[serde(rename = "slots-3")]
    Slots3,
    /// Chains of 15 slots, searched (a step on the way to KVM 5.15)
    #[value(name = "slots-15")]
    #[serde(rename = "slots-15")]
    Slots15,
    /// Chains of 14 slots and a counter, searched (KVM from 5.15 to 6.3)
    #[value(name = "slots-14-counter")]
    #[serde(rename = "slots-14-counter")]
    Slots14Counter,
    /// The engine's own: nothing is searched
    Slat,
}

/// Options of `rmap-fork`.
#[derive(Clone, Debug, Args)]
pub(crate) struct Options {
    /// How many children
    #[arg(value_name = "N", default_value_t = 500, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    children: u32,

    /// Memory of the process
    #[arg(short = 'b', value_name = "SIZE", default_value = "512K")]
    bytes: Size,

    /// Part of the memory that each child writes, so that it is copied
    #[arg(short = 'w', value_name = "PERCENT", default_value_t = 1, value_parser = clap::value_parser!(u32).range(0..=100))]
    write: u32,

    /// How reverse maps are kept
    #[arg(long, value_enum, default_value_t = Design::Slat)]
    design: Design,

    /// The most shadow pages at once; more are recycled
    #[arg(long, value_name = "PAGES", default_value_t = 65536, value_parser = clap::value_parser!(u32).range(64..4_194_304))]
    shadow_pages: u32,

    /// What it takes to leave the guest and to enter it again, in nanoseconds that the CPU spins; the model alone takes none
    #[arg(long, value_name = "NS", default_value_t = 0, value_parser = clap::value_parser!(u64).range(0..=1_000_000))]
    exit_time: u64,

    #[command(flatten)]
    pub(super) on: BackendOption,

    /// Statistics of exits from the guest, as the kernel's perf tool prints them: by reason, how many and how long
    #[arg(long, help_heading = "Output")]
    exits: bool,

    #[command(flatten)]
    check: CheckOption,

    #[command(flatten)]
    pub(crate) output: OutputOptions,
}

/// What runs, with every default filled in: the `config` of the report.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Config {
    pub(super) children: u32,
    pub(super) bytes: Size,
    pub(super) write_percent: u32,
    pub(super) design: Design,
    pub(super) shadow_pages: u32,
    pub(super) exit_time_ns: u64,
    pub(super) check: bool,
    #[serde(skip)]
    pub(super) exits: bool,
    #[serde(skip)]
    pub(super) pages: u64,
    /// The guest's memory.
    pub(super) guest_bytes: Size,
}

/// Pages that one process can have: its directory has one table.
const MOST_PAGES: u64 = 512 * 512;

impl Options {
    /// Everything that was asked for.
    ///
    /// # Errors
    /// [`Failure::Usage`] with what makes no sense.
    pub(crate) fn settle(&self) -> Result<Config, Failure> {
        let pages = self.bytes.0 / PAGE;
        if self.bytes.0 == 0 || !self.bytes.0.is_multiple_of(PAGE) || pages > MOST_PAGES {
            return Err(Failure::Usage(format!(
                "-b {}: a process has whole pages of 4K, up to 1G",
                self.bytes
            )));
        }
        let copies = (pages * u64::from(self.write)).div_ceil(100);
        let process = 3 + pages.div_ceil(512) + copies;
        let frames = 64 + pages + process * (u64::from(self.children) + 1);
        let guest = (frames * PAGE).next_multiple_of(2 << 20);
        if guest > 64 << 30 {
            return Err(Failure::Usage(format!(
                "{} children of {} would need {} of guest memory: 64G are the most; ask for fewer or smaller",
                self.children,
                self.bytes,
                Size(guest)
            )));
        }
        Ok(Config {
            children: self.children,
            bytes: self.bytes,
            write_percent: self.write,
            design: self.design,
            shadow_pages: self.shadow_pages,
            exit_time_ns: self.exit_time,
            exits: self.exits,
            check: self.check.check,
            pages,
            guest_bytes: Size(guest),
        })
    }
}

impl Config {
    /// What `rmap-fork` runs without any option, but for these.
    ///
    /// # Errors
    /// None that its defaults have.
    pub(crate) fn standard(design: Design, exit_time: u64) -> Result<Self, Failure> {
        let options = Options {
            children: 500,
            bytes: Size(512 << 10),
            write: 1,
            design,
            shadow_pages: 65536,
            exit_time,
            on: BackendOption::default(),
            exits: false,
            check: CheckOption { check: false },
            output: OutputOptions { json: false },
        };
        options.settle()
    }
}

impl fmt::Display for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.design.to_possible_value();
        let design = name.as_ref().map_or("", |name| name.get_name());
        write!(
            f,
            "{} children share {}, each writes {} %; design {design}, {} shadow pages, guest of {}, exits of {} ns",
            self.children,
            self.bytes,
            self.write_percent,
            self.shadow_pages,
            self.guest_bytes,
            self.exit_time_ns
        )
    }
}
