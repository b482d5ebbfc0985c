//! Harvesting the dirty state that hardware keeps in leaves (Arm: DBM).

use core::marker::PhantomData;

use crate::change::Change;
use crate::machine::Machine;
use crate::{Error, Format, Gpa, GpaRange, Participant, Tree};

struct Harvest<F, S> {
    range: GpaRange,
    sink: S,
    format: PhantomData<F>,
}

impl<F: Format, S: FnMut(GpaRange)> Change for Harvest<F, S> {
    const INVALIDATES: bool = true;
    const EXACT: bool = true;

    #[inline(always)]
    fn interest(&self) -> u64 {
        F::DIRTY
    }

    #[inline(always)]
    fn apply(&self, leaf: u64) -> u64 {
        if F::tracks_dirty_of(leaf) { F::clean(leaf) } else { leaf }
    }

    #[inline(always)]
    fn seen(&mut self, leaf: u64, start: u64, end: u64) {
        if F::is_dirty(leaf) {
            let start = start.max(self.range.start().0);
            let end = end.min(self.range.end().0);
            if let Some(range) = GpaRange::new(Gpa(start), end.saturating_sub(start)) {
                (self.sink)(range);
            }
        }
    }
}

impl<F: Format, M: Machine> Tree<'_, F, M> {
    /// Reports the part inside `range` of every leaf that hardware has marked dirty, and marks the leaf clean.
    /// Returns how many leaves were dirty. `sink` must neither panic nor use the tree.
    ///
    /// When it returns, every later write marks its leaf again: the reported pages may be read from then on, not
    /// before. A leaf that is writable without dirty state is not reported and not changed. A dirty block is reported
    /// for as much of it as is in the range, and marked clean as a whole: ask for whole blocks, or split them.
    ///
    /// # Errors
    /// [`Error::OutOfRange`], [`Error::Misaligned`]; nothing was reported then.
    pub fn harvest_dirty(
        &self,
        who: &Participant<'_, M>,
        range: GpaRange,
        sink: impl FnMut(GpaRange),
    ) -> Result<u64, Error> {
        self.check(range)?;
        let harvest = Harvest::<F, _> { range, sink, format: PhantomData };
        self.change(who, range, harvest).map(|(_, leaves)| leaves)
    }
}
