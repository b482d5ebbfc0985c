//! Mapping a range in one call: tables are filled before they are linked.

use crate::entry::LOCK_BIT;
use crate::machine::Machine;
use crate::rcu::bump;
use crate::walk::{Flow, Run, Visit, Visitor, Wants};
use crate::{
    Error, Format, Gpa, GpaRange, Hpa, Leaf, Level, Owner, Participant, Reserve, Template, Tree,
};

struct Mapper<'t, 'm, F: Format, M: Machine> {
    tree: &'t Tree<'m, F, M>,
    who: &'t Participant<'t, M>,
    reserve: &'t mut Reserve<'m, M>,
    /// Host-physical minus guest-physical address, the same over the whole range.
    offset: u64,
    template: u64,
    largest: Level,
    changed: u64,
}

impl<F: Format, M: Machine> Mapper<'_, '_, F, M> {
    #[inline(always)]
    fn output(&self, gpa: u64) -> Hpa {
        Hpa(gpa.wrapping_add(self.offset))
    }

    #[inline(always)]
    fn leaf_fits(&self, level: Level, start: u64, end: u64) -> bool {
        let size = self.tree.geometry().size(level);
        level >= self.largest
            && self.tree.format.leaf_allowed(level)
            && end - start == size
            && self.output(start).0 & (size - 1) == 0
    }

    /// Links a table where nothing is, filled as far as its own leaves go.
    fn link(&mut self, visit: &Visit<'_, M>) -> Flow {
        let geometry = *self.tree.geometry();
        let below = visit.level.below();
        let Some(base) = self.reserve.take() else {
            let size = geometry.page_size();
            let span = visit.end - visit.start;
            let tables = GpaRange::new(Gpa(visit.start), span.max(size))
                .map_or(1, |part| self.tree.tables_needed(part, self.largest_below(visit)));
            return Flow::Stop(Error::NeedTables { at: Gpa(visit.start), tables });
        };
        let size = geometry.size(below);
        let table = self.tree.owned(base);
        let first = (visit.start >> geometry.shift(below)) as usize & (geometry.entries() - 1);
        let count = ((visit.end - visit.start) / size) as usize;
        let filled = visit.start & (size - 1) == 0
            && count as u64 * size == visit.end - visit.start
            && self.leaf_fits(below, visit.start, visit.start + size);
        if !filled || count < geometry.entries() {
            self.tree.blank(base, 1);
        }
        if filled {
            let output = self.output(visit.start);
            self.tree.fill_leaves(table, (first, first + count), below, output, self.template);
        }
        let linked = visit.table.exchange(visit.index, F::EMPTY, self.tree.format.table(base));
        if linked.is_err() {
            self.tree.take_apart(self.reserve, base, Level::LAST);
            return Flow::Again;
        }
        bump(&self.who.counters.linked, 1);
        self.changed += if filled { count as u64 } else { 0 };
        // An empty table can leave the tree (trim) before a walk gets into it: look again what stands here.
        if filled { Flow::Skip } else { Flow::Pause }
    }

    /// The level that the leaves below an entry will have.
    fn largest_below(&self, visit: &Visit<'_, M>) -> Level {
        let mut level = self.largest.max(visit.level.below());
        while level < Level::LAST
            && !(self.tree.format.leaf_allowed(level)
                && (self.offset & (self.tree.geometry().size(level) - 1)) == 0)
        {
            level = level.below();
        }
        level
    }

    fn over_leaf(&mut self, visit: &Visit<'_, M>, fits: bool) -> Flow {
        let (gpa, old, level) = (Gpa(visit.start), visit.entry, visit.level);
        let inside = visit.start & (self.tree.geometry().size(level) - 1);
        let same = self.tree.format.output(old, level).0 + inside == self.output(visit.start).0;
        if same && F::relaxed(old, self.template) == old {
            return Flow::Next;
        }
        if !fits {
            let Visit { table, index, .. } = *visit;
            let counters = &self.who.counters;
            let (entry, to) = ((index, old, level), level.below());
            return match self.tree.split_entry(self.reserve, counters, table, entry, gpa, to) {
                // The pages can be a block again (collapse) before a walk gets to them: look again.
                Ok(_) => Flow::Pause,
                Err(Error::Retry) => Flow::Again,
                Err(error) => Flow::Stop(error),
            };
        }
        let leaf =
            Leaf { gpa, level, output: self.output(gpa.0), template: Template(self.template) };
        match self.tree.install(&self.who.pin(), self.reserve, &leaf) {
            Ok(_) => {
                self.changed += 1;
                Flow::Next
            }
            Err(Error::Retry) => Flow::Again,
            Err(error) => Flow::Stop(error),
        }
    }
}

impl<F: Format, M: Machine> Visitor<M> for Mapper<'_, '_, F, M> {
    #[inline(always)]
    fn wants(&self, _: Level) -> Wants {
        Wants::LEAVES
    }

    fn leaf(&mut self, visit: &Visit<'_, M>) -> Flow {
        let old = visit.entry;
        let fits = self.leaf_fits(visit.level, visit.start, visit.end);
        if old == F::EMPTY {
            if !fits {
                return self.link(visit);
            }
            let leaf = self.tree.format.leaf(visit.level, self.output(visit.start), self.template);
            if visit.table.exchange(visit.index, F::EMPTY, leaf).is_err() {
                return Flow::Again;
            }
            self.changed += 1;
            return Flow::Next;
        }
        if old & LOCK_BIT != 0 {
            return Flow::Again;
        }
        if F::is_table(old, visit.level) {
            return Flow::Next;
        }
        match Owner::of(old) {
            Some(owner) if !F::is_valid(old) => {
                Flow::Stop(Error::Owned { at: Gpa(visit.start), owner })
            }
            _ => self.over_leaf(visit, fits),
        }
    }

    #[inline]
    fn run(&mut self, run: &Run<'_, M>) -> Result<(), (Gpa, Flow)> {
        let mut index = run.from;
        while index < run.to {
            if self.tree.pairs
                && index.is_multiple_of(2)
                && index + 1 < run.to
                && run.table.load(index) | run.table.load(index + 1) == F::EMPTY
            {
                let leaf = |index| {
                    let output = self.output(run.address(index));
                    self.tree.format.leaf(Level::LAST, output, self.template)
                };
                let new = [leaf(index), leaf(index + 1)];
                if run.table.exchange_pair(index, [F::EMPTY; 2], new) {
                    self.changed += 2;
                    index += 2;
                    continue;
                }
            }
            let visit = run.visit(index);
            match self.leaf(&visit) {
                Flow::Next | Flow::Skip => index += 1,
                flow => return Err((visit.gpa(), flow)),
            }
        }
        Ok(())
    }
}

impl<'m, F: Format, M: Machine> Tree<'m, F, M> {
    /// Maps `range` to the host-physical memory from `output` on, in the largest leaves that alignment and what is there
    /// allow, none above level `largest`. Returns how many leaves were installed or changed.
    ///
    /// Where nothing is, tables are filled before they are linked: a store a page. A leaf that is there with the same
    /// output address gets the permissions added, one with another is replaced, a larger one in the way is split;
    /// existing tables stay ([`collapse`](Self::collapse) is for them). One publish at the end.
    ///
    /// # Errors
    /// [`Error::NeedTables`]: everything before `at` is mapped; top up and call again for the rest (with the output
    /// advanced as much). [`Error::Owned`]: somebody else's frame, everything before is mapped.
    /// [`Error::OutOfRange`], [`Error::Misaligned`], [`Error::OutputTooLarge`], [`Error::Level`]: nothing was mapped.
    pub fn map(
        &self,
        who: &Participant<'_, M>,
        reserve: &mut Reserve<'m, M>,
        range: GpaRange,
        output: Hpa,
        template: Template,
        largest: Level,
    ) -> Result<u64, Error> {
        if !self.format.leaf_allowed(largest) {
            return Err(Error::Level(largest));
        }
        self.check_machine(reserve.machine())?;
        self.check_template(template)?;
        self.check(range)?;
        self.check_output(output, range.size(), Level::LAST)?;
        let offset = output.0.wrapping_sub(range.start().0);
        let template = template.0;
        let mut mapper = Mapper { tree: self, who, reserve, offset, template, largest, changed: 0 };
        let result = self.walk_checked(who, range, &mut mapper);
        let changed = mapper.changed;
        bump(&who.counters.exchanged, changed);
        self.publish(&who.counters);
        result.map(|()| changed)
    }

    /// How many tables at most an operation can need that maps or splits `range` down to leaves at `to`: one for each
    /// entry above `to` that the range touches, but for those of the root.
    pub fn tables_needed(&self, range: GpaRange, to: Level) -> usize {
        let geometry = self.geometry();
        let mut tables = 0;
        let mut level = geometry.start();
        while level < to {
            let shift = geometry.shift(level);
            tables += (((range.end().0 - 1) >> shift) - (range.start().0 >> shift) + 1) as usize;
            level = level.below();
        }
        tables
    }
}
