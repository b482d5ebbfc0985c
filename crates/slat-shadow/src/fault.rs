//! A page fault of the guest's CPU: the guest's own, or one that the shadow has to see to.

use slat::{Gpa, Level, Machine};
use slat_vm::Access;

use crate::guest::{Below, GuestAccess, GuestMemory, PagingMode};
use crate::page::{PageId, Role, Word, entry_ref};
use crate::pte::{
    ACCESSED, ADDRESS, DIRTY, LARGE, PAGE_SHIFT, PRESENT, Rights, UNCACHED, index, is_leaf, pages,
    shift,
};
use crate::rmap::{AddError, ReverseMaps};
use crate::root::Root;
use crate::shadow::{Shadow, ShadowError};
use crate::walk::{ErrorCode, Walk, WalkError, walk};

/// What to do after a page fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ShadowExit {
    /// Run the guest again: the access will be let through.
    Resume,
    /// Run the guest again: it may fault once more.
    Retry,
    /// The root is gone: load it again ([`Shadow::load_root`]), then run the guest.
    ReloadRoot,
    /// The guest's own fault: inject it, with the address that faulted in `CR2`.
    PageFault(ErrorCode),
    /// The second level does not let the guest do this, to this guest-physical address: have it handled as a fault of
    /// the second level ([`slat_vm::Vcpu::fault`]), not holding the lock of the shadow, then run the guest again. What is
    /// to be emulated there, is to be emulated.
    SecondLevel {
        /// The guest-physical address: that of the access, or of an entry of the guest's tables.
        gpa: Gpa,
        /// What is wanted there.
        access: Access,
        /// Something is mapped there, which does not permit it.
        permission: bool,
    },
    /// The guest writes to one of its tables, which must not change unseen, or to a page that is read-only for all but
    /// a kernel with `CR0.WP` clear. Emulate the store and say [`Shadow::written`]; or, for a table,
    /// [`Shadow::unprotect`] it and run the guest again.
    EmulateWrite {
        /// The guest-physical address of the store.
        gpa: Gpa,
    },
}

impl<M: Machine, R: ReverseMaps> Shadow<'_, M, R> {
    /// Handles a page fault at `gva` of a CPU that runs with `root`.
    ///
    /// Costs the walk of the guest's tables, a look-up below, and the entries that are not there yet; a flush of all CPUs
    /// for each table of the guest that is shadowed for the first time and was writable.
    ///
    /// # Errors
    /// [`ShadowError`]. Nothing is mapped then that was not, and the fault can be handled again.
    pub fn fault(
        &mut self,
        memory: &impl GuestMemory,
        root: &Root,
        gva: u64,
        access: GuestAccess,
    ) -> Result<ShadowExit, ShadowError> {
        self.admit(root)?;
        let exit = self.handle(memory, root, gva, access);
        self.settle(memory);
        exit
    }

    fn handle(
        &mut self,
        memory: &impl GuestMemory,
        root: &Root,
        gva: u64,
        access: GuestAccess,
    ) -> Result<ShadowExit, ShadowError> {
        let mode = root.mode;
        let sign = 64 - if mode.five_level { 57 } else { 48 };
        if ((gva << sign) as i64 >> sign) as u64 != gva {
            return Err(ShadowError::NotCanonical(gva));
        }
        if self.pages.get(root.page).zapped {
            return Ok(ShadowExit::ReloadRoot);
        }
        let walk = match walk(memory, mode, root.frame, gva, access) {
            Ok(walk) => walk,
            Err(WalkError::PageFault(code)) => return Ok(ShadowExit::PageFault(code)),
            Err(WalkError::Changed) => return Ok(ShadowExit::Retry),
            Err(WalkError::Missing { gpa, write }) => {
                let access = if write { Access::Write } else { Access::Read };
                let permission = memory.below(gpa).is_some();
                return Ok(ShadowExit::SecondLevel { gpa, access, permission });
            }
        };
        let gpa = Gpa(walk.frame << PAGE_SHIFT | gva & 0xfff);
        let writes = access.kind == Access::Write;
        let below = memory.below(gpa);
        let Some(below) = below.filter(|below| below.writable || !writes) else {
            let permission = below.is_some();
            return Ok(ShadowExit::SecondLevel { gpa, access: access.kind, permission });
        };
        if walk.unprotected || writes && !self.open_table(walk.frame) {
            return Ok(ShadowExit::EmulateWrite { gpa });
        }
        if self.areas.of(walk.frame).is_none() {
            return Err(ShadowError::NoSlot(gpa));
        }
        self.make_room(memory)?;
        self.install(memory, root, gva, &walk, &below)
    }

    /// Lets the guest write to this frame if no table of it has to be followed write by write, and says whether.
    fn open_table(&mut self, frame: u64) -> bool {
        if self.pages.shadowing(frame).any(|id| self.pages.get(id).role.level != Level::LAST) {
            return false;
        }
        loop {
            let closed = self.pages.shadowing(frame).find(|&id| !self.pages.get(id).unsync);
            let Some(id) = closed else { break };
            self.pages.get_mut(id).unsync = true;
            self.statistics.unsynced += 1;
            self.note_unsync_above(id);
        }
        true
    }

    /// Whether the guest writes to the frame without being seen: it holds no table that is synchronised.
    fn is_open(&self, frame: u64) -> bool {
        self.pages.shadowing(frame).all(|id| self.pages.get(id).unsync)
    }

    /// The level at which to map the page: as high as the guest, the memory below and the slot have it.
    fn level_for(&self, walk: &Walk, below: &Below) -> Level {
        let area = self.areas.of(walk.frame);
        let mut level = Level::LAST;
        for number in (1..Level::LAST.number()).rev() {
            let Some(higher) = Level::new(number) else { break };
            let fits = higher >= walk.leaf
                && below.size >> shift(higher) != 0
                && area.is_some_and(|area| area.may_map(higher, walk.frame));
            if !fits {
                break;
            }
            level = higher;
        }
        level
    }

    fn install(
        &mut self,
        memory: &impl GuestMemory,
        root: &Root,
        gva: u64,
        walk: &Walk,
        below: &Below,
    ) -> Result<ShadowExit, ShadowError> {
        let target = self.level_for(walk, below);
        let mut id = root.page;
        let mut level = root.mode.top();
        while level != target {
            let at = index(gva, level);
            let (frame, role) = below_entry(root.mode, walk, level);
            let entry = self.pages.get(id).entry(self.machine, at).read();
            let linked = self.linked(id, at, entry);
            let fitting = linked.filter(|&child| {
                let page = self.pages.get(child);
                (page.frame, page.role) == (frame, role)
            });
            id = match fitting {
                Some(child) => child,
                None => {
                    if entry & PRESENT != 0 {
                        self.drop_entry(id, at);
                    }
                    let child = self.page_for(memory, frame, role)?;
                    // The table is protected only now, and may have changed since the walk.
                    if !role.direct {
                        let step = walk.step(level.below());
                        if memory.read(step.gpa) != Ok(step.entry) {
                            return Ok(ShadowExit::Retry);
                        }
                    }
                    // Before it was linked no flush came by, here or below.
                    if self.pages.get(child).unsync {
                        self.synchronise_page(memory, root.mode, child);
                    }
                    self.synchronise_below(memory, root.mode, child);
                    self.link(id, at, child)?;
                    child
                }
            };
            level = level.below();
        }
        let open = self.is_open(walk.frame);
        self.map(memory, id, gva, walk, below, open)
    }

    /// The page that a present entry links.
    pub(crate) fn linked(&self, id: PageId, index: usize, entry: u64) -> Option<PageId> {
        let page = self.pages.get(id);
        let links = entry & PRESENT != 0 && !is_leaf(entry, page.role.level);
        links.then(|| page.word(index).what() as PageId)
    }

    /// Makes the entry that maps the page, in the shadow page `id`.
    fn map(
        &mut self,
        memory: &impl GuestMemory,
        id: PageId,
        gva: u64,
        walk: &Walk,
        below: &Below,
        open: bool,
    ) -> Result<ShadowExit, ShadowError> {
        let level = self.pages.get(id).role.level;
        let at = index(gva, level);
        let mask = pages(level) - 1;
        let frame = walk.frame & !mask;
        let mut rights = walk.rights;
        if !(below.writable && open && walk.is_dirty()) {
            rights = rights.without(Rights::WRITE);
        }
        let output = below.output.0 & !((1 << shift(level)) - 1);
        let mut new = output | PRESENT | ACCESSED | rights.bits();
        if rights.contains(Rights::WRITE) {
            new |= DIRTY;
        }
        if level != Level::LAST {
            new |= LARGE;
        }
        if below.device {
            new |= UNCACHED;
        }
        let page = self.pages.get(id);
        let old = page.entry(self.machine, at).read();
        if old & PRESENT != 0 {
            let same = is_leaf(old, level)
                && page.word(at).what() == frame
                && (old ^ new) & (ADDRESS | LARGE | UNCACHED) == 0;
            if same {
                let old = page.store(self.machine, at, new);
                let (had, has) = (Rights::of(old), Rights::of(new));
                self.stale |= !has.contains(had);
                return Ok(ShadowExit::Resume);
            }
            self.drop_entry(id, at);
        }
        // Another size or place of the same page must be gone before it is mapped anew.
        if self.stale {
            self.flush(memory);
        }
        let height = level.height() as usize;
        let entry = entry_ref(id, at);
        let Some(head) = self.areas.of(frame).map(|area| area.head(height, frame)) else {
            return Err(ShadowError::NoSlot(Gpa(frame << PAGE_SHIFT)));
        };
        if self.maps.count(head) >= self.options.mappings {
            self.statistics.overflows += 1;
            self.zap_head(height, frame);
            self.flush(memory);
        }
        let Some(area) = self.areas.of_mut(frame) else { return Ok(ShadowExit::Retry) };
        let head = area.head_mut(height, frame);
        let position = match self.maps.add(head, entry) {
            Ok(position) => position,
            Err(AddError::OutOfMemory) => return Err(ShadowError::OutOfMemory),
            // The limit of mappings is at most that of a reverse map.
            Err(AddError::Full) => return Ok(ShadowExit::Retry),
        };
        self.statistics.most_mappings = self.statistics.most_mappings.max(position + 1);
        self.statistics.mapped += 1;
        let page = self.pages.get_mut(id);
        page.set_word(at, Word::new(frame, position));
        page.store(self.machine, at, new);
        Ok(ShadowExit::Resume)
    }
}

/// What the page is that an entry at `level` on the way must link: the guest's own table, or a part of its large page.
fn below_entry(mode: PagingMode, walk: &Walk, level: Level) -> (u64, Role) {
    let child = level.below();
    let no_execute = mode.no_execute;
    if child <= walk.leaf {
        let step = walk.step(child);
        let role = Role { level: child, direct: false, rights: step.inherited, no_execute };
        (step.gpa.0 >> PAGE_SHIFT, role)
    } else {
        let mut rights = walk.rights;
        if !walk.is_dirty() {
            rights = rights.without(Rights::WRITE);
        }
        let frame = walk.frame & !(pages(level) - 1);
        (frame, Role { level: child, direct: true, rights, no_execute })
    }
}
