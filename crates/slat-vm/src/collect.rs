//! Reading a dirty log: take the bits, protect the pages, and only then hand the bits out (rule 8).
//!
//! Bits are taken in pins of bounded length, in which it is checked each time that the log is still the one it was.
//! Collections run at the same time as faults and as each other. One that finds a bit taken by another whose pages are
//! not yet protected protects them too: a counter in the log says that this may be so (as rule 9 does for
//! invalidations), so when any collection returns, no page is writable whose bit is clear.

use slat::{Format, Gpa, GpaRange, Machine};

use crate::bitmap::{SECTION, Taken};
use crate::log::{Log, LogError, LogMode};
use crate::protect::{Protector, Split};
use crate::sabotage::{Skip, skips};
use crate::slot::SlotId;
use crate::sync::Ordering;
use crate::{Host, Vm, Worker};

/// Words that are looked at in one pin.
const AT_ONCE: usize = 64;

/// One log that a collection works on, remembered between pins.
#[derive(Clone, Copy, Debug)]
struct Subject {
    id: SlotId,
    /// The number of the log.
    log: u64,
    mode: LogMode,
    range: GpaRange,
    pages: u64,
}

impl<'m, F: Format, M: Machine, H: Host> Vm<'m, F, M, H> {
    /// Which pages of a slot were written (`KVM_GET_DIRTY_LOG`): bit `n % 64` of word `n / 64` of `bitmap` says so of
    /// page `n`. Returns how many.
    ///
    /// With [`LogMode::Protect`], those written since the last collection: their bits are taken, the pages protected
    /// again, and every CPU's permission to write to them taken away, before the call returns. From then on each write
    /// is for the next collection, so the pages can be copied now. A write during the call may be reported by this
    /// collection and again by the next; none is lost. A fault makes a page writable for all vCPUs a moment before it
    /// marks it: what another vCPU writes in that moment is in the first collection after that fault has finished.
    ///
    /// Costs a load a word, an exchange for each word with a bit, and a walk and an invalidation for each stretch of
    /// written pages.
    ///
    /// With [`LogMode::Manual`], those written since each was last [cleared](Self::clear_dirty_log); nothing changes.
    ///
    /// # Errors
    /// [`LogError::NoSlot`], [`LogError::NotEnabled`], [`LogError::BitmapLength`] unless the bitmap has exactly one bit
    /// a page, rounded up to words: nothing was taken. [`LogError::Gone`] if the log is disabled meanwhile;
    /// [`LogError::OtherMachine`].
    pub fn dirty_log(
        &self,
        worker: &mut Worker<'m, M>,
        id: SlotId,
        bitmap: &mut [u64],
    ) -> Result<u64, LogError> {
        let subject = self.subject(worker, id)?;
        let words = subject.pages.div_ceil(SECTION) as usize;
        if bitmap.len() != words {
            return Err(LogError::BitmapLength { words });
        }
        if subject.mode != LogMode::Protect {
            self.in_pins(worker, &subject, 0, bitmap, |log, word, out| {
                *out = log.bitmap.read(word);
            })?;
            return Ok(count(bitmap));
        }
        self.open(worker, &subject)?;
        if skips(Skip::TakeFirst) {
            self.protect(worker, subject.range)?;
        }
        let taken = self.in_pins(worker, &subject, 0, bitmap, |log, word, out| {
            *out = log.bitmap.take(word, u64::MAX).bits;
        });
        let protected = taken.and_then(|()| {
            if skips(Skip::TakeFirst) {
                return Ok(());
            }
            let mut protector = Protector::new(self, worker, subject.range, Split::Nothing);
            for (word, &bits) in (0..).zip(bitmap.iter()) {
                protector.word(word, Taken { bits, left: 0 })?;
            }
            Ok(protector.finish()?)
        });
        self.close(worker, &subject, subject.range, protected)?;
        let pages = count(bitmap);
        worker.statistics.collected += pages;
        Ok(pages)
    }

    /// Clears those of `pages` pages from page `first` of the slot whose bit is set in `bitmap`, bit 0 of word 0 for
    /// the first (`KVM_CLEAR_DIRTY_LOG`): pages that were written are protected again, so that the next write to each
    /// is logged. Returns how many of them had been written. Bits beyond the end of the slot are ignored.
    ///
    /// When it returns, the pages can be copied: every later write to them is in the log. A block that holds pages to
    /// be protected and others is split first; with [`VmOptions::eager_split`](crate::VmOptions) all blocks are. Without
    /// memory for that, a block is protected as a whole. Costs as [`dirty_log`](Self::dirty_log).
    ///
    /// # Errors
    /// [`LogError::FirstPage`] unless `first` is a multiple of 64; [`LogError::BeyondEnd`]; [`LogError::PageCount`]
    /// unless `pages` is a multiple of 64 or ends with the slot; [`LogError::BitmapLength`] unless the bitmap has
    /// exactly one bit for each of `pages`, rounded up to words; [`LogError::NoSlot`], [`LogError::NotEnabled`]:
    /// nothing was cleared. [`LogError::Gone`] if the log is disabled meanwhile; [`LogError::OtherMachine`].
    pub fn clear_dirty_log(
        &self,
        worker: &mut Worker<'m, M>,
        id: SlotId,
        first: u64,
        pages: u64,
        bitmap: &[u64],
    ) -> Result<u64, LogError> {
        let subject = self.subject(worker, id)?;
        check(&subject, first, pages, bitmap.len())?;
        let page_size = self.tree().geometry().page_size();
        let start = subject.range.start().0 + first * page_size;
        let Some(range) = GpaRange::new(Gpa(start), pages * page_size) else { return Ok(0) };
        self.open(worker, &subject)?;
        let mut cleared = 0;
        let done = self.clear_words(worker, &subject, first / SECTION, bitmap, &mut cleared);
        self.close(worker, &subject, range, done)?;
        worker.statistics.collected += cleared;
        Ok(cleared)
    }

    fn clear_words(
        &self,
        worker: &mut Worker<'m, M>,
        subject: &Subject,
        first: u64,
        bitmap: &[u64],
        cleared: &mut u64,
    ) -> Result<(), LogError> {
        let split = self.options.eager_split.map_or(Split::Edges, Split::Chunks);
        let mut protector = Protector::new(self, worker, subject.range, split);
        for (chunk, masks) in (0..).zip(bitmap.chunks(AT_ONCE)) {
            let base = first + chunk * AT_ONCE as u64;
            let mut taken = [Taken { bits: 0, left: 0 }; AT_ONCE];
            let taken = &mut taken[..masks.len()];
            self.in_pins(protector.worker(), subject, base as usize, taken, |log, word, out| {
                let mask = masks.get(word - base as usize).copied().unwrap_or(0);
                // Bits beyond the end of the slot are never set, so there is nothing to take.
                *out = log.bitmap.take(word, mask);
            })?;
            for (word, &taken) in (base..).zip(taken.iter()) {
                *cleared += u64::from(taken.bits.count_ones());
                protector.word(word, taken)?;
            }
        }
        Ok(protector.finish()?)
    }

    /// What there is to collect from.
    fn subject(&self, worker: &Worker<'m, M>, id: SlotId) -> Result<Subject, LogError> {
        let pin = worker.participant.pin();
        let slot = self.slots.read(&pin)?.get(id).ok_or(LogError::NoSlot)?;
        let log = slot.log.as_ref().ok_or(LogError::NotEnabled)?;
        let pages = slot.range.size() / self.tree().geometry().page_size();
        Ok(Subject { id, log: log.number, mode: log.mode, range: slot.range, pages })
    }

    /// Runs `step` on the log, pinned.
    fn pinned<T>(
        &self,
        worker: &Worker<'m, M>,
        subject: &Subject,
        step: impl FnOnce(&Log) -> T,
    ) -> Result<T, LogError> {
        let pin = worker.participant.pin();
        let slot = self.slots.read(&pin)?.get(subject.id);
        let log = slot.and_then(|slot| slot.log.as_ref());
        let log = log.filter(|log| log.number == subject.log).ok_or(LogError::Gone)?;
        Ok(step(log))
    }

    /// Runs `step` on the log for each word from `first` on that `outs` has a place for, some words a pin.
    fn in_pins<T>(
        &self,
        worker: &Worker<'m, M>,
        subject: &Subject,
        first: usize,
        outs: &mut [T],
        mut step: impl FnMut(&Log, usize, &mut T),
    ) -> Result<(), LogError> {
        for (chunk, outs) in outs.chunks_mut(AT_ONCE).enumerate() {
            let base = first + chunk * AT_ONCE;
            self.pinned(worker, subject, |log| {
                for (word, out) in (base..).zip(outs) {
                    step(log, word, out);
                }
            })?;
        }
        Ok(())
    }

    /// Before bits are taken whose pages are still writable.
    fn open(&self, worker: &Worker<'m, M>, subject: &Subject) -> Result<(), LogError> {
        // The exchange that takes a bit releases this: who finds it taken finds the count raised.
        self.pinned(worker, subject, |log| log.open.fetch_add(1, Ordering::Relaxed)).map(|_| ())
    }

    /// After the pages of the taken bits were protected: if another collection is not that far yet, its pages may be
    /// among `range`, and are protected here too.
    fn close(
        &self,
        worker: &mut Worker<'m, M>,
        subject: &Subject,
        range: GpaRange,
        done: Result<(), LogError>,
    ) -> Result<(), LogError> {
        // Acquire: a count that is down to ours means that the others' pages are protected.
        let others = self.pinned(worker, subject, |log| {
            log.open.load(Ordering::Acquire) > 1 && !skips(Skip::OpenCollections)
        });
        let protected = match others {
            Ok(true) if done.is_ok() => self.protect(worker, range).map_err(LogError::from),
            Ok(_) => Ok(()),
            Err(gone) => return done.and(Err(gone)),
        };
        // Release: the protection comes before whoever reads the lower count.
        let lowered = self.pinned(worker, subject, |log| log.open.fetch_sub(1, Ordering::Release));
        done.and(protected).and(lowered.map(|_| ()))
    }
}

fn check(subject: &Subject, first: u64, pages: u64, words: usize) -> Result<(), LogError> {
    if !first.is_multiple_of(SECTION) {
        return Err(LogError::FirstPage);
    }
    let left = subject.pages.checked_sub(first);
    let left = left.ok_or(LogError::BeyondEnd { pages: subject.pages })?;
    if pages > left {
        return Err(LogError::BeyondEnd { pages: subject.pages });
    }
    if !pages.is_multiple_of(SECTION) && pages != left {
        return Err(LogError::PageCount);
    }
    let wanted = pages.div_ceil(SECTION) as usize;
    if words != wanted {
        return Err(LogError::BitmapLength { words: wanted });
    }
    Ok(())
}

fn count(bitmap: &[u64]) -> u64 {
    bitmap.iter().map(|word| u64::from(word.count_ones())).sum()
}
