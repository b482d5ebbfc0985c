//! What every workload is asked about its guest and machine, settled: help printed, nonsense refused, defaults filled in.

use std::fmt;

use serde::Serialize;

use crate::arch::Arch;
use crate::backend::Backend;
use crate::backing::{self, Backing};
use crate::failure::Failure;
use crate::granule::GranuleSize;
use crate::guest::MAX_CHECKED_PAGES;
use crate::guest_mode::{self, GuestMode};
use crate::layout::{Layout, Plan};
use crate::options::{Clock, MachineOptions, MemoryOptions};
use crate::output;
use crate::size::Size;

/// The part of a report's `config` that is the same for all workloads.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct GuestConfig {
    pub(crate) vcpus: u32,
    pub(crate) bytes: Size,
    pub(crate) backing: Backing,
    pub(crate) backing_page: Size,
    pub(crate) mode: GuestMode,
    pub(crate) gpa: u64,
    /// The tables, where they are slat's.
    #[serde(flatten)]
    pub(crate) tables: Option<TablesConfig>,
    pub(crate) clock: Clock,
    pub(crate) check: bool,
    /// What emulates the CPU, if that is not the model.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub(crate) emulated: Option<Emulated>,
}

/// A CPU that another program emulates.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct Emulated {
    pub(crate) cpu: String,
    /// The version of QEMU.
    pub(crate) qemu: String,
}

/// What tables slat makes.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct TablesConfig {
    pub(crate) arch: Arch,
    pub(crate) granule: GranuleSize,
    pub(crate) ipa_bits: u32,
    pub(crate) fwb: bool,
    pub(crate) hardware_access: bool,
}

/// What was chosen from lists, or `None` after the list was printed because `help` was.
///
/// # Errors
/// [`Failure::Output`].
pub(crate) fn choose(memory: &MemoryOptions) -> Result<Option<(Backing, GuestMode)>, Failure> {
    let Some(mode) = output::chosen(memory.mode, guest_mode::list)? else { return Ok(None) };
    Ok(output::chosen(memory.backing, backing::list)?.map(|backing| (backing, mode)))
}

/// Lays guest memory out.
///
/// # Errors
/// [`Failure::Usage`] with what makes no sense.
pub(crate) fn settle(
    memory: &MemoryOptions,
    machine: &MachineOptions,
    plan: Plan,
    (backing, mode): (Backing, GuestMode),
    check: bool,
) -> Result<(Layout, GuestConfig), Failure> {
    let usage = |why: &str| Err(Failure::Usage(why.to_owned()));
    if machine.clock_or(Clock::Real) == Clock::Virtual {
        return usage("--clock virtual: not yet; dirty-log has it, and --clock real is there");
    }
    let layout = Layout::new(memory, machine, plan, backing, mode)
        .map_err(|misfit| Failure::Usage(misfit.to_string()))?;
    if check && layout.size / layout.guest_page.min(layout.page) > MAX_CHECKED_PAGES {
        return usage("--check: more guest pages than it can tell apart; use less memory");
    }
    let config = GuestConfig {
        vcpus: memory.vcpus,
        bytes: memory.bytes,
        backing,
        backing_page: backing.page_size(layout.granule),
        mode,
        gpa: layout.gpa,
        tables: (machine.backend() != Backend::Kvm).then(|| TablesConfig {
            arch: machine.arch(),
            granule: layout.granule,
            ipa_bits: layout.ipa_bits,
            fwb: machine.fwb,
            hardware_access: machine.hardware_access(),
        }),
        clock: machine.clock_or(Clock::Real),
        check,
        emulated: None,
    };
    Ok((layout, config))
}

impl GuestConfig {
    /// What the user should know of a run like this that no number says.
    pub(crate) fn notes(&self, layout: &Layout) -> Vec<String> {
        let mut notes: Vec<_> = layout.remark(self.backing).into_iter().collect();
        if self.check {
            notes.push("--check slows everything down: these times are no measurement".to_owned());
        }
        notes
    }

    /// The tables that slat makes.
    ///
    /// # Errors
    /// [`Failure::Run`]: they are a host's.
    pub(crate) fn slats_tables(&self) -> Result<&TablesConfig, Failure> {
        self.tables.as_ref().ok_or_else(|| Failure::Run("the tables are the host's".to_owned()))
    }

    /// Whether tables like this can keep dirty state: Arm's if they are asked to, EPT's with accessed and dirty flags only.
    pub(crate) fn can_track_dirty(&self) -> bool {
        self.tables.as_ref().is_some_and(|of| of.arch != Arch::Ept || of.hardware_access)
    }

    /// How many vCPUs.
    pub(crate) fn crowd(&self) -> String {
        format!("{} vCPU{}", self.vcpus, if self.vcpus == 1 { "" } else { "s" })
    }

    /// What the guest runs on, in one line; `extra` is about the workload and comes before the model.
    pub(crate) fn machine_line(&self, f: &mut fmt::Formatter<'_>, extra: &str) -> fmt::Result {
        write!(f, "guest {} at {:#x}; ", self.mode.name, self.gpa)?;
        let Some(TablesConfig { arch, granule, ipa_bits, fwb, hardware_access }) = self.tables
        else {
            return f.write_str("on this host's KVM");
        };
        write!(
            f,
            "{}{extra}{}{}; {}",
            match arch {
                Arch::Arm => format!("{} granule, {ipa_bits}-bit IPA", granule.page_size()),
                x86 => format!("{}, {ipa_bits}-bit addresses", x86.to_string().to_uppercase()),
            },
            if fwb { ", FWB" } else { "" },
            match (arch, hardware_access) {
                (Arch::Arm, true) => ", hardware access flag",
                (Arch::Ept, false) => ", no accessed and dirty flags",
                _ => "",
            },
            match &self.emulated {
                Some(Emulated { cpu, qemu }) => format!("cpu {cpu} of QEMU {qemu}"),
                None if self.check => "checked model".to_owned(),
                None => "unchecked model".to_owned(),
            },
        )
    }
}
