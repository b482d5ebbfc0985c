//! Guest memory as a whole: the trees, the slots, and what goes on with them.

use core::fmt;

use alloc::vec::Vec;

use slat::{Format, FormatError, Level, Machine, NoMemory, NoSlot, Template, Tree};

use crate::hands::Hands;
use crate::heap::{OutOfMemory, with_room};
use crate::progress::Progress;
use crate::slots::Slots;
use crate::template::{LeafKind, Templates};
use crate::transit::Transit;
use crate::{Host, Vcpu, Worker};

/// What an embedder chooses for a VM.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct VmOptions {
    /// How many address spaces the guest has, each with its own slots and its own tree: 1 to 64. A second one is what
    /// x86 needs for system management mode. The trees take as many identifiers, from the VM's own on.
    pub address_spaces: u16,
    /// Split blocks ahead of the faults that a dirty log causes, this many bytes at a time; a block size of the format.
    /// `None`: each block is split by the first write to it. The tables for one chunk are allocated at once.
    pub eager_split: Option<u64>,
    /// Instruction fetches see stores to memory without maintenance (Arm: `CTR_EL0.DIC`; x86 always). Then pages are
    /// executable from the start; otherwise only after an execute fault has called
    /// [`Machine::sync_instructions`].
    pub coherent_instructions: bool,
    /// The guest cannot bypass the data caches (Arm: FEAT_S2FWB; x86 always). Otherwise [`Machine::clean_data`] is
    /// called for memory that is newly mapped.
    pub coherent_data: bool,
    /// After a fault for a page, the pages round it in an aligned window of so many are mapped too, as far as the host
    /// [has them present](Host::present): a power of two, at most the entries of a table; 1 for none. Their access flag
    /// stays clear where hardware sets it. Not after writes under a log that protects pages.
    pub fault_around: u32,
    /// The window of fault-around adapts, for each vCPU by itself: it begins as `fault_around` says, grows to at most so
    /// many pages while what it maps ahead is used, and shrinks, to one page if need be, when access flags say that it is
    /// not. A power of two, at most the entries of a table. `None`: it stays as it is, as it does where hardware sets no
    /// access flags.
    pub adaptive_around: Option<u32>,
    /// Each vCPU has a dirty ring of so many entries, for logs of [`LogMode::Ring`](crate::LogMode): a power of two, 256
    /// to 65536.
    pub dirty_ring: Option<u32>,
}

impl Default for VmOptions {
    /// One address space, fault-around of eight pages (if the [host](Host::present) has them), no rings, caches that are not
    /// coherent.
    fn default() -> Self {
        Self {
            address_spaces: 1,
            eager_split: None,
            coherent_instructions: false,
            coherent_data: false,
            fault_around: AROUND,
            adaptive_around: None,
            dirty_ring: None,
        }
    }
}

/// The most address spaces of one VM.
const MAX_SPACES: u16 = 64;
/// Pages that are mapped for one fault unless something else is asked for; tables of models have two entries.
const AROUND: u32 = if cfg!(any(loom, shuttle)) { 1 } else { 8 };
/// Sizes of a dirty ring.
const RINGS: core::ops::RangeInclusive<u32> =
    if cfg!(any(loom, shuttle)) { 4..=4 } else { 256..=65536 };

/// Why a VM cannot be made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum VmError {
    /// The machine has no memory for the root tables.
    NoMemory(NoMemory),
    /// The allocator has no memory.
    OutOfMemory,
    /// The format cannot express ordinary or device memory.
    Format(FormatError),
    /// The chunk for eager split is not a block size of the format.
    EagerSplit {
        /// What was asked for, in bytes.
        chunk: u64,
        /// The smallest block, in bytes.
        smallest: u64,
        /// The largest block, in bytes.
        largest: u64,
    },
    /// Not 1 to 64 address spaces, or not as many identifiers from the VM's own on.
    AddressSpaces(u16),
    /// The window of fault-around is not a power of two, or larger than a table.
    FaultAround {
        /// What was asked for, in pages.
        pages: u32,
        /// The largest window, in pages.
        largest: u32,
    },
    /// The entries of a dirty ring are not a power of two, or not 256 to 65536.
    DirtyRing(u32),
}

impl fmt::Display for VmError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoMemory(no) => no.fmt(f),
            Self::OutOfMemory => OutOfMemory.fmt(f),
            Self::Format(error) => error.fmt(f),
            Self::EagerSplit { chunk, smallest, largest } => write!(
                f,
                "eager split in chunks of {chunk:#x} bytes: a chunk must be a block size of the format, {smallest:#x} \
                 to {largest:#x}"
            ),
            Self::AddressSpaces(spaces) => write!(
                f,
                "{spaces} address spaces: there must be 1 to {MAX_SPACES}, and as many identifiers from the first on"
            ),
            Self::FaultAround { pages, largest } => write!(
                f,
                "fault-around of {pages} pages: a window must be a power of two, 1 to {largest}"
            ),
            Self::DirtyRing(entries) => write!(
                f,
                "a dirty ring of {entries} entries: there must be a power of two, {} to {}",
                RINGS.start(),
                RINGS.end()
            ),
        }
    }
}

impl core::error::Error for VmError {}

impl From<OutOfMemory> for VmError {
    fn from(_: OutOfMemory) -> Self {
        Self::OutOfMemory
    }
}

impl From<NoMemory> for VmError {
    fn from(no: NoMemory) -> Self {
        Self::NoMemory(no)
    }
}

impl From<FormatError> for VmError {
    fn from(error: FormatError) -> Self {
        Self::Format(error)
    }
}

/// A vCPU or dirty ring of one VM, or a worker of one machine, was used with another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OtherMachine;

impl fmt::Display for OtherMachine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("this vCPU, ring or worker belongs elsewhere: use one that the VM made")
    }
}

impl core::error::Error for OtherMachine {}

/// Why there is no vCPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum VcpuError {
    /// Every participant slot of the machine is taken.
    NoSlot(NoSlot),
    /// The allocator has no memory for the dirty ring.
    OutOfMemory,
}

impl fmt::Display for VcpuError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoSlot(no) => no.fmt(f),
            Self::OutOfMemory => OutOfMemory.fmt(f),
        }
    }
}

impl core::error::Error for VcpuError {}

impl From<NoSlot> for VcpuError {
    fn from(no: NoSlot) -> Self {
        Self::NoSlot(no)
    }
}

impl From<OutOfMemory> for VcpuError {
    fn from(_: OutOfMemory) -> Self {
        Self::OutOfMemory
    }
}

/// The memory of one guest. Shared by reference between its vCPUs and its workers, who never wait for each other.
#[derive(Debug)]
pub struct Vm<'m, F: Format, M: Machine, H: Host> {
    machine: &'m M,
    /// Different for every VM: what its vCPUs and rings know it by.
    pub(crate) number: u64,
    pub(crate) host: H,
    /// One for each address space.
    trees: Vec<Tree<'m, F, M>>,
    pub(crate) slots: Slots<'m, M>,
    pub(crate) progress: Progress,
    /// Dirty state that was taken out of trees and is not in its log yet.
    pub(crate) transit: Transit,
    /// Whoever looks at the slots and then unmaps or write-protects what it found, until it has.
    pub(crate) aimed: Transit,
    pub(crate) options: VmOptions,
    templates: Templates,
}

impl<'m, F: Format, M: Machine, H: Host> Vm<'m, F, M, H> {
    /// A guest without memory. `identifier` is the VMID or ASID under which hardware caches its translations; each
    /// further address space takes the next.
    ///
    /// # Errors
    /// [`VmError`]; nothing is kept then.
    pub fn new(
        machine: &'m M,
        host: H,
        format: F,
        identifier: u16,
        options: VmOptions,
    ) -> Result<Self, VmError> {
        check(&format, &options)?;
        let spaces = options.address_spaces;
        let mut trees = with_room::<Tree<'m, F, M>>(spaces.into())?;
        for space in 0..spaces {
            let identifier = identifier.checked_add(space);
            let identifier = identifier.ok_or(VmError::AddressSpaces(spaces))?;
            trees.push(Tree::new(machine, format, identifier)?);
        }
        let templates = Templates::new(&trees[0])?;
        let slots = Slots::new(machine)?;
        let (progress, transit, aimed) = (Progress::new(0), Transit::new(), Transit::new());
        // Not one of the models' atomics: it orders nothing.
        static NUMBERS: core::sync::atomic::AtomicU64 = core::sync::atomic::AtomicU64::new(1);
        let number = NUMBERS.fetch_add(1, core::sync::atomic::Ordering::Relaxed);
        Ok(Self {
            machine,
            number,
            host,
            trees,
            slots,
            progress,
            transit,
            aimed,
            options,
            templates,
        })
    }

    /// The tree of address space 0: its root register, its geometry, and the engine's own operations.
    pub fn tree(&self) -> &Tree<'m, F, M> {
        &self.trees[0]
    }

    /// The tree of an address space, from 0; `None` if the VM has not so many.
    pub fn tree_of(&self, space: u16) -> Option<&Tree<'m, F, M>> {
        self.trees.get(usize::from(space))
    }

    /// The trees that an operation on one address space acts on.
    pub(crate) fn trees(&self, space: u16) -> &[Tree<'m, F, M>] {
        let space = usize::from(space);
        self.trees.get(space..=space).unwrap_or_default()
    }

    /// The trees that an operation on guest memory acts on, whichever address space it is in.
    pub(crate) fn all_trees(&self) -> &[Tree<'m, F, M>] {
        &self.trees
    }

    /// The machine.
    pub fn machine(&self) -> &'m M {
        self.machine
    }

    /// The host.
    pub fn host(&self) -> &H {
        &self.host
    }

    /// What was chosen when the VM was made.
    pub fn options(&self) -> &VmOptions {
        &self.options
    }

    /// A participant for a thread that maintains guest memory.
    ///
    /// # Errors
    /// [`NoSlot`] if every participant slot of the machine is taken.
    pub fn worker(&self) -> Result<Worker<'m, M>, NoSlot> {
        Worker::new(self.machine)
    }

    /// A participant for a vCPU, in address space 0, with a dirty ring if the VM has them.
    ///
    /// # Errors
    /// [`VcpuError::NoSlot`] if every participant slot of the machine is taken; [`VcpuError::OutOfMemory`].
    pub fn vcpu(&self) -> Result<Vcpu<'m, M>, VcpuError> {
        Vcpu::new(self.machine, self.number, self.options.dirty_ring)
    }

    /// Whether grace periods of this VM's machine wait for this participant's pins.
    pub(crate) fn admit(&self, machine: &M) -> Result<(), OtherMachine> {
        if core::ptr::eq(self.machine, machine) { Ok(()) } else { Err(OtherMachine) }
    }

    /// The same of a vCPU, which is one VM's.
    pub(crate) fn admit_hands(&self, hands: &Hands<'m, M>) -> Result<(), OtherMachine> {
        self.admit(hands.participant.machine())?;
        if hands.vm.is_none_or(|vm| vm == self.number) { Ok(()) } else { Err(OtherMachine) }
    }

    /// The bits for a leaf of this kind.
    pub(crate) fn template(&self, leaf: LeafKind) -> Template {
        self.templates.of(leaf)
    }
}

fn check<F: Format>(format: &F, options: &VmOptions) -> Result<(), VmError> {
    if let Some(chunk) = options.eager_split {
        check_chunk(format, chunk)?;
    }
    if !(1..=MAX_SPACES).contains(&options.address_spaces) {
        return Err(VmError::AddressSpaces(options.address_spaces));
    }
    let largest = format.geometry().entries() as u32;
    for pages in [Some(options.fault_around), options.adaptive_around].into_iter().flatten() {
        if !pages.is_power_of_two() || pages > largest {
            return Err(VmError::FaultAround { pages, largest });
        }
    }
    match options.dirty_ring {
        Some(entries) if !entries.is_power_of_two() || !RINGS.contains(&entries) => {
            Err(VmError::DirtyRing(entries))
        }
        _ => Ok(()),
    }
}

/// The sizes of blocks in bytes.
pub(crate) fn block_sizes<F: Format>(format: &F) -> impl Iterator<Item = u64> + Clone {
    (format.geometry().start().number()..Level::LAST.number())
        .filter_map(Level::new)
        .filter(|&level| format.leaf_allowed(level))
        .map(|level| format.geometry().size(level))
}

fn check_chunk<F: Format>(format: &F, chunk: u64) -> Result<(), VmError> {
    let blocks = block_sizes(format);
    if blocks.clone().any(|size| size == chunk) {
        return Ok(());
    }
    let smallest = blocks.clone().min().unwrap_or(0);
    Err(VmError::EagerSplit { chunk, smallest, largest: blocks.max().unwrap_or(0) })
}
