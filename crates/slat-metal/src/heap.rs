//! The allocator behind `alloc`: what `slat-vm` and the workloads keep besides tables and guest memory.
#![expect(unsafe_code, reason = "hands a range of memory to the allocator")]

use core::ops::Range;

use linked_list_allocator::LockedHeap;

#[global_allocator]
static HEAP: LockedHeap = LockedHeap::empty();

/// Gives the heap its memory.
///
/// # Safety
/// Once, with memory that nobody else uses.
pub(crate) unsafe fn init(memory: Range<u64>) {
    // SAFETY: the caller's promise.
    unsafe { HEAP.lock().init(memory.start as *mut u8, (memory.end - memory.start) as usize) }
}
