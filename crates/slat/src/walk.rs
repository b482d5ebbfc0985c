//! The walker: one for all operations on a range. A visitor says what it wants to see; a level that nobody wants is
//! not entered.
//!
//! # What a visit is
//! A walk goes over a range in address order. At each entry that the range touches:
//!
//! 1. The entry is read once. If it is a table and the visitor wants tables before their entries at this level,
//!    [`Visitor::before`] is called; if it is anything else (a page, a block, an invalid entry) and the visitor wants
//!    leaves here, [`Visitor::leaf`] is called, or [`Visitor::run`] for a stretch of the last level.
//! 2. After a call the entry is read again. If it is a table now, even one that the call just linked, and the visitor
//!    wants anything below, the walk descends. If it was a table and is none any more, the visit begins again.
//! 3. If it is a table and the visitor wants tables after their entries, [`Visitor::after`] is called, also when the
//!    levels below were not entered.
//!
//! The address then advances to the entry's boundary, wherever in the entry it began. The root obeys all of this too.
//!
//! # Pins
//! A pin covers at most one table's worth of entries ([`Visitor::TABLES`] may say otherwise); then the walk unpins and starts again from the root (rule 1).
//! [`Flow::Again`] does the same at once for the entry at hand (rule 4). Before every unpin, [`Visitor::settle`] is
//! called.
//!
//! # Cost
//! The recursion is over types, one per level, and [`Visitor::wants`] of a visitor that decides at compile time is a
//! constant in each: what it does not want leaves no instruction behind.

use crate::machine::Machine;
use crate::rcu::bump;
use crate::table::Table;
use crate::{Error, Format, Gpa, GpaRange, Level, Participant, Pin, Tree};

/// What a visitor wants to see at a level: any of leaves, tables before and tables after their entries.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Wants(u8);

impl Wants {
    /// Nothing at this level.
    pub const NOTHING: Self = Self(0);
    /// Pages, blocks and invalid entries.
    pub const LEAVES: Self = Self(1);
    /// Tables, before their entries.
    pub const BEFORE: Self = Self(2);
    /// Tables, after their entries.
    pub const AFTER: Self = Self(4);

    /// Both.
    #[inline(always)]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether every part of `other` is wanted.
    #[inline(always)]
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

/// What a visit says about the rest of the walk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Flow {
    /// Go on, into the table if there is one now.
    Next,
    /// Go on after this entry, whatever it is now.
    Skip,
    /// Unpin, and visit this entry again from the root: it was LOCKED, or its table is DEAD (rule 4).
    Again,
    /// Unpin, and visit this entry again from the root: the visitor has something to settle first.
    Pause,
    /// Unpin and end the walk with this error.
    Stop(Error),
}

/// One entry at the moment of its visit.
pub struct Visit<'p, M> {
    pub(crate) table: Table<'p, M>,
    pub(crate) index: usize,
    pub(crate) level: Level,
    pub(crate) entry: u64,
    pub(crate) start: u64,
    pub(crate) end: u64,
}

impl<M: Machine> Visit<'_, M> {
    /// The entry as it was read.
    pub fn entry(&self) -> u64 {
        self.entry
    }

    /// Its level.
    pub fn level(&self) -> Level {
        self.level
    }

    /// The first address of the walk's range inside this entry.
    pub fn gpa(&self) -> Gpa {
        Gpa(self.start)
    }

    /// The address after the last of the walk's range inside this entry.
    pub fn end(&self) -> Gpa {
        Gpa(self.end)
    }
}

/// A stretch of neighbouring entries of one table of the last level.
pub struct Run<'p, M> {
    pub(crate) table: Table<'p, M>,
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) start: u64,
    pub(crate) page_shift: u32,
}

impl<'p, M: Machine> Run<'p, M> {
    /// The address of the first entry.
    pub fn gpa(&self) -> Gpa {
        Gpa(self.start)
    }

    /// How many entries.
    pub fn len(&self) -> usize {
        self.to - self.from
    }

    /// Never.
    pub fn is_empty(&self) -> bool {
        self.from == self.to
    }

    /// Reads the `n`-th entry of the stretch; `None` if `n` is not below [`len`](Self::len).
    pub fn entry(&self, n: usize) -> Option<u64> {
        (n < self.len()).then(|| self.table.load(self.from + n))
    }

    /// The address of the entry at `index` of the table.
    #[inline(always)]
    pub(crate) fn address(&self, index: usize) -> u64 {
        self.start + (((index - self.from) as u64) << self.page_shift)
    }

    #[inline(always)]
    pub(crate) fn page_size(&self) -> u64 {
        1 << self.page_shift
    }

    /// The visit of the entry at `index` of the table, as it is now.
    #[inline(always)]
    pub(crate) fn visit(&self, index: usize) -> Visit<'p, M> {
        let start = self.address(index);
        Visit {
            table: self.table,
            index,
            level: Level::LAST,
            entry: self.table.load(index),
            start,
            end: start + self.page_size(),
        }
    }
}

/// Who walks a tree, and what it does at each entry. See the head of this module's source for the order of calls.
pub trait Visitor<M: Machine> {
    /// How many tables are shown afterwards under one pin. Who wants a table afterwards looks at all its entries, so
    /// each is a pin's worth; more make grace periods longer, and are for who settles them with one invalidation.
    const TABLES: usize = 1;

    /// What to show at `level`. Called often: a constant per level costs nothing.
    fn wants(&self, level: Level) -> Wants;

    /// A leaf or an invalid entry.
    fn leaf(&mut self, visit: &Visit<'_, M>) -> Flow {
        let _ = visit;
        Flow::Next
    }

    /// Entries of the last level in one table; calls [`leaf`](Self::leaf) for each.
    ///
    /// # Errors
    /// Where the walk goes on after `Again`, and with which flow it ended.
    #[inline(always)]
    fn run(&mut self, run: &Run<'_, M>) -> Result<(), (Gpa, Flow)> {
        for index in run.from..run.to {
            let visit = run.visit(index);
            match self.leaf(&visit) {
                Flow::Next | Flow::Skip => {}
                flow => return Err((visit.gpa(), flow)),
            }
        }
        Ok(())
    }

    /// A table, before its entries.
    fn before(&mut self, visit: &Visit<'_, M>) -> Flow {
        let _ = visit;
        Flow::Next
    }

    /// A table, after its entries.
    fn after(&mut self, visit: &Visit<'_, M>) -> Flow {
        let _ = visit;
        Flow::Next
    }

    /// The pin is about to be given up: settle what is locked.
    #[inline(always)]
    fn settle(&mut self, pin: &Pin<'_, M>) {
        let _ = pin;
    }
}

/// A level as a type, so that each has its own copy of the walk.
pub(crate) trait Depth {
    const LEVEL: Level;
    type Below: Depth;
}

pub(crate) struct At<const N: i8>;

macro_rules! depth {
    ($($level:literal above $below:literal),*) => {
        $(impl Depth for At<$level> {
            const LEVEL: Level = match Level::new($level) { Some(level) => level, None => Level::LAST };
            type Below = At<$below>;
        })*
    };
}
depth!(-1 above 0, 0 above 1, 1 above 2, 2 above 3, 3 above 3);

#[inline(always)]
fn wants_below<D: Depth, M: Machine, V: Visitor<M>>(visitor: &V) -> bool {
    D::LEVEL < Level::LAST
        && (visitor.wants(D::Below::LEVEL) != Wants::NOTHING
            || wants_below::<D::Below, M, V>(visitor))
}

/// How the walk of one pin ended.
enum End {
    /// This table's part is done.
    Done,
    /// A table's worth of entries was visited.
    Budget,
    Flow(Flow),
}

/// The walk during one pin.
struct Walk<'t, 'm, F: Format, M: Machine, V> {
    tree: &'t Tree<'m, F, M>,
    visitor: &'t mut V,
    /// Where the whole walk began: a table entered here is entered for the first time.
    origin: u64,
    at: u64,
    end: u64,
    budget: usize,
    /// Tables that may still be seen afterwards.
    tables: usize,
    visited: u64,
}

impl<F: Format, M: Machine, V: Visitor<M>> Walk<'_, '_, F, M, V> {
    #[inline(always)]
    fn last(&mut self, table: Table<'_, M>, index: usize, mask: usize) -> End {
        let wanted = ((self.end - self.at) >> F::PAGE_SHIFT).min((mask + 1 - index) as u64);
        let pages = wanted.min(self.budget as u64);
        if self.visitor.wants(Level::LAST).has(Wants::LEAVES) {
            let to = index + pages as usize;
            let run = Run { table, from: index, to, start: self.at, page_shift: F::PAGE_SHIFT };
            self.visited += pages;
            if let Err((at, flow)) = self.visitor.run(&run) {
                self.at = at.0.clamp(self.at, self.at + (pages << F::PAGE_SHIFT));
                return End::Flow(flow);
            }
            self.budget -= pages as usize;
        }
        self.at += pages << F::PAGE_SHIFT;
        if pages == wanted { End::Done } else { End::Budget }
    }

    #[inline(always)]
    fn table<D: Depth>(&mut self, table: Table<'_, M>, mask: usize) -> End {
        let shift = F::PAGE_SHIFT + F::INDEX_BITS * D::LEVEL.height();
        let mut index = (self.at >> shift) as usize & mask;
        if D::LEVEL == Level::LAST {
            return self.last(table, index, mask);
        }
        let wants = self.visitor.wants(D::LEVEL);
        let below = wants_below::<D, M, V>(self.visitor);
        let mut entered = false;
        loop {
            if self.budget == 0 && entered {
                return End::Budget;
            }
            entered = true;
            let here = self.at;
            let span = here & !((1 << shift) - 1);
            let end = self.end.min(span + (1 << shift));
            let mut entry = table.load(index);
            let mut is_table = F::is_table(entry, D::LEVEL);
            let visit = |entry| Visit { table, index, level: D::LEVEL, entry, start: here, end };
            let first = here == span || here == self.origin;
            let call =
                if is_table { wants.has(Wants::BEFORE) && first } else { wants.has(Wants::LEAVES) };
            if call {
                self.visited += 1;
                let visit = visit(entry);
                let flow =
                    if is_table { self.visitor.before(&visit) } else { self.visitor.leaf(&visit) };
                if flow == Flow::Skip {
                    self.budget = self.budget.saturating_sub(1);
                    self.at = end;
                    index += 1;
                    if end == self.end || index > mask {
                        return End::Done;
                    }
                    continue;
                }
                if flow != Flow::Next {
                    return End::Flow(flow);
                }
                entry = table.load(index);
                if is_table && !F::is_table(entry, D::LEVEL) {
                    // Another thread has taken the table out: what stands here now was not shown yet (rule 4).
                    continue;
                }
                is_table = F::is_table(entry, D::LEVEL);
            }
            if is_table && below {
                let child = self.tree.child(table, entry);
                match self.table::<D::Below>(child, (1 << F::INDEX_BITS) - 1) {
                    End::Done => {}
                    other => return other,
                }
            } else {
                self.budget = self.budget.saturating_sub(1);
            }
            if is_table && wants.has(Wants::AFTER) {
                self.visited += 1;
                // The part of the range may have been walked under several pins.
                let start = span.max(self.origin);
                let flow = self.visitor.after(&Visit { start, ..visit(entry) });
                if !matches!(flow, Flow::Next | Flow::Skip) {
                    self.at = here;
                    return End::Flow(flow);
                }
                self.tables = self.tables.saturating_sub(1);
                if self.tables == 0 {
                    self.budget = 0;
                }
            }
            self.at = end;
            index += 1;
            if end == self.end || index > mask {
                return End::Done;
            }
        }
    }

    fn root(&mut self, table: Table<'_, M>) -> End {
        let geometry = self.tree.geometry();
        let mask = geometry.root_entries() - 1;
        match geometry.start().number() {
            -1 => self.table::<At<-1>>(table, mask),
            0 => self.table::<At<0>>(table, mask),
            1 => self.table::<At<1>>(table, mask),
            2 => self.table::<At<2>>(table, mask),
            _ => self.table::<At<3>>(table, mask),
        }
    }
}

impl<'m, F: Format, M: Machine> Tree<'m, F, M> {
    /// Walks `range` with `visitor`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] or [`Error::Misaligned`] for a range that is not the tree's, in whole granules;
    /// otherwise what the visitor stopped with.
    pub fn walk<V: Visitor<M>>(
        &self,
        who: &Participant<'_, M>,
        range: GpaRange,
        visitor: &mut V,
    ) -> Result<(), Error> {
        self.check(range)?;
        self.walk_checked(who, range, visitor)
    }

    /// The same for a range that was checked.
    #[inline(always)]
    pub(crate) fn walk_checked<V: Visitor<M>>(
        &self,
        who: &Participant<'_, M>,
        range: GpaRange,
        visitor: &mut V,
    ) -> Result<(), Error> {
        self.check_machine(who.machine())?;
        let (origin, end) = (range.start().0, range.end().0);
        let mut at = origin;
        loop {
            let pin = who.pin();
            let budget = 1 << F::INDEX_BITS;
            let tables = V::TABLES;
            let mut walk =
                Walk { tree: self, visitor, origin, at, end, budget, tables, visited: 0 };
            let result = walk.root(self.root_table(&pin));
            at = walk.at;
            bump(&who.counters.visited, walk.visited);
            visitor.settle(&pin);
            drop(pin);
            match result {
                End::Done | End::Budget | End::Flow(Flow::Next | Flow::Skip | Flow::Pause) => {
                    if at >= end {
                        return Ok(());
                    }
                }
                End::Flow(Flow::Again) => {
                    bump(&who.counters.retries, 1);
                    self.machine.relax();
                }
                End::Flow(Flow::Stop(error)) => return Err(error),
            }
        }
    }
}
