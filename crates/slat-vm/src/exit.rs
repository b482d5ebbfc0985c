//! What goes into a fault and what comes out of it.

use core::fmt;

use slat::gate::Requests;
use slat::{Error, Gpa, NoMemory};

use crate::slot::SlotId;
use crate::{Access, HostError, HostPage, Hva, OtherMachine};

/// An access that hardware did not let through, as it reports it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Fault {
    /// The guest-physical address, to the byte if hardware says so, otherwise to the granule.
    pub gpa: Gpa,
    /// What the guest wanted.
    pub access: Access,
    /// Why it was stopped.
    pub kind: FaultKind,
}

/// Why hardware did not let an access through.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum FaultKind {
    /// There is no translation.
    Translation,
    /// There is one that does not permit the access.
    Permission,
    /// There is one whose access flag is clear.
    AccessFlag,
}

/// What to do after a fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Exit {
    /// Enter the guest again: the access will be let through.
    Resume,
    /// Enter the guest again: it may fault once more.
    Retry,
    /// Emulate the access.
    Mmio(Mmio),
    /// The access says that the memory is private and it is shared, or the other way round: convert it with
    /// [`Vm::set_private`](crate::Vm::set_private), or refuse.
    Convert {
        /// The address, as the fault gave it.
        gpa: Gpa,
        /// What the access takes it to be.
        private: bool,
    },
    /// The dirty ring of the vCPU has to be reset before it may enter the guest again. The fault was handled, unless the
    /// ring had no entry left at all; then it comes again.
    DirtyRingFull,
    /// Tell the guest that it did something that hardware would not do.
    Abort(Abort),
}

/// Why a vCPU is not inside the guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EntryError {
    /// Something is asked of it; nothing any more if only an invalidation was.
    Requests(Requests),
    /// The vCPU belongs to another machine than this VM.
    OtherMachine,
}

impl fmt::Display for EntryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Requests(requests) => write!(f, "answer {requests:?}, and enter again"),
            Self::OtherMachine => OtherMachine.fmt(f),
        }
    }
}

impl core::error::Error for EntryError {}

impl From<OtherMachine> for EntryError {
    fn from(_: OtherMachine) -> Self {
        Self::OtherMachine
    }
}

/// Why a vCPU is not in another address space. It is in the one where it was.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum SpaceError {
    /// The VM has only the address spaces below `spaces`.
    NoSpace {
        /// How many there are.
        spaces: u16,
    },
    /// The vCPU belongs to another VM.
    OtherMachine,
}

impl fmt::Display for SpaceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoSpace { spaces } => {
                write!(f, "the VM has {spaces} address spaces, numbered from 0")
            }
            Self::OtherMachine => OtherMachine.fmt(f),
        }
    }
}

impl core::error::Error for SpaceError {}

impl From<OtherMachine> for SpaceError {
    fn from(_: OtherMachine) -> Self {
        Self::OtherMachine
    }
}

/// An access to emulate. Width, register and value are in the syndrome that the embedder has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mmio {
    /// The address, as the fault gave it.
    pub gpa: Gpa,
    /// What the guest wanted; a fetch outside of memory is for the embedder to refuse.
    pub access: Access,
    /// The read-only slot that was written to; `None` outside of every slot.
    pub slot: Option<ReadOnly>,
}

/// The read-only slot of a write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReadOnly {
    /// Its number.
    pub id: SlotId,
    /// The host address behind the guest address.
    pub hva: Hva,
}

/// What the guest did wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Abort {
    /// The address is larger than the guest's addresses are (Arm: an address size fault).
    AddressSize {
        /// The first address that is too large.
        limit: Gpa,
    },
    /// It fetched an instruction from device registers.
    ExecuteDevice,
}

/// Why a fault could not be handled. Nothing was installed and nothing was marked dirty; the same fault can be handled
/// again when the cause is gone.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum FaultError {
    /// The machine has no memory for a table.
    NoMemory(NoMemory),
    /// The host gave no page.
    Host {
        /// The guest address.
        gpa: Gpa,
        /// The host address that it was asked for.
        hva: Hva,
        /// Why.
        error: HostError,
    },
    /// The host gave a page that cannot be one: smaller than the granule, no power of two, not aligned, or read-only
    /// although it was asked for to be written.
    HostPage(HostPage),
    /// The tree refused the page, because of its address or its owner.
    Tree(Error),
    /// The vCPU belongs to another machine than this VM.
    OtherMachine,
}

impl fmt::Display for FaultError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoMemory(no) => no.fmt(f),
            Self::Host { gpa, hva, error } => {
                write!(f, "no page for guest address {gpa} at host address {hva}: {error}")
            }
            Self::HostPage(page) => write!(
                f,
                "the host gave a page of {:#x} bytes at {}{}: it must be a power of two that holds a granule, \
                 aligned, and writable if it was asked for to be written",
                page.size,
                page.output,
                if page.writable { "" } else { ", read-only" }
            ),
            Self::Tree(error) => error.fmt(f),
            Self::OtherMachine => OtherMachine.fmt(f),
        }
    }
}

impl core::error::Error for FaultError {}

impl From<OtherMachine> for FaultError {
    fn from(_: OtherMachine) -> Self {
        Self::OtherMachine
    }
}
