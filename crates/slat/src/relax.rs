//! Relaxing: adding permissions to leaves; and the software bits, which hardware ignores.

use core::marker::PhantomData;

use crate::change::Change;
use crate::machine::Machine;
use crate::{Error, Format, GpaRange, Participant, Template, Tree};

struct Relax<F> {
    template: u64,
    format: PhantomData<F>,
}

impl<F: Format> Change for Relax<F> {
    const INVALIDATES: bool = false;
    const EXACT: bool = true;

    #[inline(always)]
    fn interest(&self) -> u64 {
        u64::MAX
    }

    #[inline(always)]
    fn apply(&self, leaf: u64) -> u64 {
        F::relaxed(leaf, self.template)
    }
}

struct Software<F> {
    clear: u64,
    set: u64,
    format: PhantomData<F>,
}

impl<F: Format> Change for Software<F> {
    const INVALIDATES: bool = false;
    const EXACT: bool = true;

    #[inline(always)]
    fn interest(&self) -> u64 {
        u64::MAX
    }

    #[inline(always)]
    fn apply(&self, leaf: u64) -> u64 {
        leaf & !self.clear | self.set
    }
}

impl<F: Format, M: Machine> Tree<'_, F, M> {
    /// Adds the permissions of `template` (and its access flag) to every leaf that `range` touches; takes nothing away
    /// and changes nothing else. Returns how many leaves changed.
    ///
    /// A CPU that has the narrower translation cached faults once more and finds the permission there
    /// ([`install`](Self::install) then invalidates on that CPU): nothing is invalidated here.
    ///
    /// # Errors
    /// [`Error::OutOfRange`], [`Error::Misaligned`]; nothing was changed then.
    pub fn relax(
        &self,
        who: &Participant<'_, M>,
        range: GpaRange,
        template: Template,
    ) -> Result<u64, Error> {
        self.check_template(template)?;
        self.check(range)?;
        let relax = Relax::<F> { template: template.0, format: PhantomData };
        self.change(who, range, relax).map(|(_, leaves)| leaves)
    }

    /// Clears and then sets software bits (0 to 15 each) in every leaf that `range` touches. Hardware does not see
    /// them: nothing is invalidated. Returns how many leaves changed.
    ///
    /// # Errors
    /// [`Error::OutOfRange`], [`Error::Misaligned`]; nothing was changed then.
    pub fn set_software(
        &self,
        who: &Participant<'_, M>,
        range: GpaRange,
        clear: u8,
        set: u8,
    ) -> Result<u64, Error> {
        self.check(range)?;
        let bits = |value: u8| u64::from(value & 15) << F::SOFTWARE_SHIFT;
        let software = Software::<F> { clear: bits(clear), set: bits(set), format: PhantomData };
        self.change(who, range, software).map(|(_, leaves)| leaves)
    }
}
