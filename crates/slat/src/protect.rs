//! Write-protect: after it, a write to the range faults.

use core::marker::PhantomData;

use crate::change::Change;
use crate::machine::{Event, Machine, Promise};
use crate::{Error, Format, Gpa, GpaRange, Participant, Tree};

/// Of all pages of the walk, or with `MASKED` of those from `first` on whose bit is set in `masks`. The walk keeps between
/// the first and the last of them.
struct WriteProtect<'a, F, S, const MASKED: bool> {
    first: u64,
    masks: &'a [u64],
    dirty: S,
    format: PhantomData<F>,
}

impl<F: Format, S, const MASKED: bool> WriteProtect<'_, F, S, MASKED> {
    /// The bits of the 64 pages from `page` on.
    #[inline(always)]
    fn bits(&self, page: u64) -> u64 {
        let word = |n| self.masks.get(n as usize).copied().unwrap_or(0);
        match page % 64 {
            0 => word(page / 64),
            skip => word(page / 64) >> skip | word(page / 64 + 1) << (64 - skip),
        }
    }
}

impl<F: Format, S: FnMut(GpaRange), const MASKED: bool> Change for WriteProtect<'_, F, S, MASKED> {
    const INVALIDATES: bool = true;
    const EXACT: bool = true;
    const SELECTS: bool = MASKED;

    #[inline(always)]
    fn interest(&self) -> u64 {
        F::WRITE
    }

    #[inline(always)]
    fn apply(&self, leaf: u64) -> u64 {
        leaf & !F::WRITE
    }

    #[inline(always)]
    fn skipped(&self, start: u64) -> usize {
        if !MASKED {
            return 0;
        }
        self.bits((start - self.first) >> F::PAGE_SHIFT).trailing_zeros() as usize
    }

    #[inline(always)]
    fn selected(&self, start: u64) -> u32 {
        if !MASKED {
            return 0xff;
        }
        (self.bits((start - self.first) >> F::PAGE_SHIFT) & 0xff) as u32
    }

    #[inline(always)]
    fn covers(&self, start: u64, end: u64) -> bool {
        if !MASKED {
            return true;
        }
        let page = |at| (at - self.first) >> F::PAGE_SHIFT;
        let (start, end) = (page(start), page(end));
        if end - start == 1 {
            return self.bits(start) & 1 != 0;
        }
        (start..end).step_by(64).any(|page| {
            let pages = (end - page).min(64);
            self.bits(page) & (u64::MAX >> (64 - pages)) != 0
        })
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
        let (first, masks, format) = (0, &[][..], PhantomData);
        let change = WriteProtect::<F, _, false> { first, masks, dirty, format };
        self.machine.observe(Event::Begin);
        let result = self.change(who, range, change);
        let promise = if result.is_ok() { Promise::ReadOnly(range) } else { Promise::Nothing };
        self.machine.observe(Event::End(promise));
        result.map(|(_, leaves)| leaves)
    }

    /// Write-protects those of the pages from `first` on whose bit is set in `masks`, bit 0 of the first word the first
    /// page: a piece of a dirty bitmap in one walk, with one invalidation. Entries of pages whose bit is clear are neither
    /// changed nor looked at, but for the seven neighbours of each. Returns and promises what
    /// [`write_protect`](Self::write_protect) does.
    ///
    /// # Errors
    /// [`Error::OutOfRange`], [`Error::Misaligned`] for the pages from the first set bit to the last;
    /// [`Error::OtherMachine`]; nothing was changed then.
    pub fn write_protect_pages(
        &self,
        who: &Participant<'_, M>,
        first: Gpa,
        masks: &[u64],
        dirty: impl FnMut(GpaRange),
    ) -> Result<u64, Error> {
        let Some((from, to)) = span(masks) else { return Ok(0) };
        let limit = self.geometry().limit();
        let start = from.checked_mul(1 << F::PAGE_SHIFT).and_then(|skip| first.0.checked_add(skip));
        let size = (to - from).checked_mul(1 << F::PAGE_SHIFT);
        let range = start.zip(size).and_then(|(start, size)| GpaRange::new(Gpa(start), size));
        let range = range.ok_or(Error::OutOfRange { limit })?;
        let pages: u64 = masks.iter().map(|mask| u64::from(mask.count_ones())).sum();
        if pages == to - from {
            return self.write_protect(who, range, dirty);
        }
        self.check(range)?;
        // One operation for each word, as far as promises go.
        let page_size = self.geometry().page_size();
        let words = || (0..).zip(masks).filter(|(_, mask)| **mask != 0);
        words().for_each(|_| self.machine.observe(Event::Begin));
        let change =
            WriteProtect::<F, _, true> { first: first.0, masks, dirty, format: PhantomData };
        let result = self.change(who, range, change);
        for (word, &mask) in words() {
            let first = Gpa(first.0 + word * 64 * page_size);
            let promise = Promise::ReadOnlyPages { first, mask, page_size };
            let kept = if result.is_ok() { promise } else { Promise::Nothing };
            self.machine.observe(Event::End(kept));
        }
        result.map(|(_, leaves)| leaves)
    }

    /// The same for 64 pages.
    ///
    /// # Errors
    /// As [`write_protect_pages`](Self::write_protect_pages).
    pub fn write_protect_mask(
        &self,
        who: &Participant<'_, M>,
        first: Gpa,
        mask: u64,
        dirty: impl FnMut(GpaRange),
    ) -> Result<u64, Error> {
        self.write_protect_pages(who, first, &[mask], dirty)
    }
}

/// The first set bit, and the bit after the last.
fn span(masks: &[u64]) -> Option<(u64, u64)> {
    let first = masks.iter().position(|mask| *mask != 0)?;
    let last = masks.iter().rposition(|mask| *mask != 0)?;
    let from = first as u64 * 64 + u64::from(masks[first].trailing_zeros());
    let to = (last as u64 + 1) * 64 - u64::from(masks[last].leading_zeros());
    Some((from, to))
}
