//! Memory from the allocator that may be refused: exhausted memory is an error here, never an abort.
#![expect(unsafe_code, reason = "a box whose allocation can fail is made by hand")]

use alloc::alloc::{Layout, alloc};
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::fmt;

/// The allocator has no memory. Nothing was changed; free some and call again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OutOfMemory;

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the allocator has no memory: free some and try again")
    }
}

impl core::error::Error for OutOfMemory {}

/// `value` in a box.
pub(crate) fn boxed<T>(value: T) -> Result<Box<T>, OutOfMemory> {
    let layout = Layout::new::<T>();
    if layout.size() == 0 {
        return Ok(Box::new(value));
    }
    // SAFETY: the layout has a size.
    let place = unsafe { alloc(layout) }.cast::<T>();
    if place.is_null() {
        return Err(OutOfMemory);
    }
    // SAFETY: `place` was just allocated for a `T` by the allocator that `Box` gives it back to.
    unsafe {
        place.write(value);
        Ok(Box::from_raw(place))
    }
}

/// An empty vector with room for `len` elements.
pub(crate) fn with_room<T>(len: usize) -> Result<Vec<T>, OutOfMemory> {
    let mut vector = Vec::new();
    vector.try_reserve_exact(len).map_err(|_| OutOfMemory)?;
    Ok(vector)
}
