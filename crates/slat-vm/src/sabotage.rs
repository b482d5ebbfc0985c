//! Steps of the concurrency protocol that a model test leaves out, to show that the model would see it. Outside of
//! loom and shuttle nothing can be left out, and asking costs nothing.

/// A step that is left out, or a wrong variant that is taken instead. Each names the rule that it breaks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(
    not(any(loom, shuttle)),
    allow(dead_code, unreachable_pub, reason = "only models leave anything out")
)]
pub enum Skip {
    /// Rule 7: the grace period between the listing of a range and its unmap.
    InvalidationGrace,
    /// Rule 7: a fault asks, in the pin of its exchange, what the host takes back.
    Untouched,
    /// Rule 7: an end is counted before its range leaves the list; instead it leaves first.
    CountFirst,
    /// Rule 7: a fault looks at the list before the count; instead after.
    ListFirst,
    /// Rule 7: an invalidation looks for pinned slots again when its range is listed.
    SecondLook,
    /// Rule 7: a look-up asks what the host takes back.
    LookUp,
    /// Rule 8: a fault marks a page after it is writable; instead before.
    MarkLast,
    /// Rule 8: a collection takes bits before it protects their pages; instead after.
    TakeFirst,
    /// Rule 8: a collection protects what another has taken and not protected yet.
    OpenCollections,
    /// Rule 8: a page is stored in a ring's entry before the entry is dirty; instead after.
    PageFirst,
    /// Rule 8: a collection waits for dirty state that unmaps have taken and not marked yet, and a log of hardware's for
    /// whoever protects for another. Rule 7: who pins a slot waits for unmaps that are aimed at what was there before.
    Transit,
    /// Rule 8: a log of hardware's dirty state that begins marks clean what is its own, and not another's in its place.
    OwnMarks,
    /// Rule 10: the grace period between the publication of a slot's version and what is done because of it.
    SlotGrace,
    /// Rule 10: an installer checks the slot's version in the pin of its exchange.
    Version,
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
