//! The guest's own tables: 64-bit mode needs some. One to one, in pages of 1 GiB.
#![expect(unsafe_code, reason = "writes to memory that will be the guest's")]

use slat::{Gpa, Hpa};

const PAGE: u64 = 4096;
const ENTRIES: u64 = 512;
/// How many bits of addresses they cover: two of the second level.
pub(super) const ADDRESS_BITS: u32 = 40;
const MIDDLE_TABLES: u64 = 1 << (ADDRESS_BITS - 39);
/// Bytes of all of them: the root, and what it leads to.
pub(super) const SIZE: u64 = (1 + MIDDLE_TABLES) * PAGE;

/// Present, writable, accessed.
const TABLE: u64 = 0x23;
/// Present, writable, accessed, dirty, a page.
const BLOCK: u64 = 0xe3;

/// Writes them to `SIZE` bytes of zeroed memory that nobody else uses. The root comes first.
pub(super) fn write((gpa, hpa): (Gpa, Hpa)) {
    // SAFETY: host memory is mapped one to one, and the caller has it for this.
    let entries = unsafe {
        core::slice::from_raw_parts_mut(hpa.0 as *mut u64, ((1 + MIDDLE_TABLES) * ENTRIES) as usize)
    };
    let (root, middle) = entries.split_at_mut(ENTRIES as usize);
    for (table, entry) in (0..MIDDLE_TABLES).zip(root) {
        *entry = gpa.0 + (1 + table) * PAGE | TABLE;
    }
    for (gigabyte, entry) in (0..).zip(middle) {
        *entry = gigabyte << 30 | BLOCK;
    }
}
