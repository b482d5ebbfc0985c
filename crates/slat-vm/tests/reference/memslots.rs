//! Creating and changing slots.

use super::*;

impl Reference {
    pub(super) fn check(&self, id: SlotId, config: &SlotConfig) -> Result<GpaRange, SlotError> {
        let Shape { page, limit, spaces, .. } = self.shape;
        if id.space >= spaces {
            return Err(SlotError::NoSpace { spaces });
        }
        let &SlotConfig { gpa, size, hva, max_page_size, private, .. } = config;
        let behind = private.unwrap_or_default();
        if size == 0 {
            return Err(SlotError::Empty);
        }
        if [gpa.0, size, hva.0, behind.0].iter().any(|bytes| !bytes.is_multiple_of(page)) {
            return Err(SlotError::Misaligned { to: page });
        }
        let range = GpaRange::new(gpa, size).ok_or(SlotError::Wraps)?;
        hva.0.checked_add(size).ok_or(SlotError::Wraps)?;
        behind.0.checked_add(size).ok_or(SlotError::Wraps)?;
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
        if private.is_some() && (config.read_only || config.pinned) {
            return Err(SlotError::Private);
        }
        Ok(range)
    }

    /// The first slot but `id` that shares an address with `range`.
    pub(super) fn check_overlap(&self, id: SlotId, range: GpaRange) -> Result<(), SlotError> {
        let others =
            self.slots.iter().filter(|&(&other, _)| other != id && other.space == id.space);
        let overlapping = others.filter(|(_, slot)| slot.range().overlaps(&range));
        match overlapping.min_by_key(|(_, slot)| slot.config.gpa) {
            Some((&other, _)) => Err(SlotError::Overlaps { other }),
            None => Ok(()),
        }
    }

    pub(super) fn create(&mut self, id: SlotId, config: SlotConfig) -> Result<(), SlotError> {
        let range = self.check(id, &config)?;
        if self.slots.contains_key(&id) {
            return Err(SlotError::Exists);
        }
        self.check_overlap(id, range)?;
        let pages = vec![Page::default(); (config.size / self.shape.page) as usize];
        let max_leaf = config.max_page_size.unwrap_or(u64::MAX);
        self.slots.insert(id, Slot { config, log: None, monitor: false, pages, max_leaf });
        if config.pinned {
            // All of it is mapped, or it never was.
            self.map_pinned(id).inspect_err(|_| _ = self.slots.remove(&id))?;
        }
        Ok(())
    }

    fn map_pinned(&mut self, id: SlotId) -> Result<(), SlotError> {
        let Slot { config, .. } = self.slots[&id];
        let access = if config.read_only { Access::Read } else { Access::Write };
        let range = config.gpa.0..config.gpa.0 + config.size;
        let Err((gpa, result)) = self.map_ahead(id.space, range, access) else { return Ok(()) };
        let error = match result {
            Ok(_) => Some(HostError::Again),
            Err(FaultError::Host { error, .. }) => Some(error),
            Err(other) => panic!("no other fault of a slot that is there: {other:?}"),
        };
        Err(SlotError::NotMapped { gpa: Gpa(gpa), error })
    }

    pub(super) fn convert(
        &mut self,
        id: SlotId,
        range: GpaRange,
        private: bool,
    ) -> Result<(), PrivateError> {
        let (to, reach) = (self.shape.page, self.reach());
        let slot = self.slots.get_mut(&id).ok_or(PrivateError::NoSlot)?;
        if slot.config.private.is_none() {
            return Err(PrivateError::NoPrivateMemory);
        }
        let (start, end) = (range.start(), range.end());
        if start < slot.range().start() || slot.range().end() < end {
            return Err(PrivateError::OutsideSlot { slot: slot.range() });
        }
        if (start.0 | end.0) % to != 0 {
            return Err(PrivateError::Misaligned { to });
        }
        slot.lose(Taken::Guest(start.0, end.0), to, reach);
        let first = slot.config.gpa.0;
        let pages = (first..).step_by(to as usize).zip(&mut slot.pages);
        pages
            .filter(|(gpa, _)| range.contains(Gpa(*gpa)))
            .for_each(|(_, page)| page.private = private);
        Ok(())
    }

    pub(super) fn change(
        &mut self,
        id: SlotId,
        config: SlotConfig,
    ) -> Result<SlotChange, SlotError> {
        let range = self.check(id, &config)?;
        let before = self.slots.get(&id).ok_or(SlotError::NotFound)?.config;
        if config == before {
            return Ok(SlotChange::Nothing);
        }
        if (config.size, config.hva, config.private) != (before.size, before.hva, before.private) {
            return Err(SlotError::Fixed);
        }
        if before.private.is_some() {
            return Err(SlotError::Private);
        }
        let moves = config.gpa != before.gpa;
        if config.pinned != before.pinned || config.pinned && moves {
            return Err(SlotError::Pinned);
        }
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
