//! Page frames: tables from the bottom of memory, guest memory from the top, until they meet.
#![expect(unsafe_code, reason = "memory that no Rust object lies in, mapped one to one")]

use core::ops::Range;

use slat::Hpa;
use spin::Mutex;

const PAGE: u64 = 4096;
/// Groups of tables have 1, 2, 4, 8 or 16.
const SIZES: usize = 5;

/// The frames of the machine.
pub(crate) struct Frames(Mutex<Free>);

struct Free {
    /// Never given out yet.
    untouched: Range<u64>,
    /// The first free group of each size; its first word is the address of the next, and 0 ends the list.
    groups: [u64; SIZES],
}

impl Frames {
    /// None.
    pub(crate) const fn empty() -> Self {
        Self(Mutex::new(Free { untouched: 0..0, groups: [0; SIZES] }))
    }

    /// Gives it its memory.
    ///
    /// # Safety
    /// Once, with memory that nobody else uses.
    pub(crate) unsafe fn init(&self, memory: Range<u64>) {
        let start = memory.start.next_multiple_of(PAGE);
        self.0.lock().untouched = start..memory.end & !(PAGE - 1);
    }

    /// `tables` zeroed frames, a power of two up to 16, contiguous and aligned to their size.
    pub(crate) fn tables(&self, tables: usize) -> Option<Hpa> {
        let size = tables as u64 * PAGE;
        let first = {
            let mut free = self.0.lock();
            match free.take_group(tables)? {
                0 => free.take_bottom(size)?,
                first => first,
            }
        };
        zero(first, size);
        Some(Hpa(first))
    }

    /// Takes back what `tables` gave.
    ///
    /// # Safety
    /// `first` and `tables` are those of one call of [`tables`](Self::tables), and nobody uses the memory any more.
    pub(crate) unsafe fn free_tables(&self, first: Hpa, tables: usize) {
        let mut free = self.0.lock();
        let Some(group) = free.groups.get_mut(tables.trailing_zeros() as usize) else { return };
        // SAFETY: the memory is nobody's, as the caller promised, and mapped.
        unsafe { (first.0 as *mut u64).write(*group) }
        *group = first.0;
    }

    /// `size` bytes of zeroed memory for guests, aligned to `align`, a power of two and at least a page. They do not come
    /// back.
    pub(crate) fn guest_memory(&self, size: u64, align: u64) -> Option<Hpa> {
        let size = size.next_multiple_of(PAGE);
        let first = self.0.lock().take_top(size, align)?;
        zero(first, size);
        Some(Hpa(first))
    }
}

impl Free {
    /// The first free group of this size, 0 if there is none; `None` for sizes that groups have not.
    fn take_group(&mut self, tables: usize) -> Option<u64> {
        let group = self.groups.get_mut(tables.trailing_zeros() as usize)?;
        let first = *group;
        if first != 0 {
            // SAFETY: a free group is mapped memory that nobody uses, and begins with the address of the next.
            *group = unsafe { (first as *const u64).read() };
        }
        Some(first)
    }

    fn take_bottom(&mut self, size: u64) -> Option<u64> {
        let first = self.untouched.start.next_multiple_of(size);
        let end = first.checked_add(size).filter(|&end| end <= self.untouched.end)?;
        self.untouched.start = end;
        Some(first)
    }

    fn take_top(&mut self, size: u64, align: u64) -> Option<u64> {
        let first = self.untouched.end.checked_sub(size)? & !(align - 1);
        if first < self.untouched.start {
            return None;
        }
        self.untouched.end = first;
        Some(first)
    }
}

fn zero(first: u64, size: u64) {
    // SAFETY: memory that was just taken, mapped one to one, and that nobody else knows yet.
    unsafe { (first as *mut u8).write_bytes(0, size as usize) }
}
