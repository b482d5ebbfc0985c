//! Which options the workloads share: guest memory, the machine, output.
//!
//! Letters and defaults are those of the kernel's KVM tests; what only slat has is spelled out.

use std::fmt;
use std::str::FromStr;

use clap::{Args, ValueEnum};
use serde::{Serialize, Serializer};

use crate::arch::Arch;
use crate::backend::{Backend, BackendOption};
use crate::backing::Backing;
use crate::failure::Failure;
use crate::granule::GranuleSize;
use crate::guest_mode::{self, GuestMode};
use crate::size::{Size, SizeError};

/// More vCPUs than any published run has had.
pub(crate) const MAX_VCPUS: i64 = 1024;
/// As many memslots as KVM allows.
pub(crate) const MAX_SLOTS: i64 = 32_764;

/// The guest's memory and the vCPUs that use it.
#[derive(Clone, Debug, Args)]
pub(crate) struct MemoryOptions {
    /// vCPUs, each a host thread
    #[arg(short = 'v', long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=MAX_VCPUS))]
    pub(crate) vcpus: u32,

    /// Memory of each vCPU, such as 256M or 4G
    #[arg(short = 'b', long, value_name = "SIZE", default_value = "1G")]
    pub(crate) bytes: Size,

    /// What backs guest memory; `help` lists
    #[arg(short = 's', long = "source", value_name = "TYPE", default_value = "anonymous")]
    pub(crate) backing: OrHelp<Backing>,

    /// Guest mode by number (as in Linux 6.12) or name: address width and guest page size; `help` lists
    #[arg(short = 'm', long, value_name = "MODE", default_value = guest_mode::DEFAULT)]
    pub(crate) mode: OrHelp<GuestMode>,
}

/// Whose memory a vCPU uses.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct OverlapOption {
    /// Every vCPU uses the memory of all, instead of a part of its own
    #[arg(short = 'o', long)]
    pub(crate) overlap: bool,
}

/// How many memslots there are.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct SlotsOption {
    /// Memslots that guest memory is divided into
    #[arg(short = 'x', long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=MAX_SLOTS))]
    pub(crate) slots: u32,
}

/// Where guest memory begins.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct OffsetOption {
    /// Guest-physical address of guest memory, decimal or 0x…, instead of the top of guest-physical memory
    #[arg(short = 'p', long, value_name = "ADDRESS", value_parser = address)]
    pub(crate) offset: Option<u64>,
}

/// What is done ahead of the faults under a dirty log.
#[derive(Clone, Copy, Debug, Args)]
#[command(next_help_heading = "Machine")]
pub(crate) struct EagerSplitOption {
    /// Bytes that are split into pages at once, ahead of write faults, or off [default: off]
    #[arg(long, value_name = "SIZE|off")]
    pub(crate) eager_split: Option<EagerSplit>,
}

impl EagerSplitOption {
    /// Refuses what a host's own KVM decides.
    ///
    /// # Errors
    /// [`Failure::Usage`].
    #[cfg(all(target_os = "linux", target_arch = "x86_64"))]
    pub(crate) fn fit_kvm(self) -> Result<(), Failure> {
        if self.eager_split.is_none() {
            return Ok(());
        }
        let why = "eager_page_split, a parameter of the host's module kvm, decides; slat kvm-info shows it";
        Err(Failure::Usage(format!("--backend kvm --eager-split: {why}")))
    }

    /// What was asked for, or that nothing is split.
    pub(crate) fn chosen(self) -> EagerSplit {
        self.eager_split.unwrap_or(EagerSplit::Off)
    }
}

/// Whether anything is compared.
#[derive(Clone, Copy, Debug, Args)]
#[command(next_help_heading = "Output")]
pub(crate) struct CheckOption {
    /// Verify what the run did to memory and tables, and check the architecture's rules; status 1 if anything is found
    #[arg(long)]
    pub(crate) check: bool,
}

/// The machine that the guest runs on.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Machine")]
pub(crate) struct MachineOptions {
    #[command(flatten)]
    on: BackendOption,

    /// Whose second-level tables: Arm's stage 2, Intel's EPT or AMD's nested tables [default: arm]
    #[arg(long, value_enum, value_name = "arm|ept|npt", hide_possible_values = true)]
    arch: Option<Arch>,

    /// Granule of the stage-2 tables and page size of the host; x86 has 4k only [default: 4k]
    #[arg(long, value_enum, value_name = "4k|16k|64k", hide_possible_values = true)]
    granule: Option<GranuleSize>,

    /// Width of guest-physical addresses that the tables translate, 32 to 52 (x86: from 40) [default: that of the guest mode]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(32..=52))]
    pub(crate) ipa_bits: Option<u32>,

    /// The CPU forces guest memory to write-back (FEAT_S2FWB)
    #[arg(long)]
    pub(crate) fwb: bool,

    /// Hardware sets the access flag (FEAT_HAFDBS; bit 6 of an EPTP), instead of a fault [default: off on Arm, unless a log is
    /// hardware's dirty state; on on x86]
    #[arg(long, value_enum, value_name = "on|off", hide_possible_values = true)]
    pub(crate) hardware_access: Option<Switch>,

    /// real: threads, wall time, real memory; virtual: costs of a profile, where the workload has it [default: real]
    #[arg(long, value_enum, value_name = "real|virtual", hide_possible_values = true)]
    clock: Option<Clock>,

    /// Statistics of exits from guests, as the kernel's perf tool prints them: by reason, how many and how long
    #[arg(long, help_heading = "Output")]
    pub(crate) exits: bool,
}

impl MachineOptions {
    /// What the workload runs on.
    pub(crate) fn backend(&self) -> Backend {
        self.on.backend
    }

    /// Whether the run chooses what is split ahead of write faults.
    pub(crate) fn splits(&self) -> bool {
        self.backend() != Backend::Kvm
    }

    /// The machine of a host whose guest-physical addresses have so many bits; it has tables of its own.
    ///
    /// # Errors
    /// [`Failure::Usage`]: something was asked for that cannot be chosen there.
    #[cfg(all(target_os = "linux", target_arch = "x86_64"))]
    pub(crate) fn of_host(&self, address_bits: u32) -> Result<Self, Failure> {
        let refused = [
            (self.arch.is_some(), "--arch: the host's CPU has the tables that it has"),
            (self.granule.is_some(), "--granule: pages of an x86 host have 4K"),
            (
                self.ipa_bits.is_some(),
                "--ipa-bits: the host's CPU has the width that it has; -m chooses a smaller one",
            ),
            (self.fwb, "--fwb: a feature of Arm"),
            (
                self.hardware_access.is_some(),
                "--hardware-access: a parameter of the host's modules; slat kvm-info shows it",
            ),
            (
                self.clock == Some(Clock::Virtual),
                "--clock virtual: a real host takes the time it takes",
            ),
            (self.exits, "--exits: KVM does not tell them by reason and time; perf kvm stat does"),
        ];
        match refused.into_iter().find(|(given, _)| *given) {
            Some((_, why)) => Err(Failure::Usage(format!("--backend kvm {why}"))),
            None => Ok(Self { ipa_bits: Some(address_bits.clamp(32, 52)), ..self.clone() }),
        }
    }

    /// Whose tables, Arm's if nobody says anything.
    pub(crate) fn arch(&self) -> Arch {
        self.arch.unwrap_or_default()
    }

    /// Of the tables and the host, 4K if nobody says anything.
    pub(crate) fn granule(&self) -> GranuleSize {
        self.granule.unwrap_or(GranuleSize::K4)
    }

    /// The clock that was asked for, or else `default`.
    pub(crate) fn clock_or(&self, default: Clock) -> Clock {
        self.clock.unwrap_or(default)
    }

    /// A machine with tables of 4K and what it has if nobody says anything.
    pub(crate) fn plain(arch: Arch) -> Self {
        Self {
            on: BackendOption::default(),
            arch: Some(arch),
            granule: None,
            ipa_bits: None,
            fwb: false,
            hardware_access: None,
            clock: None,
            exits: false,
        }
    }

    /// Whether hardware sets the access flag, if no log asks for more.
    pub(crate) fn hardware_access(&self) -> bool {
        self.hardware_access.map_or(self.arch().has_flags(), |switch| switch == Switch::On)
    }

    /// Refuses hardware's dirty state, which `log` asked for, where its access flag was forbidden. Under EPT a log without
    /// dirty flags is kept by write-protection.
    ///
    /// # Errors
    /// [`Failure::Usage`].
    pub(crate) fn allow_hardware_dirty(&self, log: &str) -> Result<(), Failure> {
        let why = "FEAT_HAFDBS keeps dirty state only where it sets the access flag too; leave --hardware-access out";
        match self.hardware_access {
            Some(Switch::Off) if self.arch() == Arch::Arm => {
                Err(Failure::Usage(format!("{log} --hardware-access off: {why}")))
            }
            _ => Ok(()),
        }
    }
}

/// What is printed.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Output")]
pub(crate) struct OutputOptions {
    /// One JSON object instead of the table
    #[arg(long)]
    pub(crate) json: bool,
}

/// Whether the machine has a feature.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Switch {
    Off,
    On,
}

/// Which time is measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Clock {
    Real,
    Virtual,
    /// A nanosecond for each instruction of the guest and its hypervisor; no choice of --clock.
    #[value(skip)]
    Instructions,
}

/// A value, or the wish to see all of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum OrHelp<T> {
    Help,
    Value(T),
}

impl<T: FromStr> FromStr for OrHelp<T> {
    type Err = T::Err;

    fn from_str(text: &str) -> Result<Self, T::Err> {
        if text == "help" { Ok(Self::Help) } else { text.parse().map(Self::Value) }
    }
}

/// How much is split at once, ahead of write faults.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum EagerSplit {
    Off,
    Chunk(Size),
}

impl FromStr for EagerSplit {
    type Err = SizeError;

    /// `off`, or 0 as in the kernel, or a size.
    fn from_str(text: &str) -> Result<Self, SizeError> {
        match text {
            "off" => Ok(Self::Off),
            _ => {
                text.parse().map(|size| if size == Size(0) { Self::Off } else { Self::Chunk(size) })
            }
        }
    }
}

impl EagerSplit {
    /// Bytes, where there are any.
    pub(crate) fn chunk(self) -> Option<Size> {
        match self {
            Self::Off => None,
            Self::Chunk(size) => Some(size),
        }
    }
}

impl fmt::Display for EagerSplit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str("off"),
            Self::Chunk(size) => size.fmt(f),
        }
    }
}

impl Serialize for EagerSplit {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.chunk().serialize(serializer)
    }
}

fn address(text: &str) -> Result<u64, String> {
    let parsed = match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    };
    parsed.map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn help_is_a_wish_and_everything_else_a_value() {
        assert_eq!("help".parse(), Ok(OrHelp::<GuestMode>::Help));
        assert!(matches!("6".parse::<OrHelp<GuestMode>>(), Ok(OrHelp::Value(_))));
        assert!("helped".parse::<OrHelp<GuestMode>>().is_err());
        assert!(matches!("shmem".parse::<OrHelp<Backing>>(), Ok(OrHelp::Value(_))));
    }

    #[test]
    fn eager_split_is_off_or_a_size() {
        assert_eq!("off".parse(), Ok(EagerSplit::Off));
        assert_eq!("0".parse(), Ok(EagerSplit::Off));
        assert_eq!("2M".parse(), Ok(EagerSplit::Chunk(Size(2 << 20))));
        assert_eq!("on".parse::<EagerSplit>(), Err(SizeError::Form));
    }

    #[test]
    fn addresses_are_decimal_or_hexadecimal() {
        assert_eq!(address("4096"), Ok(4096));
        assert_eq!(address("0xff000000"), Ok(0xff00_0000));
        assert_eq!(address("0XFF"), Ok(255));
        assert!(address("ff").is_err() && address("0x").is_err() && address("").is_err());
    }
}
