//! A tree of tables: its root, its shape, and whose translations it makes.

use crate::backlog::Backlog;
use crate::entry::EMPTY;
use crate::format::FormatError;
use crate::machine::Machine;
use crate::maintenance::{Context, Invalidation, Maintenance};
use crate::rcu::{Counters, bump};
use crate::sabotage::{Skip, skips};
use crate::sync::{AtomicUsize, Ordering};
use crate::table::Table;
use crate::vmid::TreeVmid;
use crate::{Attributes, Error, Format, Geometry, Gpa, GpaRange, Hpa, Level, NoMemory, Pin};

/// One second-level address space: a root, and all operations on it, each shared with running vCPUs and with each
/// other.
///
/// Operations on a range take a [`Participant`](crate::Participant) and pin it themselves, a table's worth of entries
/// at a time; operations on one address take a [`Pin`], so that the caller can check what else must hold in the same
/// pin (rules 7, 8 and 10). Those that may wait for a grace period, since they free tables, take the participant mutably:
/// that is how the compiler knows that it is not pinned.
#[derive(Debug)]
pub struct Tree<'m, F: Format, M: Machine> {
    pub(crate) machine: &'m M,
    pub(crate) format: F,
    root: Hpa,
    vmid: TreeVmid,
    /// Rule 9: how many operations have exchanged entries and not yet invalidated.
    pub(crate) open: AtomicUsize,
    /// How many blocks are being split without break-before-make: the blocks may still be cached, so that no
    /// invalidation may spare their level.
    pub(crate) resizing: AtomicUsize,
    pub(crate) backlog: Backlog,
    pub(crate) pairs: bool,
}

/// The bits of leaf entries that do not depend on address or level, made once by [`Tree::template`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Template(pub(crate) u64);

impl<'m, F: Format, M: Machine> Tree<'m, F, M> {
    /// An empty tree. `identifier` is the VMID or ASID under which hardware caches its translations; 0 for one that
    /// [`Vmids`](crate::vmid::Vmids) is to give ([`vmid`](Self::vmid)).
    ///
    /// # Errors
    /// [`NoMemory`] if the machine cannot give the root tables, contiguous and aligned, and one page for the backlog.
    pub fn new(machine: &'m M, format: F, identifier: u16) -> Result<Self, NoMemory> {
        let tables = format.geometry().root_tables();
        let root = machine.allocate(tables).ok_or(NoMemory { missing: tables })?;
        let Some(page) = machine.allocate(1) else {
            Self::free_tables(machine, root, tables);
            return Err(NoMemory { missing: 1 });
        };
        let tree = Self {
            machine,
            format,
            root,
            vmid: TreeVmid::fixed(identifier),
            open: AtomicUsize::new(0),
            resizing: AtomicUsize::new(0),
            backlog: Backlog::new(page, F::INDEX_BITS),
            pairs: crate::table::has_pair_exchange(),
        };
        tree.blank(root, tables);
        F::Maintenance::publish(machine);
        Ok(tree)
    }

    /// The format.
    pub fn format(&self) -> &F {
        &self.format
    }

    /// The shape.
    pub fn geometry(&self) -> &Geometry {
        self.format.geometry()
    }

    /// The machine.
    pub fn machine(&self) -> &'m M {
        self.machine
    }

    /// The value for the hardware's root register (Arm: `VTTBR_EL2`; x86: EPTP or nCR3), under the identifier that the
    /// tree has now.
    pub fn root_register(&self) -> u64 {
        F::Maintenance::root(self.root, self.format.identifier(self.vmid.to_invalidate()))
    }

    /// What a vCPU of this tree does that found [`Requests::INVALIDATE`](crate::gate::Requests::INVALIDATE) at its gate, on
    /// the CPU on which it will enter. Nothing where invalidations are broadcast (Arm).
    pub fn answer(&self) {
        F::Maintenance::answer(self.machine, &self.context());
    }

    /// Where the root tables are.
    pub fn root(&self) -> Hpa {
        self.root
    }

    /// The tree's identifier, for [`Vmids::current`](crate::vmid::Vmids::current): each vCPU calls that before it enters
    /// the guest, and then reads [`root_register`](Self::root_register). Not for a tree that was made with an identifier
    /// of its own.
    pub fn vmid(&self) -> &TreeVmid {
        &self.vmid
    }

    /// Attributes as the bits that this tree's leaves carry; made once, used for any number of entries.
    ///
    /// # Errors
    /// What the format cannot express.
    pub fn template(&self, attributes: Attributes) -> Result<Template, FormatError> {
        self.format.template(attributes).map(Template)
    }

    /// Template bits in words.
    pub fn attributes(&self, template: Template) -> Attributes {
        self.format.attributes(template.0)
    }

    /// The root as a table; `pin` is why nothing found from here is freed.
    #[inline(always)]
    #[expect(unsafe_code, reason = "a tree vouches for its root")]
    pub(crate) fn root_table<'p>(&self, pin: &'p Pin<'_, M>) -> Table<'p, M> {
        // SAFETY: the root belongs to the tree and is freed in its drop, when no method of it runs any more.
        unsafe { Table::new(pin.machine(), self.root) }
    }

    /// The table that `entry`, read from a table of this tree under the pin `'p`, points to.
    #[inline(always)]
    #[expect(unsafe_code, reason = "a table entry that was read under a pin names a live table")]
    pub(crate) fn child<'p>(&self, parent: Table<'p, M>, entry: u64) -> Table<'p, M> {
        // SAFETY: only this crate stores table entries, always of allocated tables, and a table is freed only after a
        // grace period that began after its link went (rule 5); `'p` is within a pin.
        unsafe { Table::new(parent.machine(), self.format.next(entry)) }
    }

    /// Makes every entry of zeroed tables that this thread owns an empty one; nothing where those are zero.
    #[inline(always)]
    pub(crate) fn blank(&self, first: Hpa, tables: usize) {
        if F::EMPTY != EMPTY {
            for table in (0..tables as u64).map(|n| Hpa(first.0 + n * self.geometry().page_size()))
            {
                self.owned(table).fill(0, self.geometry().entries(), |_| F::EMPTY);
            }
        }
    }

    /// A table of this tree that was found under this very pin.
    #[inline(always)]
    #[expect(unsafe_code, reason = "a table that was found under a pin lives as long as it")]
    pub(crate) fn found<'p>(&self, pin: &'p Pin<'_, M>, base: Hpa) -> Table<'p, M> {
        // SAFETY: as for `child`; callers remember `base` from a visit under the same pin.
        unsafe { Table::new(pin.machine(), base) }
    }

    /// A table that this thread owns: taken from a reserve, not linked.
    #[inline(always)]
    #[expect(unsafe_code, reason = "the owner of a table vouches for it")]
    pub(crate) fn owned(&self, table: Hpa) -> Table<'m, M> {
        // SAFETY: callers pass what they took from a `Reserve`, or a detached table after its grace period, and free
        // it only after their last use of this value.
        unsafe { Table::new(self.machine, table) }
    }

    #[expect(unsafe_code, reason = "frees tables through the machine")]
    pub(crate) fn free_tables(machine: &M, first: Hpa, tables: usize) {
        // SAFETY: callers own the tables: never linked, or detached before a grace period that has ended.
        unsafe { machine.free(first, tables) }
    }

    /// Pins and reserves guard only tables of their own machine.
    #[inline(always)]
    pub(crate) fn check_machine(&self, other: &M) -> Result<(), Error> {
        if core::ptr::eq(self.machine, other) { Ok(()) } else { Err(Error::OtherMachine) }
    }

    /// A template of this tree, or of one that is configured alike.
    #[inline(always)]
    pub(crate) fn check_template(&self, template: Template) -> Result<(), Error> {
        if self.format.fits(template.0) { Ok(()) } else { Err(Error::OtherFormat) }
    }

    /// A range whose every address the tree can translate, in whole granules.
    pub(crate) fn check(&self, range: GpaRange) -> Result<(), Error> {
        self.check_address(range.start(), self.geometry().page_size())?;
        let limit = self.geometry().limit();
        if range.end().0 > limit.0 {
            return Err(Error::OutOfRange { limit });
        }
        if range.end().0 & (self.geometry().page_size() - 1) != 0 {
            return Err(Error::Misaligned { to: self.geometry().page_size() });
        }
        Ok(())
    }

    #[inline(always)]
    pub(crate) fn check_address(&self, gpa: Gpa, align: u64) -> Result<(), Error> {
        let limit = self.geometry().limit();
        if gpa.0 >= limit.0 {
            return Err(Error::OutOfRange { limit });
        }
        if gpa.0 & (align - 1) != 0 {
            return Err(Error::Misaligned { to: align });
        }
        Ok(())
    }

    /// Output addresses that the format can express, aligned to a leaf at `level`.
    #[inline(always)]
    pub(crate) fn check_output(&self, output: Hpa, size: u64, level: Level) -> Result<(), Error> {
        let align = self.geometry().size(level);
        if output.0 & (align - 1) != 0 {
            return Err(Error::Misaligned { to: align });
        }
        let bits = self.format.output_bits();
        match output.0.checked_add(size) {
            Some(end) if end <= 1 << bits => Ok(()),
            _ => Err(Error::OutputTooLarge { bits }),
        }
    }

    /// One publish (rule 3, and at the end of each walk that installed something).
    #[inline(always)]
    pub(crate) fn publish(&self, counters: &Counters) {
        bump(&counters.publishes, 1);
        F::Maintenance::publish(self.machine);
    }

    /// One invalidation on every CPU, complete on return.
    pub(crate) fn invalidate(&self, counters: &Counters, mut what: Invalidation) {
        // Acquire, after the exchanges: a block whose table these entries are in is either gone from every TLB, or seen
        // here to be cached still, at a level that a hint would spare.
        if self.resizing.load(Ordering::Acquire) != 0 && !skips(Skip::Resizing) {
            what.level = None;
        }
        self.invalidate_level(counters, what);
    }

    /// The same, with the level hint as it is.
    pub(crate) fn invalidate_level(&self, counters: &Counters, what: Invalidation) {
        bump(&counters.invalidations, 1);
        if skips(Skip::Invalidation) {
            return;
        }
        F::Maintenance::invalidate(self.machine, &self.context(), what);
    }

    /// One invalidation on this CPU, complete on return, where a fault has not done it by itself.
    pub(crate) fn invalidate_local(&self, counters: &Counters, gpa: Gpa) {
        if F::Maintenance::FAULT_INVALIDATES {
            return;
        }
        bump(&counters.local_invalidations, 1);
        if skips(Skip::LocalInvalidation) {
            return;
        }
        F::Maintenance::invalidate_local(self.machine, &self.context(), gpa);
    }

    /// Everything this tree ever translated, on every CPU.
    pub(crate) fn invalidate_all(&self) {
        let what = Invalidation { range: None, level: None };
        F::Maintenance::invalidate(self.machine, &self.context(), what);
    }

    /// Read after the exchanges: see [`TreeVmid::to_invalidate`].
    fn context(&self) -> Context {
        Context { root: self.root_register(), page_shift: F::PAGE_SHIFT }
    }
}

impl<F: Format, M: Machine> Drop for Tree<'_, F, M> {
    /// Invalidates everything and frees every table. Nobody uses the tree any more, so no grace period is needed; use
    /// [`destroy`](Self::destroy) where that would take too long at once.
    fn drop(&mut self) {
        self.invalidate_all();
        self.drop_backlog();
        let start = self.geometry().start();
        for index in 0..self.geometry().root_entries() {
            let entry = self.owned(self.root).entry(index).read();
            if F::is_table(entry, start) {
                self.free_subtree(self.format.next(entry), start.below());
            }
        }
        Self::free_tables(self.machine, self.root, self.geometry().root_tables());
    }
}
