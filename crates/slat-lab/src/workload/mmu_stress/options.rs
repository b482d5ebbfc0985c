//! What `slat mmu-stress` is asked, and what of it makes no sense.

use std::fmt;
use std::num::NonZero;
use std::ops::Range;
use std::str::FromStr;
use std::thread;

use clap::Args;
use serde::Serialize;

use super::guest::Region;
use crate::backing::{Backing, Pages};
use crate::config::{self, GuestConfig};
use crate::failure::Failure;
use crate::guest_mode::{self, GuestMode};
use crate::layout::{Layout, Plan};
use crate::options::{
    CheckOption, EagerSplit, MAX_SLOTS, MAX_VCPUS, MachineOptions, MemoryOptions, OrHelp,
    OutputOptions,
};

use crate::size::{Size, SizeError};

/// What follows the options in `--help`.
pub(crate) const LONG_HELP: &str = "\
Letters mean what they mean in the kernel's mmu_stress_test. Sizes without a unit are GiB, as there. One stretch of host \
memory of the size of a slot is behind every slot.

--json prints one object of the same form as that of dirty-log. \"check\" is always there, since the kernel's test always \
looks at writes to read-only memory: pages, refused, passed, changed, wrong_loads, misplaced, misled, violations and \
violation; --check also looks for changed and misled, and checks the architecture's rules.

Exit status: 0 done; 1 the run broke off or the check found something; 2 the command makes no sense; 4 this computer \
cannot do it.";

/// Where guest memory begins, as in the kernel's test.
const START: u64 = 4 << 30;

/// Options of `mmu-stress`.
#[derive(Clone, Debug, Args)]
pub(crate) struct Options {
    /// vCPUs, each a host thread [default: three quarters of the processors]
    #[arg(short = 'c', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=MAX_VCPUS))]
    vcpus: Option<u32>,

    /// Guest memory, in GiB or such as 256M; rounded up to whole slots
    #[arg(short = 'm', long, value_name = "GIB", default_value = "128")]
    memory: Gigabytes,

    /// Memory of a slot, and of the host behind all of them
    #[arg(short = 's', long, value_name = "GIB", default_value = "2")]
    slot_size: Gigabytes,

    /// Huge pages behind it (hugetlb)
    #[arg(short = 'H', long)]
    huge_pages: bool,

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

/// An amount of memory whose unit is GiB where none is given.
#[derive(Clone, Copy, Debug)]
struct Gigabytes(Size);

impl FromStr for Gigabytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let plain = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let size = if plain { format!("{text}G").parse() } else { text.parse() };
        match size.map_err(|error: SizeError| error.to_string())? {
            Size(0) => Err("guest memory and its slots need a size".to_owned()),
            size => Ok(Self(size)),
        }
    }
}

/// What runs, with every default filled in: the `config` of the report.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Config {
    /// Its `bytes` are those of all vCPUs together.
    #[serde(flatten)]
    pub(crate) guest: GuestConfig,
    pub(crate) slots: u32,
    pub(crate) slot_size: Size,
}

impl Options {
    /// Where guest memory lies, and everything that was asked for.
    ///
    /// # Errors
    /// [`Failure::Usage`] with what makes no sense.
    pub(crate) fn settle(&self, mode: GuestMode) -> Result<(Layout, Config), Failure> {
        let Gigabytes(slot_size) = self.slot_size;
        let page = mode.page_size.max(self.machine.granule().page_size());
        if !slot_size.0.is_multiple_of(page.0) {
            let why = format!("-s {slot_size}: a slot has whole pages of {page}");
            return Err(Failure::Usage(why));
        }
        let slots = self.memory.0.0.div_ceil(slot_size.0);
        let too_many = || {
            Failure::Usage(format!(
                "{slots} slots: at most {MAX_SLOTS} are possible; -s chooses their size"
            ))
        };
        let slots = u32::try_from(slots).ok().filter(|&slots| i64::from(slots) <= MAX_SLOTS);
        let slots = slots.ok_or_else(too_many)?;
        let bytes = u64::from(slots).checked_mul(slot_size.0).map(Size);
        let too_large =
            || Failure::Usage("-m: that is more memory than 64 bits can address".to_owned());
        let bytes = bytes.ok_or_else(too_large)?;
        let backing = match self.huge_pages {
            true => Backing { shared: true, pages: Pages::Huge },
            false => Backing { shared: true, pages: Pages::Base },
        };
        let vcpus = self.vcpus.unwrap_or_else(three_quarters);
        // To the layout the whole is one vCPU's.
        let memory = MemoryOptions {
            vcpus: 1,
            bytes,
            backing: OrHelp::Value(backing),
            mode: OrHelp::Value(mode),
        };
        let plan = Plan { overlap: true, slots, offset: Some(START), eager_split: EagerSplit::Off };
        let chosen = (backing, mode);
        let (mut layout, guest) =
            config::settle(&memory, &self.machine, plan, chosen, self.check.check)?;
        layout.host_size = slot_size.0.next_multiple_of(guest.backing_page.0);
        let config = Config { guest: GuestConfig { vcpus, ..guest }, slots, slot_size };
        if u64::from(vcpus) > config.pages() {
            return Err(Failure::Usage(format!(
                "-c {vcpus}: more vCPUs than pages of guest memory"
            )));
        }
        Ok((layout, config))
    }
}

/// Three quarters of the processors, as the kernel's test takes.
fn three_quarters() -> u32 {
    let processors = thread::available_parallelism().map_or(1, NonZero::get);
    u32::try_from(processors * 3 / 4).unwrap_or(1).max(1)
}

impl Config {
    /// Guest pages of all guest memory.
    pub(super) fn pages(&self) -> u64 {
        self.guest.bytes.0 / self.guest.mode.page_size.0
    }

    /// Guest pages of one vCPU.
    pub(super) fn part(&self, index: u32) -> Range<u64> {
        let at = |index: u32| {
            let share = u128::from(self.pages()) * u128::from(index);
            (share / u128::from(self.guest.vcpus)) as u64
        };
        at(index)..at(index + 1)
    }

    pub(super) fn region(&self) -> Region {
        let half = self.slot_size.0 / 2;
        Region {
            gpa: self.guest.gpa,
            page: self.guest.mode.page_size.0,
            slot_size: self.slot_size.0,
            unmapped: half - half % self.guest.backing_page.0,
        }
    }
}

impl fmt::Display for Config {
    /// Two lines: what the guest is; what it runs on.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { guest, slots, slot_size } = self;
        let plural = if *slots == 1 { "" } else { "s" };
        let crowd = guest.crowd();
        writeln!(
            f,
            "{crowd}, {} in {slots} slot{plural} of {slot_size} {}",
            guest.bytes, guest.backing
        )?;
        guest.machine_line(f, "")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_without_a_unit_are_gigabytes() {
        let bytes = |text: &str| text.parse::<Gigabytes>().map(|Gigabytes(size)| size.0);
        assert_eq!(bytes("2"), Ok(2 << 30));
        assert_eq!(bytes("64M"), Ok(64 << 20));
        assert!(bytes("0").is_err() && bytes("0M").is_err() && bytes("").is_err());
        assert!(bytes("99999999999999999999").is_err() && bytes("-1").is_err());
    }
}
