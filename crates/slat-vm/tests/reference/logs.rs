//! Dirty logs: enabled, read, cleared and reset.

use super::*;

impl Reference {
    /// What a ring holds of a log that ends stays in the ring.
    pub(super) fn end_log(&mut self, id: SlotId) {
        let Some(slot) = self.slots.get_mut(&id) else { return };
        if let Some(LogMode::Ring { .. }) = slot.log.take() {
            let dirty = (0..).zip(&slot.pages).filter(|(_, page)| page.dirty);
            self.left.extend(dirty.map(|(number, _)| (id, number)));
        }
        slot.pages.iter_mut().for_each(|page| (page.dirty, page.backup) = (false, false));
    }

    pub(super) fn reset_rings(&mut self) -> BTreeSet<(SlotId, u64)> {
        let mut all = std::mem::take(&mut self.left);
        for &(id, number) in &all {
            let slot = self.slots.get_mut(&id);
            if let Some(page) = slot.and_then(|slot| slot.pages.get_mut(number as usize)) {
                page.least &= !WRITE;
            }
        }
        for (&id, slot) in &mut self.slots {
            if let Some(LogMode::Ring { .. }) = slot.log {
                let dirty = (0..).zip(&slot.pages).filter(|(_, page)| page.dirty);
                all.extend(dirty.map(|(number, _)| (id, number)));
                slot.protect(|_, page| page.dirty);
            }
        }
        all
    }

    pub(super) fn enable(&mut self, id: SlotId, mode: LogMode) -> Result<(), LogError> {
        if mode == LogMode::Hardware && !self.shape.hardware_marks {
            return Err(LogError::NoHardware);
        }
        let slot = self.slots.get_mut(&id).ok_or(LogError::NoSlot)?;
        if slot.log.is_some() {
            return Err(LogError::Enabled);
        }
        if slot.config.private.is_some() {
            return Err(LogError::Private);
        }
        slot.log = Some(mode);
        // What was written before is not for this log.
        for page in &mut slot.pages {
            (page.dirty, page.backup, page.monitored, page.told) = (false, false, false, false);
        }
        let read_only = slot.config.read_only;
        if mode == (LogMode::Manual { initially_all_set: true }) {
            slot.pages.iter_mut().for_each(|page| page.dirty = !read_only);
        } else if mode != LogMode::Hardware {
            slot.protect(|_, _| true);
        } else if !read_only {
            // What another log has left read-only may be written, where its host lets it.
            let mapped = slot.pages.iter_mut().filter(|page| page.most & READ != 0);
            mapped.for_each(|page| page.most |= WRITE);
        }
        Ok(())
    }

    pub(super) fn logged(&mut self, id: SlotId) -> Result<&mut Slot, LogError> {
        let slot = self.slots.get_mut(&id).ok_or(LogError::NoSlot)?;
        if slot.log.is_some() { Ok(slot) } else { Err(LogError::NotEnabled) }
    }

    pub(super) fn collect(&mut self, id: SlotId, bitmap: &mut [u64]) -> Result<u64, LogError> {
        let slot = self.logged(id)?;
        let words = slot.pages.len().div_ceil(64);
        if bitmap.len() != words {
            return Err(LogError::BitmapLength { words });
        }
        if slot.log == Some(LogMode::Ring { backup: false }) {
            return Err(LogError::Ring);
        }
        let ring = matches!(slot.log, Some(LogMode::Ring { .. }));
        // What hardware had marked in leaves that went is told once more.
        let tells = ring || slot.log == Some(LogMode::Hardware);
        let mut may = bitmap.to_vec();
        for (number, page) in slot.pages.iter().enumerate() {
            let bit = 1 << (number % 64);
            let must = page.monitored || if ring { page.backup } else { page.dirty };
            bitmap[number / 64] |= if must { bit } else { 0 };
            may[number / 64] |= if must || page.told && tells { bit } else { 0 };
        }
        let mode = slot.log.expect("checked above");
        if mode == LogMode::Protect {
            slot.protect(|_, page| page.dirty);
        }
        for page in slot.pages.iter_mut().filter(|_| !matches!(mode, LogMode::Manual { .. })) {
            (page.monitored, page.backup) = (false, false);
            if mode == LogMode::Hardware {
                (page.dirty, page.told) = (false, false);
            }
        }
        self.may = may;
        Ok(bitmap.iter().map(|word| u64::from(word.count_ones())).sum())
    }

    pub(super) fn clear(
        &mut self,
        id: SlotId,
        first: u64,
        pages: u64,
        mask: &[u64],
    ) -> Result<u64, LogError> {
        let slot = self.logged(id)?;
        match slot.log {
            Some(LogMode::Ring { .. }) => return Err(LogError::Ring),
            Some(LogMode::Hardware) => return Err(LogError::NotManual),
            _ => {}
        }
        let all = slot.pages.len() as u64;
        if !first.is_multiple_of(64) {
            return Err(LogError::FirstPage);
        }
        if first > all || pages > all - first {
            return Err(LogError::BeyondEnd { pages: all });
        }
        if !pages.is_multiple_of(64) && first + pages != all {
            return Err(LogError::PageCount);
        }
        let words = pages.div_ceil(64) as usize;
        if mask.len() != words {
            return Err(LogError::BitmapLength { words });
        }
        let first = first as usize;
        let chosen = |number: usize, page: &Page| {
            let bit = number.wrapping_sub(first);
            (page.dirty || page.monitored)
                && mask.get(bit / 64).is_some_and(|word| word >> (bit % 64) & 1 == 1)
        };
        let cleared = slot.pages.iter().enumerate().filter(|&(number, page)| chosen(number, page));
        let cleared = cleared.count() as u64;
        for (number, page) in slot.pages.iter_mut().enumerate() {
            if chosen(number, page) {
                page.protect();
                page.monitored = false;
            }
        }
        Ok(cleared)
    }

    /// A vCPU has written to a page without its translation.
    pub(super) fn emulate(&mut self, at: At) -> Result<(), LogError> {
        let logged = self.slot_at(at).filter(|id| self.slots[id].logs());
        logged.ok_or(LogError::NotLogged { gpa: Gpa(at.1) })?;
        self.page_at_mut(at).expect("in a slot").dirty = true;
        Ok(())
    }

    /// Somebody else has, to some pages.
    pub(super) fn mark(&mut self, space: u16, range: GpaRange) -> Result<(), LogError> {
        let page = self.shape.page;
        for gpa in (range.start().0 / page * page..range.end().0).step_by(page as usize) {
            let logged = self.slot_at((space, gpa)).filter(|id| self.slots[id].logs());
            let id = logged.ok_or(LogError::NotLogged { gpa: Gpa(gpa) })?;
            let log = self.slots[&id].log;
            let found = self.page_at_mut((space, gpa)).expect("in a slot");
            match log {
                Some(LogMode::Ring { backup: false }) => return Err(LogError::Ring),
                Some(LogMode::Ring { backup: true }) => found.backup = true,
                _ => found.dirty = true,
            }
        }
        Ok(())
    }

    /// A new bitmap of the monitor's for so many pages, or none.
    pub(super) fn attach(&mut self, id: SlotId, pages: Option<u64>) -> Result<(), LogError> {
        let page_shift = self.shape.page.ilog2();
        let slot = self.slots.get_mut(&id).ok_or(LogError::NoSlot)?;
        let all = slot.pages.len() as u64;
        if pages.is_some_and(|pages| pages != all) {
            return Err(LogError::Monitor { pages: all, page_shift });
        }
        slot.monitor = pages.is_some();
        slot.pages.iter_mut().for_each(|page| page.monitored = false);
        Ok(())
    }

    /// The monitor has written some bytes of what is behind a slot.
    pub(super) fn monitor(&mut self, id: SlotId, offset: u64, bytes: u64) {
        let size = self.shape.page;
        let Some(slot) = self.slots.get_mut(&id).filter(|slot| slot.monitor) else { return };
        for (start, page) in (0..).step_by(size as usize).zip(&mut slot.pages) {
            page.monitored |= bytes > 0 && start < offset + bytes && offset < start + size;
        }
    }
}
