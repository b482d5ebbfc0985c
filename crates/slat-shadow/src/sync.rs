//! Looking again at tables that the guest wrote to unseen: its CPU no longer uses what they said before.

use slat::{Level, Machine};

use crate::guest::{GuestMemory, PagingMode};
use crate::memory::entry_gpa;
use crate::page::PageId;
use crate::pte::{ACCESSED, ADDRESS, DIRTY, ENTRIES, PAGE_SHIFT, PRESENT, Rights, index, is_leaf};
use crate::rmap::ReverseMaps;
use crate::root::Root;
use crate::shadow::{Shadow, ShadowError};
use crate::walk::reserved;

impl<M: Machine, R: ReverseMaps> Shadow<'_, M, R> {
    /// The guest flushes all of its CPU's translations, without loading another root. The CPU's own TLB is the caller's
    /// to flush.
    ///
    /// # Errors
    /// [`ShadowError::OtherShadow`].
    pub fn synchronise(
        &mut self,
        memory: &impl GuestMemory,
        root: &Root,
    ) -> Result<(), ShadowError> {
        self.admit(root)?;
        self.synchronise_below(memory, root.mode, root.page);
        self.settle(memory);
        Ok(())
    }

    /// The guest invalidates one page (`INVLPG`). The CPU's own TLB is the caller's to invalidate.
    ///
    /// # Errors
    /// [`ShadowError::OtherShadow`].
    pub fn invalidate_page(
        &mut self,
        memory: &impl GuestMemory,
        root: &Root,
        gva: u64,
    ) -> Result<(), ShadowError> {
        self.admit(root)?;
        let (mut id, mut level) = (root.page, root.mode.top());
        loop {
            let page = self.pages.get(id);
            let at = index(gva, level);
            let entry = page.entry(self.machine, at).read();
            if entry & PRESENT == 0 {
                break;
            }
            if is_leaf(entry, level) {
                // What is not unsync says what the guest's table says.
                if page.unsync {
                    self.drop_entry(id, at);
                }
                break;
            }
            let Some(child) = self.linked(id, at, entry) else { break };
            (id, level) = (child, level.below());
        }
        self.settle(memory);
        Ok(())
    }

    /// Looks at every page below that is unsync.
    pub(crate) fn synchronise_below(
        &mut self,
        memory: &impl GuestMemory,
        mode: PagingMode,
        id: PageId,
    ) {
        let mut at = 0;
        while let Some(index) = self.pages.get(id).unsync_below.from(at) {
            let entry = self.pages.get(id).entry(self.machine, index).read();
            if let Some(child) = self.linked(id, index, entry) {
                if self.pages.get(child).unsync {
                    self.synchronise_page(memory, mode, child);
                }
                if self.pages.get(child).role.level != Level::LAST {
                    self.synchronise_below(memory, mode, child);
                }
            }
            self.pages.get_mut(id).unsync_below.remove(index);
            at = index + 1;
        }
    }

    /// Protects the table that a page shadows again, and takes from its entries what the table no longer gives.
    pub(crate) fn synchronise_page(
        &mut self,
        memory: &impl GuestMemory,
        mode: PagingMode,
        id: PageId,
    ) {
        self.statistics.synchronised += 1;
        let page = self.pages.get_mut(id);
        page.unsync = false;
        let (frame, role) = (page.frame, page.role);
        let mode = PagingMode { no_execute: role.no_execute, ..mode };
        // Before it is read: what is written after that faults.
        self.protect_frame(frame);
        if self.stale {
            self.flush(memory);
        }
        for at in 0..ENTRIES {
            let page = self.pages.get(id);
            let old = page.entry(self.machine, at).read();
            if old & PRESENT == 0 {
                continue;
            }
            let said = memory.read(entry_gpa(frame, at)).ok().filter(|&said| {
                said & (PRESENT | ACCESSED) == PRESENT | ACCESSED
                    && !reserved(mode, said, Level::LAST)
                    && (said & ADDRESS) >> PAGE_SHIFT == page.word(at).what()
            });
            let Some(said) = said else {
                self.drop_entry(id, at);
                continue;
            };
            let mut rights = role.rights & Rights::of(said);
            if said & DIRTY == 0 {
                rights = rights.without(Rights::WRITE);
            }
            self.stale |= page.restrict(self.machine, at, rights);
        }
    }
}
