//! What the host does in each test while its guests run, and what it compares.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::thread;

use slat::Gpa;
use slat_vm::{Hva, HvaRange, SlotConfig};

use super::area::{CHUNK, MOVED, Slots, Test};
use super::guest::{FIRST, Meeting, SECOND, Tester};
use super::pages::Pages;
use crate::arch::Tables;
use crate::failure::Failure;
use crate::stage::Stage;

/// The host's side of one test.
pub(super) struct Host<'a, 'r, 's, 'm, T: Tables> {
    pub(super) test: Test,
    pub(super) slots: Slots,
    pub(super) pages: &'a Pages,
    pub(super) meeting: &'a Meeting,
    pub(super) vcpus: u64,
    /// Whether what guests wrote is compared also where that takes time.
    pub(super) verify: bool,
    pub(super) stage: &'r mut Stage<'s, 'm, T, Tester>,
    /// Values that were compared, and those that were wrong.
    pub(super) compared: u64,
    pub(super) wrong: u64,
}

impl<T: Tables> Host<'_, '_, '_, '_, T> {
    /// Once through the test.
    pub(super) fn turn(&mut self) -> Result<(), Failure> {
        match self.test {
            Test::Map => self.map(),
            Test::Unmap => self.unmap_both(1),
            Test::UnmapChunked => self.unmap_both(CHUNK / self.slots.page),
            Test::MoveActive | Test::MoveInactive => self.move_slot(),
            Test::ReadWrite => self.read_and_write(),
        }
    }

    /// Unmaps each half of the area while guests write the other.
    fn map(&mut self) -> Result<(), Failure> {
        let [first, second] = self.slots.halves();
        self.unmap(second.clone())?;
        self.meet()?;
        self.compare_all(&first, FIRST);
        self.unmap(first)?;
        self.meet()?;
        self.compare_all(&second, SECOND);
        Ok(())
    }

    /// Unmaps each half of the area, some pages at once, after guests have written to it.
    fn unmap_both(&mut self, at_once: u64) -> Result<(), Failure> {
        for (half, value) in self.slots.halves().into_iter().zip([FIRST, SECOND]) {
            self.meet()?;
            let written = self.vcpus.min(half.end - half.start);
            self.compare_all(&(half.start..half.start + written), value);
            for start in half.clone().step_by(at_once as usize) {
                self.unmap(start..half.end.min(start + at_once))?;
            }
        }
        Ok(())
    }

    fn read_and_write(&mut self) -> Result<(), Failure> {
        let pages = self.slots.area()..self.slots.pages;
        let half = self.slots.page / 2;
        self.pages
            .words(pages.clone(), half)
            .for_each(|word| word.store(SECOND, Ordering::Relaxed));
        self.meet()?;
        self.compare(&pages, FIRST);
        self.meet()
    }

    /// Moves the last slot beyond all others, and back.
    fn move_slot(&mut self) -> Result<(), Failure> {
        let id = self.slots.last();
        let beyond = self.slots.beyond();
        let back = self.slots.config(id);
        self.change(SlotConfig { gpa: Gpa(beyond), ..back })?;
        if self.verify {
            self.look_for_stray_writes()?;
        }
        self.change(back)?;
        if self.verify {
            // Guests use it again, so that there are translations that the next move must take away.
            self.wait_for_round()?;
        }
        Ok(())
    }

    fn change(&mut self, config: SlotConfig) -> Result<(), Failure> {
        let Stage { vm, worker, .. } = &mut *self.stage;
        vm.change_slot(worker, self.slots.last(), config)?;
        Ok(())
    }

    /// The slot is where no guest writes: what its memory holds stays.
    fn look_for_stray_writes(&mut self) -> Result<(), Failure> {
        let pages = self.slots.pages_of(self.slots.last());
        self.pages.words(pages.clone(), 0).for_each(|word| word.store(0, Ordering::Relaxed));
        self.wait_for_round()?;
        self.compare(&pages, 0);
        Ok(())
    }

    /// Waits until every guest has written to all its pages.
    fn wait_for_round(&mut self) -> Result<(), Failure> {
        let round = MOVED / self.slots.page;
        Ok(self.stage.crew.wait_for_accesses(1 + round)?)
    }

    /// Compares what guests wrote, if that is asked for, and clears it.
    fn compare_all(&mut self, pages: &Range<u64>, value: u64) {
        if self.verify {
            self.compare(pages, value);
        }
    }

    fn compare(&mut self, pages: &Range<u64>, value: u64) {
        let values = self.pages.words(pages.clone(), 0).map(|word| word.swap(0, Ordering::Relaxed));
        self.wrong += values.filter(|&found| found != value).count() as u64;
        self.compared += pages.end - pages.start;
    }

    /// Gives pages back to the host, as much at once as lies in one slot. They come back empty.
    fn unmap(&mut self, pages: Range<u64>) -> Result<(), Failure> {
        for piece in self.slots.pieces(pages) {
            let size = (piece.end - piece.start) * self.slots.page;
            let range = HvaRange::new(Hva(piece.start * self.slots.page), size);
            let Stage { vm, worker, .. } = &mut *self.stage;
            let guard = vm.invalidate_host_begin(worker, range.as_slice())?;
            if self.verify {
                self.pages.drop_pages(piece);
            }
            guard.end();
        }
        Ok(())
    }

    /// Waits until every guest has come to the meeting.
    fn meet(&mut self) -> Result<(), Failure> {
        let meeting = self.meeting.come();
        while !self.meeting.met(meeting, self.vcpus) {
            self.stage.crew.all_run()?;
            thread::yield_now();
        }
        Ok(())
    }
}
