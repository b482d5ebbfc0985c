//! Reverse maps: which shadow entries map a frame, or link a table.

use core::fmt;

mod chains;
mod pool;

pub use chains::{Chains, Head, MAX_ENTRIES};

/// A shadow entry: the number of its page of entries, and which of the 512.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct EntryRef(u32);

impl EntryRef {
    /// Pages of entries are numbered below this.
    pub const PAGES: u32 = 1 << 22;

    /// Entry `index`, 0 to 511, of page `page`; `None` beyond either.
    #[inline]
    pub const fn new(page: u32, index: usize) -> Option<Self> {
        if page < Self::PAGES && index < 512 { Some(Self(page << 9 | index as u32)) } else { None }
    }

    /// The number of the page.
    #[inline]
    pub const fn page(self) -> u32 {
        self.0 >> 9
    }

    /// Which entry of the page.
    #[inline]
    pub const fn index(self) -> usize {
        self.0 as usize & 511
    }
}

/// Why an entry was not added.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AddError {
    /// The reverse map holds as many as it can.
    Full,
    /// The allocator has no memory for a descriptor.
    OutOfMemory,
}

impl fmt::Display for AddError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Full => "the reverse map is full: zap its entries first",
            Self::OutOfMemory => "no memory for a descriptor of a reverse map",
        })
    }
}

impl core::error::Error for AddError {}

/// How reverse maps are kept: [`Chains`], or something to compare it with.
///
/// Each entry is in one reverse map at most, and whoever owns it keeps the position that [`add`](Self::add) and `moved`
/// give, so that nobody has to search for it.
pub trait ReverseMaps: Default + Send {
    /// What stands for one reverse map; the default is empty. It is used with the value that it was first used with.
    type Head: Default + fmt::Debug + Send;

    /// Adds an entry and gives its position, which is below 2048. Nothing is changed on an error.
    ///
    /// # Errors
    /// [`AddError`].
    fn add(&mut self, head: &mut Self::Head, entry: EntryRef) -> Result<usize, AddError>;

    /// Removes the entry, which is at `position`, and gives the one that is there now, if it was moved. An entry that
    /// is not there is not removed.
    fn remove(
        &mut self,
        head: &mut Self::Head,
        entry: EntryRef,
        position: usize,
    ) -> Option<EntryRef>;

    /// The entry at the last position, [`count`](Self::count) `- 1`.
    fn last(&self, head: &Self::Head) -> Option<EntryRef>;

    /// How many entries there are.
    fn count(&self, head: &Self::Head) -> usize;

    /// Calls `f` with each entry.
    fn for_each(&self, head: &Self::Head, f: impl FnMut(EntryRef));

    /// Bytes of the descriptors in use, beside the heads.
    fn bytes(&self) -> usize;
}
