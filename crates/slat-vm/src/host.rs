//! What the host gives: the page behind an address, and an ear for what the guest did to it.

use core::fmt;

use slat::Hpa;

use crate::Hva;

/// What a guest wants to do.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Access {
    /// Load.
    Read,
    /// Store, or load and store at once.
    Write,
    /// Fetch an instruction.
    Execute,
}

/// The host's page behind an address.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct HostPage {
    /// Where the page begins, also if the address lies further on in it: a multiple of `size`.
    pub output: Hpa,
    /// Bytes of the page, a power of two and at least one granule. Host addresses are congruent: the byte at `hva`
    /// lies at `output + hva % size`.
    pub size: u64,
    /// Whether the guest may write to it. Always, if the page was asked for with [`Access::Write`].
    pub writable: bool,
    /// Whether it is device registers: mapped in single pages, without caching, never executable.
    pub device: bool,
}

/// Why the host gives no page.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum HostError {
    /// There is nothing at this address.
    NotMapped,
    /// There is a page, but it must not be written.
    NotWritable,
    /// The memory behind it is broken (poisoned).
    Poisoned,
    /// The host has no memory for it.
    NoMemory,
    /// Something came between; let the guest run again. [`Vcpu::fault`](crate::Vcpu::fault) makes
    /// [`Exit::Retry`](crate::Exit::Retry) of it.
    Again,
}

impl fmt::Display for HostError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotMapped => "the host has nothing mapped there",
            Self::NotWritable => "the host does not let this page be written",
            Self::Poisoned => "the memory behind it is broken",
            Self::NoMemory => "the host has no memory for the page",
            Self::Again => "the host was interrupted: try again",
        })
    }
}

impl core::error::Error for HostError {}

/// The memory behind a guest, as the embedder's host manages it.
pub trait Host: Sync {
    /// Which page backs `hva`, for this access. May block (to fetch the page, to break a copy-on-write); never called
    /// while pinned.
    ///
    /// What it answers may be outdated before it is used: whoever takes pages back announces it with
    /// [`Vm::invalidate_begin`](crate::Vm::invalidate_begin), and an answer from before the end is not used then.
    /// Between begin and end it may answer old or new.
    ///
    /// # Errors
    /// Why there is no page.
    fn page(&self, hva: Hva, access: Access) -> Result<HostPage, HostError>;

    /// The page behind `hva` if the host has it at hand, for pages that are mapped round the one of a fault
    /// ([`VmOptions::fault_around`](crate::VmOptions)). Must neither block nor change anything: no page is fetched and
    /// no copy broken, and `writable` says whether a write needs neither. As outdated as the answer of
    /// [`page`](Self::page) may be.
    fn present(&self, hva: Hva) -> Option<HostPage> {
        let _ = hva;
        None
    }

    /// The guest can now write to `size` bytes from `hva` without a fault. Called after a fault that made it so, before
    /// the guest resumes; not while pinned. Another vCPU may write sooner: a host that drops clean pages must take a page
    /// for written from when [`page`](Self::page) has answered `writable`, until it has taken the page back.
    fn dirtied(&self, hva: Hva, size: u64) {
        let _ = (hva, size);
    }

    /// The guest can now reach `size` bytes from `hva`. Called as [`dirtied`](Self::dirtied).
    fn accessed(&self, hva: Hva, size: u64) {
        let _ = (hva, size);
    }
}
