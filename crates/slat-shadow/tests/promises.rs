//! What the shadow promises, one by one.
#![allow(missing_docs, clippy::precedence)]

mod guest;

use guest::{A, D, Guest, Heap, LARGE, LINEAR, NX, P, PAGE, U, W, naive, range};
use slat::{Gpa, GpaRange};
use slat_shadow::{ErrorCode, GuestAccess, PagingMode, ShadowError, ShadowExit, ShadowOptions};
use slat_vm::Access;

const USER_READ: GuestAccess = GuestAccess::user(Access::Read);
const USER_WRITE: GuestAccess = GuestAccess::user(Access::Write);
const FRAMES: usize = 1024;

/// A guest with a kernel map of all its memory in 2M pages, and one user page: gva 0x1000 -> frame 100.
///
/// Root 1, linear map 2 and 3; user tables 4, 5, 6.
fn guest(machine: &Heap) -> Guest<'_> {
    let mut guest = Guest::new(machine, FRAMES, 2, ShadowOptions::default());
    let table = |frame: u64| frame * PAGE | P | W | U | A;
    guest.poke(PAGE + 256 * 8, table(2));
    guest.poke(2 * PAGE, table(3));
    for block in 0..FRAMES as u64 / 512 {
        guest.poke(3 * PAGE + 8 * block, block << 21 | P | W | A | D | LARGE);
    }
    guest.poke(PAGE, table(4));
    guest.poke(4 * PAGE, table(5));
    guest.poke(5 * PAGE, table(6));
    guest.poke(6 * PAGE + 8, 100 * PAGE | P | W | U);
    guest.load(0, PAGE);
    guest.load(1, PAGE);
    guest
}

#[test]
fn an_access_reaches_what_the_guests_tables_say_and_is_noted_in_them() {
    let machine = Heap::new(4096, 4);
    let mut guest = guest(&machine);
    assert_eq!(guest.access(0, 0x1234, USER_READ, None), Ok(100 * PAGE + 0x234));
    assert_eq!(guest.memory.word(6 * PAGE + 8).get() & (A | D), A);
    assert_eq!(guest.access(0, 0x1234, USER_WRITE, None), Ok(100 * PAGE + 0x234));
    assert_eq!(guest.memory.word(6 * PAGE + 8).get() & (A | D), A | D);
}

#[test]
fn the_guests_own_faults_have_its_error_code() {
    let machine = Heap::new(4096, 4);
    let mut guest = guest(&machine);
    assert_eq!(guest.access(0, 0x2000, USER_WRITE, None), Err(ErrorCode::WRITE | ErrorCode::USER));
    guest.poke(6 * PAGE + 8, 100 * PAGE | P | NX);
    let protection = ErrorCode::PROTECTION | ErrorCode::USER;
    assert_eq!(guest.access(0, 0x1000, USER_READ, None), Err(protection));
    let fetch = GuestAccess::kernel(Access::Execute);
    let code = ErrorCode::PROTECTION | ErrorCode::FETCH;
    assert_eq!(guest.access(0, 0x1000, fetch, None), Err(code));
    guest.poke(5 * PAGE, 6 * PAGE | P | W | U | 1 << 50);
    let reserved = ErrorCode::PROTECTION | ErrorCode::RESERVED | ErrorCode::USER;
    assert_eq!(guest.access(0, 0x1000, USER_READ, None), Err(reserved));
}

#[test]
fn a_last_level_table_opens_for_writing_and_is_followed_at_the_next_flush() {
    let machine = Heap::new(4096, 4);
    let mut guest = guest(&machine);
    let entry = 6 * PAGE + 8;
    guest.access(0, 0x1000, USER_WRITE, None).unwrap();
    guest.store(0, entry, 101 * PAGE | P | U | A);
    assert_eq!(guest.shadow.statistics().unsynced, 1);
    // Without a flush both are right; with one only the new page is.
    guest.invalidate(0, 0x1000);
    assert_eq!(guest.access(0, 0x1000, USER_READ, None), Ok(101 * PAGE));
    guest.load(1, PAGE);
    assert_eq!(guest.access(1, 0x1000, USER_READ, None), Ok(101 * PAGE));
    let code = ErrorCode::PROTECTION | ErrorCode::WRITE | ErrorCode::USER;
    assert_eq!(guest.access(1, 0x1000, USER_WRITE, None), Err(code));
}

#[test]
fn writes_to_upper_tables_are_followed_one_by_one() {
    let machine = Heap::new(4096, 4);
    let mut guest = guest(&machine);
    guest.access(0, 0x1000, USER_READ, None).unwrap();
    // A second last-level table, at frame 7, in place of the first.
    guest.poke(7 * PAGE + 8, 102 * PAGE | P | U);
    guest.store(0, 5 * PAGE, 7 * PAGE | P | W | U);
    guest.invalidate(0, 0x1000);
    assert_eq!(guest.access(0, 0x1000, USER_READ, None), Ok(102 * PAGE));
    assert_eq!(guest.shadow.statistics().unsynced, 0);
}

#[test]
fn a_table_that_is_unprotected_can_be_written_to_and_is_shadowed_anew() {
    let machine = Heap::new(4096, 4);
    let mut guest = guest(&machine);
    guest.access(0, 0x1000, USER_READ, None).unwrap();
    let before = guest.shadow.statistics().pages;
    guest.shadow.unprotect(&guest.memory, range(5, 1));
    assert_eq!(guest.shadow.statistics().pages, before - 1);
    guest.memory.word(5 * PAGE).set(0);
    assert_eq!(guest.access(0, 0x1000, USER_READ, None), Err(ErrorCode::USER));
}

#[test]
fn large_pages_stay_large_where_the_memory_below_is_and_no_table_lies_in_them() {
    let machine = Heap::new(4096, 4);
    let mut guest = guest(&machine);
    for backed in guest.memory.backed.borrow_mut().iter_mut().flatten() {
        backed.size = 2 << 20;
    }
    let kernel = GuestAccess::kernel(Access::Write);
    guest.access(0, LINEAR + (2 << 20), kernel, None).unwrap();
    guest.access(0, LINEAR + (3 << 20), kernel, None).unwrap();
    let histogram = guest.shadow.histogram();
    assert_eq!(histogram.frames[1][1], 1, "one mapping of 2M");
    // The first 2M hold the guest's tables.
    guest.access(0, LINEAR + 200 * PAGE, kernel, None).unwrap();
    let histogram = guest.shadow.histogram();
    assert_eq!((histogram.frames[1][1], histogram.frames[0][1]), (1, 1));
    // A table in the other block takes it apart.
    guest.poke(600 * PAGE, 700 * PAGE | P | U);
    guest.poke(5 * PAGE + 8, 600 * PAGE | P | W | U);
    assert_eq!(guest.access(0, 2 << 20, USER_READ, None), Ok(700 * PAGE));
    assert_eq!(guest.access(0, LINEAR + 600 * PAGE, kernel, None), Ok(600 * PAGE));
    assert_eq!(guest.shadow.statistics().unsynced, 1);
}

#[test]
fn what_is_zapped_is_out_of_every_cpu() {
    let machine = Heap::new(4096, 4);
    let mut guest = guest(&machine);
    for cpu in [0, 1] {
        guest.access(cpu, 0x1000, USER_WRITE, None).unwrap();
    }
    guest.memory.backed.borrow_mut()[100] = None;
    guest.shadow.zap(&guest.memory, range(100, 1));
    for cpu in &*guest.memory.cpus.borrow() {
        assert_eq!(cpu.cached().filter(|(gva, _)| *gva == 0x1000).count(), 0);
    }
    // The host gives another page.
    let moved = guest::Backed { output: guest::HOST + 5000 * PAGE, writable: true, size: PAGE };
    guest.memory.backed.borrow_mut()[100] = Some(moved);
    assert_eq!(guest.access(1, 0x1000, USER_READ, None), Ok(100 * PAGE));
}

#[test]
fn a_write_after_a_collection_is_in_the_next() {
    let machine = Heap::new(4096, 4);
    let mut guest = guest(&machine);
    guest.access(0, 0x1000, USER_WRITE, None).unwrap();
    guest.access(0, LINEAR + 101 * PAGE, GuestAccess::kernel(Access::Write), None).unwrap();
    for frame in [100, 101] {
        guest.memory.backed.borrow_mut()[frame].as_mut().unwrap().writable = false;
        guest.memory.dirty.borrow_mut()[frame] = false;
    }
    let flushes = guest.memory.flushes.get();
    guest.shadow.write_protect_pages(&guest.memory, Gpa(64 * PAGE), &[3 << 36]);
    assert_eq!(guest.memory.flushes.get(), flushes + 1, "one flush for all");
    guest.access(0, 0x1000, USER_WRITE, None).unwrap();
    assert_eq!(guest.memory.dirty.borrow()[100..102], [true, false]);
    guest.shadow.write_protect_pages(&guest.memory, Gpa(64 * PAGE), &[1 << 37]);
    assert_eq!(guest.memory.flushes.get(), flushes + 1, "nothing to flush");
}

#[test]
fn what_was_used_is_young_until_it_is_asked_for() {
    let machine = Heap::new(4096, 4);
    let mut guest = guest(&machine);
    guest.access(0, 0x1000, USER_READ, None).unwrap();
    let page = range(100, 1);
    assert!(guest.shadow.test_young(page));
    assert!(guest.shadow.clear_young(page));
    assert!(!guest.shadow.test_young(page));
    guest.memory.cpus.borrow_mut()[1].flush();
    guest.access(1, 0x1000, USER_READ, None).unwrap();
    assert!(guest.shadow.test_young(page));
    assert!(!guest.shadow.test_young(range(101, 1)));
}

#[test]
fn another_role_or_frame_is_another_shadow_page_and_none_survives_its_slot() {
    let machine = Heap::new(4096, 4);
    let mut guest = guest(&machine);
    guest.shadow.create_slot(range(1 << 20, 16)).unwrap();
    guest.access(0, 0x1000, USER_READ, None).unwrap();
    let made = guest.shadow.statistics().pages_made;
    // The same table, by another address with the same rights above it: the same page.
    guest.poke(5 * PAGE + 16, 6 * PAGE | P | W | U | A);
    guest.access(0, (4 << 20) + 0x1000, USER_READ, None).unwrap();
    assert_eq!(guest.shadow.statistics().pages_made, made);
    // The same table, read-only above it: another page.
    guest.poke(5 * PAGE + 24, 6 * PAGE | P | U | A);
    guest.access(0, (6 << 20) + 0x1000, USER_READ, None).unwrap();
    assert_eq!(guest.shadow.statistics().pages_made, made + 1);
    // Another table with the same rights: another page.
    guest.poke(7 * PAGE + 8, 100 * PAGE | P | U);
    guest.poke(5 * PAGE + 32, 7 * PAGE | P | W | U | A);
    guest.access(0, (8 << 20) + 0x1000, USER_READ, None).unwrap();
    assert_eq!(guest.shadow.statistics().pages_made, made + 2);
    let slot = range(0, FRAMES as u64);
    assert_eq!(
        guest.shadow.delete_slot(&guest.memory, range(0, 1)),
        Err(ShadowError::NoSuchSlot(range(0, 1)))
    );
    guest.shadow.delete_slot(&guest.memory, slot).unwrap();
    // The roots are held by the CPUs, and are no use any more.
    assert_eq!(guest.shadow.statistics().pages, 1);
    let (_, root) = guest.roots[0].as_ref().unwrap();
    assert_eq!(
        guest.shadow.fault(&guest.memory, root, 0x1000, USER_READ),
        Ok(ShadowExit::ReloadRoot)
    );
    guest.shadow.create_slot(slot).unwrap();
    assert_eq!(guest.access(0, 0x1000, USER_READ, None), Ok(100 * PAGE));
}

#[test]
fn more_mappings_than_the_limit_zap_the_frame_and_go_on() {
    let machine = Heap::new(4096, 4);
    let options = ShadowOptions { mappings: 8, ..ShadowOptions::default() };
    let mut guest: Guest<'_> = Guest::new(&machine, 64, 1, options);
    let table = |frame: u64| frame * PAGE | P | W | U | A;
    guest.poke(PAGE, table(2));
    guest.poke(2 * PAGE, table(3));
    guest.poke(3 * PAGE, table(4));
    for n in 0..20 {
        guest.poke(4 * PAGE + 8 * n, 50 * PAGE | P | U);
    }
    guest.load(0, PAGE);
    for n in 0..20 {
        assert_eq!(guest.access(0, n * PAGE, USER_READ, None), Ok(50 * PAGE));
    }
    assert_eq!(guest.shadow.statistics().overflows, 2);
    assert_eq!(guest.shadow.histogram().frames[0][3], 1, "4 to 7 are left");
    for n in 0..20 {
        assert_eq!(guest.access(0, n * PAGE, USER_READ, None), Ok(50 * PAGE));
    }
}

#[test]
fn few_pages_are_recycled_and_every_access_still_gets_through() {
    let machine = Heap::new(4096, 4);
    let options = ShadowOptions { pages: 64, ..ShadowOptions::default() };
    let mut guest: Guest<'_> = Guest::new(&machine, 512, 1, options);
    let table = |frame: u64| frame * PAGE | P | W | U | A;
    guest.poke(PAGE, table(2));
    guest.poke(2 * PAGE, table(3));
    for n in 0..200 {
        guest.poke(3 * PAGE + 8 * n, table(100 + n));
        guest.poke((100 + n) * PAGE, 400 * PAGE | P | U);
    }
    guest.load(0, PAGE);
    for _ in 0..2 {
        for n in 0..200 {
            assert_eq!(guest.access(0, n << 21, USER_READ, None), Ok(400 * PAGE));
        }
    }
    let statistics = guest.shadow.statistics();
    assert!(statistics.pages <= 64 && statistics.recycled > 300, "{statistics:?}");
}

#[test]
fn five_levels_are_shadowed_by_five() {
    let machine = Heap::new(4096, 4);
    let mut guest = guest(&machine);
    guest.mode = PagingMode { five_level: true, ..guest.mode };
    guest.poke(8 * PAGE + 8, PAGE | P | W | U);
    guest.load(0, 8 * PAGE);
    let gva = 1 << 48 | 0x1000;
    assert_eq!(guest.access(0, gva, USER_WRITE, None), Ok(100 * PAGE));
    assert_eq!(naive::walk(&guest.memory, guest.mode, 8 * PAGE, gva, USER_WRITE), Ok(100 * PAGE));
    assert_eq!(guest.access(0, 0x1000, USER_READ, None), Err(ErrorCode::USER));
}

#[test]
fn a_right_that_a_flush_on_one_cpu_takes_is_gone_from_the_others_when_a_log_begins() {
    for lost in [W, D] {
        let machine = Heap::new(4096, 4);
        let mut guest = guest(&machine);
        guest.access(1, 0x1000, USER_WRITE, None).unwrap();
        let entry = guest.memory.word(6 * PAGE + 8).get();
        guest.store(0, 6 * PAGE + 8, entry & !lost);
        // Nothing maps the table for writing any more, so that opening it again flushes nobody.
        guest.shadow.zap(&guest.memory, range(6, 1));
        guest.access(1, 0x1000, USER_WRITE, None).unwrap();
        // CPU 0 flushes, CPU 1 does not: it may write on, until that has to be seen.
        guest.load(0, PAGE);
        guest.memory.backed.borrow_mut()[100].as_mut().unwrap().writable = false;
        guest.memory.dirty.borrow_mut()[100] = false;
        guest.shadow.write_protect(&guest.memory, range(100, 1));
        // The store goes another way or none, but not unseen, which the access checks.
        let _ = guest.access(1, 0x1000, USER_WRITE, None);
    }
}

#[test]
fn a_root_of_another_shadow_is_refused() {
    let machine = Heap::new(4096, 4);
    let mut one = guest(&machine);
    let mut other = guest(&machine);
    let (_, root) = one.roots[0].take().unwrap();
    let refused = Err(ShadowError::OtherShadow);
    assert_eq!(other.shadow.synchronise(&other.memory, &root), refused);
    assert_eq!(other.shadow.invalidate_page(&other.memory, &root, 0x1000), refused);
    let fault = other.shadow.fault(&other.memory, &root, 0x1000, USER_READ);
    assert_eq!(fault, Err(ShadowError::OtherShadow));
    one.roots[0] = Some((PAGE, root));
    assert_eq!(one.access(0, 0x1000, USER_READ, None), Ok(100 * PAGE));
}

#[test]
fn a_write_to_all_of_memory_is_one_to_every_table() {
    let machine = Heap::new(4096, 4);
    let mut guest = guest(&machine);
    guest.access(0, 0x1000, USER_READ, None).unwrap();
    guest.memory.word(6 * PAGE + 8).set(101 * PAGE | P | U | A);
    let everything = GpaRange::new(Gpa(0), 1 << 52).unwrap();
    guest.shadow.written(&guest.memory, everything);
    assert_eq!(guest.access(0, 0x1000, USER_READ, None), Ok(101 * PAGE));
    guest.shadow.unprotect(&guest.memory, everything);
    assert_eq!(guest.shadow.statistics().pages, 1, "the root that the CPUs hold");
    assert_eq!(guest.access(0, 0x1000, USER_READ, None), Ok(101 * PAGE));
}

#[test]
fn a_kernel_without_write_protection_has_its_stores_to_read_only_pages_emulated() {
    let machine = Heap::new(4096, 4);
    let mut guest = guest(&machine);
    guest.mode.write_protect = false;
    guest.load(0, PAGE);
    guest.poke(6 * PAGE + 8, 100 * PAGE | P | U);
    guest.access(0, 0x1008, GuestAccess::kernel(Access::Write), Some(77)).unwrap();
    assert_eq!(guest.memory.word(100 * PAGE + 8).get(), 77);
    let code = ErrorCode::PROTECTION | ErrorCode::WRITE | ErrorCode::USER;
    assert_eq!(guest.access(0, 0x1000, USER_WRITE, None), Err(code));
}

#[test]
fn what_makes_no_sense_is_refused_with_what_to_do() {
    let machine = Heap::new(4096, 4);
    let mut guest = guest(&machine);
    let (_, root) = guest.roots[0].as_ref().unwrap();
    let fault = guest.shadow.fault(&guest.memory, root, 1 << 47, USER_READ);
    assert_eq!(fault, Err(ShadowError::NotCanonical(1 << 47)));
    let overlap = range(FRAMES as u64 - 1, 2);
    assert_eq!(guest.shadow.create_slot(overlap), Err(ShadowError::Slot(overlap)));
    let ragged = GpaRange::new(Gpa(1 << 30), 5000).unwrap();
    assert_eq!(guest.shadow.create_slot(ragged), Err(ShadowError::Slot(ragged)));
    let options = ShadowOptions { pages: 10, ..ShadowOptions::default() };
    let refused = slat_shadow::Shadow::new(&machine, options).err().expect("refused");
    assert!(refused.to_string().contains("64"), "{refused}");
    assert_eq!(
        guest.shadow.load_root(&guest.memory, guest.mode, 1 << 60).unwrap_err(),
        ShadowError::Root(1 << 60)
    );
}

#[test]
fn without_memory_for_tables_a_fault_fails_and_succeeds_later() {
    use std::sync::atomic::Ordering;
    let machine = Heap::new(4096, 4);
    let mut guest = guest(&machine);
    for allowed in 0..3 {
        machine.allowed.store(allowed, Ordering::Relaxed);
        let (_, root) = guest.roots[0].as_ref().unwrap();
        let fault = guest.shadow.fault(&guest.memory, root, 0x1000, USER_READ);
        assert_eq!(fault, Err(ShadowError::OutOfMemory));
        machine.allowed.store(-1, Ordering::Relaxed);
        guest.shadow.unprotect(&guest.memory, range(2, 5));
    }
    assert_eq!(guest.access(0, 0x1000, USER_READ, None), Ok(100 * PAGE));
    drop(guest);
    let (allocated, freed) =
        (machine.allocated.load(Ordering::Relaxed), machine.freed.load(Ordering::Relaxed));
    assert_eq!(allocated, freed, "every table went back");
}
