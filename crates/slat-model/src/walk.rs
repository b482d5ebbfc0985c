//! How hardware walks the tables: from the deepest table that the CPU remembers to a leaf, updating the access flag and
//! dirty state on the way (Arm ARM DDI 0487, D8.2 "Translation process", D8.5 "Hardware updates to the translation
//! tables"; pseudocode `AArch64.S2Translate` and `AArch64.S2Walk`; Intel SDM vol. 3C, 29.3.2 and 29.3.5; AMD APM vol. 2,
//! 15.25.5 and 15.25.6).

use slat::{Gpa, Hpa, Level};

use crate::checker::{Filler, Order, Violation};
use crate::cpu::FaultKind;
use crate::descriptor::{Descriptor, Leaf, Permissions};
use crate::model::Model;
use crate::regime::{Kind, Regime};
use crate::tlb::{Tlb, Translation};

/// One walk that a CPU makes.
pub(crate) struct Walk<'a> {
    pub(crate) model: &'a Model,
    pub(crate) cpu: usize,
    pub(crate) regime: &'a Regime,
    pub(crate) tlb: &'a mut Tlb,
    /// While rules are checked, the lock that orders walks.
    pub(crate) order: Option<&'a mut Order>,
}

fn level_of(number: i8) -> Level {
    Level::new(number).unwrap_or(Level::LAST)
}

impl Walk<'_> {
    /// Translates `gpa`, below the regime's input limit, for an access that needs one permission. What is found is
    /// cached, also if the access is not permitted.
    pub(crate) fn run(
        &mut self,
        gpa: u64,
        needed: Permissions,
    ) -> Result<(i8, Translation), FaultKind> {
        self.tlb.walks += 1;
        self.tlb.granted = Permissions::default();
        if self.regime.root >> self.regime.output_bits != 0 {
            return Err(FaultKind::AddressSize { level: level_of(0) });
        }
        loop {
            if let Some(done) = self.descend(gpa, needed) {
                return done;
            }
        }
    }

    /// The deepest table for `gpa` that this CPU remembers, and its level.
    fn start(&self, gpa: u64) -> (i8, u64) {
        let space = self.tlb.space(self.regime.vmid);
        let remembered = space.and_then(|space| {
            let levels = self.regime.start..3;
            levels.rev().find_map(|level| Some((level + 1, space.pointer(level, gpa)?)))
        });
        remembered.unwrap_or((self.regime.start, self.regime.root))
    }

    /// One walk; `None` if an entry changed while hardware updated it, so that it must be walked again.
    fn descend(
        &mut self,
        gpa: u64,
        needed: Permissions,
    ) -> Option<Result<(i8, Translation), FaultKind>> {
        let (mut level, mut table) = self.start(gpa);
        let mut above = Permissions::ALL;
        loop {
            let address = Hpa(table + self.regime.entry_offset(level, gpa));
            let Some(entry) = self.model.tables.entry(address) else {
                self.model.raise(Violation::NoMemory { gpa: Gpa(gpa), hpa: address });
                return Some(Err(FaultKind::External));
            };
            if self.order.is_some() {
                self.model.check_walk(self.cpu, gpa, address);
            }
            let value = entry.read();
            if self.order.is_some() {
                self.model.check_descriptor(self.regime, value, level, address, gpa);
            }
            match self.regime.descriptor(value, level) {
                Descriptor::Invalid => {
                    return Some(Err(FaultKind::Translation { level: level_of(level) }));
                }
                _ if self.regime.kind != Kind::Arm && self.regime.reserved(value, level) != 0 => {
                    return Some(Err(FaultKind::Reserved { level: level_of(level) }));
                }
                Descriptor::Table(next) => {
                    let update = self.regime.table_updated(value);
                    if update != value && entry.update(value, update).is_err() {
                        return None;
                    }
                    above = above.only(self.regime.table_permissions(value));
                    if next >> self.regime.output_bits != 0 {
                        return Some(Err(FaultKind::AddressSize { level: level_of(level) }));
                    }
                    // A walk cache would have to remember what the tables above take away.
                    if above == Permissions::ALL {
                        self.remember(level, gpa, next);
                    }
                    table = next;
                    level += 1;
                }
                Descriptor::Leaf(mut leaf) => {
                    leaf.clean &= above.has(Permissions::WRITE);
                    leaf.permissions = leaf.permissions.only(above);
                    let update = match self.update(value, &leaf, level, needed) {
                        Ok(update) => update,
                        Err(fault) => return Some(Err(fault)),
                    };
                    if update != value && entry.update(value, update).is_err() {
                        return None;
                    }
                    return Some(self.leaf(update, above, level, gpa, needed));
                }
            }
        }
    }

    /// The leaf after hardware's updates for this access.
    fn update(
        &self,
        value: u64,
        leaf: &Leaf,
        level: i8,
        needed: Permissions,
    ) -> Result<u64, FaultKind> {
        if leaf.output >> self.regime.output_bits != 0 {
            return Err(FaultKind::AddressSize { level: level_of(level) });
        }
        let updated = self.regime.updated(value, leaf, needed);
        updated.ok_or(FaultKind::AccessFlag { level: level_of(level) })
    }

    fn leaf(
        &mut self,
        value: u64,
        above: Permissions,
        level: i8,
        gpa: u64,
        needed: Permissions,
    ) -> Result<(i8, Translation), FaultKind> {
        let Descriptor::Leaf(leaf) = self.regime.descriptor(value, level) else {
            // Updates change no bit that makes a leaf.
            return Err(FaultKind::External);
        };
        let permissions = leaf.permissions.only(above);
        let first_write = leaf.clean && above.has(Permissions::WRITE);
        self.tlb.granted =
            if first_write { permissions.and(Permissions::WRITE) } else { permissions };
        if !permissions.has(needed) && self.regime.fault_invalidates() {
            return Err(FaultKind::Permission { level: level_of(level) });
        }
        let filled = self.order.as_mut().map_or(0, |order| {
            order.fills += 1;
            order.fills
        });
        let translation = Translation {
            output: leaf.output,
            root: self.regime.root,
            filled,
            permissions,
            memory: leaf.memory,
            clean: leaf.clean,
        };
        if self.order.is_some() {
            let (cpu, regime) = (self.cpu, self.regime);
            let filler = Filler { cpu, own: self.tlb, regime };
            self.model.check_fill(filler, level, gpa, &translation);
        }
        self.tlb.fill(self.regime.vmid, level, gpa, translation);
        if permissions.has(needed) {
            Ok((level, translation))
        } else {
            Err(FaultKind::Permission { level: level_of(level) })
        }
    }

    /// Caches the pointer that was read in the entry at `level`.
    fn remember(&mut self, level: i8, gpa: u64, table: u64) {
        if self.order.is_some() {
            let (cpu, regime) = (self.cpu, self.regime);
            let filler = Filler { cpu, own: self.tlb, regime };
            self.model.check_pointer(filler, level, gpa, table);
        }
        let before = self.tlb.space_mut(self.regime.vmid).point(level, gpa, table);
        if before != Some(table) {
            self.model.checker.hold(self.model, table);
            if let Some(before) = before {
                self.model.checker.release(self.model, before);
            }
        }
    }
}
