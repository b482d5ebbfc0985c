//! What lies where in the model's host-physical address space: host memory by address, in constant time.

use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use slat::Hpa;

use crate::host::HostMemory;

/// log2 of the stretch of addresses that belongs to one host memory.
const STRETCH: u32 = 30;
const MAX_MEMORIES: usize = 256;

/// All host memory of a model.
#[derive(Debug)]
pub(crate) struct Physical {
    base: u64,
    /// For each stretch from `base`, one more than the number of the memory in it.
    owners: Box<[AtomicU16]>,
    memories: Box<[OnceLock<Arc<HostMemory>>]>,
    layout: Mutex<Layout>,
}

/// What is taken.
#[derive(Debug, Default)]
pub(crate) struct Layout {
    /// How many memories there are.
    pub(crate) memories: usize,
    /// Bytes of all of them.
    pub(crate) bytes: u64,
    /// The first free stretch.
    next: u64,
}

/// A byte of host memory: which memory, and how far into its physical range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Place {
    pub(crate) memory: u16,
    pub(crate) offset: u64,
}

impl Physical {
    /// An empty space from `base`, a multiple of 1 GiB, up to `end`.
    pub(crate) fn new(base: Hpa, end: u64) -> Self {
        let stretches = end.saturating_sub(base.0) >> STRETCH;
        Self {
            base: base.0,
            owners: (0..stretches).map(|_| AtomicU16::new(0)).collect(),
            memories: (0..MAX_MEMORIES).map(|_| OnceLock::new()).collect(),
            layout: Mutex::default(),
        }
    }

    /// What is taken, locked.
    pub(crate) fn layout(&self) -> std::sync::MutexGuard<'_, Layout> {
        self.layout.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where `span` bytes aligned to `align` could begin; `None` if the space is full. An unused stretch follows each
    /// memory, so that whoever runs over its end reaches nothing.
    pub(crate) fn room(&self, layout: &Layout, span: u64, align: u64) -> Option<Hpa> {
        let start = (self.base + (layout.next << STRETCH)).checked_next_multiple_of(align)?;
        let end = start.checked_add(span)?.checked_sub(self.base)?;
        let fits = end.div_ceil(1 << STRETCH) < self.owners.len() as u64;
        (fits && layout.memories < MAX_MEMORIES).then_some(Hpa(start))
    }

    /// Adds a memory at the place that `room` named.
    pub(crate) fn add(&self, layout: &mut Layout, memory: &Arc<HostMemory>) {
        let first = (memory.first().0 - self.base) >> STRETCH;
        let end = first + memory.span().div_ceil(1 << STRETCH);
        let number = layout.memories;
        // The lock is held and `number` was never used.
        let _ = self.memories[number].set(Arc::clone(memory));
        for stretch in first..end {
            // Release: whoever finds the number finds the memory.
            self.owners[stretch as usize].store(number as u16 + 1, Ordering::Release);
        }
        layout.memories += 1;
        layout.bytes += memory.size();
        layout.next = end + 1;
    }

    /// What lies at `address`.
    #[inline]
    pub(crate) fn find(&self, address: Hpa) -> Option<Place> {
        let stretch = address.0.checked_sub(self.base)? >> STRETCH;
        let owner = self.owners.get(stretch as usize)?.load(Ordering::Acquire);
        let memory = owner.checked_sub(1)?;
        let offset = address.0 - self.memory(memory)?.first().0;
        Some(Place { memory, offset })
    }

    /// A memory by its number.
    #[inline(always)]
    pub(crate) fn memory(&self, number: u16) -> Option<&HostMemory> {
        self.memories.get(usize::from(number))?.get().map(Arc::as_ref)
    }
}
