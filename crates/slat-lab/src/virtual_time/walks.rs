//! The walks of a hypervisor's thread where a general walker calls for each entry: enabling a log, and clearing it.
//!
//! The old designs are visitors of the engine's walker: they are called where the old code was called, and pay for each
//! call what it cost there. What they do is done by the engine, whose own steps are not charged then but for cache lines
//! that come from other CPUs. Barriers and invalidations within a break-before-make are not charged either, nor are
//! those of the engine where its steps are compared with these.

use slat::format::arm::{K4, Stage2};
use slat::walk::{Flow, Visit, Visitor, Wants};
use slat::{Error, Format, Gpa, GpaRange, Level, NoMemory, NoSlot, Participant, Reserve, Tree};
use slat_model::clock::{Cause, Time, Timed, advance};

use super::design::{Barrier, Design, SkipLevels};
use super::ground::PAGE;
use crate::failure::Failure;
use crate::report::Counters;

type Stage = Stage2<K4>;

/// The log is cleared by words of so many pages.
const SECTION: u64 = 64;
/// What is split in one walk at most, and the tables that it takes down to pages: what is in hand before each.
const PIECE: (u64, usize) = (1 << 30, 513);

/// What a general walker costs.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(crate) struct Prices {
    /// Visiting an entry in vain.
    pub(crate) visit: Time,
    /// Write-protecting an entry, the visit included.
    pub(crate) protect: Time,
    /// An entry of a table that a block is split into, without the visit of it.
    pub(crate) split: Time,
    /// Beginning a walk: one a section.
    pub(crate) section: Time,
    /// A barrier while blocks are split.
    pub(crate) barrier: Time,
}

/// A tree whose thread walks as a design does.
pub(crate) struct Walks<'a, 'm> {
    tree: &'a Tree<'m, Stage, Timed>,
    design: &'a Design,
    prices: Prices,
    /// What is split before the barrier of a walk: the bytes that eager split takes at once.
    chunk: u64,
    walker: Participant<'m, Timed>,
    hands: Participant<'m, Timed>,
    reserve: Reserve<'m, Timed>,
    /// Blocks were split since the last barrier.
    unpublished: bool,
}

impl<'a, 'm> Walks<'a, 'm> {
    /// # Errors
    /// The machine has no two slots for participants.
    pub(crate) fn new(
        tree: &'a Tree<'m, Stage, Timed>,
        (design, prices): (&'a Design, Prices),
        chunk: Option<u64>,
    ) -> Result<Self, NoSlot> {
        let machine = tree.machine();
        Ok(Self {
            tree,
            design,
            prices,
            chunk: chunk.unwrap_or(PIECE.0),
            walker: Participant::register(machine)?,
            hands: Participant::register(machine)?,
            reserve: Reserve::new(machine),
            unpublished: false,
        })
    }

    /// The log of `range` is enabled: everything is protected in one walk, then split if that is asked for.
    ///
    /// # Errors
    /// As those of the engine's walks.
    pub(crate) fn enable(&mut self, range: GpaRange, split: bool) -> Result<(), Broken> {
        self.protect(range)?;
        let mut at = range.start().0;
        while split && at < range.end().0 {
            let end = (at + self.chunk.min(PIECE.0)).min(range.end().0);
            self.split(piece(at, end)?)?;
            self.end_of_walk(end, range);
            at = end;
        }
        Ok(())
    }

    /// The log of `range` is cleared of the pages whose bits are set, by sections: each is protected from the first to the
    /// last such page, and then split if that is asked for.
    ///
    /// # Errors
    /// As [`enable`](Self::enable).
    pub(crate) fn clear(
        &mut self,
        range: GpaRange,
        bits: &[u64],
        split: bool,
    ) -> Result<(), Broken> {
        for (section, &word) in (0..).zip(bits).filter(|(_, word)| **word != 0) {
            let first = range.start().0 + section * SECTION * PAGE;
            let (from, to) = (u64::from(word.trailing_zeros()), u64::from(word.leading_zeros()));
            let part = piece(first + from * PAGE, first + (SECTION - to) * PAGE)?;
            advance(self.prices.section, Cause::Section);
            self.protect(part)?;
            if split {
                advance(self.prices.section, Cause::Section);
                self.split(part)?;
                self.end_of_walk(first + SECTION * PAGE, range);
            }
        }
        Ok(())
    }

    /// What its walks visited, and what they split.
    pub(crate) fn counters(&self) -> Counters {
        let splits = self.hands.counters.splits.get();
        let entries_visited = self.walker.counters.visited.get();
        Counters { splits, entries_visited, ..Counters::default() }
    }

    fn protect(&mut self, range: GpaRange) -> Result<(), Broken> {
        let Self { tree, prices, walker, hands, .. } = self;
        tree.machine().by_line(|| {
            tree.walk(walker, range, &mut Protect(prices))?;
            tree.write_protect(hands, range, |_| {})
        })?;
        Ok(())
    }

    fn split(&mut self, range: GpaRange) -> Result<(), Broken> {
        let Self { tree, design, prices, walker, hands, reserve, .. } = self;
        tree.machine().on_account(|| reserve.top_up(PIECE.1))?;
        let skip = design.skip_levels;
        let mut visitor = Split { tree, prices, skip, hands, reserve, blocks: 0, pages: 0 };
        tree.machine().by_line(|| tree.walk(walker, range, &mut visitor))?;
        let Split { blocks, pages, .. } = visitor;
        let barriers = match design.barrier {
            Barrier::Entry => pages,
            Barrier::Block => blocks,
            Barrier::Walk => {
                self.unpublished |= blocks > 0;
                0
            }
        };
        (0..barriers).for_each(|_| advance(self.prices.barrier, Cause::WalkBarrier));
        Ok(())
    }

    /// The walk has come to `at`: a design with one barrier a walk has it at the end of each chunk.
    fn end_of_walk(&mut self, at: u64, range: GpaRange) {
        if self.unpublished && (at.is_multiple_of(self.chunk) || at >= range.end().0) {
            advance(self.prices.barrier, Cause::WalkBarrier);
            self.unpublished = false;
        }
    }
}

fn piece(start: u64, end: u64) -> Result<GpaRange, Broken> {
    let range = GpaRange::new(Gpa(start), end.saturating_sub(start));
    range.ok_or(Broken::Walk(Error::OutOfRange { limit: Gpa(start) }))
}

/// Why a walk ended early.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Broken {
    #[error("a walk: {0}")]
    Walk(#[from] Error),
    #[error("a walk: {0}")]
    Memory(#[from] NoMemory),
}

impl From<Broken> for Failure {
    fn from(why: Broken) -> Self {
        Self::Run(why.to_string())
    }
}

/// Called for each leaf, as all walks of the general walker.
struct Protect<'a>(&'a Prices);

impl Visitor<Timed> for Protect<'_> {
    fn wants(&self, _: Level) -> Wants {
        Wants::LEAVES
    }

    fn leaf(&mut self, visit: &Visit<'_, Timed>) -> Flow {
        let entry = visit.entry();
        if Stage::is_valid(entry) && Stage::is_writable(entry) {
            advance(self.0.protect, Cause::Protect);
        } else {
            advance(self.0.visit, Cause::Visit);
        }
        Flow::Next
    }
}

/// Links a table of pages where it is called for a block. What the walker does then with the entries of the table, and
/// with those of a table that was there before, is the design's choice.
struct Split<'v, 'a, 'm> {
    tree: &'a Tree<'m, Stage, Timed>,
    prices: &'v Prices,
    skip: SkipLevels,
    hands: &'v Participant<'m, Timed>,
    reserve: &'v mut Reserve<'m, Timed>,
    blocks: u64,
    pages: u64,
}

impl Visitor<Timed> for Split<'_, '_, '_> {
    fn wants(&self, level: Level) -> Wants {
        let skipped = level == Level::LAST && self.skip == SkipLevels::On;
        match self.skip {
            _ if skipped => Wants::NOTHING,
            SkipLevels::Child if level.below() == Level::LAST => Wants::LEAVES.and(Wants::BEFORE),
            _ => Wants::LEAVES,
        }
    }

    fn before(&mut self, _: &Visit<'_, Timed>) -> Flow {
        advance(self.prices.visit, Cause::Visit);
        Flow::Skip
    }

    fn leaf(&mut self, visit: &Visit<'_, Timed>) -> Flow {
        let (level, entry) = (visit.level(), visit.entry());
        if level == Level::LAST || !Stage::is_valid(entry) {
            advance(self.prices.visit, Cause::Visit);
            return Flow::Next;
        }
        let size = self.tree.geometry().size(level);
        let Some(block) = GpaRange::new(Gpa(visit.gpa().0 & !(size - 1)), size) else {
            return Flow::Next;
        };
        let pages = size / PAGE;
        (0..pages).for_each(|_| advance(self.prices.split, Cause::Split));
        // Another participant's walk, as all tables are in hand and it waits for nobody.
        match self.tree.split(self.hands, self.reserve, block, Level::LAST) {
            Ok(_) => {
                self.blocks += 1;
                self.pages += pages;
                if self.skip == SkipLevels::Child { Flow::Skip } else { Flow::Next }
            }
            Err(why) => Flow::Stop(why),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use slat::{Attributes, Hpa, Lookup};
    use slat_model::Model;
    use slat_model::clock::{Costs, Ledger, Simulation, current, ledger};

    use super::*;

    const SIZE: u64 = 4 << 20;
    const PAGES: u64 = SIZE / PAGE;
    const WORDS: usize = (PAGES / SECTION) as usize;
    const PRICES: Prices = Prices {
        visit: Time(1),
        protect: Time(2),
        split: Time(3),
        section: Time(4),
        barrier: Time(5),
    };

    /// What `act` pays on memory that is mapped by blocks or by pages.
    fn paid(design: &Design, blocks: bool, act: impl Fn(&mut Walks<'_, '_>, GpaRange)) -> Ledger {
        let model = Model::builder().checked(false).build().unwrap();
        let machine = Timed::new(model, Costs::default());
        let tree = Tree::new(&machine, Stage::new(40).unwrap(), 1).unwrap();
        let hands = Participant::register(&machine).unwrap();
        let mut reserve = Reserve::new(&machine);
        reserve.top_up(16).unwrap();
        let range = GpaRange::new(Gpa(0), SIZE).unwrap();
        let largest = if blocks { Level::new(2).unwrap() } else { Level::LAST };
        let template = tree.template(Attributes::RWX).unwrap();
        tree.map(&hands, &mut reserve, range, Hpa(4 << 30), template, largest).unwrap();
        let paid = Cell::new(Ledger::default());
        let mut simulation = Simulation::new();
        let thread = || {
            let mut walks = Walks::new(&tree, (design, PRICES), None).unwrap();
            act(&mut walks, range);
            paid.set(ledger(current().unwrap()));
        };
        simulation.spawn(Time(0), thread).unwrap();
        simulation.run();
        let pin = hands.pin();
        for page in 0..PAGES {
            let Lookup::Mapped { template, .. } = tree.look_up(&pin, Gpa(page * PAGE)).unwrap()
            else {
                panic!("page {page} is gone");
            };
            assert!(!tree.attributes(template).write, "page {page} of {}", design.name);
        }
        paid.get()
    }

    fn design(name: &str) -> Design {
        Design::load(name).unwrap()
    }

    fn enable(design: &Design, blocks: bool) -> Ledger {
        paid(design, blocks, |walks, range| {
            walks.enable(range, true).unwrap();
            assert_eq!(walks.counters().splits, if blocks { 2 } else { 0 });
        })
    }

    #[test]
    fn who_skips_the_last_level_does_not_pay_for_its_entries() {
        let visits = |name, blocks| enable(&design(name), blocks).count(Cause::Visit);
        assert_eq!(visits("linux-6.12", false), PAGES);
        assert_eq!(visits("linux-6.12", true), PAGES);
        assert_eq!(visits("linux-skip-levels", false), 0);
        assert_eq!(visits("linux-skip-levels", true), 0);
        // The visitor of child-skip is called for each table.
        assert_eq!(visits("linux-child-skip", false), 2);
        assert_eq!(visits("linux-child-skip", true), 0);
    }

    #[test]
    fn barriers_come_after_each_entry_each_block_or_at_the_end() {
        let barriers = |barrier| {
            let design = Design { barrier, ..design("linux-6.12") };
            enable(&design, true).count(Cause::WalkBarrier)
        };
        assert_eq!(barriers(Barrier::Entry), PAGES);
        assert_eq!(barriers(Barrier::Block), 2);
        assert_eq!(barriers(Barrier::Walk), 1);
    }

    #[test]
    fn a_section_is_walked_from_its_first_to_its_last_page() {
        let clear = |word: u64| {
            paid(&design("linux-6.12"), false, move |walks, range| {
                walks.clear(range, &[word; WORDS], false).unwrap();
                walks.protect(range).unwrap();
            })
        };
        let all = clear(u64::MAX);
        assert_eq!((all.count(Cause::Protect), all.count(Cause::Visit)), (PAGES, PAGES));
        assert_eq!(all.count(Cause::Section), WORDS as u64);
        // The walk after it finds 49 of 64 protected.
        let some = clear(0x0001_0001_0001_0001);
        assert_eq!(some.count(Cause::Visit), PAGES / SECTION * 49);
    }

    #[test]
    fn a_block_is_protected_once_and_split_by_its_first_section() {
        let ledger = paid(&design("linux-6.12"), true, |walks, range| {
            walks.clear(range, &[u64::MAX; WORDS], true).unwrap();
        });
        assert_eq!((ledger.count(Cause::Protect), ledger.count(Cause::Split)), (2, PAGES));
        // Its other seven sections find pages, and all eight look at what was split.
        assert_eq!(ledger.count(Cause::Visit), PAGES / 8 * 7 + PAGES);
    }
}
