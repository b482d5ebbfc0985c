//! Looking up where a guest's page is, and using it while it is certain to stay there.

use core::fmt;

use slat::{Attributes, Error, Format, Gpa, GpaRange, Hpa, Lookup, Machine, Participant, Pin};

use crate::chunks::At;
use crate::fault::facts_at;
use crate::progress::Touch;
use crate::sabotage::{Skip, skips};
use crate::{Host, HvaRange, OtherMachine, Vm};

/// Why there is no page to use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum LookUpError {
    /// Nothing is mapped there: a fault would ask the host.
    NotMapped,
    /// The entry is being changed, or the host takes the page back: look again, unpinned in between.
    Retry,
    /// The address is larger than the guest's are.
    OutOfRange {
        /// The first address that is too large.
        limit: Gpa,
    },
    /// The participant belongs to another machine than this VM.
    OtherMachine,
}

impl fmt::Display for LookUpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotMapped => f.write_str("nothing is mapped at this guest address"),
            Self::Retry => f.write_str("the page is being changed or taken back: look again"),
            Self::OutOfRange { limit } => write!(f, "guest addresses end below {limit}"),
            Self::OtherMachine => OtherMachine.fmt(f),
        }
    }
}

impl core::error::Error for LookUpError {}

impl From<OtherMachine> for LookUpError {
    fn from(_: OtherMachine) -> Self {
        Self::OtherMachine
    }
}

/// What a guest address is mapped to.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Mapping {
    /// Where it lies.
    pub output: Hpa,
    /// Bytes of the page or block that it is mapped in; the rest of it is as congruent as its own address is.
    pub size: u64,
    /// What is permitted and noted there.
    pub attributes: Attributes,
}

impl<'m, F: Format, M: Machine, H: Host> Vm<'m, F, M, H> {
    /// Calls `f` with the host-physical address behind `gpa` in address space 0, and whether the guest may write there.
    /// During the call, and no longer, the page belongs to the guest: who takes it back waits. `f` runs pinned: it must
    /// neither allocate nor block. Costs a pin and a descent.
    ///
    /// # Errors
    /// [`LookUpError`]; `f` was not called then.
    pub fn look_up<T>(
        &self,
        who: &Participant<'_, M>,
        gpa: Gpa,
        f: impl FnOnce(Hpa, bool) -> T,
    ) -> Result<T, LookUpError> {
        self.look_up_in(who, 0, gpa, f)
    }

    /// [`look_up`](Self::look_up) in any address space.
    ///
    /// # Errors
    /// [`LookUpError`]; `f` was not called then.
    pub fn look_up_in<T>(
        &self,
        who: &Participant<'_, M>,
        space: u16,
        gpa: Gpa,
        f: impl FnOnce(Hpa, bool) -> T,
    ) -> Result<T, LookUpError> {
        self.with_mapping(who, space, gpa, |mapping| f(mapping.output, mapping.attributes.write))
    }

    /// Where `gpa` in an address space lies, and how it is mapped. Outdated as soon as it is there: good for who hears of
    /// what is taken back, from the caller of [`invalidate_begin`](Self::invalidate_begin) and the like, and can wait
    /// until then. Costs a pin and a descent.
    ///
    /// # Errors
    /// [`LookUpError`].
    pub fn mapping(
        &self,
        who: &Participant<'_, M>,
        space: u16,
        gpa: Gpa,
    ) -> Result<Mapping, LookUpError> {
        self.with_mapping(who, space, gpa, |mapping| mapping)
    }

    fn with_mapping<T>(
        &self,
        who: &Participant<'_, M>,
        space: u16,
        gpa: Gpa,
        f: impl FnOnce(Mapping) -> T,
    ) -> Result<T, LookUpError> {
        self.admit(who.machine())?;
        let tree = self.tree_of(space).ok_or(LookUpError::NotMapped)?;
        let pin = who.pin();
        let sample = self.progress.sample();
        let found = tree.look_up(&pin, gpa).map_err(|error| match error {
            Error::OutOfRange { limit } => LookUpError::OutOfRange { limit },
            _ => LookUpError::Retry,
        })?;
        let Lookup::Mapped { output, level, template } = found else {
            return Err(LookUpError::NotMapped);
        };
        // Rule 7: between the grace period of an invalidation and its unmap, the entry is still there. Where the slot
        // is gone already, its deletion has not come to the entry yet.
        let touch = || self.touch_at(&pin, space, gpa);
        if !self.progress.untouched(&pin, sample, touch) && !skips(Skip::LookUp) {
            return Err(LookUpError::Retry);
        }
        let size = tree.geometry().size(level);
        Ok(f(Mapping { output, size, attributes: tree.attributes(template) }))
    }

    /// The byte at `gpa` and what the host knows it by.
    fn touch_at(&self, pin: &Pin<'_, M>, space: u16, gpa: Gpa) -> Option<Touch> {
        let version = self.slots.read(pin).ok()?.find(space, gpa, &mut At::default())?;
        let (facts, _) = facts_at::<F>(version, gpa);
        let host = HvaRange::new(facts.hva_of(gpa), 1)?;
        Some(Touch { guest: GpaRange::new(gpa, 1)?, host })
    }
}
