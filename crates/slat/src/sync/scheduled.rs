//! loom's atomics, with a point before each operation at which any other thread may take over.
//!
//! loom looks for threads to switch to where two of them use one atomic, but it remembers only the last use of each:
//! where a thread loads an entry and then exchanges it, it no longer knows that another had loaded it before, and never
//! tries the exchange first (tokio-rs/loom issues 166 and 392; loom 0.7.3). Here every operation first stores to one
//! atomic that all share. These stores conflict with each other, so all their orders are tried, up to the bound on
//! preemptions. They are relaxed and nobody loads what they store: for the memory model they order nothing.

use core::ops::Deref;

use loom::sync::atomic;
pub use loom::sync::atomic::Ordering;

loom::lazy_static! {
    static ref TURN: atomic::AtomicUsize = atomic::AtomicUsize::new(0);
}

/// A point at which any other thread may take over.
pub fn turn() {
    TURN.store(0, Ordering::Relaxed);
}

/// As in `core`, after a [`turn`].
pub fn fence(order: Ordering) {
    turn();
    atomic::fence(order);
}

/// An atomic, each operation on which comes after a [`turn`].
#[derive(Debug, Default)]
pub struct Scheduled<A>(A);

impl<A> Deref for Scheduled<A> {
    type Target = A;

    fn deref(&self) -> &A {
        turn();
        &self.0
    }
}

macro_rules! scheduled {
    ($($name:ident($value:ty)),*) => {$(
        #[doc = concat!("`", stringify!($name), "` as in `core`.")]
        pub type $name = Scheduled<atomic::$name>;

        impl Scheduled<atomic::$name> {
            /// As in `core`.
            pub fn new(value: $value) -> Self {
                Self(atomic::$name::new(value))
            }
        }
    )*};
}
scheduled!(AtomicBool(bool), AtomicU32(u32), AtomicU64(u64), AtomicUsize(usize));

/// `AtomicPtr` as in `core`.
pub type AtomicPtr<T> = Scheduled<atomic::AtomicPtr<T>>;

impl<T> Scheduled<atomic::AtomicPtr<T>> {
    /// As in `core`.
    pub fn new(value: *mut T) -> Self {
        Self(atomic::AtomicPtr::new(value))
    }
}
