//! Destroying a tree in steps, for machines that must not be busy for long.

use crate::entry::EMPTY;
use crate::machine::Machine;
use crate::{Format, Hpa, Level, Tree};

/// A tree that nobody uses any more, being freed. Dropped, it frees the rest at once.
#[derive(Debug)]
pub struct Destroy<'m, F: Format, M: Machine> {
    tree: Tree<'m, F, M>,
    /// For each level from -1, the first entry of the table at hand that may still point to a table.
    next: [usize; 5],
}

impl<'m, F: Format, M: Machine> Tree<'m, F, M> {
    /// Invalidates everything the tree ever translated and begins to free its tables. Taking the tree proves that
    /// nobody walks it; the caller sees to it that no vCPU runs on it.
    pub fn destroy(self) -> Destroy<'m, F, M> {
        self.invalidate_all();
        Destroy { tree: self, next: [0; 5] }
    }
}

impl<F: Format, M: Machine> Destroy<'_, F, M> {
    /// Frees up to `tables` tables, at least one. `true`: there may be more.
    pub fn step(&mut self, tables: usize) -> bool {
        (0..tables.max(1)).all(|_| self.free_one())
    }

    /// Frees the first table that has no table below. `false`: there is none.
    fn free_one(&mut self) -> bool {
        let start = self.tree.geometry().start();
        let mut parent: Option<(Hpa, usize, Level)> = None;
        let (mut table, mut level) = (self.tree.root(), start);
        while let Some((index, child)) = self.first_table(table, level) {
            parent = Some((table, index, level));
            (table, level) = (child, level.below());
        }
        let Some((above, index, level)) = parent else { return false };
        self.tree.owned(above).settle(index, EMPTY);
        self.next[(level.below().number() + 1) as usize] = 0;
        Tree::<F, M>::free_tables(self.tree.machine, table, 1);
        true
    }

    fn first_table(&mut self, table: Hpa, level: Level) -> Option<(usize, Hpa)> {
        let geometry = self.tree.geometry();
        let root = level == geometry.start();
        let entries = if root { geometry.root_entries() } else { geometry.entries() };
        let next = &mut self.next[(level.number() + 1) as usize];
        while level < Level::LAST && *next < entries {
            let entry = self.tree.owned(table).entry(*next).read();
            if F::is_table(entry, level) {
                return Some((*next, self.tree.format.next(entry)));
            }
            *next += 1;
        }
        None
    }
}
