//! The memory that the trees themselves take: how much it is, and giving back what is empty.

use slat::walk::{Flow, Visit, Visitor, Wants};
use slat::{Format, GpaRange, Level, Machine};

use crate::{Host, InvalidateError, Vm, Worker};

/// How many tables an address space has.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Tables {
    /// Linked tables by the level of their entries, from level -1 to level 3; the root counts as the tables it is
    /// concatenated of.
    pub linked: [u64; 5],
    /// Tables that have left the tree and wait to be freed, without what was still linked below them.
    pub waiting: u64,
}

impl Tables {
    /// The linked tables whose entries are at this level.
    pub fn linked_at(&self, level: Level) -> u64 {
        self.linked[place(level)]
    }

    /// All of them.
    pub fn total(&self) -> u64 {
        self.linked.iter().sum::<u64>() + self.waiting
    }
}

fn place(level: Level) -> usize {
    (level.number() + 1) as usize % 5
}

struct Count(Tables);

impl<M: Machine> Visitor<M> for Count {
    #[inline(always)]
    fn wants(&self, level: Level) -> Wants {
        if level < Level::LAST { Wants::BEFORE } else { Wants::NOTHING }
    }

    fn before(&mut self, visit: &Visit<'_, M>) -> Flow {
        self.0.linked[place(visit.level()) + 1] += 1;
        Flow::Next
    }
}

impl<'m, F: Format, M: Machine, H: Host> Vm<'m, F, M, H> {
    /// The tables of address space `space`, counted by a walk that stops nobody: what is linked or leaves meanwhile may
    /// be counted or not. Costs a load for each entry above the last level.
    ///
    /// # Errors
    /// [`InvalidateError::OtherMachine`], [`InvalidateError::NoSpace`].
    pub fn tables(&self, worker: &Worker<'m, M>, space: u16) -> Result<Tables, InvalidateError> {
        self.admit(worker.hands.participant.machine())?;
        if self.tree_of(space).is_none() {
            return Err(InvalidateError::NoSpace { spaces: self.options.address_spaces });
        }
        let mut tables = Tables::default();
        for tree in self.trees(space) {
            let geometry = tree.geometry();
            let mut count = Count(Tables::default());
            if let Some(all) = GpaRange::new(slat::Gpa(0), geometry.limit().0) {
                tree.walk(&worker.hands.participant, all, &mut count)
                    .map_err(InvalidateError::Tree)?;
            }
            tables = count.0;
            tables.linked[place(geometry.start())] += geometry.root_tables() as u64;
            tables.waiting = tree.waiting() as u64;
        }
        Ok(tables)
    }

    /// Gives back every empty table that lies wholly inside `range`, in every address space, and frees what waits to be
    /// freed: for when the host needs memory. Returns how many tables left the trees. Nothing that is mapped goes. Costs
    /// a walk that reads every entry, and grace periods.
    ///
    /// # Errors
    /// [`InvalidateError::OtherMachine`], [`InvalidateError::Tree`].
    pub fn trim(
        &self,
        worker: &mut Worker<'m, M>,
        range: GpaRange,
    ) -> Result<u64, InvalidateError> {
        self.admit(worker.hands.participant.machine())?;
        let Some(range) = self.whole_pages(range) else { return Ok(0) };
        let mut trimmed = 0;
        for tree in self.all_trees() {
            let who = &mut worker.hands.participant;
            trimmed += tree.trim(who, range).map_err(InvalidateError::Tree)?;
            tree.reclaim(who);
        }
        Ok(trimmed)
    }
}
