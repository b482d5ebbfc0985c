//! The smallest machine: table memory from the heap, physical address equal to pointer, TLB maintenance that is counted.
#![allow(dead_code, unsafe_code, missing_docs, unreachable_pub)]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicIsize, AtomicUsize, Ordering};

use slat::maintenance::Instruction;
use slat::{Entry, Hpa, Machine, Slot};

pub struct Heap {
    table_bytes: usize,
    slots: Box<[Slot]>,
    /// Tables that were freed, zeroed, ready to be given out again.
    spare: Mutex<Vec<usize>>,
    pub allocated: AtomicUsize,
    pub freed: AtomicUsize,
    /// Allocations that still succeed; negative: all.
    pub allowed: AtomicIsize,
    pub publishes: AtomicUsize,
    pub invalidations: AtomicUsize,
    /// Address and level hint of each invalidation by address (`None`: everything), kept in debug builds only.
    pub log: Mutex<Vec<(Option<u64>, Option<slat::Level>)>>,
}

impl Heap {
    pub fn new(table_bytes: usize, participants: usize) -> Self {
        Self {
            table_bytes,
            slots: (0..participants).map(|_| Slot::new()).collect(),
            spare: Mutex::new(Vec::new()),
            allocated: AtomicUsize::new(0),
            freed: AtomicUsize::new(0),
            allowed: AtomicIsize::new(-1),
            publishes: AtomicUsize::new(0),
            invalidations: AtomicUsize::new(0),
            log: Mutex::new(Vec::new()),
        }
    }

    pub fn in_use(&self) -> usize {
        self.allocated.load(Ordering::Relaxed) - self.freed.load(Ordering::Relaxed)
    }

    fn layout(&self, tables: usize) -> Layout {
        let bytes = self.table_bytes * tables;
        Layout::from_size_align(bytes, bytes).unwrap()
    }
}

// SAFETY: every table is its own heap allocation, zeroed, aligned, and touched through `entries` only.
unsafe impl Machine for Heap {
    fn allocate(&self, tables: usize) -> Option<Hpa> {
        if self.allowed.load(Ordering::Relaxed) >= 0
            && self.allowed.fetch_sub(1, Ordering::Relaxed) <= 0
        {
            self.allowed.store(0, Ordering::Relaxed);
            return None;
        }
        self.allocated.fetch_add(tables, Ordering::Relaxed);
        if tables == 1
            && let Some(table) = self.spare.lock().unwrap().pop()
        {
            // SAFETY: a table that `free` took, this thread's now.
            unsafe { std::ptr::write_bytes(table as *mut u8, 0, self.table_bytes) };
            return Some(Hpa(table as u64));
        }
        // SAFETY: the layout is not empty.
        let memory = unsafe { alloc_zeroed(self.layout(tables)) };
        Some(Hpa(memory as u64))
    }

    unsafe fn free(&self, first: Hpa, tables: usize) {
        self.freed.fetch_add(tables, Ordering::Relaxed);
        if tables == 1 {
            self.spare.lock().unwrap().push(first.0 as usize);
        } else {
            // SAFETY: from `allocate` with the same count, by the caller's promise.
            unsafe { dealloc(first.0 as *mut u8, self.layout(tables)) }
        }
    }

    #[inline(always)]
    fn entries(&self, table: Hpa) -> NonNull<Entry> {
        debug_assert!(table.0 != 0);
        // SAFETY: heap memory is not at zero.
        unsafe { NonNull::new_unchecked(table.0 as *mut Entry) }
    }

    fn slots(&self) -> &[Slot] {
        &self.slots
    }

    #[inline(always)]
    fn execute(&self, instruction: Instruction) {
        if cfg!(debug_assertions) {
            let what = match instruction {
                Instruction::TlbiIpas2e1is { ipa, level, .. }
                | Instruction::TlbiRipas2e1is { ipa, level, .. } => Some((Some(ipa.0), level)),
                Instruction::TlbiVmalls12e1is => Some((None, None)),
                _ => None,
            };
            self.log.lock().unwrap().extend(what);
        }
        match instruction {
            Instruction::DsbIshst => bump(&self.publishes),
            Instruction::TlbiVmalle1is | Instruction::TlbiVmalls12e1is => {
                bump(&self.invalidations);
            }
            _ => {}
        }
    }

    fn relax(&self) {
        std::thread::yield_now();
    }
}

/// Not exact under threads, and cheap.
fn bump(counter: &AtomicUsize) {
    counter.store(counter.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
}

impl Drop for Heap {
    fn drop(&mut self) {
        let spare = std::mem::take(self.spare.get_mut().unwrap());
        for table in spare {
            // SAFETY: from `allocate(1)`, freed once.
            unsafe { dealloc(table as *mut u8, self.layout(1)) }
        }
    }
}
