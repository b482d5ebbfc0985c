//! Relaxing: adding permissions to leaves; and the software bits, which hardware ignores.

use core::marker::PhantomData;

use crate::change::Change;
use crate::entry::LOCK_BIT;
use crate::machine::Machine;
use crate::rcu::bump;
use crate::{Attributes, Error, Format, Gpa, GpaRange, Level, Participant, Pin, Template, Tree};

/// What [`Tree::relax_leaf`] found and did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RelaxedLeaf {
    /// There is no leaf, or the caller wants nothing added to it: nothing was done.
    Untouched,
    /// The leaf has all of it already.
    Present,
    /// It was added.
    Relaxed,
}

struct Relax<F> {
    template: u64,
    /// Software bits that a leaf must have.
    marked: u64,
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
        let meant = leaf & self.marked == self.marked;
        if meant { F::relaxed(leaf, self.template) } else { leaf }
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
    /// Adds the permissions of `template` (and its access flag) to every leaf that `range` touches and that has all of the
    /// software bits `marked` (0 for every leaf); takes nothing away and changes nothing else. Returns how many leaves
    /// changed.
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
        marked: u8,
        template: Template,
    ) -> Result<u64, Error> {
        self.check_template(template)?;
        self.check(range)?;
        let marked = u64::from(marked & 15) << F::SOFTWARE_SHIFT;
        let relax = Relax::<F> { template: template.0, marked, format: PhantomData };
        self.change(who, range, relax).map(|(_, leaves)| leaves)
    }

    /// Adds permissions to the leaf at `gpa`, whatever it translates to: `judge` sees its level and what it permits, and
    /// says what to add. The exchange is from the very leaf that was judged, so nothing is ever installed: what a host
    /// takes back meanwhile stays gone. Returns when every table walker can see it, and invalidates on this CPU as
    /// [`install`](Self::install) does. `judge` may be asked again and must neither panic nor use the tree. Costs a
    /// descent and an exchange.
    ///
    /// # Errors
    /// [`Error::Retry`]: another thread is changing the entry, let the guest run again. [`Error::OutOfRange`],
    /// [`Error::OtherMachine`], [`Error::OtherFormat`]. Nothing was changed then.
    #[inline]
    pub fn relax_leaf(
        &self,
        pin: &Pin<'_, M>,
        gpa: Gpa,
        judge: impl Fn(Level, &Attributes) -> Option<Template>,
    ) -> Result<RelaxedLeaf, Error> {
        self.check_machine(pin.machine())?;
        self.check_address(gpa, 1)?;
        loop {
            let place = self.descend(pin, gpa, Level::LAST);
            let (old, level) = (place.entry, place.level);
            if old & LOCK_BIT != 0 {
                bump(&pin.counters().retries, 1);
                return Err(Error::Retry);
            }
            if !F::is_valid(old) {
                return Ok(RelaxedLeaf::Untouched);
            }
            let attributes = self.format.attributes(self.format.template_of(old, level));
            let Some(template) = judge(level, &attributes) else {
                return Ok(RelaxedLeaf::Untouched);
            };
            self.check_template(template)?;
            let new = F::relaxed(old, template.0);
            if new != old {
                if place.table.exchange(place.index, old, new).is_err() {
                    continue;
                }
                bump(&pin.counters().exchanged, 1);
                self.publish(pin.counters());
            }
            self.invalidate_local(pin.counters(), gpa);
            let added = if new == old { RelaxedLeaf::Present } else { RelaxedLeaf::Relaxed };
            return Ok(added);
        }
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
