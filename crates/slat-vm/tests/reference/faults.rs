//! Accesses and faults: what they do to pages, and what they answer.

use super::*;

impl Reference {
    pub(super) fn access(&mut self, gpa: u64, access: Access) -> Outcome {
        let page = self.page_at(gpa);
        let permitted = page.is_some_and(|page| page.least & right(access) != 0);
        // Also where it is permitted there can be a fault: a CPU need not know of a right that was added.
        let result = self.fault(gpa, access, !permitted, YOUNG);
        self.use_leaf(gpa);
        if result != Ok(Exit::Resume) {
            return Outcome::Exit(result);
        }
        let hva = self.slot_at(gpa).map_or(0, |id| self.slots[&id].hva(gpa));
        if access == Access::Write {
            self.stores += 1;
            self.contents.insert(hva, self.stores);
            self.mark_by_hardware(gpa);
        }
        Outcome::Value(self.contents.get(&hva).copied().unwrap_or(0))
    }

    /// The leaf that was written is dirty as a whole.
    pub(super) fn mark_by_hardware(&mut self, gpa: u64) {
        let around = block(gpa, self.reach());
        let written = gpa & !(self.shape.page - 1);
        let id = self.slot_at(gpa).expect("in a slot");
        let marks = self.shape.hardware_marks;
        let slot = self.slots.get_mut(&id).expect("found");
        let counts = slot.hardware_logs();
        for (at, page) in
            (slot.config.gpa.0..).step_by(self.shape.page as usize).zip(&mut slot.pages)
        {
            page.dirty |= counts && at == written;
            page.told |= marks && around.contains(&at) && page.most & READ != 0;
        }
    }

    /// A leaf that can be used becomes young as a whole.
    pub(super) fn use_leaf(&mut self, gpa: u64) {
        let Some(id) = self.slot_at(gpa) else { return };
        let around = block(gpa, self.reach());
        let slot = self.slots.get_mut(&id).expect("found");
        for (at, page) in
            (slot.config.gpa.0..).step_by(self.shape.page as usize).zip(&mut slot.pages)
        {
            if around.contains(&at) && page.most & READ != 0 {
                page.most |= YOUNG;
            }
        }
    }

    /// The largest block that there can be.
    pub(super) fn reach(&self) -> u64 {
        let blocks = self.shape.blocks.iter().rev();
        blocks.copied().find(|&size| size <= self.host.unit).unwrap_or(self.shape.page)
    }

    /// A fault that says of itself what it is.
    pub(super) fn reported(&mut self, fault: &Fault) -> Result<Exit, FaultError> {
        let mapped = self.page_at(fault.gpa.0).is_some_and(|page| page.least & READ != 0);
        if fault.kind == FaultKind::AccessFlag && mapped {
            // Nothing was wrong but the flag; what else is wrong will fault again.
            self.use_leaf(fault.gpa.0);
            return Ok(Exit::Resume);
        }
        let result = self.fault(fault.gpa.0, fault.access, true, YOUNG);
        if result == Ok(Exit::Resume) {
            self.use_leaf(fault.gpa.0);
        }
        result
    }

    /// Unless the fault is `certain`, it may be that there is none.
    pub(super) fn fault(
        &mut self,
        gpa: u64,
        access: Access,
        certain: bool,
        young: Rights,
    ) -> Result<Exit, FaultError> {
        let limit = Gpa(self.shape.limit);
        let (at, write) = (Gpa(gpa), access == Access::Write);
        if at >= limit {
            return Ok(Exit::Abort(Abort::AddressSize { limit }));
        }
        let mmio = |slot| Ok(Exit::Mmio(Mmio { gpa: at, access, slot }));
        let Some(id) = self.slot_at(gpa) else { return mmio(None) };
        let slot = &self.slots[&id];
        let (hva, read_only, logged) = (slot.hva(gpa), slot.config.read_only, slot.logs());
        let slot_marks = slot.hardware_logs();
        if write && read_only {
            return mmio(Some(ReadOnly { id: id.into(), hva: Hva(hva) }));
        }
        let answer = match self.host.page(hva, access) {
            Ok(answer) => answer,
            Err(HostError::Again) => return Ok(Exit::Retry),
            Err(error) => return Err(FaultError::Host { gpa: at, hva: Hva(hva), error }),
        };
        if answer.device && access == Access::Execute {
            return Ok(Exit::Abort(Abort::ExecuteDevice));
        }
        if self.taken_back(gpa, self.shape.page) {
            return Ok(Exit::Retry);
        }
        let protects = logged && !slot_marks;
        let writable = answer.writable && !read_only && (write || !protects);
        let executable =
            !answer.device && (access == Access::Execute || self.shape.coherent_instructions);
        let rights =
            READ | young | if writable { WRITE } else { 0 } | if executable { EXECUTE } else { 0 };
        // Hardware's log keeps its pages also when their slot has become read-only.
        let small = logged || slot.log == Some(LogMode::Hardware) || answer.device;
        let largest = if small { self.shape.page } else { self.largest_leaf(gpa) };
        let size = if self.taken_back(gpa, largest) { self.shape.page } else { largest };
        self.map(gpa, size, rights, certain);
        if protects && write {
            self.page_at_mut(gpa).expect("in a slot").dirty = true;
        }
        Ok(Exit::Resume)
    }

    /// What a fault at `gpa` does to the pages of a leaf.
    pub(super) fn map(&mut self, gpa: u64, size: u64, rights: Rights, certain: bool) {
        let page = self.shape.page;
        let largest = *self.shape.blocks.last().expect("there are blocks");
        // Tables that are left of what was there can be in the way of all but the smallest blocks.
        let fresh = self.used.insert(gpa / largest);
        if size == page {
            let page = self.page_at_mut(gpa).expect("in a slot");
            page.most |= rights;
            page.least |= if certain { rights } else { 0 };
            return;
        }
        let sure = if fresh { size } else { self.shape.blocks[0] };
        for at in block(gpa, size).step_by(page as usize) {
            let found = self.page_at_mut(at).expect("leaves lie in slots");
            found.most |= rights;
            // Smaller leaves that were there lose what the fault did not ask for.
            let fixed = certain && block(gpa, sure).contains(&at);
            found.least = if fixed { rights } else { found.least & rights };
        }
    }

    /// The largest leaf that slot and host allow at an address of a slot.
    pub(super) fn largest_leaf(&self, gpa: u64) -> u64 {
        let slot = &self.slots[&self.slot_at(gpa).expect("in a slot")];
        self.largest_up_to(slot.config.max_page_size.unwrap_or(u64::MAX), slot, gpa)
    }

    pub(super) fn largest_up_to(&self, max: u64, slot: &Slot, gpa: u64) -> u64 {
        let congruent = gpa ^ slot.hva(gpa);
        let max = max.min(self.host.unit);
        let sizes = self.shape.blocks.iter().rev().copied();
        let mut allowed = sizes.filter(|&size| {
            let range = block(gpa, size);
            let inside = slot.range().start().0 <= range.start && range.end <= slot.range().end().0;
            size <= max && congruent.is_multiple_of(size) && inside
        });
        allowed.next().unwrap_or(self.shape.page)
    }

    pub(super) fn look_up(&self, gpa: u64) -> Result<(u64, bool), LookUpError> {
        let limit = Gpa(self.shape.limit);
        if Gpa(gpa) >= limit {
            return Err(LookUpError::OutOfRange { limit });
        }
        let page = self.page_at(gpa).filter(|page| page.least & READ != 0);
        let rights = page.ok_or(LookUpError::NotMapped)?.least;
        let place = self.place(gpa).expect("what is mapped has a place");
        Ok((place, rights & WRITE != 0))
    }

    pub(super) fn pre_fault(&mut self, range: GpaRange) -> PreFault {
        let (granule, limit) = (self.shape.page, Gpa(self.shape.limit));
        let (start, end) = (range.start().0, range.end().0);
        let stop = |at, stopped| {
            let rest = GpaRange::new(Gpa(at), end - at);
            PreFault { done: at - start, rest, stopped }
        };
        if (start | end) % granule != 0 || range.end() > limit {
            return stop(start, Some(PreFaultError::Range { granule, limit }));
        }
        // Nobody has used the page yet.
        let young = if self.shape.hardware_marks { 0 } else { YOUNG };
        for at in (start..end).step_by(granule as usize) {
            match self.fault(at, Access::Read, true, young) {
                Ok(Exit::Resume) => {}
                Ok(Exit::Mmio(_)) => return stop(at, Some(PreFaultError::NoSlot)),
                Ok(_) => return stop(at, Some(PreFaultError::Busy)),
                Err(error) => return stop(at, Some(PreFaultError::Fault(error))),
            }
        }
        stop(end, None)
    }
}
