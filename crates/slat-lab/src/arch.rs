//! Whose tables a guest has: the formats that `--arch`, `--granule` and `--hardware-access` choose among.

use std::fmt;

use clap::ValueEnum;
use serde::Serialize;
use slat::FormatError;
use slat::format::arm::{Granule, Stage2};
use slat::format::ept::{Ept, InHardware, InSoftware};
use slat::format::npt::Npt;
use slat_model::{Architecture, Modelled};

use crate::granule::{self, GranuleSize};
use crate::options::MachineOptions;

/// Whose second-level tables.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Arch {
    /// Stage 2 of VMSAv8-64
    #[default]
    Arm,
    /// Intel's extended page tables
    Ept,
    /// AMD's nested page tables
    Npt,
}

impl Arch {
    /// Whether its walkers set accessed flags if nobody says anything.
    pub(crate) fn has_flags(self) -> bool {
        self != Self::Arm
    }

    /// The machine that walks them.
    pub(crate) fn of_model(self) -> Architecture {
        match self {
            Self::Arm => Architecture::Arm,
            Self::Ept => Architecture::Ept,
            Self::Npt => Architecture::Npt,
        }
    }

    /// The narrowest guest-physical addresses that its tables translate.
    pub(crate) fn least_bits(self) -> u32 {
        if self == Self::Arm { 32 } else { 40 }
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Arm => "arm",
            Self::Ept => "ept",
            Self::Npt => "npt",
        })
    }
}

/// The format of a run, of all that there are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Arm(GranuleSize),
    Ept,
    EptWithoutFlags,
    Npt,
}

impl Kind {
    /// What the options choose; that they fit together was checked.
    pub(crate) fn of(machine: &MachineOptions) -> Self {
        match machine.arch() {
            Arch::Arm => Self::Arm(machine.granule()),
            Arch::Ept if machine.hardware_access() => Self::Ept,
            Arch::Ept => Self::EptWithoutFlags,
            Arch::Npt => Self::Npt,
        }
    }
}

/// A format that workloads run on.
pub(crate) trait Tables: Modelled {
    /// For guest-physical addresses of `bits` bits, on a machine like this; `hardware_dirty` if a log may ask for dirty
    /// state, which a machine without it does not keep.
    ///
    /// # Errors
    /// Widths that the format has not.
    fn tables(
        bits: u32,
        machine: &MachineOptions,
        hardware_dirty: bool,
    ) -> Result<Self, FormatError>;
}

impl<G: Granule> Tables for Stage2<G> {
    fn tables(
        bits: u32,
        machine: &MachineOptions,
        hardware_dirty: bool,
    ) -> Result<Self, FormatError> {
        let format = granule::format::<G>(bits)?.with_xnx(true).with_fwb(machine.fwb);
        let format = format.with_hardware_access(machine.hardware_access());
        Ok(if hardware_dirty { format.with_hardware_dirty(true) } else { format })
    }
}

impl Tables for Ept<InHardware> {
    fn tables(bits: u32, _: &MachineOptions, hardware_dirty: bool) -> Result<Self, FormatError> {
        Ok(Self::new(bits)?.with_hardware_dirty(hardware_dirty))
    }
}

impl Tables for Ept<InSoftware> {
    fn tables(bits: u32, _: &MachineOptions, _: bool) -> Result<Self, FormatError> {
        Self::new(bits)
    }
}

impl Tables for Npt {
    fn tables(bits: u32, _: &MachineOptions, hardware_dirty: bool) -> Result<Self, FormatError> {
        Ok(Self::new(bits)?.with_hardware_dirty(hardware_dirty))
    }
}

/// `$body` with the type `$tables` being the format of a [`Kind`].
macro_rules! with_tables {
    ($kind:expr, $tables:ident => $body:expr) => {{
        use slat::format::arm::{K4, K16, K64, Stage2};
        use slat::format::{ept, npt};

        use $crate::arch::Kind;
        use $crate::granule::GranuleSize;
        match $kind {
            Kind::Arm(GranuleSize::K4) => {
                type $tables = Stage2<K4>;
                $body
            }
            Kind::Arm(GranuleSize::K16) => {
                type $tables = Stage2<K16>;
                $body
            }
            Kind::Arm(GranuleSize::K64) => {
                type $tables = Stage2<K64>;
                $body
            }
            Kind::Ept => {
                type $tables = ept::Ept<ept::InHardware>;
                $body
            }
            Kind::EptWithoutFlags => {
                type $tables = ept::Ept<ept::InSoftware>;
                $body
            }
            Kind::Npt => {
                type $tables = npt::Npt;
                $body
            }
        }
    }};
}
pub(crate) use with_tables;
