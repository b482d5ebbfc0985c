//! The hypervisor's own address space: the first 512 GiB one to one, in pages of 1 GiB. MTRRs say what is not memory.

use core::sync::atomic::AtomicU64;

const PRESENT_WRITABLE: u64 = 0b11;
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
const BLOCK: u64 = 1 << 7;
const GIGABYTES: usize = 512;

#[repr(C, align(4096))]
pub(super) struct Table([AtomicU64; 512]);

/// The root: `boot.s` adds the one table below it, whose address is known to the linker only.
pub(super) static OWN_ROOT: Table = Table([const { AtomicU64::new(0) }; 512]);
/// What it leads to.
pub(super) static OWN_BLOCKS: Table = Table::one_to_one();

impl Table {
    const fn one_to_one() -> Self {
        let mut entries = [const { AtomicU64::new(0) }; 512];
        let mut index = 0;
        while index < GIGABYTES {
            let block = PRESENT_WRITABLE | ACCESSED | DIRTY | BLOCK;
            entries[index] = AtomicU64::new((index as u64) << 30 | block);
            index += 1;
        }
        Self(entries)
    }
}
