//! What the guests of the tests do, and how they and the host wait for each other.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use slat_vm::{Access, Exit, Mmio};

use super::area::{Slots, Test};
use crate::arch::Tables;
use crate::crew::{Guest, RunOn};
use crate::guest::{GuestMemory, Watch};
use crate::model::{Broken, ModelVcpu};

/// What guests store in the first half of the area, or everywhere.
pub(super) const FIRST: u64 = 0x1122_3344_5566_7788;
/// What they store in the second half, or the host for them.
pub(super) const SECOND: u64 = 0x99aa_bbcc_ddee_ff00;

/// Where the host and all guests meet.
#[derive(Debug, Default)]
pub(super) struct Meeting {
    /// Meetings that the host has come to.
    host: AtomicU64,
    /// How often any guest came to one and found the host there.
    guests: AtomicU64,
}

impl Meeting {
    /// The host comes; `met` says whether all `vcpus` have.
    pub(super) fn come(&self) -> u64 {
        self.host.fetch_add(1, Ordering::Release) + 1
    }

    pub(super) fn met(&self, meeting: u64, vcpus: u64) -> bool {
        self.guests.load(Ordering::Acquire) == meeting * vcpus
    }

    /// A guest comes to its meeting of this number, and waits for the host. `false` if it is to stop.
    fn attend(&self, meeting: u64, watch: Watch<'_>) -> bool {
        while self.host.load(Ordering::Acquire) < meeting {
            if watch.stopped() {
                return false;
            }
            std::thread::yield_now();
        }
        self.guests.fetch_add(1, Ordering::Release);
        true
    }
}

/// One vCPU of a test.
#[derive(Debug)]
pub(super) struct Tester {
    test: Test,
    slots: Slots,
    /// Its number, and of how many.
    index: u64,
    vcpus: u64,
    meeting: Arc<Meeting>,
    met: u64,
    /// Pages whose writes may be exits.
    may_exit: Range<u64>,
    pub(super) exits: u64,
    pub(super) loads: u64,
    pub(super) wrong_loads: u64,
}

impl Tester {
    pub(super) fn new(
        test: Test,
        slots: Slots,
        (index, vcpus): (u32, u32),
        meeting: Arc<Meeting>,
    ) -> Self {
        let may_exit = match test {
            Test::MoveActive => slots.pages_of(slots.last()).start..slots.moved(true).end,
            _ => 0..0,
        };
        let (index, vcpus) = (index.into(), vcpus.into());
        let (met, exits, loads, wrong_loads) = (0, 0, 0, 0);
        Self { test, slots, index, vcpus, meeting, met, may_exit, exits, loads, wrong_loads }
    }

    /// Its share of a range of pages.
    fn share(&self, pages: &Range<u64>) -> Range<u64> {
        let length = pages.end - pages.start;
        let at = |index| pages.start + length * index / self.vcpus;
        at(self.index)..at(self.index + 1)
    }

    fn meet(&mut self, watch: Watch<'_>) -> bool {
        self.met += 1;
        self.meeting.attend(self.met, watch)
    }

    fn obey<T: Tables>(
        &mut self,
        vcpu: &mut ModelVcpu<'_, '_, T>,
        watch: Watch<'_>,
    ) -> Result<(), Broken> {
        match self.test {
            Test::Map => {
                let [first, second] = self.slots.halves().map(|half| self.share(&half));
                self.in_turn(vcpu, watch, first, second)
            }
            Test::Unmap | Test::UnmapChunked => {
                // So few that the host's unmapping takes most of the time.
                let page = |half: Range<u64>| half.start + self.index % (half.end - half.start);
                let [first, second] = self.slots.halves().map(page);
                self.in_turn(vcpu, watch, first..first + 1, second..second + 1)
            }
            Test::MoveActive | Test::MoveInactive => self.write_moved(vcpu, watch),
            Test::ReadWrite => self.read_and_write(vcpu, watch),
        }
    }

    /// Writes these pages, and those, meeting the host after each.
    fn in_turn<T: Tables>(
        &mut self,
        vcpu: &mut ModelVcpu<'_, '_, T>,
        watch: Watch<'_>,
        first: Range<u64>,
        second: Range<u64>,
    ) -> Result<(), Broken> {
        loop {
            for (pages, value) in [(&first, FIRST), (&second, SECOND)] {
                for page in pages.clone() {
                    vcpu.store(self.slots.gpa(page), value)?;
                    watch.beat();
                }
                if !self.meet(watch) {
                    return Ok(());
                }
            }
        }
    }

    fn write_moved<T: Tables>(
        &mut self,
        vcpu: &mut ModelVcpu<'_, '_, T>,
        watch: Watch<'_>,
    ) -> Result<(), Broken> {
        let pages = self.slots.moved(self.test == Test::MoveActive);
        while !watch.stopped() {
            for page in pages.clone() {
                match vcpu.store(self.slots.gpa(page), FIRST) {
                    Ok(()) => {}
                    Err(Broken::Exit(Exit::Mmio(Mmio {
                        access: Access::Write,
                        slot: None,
                        ..
                    }))) if self.may_exit.contains(&page) => self.exits += 1,
                    Err(broken) => return Err(broken),
                }
                watch.beat();
            }
        }
        Ok(())
    }

    fn read_and_write<T: Tables>(
        &mut self,
        vcpu: &mut ModelVcpu<'_, '_, T>,
        watch: Watch<'_>,
    ) -> Result<(), Broken> {
        let pages = self.share(&(self.slots.area()..self.slots.pages));
        loop {
            for page in pages.clone() {
                vcpu.store(self.slots.gpa(page), FIRST)?;
                watch.beat();
            }
            if !self.meet(watch) {
                return Ok(());
            }
            for page in pages.clone() {
                let gpa = self.slots.gpa(page) + self.slots.page / 2;
                self.loads += 1;
                self.wrong_loads += u64::from(vcpu.load(gpa)? != SECOND);
                vcpu.store(gpa, 0)?;
                watch.beat();
            }
            if !self.meet(watch) {
                return Ok(());
            }
        }
    }
}

impl Guest for Tester {
    type Order = ();

    fn accesses(&self) -> u64 {
        0
    }
}

impl<T: Tables> RunOn<ModelVcpu<'_, '_, T>> for Tester {
    fn run(
        &mut self,
        vcpu: &mut ModelVcpu<'_, '_, T>,
        (): (),
        watch: Watch<'_>,
    ) -> Result<(), String> {
        self.obey(vcpu, watch).map_err(|broken| broken.to_string())
    }
}
