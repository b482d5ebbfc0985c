//! A shadow page: the table that hardware walks instead of one of the guest's, and what is known about its entries.

use alloc::boxed::Box;
use alloc::vec::Vec;

use slat::{Entry, Hpa, Level, Machine};

use crate::pte::{ENTRIES, RIGHTS, Rights};
use crate::rmap::EntryRef;
use crate::shadow::OutOfMemory;

/// What a shadow page stands for, beside its frame. Pages of one frame and different roles are different pages.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Role {
    /// The level of its entries.
    pub level: Level,
    /// It maps part of one large page of the guest in smaller ones, from its frame on; otherwise it shadows the guest's
    /// table at its frame.
    pub direct: bool,
    /// What the guest's entries above permit.
    pub rights: Rights,
    /// Entries of the guest's table can forbid execution.
    pub no_execute: bool,
}

/// The number of a shadow page among the [`Pages`](crate::pages::Pages).
pub(crate) type PageId = u32;

/// What one word remembers of each present entry: its position in its reverse map, and the frame that it maps or the
/// page that it links.
#[derive(Clone, Copy, Default, Debug)]
#[repr(transparent)]
pub(crate) struct Word(u64);

const POSITION: u64 = (1 << 12) - 1;

impl Word {
    pub(crate) fn new(what: u64, position: usize) -> Self {
        Self(what << 12 | position as u64 & POSITION)
    }

    /// The frame, or the page.
    pub(crate) fn what(self) -> u64 {
        self.0 >> 12
    }

    pub(crate) fn position(self) -> usize {
        (self.0 & POSITION) as usize
    }

    pub(crate) fn moved_to(self, position: usize) -> Self {
        Self::new(self.what(), position)
    }
}

/// A set of entries of a page.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Indices([u64; ENTRIES / 64]);

impl Indices {
    /// Adds one, and says whether it is new.
    pub(crate) fn insert(&mut self, index: usize) -> bool {
        let word = &mut self.0[index / 64];
        let new = *word & 1 << (index % 64) == 0;
        *word |= 1 << (index % 64);
        new
    }

    pub(crate) fn remove(&mut self, index: usize) {
        self.0[index / 64] &= !(1 << (index % 64));
    }

    /// The first from `index` on.
    pub(crate) fn from(&self, index: usize) -> Option<usize> {
        (index..ENTRIES).find(|index| self.0[index / 64] & 1 << (index % 64) != 0)
    }
}

#[derive(Debug)]
pub(crate) struct Page<H> {
    /// The table that hardware walks.
    pub(crate) table: Hpa,
    pub(crate) frame: u64,
    pub(crate) role: Role,
    words: Box<[Word]>,
    /// The entries that link this page.
    pub(crate) parents: H,
    /// The guest may write to the table that this page shadows: what it says is not looked at before the guest asks for
    /// it (a flush, a root, an invalidation).
    pub(crate) unsync: bool,
    /// The entries that link a page that is unsync, or has such pages below.
    pub(crate) unsync_below: Indices,
    /// How many roots of vCPUs it is.
    pub(crate) roots: u32,
    /// It is out of the index and has no entries; only roots hold it.
    pub(crate) zapped: bool,
    /// It was linked or looked up since recycling last came by.
    pub(crate) used: bool,
    /// The next page in its bucket, or among those that wait to be freed.
    pub(crate) next: Option<PageId>,
}

impl<H: Default> Page<H> {
    pub(crate) fn new(table: Hpa, frame: u64, role: Role) -> Result<Self, OutOfMemory> {
        let mut words = Vec::new();
        words.try_reserve_exact(ENTRIES).map_err(|_| OutOfMemory)?;
        words.resize(ENTRIES, Word::default());
        Ok(Self {
            table,
            frame,
            role,
            words: words.into_boxed_slice(),
            parents: H::default(),
            unsync: false,
            unsync_below: Indices::default(),
            roots: 0,
            zapped: false,
            used: true,
            next: None,
        })
    }
}

impl<H> Page<H> {
    pub(crate) fn word(&self, index: usize) -> Word {
        self.words[index]
    }

    pub(crate) fn set_word(&mut self, index: usize, word: Word) {
        self.words[index] = word;
    }

    /// The entry of its table.
    pub(crate) fn entry<'m, M: Machine>(&self, machine: &'m M, index: usize) -> &'m Entry {
        let index = index & (ENTRIES - 1);
        #[expect(unsafe_code, reason = "table memory is the machine's")]
        // SAFETY: the table was allocated for this page and is freed after the page, so the machine points to all of
        // its 512 entries; nobody makes exclusive references to them.
        unsafe {
            at(machine.entries(self.table), index)
        }
    }

    /// Stores an entry, over whatever hardware noted in it meanwhile, and gives the old one.
    pub(crate) fn store<M: Machine>(&self, machine: &M, index: usize, new: u64) -> u64 {
        let entry = self.entry(machine, index);
        let mut old = entry.read();
        while let Err(now) = entry.update(old, new) {
            old = now;
        }
        old
    }

    /// Makes an entry permit no more than `rights`, and says whether it did.
    pub(crate) fn restrict<M: Machine>(&self, machine: &M, index: usize, rights: Rights) -> bool {
        let entry = self.entry(machine, index);
        let mut old = entry.read();
        loop {
            let new = old & !RIGHTS | (Rights::of(old) & rights).bits();
            if new == old {
                return false;
            }
            match entry.update(old, new) {
                Ok(()) => return true,
                Err(now) => old = now,
            }
        }
    }

    /// Takes bits out of an entry, and says whether it had any of them.
    pub(crate) fn clear<M: Machine>(&self, machine: &M, index: usize, bits: u64) -> bool {
        let entry = self.entry(machine, index);
        let mut old = entry.read();
        while old & bits != 0 {
            match entry.update(old, old & !bits) {
                Ok(()) => return true,
                Err(now) => old = now,
            }
        }
        false
    }
}

/// # Safety
/// `first` points to more than `index` entries that live for `'m`.
#[expect(unsafe_code, reason = "table memory is the machine's")]
unsafe fn at<'m>(first: core::ptr::NonNull<Entry>, index: usize) -> &'m Entry {
    // SAFETY: the caller's promise.
    unsafe { first.add(index).as_ref() }
}

/// How entries name a page.
pub(crate) fn entry_ref(page: PageId, index: usize) -> EntryRef {
    EntryRef::new(page, index).unwrap_or_else(|| unreachable!("pages are numbered below the limit"))
}
