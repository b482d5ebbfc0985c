//! Which pages were written: one bit a page, set by faults, taken by collections.

use alloc::vec::Vec;

use crate::heap::{OutOfMemory, with_room};
use crate::sync::{AtomicU64, Ordering};

/// Pages of one word.
pub(crate) const SECTION: u64 = 64;

/// The bits of one slot.
#[derive(Debug)]
pub(crate) struct Bitmap {
    words: Vec<AtomicU64>,
}

impl Bitmap {
    /// `pages` bits, all `set` or all clear. Bits beyond the last page are never set.
    pub(crate) fn new(pages: u64, set: bool) -> Result<Self, OutOfMemory> {
        let len = usize::try_from(pages.div_ceil(SECTION)).map_err(|_| OutOfMemory)?;
        let mut words = with_room(len)?;
        for index in 0..len as u64 {
            let word = if set { valid(pages, index) } else { 0 };
            words.push(AtomicU64::new(word));
        }
        Ok(Self { words })
    }

    /// Sets the bit of `page`. Whether it was clear.
    ///
    /// Rule 8: the caller made the page writable before. The exchange is not saved where the bit is set already: a
    /// look at the bit could be answered before the entry's exchange is visible, and a collection that has taken the
    /// bit meanwhile would not see the entry. As a read-modify-write it comes either before the collection's, which
    /// then sees the writable entry (release, acquire), or after it, and the bit stays.
    #[inline]
    pub(crate) fn mark(&self, page: u64) -> bool {
        let bit = 1 << (page % SECTION);
        self.words
            .get((page / SECTION) as usize)
            .is_some_and(|word| word.fetch_or(bit, Ordering::AcqRel) & bit == 0)
    }

    /// The bits of a word as they are now.
    #[inline]
    pub(crate) fn read(&self, word: usize) -> u64 {
        self.words.get(word).map_or(0, |word| word.load(Ordering::Relaxed))
    }

    /// Takes those bits of a word that `mask` has. What was there, and what is left.
    ///
    /// Acquire: entries that were made writable before their bits were set are seen writable by the protection that
    /// follows. A word that has none of the bits is only read: whoever marks one of them meanwhile is reported next
    /// time.
    #[inline]
    pub(crate) fn take(&self, word: usize, mask: u64) -> Taken {
        let Some(word) = self.words.get(word) else { return Taken { bits: 0, left: 0 } };
        // Acquire: who finds bits taken by another collection finds that collection open.
        let seen = word.load(Ordering::Acquire);
        if seen & mask == 0 {
            return Taken { bits: 0, left: seen };
        }
        let old = word.fetch_and(!mask, Ordering::AcqRel);
        Taken { bits: old & mask, left: old & !mask }
    }
}

impl Bitmap {
    /// Whether the bit of `page` is set; not so of a page that there is not.
    pub(crate) fn get(&self, page: u64) -> bool {
        // Acquire: what was done before the bit was changed comes before what is done because of it.
        let word = self.words.get((page / SECTION) as usize);
        word.is_some_and(|word| word.load(Ordering::Acquire) >> (page % SECTION) & 1 == 1)
    }

    /// The bit of the page `first`, and how many pages from there on, up to `end`, have the same.
    pub(crate) fn run(&self, first: u64, end: u64) -> (bool, u64) {
        let value = self.get(first);
        let mut at = first;
        while at < end {
            let Some(word) = self.words.get((at / SECTION) as usize) else { break };
            let word = word.load(Ordering::Acquire) >> (at % SECTION);
            let left = SECTION - at % SECTION;
            let same = if value { word.trailing_ones() } else { word.trailing_zeros() };
            let same = u64::from(same).min(left);
            at += same;
            if same < left {
                break;
            }
        }
        (value, at.min(end).saturating_sub(first))
    }

    /// Sets bits of a word, as [`mark`](Self::mark) does one.
    pub(crate) fn put(&self, word: usize, bits: u64) {
        if let Some(word) = self.words.get(word) {
            word.fetch_or(bits, Ordering::AcqRel);
        }
    }

    /// Adds the bits of `other`, which nobody changes any more.
    pub(crate) fn add(&self, other: &Self) {
        for (word, bits) in self.words.iter().zip(&other.words) {
            word.fetch_or(bits.load(Ordering::Relaxed), Ordering::AcqRel);
        }
    }

    /// Sets or clears the bits of the pages from `first` up to `end`.
    pub(crate) fn assign(&self, first: u64, end: u64, set: bool) {
        let mut at = first;
        while at < end {
            let Some(word) = self.words.get((at / SECTION) as usize) else { return };
            let next = (at - at % SECTION + SECTION).min(end);
            let bits = u64::MAX >> (SECTION - (next - at)) << (at % SECTION);
            if set {
                word.fetch_or(bits, Ordering::AcqRel);
            } else {
                word.fetch_and(!bits, Ordering::AcqRel);
            }
            at = next;
        }
    }
}

/// What [`Bitmap::take`] found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Taken {
    /// The bits that were set and are clear now.
    pub(crate) bits: u64,
    /// The other bits, as they were.
    pub(crate) left: u64,
}

/// The bits of a word that stand for pages.
fn valid(pages: u64, word: u64) -> u64 {
    match pages.saturating_sub(word * SECTION) {
        0 => 0,
        rest @ 1..SECTION => (1 << rest) - 1,
        _ => u64::MAX,
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    #[test]
    fn bits_beyond_the_last_page_are_never_set() {
        let bitmap = Bitmap::new(67, true).unwrap();
        assert_eq!((bitmap.words.len(), bitmap.read(0), bitmap.read(1)), (2, u64::MAX, 7));
    }

    #[test]
    fn bits_are_assigned_and_counted_across_words() {
        let bitmap = Bitmap::new(300, false).unwrap();
        assert_eq!(bitmap.run(0, 300), (false, 300));
        bitmap.assign(60, 200, true);
        assert_eq!(bitmap.run(0, 300), (false, 60));
        assert_eq!((bitmap.run(60, 300), bitmap.run(60, 128)), ((true, 140), (true, 68)));
        assert_eq!(bitmap.run(200, 300), (false, 100));
        bitmap.assign(64, 65, false);
        assert_eq!((bitmap.run(60, 300), bitmap.run(64, 300)), ((true, 4), (false, 1)));
        bitmap.assign(0, 300, true);
        assert_eq!((bitmap.run(0, 300), bitmap.run(0, 400)), ((true, 300), (true, 300)));
    }

    #[test]
    fn taking_says_what_was_taken_and_what_is_left() {
        let bitmap = Bitmap::new(64, false).unwrap();
        assert!(bitmap.mark(5));
        assert!(!bitmap.mark(5));
        assert!(bitmap.mark(6));
        assert!(!bitmap.mark(64));
        assert_eq!(bitmap.take(0, 1 << 5 | 1), Taken { bits: 1 << 5, left: 1 << 6 });
        assert_eq!(bitmap.take(0, 1 << 5), Taken { bits: 0, left: 1 << 6 });
        assert_eq!(bitmap.take(0, u64::MAX), Taken { bits: 1 << 6, left: 0 });
    }
}
