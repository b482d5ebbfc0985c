//! Dirty logs: enabled, read, cleared and reset.

use super::*;

impl Reference {
    /// What a ring holds of a log that ends stays in the ring.
    pub(super) fn end_log(&mut self, id: u32) {
        let Some(slot) = self.slots.get_mut(&id) else { return };
        if let Some(LogMode::Ring { .. }) = slot.log.take() {
            let dirty = (0..).zip(&slot.pages).filter(|(_, page)| page.dirty);
            self.left.extend(dirty.map(|(number, _)| (id, number)));
        }
        slot.pages.iter_mut().for_each(|page| page.dirty = false);
    }

    pub(super) fn reset_rings(&mut self) -> BTreeSet<(u32, u64)> {
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

    pub(super) fn enable(&mut self, id: u32, mode: LogMode) -> Result<(), LogError> {
        if mode == LogMode::Hardware && !self.shape.hardware_marks {
            return Err(LogError::NoHardware);
        }
        let slot = self.slots.get_mut(&id).ok_or(LogError::NoSlot)?;
        if slot.log.is_some() {
            return Err(LogError::Enabled);
        }
        slot.log = Some(mode);
        slot.pages.iter_mut().for_each(|page| (page.dirty, page.told) = (false, false));
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

    pub(super) fn logged(&mut self, id: u32) -> Result<&mut Slot, LogError> {
        let slot = self.slots.get_mut(&id).ok_or(LogError::NoSlot)?;
        if slot.log.is_some() { Ok(slot) } else { Err(LogError::NotEnabled) }
    }

    pub(super) fn collect(&mut self, id: u32, bitmap: &mut [u64]) -> Result<u64, LogError> {
        let slot = self.logged(id)?;
        let words = slot.pages.len().div_ceil(64);
        if bitmap.len() != words {
            return Err(LogError::BitmapLength { words });
        }
        match slot.log {
            Some(LogMode::Ring { backup: false }) => return Err(LogError::Ring),
            // All writes are vCPUs'. What hardware had marked in leaves that went is told once more.
            Some(LogMode::Ring { backup: true }) => {
                let mut may = bitmap.to_vec();
                let told = slot.pages.iter().enumerate().filter(|(_, page)| page.told);
                told.for_each(|(number, _)| may[number / 64] |= 1 << (number % 64));
                self.may = may;
                return Ok(0);
            }
            _ => {}
        }
        let hardware = slot.log == Some(LogMode::Hardware);
        let mut may = bitmap.to_vec();
        for (number, page) in slot.pages.iter_mut().enumerate() {
            let bit = 1 << (number % 64);
            bitmap[number / 64] |= if page.dirty { bit } else { 0 };
            may[number / 64] |= if page.dirty || page.told && hardware { bit } else { 0 };
        }
        match slot.log {
            Some(LogMode::Protect) => slot.protect(|_, page| page.dirty),
            Some(LogMode::Hardware) => {
                slot.pages.iter_mut().for_each(|page| (page.dirty, page.told) = (false, false));
            }
            _ => {}
        }
        self.may = may;
        Ok(bitmap.iter().map(|word| u64::from(word.count_ones())).sum())
    }

    pub(super) fn clear(
        &mut self,
        id: u32,
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
            page.dirty && mask.get(bit / 64).is_some_and(|word| word >> (bit % 64) & 1 == 1)
        };
        let cleared = slot.pages.iter().enumerate().filter(|&(number, page)| chosen(number, page));
        let cleared = cleared.count() as u64;
        slot.protect(chosen);
        Ok(cleared)
    }

    // The host.
}
