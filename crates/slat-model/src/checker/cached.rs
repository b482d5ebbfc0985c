//! What may be cached at once: translations of one VMID that overlap must agree in size and address, whichever CPU
//! has them (break-before-make).

use std::sync::atomic::Ordering;

use slat::{Gpa, Hpa, Level};

use crate::checker::{CachedLeaf, Reach, Violation, freed};
use crate::descriptor::Permissions;
use crate::model::Model;
use crate::regime::{Kind, Regime};
use crate::tlb::{Space, Span, Tlb, Translation};

impl CachedLeaf {
    pub(crate) fn leaf(gpa: u64, size: u64, translation: &Translation) -> Self {
        Self {
            gpa: Gpa(gpa),
            size,
            output: Hpa(translation.output),
            table: false,
            writable: translation.permissions.has(Permissions::WRITE),
            memory: translation.memory,
        }
    }

    pub(crate) fn table(gpa: u64, size: u64, table: u64) -> Self {
        let (gpa, output) = (Gpa(gpa), Hpa(table));
        Self { gpa, size, output, table: true, writable: false, memory: Default::default() }
    }

    /// Whether both translate what they have in common to the same memory.
    fn agrees(&self, other: &Self) -> bool {
        let offset = |leaf: &Self| leaf.output.0.wrapping_sub(leaf.gpa.0);
        offset(self) == offset(other) && self.memory == other.memory
    }
}

/// Who is about to cache something.
#[derive(Clone, Copy)]
pub(crate) struct Filler<'a> {
    pub(crate) cpu: usize,
    pub(crate) own: &'a Tlb,
    pub(crate) regime: &'a Regime,
}

impl Model {
    /// Looks for something in every CPU's cache of the filler's VMID.
    fn find_cached<R>(
        &self,
        filler: Filler<'_>,
        mut look: impl FnMut(&Space) -> Option<R>,
    ) -> Option<(usize, R)> {
        self.cores.iter().enumerate().find_map(|(cpu, core)| {
            let vmid = filler.regime.vmid;
            if cpu == filler.cpu {
                return look(filler.own.space(vmid)?).map(|found| (cpu, found));
            }
            let tlb = core.tlb.lock();
            let found = look(tlb.space(vmid)?)?;
            (!self.excuses(core, vmid)).then_some((cpu, found))
        })
    }

    /// A walk has found a translation at `level` and is about to cache it.
    pub(crate) fn check_fill(
        &self,
        filler: Filler<'_>,
        level: i8,
        gpa: u64,
        translation: &Translation,
    ) {
        let size = 1 << filler.regime.shift(level);
        let found = CachedLeaf::leaf(gpa & !(size - 1), size, translation);
        let lax = filler.regime.tolerates_sizes();
        let conflict = self.find_cached(filler, |space| {
            let span = Span::new(found.gpa.0, size);
            let leaf = space.levels().find_map(|at| {
                let cached_size = 1 << space.shift(at);
                let leaf = |gpa, cached: &Translation| CachedLeaf::leaf(gpa, cached_size, cached);
                let conflicts = |gpa, cached: &Translation| {
                    (at != level && !lax) || !leaf(gpa, cached).agrees(&found)
                };
                space.any(at, span, conflicts).map(|(gpa, cached)| leaf(gpa, &cached))
            });
            let table = || {
                (level..=2).find_map(|at| {
                    let (gpa, table) = space.any_pointer(at, span, |_, _| !lax)?;
                    Some(CachedLeaf::table(gpa, 1 << space.shift(at), table))
                })
            };
            leaf.or_else(table)
        });
        self.raise_conflict(filler, conflict, found);
    }

    /// A walk has found a table pointer in an entry at `level` and is about to cache it.
    pub(crate) fn check_pointer(&self, filler: Filler<'_>, level: i8, gpa: u64, table: u64) {
        let size = 1 << filler.regime.shift(level);
        let found = CachedLeaf::table(gpa & !(size - 1), size, table);
        let lax = filler.regime.tolerates_sizes();
        let conflict = self.find_cached(filler, |space| {
            if let Some(cached) = space.pointer(level, gpa).filter(|&cached| cached != table) {
                return Some(CachedLeaf::table(found.gpa.0, size, cached));
            }
            let span = Span::new(found.gpa.0, size);
            space.levels().take_while(|&at| at <= level).find_map(|at| {
                let (gpa, cached) = space.any(at, span, |_, _| !lax)?;
                Some(CachedLeaf::leaf(gpa, 1 << space.shift(at), &cached))
            })
        });
        self.raise_conflict(filler, conflict, found);
    }

    fn raise_conflict(
        &self,
        filler: Filler<'_>,
        conflict: Option<(usize, CachedLeaf)>,
        found: CachedLeaf,
    ) {
        if let Some((holder, cached)) = conflict {
            let vmid = filler.regime.vmid;
            self.raise(Violation::BreakBeforeMake { vmid, holder, cached, found });
        }
    }

    /// A walk is about to read an entry.
    pub(crate) fn check_walk(&self, cpu: usize, gpa: u64, entry: Hpa) {
        if let Some(number) = self.tables.number(entry)
            && !freed::is_allocated(self.checker.states.of(number).load(Ordering::Acquire))
        {
            let table = self.tables.address(number);
            let by = Reach::HardwareWalk { cpu, gpa: Gpa(gpa) };
            self.raise(Violation::FreedWhileReachable { table, by });
        }
    }

    /// A walk has read a descriptor.
    pub(crate) fn check_descriptor(
        &self,
        regime: &Regime,
        value: u64,
        level: i8,
        entry: Hpa,
        gpa: u64,
    ) {
        let bits = regime.reserved(value, level);
        if bits != 0 {
            let level = Level::new(level).unwrap_or(Level::LAST);
            let gpa = Gpa(gpa);
            self.raise(Violation::ReservedBits { entry, value, bits, level, gpa });
        }
    }

    /// A CPU is about to load registers: nothing may be cached under the VMID from another root.
    pub(crate) fn check_vmid(&self, regime: &Regime) {
        // On x86 a CPU's TLB is its own: who comes to it invalidates before he enters.
        if regime.kind != Kind::Arm {
            return;
        }
        let Some(_order) = self.checker.order() else { return };
        for (cpu, core) in self.cores.iter().enumerate() {
            let tlb = core.tlb.lock();
            let Some(space) = tlb.space(regime.vmid) else { continue };
            let other = space.levels().find_map(|level| {
                space.any(level, Span::ALL, |_, translation| translation.root != regime.root)
            });
            if let Some((_, translation)) = other {
                drop(tlb);
                let (vmid, root) = (regime.vmid, Hpa(regime.root));
                let cached = Hpa(translation.root);
                return self.raise(Violation::VmidReused { vmid, root, cpu, cached });
            }
        }
    }
}
