//! How the guest's own page tables lead from its virtual to its physical addresses.

use super::memory::Memory;
use crate::contents::Words;
use std::sync::atomic::Ordering;

/// Bytes of a page and of a table.
pub(crate) const PAGE: u64 = 4096;
/// Present, writable, for programs; accessed and dirty already, so that no walk of the CPU writes.
const FLAGS: u64 = 0x67;
/// A large page, where there could be a table.
const LARGE: u64 = 1 << 7;
/// Tables of four levels, the last of which is 0.
const TOP: u32 = 3;

/// Guest-physical memory that the guest can reach.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Mapping {
    pub(crate) va: u64,
    pub(crate) gpa: u64,
    pub(crate) size: u64,
    /// The size of the guest's pages: 4K, 2M or 1G.
    pub(crate) page: u64,
}

/// Bytes that an entry of a level covers.
fn span(level: u32) -> u64 {
    PAGE << (9 * level)
}

fn index(va: u64, level: u32) -> u64 {
    va / span(level) % 512
}

/// Tables that mappings need at most, the root included.
pub(crate) fn tables(mappings: &[Mapping]) -> u64 {
    let of = |mapping: &Mapping| {
        let levels = (1..=TOP).filter(|&level| span(level) > mapping.page);
        levels.map(|level| mapping.size.div_ceil(span(level)) + 1).sum::<u64>()
    };
    1 + mappings.iter().map(of).sum::<u64>()
}

/// Writes tables from `offset` of memory that the guest has at `gpa`; the root is the first.
pub(crate) fn write(memory: &Memory, gpa: u64, offset: u64, mappings: &[Mapping]) {
    let mut next = offset + PAGE;
    for mapping in mappings {
        let level = (0..=TOP).find(|&level| span(level) == mapping.page).unwrap_or(0);
        for done in (0..mapping.size).step_by(mapping.page as usize) {
            let va = mapping.va + done;
            let mut table = offset;
            for upper in (level + 1..=TOP).rev() {
                table = follow(memory, gpa, table + 8 * index(va, upper), &mut next);
            }
            let large = if level > 0 { LARGE } else { 0 };
            set(memory, table + 8 * index(va, level), (mapping.gpa + done) | FLAGS | large);
        }
    }
}

/// The table below an entry, which gets one if it has none yet.
fn follow(memory: &Memory, gpa: u64, entry: u64, next: &mut u64) -> u64 {
    let there = memory.word(entry).map_or(0, |entry| entry.load(Ordering::Relaxed));
    if there != 0 {
        return (there & !(PAGE - 1)) - gpa;
    }
    let table = *next;
    *next += PAGE;
    set(memory, entry, (gpa + table) | FLAGS);
    table
}

fn set(memory: &Memory, entry: u64, value: u64) {
    if let Some(entry) = memory.word(entry) {
        entry.store(value, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where tables lead, as a CPU would follow them.
    fn walk(memory: &Memory, gpa: u64, va: u64) -> Option<u64> {
        let mut table = 0;
        for level in (0..=TOP).rev() {
            let entry = memory.word(table + 8 * index(va, level)).unwrap().load(Ordering::Relaxed);
            if entry & 1 == 0 {
                return None;
            }
            let to = entry & 0x000f_ffff_ffff_f000;
            if level == 0 || entry & LARGE != 0 {
                return Some(to + va % span(level));
            }
            table = to - gpa;
        }
        None
    }

    #[test]
    fn every_page_leads_where_it_was_mapped_and_no_other_does() {
        let small = Mapping { va: 1 << 40, gpa: 0xff_e000_0000, size: 5 << 20, page: PAGE };
        let large = Mapping { va: 3 << 40, gpa: 7 << 30, size: 6 << 20, page: 2 << 20 };
        let mappings = [small, large];
        let (gpa, room) = (1 << 20, tables(&mappings) * PAGE);
        let memory = Memory::plain(room).unwrap();
        write(&memory, gpa, 0, &mappings);
        for mapping in mappings {
            for offset in (0..mapping.size).step_by(PAGE as usize) {
                let there = walk(&memory, gpa, mapping.va + offset + 8);
                assert_eq!(there, Some(mapping.gpa + offset + 8));
            }
            assert_eq!(walk(&memory, gpa, mapping.va - 1), None);
            assert_eq!(walk(&memory, gpa, mapping.va + mapping.size), None);
        }
    }
}
