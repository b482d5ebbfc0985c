//! The shadow of one guest as a whole, and the steps that its operations are made of.

use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};

use slat::{Gpa, GpaRange, Machine};

use crate::guest::GuestMemory;
use crate::memory::{Area, Areas, Frames};
use crate::page::{Page, PageId, Role, Word, entry_ref};
use crate::pages::Pages;
use crate::pte::{ENTRIES, LINK, PRESENT, is_leaf};
use crate::rmap::{AddError, Chains, EntryRef, ReverseMaps};

/// What an embedder chooses for a shadow.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ShadowOptions {
    /// The most shadow pages at once, each a table and 4.2 KiB beside it: at least 64, and below 2^22. At the limit,
    /// those that were not used of late are recycled.
    pub pages: usize,
    /// The most entries that may map one frame: 8 to 1024. One more, and all of them are zapped first; so there must be as
    /// many as one instruction of the guest may need of a frame at once, or it never gets through.
    pub mappings: usize,
}

impl Default for ShadowOptions {
    /// 16384 pages, 1000 mappings.
    fn default() -> Self {
        Self { pages: 16384, mappings: 1000 }
    }
}

/// The allocator has no memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OutOfMemory;

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the allocator has no memory")
    }
}

impl core::error::Error for OutOfMemory {}

/// Why an operation on a shadow was not done. What it had done by then is consistent; it can be tried again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ShadowError {
    /// The allocator has no memory, or the machine none for a table.
    OutOfMemory,
    /// An option is out of its range.
    Options(ShadowOptions),
    /// All shadow pages are roots in use, or the limit is too small for them and one walk.
    TooManyRoots,
    /// The virtual address is not canonical: a CPU would raise another exception.
    NotCanonical(u64),
    /// The second level has memory at an address that is in no slot of the shadow.
    NoSlot(Gpa),
    /// The slot is not made of whole pages, ends beyond 2^52, or overlaps another.
    Slot(GpaRange),
    /// There is no slot with these bounds.
    NoSuchSlot(GpaRange),
    /// The guest's root table cannot be: it is not below 2^52.
    Root(u64),
    /// The root is one of another shadow.
    OtherShadow,
}

impl fmt::Display for ShadowError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OutOfMemory => OutOfMemory.fmt(f),
            Self::Options(options) => write!(
                f,
                "{} shadow pages and {} mappings of a frame: there must be 64 to {} pages and {FEWEST} to {} mappings",
                options.pages,
                options.mappings,
                EntryRef::PAGES - 1,
                crate::rmap::MAX_ENTRIES,
            ),
            Self::TooManyRoots => {
                f.write_str("all shadow pages are in use as roots: drop some, or allow more pages")
            }
            Self::NotCanonical(gva) => write!(f, "{gva:#x} is no canonical virtual address"),
            Self::NoSlot(gpa) => {
                write!(
                    f,
                    "guest address {gpa} is mapped below but in no slot: create the slot here too"
                )
            }
            Self::Slot(range) => write!(
                f,
                "{:#x} bytes from {} are no slot: whole pages below 2^52 that no other slot has",
                range.size(),
                range.start()
            ),
            Self::NoSuchSlot(range) => {
                write!(f, "there is no slot of {:#x} bytes at {}", range.size(), range.start())
            }
            Self::Root(cr3) => write!(f, "{cr3:#x} is no address of a root table"),
            Self::OtherShadow => {
                f.write_str("the root belongs to another shadow: load it in this one")
            }
        }
    }
}

impl core::error::Error for ShadowError {}

impl From<OutOfMemory> for ShadowError {
    fn from(_: OutOfMemory) -> Self {
        Self::OutOfMemory
    }
}

/// The fewest mappings of a frame that can be the limit: those that one instruction may need.
const FEWEST: usize = 8;

/// What a shadow has done since it was made, and what there is now.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct ShadowStatistics {
    /// Entries that map pages, installed by faults.
    pub mapped: u64,
    /// Shadow pages made.
    pub pages_made: u64,
    /// Shadow pages recycled at the limit.
    pub recycled: u64,
    /// Times that a last-level table of the guest was opened for writing.
    pub unsynced: u64,
    /// Times that one was looked at again.
    pub synchronised: u64,
    /// Times that a frame had as many mappings as it may have, and lost them.
    pub overflows: u64,
    /// Flushes of all CPUs.
    pub flushes: u64,
    /// The most mappings that one frame had.
    pub most_mappings: usize,
    /// Shadow pages now.
    pub pages: usize,
}

/// The shadow of one guest: tables for hardware in place of the guest's own.
///
/// `R` is how reverse maps are kept.
#[derive(Debug)]
pub struct Shadow<'m, M: Machine, R: ReverseMaps = Chains> {
    pub(crate) machine: &'m M,
    /// Another for each shadow: what its roots know it by.
    pub(crate) number: u64,
    pub(crate) options: ShadowOptions,
    pub(crate) maps: R,
    pub(crate) areas: Areas<R::Head>,
    pub(crate) pages: Pages<R::Head>,
    /// Pages whose tables are free after the next flush, linked by `next`.
    dying: Option<PageId>,
    /// A CPU may still use what was taken out of entries.
    pub(crate) stale: bool,
    pub(crate) statistics: ShadowStatistics,
}

impl<'m, M: Machine> Shadow<'m, M> {
    /// An empty shadow. Tables come from `machine`, which has a granule of 4096 bytes.
    ///
    /// # Errors
    /// [`ShadowError::Options`], [`ShadowError::OutOfMemory`].
    pub fn new(machine: &'m M, options: ShadowOptions) -> Result<Self, ShadowError> {
        Self::with_reverse_maps(machine, options)
    }
}

impl<'m, M: Machine, R: ReverseMaps> Shadow<'m, M, R> {
    /// [`new`](Shadow::new), with reverse maps that are kept another way.
    ///
    /// # Errors
    /// As for [`new`](Shadow::new).
    pub fn with_reverse_maps(machine: &'m M, options: ShadowOptions) -> Result<Self, ShadowError> {
        let pages = 64..EntryRef::PAGES as usize;
        let mappings = FEWEST..=crate::rmap::MAX_ENTRIES;
        if !pages.contains(&options.pages) || !mappings.contains(&options.mappings) {
            return Err(ShadowError::Options(options));
        }
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Ok(Self {
            machine,
            number: NEXT.fetch_add(1, Ordering::Relaxed),
            options,
            maps: R::default(),
            areas: Areas::default(),
            pages: Pages::new(options.pages)?,
            dying: None,
            stale: false,
            statistics: ShadowStatistics::default(),
        })
    }

    /// Says that the guest has memory there: whole pages below 2^52 that no other slot has. Costs 8 bytes a page.
    ///
    /// # Errors
    /// [`ShadowError::Slot`], [`ShadowError::OutOfMemory`].
    pub fn create_slot(&mut self, range: GpaRange) -> Result<(), ShadowError> {
        let frames = Frames::of(range);
        let whole = (range.start().0 | range.size()) & 0xfff == 0;
        if !whole || range.end().0 > 1 << 52 || self.areas.overlap(frames).is_some() {
            return Err(ShadowError::Slot(range));
        }
        let mut area = Area::new(frames)?;
        for id in self.pages.all() {
            let page = self.pages.get(id);
            if !page.role.direct && frames.contains(page.frame) {
                area.count_table(page.frame, true);
            }
        }
        Ok(self.areas.insert(area)?)
    }

    /// What happened so far.
    pub fn statistics(&self) -> ShadowStatistics {
        ShadowStatistics { pages: self.pages.count(), ..self.statistics }
    }

    /// How the reverse maps are kept, for what they take.
    pub fn reverse_maps(&self) -> &R {
        &self.maps
    }

    /// Flushes what is stale, and frees the tables that nobody reaches any more. The end of every operation.
    pub(crate) fn settle(&mut self, memory: &impl GuestMemory) {
        if self.stale || self.dying.is_some() {
            self.flush(memory);
        }
        while let Some(id) = self.dying {
            let Some(page) = self.pages.remove(id) else { break };
            self.dying = page.next;
            #[expect(unsafe_code, reason = "tables go back to the machine")]
            // SAFETY: the table was allocated for this page alone. The page was linked nowhere when the flush began,
            // so no walk of hardware comes to it any more, and its number is gone from every entry and index.
            unsafe {
                self.machine.free(page.table, 1);
            }
        }
    }

    /// Takes every translation that is stale from every CPU.
    pub(crate) fn flush(&mut self, memory: &impl GuestMemory) {
        memory.flush();
        self.stale = false;
        self.statistics.flushes += 1;
    }

    /// The shadow page for this frame and role, made if there is none. A table of the guest is protected from writes
    /// when this returns.
    pub(crate) fn page_for(
        &mut self,
        memory: &impl GuestMemory,
        frame: u64,
        role: Role,
    ) -> Result<PageId, ShadowError> {
        if let Some(id) = self.pages.find(frame, role) {
            self.pages.get_mut(id).used = true;
            return Ok(id);
        }
        self.pages.reserve()?;
        let table = self.machine.allocate(1).ok_or(ShadowError::OutOfMemory)?;
        let page = match Page::new(table, frame, role) {
            Ok(page) => page,
            Err(error) => {
                #[expect(unsafe_code, reason = "tables go back to the machine")]
                // SAFETY: the table was allocated above and is linked nowhere.
                unsafe {
                    self.machine.free(table, 1);
                }
                return Err(error.into());
            }
        };
        let id = self.pages.insert(page);
        self.statistics.pages_made += 1;
        if !role.direct {
            if let Some(area) = self.areas.of_mut(frame) {
                area.count_table(frame, true);
            }
            self.protect_frame(frame);
            if self.stale {
                self.flush(memory);
            }
        }
        Ok(id)
    }

    /// Makes entry `index` of `parent` link `child`.
    pub(crate) fn link(
        &mut self,
        parent: PageId,
        index: usize,
        child: PageId,
    ) -> Result<(), ShadowError> {
        let entry = entry_ref(parent, index);
        let position = loop {
            match self.maps.add(&mut self.pages.get_mut(child).parents, entry) {
                Ok(position) => break position,
                Err(AddError::OutOfMemory) => return Err(ShadowError::OutOfMemory),
                Err(AddError::Full) => self.orphan(child),
            }
        };
        let child_page = self.pages.get_mut(child);
        child_page.used = true;
        let linked = child_page.table.0 | LINK;
        let page = self.pages.get_mut(parent);
        page.set_word(index, Word::new(u64::from(child), position));
        page.store(self.machine, index, linked);
        Ok(())
    }

    /// Notes in all that link a page that it, or a page below it, is unsync.
    pub(crate) fn note_unsync_above(&mut self, id: PageId) {
        // Taken out for the moment, so that other pages can be changed; none is added or removed.
        let parents = core::mem::take(&mut self.pages.get_mut(id).parents);
        note_above(&self.maps, &mut self.pages, &parents);
        self.pages.get_mut(id).parents = parents;
    }

    /// Empties a present entry, whatever it is.
    pub(crate) fn drop_entry(&mut self, id: PageId, index: usize) {
        let page = self.pages.get(id);
        let old = page.store(self.machine, index, 0);
        if old & PRESENT == 0 {
            return;
        }
        self.stale = true;
        let (word, level) = (page.word(index), page.role.level);
        let entry = entry_ref(id, index);
        let moved = if is_leaf(old, level) {
            let frame = word.what();
            let Some(area) = self.areas.of_mut(frame) else { return };
            let head = area.head_mut(level.height() as usize, frame);
            self.maps.remove(head, entry, word.position())
        } else {
            let child = word.what() as PageId;
            self.maps.remove(&mut self.pages.get_mut(child).parents, entry, word.position())
        };
        self.moved(moved, word.position());
    }

    /// Tells the owner of an entry its new position.
    pub(crate) fn moved(&mut self, entry: Option<EntryRef>, position: usize) {
        if let Some(entry) = entry {
            let page = self.pages.get_mut(entry.page());
            page.set_word(entry.index(), page.word(entry.index()).moved_to(position));
        }
    }

    /// Empties every entry that links a page.
    pub(crate) fn orphan(&mut self, id: PageId) {
        while let Some(entry) = self.maps.last(&self.pages.get(id).parents) {
            self.drop_entry(entry.page(), entry.index());
        }
    }

    /// Takes a page out: from all that link it, with all its entries, and from the index.
    pub(crate) fn zap_page(&mut self, id: PageId) {
        for index in 0..ENTRIES {
            self.drop_entry(id, index);
        }
        self.orphan(id);
        self.pages.hide(id);
        let page = self.pages.get_mut(id);
        page.zapped = true;
        let (frame, direct, held) = (page.frame, page.role.direct, page.roots > 0);
        if !direct && let Some(area) = self.areas.of_mut(frame) {
            area.count_table(frame, false);
        }
        if !held {
            self.bury(id);
        }
    }

    /// A page that is zapped and nobody's root: its table is freed after the next flush.
    pub(crate) fn bury(&mut self, id: PageId) {
        self.pages.get_mut(id).next = self.dying;
        self.dying = Some(id);
    }

    /// Makes room for one more walk's pages, by recycling.
    pub(crate) fn make_room(&mut self, memory: &impl GuestMemory) -> Result<(), ShadowError> {
        /// Levels of a walk, and a root.
        const WALK: usize = 6;
        /// Pages that are recycled at once, for one flush.
        const BATCH: usize = 32;
        if self.pages.count() + WALK <= self.options.pages {
            return Ok(());
        }
        for _ in 0..BATCH {
            let Some(id) = self.pages.idle() else { break };
            self.zap_page(id);
            self.statistics.recycled += 1;
        }
        self.settle(memory);
        if self.pages.count() + WALK <= self.options.pages {
            Ok(())
        } else {
            Err(ShadowError::TooManyRoots)
        }
    }
}

/// Marks the entries of `parents` as leading to unsync pages, and theirs.
fn note_above<R: ReverseMaps>(maps: &R, pages: &mut Pages<R::Head>, parents: &R::Head) {
    maps.for_each(parents, |entry| {
        let page = pages.get_mut(entry.page());
        if page.unsync_below.insert(entry.index()) {
            // A page is never above itself: levels grow upwards.
            let parents = core::mem::take(&mut page.parents);
            note_above(maps, pages, &parents);
            pages.get_mut(entry.page()).parents = parents;
        }
    });
}

impl<M: Machine, R: ReverseMaps> Drop for Shadow<'_, M, R> {
    /// Frees all tables: no CPU may run with any of them any more.
    fn drop(&mut self) {
        for page in self.pages.take_all() {
            #[expect(unsafe_code, reason = "tables go back to the machine")]
            // SAFETY: the table was allocated for this page alone; the embedder runs no CPU with it any more, as it
            // must not once the shadow is gone.
            unsafe {
                self.machine.free(page.table, 1);
            }
        }
    }
}
