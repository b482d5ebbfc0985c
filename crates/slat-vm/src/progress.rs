//! Which invalidations by the host are in progress, and which ended last: what rule 7 needs to be known.
//!
//! # Why a stale page is never installed
//! A fault samples the count of ended invalidations, asks the host, pins, and then asks [`Progress::untouched`] in the
//! same pin in which it exchanges the entry. Take one invalidation that overlaps the page.
//!
//! - If the fault's pin was seen by the invalidation's grace period, the exchange comes before the unmap, which takes
//!   the entry away.
//! - Otherwise the fault's pin (a full fence) came after the range was listed, and the fault sees it listed, unless it
//!   has been taken off the list again.
//! - Then it has ended before. Ending records the range and counts it *before* the range leaves the list, and the
//!   fault looks at the list *before* the count: it sees the count. If the fault sampled before, the range is among
//!   those that ended since, and the fault retries. If it sampled after, the host answered from after the change.
//!
//! A range is one of guest addresses, of all address spaces, or one of host addresses: a page is touched by either.
//!
//! The list and the ring of ended ranges are written by invalidations only; faults read one word of each where nothing
//! goes on.

use slat::{GpaRange, Machine, Pin};

use crate::HvaRange;
use crate::lock::Lock;
use crate::sabotage::{Skip, skips};
use crate::sync::{AtomicU64, AtomicUsize, Ordering, fence};

/// How many ranges can be listed as in progress one by one.
const LISTED: usize = if cfg!(any(loom, shuttle)) { 2 } else { 64 };
/// The most ranges of one invalidation that are listed one by one; what is more is listed as one range around all.
const AT_ONCE: usize = if cfg!(any(loom, shuttle)) { 1 } else { 8 };
/// How many ended ranges a fault may be behind (rule 7).
const REMEMBERED: u64 = if cfg!(any(loom, shuttle)) { 1 } else { 32 };
/// Places of the ring. More than are remembered, so that a reader sees a range overwritten only after its count has
/// run far ahead.
const RING: usize = if cfg!(any(loom, shuttle)) { 4 } else { 64 };

/// Addresses from `start` up to `end`, whole granules, with their kind in the lowest bits of `start`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Interval {
    start: u64,
    end: u64,
}

const GUEST: u64 = 1;
const HOST: u64 = 2;
const KIND: u64 = GUEST | HOST;

impl Interval {
    const EVERYTHING: Self = Self { start: KIND, end: u64::MAX };

    /// Guest addresses, in whole granules.
    pub(crate) fn guest(range: GpaRange) -> Self {
        Self { start: range.start().0 & !KIND | GUEST, end: range.end().0 }
    }

    /// Host addresses, in whole granules.
    pub(crate) fn host(range: HvaRange) -> Self {
        Self { start: range.start().0 & !KIND | HOST, end: range.end().0 }
    }

    fn touches(self, page: &Touch) -> bool {
        let start = self.start & !KIND;
        let (guest, host) = (page.guest, page.host);
        self.start & GUEST != 0 && start < guest.end().0 && guest.start().0 < self.end
            || self.start & HOST != 0 && start < host.end().0 && host.start().0 < self.end
    }

    /// One interval round both, which are of one kind.
    fn around(self, other: Self) -> Self {
        Self { start: self.start.min(other.start), end: self.end.max(other.end) }
    }
}

/// What a fault maps: a piece of guest addresses, and the host addresses behind it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Touch {
    pub(crate) guest: GpaRange,
    pub(crate) host: HvaRange,
}

/// A range that others may read while it is being written.
#[derive(Debug)]
struct Range {
    start: AtomicU64,
    end: AtomicU64,
}

impl Range {
    fn new() -> Self {
        Self { start: AtomicU64::new(0), end: AtomicU64::new(0) }
    }

    fn store(&self, interval: Interval) {
        // Release: whoever reads this in a place that is used again knows what was recorded before.
        self.start.store(interval.start, Ordering::Release);
        self.end.store(interval.end, Ordering::Release);
    }

    fn load(&self) -> Interval {
        let start = self.start.load(Ordering::Acquire);
        Interval { start, end: self.end.load(Ordering::Acquire) }
    }
}

/// How many invalidations had ended when a fault began.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Sample(u64);

/// One invalidation's places in the list.
#[derive(Debug, Default)]
pub(crate) struct Begun {
    places: u64,
    /// No place was free for some of it: everything counts as in progress.
    everything: bool,
}

/// The invalidations of one VM.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Progress {
    /// Which places hold a range in progress.
    listed: AtomicU64,
    /// How many invalidations found no place.
    unlisted: AtomicUsize,
    /// Ranges that have ended, ever; wraps.
    ended: AtomicU64,
    /// Which places of the list are taken by someone.
    claimed: AtomicU64,
    recording: Lock,
    list: [Range; LISTED],
    ring: [Range; RING],
}

impl Progress {
    /// Nothing in progress, and a count that begins at `ended`.
    pub(crate) fn new(ended: u64) -> Self {
        Self {
            listed: AtomicU64::new(0),
            unlisted: AtomicUsize::new(0),
            ended: AtomicU64::new(ended),
            claimed: AtomicU64::new(0),
            recording: Lock::new(),
            list: core::array::from_fn(|_| Range::new()),
            ring: core::array::from_fn(|_| Range::new()),
        }
    }

    /// Before the host is asked for a page.
    #[inline]
    pub(crate) fn sample(&self) -> Sample {
        // Acquire: the host has changed its mapping before the count that is read here.
        Sample(self.ended.load(Ordering::Acquire))
    }

    /// Whether no invalidation that overlaps what `page` says is in progress, or has ended since `sample`; it is asked
    /// for what only if there is any. The answer holds for as long as `pin` does: what begins later waits for it.
    #[inline]
    pub(crate) fn untouched<M: Machine>(
        &self,
        pin: &Pin<'_, M>,
        sample: Sample,
        page: impl FnOnce() -> Option<Touch>,
    ) -> bool {
        let _ = pin;
        // Acquire, and the list before the count: see the head of this file.
        let early = if skips(Skip::ListFirst) { Some(self.sample().0) } else { None };
        let listed = self.listed.load(Ordering::Acquire);
        let unlisted = self.unlisted.load(Ordering::Acquire);
        if unlisted != 0 {
            return false;
        }
        let ended = || early.unwrap_or_else(|| self.sample().0);
        if listed == 0 && ended() == sample.0 {
            return true;
        }
        page().is_some_and(|page| {
            !places(listed).any(|place| self.list[place].load().touches(&page))
                && self.none_ended(sample, ended(), &page)
        })
    }

    #[cold]
    fn none_ended(&self, sample: Sample, ended: u64, page: &Touch) -> bool {
        let behind = ended.wrapping_sub(sample.0);
        if behind > REMEMBERED {
            return false;
        }
        let overlap = (0..behind).any(|n| {
            let place = sample.0.wrapping_add(n) as usize % RING;
            self.ring[place].load().touches(page)
        });
        // The ranges are read before the count; whoever overwrites the first of them has counted up to RING, less the
        // ranges of one end that are recorded before they are counted.
        fence(Ordering::Acquire);
        let now = self.ended.load(Ordering::Relaxed);
        !overlap && now.wrapping_sub(sample.0) < (RING - AT_ONCE) as u64
    }

    /// Lists ranges as in progress. A full fence and a grace period must follow before anything is unmapped.
    /// All ranges are of one kind.
    pub(crate) fn begin(&self, ranges: impl Iterator<Item = Interval> + Clone) -> Begun {
        let mut begun = Begun::default();
        let single = if ranges.clone().nth(AT_ONCE).is_some() { AT_ONCE - 1 } else { AT_ONCE };
        for range in ranges.clone().take(single) {
            self.list_one(&mut begun, range);
        }
        if let Some(rest) = ranges.skip(single).reduce(Interval::around) {
            self.list_one(&mut begun, rest);
        }
        begun
    }

    fn list_one(&self, begun: &mut Begun, range: Interval) {
        loop {
            let claimed = self.claimed.load(Ordering::Relaxed);
            let place = (!claimed).trailing_zeros() as usize;
            if place >= LISTED {
                if !begun.everything {
                    begun.everything = true;
                    self.unlisted.fetch_add(1, Ordering::Release);
                }
                return;
            }
            let bit = 1 << place;
            // Acquire: the last owner of the place is done with it.
            if self.claimed.fetch_or(bit, Ordering::Acquire) & bit == 0 {
                self.list[place].store(range);
                // Release: the range is there before it counts.
                self.listed.fetch_or(bit, Ordering::Release);
                begun.places |= bit;
                return;
            }
        }
    }

    /// Records the ranges as ended, and then takes them off the list.
    pub(crate) fn end<M: Machine>(&self, machine: &M, begun: Begun) {
        let Begun { places: mine, everything } = begun;
        if mine == 0 && !everything {
            return;
        }
        if skips(Skip::CountFirst) {
            self.listed.fetch_and(!mine, Ordering::Release);
        }
        let held = self.recording.lock(machine);
        let mut ended = self.ended.load(Ordering::Relaxed);
        // Release, before the stores: whoever reads one of them sees the counts before it.
        fence(Ordering::Release);
        let mut record = |range| {
            self.ring[ended as usize % RING].store(range);
            ended = ended.wrapping_add(1);
        };
        places(mine).for_each(|place| record(self.list[place].load()));
        if everything {
            record(Interval::EVERYTHING);
        }
        // Release: the ranges are recorded before they count.
        self.ended.store(ended, Ordering::Release);
        drop(held);
        // Release: they count before they leave the list.
        self.listed.fetch_and(!mine, Ordering::Release);
        self.claimed.fetch_and(!mine, Ordering::Release);
        if everything {
            self.unlisted.fetch_sub(1, Ordering::Release);
        }
    }
}

fn places(mut bits: u64) -> impl Iterator<Item = usize> {
    core::iter::from_fn(move || {
        let place = (bits != 0).then(|| bits.trailing_zeros() as usize)?;
        bits &= bits - 1;
        Some(place)
    })
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use slat::{Gpa, Participant};
    use slat_model::Model;

    use crate::Hva;

    use super::*;

    fn range(page: u64) -> GpaRange {
        GpaRange::new(Gpa(page << 12), 4096).unwrap()
    }

    /// A page, and host memory that lies elsewhere.
    fn touch(page: u64) -> Touch {
        let host = HvaRange::new(Hva((page + 1000) << 12), 4096).unwrap();
        Touch { guest: range(page), host }
    }

    fn interval(page: u64) -> Interval {
        Interval::guest(range(page))
    }

    /// Asks about page 5 at each stage of an invalidation, with a count that begins at `first`.
    fn stages(first: u64) {
        let model = Model::builder().build().unwrap();
        let who = Participant::register(&model).unwrap();
        let progress = Progress::new(first);
        let asks = |sample, page| progress.untouched(&who.pin(), sample, || Some(touch(page)));
        let before = progress.sample();
        assert!(asks(before, 5));
        let begun = progress.begin([interval(5)].into_iter());
        let during = progress.sample();
        assert!(!asks(before, 5) && !asks(during, 5) && asks(before, 6) && asks(during, 4));
        progress.end(&model, begun);
        let after = progress.sample();
        assert!(!asks(before, 5) && !asks(during, 5) && asks(after, 5) && asks(before, 6));
        for n in 1..=40 {
            let begun = progress.begin([interval(100)].into_iter());
            progress.end(&model, begun);
            assert!(!asks(before, 5));
            // One has ended before these.
            assert_eq!(asks(before, 6), n < REMEMBERED, "{n}");
            assert_eq!(asks(after, 5), n <= REMEMBERED, "{n}");
        }
        assert!(asks(progress.sample(), 5));
    }

    #[test]
    fn a_page_is_untouched_when_nothing_has_overlapped_it_since_the_sample() {
        stages(0);
    }

    #[test]
    fn the_count_may_have_its_top_bit_set_and_may_wrap() {
        for first in [1 << 63, (1 << 63) - 1, u64::MAX, u64::MAX - 1, u64::MAX - 35] {
            stages(first);
        }
    }

    #[test]
    fn a_range_of_host_addresses_touches_the_pages_behind_which_it_lies_and_no_guest_address() {
        let model = Model::builder().build().unwrap();
        let who = Participant::register(&model).unwrap();
        let progress = Progress::new(0);
        let sample = progress.sample();
        let begun = progress.begin([Interval::host(touch(5).host)].into_iter());
        let asks = |page| progress.untouched(&who.pin(), sample, || Some(touch(page)));
        let answers = || (asks(5), asks(4), asks(6), asks(1005));
        assert_eq!(answers(), (false, true, true, true));
        progress.end(&model, begun);
        assert_eq!(answers(), (false, true, true, true));
    }

    #[test]
    fn every_place_is_free_again_when_all_have_ended() {
        let model = Model::builder().build().unwrap();
        let progress = Progress::new(0);
        let many: [Interval; 20] = core::array::from_fn(|page| interval(page as u64));
        let begun: [Begun; 12] = core::array::from_fn(|_| progress.begin(many.into_iter()));
        assert_eq!(progress.listed.load(Ordering::Relaxed), u64::MAX);
        assert_eq!(progress.unlisted.load(Ordering::Relaxed), 4);
        for begun in begun {
            progress.end(&model, begun);
        }
        assert_eq!(progress.listed.load(Ordering::Relaxed), 0);
        assert_eq!(progress.claimed.load(Ordering::Relaxed), 0);
        assert_eq!(progress.unlisted.load(Ordering::Relaxed), 0);
    }
}
