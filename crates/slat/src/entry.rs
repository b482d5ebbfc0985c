//! One entry in memory, and what an invalid one can say: empty, LOCKED, DEAD, or a note of its owner.
//!
//! Hardware ignores every bit of an invalid entry but the valid ones (Arm ARM DDI 0487, D8.3.1; Intel SDM vol. 3,
//! 29.3.2; AMD APM vol. 2, 5.4). The tags sit in bits that no valid entry of any format sets, so that one test
//! finds a LOCKED entry together with the entries that an operation wants to change.

use crate::sync::{AtomicU64, Ordering};

/// Set in LOCKED (a thread is between the two halves of break-before-make here, rule 3) and DEAD and in nothing else.
pub(crate) const LOCK_BIT: u64 = 1 << 62;
const DEAD_BIT: u64 = 1 << 61;
const NOTE_BIT: u64 = 1 << 60;
const NOTE_SHIFT: u32 = 16;

/// What a zeroed table holds: no translation, no note.
pub(crate) const EMPTY: u64 = 0;
/// The table that this entry is part of has left the tree (rule 5).
pub(crate) const DEAD: u64 = LOCK_BIT | DEAD_BIT;

/// One entry of a table: 64 bits that CPUs, table walkers and this crate read and exchange.
///
/// [`Machine::entries`](crate::Machine::entries) hands out pointers to these; an embedder casts its table memory.
#[derive(Debug)]
#[repr(transparent)]
pub struct Entry(pub(crate) AtomicU64);

impl Entry {
    /// An empty entry, for machines whose table memory is made of Rust values.
    #[cfg(not(loom))]
    pub const fn new() -> Self {
        Self(AtomicU64::new(EMPTY))
    }

    /// An empty entry, for machines whose table memory is made of Rust values.
    #[cfg(loom)]
    pub fn new() -> Self {
        Self(AtomicU64::new(EMPTY))
    }

    /// The entry as a table walker of the hardware would read it now.
    pub fn read(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    /// What hardware does when it sets the access flag or dirty state: replaces `old` by `new` if it is still there.
    ///
    /// # Errors
    /// The value that was found instead.
    pub fn update(&self, old: u64, new: u64) -> Result<(), u64> {
        self.0.compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire).map(|_| ())
    }
}

impl Default for Entry {
    fn default() -> Self {
        Self::new()
    }
}

/// Who owns a guest frame that is not mapped: a number that an invalid entry carries.
///
/// Notes survive look-ups, are visited by walks, and are never offset by the address.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Owner(pub u32);

impl Owner {
    pub(crate) const fn entry(self) -> u64 {
        NOTE_BIT | ((self.0 as u64) << NOTE_SHIFT)
    }

    /// The note of an entry that is known to be invalid.
    pub(crate) const fn of(invalid: u64) -> Option<Self> {
        if invalid & (NOTE_BIT | LOCK_BIT) == NOTE_BIT {
            Some(Self((invalid >> NOTE_SHIFT) as u32))
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_are_neither_empty_nor_locked() {
        for id in [0, 1, u32::MAX] {
            let entry = Owner(id).entry();
            assert_eq!(Owner::of(entry), Some(Owner(id)));
            assert_ne!(entry, EMPTY);
            assert_eq!(entry & LOCK_BIT, 0);
        }
        assert_eq!(Owner::of(EMPTY), None);
        assert_eq!(Owner::of(LOCK_BIT), None);
        assert_eq!(Owner::of(DEAD), None);
    }
}
