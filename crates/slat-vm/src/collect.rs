//! Reading a dirty log: take the bits, protect the pages, and only then hand the bits out (rule 8).
//!
//! Bits are taken in pins of bounded length, in which it is checked each time that the log is still the one it was.
//! Collections run at the same time as faults and as each other. One that finds a bit taken by another whose pages are
//! not yet protected protects them too: a counter in the log says that this may be so (as rule 9 does for
//! invalidations), so when any collection returns, no page is writable whose bit is clear.

use slat::{Format, Gpa, GpaRange, Machine, Participant};

use crate::bitmap::{Bitmap, SECTION, Taken};
use crate::chunks::At;
use crate::log::{Log, LogError, LogMode};
use crate::protect::{Protector, Split};
use crate::sabotage::{Skip, skips};
use crate::shared::Shared;
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
    origin: u64,
    mode: LogMode,
    range: GpaRange,
    pages: u64,
}

/// The bits of a slot: the log's own, and those of the monitor that writes to the memory itself.
struct Logged<'a> {
    log: &'a Log,
    monitor: Option<&'a Bitmap>,
}

impl Logged<'_> {
    fn monitor(&self, bits: impl FnOnce(&Bitmap) -> u64) -> u64 {
        self.monitor.map_or(0, bits)
    }

    /// Takes those bits of a word that `mask` has. Pages that only the monitor wrote to need no protection.
    fn take(&self, word: usize, mask: u64) -> Taken {
        let Taken { bits, left } = self.log.bitmap.take(word, mask);
        Taken { bits: bits | self.monitor(|monitor| monitor.take(word, mask).bits), left }
    }
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
    /// With [`LogMode::Hardware`], those written since the last collection: a walk over the slot's entries takes their
    /// dirty state and invalidates once. With [`LogMode::Ring`], those that no vCPU has written.
    ///
    /// # Errors
    /// [`LogError::Ring`] for rings without a backup bitmap; [`LogError::NoSlot`], [`LogError::NotEnabled`],
    /// [`LogError::BitmapLength`] unless the bitmap has exactly one bit a page, rounded up to words: nothing was taken. [`LogError::Gone`] if the log is disabled, or its slot
    /// moved or deleted, meanwhile: what the bitmap says is true, and a slot that moved reports it again.
    /// [`LogError::OtherMachine`].
    pub fn dirty_log(
        &self,
        worker: &mut Worker<'m, M>,
        id: impl Into<SlotId>,
        bitmap: &mut [u64],
    ) -> Result<u64, LogError> {
        let subject = self.subject(worker, id.into())?;
        let words = subject.pages.div_ceil(SECTION) as usize;
        if bitmap.len() != words {
            return Err(LogError::BitmapLength { words });
        }
        if !matches!(subject.mode, LogMode::Manual { .. }) {
            // What is handed back when the log goes away is what was taken, and nothing that stood here before.
            bitmap.fill(0);
        }
        let collected = match subject.mode {
            LogMode::Protect => self.take_and_protect(worker, &subject, bitmap),
            LogMode::Manual { .. } => {
                let mut pages = 0;
                self.in_pins(worker, &subject, 0, bitmap, |slot, word, out| {
                    *out = slot.log.bitmap.read(word) | slot.monitor(|bits| bits.read(word));
                    pages += u64::from(out.count_ones());
                })?;
                return Ok(pages);
            }
            LogMode::Hardware => self.harvest(worker, &subject, bitmap),
            LogMode::Ring { backup: true } => self.take_rest(worker, &subject, bitmap),
            LogMode::Ring { backup: false } => Err(LogError::Ring),
        };
        if collected == Err(LogError::Gone) {
            self.hand_back(worker, &subject, (0, bitmap))?;
        }
        collected?;
        let pages = count(bitmap);
        worker.statistics.collected += pages;
        Ok(pages)
    }

    fn take_and_protect(
        &self,
        worker: &mut Worker<'m, M>,
        subject: &Subject,
        bitmap: &mut [u64],
    ) -> Result<(), LogError> {
        // Dropped last: the marks that protection drops are this log's, or nobody's.
        let _aiming = self.aimed.enter();
        self.open(worker, subject)?;
        if skips(Skip::TakeFirst) {
            self.protect(worker, subject.id.space, subject.range)?;
        }
        let taken = self.in_pins(worker, subject, 0, bitmap, |slot, word, out| {
            *out = slot.take(word, u64::MAX).bits;
        });
        let protected = taken.and_then(|()| {
            if skips(Skip::TakeFirst) {
                return Ok(());
            }
            let mut protector = self.protector(worker, subject, Split::Nothing);
            for (word, &bits) in (0..).zip(bitmap.iter()) {
                protector.word(word, Taken { bits, left: 0 })?;
            }
            Ok(protector.finish()?)
        });
        self.close(worker, subject, subject.range, protected)
    }

    /// What was taken out of a log that has gone goes into the one that its slot has now, if it moved and took it along.
    fn hand_back(
        &self,
        worker: &mut Worker<'m, M>,
        subject: &Subject,
        (first, bitmap): (usize, &[u64]),
    ) -> Result<(), LogError> {
        let change = self.slots.lock(&mut worker.hands.participant)?;
        let log = change.map().get(subject.id).and_then(|slot| slot.log.as_ref());
        if let Some(log) = log.filter(|log| log.origin == subject.origin) {
            // What a caller asked for may have bits beyond the end.
            let inside = |word| match subject.pages.saturating_sub(word as u64 * SECTION) {
                pages @ 0..SECTION => (1 << pages) - 1,
                _ => u64::MAX,
            };
            for (word, bits) in (first..).zip(bitmap).filter(|(_, bits)| **bits != 0) {
                log.bitmap.put(word, bits & inside(word));
            }
        }
        Ok(())
    }

    /// What is in the bitmap though nothing was protected for it, added to `bitmap`.
    fn take_rest(
        &self,
        worker: &Worker<'m, M>,
        subject: &Subject,
        bitmap: &mut [u64],
    ) -> Result<(), LogError> {
        self.in_pins(worker, subject, 0, bitmap, |slot, word, out| {
            *out |= slot.take(word, u64::MAX).bits;
        })
    }

    /// The dirty state of hardware, and what unmaps and faults have taken out of entries before.
    fn harvest(
        &self,
        worker: &Worker<'m, M>,
        subject: &Subject,
        bitmap: &mut [u64],
    ) -> Result<(), LogError> {
        let start = subject.range.start().0;
        let moving = self.transit.enter();
        for tree in self.trees(subject.id.space) {
            tree.harvest_dirty(&worker.hands.participant, subject.range, |dirty| {
                let page = |gpa: Gpa| (gpa.0 - start) >> F::PAGE_SHIFT;
                set(bitmap, page(dirty.start()), page(dirty.end()));
            })?;
        }
        // If the log has gone, the state may have been another's: it is handed over.
        let there = self.pinned(worker, subject, |_| ());
        if there.is_err() {
            for (word, bits) in (0..).zip(bitmap.iter()) {
                for page in (0..SECTION).filter(|page| bits >> page & 1 == 1) {
                    let gpa = Gpa(start + ((word * SECTION + page) << F::PAGE_SHIFT));
                    self.mark_taken(&worker.hands.participant, subject.id.space, gpa);
                }
            }
        }
        drop(moving);
        there?;
        // Rule 8: whose entries were found empty, is in the bitmap then.
        self.transit.wait(self.machine());
        self.take_rest(worker, subject, bitmap)
    }

    /// When the log `number` of hardware's dirty state begins, nothing has been written yet. Another log that has taken its
    /// place meanwhile has begun by itself, and what is dirty by now is that one's: so no log comes or goes during this.
    pub(crate) fn mark_clean(
        &self,
        worker: &mut Worker<'m, M>,
        id: SlotId,
        number: u64,
    ) -> Result<(), LogError> {
        let mut change = self.slots.lock(&mut worker.hands.participant)?;
        let slot = change.map().get(id);
        let ours = |log: &Shared<Log>| log.number == number || skips(Skip::OwnMarks);
        let Some(slot) = slot.filter(|slot| slot.log.as_ref().is_some_and(ours)) else {
            return Ok(());
        };
        let range = slot.range;
        for tree in self.trees(id.space) {
            tree.harvest_dirty(change.who(), range, |_| {})?;
        }
        Ok(())
    }

    /// Marks a page whose entry was dirty and is not any more, in the log that its slot has now.
    pub(crate) fn mark_taken(&self, who: &Participant<'m, M>, space: u16, gpa: Gpa) {
        let pin = who.pin();
        let Ok(map) = self.slots.read(&pin) else { return };
        if let Some(version) = map.find(space, gpa, &mut At::default()) {
            // Also of a slot that is read-only by now: it was written before.
            if let Some(log) = &version.log {
                log.bitmap.mark(version.page_of(gpa, F::PAGE_SHIFT));
            }
        } else if let Some(leaving) = map.leaving()
            && let Some((log, page)) = leaving.log_of(space, gpa, F::PAGE_SHIFT)
        {
            // The slot moves, and takes its log along when it has waited for this.
            log.bitmap.mark(page);
        }
    }

    fn protector<'a>(
        &'a self,
        worker: &'a mut Worker<'m, M>,
        subject: &Subject,
        split: Split,
    ) -> Protector<'a, 'm, F, M, H> {
        Protector::new(self, worker, (subject.id.space, subject.range), split)
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
    /// unless `pages` is a multiple of 64 or ends with the slot; [`LogError::NotManual`], [`LogError::Ring`]; [`LogError::BitmapLength`] unless the bitmap has
    /// exactly one bit for each of `pages`, rounded up to words; [`LogError::NoSlot`], [`LogError::NotEnabled`]:
    /// nothing was cleared. [`LogError::Gone`] if the log is disabled, or its slot moved or deleted, meanwhile: a slot that
    /// moved reports all pages of `bitmap` again. [`LogError::OtherMachine`].
    pub fn clear_dirty_log(
        &self,
        worker: &mut Worker<'m, M>,
        id: impl Into<SlotId>,
        first: u64,
        pages: u64,
        bitmap: &[u64],
    ) -> Result<u64, LogError> {
        let subject = self.subject(worker, id.into())?;
        match subject.mode {
            LogMode::Protect | LogMode::Manual { .. } => {}
            LogMode::Hardware => return Err(LogError::NotManual),
            LogMode::Ring { .. } => return Err(LogError::Ring),
        }
        check(&subject, first, pages, bitmap.len())?;
        let page_size = self.tree().geometry().page_size();
        let start = subject.range.start().0 + first * page_size;
        let Some(range) = GpaRange::new(Gpa(start), pages * page_size) else { return Ok(0) };
        let word = first / SECTION;
        let mut cleared = 0;
        // As when a collection protects.
        let aiming = self.aimed.enter();
        let done = self.open(worker, &subject).and_then(|()| {
            let done = self.clear_words(worker, &subject, word, bitmap, &mut cleared);
            self.close(worker, &subject, range, done)
        });
        // Before the lock of the slots, whose holder may wait for this.
        drop(aiming);
        if done == Err(LogError::Gone) {
            self.hand_back(worker, &subject, (word as usize, bitmap))?;
        }
        done?;
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
        let mut protector = self.protector(worker, subject, split);
        for (chunk, masks) in (0..).zip(bitmap.chunks(AT_ONCE)) {
            let base = first + chunk * AT_ONCE as u64;
            let mut taken = [Taken { bits: 0, left: 0 }; AT_ONCE];
            let taken = &mut taken[..masks.len()];
            self.in_pins(protector.worker(), subject, base as usize, taken, |slot, word, out| {
                let mask = masks.get(word - base as usize).copied().unwrap_or(0);
                // Bits beyond the end of the slot are never set, so there is nothing to take.
                *out = slot.take(word, mask);
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
        let pin = worker.hands.participant.pin();
        let slot = self.slots.read(&pin)?.get(id).ok_or(LogError::NoSlot)?;
        let log = slot.log.as_ref().ok_or(LogError::NotEnabled)?;
        let pages = slot.range.size() / self.tree().geometry().page_size();
        let (number, origin) = (log.number, log.origin);
        Ok(Subject { id, log: number, origin, mode: log.mode, range: slot.range, pages })
    }

    /// Runs `step` on the slot, pinned, if its log is still the same.
    fn pinned<T>(
        &self,
        worker: &Worker<'m, M>,
        subject: &Subject,
        step: impl FnOnce(Logged<'_>) -> T,
    ) -> Result<T, LogError> {
        let pin = worker.hands.participant.pin();
        let slot = self.slots.read(&pin)?.get(subject.id).ok_or(LogError::Gone)?;
        let log = slot.log.as_deref().filter(|log| log.number == subject.log);
        let log = log.ok_or(LogError::Gone)?;
        Ok(step(Logged { log, monitor: slot.monitor.as_deref() }))
    }

    /// Runs `step` on the log for each word from `first` on that `outs` has a place for, some words a pin.
    fn in_pins<T>(
        &self,
        worker: &Worker<'m, M>,
        subject: &Subject,
        first: usize,
        outs: &mut [T],
        mut step: impl FnMut(&Logged<'_>, usize, &mut T),
    ) -> Result<(), LogError> {
        for (chunk, outs) in outs.chunks_mut(AT_ONCE).enumerate() {
            let base = first + chunk * AT_ONCE;
            self.pinned(worker, subject, |slot| {
                for (word, out) in (base..).zip(outs) {
                    step(&slot, word, out);
                }
            })?;
        }
        Ok(())
    }

    /// Before bits are taken whose pages are still writable.
    fn open(&self, worker: &Worker<'m, M>, subject: &Subject) -> Result<(), LogError> {
        // The exchange that takes a bit releases this: who finds it taken finds the count raised.
        self.pinned(worker, subject, |slot| slot.log.open.fetch_add(1, Ordering::Relaxed))
            .map(|_| ())
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
        // Release: the protection comes before whoever reads the lower count.
        let lower = |log: &Log| {
            log.open.fetch_sub(1, Ordering::Release);
        };
        let others = self.pinned(worker, subject, |slot| {
            // Acquire: a count that is down to ours means that the others' pages are protected.
            let others = slot.log.open.load(Ordering::Acquire) > 1 && !skips(Skip::OpenCollections);
            let others = others && done.is_ok();
            if !others {
                lower(slot.log);
            }
            others
        });
        match others {
            Ok(true) => {}
            Ok(false) => return done,
            Err(gone) => return done.and(Err(gone)),
        }
        let protected = self.protect(worker, subject.id.space, range).map_err(LogError::from);
        let lowered = self.pinned(worker, subject, |slot| lower(slot.log));
        done.and(protected).and(lowered)
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

/// Sets the bits of the pages from `first` up to `end`.
fn set(bitmap: &mut [u64], first: u64, end: u64) {
    for page in first..end {
        if let Some(word) = bitmap.get_mut((page / SECTION) as usize) {
            *word |= 1 << (page % SECTION);
        }
    }
}

fn count(bitmap: &[u64]) -> u64 {
    bitmap.iter().map(|word| u64::from(word.count_ones())).sum()
}
