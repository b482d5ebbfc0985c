//! What `slat memslot-stress` is asked, and what of it makes no sense.

use std::fmt;
use std::time::Duration;

use clap::Args;
use serde::Serialize;

use crate::backing::Backing;
use crate::config::{self, GuestConfig};
use crate::failure::Failure;
use crate::guest_mode::GuestMode;
use crate::layout::{Layout, Plan};
use crate::options::{
    CheckOption, EagerSplit, MachineOptions, MemoryOptions, OutputOptions, OverlapOption,
};
use crate::size::Size;

/// What follows the options in `--help`.
pub(crate) const LONG_HELP: &str = "\
Letters mean what they mean in the kernel's memslot_modification_stress_test. The slot that comes and goes has one page \
and lies just below guest memory.

--json prints one object of the same form as that of dirty-log. \"check\" is null without --check; otherwise it has pages, \
landed, exits, stray, wrong_loads, misplaced, violations and violation.

Exit status: 0 done; 1 the run broke off or the check found something; 2 the command makes no sense; 4 this computer \
cannot do it.";

/// Options of `memslot-stress`.
#[derive(Clone, Debug, Args)]
pub(crate) struct Options {
    #[command(flatten)]
    pub(crate) memory: MemoryOptions,

    #[command(flatten)]
    overlap: OverlapOption,

    /// How often the slot is created and deleted
    #[arg(short = 'i', long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    iterations: u32,

    /// Microseconds to wait before each time
    #[arg(short = 'd', long, value_name = "MICROSECONDS", default_value_t = 0)]
    delay: u32,

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
    #[serde(flatten)]
    pub(crate) guest: GuestConfig,
    pub(crate) overlap: bool,
    pub(crate) iterations: u32,
    pub(crate) delay_microseconds: u32,
    /// Where the slot comes and goes.
    pub(crate) slot_gpa: u64,
    pub(crate) slot_size: Size,
    /// Where it is in host memory.
    #[serde(skip)]
    pub(crate) slot_hva: u64,
}

impl Options {
    /// Where guest memory lies, and everything that was asked for.
    ///
    /// # Errors
    /// [`Failure::Usage`] with what makes no sense.
    pub(crate) fn settle(&self, chosen: (Backing, GuestMode)) -> Result<(Layout, Config), Failure> {
        let plan = Plan {
            overlap: self.overlap.overlap,
            slots: 1,
            offset: None,
            eager_split: EagerSplit::Off,
        };
        let check = self.check.check;
        let (mut layout, guest) = config::settle(&self.memory, &self.machine, plan, chosen, check)?;
        let slot_size = layout.page.max(layout.guest_page);
        let Some(slot_gpa) = layout.gpa.checked_sub(slot_size) else {
            return Err(Failure::Usage(format!(
                "guest memory begins at {:#x}: no page is left below it for the slot that comes and goes",
                layout.gpa
            )));
        };
        let slot_hva = layout.host_size;
        layout.host_size += slot_size.next_multiple_of(guest.backing_page.0);
        let config = Config {
            guest,
            overlap: plan.overlap,
            iterations: self.iterations,
            delay_microseconds: self.delay,
            slot_gpa,
            slot_size: Size(slot_size),
            slot_hva,
        };
        Ok((layout, config))
    }
}

impl Config {
    /// Before each modification.
    pub(crate) fn delay(&self) -> Duration {
        Duration::from_micros(self.delay_microseconds.into())
    }
}

impl fmt::Display for Config {
    /// Two lines: what the guest is and what is done to it; what it runs on.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { guest, iterations, slot_size, slot_gpa, .. } = self;
        write!(f, "{} x {} {}", guest.crowd(), guest.bytes, guest.backing)?;
        if self.overlap {
            f.write_str(", overlapping")?;
        }
        writeln!(
            f,
            "; {iterations} times a slot of {slot_size} at {slot_gpa:#x}, {} us apart",
            self.delay_microseconds
        )?;
        guest.machine_line(f, "")
    }
}
