//! What migration does with a slot: a copy that each collection brings up to date.

use slat_model::Model;
use slat_vm::{LogError, LogMode, Worker};

use crate::random::Dice;
use crate::soak::config::Soaked;
use crate::soak::place::{Behind, Place};
use crate::soak::round::Ground;

/// Pages of one word of a log.
const SECTION: u64 = 64;

/// A log that is on, and the copy.
#[derive(Debug)]
pub(crate) struct Migration {
    mode: LogMode,
    /// The first page of host addresses behind the slot.
    first: u64,
    /// By page, the words of all vCPUs.
    copy: Vec<Vec<u64>>,
}

impl Migration {
    /// Enables the log in a mode that is drawn, and copies everything unless every page counts as written.
    ///
    /// # Errors
    /// What the VM refused.
    pub(crate) fn begin<'m, T: Soaked>(
        ground: &Ground<'_, 'm, T>,
        worker: &mut Worker<'m, Model>,
        place: &Place,
        behind: Behind,
        dice: &mut Dice,
    ) -> Result<Self, LogError> {
        let modes = [
            LogMode::Protect,
            LogMode::Manual { initially_all_set: false },
            LogMode::Manual { initially_all_set: true },
            LogMode::Hardware,
        ];
        let hardware = ground.vm.tree().format().tracks_dirty();
        let modes = if hardware { &modes[..] } else { &modes[..3] };
        let mode = if ground.vm.options().dirty_ring.is_some() && dice.happens(40) {
            LogMode::Ring { backup: dice.happens(50) }
        } else {
            modes[dice.below(modes.len() as u64) as usize]
        };
        ground.vm.enable_log(worker, place.id, mode)?;
        let first = place.host_page(behind, 0);
        let copy = (first..first + place.pages).map(|page| ground.contents(page)).collect();
        Ok(Self { mode, first, copy })
    }

    /// Collects, clears some of what was collected, or all of it with `whole`, and copies that. Says which page had
    /// changed and was not collected, if one was.
    ///
    /// # Errors
    /// What the VM refused.
    pub(crate) fn round<'m, T: Soaked>(
        &mut self,
        ground: &Ground<'_, 'm, T>,
        worker: &mut Worker<'m, Model>,
        place: &Place,
        dice: &mut Dice,
        whole: bool,
    ) -> Result<Option<u64>, String> {
        let changed = self.changed(ground);
        // Faults that were in flight have marked what they have made writable.
        worker.parts().0.synchronize();
        let mut bitmap = vec![0; place.pages.div_ceil(SECTION) as usize];
        if self.mode != (LogMode::Ring { backup: false }) {
            let collected = ground.vm.dirty_log(worker, place.id, &mut bitmap);
            collected.map_err(|why| why.to_string())?;
        }
        if let LogMode::Ring { .. } = self.mode {
            ground.harvest(worker)?;
            let reported = place.take_reported();
            bitmap.iter_mut().zip(reported).for_each(|(word, bits)| *word |= bits);
        }
        let is_set = |bitmap: &[u64], page: u64| {
            bitmap[(page / SECTION) as usize] >> (page % SECTION) & 1 == 1
        };
        let lost = changed.into_iter().find(|&page| !is_set(&bitmap, page));
        if matches!(self.mode, LogMode::Manual { .. }) {
            let cleared = self.clear(ground, worker, place, &mut bitmap, dice, whole);
            cleared.map_err(|why| why.to_string())?;
        }
        for page in (0..place.pages).filter(|&page| is_set(&bitmap, page)) {
            self.copy[page as usize] = ground.contents(self.first + page);
        }
        Ok(lost)
    }

    /// What there is to say of a page whose write is not in the log.
    pub(crate) fn lost(&self, place: &Place, page: u64) -> String {
        let mode = self.mode;
        format!("a write to page {page} of slot {} is lost, with a log of {mode:?}", place.id)
    }

    /// Whether pages that were collected are read-only until they are written again.
    pub(crate) fn protects(&self) -> bool {
        self.mode != LogMode::Hardware
    }

    /// Clears what `bitmap` has, in sections of some words, or leaves some of it out and takes it out of `bitmap`.
    fn clear<'m, T: Soaked>(
        &self,
        ground: &Ground<'_, 'm, T>,
        worker: &mut Worker<'m, Model>,
        place: &Place,
        bitmap: &mut [u64],
        dice: &mut Dice,
        whole: bool,
    ) -> Result<(), LogError> {
        let at_once = 1 + dice.below(8) as usize;
        for (n, words) in bitmap.chunks_mut(at_once).enumerate() {
            if !whole {
                for word in words.iter_mut() {
                    // A word as it is, or single pages of it, or nothing of it.
                    *word &= [u64::MAX, dice.below(u64::MAX), 0][dice.below(3) as usize];
                }
            }
            let first = n as u64 * at_once as u64 * SECTION;
            let pages = (words.len() as u64 * SECTION).min(place.pages - first);
            ground.vm.clear_dirty_log(worker, place.id, first, pages, words)?;
        }
        Ok(())
    }

    /// Pages that are not what the copy says.
    pub(crate) fn changed<T: Soaked>(&self, ground: &Ground<'_, '_, T>) -> Vec<u64> {
        let copies = (0..).zip(&self.copy);
        copies
            .filter(|&(page, copy)| ground.contents(self.first + page) != *copy)
            .map(|(page, _)| page)
            .collect()
    }
}
