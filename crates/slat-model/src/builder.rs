//! How a machine is described before it is made.

use std::{fmt, io};

use slat::Hpa;

use crate::arm::registers::Features;
use crate::checker::OnViolation;
use crate::model::Model;
use crate::physical::Physical;
use crate::regime::Architecture;
use crate::tables::{MAX_ROOT_ORDER, Tables};

const GIB: u64 = 1 << 30;

/// Describes a [`Model`]. Without any call: 4 KiB tables, up to 262144 of them, 1 CPU, 16 participant slots, rules
/// checked, stop at the first violation.
#[derive(Clone, Debug)]
pub struct Builder {
    pub(crate) page_shift: u32,
    pub(crate) cpus: usize,
    pub(crate) slots: usize,
    pub(crate) checked: bool,
    pub(crate) on_violation: OnViolation,
    pub(crate) architecture: Architecture,
    pub(crate) features: Features,
    pub(crate) memory_limit: Option<u64>,
    table_limit: u32,
    table_base: Hpa,
    warm_tables: u32,
}

impl Default for Builder {
    fn default() -> Self {
        Self {
            page_shift: 12,
            cpus: 1,
            slots: 16,
            checked: true,
            on_violation: OnViolation::default(),
            architecture: Architecture::default(),
            features: Features::default(),
            memory_limit: None,
            table_limit: 1 << 18,
            table_base: Hpa(GIB),
            warm_tables: 0,
        }
    }
}

/// Why a machine cannot be made.
#[derive(Debug)]
pub enum BuildError {
    /// log2 of the granule is none of 12, 14 and 16.
    PageShift(u32),
    /// The table memory does not begin at a positive multiple of 1 GiB, or leaves no room for host memory below 2^52.
    TableBase(Hpa),
    /// The physical address width is not between 32 and 52 bits.
    AddressBits(u32),
    /// The operating system gave no table memory.
    System(io::Error),
}

impl fmt::Display for BuildError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PageShift(shift) => {
                write!(f, "no granule has {shift} bits: 12, 14 and 16 are possible")
            }
            Self::TableBase(base) => {
                write!(
                    f,
                    "table memory cannot begin at {base}: give a multiple of 1 GiB below 2^52"
                )
            }
            Self::AddressBits(bits) => write!(f, "{bits} is no physical address width: 32 to 52"),
            Self::System(error) => write!(f, "the operating system gave no table memory: {error}"),
        }
    }
}

impl std::error::Error for BuildError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::System(error) => Some(error),
            _ => None,
        }
    }
}

impl Builder {
    /// log2 of the granule: 12, 14 or 16, as `Format::PAGE_SHIFT` says.
    pub fn page_shift(mut self, shift: u32) -> Self {
        self.page_shift = shift;
        self
    }

    /// How many CPUs there are to run guests on.
    pub fn cpus(mut self, cpus: usize) -> Self {
        self.cpus = cpus;
        self
    }

    /// How many participants can be registered at once.
    pub fn slots(mut self, slots: usize) -> Self {
        self.slots = slots;
        self
    }

    /// Whether the rules are checked. Without, only what makes no sense at all is reported, and the machine is fast.
    pub fn checked(mut self, checked: bool) -> Self {
        self.checked = checked;
        self
    }

    /// What happens at a violation.
    pub fn on_violation(mut self, what: OnViolation) -> Self {
        self.on_violation = what;
        self
    }

    /// Whose table walkers the CPUs have; Arm's without this.
    pub fn architecture(mut self, architecture: Architecture) -> Self {
        self.architecture = architecture;
        self
    }

    /// What the CPUs implement.
    pub fn features(mut self, features: Features) -> Self {
        self.features = features;
        self
    }

    /// How many tables there are at most. Only address space is reserved for them.
    pub fn table_limit(mut self, tables: u32) -> Self {
        self.table_limit = tables;
        self
    }

    /// How many tables have real memory from the beginning; the others take it when they are first used, which costs
    /// time that a measurement sees.
    pub fn warm_tables(mut self, tables: u32) -> Self {
        self.warm_tables = tables;
        self
    }

    /// Where table memory begins in host-physical space: a multiple of 1 GiB, not zero. Host memory follows it. The
    /// default is 1 GiB.
    pub fn table_base(mut self, base: Hpa) -> Self {
        self.table_base = base;
        self
    }

    /// How many bytes of host memory there may be, instead of what this computer has available: more, if most of it
    /// will never be touched, or less.
    pub fn memory_limit(mut self, bytes: u64) -> Self {
        self.memory_limit = Some(bytes);
        self
    }

    /// Makes the machine.
    ///
    /// # Errors
    /// [`BuildError`] says which setting cannot be had.
    pub fn build(&self) -> Result<Model, BuildError> {
        if ![12, 14, 16].contains(&self.page_shift) {
            return Err(BuildError::PageShift(self.page_shift));
        }
        if !(32..=52).contains(&self.features.address_bits) {
            return Err(BuildError::AddressBits(self.features.address_bits));
        }
        let base = self.table_base;
        let bad_base = BuildError::TableBase(base);
        if base.0 == 0 || !base.0.is_multiple_of(GIB) || base.0 >= 1 << 52 {
            return Err(bad_base);
        }
        // A whole number of the largest roots, so that the last one is aligned.
        let capacity = self.table_limit.next_multiple_of(1 << MAX_ROOT_ORDER);
        let end = base.0 + (u64::from(capacity) << self.page_shift);
        let host = end.next_multiple_of(GIB) + GIB;
        // The index by address has two bytes for each GiB; 16 TiB are enough for a machine.
        let host_end = (host + (16 << 40)).min(1 << 52);
        if host_end <= host {
            return Err(bad_base);
        }
        let tables = Tables::new(base, self.page_shift, capacity).map_err(BuildError::System)?;
        tables.warm(self.warm_tables);
        Ok(Model::assemble(self, tables, Physical::new(Hpa(host), host_end)))
    }
}
