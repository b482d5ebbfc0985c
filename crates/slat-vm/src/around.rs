//! Fault-around: the pages round the one of a fault are mapped with it, as far as the host has them.

use core::ops::Range;

use slat::{Format, Gpa, GpaRange, Hpa, Level, Lookup, Machine, Template};

use crate::fault::{Plan, current};
use crate::hands::Hands;
use crate::leaf::Wanted;
use crate::progress::Touch;
use crate::template::LeafKind;
use crate::{Access, Fault, Host, HvaRange, Vm};

/// Pages that are mapped in one pin.
const AT_ONCE: u64 = 64;

/// What to map at each page of a stretch; `None` where something is mapped already, or beyond where the host ends.
type Leaves = [Option<(Hpa, Template)>; AT_ONCE as usize];

impl<'m, M: Machine> Hands<'m, M> {
    /// After a page was mapped for a fault, maps the others of its window, in both directions up to the first that the
    /// host does not have. What is mapped already stays as it is, and what cannot be mapped now is left to its own
    /// fault. The window lies in one table, which is there.
    pub(crate) fn map_around<F: Format, H: Host>(
        &mut self,
        vm: &Vm<'m, F, M, H>,
        fault: &Fault,
        plan: &Plan,
    ) {
        // Under a log a write is one page's business, and a block has no neighbours.
        let write = fault.access == Access::Write;
        if plan.wanted.level != Level::LAST || write && plan.facts.protects() {
            return;
        }
        let (gpa, slot) = (plan.wanted.gpa.0, plan.facts.range);
        let pages = self.adapt(vm, gpa);
        let window = u64::from(pages) << F::PAGE_SHIFT;
        // Pages that are private, or shared, like this one.
        let window = window.min(plan.facts.uniform);
        let start = (gpa & !(window - 1)).max(slot.start().0);
        let end = (gpa | (window - 1)).saturating_add(1).min(slot.end().0);
        self.map_stretches(vm, plan, gpa + (1 << F::PAGE_SHIFT)..end, false);
        self.map_stretches(vm, plan, start..gpa, true);
        self.window.keep();
    }

    /// Where the window adapts, if it does.
    fn adaptive<F: Format, H: Host>(vm: &Vm<'m, F, M, H>) -> Option<u32> {
        vm.options.adaptive_around.filter(|_| vm.tree().format().sets_accessed())
    }

    pub(crate) fn window_pages<F: Format, H: Host>(&self, vm: &Vm<'m, F, M, H>) -> u32 {
        self.window.pages(vm.options.fault_around, Self::adaptive(vm))
    }

    /// How many pages the window of a fault at `gpa` has.
    fn adapt<F: Format, H: Host>(&mut self, vm: &Vm<'m, F, M, H>, gpa: u64) -> u32 {
        if let Some(most) = Self::adaptive(vm) {
            let Self { window, participant, space, .. } = self;
            let (trees, sizes) = (vm.trees(*space), (vm.options.fault_around, most));
            window.turn(trees, *space, &participant.pin(), gpa >> F::PAGE_SHIFT, sizes);
        }
        self.window_pages(vm)
    }

    fn map_stretches<F: Format, H: Host>(
        &mut self,
        vm: &Vm<'m, F, M, H>,
        plan: &Plan,
        mut rest: Range<u64>,
        downwards: bool,
    ) {
        while rest.start < rest.end {
            let span = (rest.end - rest.start).min(AT_ONCE << F::PAGE_SHIFT);
            let start = if downwards { rest.end - span } else { rest.start };
            let Some(range) = GpaRange::new(Gpa(start), span) else { return };
            let (leaves, whole) = self.present(vm, plan, range, downwards);
            if !self.fill(vm, plan, range, &leaves) || !whole {
                return;
            }
            rest = if downwards { rest.start..start } else { start + span..rest.end };
        }
    }

    /// What the host has of a stretch, from the side of the fault on, without what is mapped already; and whether it has all
    /// of it. Where it has nothing, no table is looked at.
    fn present<F: Format, H: Host>(
        &self,
        vm: &Vm<'m, F, M, H>,
        plan: &Plan,
        range: GpaRange,
        downwards: bool,
    ) -> (Leaves, bool) {
        let count = range.size() >> F::PAGE_SHIFT;
        let mut pages = [None; AT_ONCE as usize];
        let mut found = 0;
        for n in 0..count {
            let place = if downwards { count - 1 - n } else { n };
            let gpa = Gpa(range.start().0 + (place << F::PAGE_SHIFT));
            let page = vm.host.present(plan.facts.hva_of(gpa)).filter(|page| !page.device);
            let wanted = page.and_then(|page| {
                Some((Wanted::new(vm.tree().format(), &plan.facts, gpa, &page)?, page.writable))
            });
            if wanted.is_none() {
                break;
            }
            pages[place as usize] = wanted;
            found += 1;
        }
        let mut leaves = [None; AT_ONCE as usize];
        if found > 0 {
            let mapped = self.mapped(vm, range);
            for (place, page) in pages.into_iter().enumerate() {
                let Some((wanted, writable)) = page.filter(|_| mapped >> place & 1 == 0) else {
                    continue;
                };
                leaves[place] = Some((wanted.output, self.leaf_ahead(vm, plan, &wanted, writable)));
            }
        }
        (leaves, found == count)
    }

    /// Which pages of a stretch are mapped, a bit each.
    fn mapped<F: Format, H: Host>(&self, vm: &Vm<'m, F, M, H>, range: GpaRange) -> u64 {
        let Some(tree) = vm.trees(self.space).first() else { return 0 };
        let pin = self.participant.pin();
        let is_mapped = |page: u64| {
            let found = tree.look_up(&pin, Gpa(range.start().0 + (page << F::PAGE_SHIFT)));
            !matches!(found, Ok(Lookup::Empty { .. }))
        };
        let pages = range.size() >> F::PAGE_SHIFT;
        (0..pages).fold(0, |mask, page| mask | u64::from(is_mapped(page)) << page)
    }

    /// What a page permits that is mapped ahead; its caches are maintained.
    fn leaf_ahead<F: Format, H: Host>(
        &self,
        vm: &Vm<'m, F, M, H>,
        plan: &Plan,
        wanted: &Wanted,
        writable: bool,
    ) -> Template {
        if !vm.options.coherent_data {
            vm.machine().clean_data(wanted.output, 1 << F::PAGE_SHIFT);
        }
        let host_writable = writable && !plan.facts.read_only;
        vm.template(LeafKind {
            device: false,
            write: host_writable && !plan.facts.protects(),
            host_writable,
            execute: vm.options.coherent_instructions,
            old: vm.tree().format().sets_accessed(),
        })
    }

    /// One pin for a stretch. Whether there may be more.
    fn fill<F: Format, H: Host>(
        &mut self,
        vm: &Vm<'m, F, M, H>,
        plan: &Plan,
        range: GpaRange,
        leaves: &Leaves,
    ) -> bool {
        let pages = self.window_pages(vm);
        let Self { participant, space, hit, statistics, window, .. } = self;
        let pin = participant.pin();
        // Rules 10 and 7, as for the page of the fault.
        if current(vm, &pin, *space, plan, hit).is_none() {
            return false;
        }
        let touch = || {
            let host = HvaRange::new(plan.facts.hva_of(range.start()), range.size())?;
            Some(Touch { guest: range, host })
        };
        if !vm.progress.untouched(&pin, plan.sample, touch) {
            return false;
        }
        let filled = vm.trees(*space).first().map(|tree| tree.fill(&pin, range.start(), leaves));
        match filled {
            Some(Ok(pages)) => statistics.ahead += pages,
            _ => return false,
        }
        drop(pin);
        let size = 1 << F::PAGE_SHIFT;
        for (gpa, leaf) in (range.start().0..).step_by(size as usize).zip(leaves) {
            let Some((_, template)) = *leaf else { continue };
            window.guessed(gpa, F::PAGE_SHIFT, pages);
            let hva = plan.facts.hva_of(Gpa(gpa));
            vm.host.accessed(hva, size);
            if vm.tree().attributes(template).write {
                vm.host.dirtied(hva, size);
            }
        }
        true
    }
}
