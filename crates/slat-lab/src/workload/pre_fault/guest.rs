//! What a vCPU does: it maps parts of memory ahead and compares how far each call came, and reads everything.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use slat::{Gpa, GpaRange};
use slat_vm::{PreFault, PreFaultError};

use crate::arch::Tables;
use crate::crew::{Guest, RunOn};
use crate::guest::{GuestMemory, Watch};
use crate::model::{Broken, ModelVcpu};

/// What to map ahead, and what must be left of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    pub(super) gpa: u64,
    pub(super) size: u64,
    /// Bytes at the end that no slot has.
    pub(super) left: u64,
}

/// What a vCPU is told.
#[derive(Clone, Copy, Debug)]
pub(super) enum Order {
    /// Map this ahead, in as few calls as it takes.
    Map(Step),
    /// The same, interrupted after each leaf.
    MapInterrupted(Step),
    /// Try what cannot be mapped: a range that is no whole pages.
    Misaligned(Step),
    /// Read so many pages, from the beginning.
    Read,
}

/// What was found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Seen {
    pub(super) calls: u64,
    /// Calls that neither came further nor said why, or whose rest does not follow what was done.
    pub(super) unclear: u64,
    /// Ranges of which another part was left than no slot has.
    pub(super) wrong_rest: u64,
    /// Ranges that ended with another error than that there is no slot, or without it.
    pub(super) wrong_error: u64,
    pub(super) wrong_loads: u64,
}

/// One vCPU.
#[derive(Debug)]
pub(super) struct Reader {
    /// Where memory begins, and bytes and number of its pages.
    gpa: u64,
    page: u64,
    pages: u64,
    /// Whether the slot is there for good: what a call says now is final.
    settled: Arc<AtomicBool>,
    pub(super) seen: Seen,
}

/// What the host puts into each page.
pub(super) fn content(index: u64) -> u64 {
    index << 16 | 0xf0
}

impl Reader {
    pub(super) fn new((gpa, page, pages): (u64, u64, u64), settled: Arc<AtomicBool>) -> Self {
        Self { gpa, page, pages, settled, seen: Seen::default() }
    }

    /// Calls again and again with the rest, until nothing is left or the first page of it cannot be mapped.
    fn map<T: Tables>(
        &mut self,
        vcpu: &mut ModelVcpu<'_, '_, T>,
        step: Step,
        interrupt: bool,
        watch: Watch<'_>,
    ) {
        let mut rest = GpaRange::new(Gpa(step.gpa), step.size);
        let mut error = None;
        while let Some(range) = rest {
            let settled = self.settled.load(Ordering::Acquire);
            let made = vcpu.pre_fault(range, || !interrupt);
            watch.beat();
            self.seen.calls += 1;
            self.seen.unclear += u64::from(!is_clear(range, &made));
            rest = made.rest;
            if made.done > 0 {
                continue;
            }
            error = made.stopped.filter(|&error| error != PreFaultError::Busy);
            if settled || error.is_some_and(|error| error != PreFaultError::NoSlot) {
                break;
            }
            std::thread::yield_now();
        }
        let left = rest.map_or(0, |rest| rest.size());
        let expected = (step.left > 0).then_some(PreFaultError::NoSlot);
        self.seen.wrong_rest += u64::from(left != step.left);
        self.seen.wrong_error += u64::from(rest.and(error) != expected);
    }

    fn misaligned<T: Tables>(&mut self, vcpu: &mut ModelVcpu<'_, '_, T>, step: Step) {
        for (gpa, size) in [(step.gpa + 8, self.page), (step.gpa, self.page - 8)] {
            let Some(range) = GpaRange::new(Gpa(gpa), size) else { continue };
            let made = vcpu.pre_fault(range, || true);
            let refused = matches!(made.stopped, Some(PreFaultError::Range { .. }));
            self.seen.calls += 1;
            self.seen.unclear += u64::from(!is_clear(range, &made));
            self.seen.wrong_rest += u64::from(made.rest != Some(range));
            self.seen.wrong_error += u64::from(!refused);
        }
    }

    fn read<T: Tables>(
        &mut self,
        vcpu: &mut ModelVcpu<'_, '_, T>,
        watch: Watch<'_>,
    ) -> Result<(), Broken> {
        for index in 0..self.pages {
            let value = vcpu.load(self.gpa + index * self.page)?;
            self.seen.wrong_loads += u64::from(value != content(index));
            watch.beat();
        }
        Ok(())
    }
}

/// Whether a call came further or said why not, and what is left follows what is done.
fn is_clear(range: GpaRange, made: &PreFault) -> bool {
    let left = made.rest.map_or(0, |rest| rest.size());
    let follows = made.rest.is_none_or(|rest| rest.end() == range.end());
    (made.done > 0 || made.stopped.is_some()) && made.done + left == range.size() && follows
}

impl Guest for Reader {
    type Order = Order;

    fn accesses(&self) -> u64 {
        self.pages
    }
}

impl<T: Tables> RunOn<ModelVcpu<'_, '_, T>> for Reader {
    fn run(
        &mut self,
        vcpu: &mut ModelVcpu<'_, '_, T>,
        order: Order,
        watch: Watch<'_>,
    ) -> Result<(), String> {
        match order {
            Order::Map(step) => self.map(vcpu, step, false, watch),
            Order::MapInterrupted(step) => self.map(vcpu, step, true, watch),
            Order::Misaligned(step) => self.misaligned(vcpu, step),
            Order::Read => self.read(vcpu, watch).map_err(|broken| broken.to_string())?,
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_that_neither_came_further_nor_says_why_is_unclear() {
        let range = |gpa, size| GpaRange::new(Gpa(gpa), size);
        let all = range(0x1000, 0x3000).unwrap();
        let made = |done, rest, stopped| PreFault { done, rest, stopped };
        let no_slot = Some(PreFaultError::NoSlot);
        assert!(is_clear(all, &made(0x3000, None, None)));
        assert!(is_clear(all, &made(0x1000, range(0x2000, 0x2000), no_slot)));
        assert!(is_clear(all, &made(0, Some(all), no_slot)));
        assert!(!is_clear(all, &made(0, Some(all), None)));
        assert!(!is_clear(all, &made(0x1000, range(0x1000, 0x2000), None)));
        assert!(!is_clear(all, &made(0x1000, None, None)));
    }
}
