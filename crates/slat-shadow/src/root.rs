//! Roots: what a CPU runs with in place of the guest's `CR3`.

use slat::{Hpa, Machine};

use crate::guest::{GuestMemory, PagingMode};
use crate::page::{PageId, Role};
use crate::pte::{PAGE_SHIFT, Rights};
use crate::rmap::ReverseMaps;
use crate::shadow::{Shadow, ShadowError};

/// A shadow page that a vCPU uses as its root. Give it back with [`Shadow::drop_root`]; one that is dropped keeps its
/// page until the shadow goes.
#[derive(PartialEq, Eq, Debug)]
#[must_use = "a root that is not given back keeps its page"]
pub struct Root {
    pub(crate) page: PageId,
    /// The frame of the guest's root table.
    pub(crate) frame: u64,
    pub(crate) mode: PagingMode,
    table: Hpa,
    /// The number of its shadow.
    shadow: u64,
}

impl Root {
    /// The table for `CR3` of the CPU.
    pub fn table(&self) -> Hpa {
        self.table
    }
}

impl<M: Machine, R: ReverseMaps> Shadow<'_, M, R> {
    /// The guest loads `cr3`: the root to run with. Tables of the guest that it wrote to since are looked at, as its CPU
    /// would no longer use what they said before. Bits of `cr3` that are no address are ignored.
    ///
    /// # Errors
    /// [`ShadowError`].
    pub fn load_root(
        &mut self,
        memory: &impl GuestMemory,
        mode: PagingMode,
        cr3: u64,
    ) -> Result<Root, ShadowError> {
        let frame = (cr3 & !(1 << 63)) >> PAGE_SHIFT;
        if frame >> (52 - PAGE_SHIFT) != 0 {
            return Err(ShadowError::Root(cr3));
        }
        let loaded = self.load(memory, mode, frame);
        self.settle(memory);
        loaded
    }

    fn load(
        &mut self,
        memory: &impl GuestMemory,
        mode: PagingMode,
        frame: u64,
    ) -> Result<Root, ShadowError> {
        let role = Role {
            level: mode.top(),
            direct: false,
            rights: Rights::ALL,
            no_execute: mode.no_execute,
        };
        self.make_room(memory)?;
        let page = self.page_for(memory, frame, role)?;
        let root = self.pages.get_mut(page);
        root.roots += 1;
        let table = root.table;
        self.synchronise_below(memory, mode, page);
        Ok(Root { page, frame, mode, table, shadow: self.number })
    }

    /// A vCPU no longer uses a root. It has loaded another, or does not run.
    ///
    /// # Errors
    /// [`ShadowError::OtherShadow`].
    pub fn drop_root(&mut self, memory: &impl GuestMemory, root: Root) -> Result<(), ShadowError> {
        self.admit(&root)?;
        let page = self.pages.get_mut(root.page);
        page.roots = page.roots.saturating_sub(1);
        if page.roots == 0 && page.zapped {
            self.bury(root.page);
            self.settle(memory);
        }
        Ok(())
    }

    /// Whether the root is one of this shadow.
    pub(crate) fn admit(&self, root: &Root) -> Result<(), ShadowError> {
        if root.shadow == self.number { Ok(()) } else { Err(ShadowError::OtherShadow) }
    }
}
