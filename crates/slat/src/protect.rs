//! Write-protect: after it, a write to the range faults.

use core::marker::PhantomData;

use crate::change::Change;
use crate::machine::{Event, Machine, Promise};
use crate::{Error, Format, Gpa, GpaRange, Participant, Tree};

/// With `MASKED`, of those of 64 pages from `first` on whose bit is set in `mask`. The walk keeps between the first and
/// the last of them.
struct WriteProtect<F, S, const MASKED: bool> {
    first: u64,
    mask: u64,
    dirty: S,
    format: PhantomData<F>,
}

impl<F: Format, S: FnMut(GpaRange), const MASKED: bool> Change for WriteProtect<F, S, MASKED> {
    const INVALIDATES: bool = true;
    const SELECTS: bool = MASKED;
    const EXACT: bool = true;

    #[inline(always)]
    fn interest(&self) -> u64 {
        F::WRITE
    }

    #[inline(always)]
    fn apply(&self, leaf: u64) -> u64 {
        leaf & !F::WRITE
    }

    #[inline(always)]
    fn covers(&self, start: u64, end: u64) -> bool {
        if !MASKED {
            return true;
        }
        let skip = (start - self.first) >> F::PAGE_SHIFT;
        let pages = (end - start) >> F::PAGE_SHIFT;
        self.mask >> skip & (u64::MAX >> (64 - pages)) != 0
    }

    #[inline(always)]
    fn seen(&mut self, leaf: u64, start: u64, end: u64) {
        if F::is_dirty(leaf)
            && let Some(range) = GpaRange::new(Gpa(start), end - start)
        {
            (self.dirty)(range);
        }
    }
}

impl<F: Format, M: Machine> Tree<'_, F, M> {
    /// Takes the permission to write from every leaf that `range` touches, and from hardware the licence to give it
    /// back (DBM). A block that reaches beyond the range loses it as a whole: split it first if that is too much.
    /// Returns how many leaves changed; `dirty` hears of each that hardware had marked dirty, a mark which goes too, and must neither
    /// panic nor use the tree.
    ///
    /// When it returns, no CPU has a translation in its TLB that lets a write through, also where another thread has
    /// changed the entry (rule 9). Costs a load an unchanged entry, half a 16-byte exchange a changed one, and one
    /// invalidation.
    ///
    /// # Errors
    /// [`Error::OutOfRange`], [`Error::Misaligned`], [`Error::OtherMachine`]; nothing was changed then.
    pub fn write_protect(
        &self,
        who: &Participant<'_, M>,
        range: GpaRange,
        dirty: impl FnMut(GpaRange),
    ) -> Result<u64, Error> {
        self.check(range)?;
        let (first, mask, format) = (0, 0, PhantomData);
        let change = WriteProtect::<F, _, false> { first, mask, dirty, format };
        self.protect(who, range, change, Promise::ReadOnly(range))
    }

    /// Write-protects those of 64 pages from `first` on whose bit is set in `mask`, bit 0 the first page: one section
    /// of a dirty bitmap in one walk, with one invalidation. Returns and promises what
    /// [`write_protect`](Self::write_protect) does.
    ///
    /// # Errors
    /// [`Error::OutOfRange`], [`Error::Misaligned`] for the pages from the first set bit to the last;
    /// [`Error::OtherMachine`]; nothing was changed then.
    pub fn write_protect_mask(
        &self,
        who: &Participant<'_, M>,
        first: Gpa,
        mask: u64,
        dirty: impl FnMut(GpaRange),
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
            return self.write_protect(who, range, dirty);
        }
        self.check(range)?;
        let page_size = self.geometry().page_size();
        let promise = Promise::ReadOnlyPages { first, mask, page_size };
        let (first, format) = (first.0, PhantomData);
        let change = WriteProtect::<F, _, true> { first, mask, dirty, format };
        self.protect(who, range, change, promise)
    }

    #[inline(always)]
    fn protect(
        &self,
        who: &Participant<'_, M>,
        range: GpaRange,
        change: impl Change,
        promise: Promise,
    ) -> Result<u64, Error> {
        self.machine.observe(Event::Begin);
        let result = self.change(who, range, change);
        self.machine.observe(Event::End(if result.is_ok() { promise } else { Promise::Nothing }));
        result.map(|(_, leaves)| leaves)
    }
}
