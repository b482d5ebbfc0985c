//! What `slat page-table` is asked, and what of it makes no sense.

use std::fmt;

use clap::Args;
use serde::Serialize;

use crate::backing::Backing;
use crate::config::{self, GuestConfig};
use crate::failure::Failure;
use crate::guest_mode::GuestMode;
use crate::layout::{Layout, Plan};
use crate::metal::MetalOptions;
use crate::options::{
    CheckOption, EagerSplit, EagerSplitOption, MachineOptions, MemoryOptions, OffsetOption,
    OutputOptions,
};
use crate::size::Size;

/// What follows the options in `--help`.
pub(crate) const LONG_HELP: &str = "\
Letters mean what they mean in the kernel's kvm_page_table_test: -b is the memory of all vCPUs together, rounded up to \
whole pages of the backing. Phases are create, enable, update, disable, collapse, adjust; enable and disable turn the \
dirty log on and off, and collapse makes blocks of what was split.

--json prints one object as dirty-log does. \"check\" is null without --check; otherwise it has created, updated and \
adjusted ({\"leaves\": [{\"size\", \"count\"}], \"unmapped\"}), wrong_leaves, elsewhere, lost, wrong_loads, misplaced, \
violations and violation.

Exit status: 0 done; 1 the run broke off or the check found something; 2 the command makes no sense; 4 this computer \
cannot do it.";

/// Options of `page-table`.
#[derive(Clone, Debug, Args)]
#[command(mut_arg("bytes", |bytes| bytes.help("Memory of all vCPUs together, such as 256M or 4G")))]
pub(crate) struct Options {
    #[command(flatten)]
    pub(crate) memory: MemoryOptions,

    #[command(flatten)]
    offset: OffsetOption,

    #[command(flatten)]
    pub(crate) machine: MachineOptions,

    #[command(flatten)]
    pub(super) metal: MetalOptions,

    #[command(flatten)]
    split: EagerSplitOption,

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
    /// Chosen by the run, where that is possible.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) eager_split: Option<EagerSplit>,
    /// Whether every page is written while the log is on: there are no large ones to tear apart.
    #[serde(skip)]
    pub(crate) updates_all: bool,
}

impl Options {
    /// Refuses what only slat's own engine has.
    ///
    /// # Errors
    /// [`Failure::Usage`].
    #[cfg(all(target_os = "linux", target_arch = "x86_64"))]
    pub(super) fn fit_kvm(&self) -> Result<(), Failure> {
        self.split.fit_kvm()
    }

    /// Where guest memory lies, and everything that was asked for.
    ///
    /// # Errors
    /// [`Failure::Usage`] with what makes no sense.
    pub(crate) fn settle(&self, chosen: (Backing, GuestMode)) -> Result<(Layout, Config), Failure> {
        let vcpus = self.memory.vcpus;
        let large = chosen.0.page_size(self.machine.granule()).max(chosen.1.page_size);
        let bytes = self.memory.bytes;
        let rounded = bytes.0.checked_next_multiple_of(large.0).map_or(bytes, Size);
        // All of it is every vCPU's.
        let memory = MemoryOptions { vcpus: 1, bytes: rounded, ..self.memory.clone() };
        let plan = Plan {
            overlap: vcpus > 1,
            offset: self.offset.offset,
            eager_split: self.split.chosen(),
            ..Plan::PLAIN
        };
        let check = self.check.check;
        let (mut layout, guest) = config::settle(&memory, &self.machine, plan, chosen, check)?;
        // The kernel's guests go by pages of the host.
        layout.guest_page = layout.page;
        let guest = GuestConfig { vcpus, ..guest };
        let updates_all = guest.backing_page.0 == layout.page;
        let eager_split = self.machine.splits().then_some(plan.eager_split);
        Ok((layout, Config { guest, eager_split, updates_all }))
    }
}

impl Config {
    /// Pages of the host in a page of the backing.
    pub(crate) fn pages_per_large(&self, layout: &Layout) -> u64 {
        self.guest.backing_page.0 / layout.page
    }

    /// The pages that are written while the log is on.
    pub(crate) fn written_pages(&self, layout: &Layout) -> impl Iterator<Item = u64> + use<> {
        (0..layout.guest_pages()).step_by(self.pages_per_large(layout) as usize)
    }
}

impl fmt::Display for Config {
    /// Two lines: what the guest is and does; what it runs on.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let guest = &self.guest;
        writeln!(f, "{} on the same {} {}", guest.crowd(), guest.bytes, guest.backing)?;
        let split = self.eager_split.unwrap_or(EagerSplit::Off);
        guest.machine_line(f, &format!(", eager split {split}"))
    }
}
