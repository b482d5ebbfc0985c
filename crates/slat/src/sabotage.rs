//! Steps of the concurrency protocol that a model test leaves out, to show that the model would see it. Outside of
//! loom and shuttle nothing can be left out, and asking costs nothing.

/// A step that is left out, or a wrong variant that is taken instead. Each names the rule that it breaks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(
    not(any(loom, shuttle)),
    allow(dead_code, unreachable_pub, reason = "only models leave anything out")
)]
pub enum Skip {
    /// Rule 1: the full fence after a pin is taken.
    PinFence,
    /// Rule 1: the grace period between the detachment of a table and its return to the machine.
    GracePeriod,
    /// Rule 1: what was done under a pin comes before whoever sees the same participant's next pin.
    PinRelease,
    /// Rule 2: entries are exchanged from the value that was read; instead they are stored.
    Compare,
    /// Rule 3: every invalidation on all CPUs.
    Invalidation,
    /// Rule 3: no level hint while a block that was split without break-before-make may still be cached.
    Resizing,
    /// Rule 4: whoever meets LOCKED walks again from the root; instead it waits in place.
    Rewalk,
    /// Rule 5: what waits to be freed is recorded outside the tables; instead a link is stored in the table as well.
    RecordOutside,
    /// Rule 5: collapse and trim freeze the child's entries.
    Freeze,
    /// Rule 5: collapse and trim leave DEAD in the table that they replaced; instead its entries get their values back.
    Dead,
    /// Rule 5: a block gets the intersection of its children's permissions.
    Intersection,
    /// Rule 8: a leaf whose dirty state hardware may set is not detached unread together with its table.
    LeafByLeaf,
    /// Rule 9: unmap leaves its entries LOCKED until they are invalidated; instead it empties them at once.
    UnmapLock,
    /// Rule 9: whoever finds nothing to change looks whether somebody has not invalidated yet.
    Open,
    /// Rule 9: a permission fault that finds the permission there invalidates on its own CPU.
    LocalInvalidation,
}

/// Whether `step` is left out.
#[cfg(not(any(loom, shuttle)))]
#[inline(always)]
pub(crate) const fn skips(_: Skip) -> bool {
    false
}

#[cfg(any(loom, shuttle))]
extern crate std;

#[cfg(any(loom, shuttle))]
std::thread_local! {
    // loom and shuttle run all threads of an execution on the OS thread of its test.
    static LEFT_OUT: core::cell::Cell<Option<Skip>> = const { core::cell::Cell::new(None) };
}

/// Whether `step` is left out.
#[cfg(any(loom, shuttle))]
pub(crate) fn skips(step: Skip) -> bool {
    LEFT_OUT.get() == Some(step)
}

/// Leaves out `step`, and nothing else, from now on and on this OS thread.
#[cfg(any(loom, shuttle))]
pub fn leave_out(step: Option<Skip>) {
    LEFT_OUT.set(step);
}
