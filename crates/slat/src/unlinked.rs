//! Unlinked trees: tables that are filled before anyone can see them, and linked with one store.

use core::fmt;

use crate::machine::Machine;
use crate::table::Table;
use crate::{Error, Format, Gpa, Hpa, Level, Reserve, Template, Tree};

impl<'m, F: Format, M: Machine> Tree<'m, F, M> {
    /// The tables that translate as `block`, a leaf at `level`, does, in leaves at `to` below it (or at the next level,
    /// if the reserve does not hold enough for more). `None`: it holds none.
    pub(crate) fn shatter(
        &self,
        reserve: &mut Reserve<'_, M>,
        block: u64,
        level: Level,
        to: Level,
    ) -> Option<Unlinked<'m, F, M>> {
        let output = self.format.output(block, level);
        let template = self.format.template_of(block, level);
        let all = reserve.len() >= self.geometry().tables_below(level, to);
        let to = if all { to } else { level.below() };
        let table = self.leaves(reserve, level, output, template, to)?;
        Some(self.unlinked(table, level, to))
    }

    /// Stores leaves at `level` for neighbouring pieces of memory from `output` on into entries `from..to` of a table
    /// that this thread owns.
    #[inline(always)]
    pub(crate) fn fill_leaves(
        &self,
        table: Table<'_, M>,
        (from, to): (usize, usize),
        level: Level,
        output: Hpa,
        template: u64,
    ) {
        let size = self.geometry().size(level);
        let nth = |n: usize| Hpa(output.0 + n as u64 * size);
        let first = self.format.leaf(level, output, template);
        let last = self.format.leaf(level, nth(to - from - 1), template);
        // Address bits stand in place but for those above 2^48 in wide formats: away from there, one addition an entry.
        if last.wrapping_sub(first) == (to - from - 1) as u64 * size {
            table.fill_steps(from, to, first, size);
        } else {
            table.fill(from, to, |index| self.format.leaf(level, nth(index - from), template));
        }
    }

    fn leaves(
        &self,
        reserve: &mut Reserve<'_, M>,
        level: Level,
        output: Hpa,
        template: u64,
        to: Level,
    ) -> Option<Hpa> {
        let base = reserve.take()?;
        let table = self.owned(base);
        let below = level.below();
        let shift = self.geometry().shift(below);
        let at = |index: usize| Hpa(output.0 + ((index as u64) << shift));
        if below >= to {
            self.fill_leaves(table, (0, self.geometry().entries()), below, output, template);
        } else {
            for index in 0..self.geometry().entries() {
                let child = self.leaves(reserve, below, at(index), template, to)?;
                table.settle(index, self.format.table(child));
            }
        }
        Some(base)
    }

    /// A table whose every entry is `invalid`: an empty or noted entry, one level down.
    pub(crate) fn repeat(&self, reserve: &mut Reserve<'_, M>, invalid: u64) -> Option<Hpa> {
        let base = reserve.take()?;
        self.owned(base).fill(0, self.geometry().entries(), |_| invalid);
        Some(base)
    }

    /// Takes an unlinked tree apart, back into the reserve.
    pub(crate) fn take_apart(&self, reserve: &mut Reserve<'_, M>, table: Hpa, level: Level) {
        let entries = self.owned(table);
        if level < Level::LAST {
            for index in 0..self.geometry().entries() {
                let entry = entries.entry(index).read();
                if F::is_table(entry, level) {
                    self.take_apart(reserve, self.format.next(entry), level.below());
                }
            }
        }
        entries.fill(0, self.geometry().entries(), |_| crate::entry::EMPTY);
        reserve.give(table);
    }

    /// Builds the tables for `output` in leaves at `to` that can take the place of one entry at `level`, without
    /// linking them: no vCPU sees them, nothing is published or invalidated.
    ///
    /// # Errors
    /// [`Error::Misaligned`] if `output` is not a multiple of the entry's size; [`Error::OutputTooLarge`];
    /// [`Error::Level`] unless `to` lies below `level` and can have leaves; [`Error::NeedTables`].
    pub fn build_unlinked(
        &self,
        reserve: &mut Reserve<'_, M>,
        level: Level,
        output: Hpa,
        template: Template,
        to: Level,
    ) -> Result<Unlinked<'m, F, M>, Error> {
        self.check_machine(reserve.machine())?;
        if to <= level || !self.format.leaf_allowed(to) {
            return Err(Error::Level(to));
        }
        if level < self.geometry().start() {
            return Err(Error::Level(level));
        }
        self.check_template(template)?;
        self.check_output(output, self.geometry().size(level), level)?;
        let tables = self.geometry().tables_below(level, to);
        let table = (reserve.len() >= tables)
            .then(|| self.leaves(reserve, level, output, template.0, to))
            .flatten()
            .ok_or(Error::NeedTables { at: Gpa(0), tables })?;
        Ok(self.unlinked(table, level, to))
    }

    fn unlinked(&self, table: Hpa, block: Level, to: Level) -> Unlinked<'m, F, M> {
        Unlinked { machine: self.machine, table, level: block.below(), to, format: self.format }
    }

    /// Takes an unlinked tree apart, back into a reserve of the machine that it came from.
    ///
    /// # Errors
    /// [`Error::OtherMachine`] with the tree itself.
    pub fn dismantle(
        &self,
        reserve: &mut Reserve<'_, M>,
        unlinked: Unlinked<'m, F, M>,
    ) -> Result<(), (Error, Unlinked<'m, F, M>)> {
        let of = self.check_machine(unlinked.machine).and(self.check_machine(reserve.machine()));
        if let Err(error) = of {
            return Err((error, unlinked));
        }
        self.take_apart(reserve, unlinked.table, unlinked.level);
        Ok(())
    }
}

/// Tables that nobody else knows. Link them with [`Tree::link`] or give them back with [`Tree::dismantle`]; dropped,
/// their memory is lost.
#[must_use = "link it or dismantle it: its tables are lost otherwise"]
pub struct Unlinked<'m, F, M> {
    pub(crate) machine: &'m M,
    pub(crate) format: F,
    pub(crate) table: Hpa,
    pub(crate) level: Level,
    pub(crate) to: Level,
}

impl<F, M> fmt::Debug for Unlinked<'_, F, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Unlinked").field("table", &self.table).field("level", &self.level).finish()
    }
}

impl<F, M> Unlinked<'_, F, M> {
    /// The level of its topmost entries.
    pub fn level(&self) -> Level {
        self.level
    }
}
