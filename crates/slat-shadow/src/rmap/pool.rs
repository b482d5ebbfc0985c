//! Memory for the descriptors of reverse maps: blocks of 32 to 2048 bytes, cut from slabs and kept for the next.
#![expect(unsafe_code, reason = "blocks of several sizes are cut from one slab")]

use alloc::alloc::{Layout, alloc, dealloc};
use alloc::vec::Vec;
use core::ptr::NonNull;

/// Blocks of class `c` have `SMALLEST << c` bytes and are aligned to 64 or to their size.
const SMALLEST: usize = 32;
/// Sizes of blocks.
const CLASSES: usize = 7;
const SLAB: Layout = match Layout::from_size_align(4096, 64) {
    Ok(layout) => layout,
    Err(_) => panic!("a slab is a power of two"),
};

/// No memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Exhausted;

/// Slabs, and the blocks of them that are free.
#[derive(Debug, Default)]
pub(super) struct Pool {
    /// The first free block of each class; it holds the pointer to the next.
    free: [Option<NonNull<u8>>; CLASSES],
    slabs: Vec<NonNull<u8>>,
    in_use: usize,
}

// SAFETY: the pool owns its slabs, and nobody else has pointers to its free blocks.
unsafe impl Send for Pool {}
// SAFETY: nothing is changed through a shared reference.
unsafe impl Sync for Pool {}

impl Pool {
    /// A block of `SMALLEST << class` bytes with arbitrary contents, the caller's until [`put`](Self::put) or until the
    /// pool is dropped.
    #[inline]
    pub(super) fn take(&mut self, class: usize) -> Result<NonNull<u8>, Exhausted> {
        if self.free[class].is_none() {
            self.refill(class)?;
        }
        let block = self.free[class].ok_or(Exhausted)?;
        // SAFETY: a free block holds the link that `put` or `refill` wrote, and is large enough for one.
        self.free[class] = unsafe { block.cast::<Option<NonNull<u8>>>().read() };
        self.in_use += SMALLEST << class;
        Ok(block)
    }

    /// Gives a block back.
    ///
    /// # Safety
    /// `take(class)` of this pool gave it, and nobody uses it any more.
    #[inline]
    pub(super) unsafe fn put(&mut self, block: NonNull<u8>, class: usize) {
        // SAFETY: the caller's promise; a block is large enough for a pointer and aligned to 32.
        unsafe { block.cast::<Option<NonNull<u8>>>().write(self.free[class]) };
        self.free[class] = Some(block);
        self.in_use -= SMALLEST << class;
    }

    /// Bytes of the blocks that were taken.
    pub(super) fn in_use(&self) -> usize {
        self.in_use
    }

    #[cold]
    fn refill(&mut self, class: usize) -> Result<(), Exhausted> {
        self.slabs.try_reserve(1).map_err(|_| Exhausted)?;
        // SAFETY: the layout has a size.
        let slab = NonNull::new(unsafe { alloc(SLAB) }).ok_or(Exhausted)?;
        self.slabs.push(slab);
        let mut next = None;
        for offset in (0..SLAB.size()).step_by(SMALLEST << class).rev() {
            // SAFETY: the offset lies inside the slab, with a whole block after it.
            let block = unsafe { slab.add(offset) };
            // SAFETY: the block is this pool's alone, aligned to 32, and holds at least a pointer.
            unsafe { block.cast::<Option<NonNull<u8>>>().write(next) };
            next = Some(block);
        }
        self.free[class] = next;
        Ok(())
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        for slab in self.slabs.drain(..) {
            // SAFETY: `refill` allocated it with this layout, and blocks are not used after the pool.
            unsafe { dealloc(slab.as_ptr(), SLAB) }
        }
    }
}
