//! Write-protect: after it, a write to the range faults.

use core::marker::PhantomData;

use crate::change::Change;
use crate::machine::{Event, Machine, Promise};
use crate::{Error, Format, Gpa, GpaRange, Participant, Tree};

struct WriteProtect<F>(PhantomData<F>);

impl<F: Format> Change for WriteProtect<F> {
    const INVALIDATES: bool = true;
    const EXACT: bool = true;

    #[inline(always)]
    fn interest(&self) -> u64 {
        F::WRITE
    }

    #[inline(always)]
    fn apply(&self, leaf: u64) -> u64 {
        leaf & !F::WRITE
    }
}

struct WriteProtectMask<F> {
    first: u64,
    mask: u64,
    format: PhantomData<F>,
}

impl<F: Format> Change for WriteProtectMask<F> {
    const INVALIDATES: bool = true;
    const EXACT: bool = true;

    #[inline(always)]
    fn interest(&self) -> u64 {
        F::WRITE
    }

    #[inline(always)]
    fn apply(&self, leaf: u64) -> u64 {
        leaf & !F::WRITE
    }

    /// The walk keeps `start..end` between the first and the last of the 64 pages.
    #[inline(always)]
    fn covers(&self, start: u64, end: u64) -> bool {
        let skip = (start - self.first) >> F::PAGE_SHIFT;
        let pages = (end - start) >> F::PAGE_SHIFT;
        self.mask >> skip & (u64::MAX >> (64 - pages)) != 0
    }
}

impl<F: Format, M: Machine> Tree<'_, F, M> {
    /// Takes the permission to write from every leaf that `range` touches, and from hardware the licence to give it
    /// back (DBM). A block that reaches beyond the range loses it as a whole: split it first if that is too much.
    /// Returns how many leaves changed.
    ///
    /// When it returns, no CPU has a translation in its TLB that lets a write through, also where another thread has
    /// changed the entry (rule 9). Costs a load an unchanged entry, half a 16-byte exchange a changed one, and one
    /// invalidation.
    ///
    /// # Errors
    /// [`Error::OutOfRange`], [`Error::Misaligned`]; nothing was changed then.
    pub fn write_protect(&self, who: &Participant<'_, M>, range: GpaRange) -> Result<u64, Error> {
        self.check(range)?;
        self.machine.observe(Event::Begin);
        let result = self.change(who, range, WriteProtect::<F>(PhantomData));
        self.machine.observe(Event::End(Promise::ReadOnly(range)));
        result.map(|(_, leaves)| leaves)
    }

    /// Write-protects those of 64 pages from `first` on whose bit is set in `mask`, bit 0 the first page: one section
    /// of a dirty bitmap in one walk, with one invalidation. Returns how many leaves changed. The promise is that of
    /// [`write_protect`](Self::write_protect).
    ///
    /// # Errors
    /// [`Error::OutOfRange`], [`Error::Misaligned`] for the pages from the first set bit to the last.
    pub fn write_protect_mask(
        &self,
        who: &Participant<'_, M>,
        first: Gpa,
        mask: u64,
    ) -> Result<u64, Error> {
        if mask == 0 {
            return Ok(0);
        }
        let pages = 64 - mask.leading_zeros() - mask.trailing_zeros();
        let start = first.0.checked_add(u64::from(mask.trailing_zeros()) << F::PAGE_SHIFT);
        let range = start.and_then(|s| GpaRange::new(Gpa(s), u64::from(pages) << F::PAGE_SHIFT));
        let limit = self.geometry().limit();
        let range = range.ok_or(Error::OutOfRange { limit })?;
        if pages == mask.count_ones() {
            return self.write_protect(who, range);
        }
        self.check(range)?;
        self.machine.observe(Event::Begin);
        let change = WriteProtectMask::<F> { first: first.0, mask, format: PhantomData };
        let result = self.change(who, range, change);
        let page_size = self.geometry().page_size();
        self.machine.observe(Event::End(Promise::ReadOnlyPages { first, mask, page_size }));
        result.map(|(_, leaves)| leaves)
    }
}
