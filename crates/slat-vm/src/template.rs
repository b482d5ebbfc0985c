//! What leaves can permit, in the bits of the format: made once for a VM.

use slat::{Attributes, Dirty, Execute, Format, FormatError, Machine, Memory, Template, Tree};

/// The software bit of a leaf whose page the host lets be written, whatever the leaf permits now: a write fault need
/// not ask again. It goes with the leaf when the host takes the page back.
pub(crate) const HOST_WRITABLE: u8 = 1;

/// A kind of leaf.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct LeafKind {
    pub(crate) device: bool,
    /// It permits writing.
    pub(crate) write: bool,
    /// It may be made to permit writing without asking the host.
    pub(crate) host_writable: bool,
    pub(crate) execute: bool,
    /// Its access flag is clear; where permissions are added, it stays as it is.
    pub(crate) old: bool,
}

impl LeafKind {
    const KINDS: usize = 32;

    #[inline(always)]
    fn index(self) -> usize {
        let bits = [self.device, self.write, self.host_writable, self.execute, self.old];
        bits.into_iter().fold(0, |index, bit| index << 1 | usize::from(bit))
    }

    fn of(index: usize) -> Self {
        let bit = |n: u32| index >> n & 1 == 1;
        Self { device: bit(4), write: bit(3), host_writable: bit(2), execute: bit(1), old: bit(0) }
    }

    /// Where hardware keeps dirty state it does so for all ordinary memory that can be written, so that a log of it can
    /// be turned on at any time.
    fn attributes(self, tracks_dirty: bool) -> Attributes {
        let dirty = self.write && !self.device && tracks_dirty;
        Attributes {
            read: true,
            write: self.write,
            execute: if self.execute && !self.device { Execute::Yes } else { Execute::No },
            memory: if self.device { Memory::Device } else { Memory::Normal },
            accessed: !self.old,
            dirty: if dirty { Dirty::Clean } else { Dirty::Untracked },
            software: if self.host_writable { HOST_WRITABLE } else { 0 },
        }
    }
}

/// One template for each kind.
#[derive(Debug)]
pub(crate) struct Templates([Template; LeafKind::KINDS]);

impl Templates {
    /// # Errors
    /// What the format cannot express.
    pub(crate) fn new<F: Format, M: Machine>(tree: &Tree<'_, F, M>) -> Result<Self, FormatError> {
        let tracks_dirty = tree.format().tracks_dirty();
        let make = |index| tree.template(LeafKind::of(index).attributes(tracks_dirty));
        let mut templates = [make(0)?; LeafKind::KINDS];
        for (index, template) in templates.iter_mut().enumerate() {
            *template = make(index)?;
        }
        Ok(Self(templates))
    }

    #[inline]
    pub(crate) fn of(&self, leaf: LeafKind) -> Template {
        self.0[leaf.index()]
    }
}

/// Whether a leaf may be made to permit writing without asking the host.
pub(crate) fn is_host_writable(attributes: &Attributes) -> bool {
    attributes.software & HOST_WRITABLE != 0
}
