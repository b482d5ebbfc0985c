//! What `slat pre-fault` is asked, and what of it makes no sense.

use std::fmt;

use clap::Args;
use serde::Serialize;

use super::guest::Step;
use crate::backing::Backing;
use crate::config::{self, GuestConfig};
use crate::failure::Failure;
use crate::guest_mode::{self, GuestMode};
use crate::layout::{Layout, Plan};
use crate::options::{
    CheckOption, EagerSplit, MAX_VCPUS, MachineOptions, MemoryOptions, OrHelp, OutputOptions,
};
use crate::size::Size;

/// What follows the options in `--help`.
pub(crate) const LONG_HELP: &str = "\
The kernel's pre_fault_memory_test has no options. A slot of 2 MiB and one page is mapped ahead in three steps: its first \
2 MiB; the last page and one that no slot has; one that no slot has. Then the guest reads all of it.

--json prints one object of the same form as that of dirty-log. What each call says is always compared, so \"check\" is \
always there: calls, unclear, wrong_rest, wrong_error, wrong_loads, faults, violations and violation; --check also checks \
the architecture's rules.

Exit status: 0 done; 1 the run broke off or the check found something; 2 the command makes no sense; 4 this computer \
cannot do it.";

/// Bytes of the part of the slot that one block can map.
const BLOCK: u64 = 2 << 20;

/// Options of `pre-fault`.
#[derive(Clone, Debug, Args)]
pub(crate) struct Options {
    /// vCPUs that all map the same memory ahead, each a host thread; the kernel's test has one
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=MAX_VCPUS))]
    vcpus: u32,

    /// The slot is deleted and created anew during each step, as in later versions of the kernel's test
    #[arg(long)]
    race: bool,

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

/// What runs, with every default filled in: the `config` of the report.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Config {
    /// Its `bytes` are those of the slot.
    #[serde(flatten)]
    pub(crate) guest: GuestConfig,
    pub(super) race: bool,
    /// Bytes of a page of guest and host.
    #[serde(skip)]
    pub(super) page: u64,
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
        let page = mode.page_size.max(self.machine.granule().page_size()).0;
        let bits = self.machine.ipa_bits.unwrap_or(mode.physical_bits).min(mode.physical_bits);
        // To the layout the whole is one vCPU's.
        let memory = MemoryOptions {
            vcpus: 1,
            bytes: Size(BLOCK + page),
            backing: OrHelp::Value(backing),
            mode: OrHelp::Value(mode),
        };
        let plan = Plan {
            overlap: true,
            slots: 1,
            // The highest place where the first part can be a block.
            offset: Some(((1 << bits) - BLOCK - page) & !(BLOCK - 1)),
            eager_split: EagerSplit::Off,
        };
        let (layout, guest) =
            config::settle(&memory, &self.machine, plan, (backing, mode), self.check.check)?;
        let guest = GuestConfig { vcpus: self.vcpus, ..guest };
        Ok((layout, Config { guest, race: self.race, page }))
    }
}

impl Config {
    /// The kernel's three.
    pub(super) fn steps(&self) -> [Step; 3] {
        let (gpa, page) = (self.guest.gpa, self.page);
        [
            Step { gpa, size: BLOCK, left: 0 },
            Step { gpa: gpa + BLOCK, size: 2 * page, left: page },
            Step { gpa: gpa + BLOCK + page, size: page, left: page },
        ]
    }

    /// All of the slot.
    pub(super) fn whole(&self) -> Step {
        Step { gpa: self.guest.gpa, size: self.guest.bytes.0, left: 0 }
    }
}

impl fmt::Display for Config {
    /// Two lines: what the guest is; what it runs on.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { guest, race, .. } = self;
        let race = if *race { ", the slot deleted and created meanwhile" } else { "" };
        writeln!(f, "{}, {} {}{race}", guest.crowd(), guest.bytes, guest.backing)?;
        guest.machine_line(f, "")
    }
}
