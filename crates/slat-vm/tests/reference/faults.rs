//! Accesses and faults: what they do to pages, and what they answer.

use super::*;
use host::Answer;

/// How a page is asked for.
#[derive(Clone, Copy)]
struct Asked {
    /// There is a fault; otherwise there may be none.
    certain: bool,
    /// By nobody who has used it.
    ahead: bool,
    /// As one that is private, or shared, if hardware says so.
    private: Option<bool>,
}

/// By a fault.
const FAULT: Asked = Asked { certain: true, ahead: false, private: None };
/// Before any.
const AHEAD: Asked = Asked { ahead: true, ..FAULT };

impl Reference {
    pub(super) fn access(&mut self, at: At, access: Access) -> Outcome {
        let page = self.page_at(at);
        let permitted = page.is_some_and(|page| page.least & right(access) != 0);
        // Also where it is permitted there can be a fault: a CPU need not know of a right that was added.
        let result = self.fault(at, access, Asked { certain: !permitted, ..FAULT });
        self.use_leaf(at);
        if result != Ok(Exit::Resume) {
            return Outcome::Exit(result);
        }
        let hva = self.slot_at(at).map_or(0, |id| self.slots[&id].hva(at.1));
        if access == Access::Write {
            self.stores += 1;
            self.contents.insert(hva, self.stores);
            self.mark_by_hardware(at);
        }
        Outcome::Value(self.contents.get(&hva).copied().unwrap_or(0))
    }

    /// The leaf that was written is dirty as a whole.
    fn mark_by_hardware(&mut self, at: At) {
        let around = block(at.1, self.reach());
        let written = at.1 & !(self.shape.page - 1);
        let id = self.slot_at(at).expect("in a slot");
        let marks = self.shape.hardware_marks;
        let slot = self.slots.get_mut(&id).expect("found");
        let counts = slot.hardware_logs();
        for (gpa, page) in
            (slot.config.gpa.0..).step_by(self.shape.page as usize).zip(&mut slot.pages)
        {
            page.dirty |= counts && gpa == written;
            page.told |= marks && around.contains(&gpa) && page.most & READ != 0;
        }
    }

    /// A leaf that can be used becomes young as a whole.
    fn use_leaf(&mut self, at: At) {
        let Some(id) = self.slot_at(at) else { return };
        let around = block(at.1, self.reach());
        let slot = self.slots.get_mut(&id).expect("found");
        for (gpa, page) in
            (slot.config.gpa.0..).step_by(self.shape.page as usize).zip(&mut slot.pages)
        {
            if around.contains(&gpa) && page.most & READ != 0 {
                page.most |= YOUNG;
            }
        }
    }

    /// Whether a page may be young that a block with this one can have been made of.
    fn is_used_near(&self, at: At) -> bool {
        let around = block(at.1, self.reach());
        let mut pages = around.step_by(self.shape.page as usize);
        pages.any(|gpa| self.page_at((at.0, gpa)).is_some_and(|page| page.most & YOUNG != 0))
    }

    /// The largest block that there can be.
    pub(super) fn reach(&self) -> u64 {
        let blocks = self.shape.blocks.iter().rev();
        blocks.copied().find(|&size| size <= self.host.unit).unwrap_or(self.shape.page)
    }

    /// A fault that says of itself what it is, and perhaps what the page is taken for.
    pub(super) fn reported(
        &mut self,
        space: u16,
        fault: &Fault,
        private: Option<bool>,
    ) -> Result<Exit, FaultError> {
        let at = (space, fault.gpa.0);
        let mapped = self.page_at(at).is_some_and(|page| page.least & READ != 0);
        if fault.kind == FaultKind::AccessFlag && mapped && private.is_none() {
            // Nothing was wrong but the flag; what else is wrong will fault again.
            self.use_leaf(at);
            return Ok(Exit::Resume);
        }
        let result = self.fault(at, fault.access, Asked { private, ..FAULT });
        if result == Ok(Exit::Resume) {
            self.use_leaf(at);
        }
        result
    }

    fn fault(&mut self, at: At, access: Access, asked: Asked) -> Result<Exit, FaultError> {
        let limit = Gpa(self.shape.limit);
        let (gpa, write) = (Gpa(at.1), access == Access::Write);
        if gpa >= limit {
            return Ok(Exit::Abort(Abort::AddressSize { limit }));
        }
        let mmio = |slot| Ok(Exit::Mmio(Mmio { gpa, access, slot }));
        let Some(id) = self.slot_at(at) else { return mmio(None) };
        let slot = &self.slots[&id];
        let before = *slot.page(at.1);
        if let Some(private) = asked.private.filter(|&private| private != before.private) {
            return Ok(Exit::Convert { gpa, private });
        }
        let (hva, read_only) = (slot.hva(at.1), slot.config.read_only);
        if write && read_only {
            return mmio(Some(ReadOnly { id, hva: Hva(hva) }));
        }
        let answer = match self.host.page(hva, access) {
            Ok(answer) => answer,
            Err(HostError::Again) => return Ok(Exit::Retry),
            Err(error) => return Err(FaultError::Host { gpa, hva: Hva(hva), error }),
        };
        if answer.device && access == Access::Execute {
            return Ok(Exit::Abort(Abort::ExecuteDevice));
        }
        if self.taken_back(at, self.shape.page) {
            return Ok(Exit::Retry);
        }
        let protects = slot.protects();
        let size = self.wanted(at);
        let rights = self.rights(slot, answer, access, asked.ahead);
        let used = asked.ahead && size > self.shape.page && self.is_used_near(at);
        self.map(at, size, rights, asked.certain);
        if used {
            // The block that takes the place of pages is as young as any of them.
            self.use_leaf(at);
        }
        if protects && write {
            self.page_at_mut(at).expect("in a slot").dirty = true;
        }
        if size == self.shape.page && !asked.ahead && !(protects && write) {
            let unmapped = before.most & READ == 0;
            self.map_around(at, asked.certain && unmapped);
        }
        Ok(Exit::Resume)
    }

    /// The size of the leaf that a fault installs, if nothing is in the way.
    fn wanted(&self, at: At) -> u64 {
        let slot = &self.slots[&self.slot_at(at).expect("in a slot")];
        let answer = self.host.page(slot.hva(at.1), Access::Read);
        // Hardware's log keeps its pages also when their slot has become read-only.
        let logged = slot.logs() || slot.log == Some(LogMode::Hardware);
        let small = logged || answer.is_ok_and(|answer| answer.device);
        let largest = if small { self.shape.page } else { self.largest_leaf(at) };
        if self.taken_back(at, largest) { self.shape.page } else { largest }
    }

    /// What a page permits that was mapped for an access, or ahead of any.
    fn rights(&self, slot: &Slot, answer: Answer, access: Access, ahead: bool) -> Rights {
        let writable = answer.writable && !slot.config.read_only;
        let write = writable && (access == Access::Write || !slot.protects());
        let execute = access == Access::Execute || self.shape.coherent_instructions;
        // Hardware marks a page when somebody uses it.
        let young = !ahead || !self.shape.hardware_ages;
        let right = |right, is: bool| if is { right } else { 0 };
        READ | right(WRITE, write) | right(EXECUTE, execute && !answer.device) | right(YOUNG, young)
    }

    /// What a fault does to the pages of a leaf.
    fn map(&mut self, at: At, size: u64, rights: Rights, certain: bool) {
        let page = self.shape.page;
        let largest = *self.shape.blocks.last().expect("there are blocks");
        // Tables that are left of what was there can be in the way of all but the smallest blocks.
        let fresh = self.used.insert((at.0, at.1 / largest));
        if size == page {
            let page = self.page_at_mut(at).expect("in a slot");
            page.most |= rights;
            page.least |= if certain { rights } else { 0 };
            return;
        }
        let sure = block(at.1, if fresh { size } else { self.shape.blocks[0] });
        let id = self.slot_at(at).expect("in a slot");
        let slot = self.slots.get_mut(&id).expect("found");
        let leaf = block(at.1, size);
        let first = (leaf.start - slot.config.gpa.0) / page;
        let pages = slot.pages[first as usize..].iter_mut();
        for (gpa, found) in leaf.step_by(page as usize).zip(pages) {
            found.most |= rights;
            // Smaller leaves that were there lose what the fault did not ask for.
            let fixed = certain && sure.contains(&gpa);
            found.least = if fixed { rights } else { found.least & rights };
        }
    }

    /// With a page its window is mapped: in both directions, up to what the host has not at hand or what is of the
    /// other kind. What is mapped already stays as it is.
    fn map_around(&mut self, at: At, certain: bool) {
        let page = self.shape.page;
        let slot = &self.slots[&self.slot_at(at).expect("in a slot")];
        let window = block(at.1, self.shape.around);
        let (start, end) = (slot.range().start().0, slot.range().end().0);
        let (start, end) = (window.start.max(start), window.end.min(end));
        let pages: Vec<_> = (start..end).step_by(page as usize).collect();
        // What is taken back, or private somewhere, may end it before.
        let taken = pages.iter().any(|&gpa| self.taken_back((at.0, gpa), page));
        let certain = certain && !taken && slot.config.private.is_none();
        let kind = slot.page(at.1).private;
        let mut mapped = Vec::new();
        let mut map = |gpa: u64| {
            let answer = self.host.page(slot.hva(gpa), Access::Read).ok();
            let found = slot.page(gpa);
            if found.most & READ != 0 {
                return Some(());
            }
            let answer = answer.filter(|answer| !answer.device && found.private == kind)?;
            mapped.push((gpa, self.rights(slot, answer, Access::Read, true)));
            Some(())
        };
        let (before, after) = pages.split_at(pages.partition_point(|&gpa| gpa + page <= at.1));
        let _ = after[1..].iter().try_for_each(|&gpa| map(gpa));
        let _ = before.iter().rev().try_for_each(|&gpa| map(gpa));
        for (gpa, rights) in mapped {
            let found = self.page_at_mut((at.0, gpa)).expect("in a slot");
            found.most |= rights;
            found.least |= if certain { rights } else { 0 };
        }
    }

    /// The largest leaf that slot and host allow at an address of a slot.
    fn largest_leaf(&self, at: At) -> u64 {
        let slot = &self.slots[&self.slot_at(at).expect("in a slot")];
        self.largest_up_to(slot.config.max_page_size.unwrap_or(u64::MAX), slot, at.1)
    }

    pub(super) fn largest_up_to(&self, max: u64, slot: &Slot, gpa: u64) -> u64 {
        let congruent = gpa ^ slot.hva(gpa);
        let max = max.min(self.host.unit);
        let sizes = self.shape.blocks.iter().rev().copied();
        let mut allowed = sizes.filter(|&size| {
            let range = block(gpa, size);
            let inside = slot.range().start().0 <= range.start && range.end <= slot.range().end().0;
            let kind = |at: u64| slot.page(at).private == slot.page(gpa).private;
            size <= max
                && congruent.is_multiple_of(size)
                && inside
                && (slot.config.private.is_none()
                    || range.step_by(self.shape.page as usize).all(kind))
        });
        allowed.next().unwrap_or(self.shape.page)
    }

    pub(super) fn look_up(&self, at: At) -> Result<(u64, bool), LookUpError> {
        let limit = Gpa(self.shape.limit);
        if Gpa(at.1) >= limit {
            return Err(LookUpError::OutOfRange { limit });
        }
        let page = self.page_at(at).filter(|page| page.least & READ != 0);
        let rights = page.ok_or(LookUpError::NotMapped)?.least;
        let place = self.place(at).expect("what is mapped has a place");
        Ok((place, rights & WRITE != 0))
    }

    pub(super) fn pre_fault(&mut self, space: u16, range: GpaRange) -> PreFault {
        let (granule, limit) = (self.shape.page, Gpa(self.shape.limit));
        let (start, end) = (range.start().0, range.end().0);
        let stop = |at, stopped| {
            let rest = GpaRange::new(Gpa(at), end - at);
            PreFault { done: at - start, rest, stopped }
        };
        if (start | end) % granule != 0 || range.end() > limit {
            return stop(start, Some(PreFaultError::Range { granule, limit }));
        }
        let Err((at, result)) = self.map_ahead(space, start..end, Access::Read) else {
            return stop(end, None);
        };
        stop(
            at,
            Some(match result {
                Ok(Exit::Mmio(_)) => PreFaultError::NoSlot,
                Ok(_) => PreFaultError::Busy,
                Err(error) => PreFaultError::Fault(error),
            }),
        )
    }

    /// Maps what nobody has used yet; otherwise, how the first page that cannot be mapped would have faulted.
    pub(super) fn map_ahead(
        &mut self,
        space: u16,
        range: std::ops::Range<u64>,
        access: Access,
    ) -> Result<(), (u64, Result<Exit, FaultError>)> {
        let mut gpa = range.start;
        while gpa < range.end {
            let result = self.fault((space, gpa), access, AHEAD);
            if result != Ok(Exit::Resume) {
                return Err((gpa, result));
            }
            gpa = block(gpa, self.wanted((space, gpa)).min(self.shape.blocks[0])).end;
        }
        Ok(())
    }
}
