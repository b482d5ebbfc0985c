//! The hypervisor's own address space: one to one, in blocks of 1 GiB.
//!
//! It is complete before the first instruction, since atomics and unaligned accesses need Normal memory, and so the MMU
//! on.

use core::sync::atomic::AtomicU64;

const BLOCK: u64 = 1;
const NORMAL: u64 = 1 << 2;
const INNER_SHAREABLE: u64 = 3 << 8;
const ACCESSED: u64 = 1 << 10;
const EXECUTE_NEVER: u64 = 1 << 54;

/// Below 1 GiB the board has its devices.
const DEVICES: u64 = BLOCK | ACCESSED | EXECUTE_NEVER;
/// From there on memory, if it has so much.
const MEMORY: u64 = BLOCK | NORMAL | INNER_SHAREABLE | ACCESSED;
/// The board has at most 255 GiB of memory.
const MEMORY_END: usize = 256;

#[repr(C, align(4096))]
pub(super) struct Table([AtomicU64; 512]);

/// Entries of level 1: 39 bits of addresses. `TTBR0_EL2` points here from the start.
pub(super) static OWN_TABLE: Table = Table::one_to_one();

impl Table {
    const fn one_to_one() -> Self {
        let mut entries = [const { AtomicU64::new(0) }; 512];
        entries[0] = AtomicU64::new(DEVICES);
        let mut index = 1;
        while index < MEMORY_END {
            entries[index] = AtomicU64::new((index as u64) << 30 | MEMORY);
            index += 1;
        }
        Self(entries)
    }
}
