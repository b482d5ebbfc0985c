//! What a CPU is told about the tables that it walks, and what a walker makes of that.

use slat::format::arm::{Granule, Stage2};
use slat::format::ept::{Ept, Flags, Violations};
use slat::format::npt::Npt;
use slat::maintenance::x86;
use slat::{Format, Machine, Tree};

use crate::arm::registers::{Features, Registers};
use crate::model::Model;
use crate::x86::registers::{EptRegisters, NptRegisters};

/// Whose table walkers and TLBs a machine has.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Architecture {
    /// VMSAv8-64 stage 2.
    #[default]
    Arm,
    /// Intel EPT.
    Ept,
    /// AMD nested page tables.
    Npt,
}

/// What a CPU is told about a guest's tables.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Control {
    /// Arm.
    Arm(Registers),
    /// Intel.
    Ept(EptRegisters),
    /// AMD.
    Npt(NptRegisters),
}

impl From<Registers> for Control {
    fn from(registers: Registers) -> Self {
        Self::Arm(registers)
    }
}

impl From<EptRegisters> for Control {
    fn from(registers: EptRegisters) -> Self {
        Self::Ept(registers)
    }
}

impl From<NptRegisters> for Control {
    fn from(registers: NptRegisters) -> Self {
        Self::Npt(registers)
    }
}

/// A format whose hardware the model has.
pub trait Modelled: Format {
    /// Whose it is.
    const ARCHITECTURE: Architecture;

    /// What a CPU must be told to use trees of this format, from [`Tree::root_register`].
    fn control(&self, root_register: u64) -> Control;

    /// What a CPU must be told to use this tree.
    fn control_of<M: Machine>(tree: &Tree<'_, Self, M>) -> Control {
        tree.format().control(tree.root_register())
    }
}

impl<G: Granule> Modelled for Stage2<G> {
    const ARCHITECTURE: Architecture = Architecture::Arm;

    fn control(&self, root_register: u64) -> Control {
        Registers { vttbr: root_register, vtcr: self.vtcr() }.into()
    }
}

impl<A: Flags, V: Violations> Modelled for Ept<A, V> {
    const ARCHITECTURE: Architecture = Architecture::Ept;

    fn control(&self, root_register: u64) -> Control {
        EptRegisters { eptp: root_register, mode_based: self.has_mode_based_execute() }.into()
    }
}

impl Modelled for Npt {
    const ARCHITECTURE: Architecture = Architecture::Npt;

    fn control(&self, root_register: u64) -> Control {
        let (ncr3, asid) = (x86::Npt::ncr3(root_register), x86::Npt::asid(root_register));
        NptRegisters { ncr3, asid, five_levels: self.geometry().start().number() < 0 }.into()
    }
}

/// How entries are read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Arm,
    /// With mode-based execute control or not.
    Ept {
        mode_based: bool,
    },
    Npt,
}

/// The registers as a table walker uses them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Regime {
    pub(crate) kind: Kind,
    /// Address of the first root table.
    pub(crate) root: u64,
    /// What translations are cached under: VMID, ASID, or a number of the EPTP's table.
    pub(crate) vmid: u16,
    pub(crate) page_shift: u32,
    pub(crate) start: i8,
    pub(crate) input_bits: u32,
    pub(crate) output_bits: u32,
    /// Arm: `VTCR_EL2.DS`, the 52-bit descriptors of the 4K and 16K granules.
    pub(crate) ds: bool,
    pub(crate) hardware_access: bool,
    pub(crate) hardware_dirty: bool,
    pub(crate) features: Features,
    /// The start level resolves the input size; otherwise every access faults at level 0.
    pub(crate) consistent: bool,
}

impl Regime {
    /// Takes apart what a CPU is told. The complaint names a setting that a hypervisor does not make; hardware still does
    /// something.
    pub(crate) fn decode(control: Control, model: &Model) -> (Self, Option<&'static str>) {
        let (features, page_shift) = (model.features, model.page_shift);
        let (regime, complaint) = match control {
            Control::Arm(registers) => Self::arm(registers, features, page_shift),
            Control::Ept(registers) => {
                let tag = model.tag_of_root(registers.table());
                Self::ept(registers, tag, features, page_shift)
            }
            Control::Npt(registers) => Self::npt(registers, features, page_shift),
        };
        let other = match control {
            Control::Arm(_) => model.architecture != Architecture::Arm,
            Control::Ept(_) => model.architecture != Architecture::Ept,
            Control::Npt(_) => model.architecture != Architecture::Npt,
        };
        (regime, complaint.or(other.then_some("the machine is of another architecture")))
    }

    /// Whether a fault removes from the CPU what it had cached for the address (Intel SDM vol. 3C, 29.4.3.1).
    pub(crate) fn fault_invalidates(&self) -> bool {
        matches!(self.kind, Kind::Ept { .. })
    }

    /// Whether one address may be cached in two sizes at once.
    pub(crate) fn tolerates_sizes(&self) -> bool {
        self.kind != Kind::Arm || self.features.block_change
    }

    /// log2 of the bytes that one entry at `level` covers.
    pub(crate) fn shift(&self, level: i8) -> u32 {
        self.page_shift + (self.page_shift - 3) * (3 - level) as u32
    }

    /// Where in its table (or in the concatenated root) the entry of `gpa` at `level` is, in bytes.
    pub(crate) fn entry_offset(&self, level: i8, gpa: u64) -> u64 {
        let index = gpa >> self.shift(level);
        if level == self.start {
            8 * index
        } else {
            8 * (index & ((1 << (self.page_shift - 3)) - 1))
        }
    }
}
