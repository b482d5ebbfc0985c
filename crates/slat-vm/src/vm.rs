//! Guest memory as a whole: the trees, the slots, and what goes on with them.

use core::fmt;

use alloc::vec::Vec;

use slat::{
    Attributes, Execute, Format, FormatError, Level, Machine, NoMemory, NoSlot, Template, Tree,
};

use crate::heap::{OutOfMemory, with_room};
use crate::progress::Progress;
use crate::slots::Slots;
use crate::{Access, Host, Vcpu, Worker};

/// What an embedder chooses for a VM.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct VmOptions {
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
}

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

/// A vCPU or worker of one machine was used with a VM of another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OtherMachine;

impl fmt::Display for OtherMachine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("this vCPU or worker belongs to another machine: use one that the VM made")
    }
}

impl core::error::Error for OtherMachine {}

/// The memory of one guest. Shared by reference between its vCPUs and its workers, who never wait for each other.
#[derive(Debug)]
pub struct Vm<'m, F: Format, M: Machine, H: Host> {
    machine: &'m M,
    pub(crate) host: H,
    trees: Vec<Tree<'m, F, M>>,
    pub(crate) slots: Slots<'m, M>,
    pub(crate) progress: Progress,
    pub(crate) options: VmOptions,
    templates: Templates,
}

/// What leaves can permit, in the bits of the format.
#[derive(Debug)]
struct Templates {
    /// By whether writing, and whether executing is permitted.
    normal: [[Template; 2]; 2],
    /// By whether writing is permitted.
    device: [Template; 2],
}

impl<'m, F: Format, M: Machine, H: Host> Vm<'m, F, M, H> {
    /// A guest without memory. `identifier` is the VMID or ASID under which hardware caches its translations.
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
        if let Some(chunk) = options.eager_split {
            check_chunk(&format, chunk)?;
        }
        let mut trees = with_room::<Tree<'m, F, M>>(1)?;
        trees.push(Tree::new(machine, format, identifier)?);
        let template = |attributes| trees[0].template(attributes);
        let templates = Templates {
            normal: [
                [
                    template(Attributes::RO)?,
                    template(Attributes { execute: Execute::Yes, ..Attributes::RO })?,
                ],
                [template(Attributes::RW)?, template(Attributes::RWX)?],
            ],
            device: [
                template(Attributes { write: false, ..Attributes::DEVICE })?,
                template(Attributes::DEVICE)?,
            ],
        };
        let slots = Slots::new(machine)?;
        Ok(Self { machine, host, trees, slots, progress: Progress::new(0), options, templates })
    }

    /// The tree that vCPUs run on: its root register, its geometry, and the engine's own operations.
    pub fn tree(&self) -> &Tree<'m, F, M> {
        &self.trees[0]
    }

    /// All trees that an operation on guest memory acts on.
    pub(crate) fn trees(&self) -> &[Tree<'m, F, M>] {
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

    /// A participant for a vCPU.
    ///
    /// # Errors
    /// [`NoSlot`] if every participant slot of the machine is taken.
    pub fn vcpu(&self) -> Result<Vcpu<'m, M>, NoSlot> {
        Vcpu::new(self.machine)
    }

    /// Whether grace periods of this VM's machine wait for this participant's pins.
    pub(crate) fn admit(&self, machine: &M) -> Result<(), OtherMachine> {
        if core::ptr::eq(self.machine, machine) { Ok(()) } else { Err(OtherMachine) }
    }

    /// The bits for a leaf that permits reading, writing if `write`, and executing if the access asks for it or costs
    /// nothing.
    pub(crate) fn template(&self, device: bool, write: bool, access: Access) -> Template {
        let execute = access == Access::Execute || self.options.coherent_instructions;
        if device {
            self.templates.device[usize::from(write)]
        } else {
            self.templates.normal[usize::from(write)][usize::from(execute)]
        }
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
