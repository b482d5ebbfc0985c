//! Creating and changing slots.

use super::*;

impl Reference {
    pub(super) fn check(&self, config: &SlotConfig) -> Result<GpaRange, SlotError> {
        let Shape { page, limit, .. } = self.shape;
        let &SlotConfig { gpa, size, hva, max_page_size, .. } = config;
        if size == 0 {
            return Err(SlotError::Empty);
        }
        if [gpa.0, size, hva.0].iter().any(|bytes| !bytes.is_multiple_of(page)) {
            return Err(SlotError::Misaligned { to: page });
        }
        let range = GpaRange::new(gpa, size).ok_or(SlotError::Wraps)?;
        hva.0.checked_add(size).ok_or(SlotError::Wraps)?;
        if range.end().0 > limit {
            return Err(SlotError::OutOfRange { limit: Gpa(limit) });
        }
        let max = ((1 << 31) - 1) * page;
        if size > max {
            return Err(SlotError::TooLarge { max });
        }
        if max_page_size.is_some_and(|max| max < page) {
            return Err(SlotError::MaxPageSize { granule: page });
        }
        Ok(range)
    }

    /// The first slot but `id` that shares an address with `range`.
    pub(super) fn check_overlap(&self, id: u32, range: GpaRange) -> Result<(), SlotError> {
        let others = self.slots.iter().filter(|&(&other, _)| other != id);
        let overlapping = others.filter(|(_, slot)| slot.range().overlaps(&range));
        match overlapping.min_by_key(|(_, slot)| slot.config.gpa) {
            Some((&other, _)) => Err(SlotError::Overlaps { other: other.into() }),
            None => Ok(()),
        }
    }

    pub(super) fn create(&mut self, id: u32, config: SlotConfig) -> Result<(), SlotError> {
        let range = self.check(&config)?;
        if self.slots.contains_key(&id) {
            return Err(SlotError::Exists);
        }
        self.check_overlap(id, range)?;
        let pages = vec![Page::default(); (config.size / self.shape.page) as usize];
        let max_leaf = config.max_page_size.unwrap_or(u64::MAX);
        self.slots.insert(id, Slot { config, log: None, pages, max_leaf });
        Ok(())
    }

    pub(super) fn change(&mut self, id: u32, config: SlotConfig) -> Result<SlotChange, SlotError> {
        let range = self.check(&config)?;
        let before = self.slots.get(&id).ok_or(SlotError::NotFound)?.config;
        if config == before {
            return Ok(SlotChange::Nothing);
        }
        if (config.size, config.hva) != (before.size, before.hva) {
            return Err(SlotError::Fixed);
        }
        let moves = config.gpa != before.gpa;
        if moves {
            self.check_overlap(id, range)?;
        }
        let slot = self.slots.get_mut(&id).expect("found above");
        slot.config = config;
        slot.max_leaf = slot.max_leaf.max(config.max_page_size.unwrap_or(u64::MAX));
        for page in &mut slot.pages {
            let lost = match (moves, config.read_only) {
                (true, _) => !0,
                (false, true) => WRITE,
                (false, false) => 0,
            };
            (page.least, page.most) = (page.least & !lost, page.most & !lost);
        }
        Ok(if moves { SlotChange::Moved } else { SlotChange::Flags })
    }
}
