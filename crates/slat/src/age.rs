//! Aging: which leaves were used since they were last asked.

use core::marker::PhantomData;

use crate::change::Change;
use crate::entry::LOCK_BIT;
use crate::machine::Machine;
use crate::maintenance::Invalidation;
use crate::rcu::bump;
use crate::{Error, Format, Gpa, GpaRange, Level, Participant, Pin, Tree};

struct Age<F> {
    clear: bool,
    young: u64,
    format: PhantomData<F>,
}

impl<F: Format> Change for Age<F> {
    const INVALIDATES: bool = false;
    const EXACT: bool = false;

    #[inline(always)]
    fn interest(&self) -> u64 {
        F::ACCESSED
    }

    #[inline(always)]
    fn apply(&self, leaf: u64) -> u64 {
        if self.clear { F::old(leaf) } else { leaf }
    }

    #[inline(always)]
    fn seen(&mut self, _: u64, _: u64, _: u64) {
        self.young += 1;
    }
}

impl<F: Format, M: Machine> Tree<'_, F, M> {
    /// Counts the leaves that `range` touches whose access flag is set, and clears it if `clear`.
    ///
    /// Nothing is invalidated: a CPU that has the translation cached goes on without setting the flag again, so an
    /// aged page may look idle a little too early. An entry that another thread is changing is passed over.
    ///
    /// # Errors
    /// [`Error::OutOfRange`], [`Error::Misaligned`].
    pub fn age(
        &self,
        who: &Participant<'_, M>,
        range: GpaRange,
        clear: bool,
    ) -> Result<u64, Error> {
        self.check(range)?;
        let age = Age::<F> { clear, young: 0, format: PhantomData };
        self.change(who, range, age).map(|(age, _)| age.young)
    }

    /// Takes every translation of `range` out of every CPU's TLB, and changes nothing in the tree: after
    /// [`age`](Self::age), so that the next use of each page sets its flag. Costs one invalidation.
    ///
    /// # Errors
    /// [`Error::OutOfRange`], [`Error::Misaligned`].
    pub fn flush(&self, who: &Participant<'_, M>, range: GpaRange) -> Result<(), Error> {
        self.check(range)?;
        self.check_machine(who.machine())?;
        // What was changed before, by others too, is seen by the walks that follow.
        self.publish(&who.counters);
        self.invalidate(&who.counters, Invalidation { range: Some(range), level: None });
        Ok(())
    }

    /// Sets the access flag of the leaf at `gpa`, for machines whose hardware does not (an access-flag fault).
    /// `Ok(false)`: there is no leaf, the caller handles a translation fault.
    ///
    /// # Errors
    /// [`Error::OutOfRange`]; [`Error::Retry`] if the entry is being changed: let the guest run again.
    pub fn mark_young(&self, pin: &Pin<'_, M>, gpa: Gpa) -> Result<bool, Error> {
        self.check_machine(pin.machine())?;
        self.check_address(gpa, 1)?;
        let place = self.descend(pin, gpa, Level::LAST);
        let mut old = place.entry;
        loop {
            if old & LOCK_BIT != 0 {
                return Err(Error::Retry);
            }
            if !F::is_valid(old) || F::is_table(old, place.level) {
                return Ok(false);
            }
            if old & F::ACCESSED != 0 {
                return Ok(true);
            }
            match place.table.exchange(place.index, old, F::young(old)) {
                Ok(()) => {
                    bump(&pin.counters().exchanged, 1);
                    self.publish(pin.counters());
                    return Ok(true);
                }
                Err(now) => old = now,
            }
        }
    }
}
