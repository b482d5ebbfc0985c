//! Memory is refused at every allocation of the heap in turn: the operation says so, nothing is lost, and it succeeds
//! when there is memory again.
#![allow(missing_docs, unsafe_code, clippy::precedence)]

mod guest;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use guest::{Guest, Heap, P, PAGE, U, W, range};
use slat::Machine;
use slat_shadow::rmap::Chains;
use slat_shadow::{GuestAccess, ShadowError, ShadowExit, ShadowOptions};
use slat_vm::Access;

thread_local! {
    /// Allocations of this thread that still succeed.
    static LEFT: Cell<Option<u32>> = const { Cell::new(None) };
}

struct Refusing;

// SAFETY: what is not refused is the system's.
unsafe impl GlobalAlloc for Refusing {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let left = LEFT.try_with(Cell::get).ok().flatten();
        if left == Some(0) {
            return std::ptr::null_mut();
        }
        let _ = LEFT.try_with(|cell| cell.set(left.map(|left| left - 1)));
        // SAFETY: as the caller's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as the caller's.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Refusing = Refusing;

/// The result of `f` when only `allowed` allocations succeed.
fn refusing<T>(allowed: u32, f: impl FnOnce() -> T) -> T {
    LEFT.set(Some(allowed));
    let result = f();
    LEFT.set(None);
    result
}

/// A machine that needs no heap for tables.
fn machine() -> Heap {
    let machine = Heap::new(4096, 1);
    let tables: Vec<_> = (0..64).map(|_| machine.allocate(1).unwrap()).collect();
    for table in tables {
        // SAFETY: it was allocated above and is used by nobody.
        unsafe { machine.free(table, 1) }
    }
    machine
}

/// A guest whose pages 0 to 19 are all one frame, and whose pages from 2 MiB on are another.
fn guest(machine: &Heap) -> Guest<'_, Chains> {
    let mut guest = Guest::new(machine, 64, 1, ShadowOptions::default());
    let table = |frame: u64| frame * PAGE | P | W | U;
    for (gpa, entry) in [
        (PAGE, table(2)),
        (2 * PAGE, table(3)),
        (3 * PAGE, table(4)),
        (3 * PAGE + 8, table(5)),
        (5 * PAGE, table(51)),
    ] {
        guest.poke(gpa, entry);
    }
    for n in 0..20 {
        guest.poke(4 * PAGE + 8 * n, table(50));
    }
    guest.load(0, PAGE);
    guest
}

#[test]
fn a_fault_without_memory_maps_nothing_and_succeeds_later() {
    let read = GuestAccess::user(Access::Read);
    let mut refused = 0;
    // Addresses that need shadow pages, descriptors of every shape, and another page.
    for before in [0, 1, 7, 15, 16] {
        for gva in [before * PAGE, 2 << 20] {
            for allowed in 0.. {
                let machine = machine();
                let mut guest = guest(&machine);
                for n in 0..before {
                    guest.access(0, n * PAGE, read, None).unwrap();
                }
                let mapped = guest.shadow.statistics().mapped;
                let (_, root) = guest.roots[0].as_ref().unwrap();
                let (shadow, memory) = (&mut guest.shadow, &guest.memory);
                let exit = refusing(allowed, || shadow.fault(memory, root, gva, read));
                if exit == Ok(ShadowExit::Resume) {
                    break;
                }
                assert_eq!(exit, Err(ShadowError::OutOfMemory));
                refused += 1;
                assert_eq!(guest.shadow.statistics().mapped, mapped);
                let frame = if gva == 2 << 20 { 51 } else { 50 };
                assert_eq!(guest.access(0, gva, read, None), Ok(frame * PAGE));
                for n in 0..before {
                    assert_eq!(guest.access(0, n * PAGE, read, None), Ok(50 * PAGE));
                }
            }
        }
    }
    assert!(refused > 20, "{refused}");
}

#[test]
fn a_shadow_and_a_slot_without_memory_are_refused() {
    let machine = Heap::new(4096, 1);
    let made = refusing(0, || slat_shadow::Shadow::new(&machine, ShadowOptions::default()).err());
    assert_eq!(made, Some(ShadowError::OutOfMemory));
    let mut guest = guest(&machine);
    for allowed in 0..5 {
        let slot = refusing(allowed, || guest.shadow.create_slot(range(1 << 20, 512)));
        assert_eq!(slot, Err(ShadowError::OutOfMemory));
    }
    guest.shadow.create_slot(range(1 << 20, 512)).unwrap();
}
