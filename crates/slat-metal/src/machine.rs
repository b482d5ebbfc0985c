//! The machine under the tables: what `slat` asks of an embedder.
#![expect(unsafe_code, reason = "implements Machine")]

use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use slat::maintenance::{Features, Instruction};
use slat::{Entry, Hpa, Machine, Slot};

use crate::arch::{Arch, Here, MAX_CPUS};
use crate::counts::{Counts, Kind, is_invalidation};
use crate::frames::Frames;

/// Each vCPU, and whoever maintains the tables: the first CPU, and whoever empties dirty rings.
const SLOTS: usize = MAX_CPUS + 2;

/// The machine.
pub(crate) struct Metal {
    pub(crate) frames: Frames,
    /// What each CPU has done.
    pub(crate) counts: [Counts; MAX_CPUS],
    slots: [Slot; SLOTS],
    /// Which CPU the vCPU of each slot runs on.
    cpus: [AtomicUsize; SLOTS],
    /// See [`drop_invalidations`](Self::drop_invalidations).
    drops: AtomicBool,
}

/// The only one.
pub(crate) static METAL: Metal = Metal {
    frames: Frames::empty(),
    counts: [const { Counts::new() }; MAX_CPUS],
    slots: [const { Slot::new() }; SLOTS],
    cpus: [const { AtomicUsize::new(0) }; SLOTS],
    drops: AtomicBool::new(false),
};

// SAFETY: tables are frames, mapped one to one for as long as the machine runs, and nobody else touches them.
unsafe impl Machine for Metal {
    fn allocate(&self, tables: usize) -> Option<Hpa> {
        self.count(Kind::TablesAllocated, tables as u64);
        self.frames.tables(tables)
    }

    unsafe fn free(&self, first: Hpa, tables: usize) {
        self.count(Kind::TablesFreed, tables as u64);
        // SAFETY: the caller's promise.
        unsafe { self.frames.free_tables(first, tables) }
    }

    #[inline(always)]
    fn entries(&self, table: Hpa) -> NonNull<Entry> {
        NonNull::new(table.0 as *mut Entry).unwrap_or(NonNull::dangling())
    }

    #[inline(always)]
    fn slots(&self) -> &[Slot] {
        &self.slots
    }

    #[inline(always)]
    fn execute(&self, instruction: Instruction) {
        if is_invalidation(instruction) && self.drops.load(Ordering::Relaxed) {
            return;
        }
        if let Some(kind) = Kind::of(instruction) {
            self.count(kind, 1);
        }
        Here::execute(instruction);
    }

    fn features(&self) -> Features {
        Here::features()
    }

    fn kick(&self, index: usize) {
        if let Some(cpu) = self.cpus.get(index) {
            Here::kick(cpu.load(Ordering::Relaxed));
        }
    }

    fn clean_data(&self, from: Hpa, size: u64) {
        Here::clean_data(from, size);
    }

    fn sync_instructions(&self, from: Hpa, size: u64) {
        Here::sync_instructions(from, size);
    }
}

impl Metal {
    /// The vCPU of slot `index` runs on the calling CPU.
    pub(crate) fn runs_here(&self, index: usize) {
        if let Some(cpu) = self.cpus.get(index) {
            cpu.store(Here::cpu(), Ordering::Relaxed);
        }
    }

    /// Whether this hypervisor forgets invalidations, and that vCPUs must be asked for them.
    #[inline(always)]
    pub(crate) fn drops_invalidations(&self) -> bool {
        self.drops.load(Ordering::Relaxed)
    }

    /// From now on invalidations are not executed, as in a hypervisor that forgets them: for the control of checks.
    pub(crate) fn drop_invalidations(&self) {
        self.drops.store(true, Ordering::Relaxed);
    }

    #[inline(always)]
    fn count(&self, kind: Kind, by: u64) {
        if let Some(counts) = self.counts.get(Here::cpu()) {
            counts.add(kind, by);
        }
    }
}
