//! Tables in hand: allocated before an operation, so that nothing is allocated inside one.

use core::fmt;

use crate::entry::EMPTY;
use crate::machine::Machine;
use crate::sync::Ordering;
use crate::{Hpa, table};

/// The machine has no memory for another table. What the reserve already held it still holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NoMemory {
    /// How many more tables were wanted.
    pub missing: usize,
}

impl fmt::Display for NoMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no memory for {} more page tables", self.missing)
    }
}

impl core::error::Error for NoMemory {}

/// Zeroed tables that belong to one thread until an operation links them into a tree. Dropping it frees them.
///
/// The tables are chained through their own first entries, so a reserve of any size needs no other memory.
#[derive(Debug)]
pub struct Reserve<'m, M: Machine> {
    machine: &'m M,
    first: Option<Hpa>,
    len: usize,
}

impl<'m, M: Machine> Reserve<'m, M> {
    /// An empty reserve.
    pub fn new(machine: &'m M) -> Self {
        Self { machine, first: None, len: 0 }
    }

    /// The machine that it allocates from.
    pub(crate) fn machine(&self) -> &'m M {
        self.machine
    }

    /// How many tables are in hand.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Allocates until at least `tables` are in hand. Not to be called while pinned.
    ///
    /// # Errors
    /// [`NoMemory`] when the machine has no more; those allocated so far stay in hand.
    #[inline(always)]
    pub fn top_up(&mut self, tables: usize) -> Result<(), NoMemory> {
        if self.len >= tables { Ok(()) } else { self.allocate(tables) }
    }

    #[cold]
    fn allocate(&mut self, tables: usize) -> Result<(), NoMemory> {
        while self.len < tables {
            match self.machine.allocate(1) {
                Some(table) => self.give(table),
                None => return Err(NoMemory { missing: tables - self.len }),
            }
        }
        Ok(())
    }

    /// Takes one zeroed table out.
    #[inline]
    pub(crate) fn take(&mut self) -> Option<Hpa> {
        let taken = self.first?;
        let link = table::first_entry(self.machine, taken);
        // The table is this thread's alone: no order is needed.
        let next = link.0.load(Ordering::Relaxed);
        link.0.store(EMPTY, Ordering::Relaxed);
        self.first = (next & 1 == 1).then_some(Hpa(next & !1));
        self.len -= 1;
        Some(taken)
    }

    /// Puts a table back that is zeroed and was not linked.
    #[inline]
    pub(crate) fn give(&mut self, returned: Hpa) {
        let next = self.first.map_or(EMPTY, |next| next.0 | 1);
        table::first_entry(self.machine, returned).0.store(next, Ordering::Relaxed);
        self.first = Some(returned);
        self.len += 1;
    }
}

impl<M: Machine> Drop for Reserve<'_, M> {
    #[expect(unsafe_code, reason = "frees tables through the machine")]
    fn drop(&mut self) {
        while let Some(table) = self.take() {
            // SAFETY: `table` came from `allocate(1)` and was never linked, so no walker can reach it.
            unsafe { self.machine.free(table, 1) }
        }
    }
}
