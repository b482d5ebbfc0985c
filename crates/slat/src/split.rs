//! Splitting: a block becomes a table of smaller leaves that translate the same.

use crate::entry::LOCK_BIT;
use crate::machine::Machine;
use crate::maintenance::{Invalidation, Maintenance};
use crate::rcu::{Counters, bump};
use crate::sync::Ordering;
use crate::table::Table;
use crate::walk::{Flow, Visit, Visitor, Wants};
use crate::{Error, Format, Gpa, GpaRange, Level, Participant, Pin, Reserve, Tree, Unlinked};

struct Splitter<'t, 'm, F: Format, M: Machine> {
    tree: &'t Tree<'m, F, M>,
    reserve: &'t mut Reserve<'m, M>,
    counters: &'t Counters,
    to: Level,
    split: u64,
}

impl<F: Format, M: Machine> Visitor<M> for Splitter<'_, '_, F, M> {
    #[inline(always)]
    fn wants(&self, level: Level) -> Wants {
        if level < self.to { Wants::LEAVES } else { Wants::NOTHING }
    }

    #[inline]
    fn leaf(&mut self, visit: &Visit<'_, M>) -> Flow {
        if !F::is_valid(visit.entry) || F::is_table(visit.entry, visit.level) {
            // LOCKED too: who holds it brings it to a state of its own; splitting promises nothing for entries that
            // others are replacing (it is done to spare faults, rule 4 does not name it).
            return Flow::Next;
        }
        let Visit { table, index, level, entry, .. } = *visit;
        match self.tree.split_entry(
            self.reserve,
            self.counters,
            table,
            (index, entry, level),
            Gpa(visit.start),
            self.to,
        ) {
            Ok(reached) => {
                self.split += 1;
                if reached >= self.to { Flow::Skip } else { Flow::Next }
            }
            Err(Error::Retry) => Flow::Again,
            Err(error) => Flow::Stop(error),
        }
    }
}

impl<'m, F: Format, M: Machine> Tree<'m, F, M> {
    /// Splits every block that `range` touches into leaves at `to`. No translation and no permission changes. Returns
    /// how many blocks were split.
    ///
    /// Uses as much of the reserve as it finds: with enough for a whole subtree a block is split down to `to` at once,
    /// with less one level at a time. Costs a table fill a block, one publish, and one invalidation a block (x86: none). What is
    /// split already costs a look at each entry above `to`.
    ///
    /// # Errors
    /// [`Error::NeedTables`] where the reserve ran out: top up and call again from there. [`Error::OutOfRange`],
    /// [`Error::Misaligned`]; [`Error::Level`] if no leaf can stand at `to`.
    pub fn split(
        &self,
        who: &Participant<'_, M>,
        reserve: &mut Reserve<'m, M>,
        range: GpaRange,
        to: Level,
    ) -> Result<u64, Error> {
        if !self.format.leaf_allowed(to) {
            return Err(Error::Level(to));
        }
        self.check_machine(reserve.machine())?;
        self.check(range)?;
        let counters = &who.counters;
        let mut splitter = Splitter { tree: self, reserve, counters, to, split: 0 };
        let result = self.walk_checked(who, range, &mut splitter);
        let split = splitter.split;
        if split > 0 {
            self.publish(counters);
        }
        result.map(|()| split)
    }

    /// Splits the leaf `entry` at `level`, read from `table[index]`, towards `to`. Returns the level of the new leaves.
    ///
    /// # Errors
    /// `Retry` if the entry changed meanwhile (hardware may have set a bit), `NeedTables`.
    pub(crate) fn split_entry(
        &self,
        reserve: &mut Reserve<'_, M>,
        counters: &Counters,
        table: Table<'_, M>,
        (index, entry, level): (usize, u64, Level),
        at: Gpa,
        to: Level,
    ) -> Result<Level, Error> {
        let Some(new) = self.shatter(reserve, entry, level, to) else {
            return Err(Error::NeedTables { at, tables: self.geometry().tables_below(level, to) });
        };
        if F::Maintenance::RESIZES || self.machine.features().bbm_level >= 2 {
            return self.resize(reserve, counters, table, (index, entry, level), at, new);
        }
        // Rule 3: the block and the table translate the same range in different sizes.
        if table.exchange(index, entry, F::LOCKED).is_err() {
            self.take_apart(reserve, new.table, new.level);
            return Err(Error::Retry);
        }
        self.invalidate(counters, self.leaf_at(at, level));
        table.settle(index, self.format.table(new.table));
        self.note_split(counters, level, new.to);
        Ok(new.to)
    }

    /// The split of [`split_entry`](Self::split_entry) on a CPU that tolerates a change of size (x86; FEAT_BBM level 2): one
    /// exchange, so that no vCPU meets LOCKED, and an invalidation after it. Where every invalidation is of the whole tree
    /// there is none: the block says what its pages say, and goes with the first of them that changes.
    fn resize(
        &self,
        reserve: &mut Reserve<'_, M>,
        counters: &Counters,
        table: Table<'_, M>,
        (index, entry, level): (usize, u64, Level),
        at: Gpa,
        new: Unlinked<'m, F, M>,
    ) -> Result<Level, Error> {
        // The exchange releases this: whoever finds the table, and invalidates entries in it, drops its level hint.
        self.resizing.fetch_add(1, Ordering::Relaxed);
        let linked = table.exchange(index, entry, self.format.table(new.table)).is_ok();
        if linked {
            if !F::Maintenance::RESIZES {
                self.invalidate_level(counters, self.leaf_at(at, level));
            }
            self.note_split(counters, level, new.to);
        } else {
            self.take_apart(reserve, new.table, new.level);
        }
        // Release: the blocks are gone from every TLB before hints are used again.
        self.resizing.fetch_sub(1, Ordering::Release);
        if linked { Ok(new.to) } else { Err(Error::Retry) }
    }

    fn note_split(&self, counters: &Counters, level: Level, to: Level) {
        bump(&counters.splits, 1);
        bump(&counters.exchanged, 1);
        bump(&counters.linked, self.geometry().tables_below(level, to) as u64);
    }

    /// What a leaf at `level` that covers `at` can have put into a TLB.
    pub(crate) fn leaf_at(&self, at: Gpa, level: Level) -> Invalidation {
        Invalidation { level: Some(level), ..self.table_at(at, level) }
    }

    /// What a table below an entry at `level` that covers `at` can have put into a TLB: the aligned range, at any level.
    pub(crate) fn table_at(&self, at: Gpa, level: Level) -> Invalidation {
        let size = self.geometry().size(level);
        Invalidation { range: GpaRange::new(Gpa(at.0 & !(size - 1)), size), level: None }
    }

    /// Puts an unlinked tree in the place of the empty entry that covers `at` at the level above it.
    ///
    /// # Errors
    /// With the tree itself, so that nothing is lost: [`Error::OutOfRange`]; [`Error::Misaligned`] if `at` is not
    /// where such an entry begins; [`Error::Occupied`]; [`Error::NoTable`] if the tree ends above it; [`Error::Retry`];
    /// [`Error::OtherMachine`], [`Error::OtherFormat`].
    pub fn link(
        &self,
        pin: &Pin<'_, M>,
        at: Gpa,
        unlinked: Unlinked<'m, F, M>,
    ) -> Result<(), (Error, Unlinked<'m, F, M>)> {
        let Some(level) = Level::new(unlinked.level.number() - 1) else {
            return Err((Error::Level(unlinked.level), unlinked));
        };
        if unlinked.format != self.format {
            return Err((Error::OtherFormat, unlinked));
        }
        let checked = self.check_machine(pin.machine()).and(self.check_machine(unlinked.machine));
        if let Err(error) = checked.and(self.check_address(at, self.geometry().size(level))) {
            return Err((error, unlinked));
        }
        let place = self.descend(pin, at, level);
        let new = self.format.table(unlinked.table);
        let refused = if place.entry & LOCK_BIT != 0 {
            Some(Error::Retry)
        } else if place.entry != F::EMPTY {
            Some(Error::Occupied { at })
        } else if place.level != level {
            Some(Error::NoTable { level: place.level })
        } else {
            place.table.exchange(place.index, F::EMPTY, new).err().map(|_| Error::Retry)
        };
        if let Some(error) = refused {
            return Err((error, unlinked));
        }
        let tables = self.geometry().tables_below(level, unlinked.to);
        bump(&pin.counters().linked, tables as u64);
        self.publish(pin.counters());
        Ok(())
    }
}
