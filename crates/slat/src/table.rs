//! A table in memory: the only place where entries are reached through pointers.
#![expect(unsafe_code, reason = "entries live in the machine's table memory, behind pointers")]

use core::marker::PhantomData;
use core::ptr::NonNull;

use crate::machine::{Event, Machine};
use crate::sync::Ordering;
use crate::{Entry, Hpa};

/// The first entry of a table that belongs to this thread.
pub(crate) fn first_entry<M: Machine>(machine: &M, table: Hpa) -> &Entry {
    // SAFETY: `Machine` promises that the pointer of an allocated table is valid until it is freed; the callers own
    // `table` and free it themselves.
    unsafe { machine.entries(table).as_ref() }
}

/// A table that was found in a tree, or made, and that cannot be freed during `'p`: either a pin lives as long, or
/// this thread owns the table.
pub(crate) struct Table<'p, M> {
    machine: &'p M,
    base: Hpa,
    first: NonNull<Entry>,
    lives: PhantomData<&'p Entry>,
}

impl<M> Clone for Table<'_, M> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<M> Copy for Table<'_, M> {}

impl<'p, M: Machine> Table<'p, M> {
    /// The table at `base`.
    ///
    /// # Safety
    /// `base` is a table (or root) of `machine` that is not freed during `'p`. Every index given to the methods is
    /// below its number of entries.
    #[inline(always)]
    pub(crate) unsafe fn new(machine: &'p M, base: Hpa) -> Self {
        Self { machine, base, first: machine.entries(base), lives: PhantomData }
    }

    /// Where it is.
    #[inline(always)]
    pub(crate) fn base(&self) -> Hpa {
        self.base
    }

    #[inline(always)]
    pub(crate) fn machine(&self) -> &'p M {
        self.machine
    }

    #[inline(always)]
    fn address(&self, index: usize) -> Hpa {
        Hpa(self.base.0 + 8 * index as u64)
    }

    #[inline(always)]
    pub(crate) fn entry(&self, index: usize) -> &'p Entry {
        // SAFETY: `new`'s caller promised that the table lives during `'p` and has more than `index` entries.
        unsafe { self.first.add(index).as_ref() }
    }

    /// Reads one entry. Acquire: what the entry points to was stored before it was linked.
    #[inline(always)]
    pub(crate) fn load(&self, index: usize) -> u64 {
        self.machine.observe(Event::Load { entry: self.address(index) });
        self.entry(index).0.load(Ordering::Acquire)
    }

    /// Rule 2: changes one entry from exactly the value that was read.
    #[inline(always)]
    pub(crate) fn exchange(&self, index: usize, old: u64, new: u64) -> Result<(), u64> {
        // Release: what `new` points to is complete. Acquire: whoever put `old` there is done with it.
        let result =
            self.entry(index).0.compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire);
        self.machine.observe(Event::Exchange {
            entry: self.address(index),
            old,
            new,
            done: result.is_ok(),
        });
        result.map(|_| ())
    }

    /// Stores one entry that this thread owns: it locked it (rule 3), or nobody else knows the table yet.
    #[inline(always)]
    pub(crate) fn settle(&self, index: usize, new: u64) {
        self.machine.observe(Event::Store { entry: self.address(index), new });
        self.entry(index).0.store(new, Ordering::Release);
    }

    /// Stores `entry(i)` for each `i` of `from..to` of a table that is not linked. The link releases them.
    #[inline(always)]
    pub(crate) fn fill(&self, from: usize, to: usize, entry: impl Fn(usize) -> u64) {
        for index in from..to {
            self.entry(index).0.store(entry(index), Ordering::Relaxed);
        }
        self.machine.observe(Event::Fill { table: self.base });
    }
}
