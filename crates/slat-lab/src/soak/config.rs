//! What VM a round has, drawn from its seed.

use std::fmt;

use slat::FormatError;
use slat::format::arm::{Granule, Stage2};
use slat::format::ept::{Ept, InHardware, InSoftware};
use slat::format::npt::Npt;
use slat_model::{Features, Modelled};
use slat_vm::VmOptions;

use crate::arch::{Arch, Kind};
use crate::backing::{Backing, Pages};
use crate::granule::GranuleSize;
use crate::random::Dice;

/// Width of guest-physical addresses.
const IPA_BITS: u32 = 40;
/// The stream of dice that architectures are drawn from.
const ARCHITECTURES: u32 = u32::MAX - 2;

/// One round's VM.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Config {
    pub(crate) arch: Arch,
    pub(crate) granule: GranuleSize,
    pub(crate) backing: Backing,
    pub(crate) vcpus: u32,
    pub(crate) workers: u32,
    /// Memslots that are there, or come back.
    pub(crate) slots: u32,
    /// Pages of a memslot.
    pub(crate) pages: u64,
    /// Pages by which guest addresses are off from where host blocks begin: nothing is mapped in blocks then.
    pub(crate) shift: u64,
    eager_split: bool,
    /// Pages that are mapped round that of a fault.
    fault_around: u32,
    dirty_rings: bool,
    coherent_instructions: bool,
    fwb: bool,
    xnx: bool,
    hardware_access: bool,
    hardware_dirty: bool,
    block_change: bool,
    tlb_range: bool,
}

impl Config {
    /// The VM of a seed, for so many threads: of one architecture, or of any.
    pub(crate) fn draw(seed: u64, threads: u32, arch: Option<Arch>) -> Self {
        let dice = &mut Dice::new(seed, 0);
        let granules = [GranuleSize::K4, GranuleSize::K4, GranuleSize::K16, GranuleSize::K64];
        let granule = granules[dice.below(4) as usize];
        let archs = [Arch::Arm, Arch::Arm, Arch::Ept, Arch::Npt];
        let drawn = archs[Dice::new(seed, ARCHITECTURES).below(4) as usize];
        let arch = arch.unwrap_or(drawn);
        let x86 = arch != Arch::Arm;
        let granule = if x86 { GranuleSize::K4 } else { granule };
        let pages = [Pages::Base, Pages::Transparent, Pages::Transparent, Pages::Huge];
        let backing = Backing { shared: dice.happens(20), pages: pages[dice.below(4) as usize] };
        let block = granule.huge_page_size().0 / granule.page_size().0;
        let vcpus = threads.div_ceil(2);
        Self {
            arch,
            granule,
            backing,
            vcpus,
            workers: threads - vcpus,
            slots: 1 + dice.below(4) as u32,
            // About a block with both ends inside of another one, or less than one.
            pages: if dice.happens(75) {
                block + 1 + dice.below(block / 2)
            } else {
                70 + dice.below(100)
            },
            shift: if dice.happens(20) { 1 + dice.below(block - 1) } else { 0 },
            eager_split: dice.happens(50),
            coherent_instructions: dice.happens(30) || x86,
            fwb: dice.happens(50) && !x86,
            xnx: dice.happens(50) && !x86,
            hardware_access: dice.happens(50) || arch == Arch::Npt,
            hardware_dirty: dice.happens(30),
            block_change: dice.happens(30) && !x86,
            tlb_range: dice.happens(70) && !x86,
            fault_around: if dice.happens(30) { 16 } else { 1 },
            dirty_rings: dice.happens(60),
        }
    }

    /// Bytes of a page.
    pub(crate) fn page_size(&self) -> u64 {
        self.granule.page_size().0
    }

    /// Bytes from one slot's guest or host addresses to the next one's: whole blocks, and room for the shift.
    pub(crate) fn span(&self) -> u64 {
        let block = self.granule.huge_page_size().0;
        (self.pages * self.page_size()).next_multiple_of(block) + block
    }

    /// What the CPUs of the machine have.
    pub(crate) fn features(&self) -> Features {
        let &Self { fwb, xnx, block_change, tlb_range, .. } = self;
        Features { fwb, xnx, block_change, tlb_range, ..Features::default() }
    }

    /// Whether hardware sets access flags.
    fn has_flags(&self) -> bool {
        self.hardware_access || self.hardware_dirty
    }

    /// The tables' format.
    pub(crate) fn kind(&self) -> Kind {
        match self.arch {
            Arch::Arm => Kind::Arm(self.granule),
            Arch::Ept if self.has_flags() => Kind::Ept,
            Arch::Ept => Kind::EptWithoutFlags,
            Arch::Npt => Kind::Npt,
        }
    }

    /// What the VM is told.
    pub(crate) fn options(&self) -> VmOptions {
        VmOptions {
            eager_split: self.eager_split.then_some(self.granule.huge_page_size().0),
            coherent_instructions: self.coherent_instructions,
            coherent_data: self.fwb || self.arch != Arch::Arm,
            fault_around: self.fault_around,
            // So small that they are full now and then.
            dirty_ring: self.dirty_rings.then_some(256),
            ..VmOptions::default()
        }
    }
}

/// A format that rounds are played on.
pub(crate) trait Soaked: Modelled {
    /// As the round's VM has it.
    ///
    /// # Errors
    /// Why there is none.
    fn of(config: &Config) -> Result<Self, FormatError>;
}

impl<G: Granule> Soaked for Stage2<G> {
    fn of(config: &Config) -> Result<Self, FormatError> {
        let format = Self::new(IPA_BITS)?.with_fwb(config.fwb).with_xnx(config.xnx);
        Ok(format
            .with_hardware_access(config.has_flags())
            .with_hardware_dirty(config.hardware_dirty))
    }
}

impl Soaked for Ept<InHardware> {
    fn of(config: &Config) -> Result<Self, FormatError> {
        Ok(Self::new(IPA_BITS)?.with_hardware_dirty(config.hardware_dirty))
    }
}

impl Soaked for Ept<InSoftware> {
    fn of(_: &Config) -> Result<Self, FormatError> {
        Self::new(IPA_BITS)
    }
}

impl Soaked for Npt {
    fn of(config: &Config) -> Result<Self, FormatError> {
        Ok(Self::new(IPA_BITS)?.with_hardware_dirty(config.hardware_dirty))
    }
}

impl fmt::Display for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let &Self { granule, backing, vcpus, workers, slots, pages, shift, .. } = self;
        let tables = match self.arch {
            Arch::Arm => format!("{} granule", granule.page_size()),
            x86 => x86.to_string().to_uppercase(),
        };
        write!(f, "{tables}, {backing}, {vcpus} vCPUs, {workers} workers, ")?;
        write!(f, "memslots {slots} x {pages} pages")?;
        if shift > 0 {
            write!(f, " shifted by {shift}")?;
        }
        let features = [
            (self.eager_split, "eager split"),
            (self.fault_around > 1, "fault-around"),
            (self.dirty_rings, "dirty rings"),
            (self.coherent_instructions, "DIC"),
            (self.fwb, "FWB"),
            (self.xnx, "XNX"),
            (self.has_flags(), "HAF"),
            (self.hardware_dirty, "DBM"),
            (self.block_change, "BBM"),
            (self.tlb_range, "TLBI range"),
        ];
        features.iter().filter(|(on, _)| *on).try_for_each(|(_, name)| write!(f, ", {name}"))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn rounds_have_every_granule_and_backing_and_each_feature_on_and_off() {
        let configs: Vec<_> = (0..300).map(|seed| Config::draw(seed, 4, None)).collect();
        let all: BTreeSet<_> = configs
            .iter()
            .flat_map(|config| {
                config.to_string().split(", ").map(str::to_owned).collect::<Vec<_>>()
            })
            .collect();
        for wanted in [
            "4K granule",
            "16K granule",
            "64K granule",
            "EPT",
            "NPT",
            "anonymous",
            "shmem",
            "anonymous_thp",
            "anonymous_hugetlb",
            "shared_hugetlb",
            "eager split",
            "fault-around",
            "dirty rings",
            "DIC",
            "FWB",
            "XNX",
            "HAF",
            "DBM",
            "BBM",
            "TLBI range",
        ] {
            assert!(all.contains(wanted), "{wanted}");
        }
        for feature in [
            "eager split",
            "fault-around",
            "dirty rings",
            "DIC",
            "FWB",
            "XNX",
            "HAF",
            "DBM",
            "BBM",
            "TLBI range",
        ] {
            assert!(
                configs.iter().any(|config| !config.to_string().contains(feature)),
                "{feature}"
            );
        }
        assert!((1..=4).all(|slots| configs.iter().any(|config| config.slots == slots)));
        assert!(configs.iter().any(|config| config.shift > 0));
    }

    #[test]
    fn half_of_the_threads_are_vcpus() {
        for (threads, vcpus) in [(2, 1), (3, 2), (4, 2), (64, 32)] {
            let config = Config::draw(1, threads, None);
            assert_eq!((config.vcpus, config.vcpus + config.workers), (vcpus, threads));
        }
    }
}
