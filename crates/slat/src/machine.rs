//! What an embedder gives: the one trait that stands between the engine and the machine it runs on.

use core::ptr::NonNull;

use crate::maintenance::{Features, Instruction};
use crate::rcu::Slot;
use crate::{Entry, Gpa, GpaRange, Hpa};

/// The machine under the tables: memory for them, the instructions that hardware walkers must see, and a place to
/// wait. Implement this and the engine is yours; nothing else in this crate touches hardware.
///
/// | what | method | called |
/// |---|---|---|
/// | table memory | [`allocate`](Self::allocate), [`free`](Self::free), [`entries`](Self::entries) | outside pins; `entries` anywhere |
/// | participants | [`slots`](Self::slots) | at every pin and grace period |
/// | barriers, TLB | [`execute`](Self::execute) | by operations, after they changed entries |
/// | caches | [`clean_data`](Self::clean_data), [`sync_instructions`](Self::sync_instructions) | before an entry is installed |
/// | waiting | [`relax`](Self::relax), [`kick`](Self::kick) | in every spin |
///
/// # Safety
/// The engine writes through the pointers of [`entries`](Self::entries) and gives their physical addresses to
/// hardware. The implementor promises, for every table that `allocate` returned and that was not freed since, that
/// nothing else in the system reads or writes it except hardware table walkers, that `entries` points to all of it,
/// and that it stays mapped and readable until `free`. It promises that [`slots`](Self::slots) is always the same slice:
/// whoever is pinned in a slot that a grace period does not see may stand in a table that is freed.
#[expect(unsafe_code, reason = "the engine and the hardware rely on what the implementor promises")]
pub unsafe trait Machine: Sync {
    /// `tables` zeroed tables (of the granule that the format names), contiguous and aligned to their total size;
    /// `tables` is 1, or a power of two up to 16 for a root. They lie below 2^48, also where output addresses are wider,
    /// so that a walk need not put table addresses together from pieces. `None` when there is no memory: the operation that
    /// asked reports it and nothing is half done. Never called while pinned; may block.
    fn allocate(&self, tables: usize) -> Option<Hpa>;

    /// Takes back what `allocate` gave, whole. Never called while pinned; may block.
    ///
    /// # Safety
    /// `first` and `tables` are those of one `allocate`, no walker of hardware or software can reach the memory any
    /// more, and it is not used again. Its contents are arbitrary.
    unsafe fn free(&self, first: Hpa, tables: usize);

    /// The first entry of a table (or root) that `allocate` returned.
    fn entries(&self, table: Hpa) -> NonNull<Entry>;

    /// One slot for each participant that can be registered at once: each vCPU and each thread that maintains
    /// tables. Always the same slice.
    fn slots(&self) -> &[Slot];

    /// Executes one barrier or invalidation on the calling CPU. The sequences are the engine's; an embedder on
    /// hardware passes `instruction` on to its CPU, a software machine sees each step.
    fn execute(&self, instruction: Instruction);

    /// What the translation hardware can do, the same on every CPU. The default is what all hardware can do.
    #[inline]
    fn features(&self) -> Features {
        Features::default()
    }

    /// Makes the CPU that runs the vCPU of slot `index` leave the guest soon (an interrupt to it). Called after the
    /// request for it is visible. Machines whose invalidations are broadcast by hardware may leave it empty if
    /// nobody calls [`Gate::request`](crate::gate::Gate::request).
    fn kick(&self, index: usize) {
        let _ = index;
    }

    /// Called between two looks in a spin: a pause, a yield to the scheduler, and the place to answer requests of
    /// other CPUs.
    #[inline]
    fn relax(&self) {
        core::hint::spin_loop();
    }

    /// Called before a pin is taken and, with `false`, after it is given up, and around every sequence that depends on
    /// the calling CPU: machines that could be preempted stop and resume preemption here, so that a grace period is a
    /// bounded spin. Calls nest.
    #[inline(always)]
    fn preemption(&self, off: bool) {
        let _ = off;
    }

    /// Cleans and invalidates `size` bytes of host memory from the data caches to the point of coherency, before
    /// they become visible to a guest that may not cache them. Empty where the guest's attributes are forced to
    /// write-back (FEAT_S2FWB, x86).
    fn clean_data(&self, from: Hpa, size: u64) {
        let _ = (from, size);
    }

    /// Makes `size` bytes of host memory coherent for instruction fetch, before they become executable by the guest.
    fn sync_instructions(&self, from: Hpa, size: u64) {
        let _ = (from, size);
    }

    /// Sees every access to an entry and the bounds of every operation; empty by default, and then free. A software
    /// machine checks rules and charges time here.
    #[inline(always)]
    fn observe(&self, event: Event) {
        let _ = event;
    }
}

/// What [`Machine::observe`] sees. Addresses of entries are host-physical, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// An entry of a linked table was read.
    Load {
        /// Address of the entry.
        entry: Hpa,
    },
    /// An entry is about to be stored by its owner: the one who locked it, or who holds a table that is not linked.
    Store {
        /// Address of the entry.
        entry: Hpa,
        /// What is stored.
        new: u64,
    },
    /// A compare-exchange of an entry was tried.
    Exchange {
        /// Address of the entry.
        entry: Hpa,
        /// What was expected.
        old: u64,
        /// What is there if `done`.
        new: u64,
        /// Whether the exchange happened.
        done: bool,
    },
    /// All entries of a table that is not linked yet were stored.
    Fill {
        /// The table.
        table: Hpa,
    },
    /// A pin was taken; the outermost only.
    Pinned,
    /// The outermost pin was given up.
    Unpinned,
    /// A grace period has ended.
    GracePeriod,
    /// An operation begins that will promise something about a range.
    Begin,
    /// The operation that began last on this thread returns; what it promises about translations that were cached
    /// before it began.
    End(Promise),
}

/// What an operation promises when it returns, about every CPU's cached translations from before it began.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Promise {
    /// Nothing (it added, or it failed half way and says where).
    Nothing,
    /// None of them covers any of this.
    Gone(GpaRange),
    /// None of them lets a write through to any of this.
    ReadOnly(GpaRange),
    /// None of them lets a write through to any of the pages from `first` on whose bit is set in `mask`.
    ReadOnlyPages {
        /// The page of bit 0.
        first: Gpa,
        /// Which of 64 pages.
        mask: u64,
        /// Bytes of a page.
        page_size: u64,
    },
}
