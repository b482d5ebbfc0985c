//! What must hold when nothing is under way: no LOCKED or DEAD entry can be reached, no reserved bit is set, and every
//! CPU has cached only what the tables say.

use slat::{Gpa, Hpa};

use crate::checker::entries::is_tagged;
use crate::checker::{CachedLeaf, Until, Violation};
use crate::descriptor::Descriptor;
use crate::model::Model;
use crate::regime::{Control, Regime};
use crate::tlb::{Span, Translation};

impl Model {
    /// Checks a tree at a moment when no operation on it is under way: no LOCKED or DEAD entry is reachable, no
    /// descriptor has reserved bits set, and every translation and table pointer that a CPU has cached under the VMID
    /// is what the tables say (with no more permissions). Does nothing if the checker is off. Costs a look at every
    /// entry of every table.
    pub fn check_quiet(&self, control: impl Into<Control>) {
        let Some(_order) = self.checker.order() else { return };
        let (regime, _) = Regime::decode(control.into(), self);
        if regime.consistent {
            self.check_table(&regime, regime.root, regime.start, 0);
        }
        for cpu in 0..self.cores.len() {
            self.check_agreement(&regime, cpu);
        }
    }

    fn check_table(&self, regime: &Regime, table: u64, level: i8, start: u64) {
        let shift = regime.shift(level);
        let entries = if level == regime.start {
            1 << (regime.input_bits - shift)
        } else {
            1 << (regime.page_shift - 3)
        };
        for index in 0..entries {
            let address = Hpa(table + 8 * index);
            let gpa = start + (index << shift);
            let Some(entry) = self.tables.entry(address) else {
                return self.raise(Violation::NotATable { address });
            };
            self.check_walk(0, gpa, address);
            let value = entry.read();
            if is_tagged(value) {
                self.raise(Violation::LockedOutlived { entry: address, until: Until::Quiet });
            }
            self.check_descriptor(regime, value, level, address, gpa);
            if let Descriptor::Table(next) = regime.descriptor(value, level) {
                self.check_table(regime, next, level + 1, gpa);
            }
        }
    }

    /// The entry at `level` that a walk for `gpa` from the root finds, if it gets there.
    fn entry_at(&self, regime: &Regime, level: i8, gpa: u64) -> Option<u64> {
        let (mut table, mut at) = (regime.root, regime.start);
        loop {
            let value = self.tables.entry(Hpa(table + regime.entry_offset(at, gpa)))?.read();
            if at == level {
                return Some(value);
            }
            match regime.descriptor(value, at) {
                Descriptor::Table(next) => table = next,
                _ => return None,
            }
            at += 1;
        }
    }

    fn check_agreement(&self, regime: &Regime, cpu: usize) {
        let tlb = self.cores[cpu].tlb.lock();
        let Some(space) = tlb.space(regime.vmid) else { return };
        let wrong = space.levels().find_map(|level| {
            let size = 1 << space.shift(level);
            let leaf = space.any(level, Span::ALL, |gpa, cached| {
                let value = self.entry_at(regime, level, gpa).unwrap_or(0);
                cached.root == regime.root && !agrees(regime, value, level, cached)
            });
            let table = || {
                let (gpa, table) = space.any_pointer(level, Span::ALL, |gpa, table| {
                    let value = self.entry_at(regime, level, gpa).unwrap_or(0);
                    regime.descriptor(value, level) != Descriptor::Table(table)
                })?;
                Some((level, CachedLeaf::table(gpa, size, table)))
            };
            leaf.map(|(gpa, cached)| (level, CachedLeaf::leaf(gpa, size, &cached))).or_else(table)
        });
        let wrong = wrong.filter(|_| !self.excuses(&self.cores[cpu], regime.vmid));
        drop(tlb);
        if let Some((level, cached)) = wrong {
            let Gpa(gpa) = cached.gpa;
            let entry = self.entry_at(regime, level, gpa).unwrap_or(0);
            self.raise(Violation::Disagreement { cpu, cached, entry });
        }
    }
}

/// Whether a cached translation is what the descriptor says, with no more permissions.
fn agrees(regime: &Regime, value: u64, level: i8, cached: &Translation) -> bool {
    match regime.descriptor(value, level) {
        Descriptor::Leaf(leaf) => {
            leaf.output == cached.output
                && leaf.memory == cached.memory
                && leaf.permissions.has(cached.permissions)
        }
        _ => false,
    }
}
