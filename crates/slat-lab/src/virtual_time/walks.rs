//! What the walks of a hypervisor's thread cost where a general walker visits entry after entry: enabling a log, and
//! clearing it.

use super::design::{Barrier, Design, SkipLevels};
use crate::random::Dice;

/// Entries of a table, and pages of a block.
const TABLE: u64 = 512;
/// Pages of a section: the log is cleared by its words.
const SECTION: u64 = 64;

/// Nanoseconds.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(crate) struct Walks {
    /// Visiting an entry in vain.
    pub(crate) visit: f64,
    /// Write-protecting an entry, the visit included.
    pub(crate) protect: f64,
    /// An entry of a table that a block is split into, the visit of it included.
    pub(crate) split: f64,
    /// Beginning a walk: one a section.
    pub(crate) section: f64,
    /// A barrier while blocks are split.
    pub(crate) barrier: f64,
}

/// Memory as a walk finds it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Found {
    pub(crate) pages: u64,
    /// Mapped by blocks that a walk that splits would split; otherwise by pages.
    pub(crate) blocks: bool,
    /// One of so many pages is mapped and writable, where there are pages.
    pub(crate) every: u64,
    /// One of so many pages is to be cleared.
    pub(crate) cleared: u64,
}

impl Found {
    fn tables(&self) -> f64 {
        self.pages as f64 / TABLE as f64
    }

    /// Pages from the first to the last of those in sections that are to be cleared.
    fn reached(&self) -> f64 {
        self.pages as f64 * (SECTION - self.cleared.min(SECTION) + 1) as f64 / SECTION as f64
    }
}

impl Walks {
    /// The same in one run, in which each cost differs by up to `spread` per cent from its mean.
    pub(crate) fn drawn(&self, spread: f64, dice: &mut Dice) -> Self {
        let mut draw = |mean: f64| {
            let off = dice.below(2001) as f64 / 1000.0 - 1.0;
            mean * (1.0 + off * spread / 100.0)
        };
        Self {
            visit: draw(self.visit),
            protect: draw(self.protect),
            split: draw(self.split),
            section: draw(self.section),
            barrier: draw(self.barrier),
        }
    }

    /// Write-protecting everything in one walk.
    pub(crate) fn protect_all(&self, found: Found) -> f64 {
        if found.blocks {
            return found.tables() * self.protect;
        }
        self.protect_pages(found.pages as f64, found.every)
    }

    fn protect_pages(&self, pages: f64, every: u64) -> f64 {
        let mapped = (pages / every as f64).min(pages);
        mapped * self.protect + (pages - mapped) * self.visit
    }

    /// Splitting everything in one walk.
    pub(crate) fn split_all(&self, design: &Design, found: Found) -> f64 {
        let made = if found.blocks { self.make(design, found) } else { 0.0 };
        made + self.pass_over(design, found.pages as f64) + found.tables() * self.visit
    }

    /// Clearing the log by sections, each of which is write-protected, and split if that is asked for.
    pub(crate) fn clear(&self, design: &Design, found: Found, split: bool) -> f64 {
        let sections = found.pages as f64 / SECTION as f64 * self.section;
        let reached = found.reached();
        let split_now = found.blocks && split;
        // The first section of a block finds the block, all others find what it was split into.
        let others = if split_now { 1.0 - SECTION as f64 / TABLE as f64 } else { 1.0 };
        let protect = if found.blocks && !split {
            self.protect_all(found)
        } else {
            self.protect_pages(reached * others, found.every)
        };
        if !split {
            return sections + protect;
        }
        let made = if split_now { self.make(design, found) } else { 0.0 };
        2.0 * sections + protect + made + self.pass_over(design, reached)
    }

    /// The tables that blocks are split into, without visits of what is in them.
    fn make(&self, design: &Design, found: Found) -> f64 {
        let entries = found.pages as f64;
        let barriers = match design.barrier {
            Barrier::Entry => entries,
            Barrier::Block => found.tables(),
            Barrier::Walk => match design.eager_split.chunk() {
                Some(chunk) => entries * 4096.0 / chunk.0 as f64,
                None => 1.0,
            },
        };
        entries * (self.split - self.visit).max(0.0) + barriers * self.barrier
    }

    /// What a walk that splits has to do with pages.
    fn pass_over(&self, design: &Design, pages: f64) -> f64 {
        match design.skip_levels {
            SkipLevels::Off => pages * self.visit,
            SkipLevels::On => 0.0,
            SkipLevels::Child => pages / TABLE as f64 * self.visit,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WALKS: Walks =
        Walks { visit: 1.0, protect: 2.0, split: 5.0, section: 10.0, barrier: 100.0 };

    fn design(name: &str) -> Design {
        Design::load(name).unwrap()
    }

    fn found(blocks: bool) -> Found {
        Found { pages: 1024, blocks, every: 1, cleared: 1 }
    }

    #[test]
    fn who_skips_the_last_level_does_not_pay_for_its_entries() {
        let split = |name, blocks| WALKS.split_all(&design(name), found(blocks));
        assert_eq!(split("linux-6.12", false), 1024.0 + 2.0);
        assert_eq!(split("linux-skip-levels", false), 2.0);
        let child = Design { skip_levels: SkipLevels::Child, ..design("linux-6.12") };
        assert_eq!(WALKS.split_all(&child, found(false)), 4.0);
        let visits = split("linux-6.12", true) - split("linux-skip-levels", true);
        assert_eq!(visits, 1024.0);
    }

    #[test]
    fn barriers_come_after_each_entry_each_block_or_at_the_end() {
        let split = |barrier| {
            let design = Design { barrier, ..design("slat") };
            WALKS.split_all(&design, found(true))
        };
        let barriers = split(Barrier::Entry) - split(Barrier::Block);
        assert_eq!(barriers, 1022.0 * 100.0);
        assert_eq!(split(Barrier::Block) - split(Barrier::Walk), 100.0);
    }

    #[test]
    fn a_section_is_reached_from_its_first_to_its_last_page() {
        let none = Walks { section: 0.0, ..WALKS };
        let clear = |cleared| {
            let found = Found { every: cleared, cleared, ..found(false) };
            none.clear(&design("linux-skip-levels"), found, false)
        };
        assert_eq!(clear(1), 2048.0);
        // 49 of 64 pages, and one of 16 of them protected.
        assert_eq!(clear(16), 784.0 + 49.0);
    }

    #[test]
    fn blocks_are_cleared_as_blocks_where_nothing_is_split() {
        let clear = |split| WALKS.clear(&design("linux-6.12"), found(true), split);
        assert_eq!(clear(false), 16.0 * 10.0 + 2.0 * 2.0);
        assert!(clear(true) > 1024.0 * WALKS.split);
    }
}
