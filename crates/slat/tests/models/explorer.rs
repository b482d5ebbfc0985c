//! Who explores: loom, which tries every execution and every order of weak atomics up to a bound, or shuttle, which tries
//! some of very many and takes every order as sequentially consistent. What the machine and its TLBs need of either.

#[cfg(loom)]
pub(crate) use loom::{
    sync::{Mutex, MutexGuard},
    thread,
};
#[cfg(shuttle)]
pub(crate) use shuttle::{
    sync::{Mutex, MutexGuard},
    thread,
};

/// More waits than any execution has in which somebody settles what is waited for.
pub(crate) const PATIENCE: usize = if cfg!(loom) { 200 } else { 20_000 };

/// A point at which any other thread may take over. Each operation of shuttle is one anyway.
pub(crate) fn turn() {
    #[cfg(loom)]
    slat::sync::turn();
}

/// A time of which loom sees whether a use falls into it, in the order that atomics make. Under shuttle all do.
#[derive(Debug)]
pub(crate) struct Life(#[cfg(loom)] loom::cell::UnsafeCell<()>);

#[cfg(loom)]
impl Life {
    /// Begins.
    pub(crate) fn new() -> Self {
        Self(loom::cell::UnsafeCell::new(()))
    }

    /// A use. Whether it comes after the beginning and not at the same time as the end.
    pub(crate) fn used(&self) -> bool {
        ordered(|| self.0.with(|_| ()))
    }

    /// Ends. Whether that comes after every use.
    pub(crate) fn ends(&self) -> bool {
        ordered(|| self.0.with_mut(|_| ()))
    }
}

/// loom panics where an access to a cell races with another.
#[cfg(loom)]
fn ordered(access: impl FnOnce()) -> bool {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(access)).is_ok()
}

#[cfg(shuttle)]
impl Life {
    pub(crate) fn new() -> Self {
        Self()
    }

    pub(crate) fn used(&self) -> bool {
        true
    }

    pub(crate) fn ends(&self) -> bool {
        true
    }
}
