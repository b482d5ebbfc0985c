//! What guest memory must do, told as plainly as possible: maps and bitmaps; no tables, no CPUs, nothing at once.
//!
//! [`Reference::apply`] says what an operation returns. What a page permits lies between two bounds: what is promised
//! (`least`) and what is allowed (`most`). Most promises are exact. Where one leaves a choice (how much of a block an
//! invalidation takes along), [`Reference::adopt`] takes what was found for a fact from then on, if it lies between.
#![allow(dead_code, reason = "each program that includes this uses some of it")]

pub(crate) mod host;
pub(crate) mod judge;
pub(crate) mod operation;

use std::collections::{BTreeMap, BTreeSet};

use slat::{Gpa, GpaRange};
use slat_vm::{
    Abort, Access, Exit, Fault, FaultError, FaultKind, HostError, Hva, LogError, LogMode,
    LookUpError, Mmio, PreFault, PreFaultError, ReadOnly, SlotChange, SlotConfig, SlotError,
};

use host::Answers;
use operation::Operation;

/// What a guest may do with a page, any of the first three below, and whether it has.
pub(crate) type Rights = u8;
pub(crate) const READ: Rights = 1;
pub(crate) const WRITE: Rights = 2;
pub(crate) const EXECUTE: Rights = 4;
/// Not a right but the mark that one was used.
pub(crate) const YOUNG: Rights = 8;

/// The sizes of leaves, and where guest addresses end.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    pub(crate) page: u64,
    /// Smallest first.
    pub(crate) blocks: Vec<u64>,
    pub(crate) limit: u64,
    /// Every page that can be read can be executed.
    pub(crate) coherent_instructions: bool,
    /// Hardware marks leaves young and dirty.
    pub(crate) hardware_marks: bool,
}

/// One page of a slot.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Page {
    pub(crate) least: Rights,
    pub(crate) most: Rights,
    /// Its bit in the log, or that a dirty ring has it.
    pub(crate) dirty: bool,
    /// Whether it may be told with another page of its leaf, where hardware marks them.
    pub(crate) told: bool,
}

#[derive(Clone, Debug)]
pub(crate) struct Slot {
    pub(crate) config: SlotConfig,
    pub(crate) log: Option<LogMode>,
    pub(crate) pages: Vec<Page>,
    /// The largest leaf that it ever admitted: what is there stays when it admits less.
    pub(crate) max_leaf: u64,
}

/// What an operation returned. Places are offsets into the memory that backs the guest.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Outcome {
    Done,
    Slot(Result<(), SlotError>),
    Log(Result<(), LogError>),
    Collected(Result<u64, LogError>, Vec<u64>),
    Cleared(Result<u64, LogError>),
    Split(bool),
    Changed(Result<SlotChange, SlotError>),
    Collapsed(Result<(), LogError>),
    PreFaulted(PreFault),
    /// How many leaves were young.
    Aged(u64),
    /// The pages in all dirty rings.
    Harvested(BTreeSet<(u32, u64)>),
    /// The access went through: what was loaded or stored.
    Value(u64),
    /// It did not, or nobody made one.
    Exit(Result<Exit, FaultError>),
    /// Place, and whether the guest may write.
    Found(Result<(u64, bool), LookUpError>),
}

/// A leaf that the tables were found to have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Leaf {
    pub(crate) gpa: u64,
    pub(crate) size: u64,
    pub(crate) place: u64,
    pub(crate) rights: Rights,
}

/// What an invalidation takes back: guest addresses, or whatever shows some of the host's.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Taken {
    Guest(u64, u64),
    Host(u64, u64),
}

/// Guest memory as it must be.
#[derive(Clone, Debug)]
pub(crate) struct Reference {
    pub(crate) shape: Shape,
    pub(crate) host: Answers,
    pub(crate) slots: BTreeMap<u32, Slot>,
    /// The ranges of each invalidation in progress, the oldest first.
    pub(crate) invalidations: Vec<Vec<Taken>>,
    /// What the guest has stored, by host address, and how often it did.
    pub(crate) contents: BTreeMap<u64, u64>,
    pub(crate) stores: u64,
    /// What rings still hold of logs that have ended.
    left: BTreeSet<(u32, u64)>,
    /// Beside what the last collection had to return, what it could.
    may: Vec<u64>,
    /// The leaves that were found last.
    leaves: Vec<Leaf>,
    /// Where leaves have been, in units of the largest block.
    used: BTreeSet<u64>,
}

impl Taken {
    /// Whether some of the addresses of a slot are meant.
    fn overlaps(self, range: std::ops::Range<u64>, config: SlotConfig) -> bool {
        match self {
            Self::Guest(start, end) => start < range.end && range.start < end,
            Self::Host(start, end) => {
                // May lie outside of the slot, on either side.
                let hva = |gpa: u64| {
                    i128::from(gpa) - i128::from(config.gpa.0) + i128::from(config.hva.0)
                };
                i128::from(start) < hva(range.end) && hva(range.start) < i128::from(end)
            }
        }
    }
}

impl Slot {
    pub(crate) fn range(&self) -> GpaRange {
        GpaRange::new(self.config.gpa, self.config.size).expect("checked when it was created")
    }

    /// The host address behind an address of the slot.
    pub(crate) fn hva(&self, gpa: u64) -> u64 {
        self.config.hva.0 + (gpa - self.config.gpa.0)
    }

    fn logs(&self) -> bool {
        self.log.is_some() && !self.config.read_only
    }

    fn hardware_logs(&self) -> bool {
        self.logs() && self.log == Some(LogMode::Hardware)
    }

    fn protect(&mut self, which: impl Fn(usize, &Page) -> bool) {
        for (number, page) in self.pages.iter_mut().enumerate() {
            if which(number, page) {
                (page.least, page.most, page.dirty) =
                    (page.least & !WRITE, page.most & !WRITE, false);
            }
        }
    }
}

impl Reference {
    pub(crate) fn new(shape: Shape, host: Answers) -> Self {
        Self {
            shape,
            host,
            slots: BTreeMap::new(),
            invalidations: Vec::new(),
            contents: BTreeMap::new(),
            stores: 0,
            left: BTreeSet::new(),
            may: Vec::new(),
            leaves: Vec::new(),
            used: BTreeSet::new(),
        }
    }

    /// What the operation returns.
    pub(crate) fn apply(&mut self, operation: &Operation) -> Outcome {
        match operation {
            &Operation::Access { gpa, access, .. } => self.access(gpa, access),
            Operation::Fault { fault, .. } => Outcome::Exit(self.reported(fault)),
            &Operation::LookUp { gpa } => Outcome::Found(self.look_up(gpa)),
            &Operation::Create { id, config } => Outcome::Slot(self.create(id, config)),
            &Operation::Change { id, config } => Outcome::Changed(self.change(id, config)),
            &Operation::Delete { id } => {
                self.end_log(id);
                Outcome::Slot(self.slots.remove(&id).map(|_| ()).ok_or(SlotError::NotFound))
            }
            &Operation::Enable { id, mode } => Outcome::Log(self.enable(id, mode)),
            &Operation::Disable { id } => {
                let logged = self.logged(id).map(|_| ());
                self.end_log(id);
                Outcome::Log(logged)
            }
            Operation::Rings => Outcome::Harvested(self.reset_rings()),
            &Operation::Collect { id, words } => {
                let mut bitmap = vec![0; words];
                Outcome::Collected(self.collect(id, &mut bitmap), bitmap)
            }
            Operation::Clear { id, first, pages, bitmap } => {
                Outcome::Cleared(self.clear(*id, *first, *pages, bitmap))
            }
            Operation::Split { .. } => Outcome::Split(true),
            &Operation::Collapse { id } => Outcome::Collapsed(self.collapse(id)),
            Operation::Trim { .. } => Outcome::Done,
            &Operation::PreFault { range, .. } => Outcome::PreFaulted(self.pre_fault(range)),
            &Operation::Age { range, clear } => Outcome::Aged(self.age(range, clear)),
            Operation::Begin { ranges } => self.begin(ranges),
            &Operation::Back { unit, answer } => {
                if self.may_change(unit) {
                    self.host.change(unit, answer);
                }
                Outcome::Done
            }
            &Operation::End { invalidation } => {
                if invalidation < self.invalidations.len() {
                    self.invalidations.remove(invalidation);
                }
                Outcome::Done
            }
        }
    }

    // Slots.

    fn check(&self, config: &SlotConfig) -> Result<GpaRange, SlotError> {
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
    fn check_overlap(&self, id: u32, range: GpaRange) -> Result<(), SlotError> {
        let others = self.slots.iter().filter(|&(&other, _)| other != id);
        let overlapping = others.filter(|(_, slot)| slot.range().overlaps(&range));
        match overlapping.min_by_key(|(_, slot)| slot.config.gpa) {
            Some((&other, _)) => Err(SlotError::Overlaps { other: other.into() }),
            None => Ok(()),
        }
    }

    fn create(&mut self, id: u32, config: SlotConfig) -> Result<(), SlotError> {
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

    fn change(&mut self, id: u32, config: SlotConfig) -> Result<SlotChange, SlotError> {
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

    pub(crate) fn slot_at(&self, gpa: u64) -> Option<u32> {
        let mut slots = self.slots.iter();
        slots.find(|(_, slot)| slot.range().contains(Gpa(gpa))).map(|(&id, _)| id)
    }

    // Faults.

    fn access(&mut self, gpa: u64, access: Access) -> Outcome {
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
    fn mark_by_hardware(&mut self, gpa: u64) {
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
    fn use_leaf(&mut self, gpa: u64) {
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
    fn reach(&self) -> u64 {
        let blocks = self.shape.blocks.iter().rev();
        blocks.copied().find(|&size| size <= self.host.unit).unwrap_or(self.shape.page)
    }

    /// A fault that says of itself what it is.
    fn reported(&mut self, fault: &Fault) -> Result<Exit, FaultError> {
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
    fn fault(
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
    fn map(&mut self, gpa: u64, size: u64, rights: Rights, certain: bool) {
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
    fn largest_leaf(&self, gpa: u64) -> u64 {
        let slot = &self.slots[&self.slot_at(gpa).expect("in a slot")];
        self.largest_up_to(slot.config.max_page_size.unwrap_or(u64::MAX), slot, gpa)
    }

    fn largest_up_to(&self, max: u64, slot: &Slot, gpa: u64) -> u64 {
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

    fn look_up(&self, gpa: u64) -> Result<(u64, bool), LookUpError> {
        let limit = Gpa(self.shape.limit);
        if Gpa(gpa) >= limit {
            return Err(LookUpError::OutOfRange { limit });
        }
        let page = self.page_at(gpa).filter(|page| page.least & READ != 0);
        let rights = page.ok_or(LookUpError::NotMapped)?.least;
        let place = self.place(gpa).expect("what is mapped has a place");
        Ok((place, rights & WRITE != 0))
    }

    fn pre_fault(&mut self, range: GpaRange) -> PreFault {
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

    fn collapse(&mut self, id: u32) -> Result<(), LogError> {
        let slot = self.slots.get_mut(&id).ok_or(LogError::NoSlot)?;
        if slot.log.is_some() {
            return Err(LogError::Enabled);
        }
        for (number, page) in slot.pages.iter_mut().enumerate() {
            let hva = slot.config.hva.0 + number as u64 * self.shape.page;
            let answer = self.host.page(hva, Access::Write);
            let writable = answer.is_ok_and(|answer| !answer.device) && !slot.config.read_only;
            if page.most & READ != 0 {
                page.most |= YOUNG | if writable { WRITE } else { 0 };
                // A block permits what all of its pages did.
                page.least &= !EXECUTE;
            }
        }
        Ok(())
    }

    fn age(&mut self, range: GpaRange, clear: bool) -> u64 {
        let Shape { page, limit, .. } = self.shape;
        let start = range.start().0 / page * page;
        let end = range.end().0.min(limit).next_multiple_of(page);
        let inside = |leaf: &&Leaf| leaf.gpa < end && start < leaf.gpa + leaf.size;
        let young: Vec<_> = self.leaves.iter().filter(inside).copied().collect();
        let young: Vec<_> = young.into_iter().filter(|leaf| leaf.rights & YOUNG != 0).collect();
        if clear {
            for leaf in &young {
                for at in (leaf.gpa..leaf.gpa + leaf.size).step_by(page as usize) {
                    let page = self.page_at_mut(at).expect("leaves lie in slots");
                    (page.least, page.most) = (page.least & !YOUNG, page.most & !YOUNG);
                }
            }
        }
        young.len() as u64
    }

    // The log.

    /// What a ring holds of a log that ends stays in the ring.
    fn end_log(&mut self, id: u32) {
        let Some(slot) = self.slots.get_mut(&id) else { return };
        if let Some(LogMode::Ring { .. }) = slot.log.take() {
            let dirty = (0..).zip(&slot.pages).filter(|(_, page)| page.dirty);
            self.left.extend(dirty.map(|(number, _)| (id, number)));
        }
        slot.pages.iter_mut().for_each(|page| page.dirty = false);
    }

    fn reset_rings(&mut self) -> BTreeSet<(u32, u64)> {
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

    fn enable(&mut self, id: u32, mode: LogMode) -> Result<(), LogError> {
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

    fn logged(&mut self, id: u32) -> Result<&mut Slot, LogError> {
        let slot = self.slots.get_mut(&id).ok_or(LogError::NoSlot)?;
        if slot.log.is_some() { Ok(slot) } else { Err(LogError::NotEnabled) }
    }

    fn collect(&mut self, id: u32, bitmap: &mut [u64]) -> Result<u64, LogError> {
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

    /// Whether an operation that had to return `expected` could return `outcome`.
    pub(crate) fn admits(&self, expected: &Outcome, outcome: &Outcome) -> bool {
        let (Outcome::Collected(Ok(_), must), Outcome::Collected(Ok(count), bitmap)) =
            (expected, outcome)
        else {
            return expected == outcome;
        };
        let ones = bitmap.iter().map(|word| u64::from(word.count_ones())).sum::<u64>();
        let all = must.iter().zip(bitmap).all(|(must, bits)| must & !bits == 0);
        let none = bitmap.iter().zip(&self.may).all(|(bits, may)| bits & !may == 0);
        ones == *count && must.len() == bitmap.len() && all && none
    }

    fn clear(&mut self, id: u32, first: u64, pages: u64, mask: &[u64]) -> Result<u64, LogError> {
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

    fn begin(&mut self, ranges: &[Taken]) -> Outcome {
        let page = self.shape.page;
        let whole = |start: u64, end: u64| (start / page * page, end.next_multiple_of(page));
        let begun = ranges.iter().map(|&range| match range {
            Taken::Guest(start, end) => {
                let (start, end) = whole(start, end.min(self.shape.limit));
                Taken::Guest(start, end)
            }
            Taken::Host(start, end) => {
                let (start, end) = whole(start, end);
                Taken::Host(start, end)
            }
        });
        let begun: Vec<_> = begun.collect();
        // A block that reaches beyond goes as a whole, so the pages beside the range are not certain.
        let reach = self.reach();
        for slot in self.slots.values_mut() {
            let config = slot.config;
            let hit = |range: std::ops::Range<u64>| {
                begun.iter().any(|taken| taken.overlaps(range.clone(), config))
            };
            for (number, found) in slot.pages.iter_mut().enumerate() {
                let at = config.gpa.0 + number as u64 * page;
                if hit(at..at + page) {
                    (found.least, found.most) = (0, 0);
                } else if hit(block(at, reach)) {
                    found.least = 0;
                }
            }
        }
        self.invalidations.push(begun);
        Outcome::Done
    }

    /// Whether something of what a leaf at an address of a slot would map is taken back.
    fn taken_back(&self, gpa: u64, size: u64) -> bool {
        let config = self.slots[&self.slot_at(gpa).expect("in a slot")].config;
        let mut ranges = self.invalidations.iter().flatten();
        ranges.any(|range| range.overlaps(block(gpa, size), config))
    }

    /// Whether every guest page that shows the unit of host memory is taken back.
    pub(crate) fn may_change(&self, unit: usize) -> bool {
        let shown = self.host.range(unit);
        self.slots.values().all(|slot| {
            let pages =
                (slot.range().start().0..slot.range().end().0).step_by(self.shape.page as usize);
            let mut shows = pages.filter(|&gpa| shown.contains(&slot.hva(gpa)));
            shows.all(|gpa| self.taken_back(gpa, self.shape.page))
        })
    }

    /// Where the byte at `gpa` lies, if it is memory now.
    pub(crate) fn place(&self, gpa: u64) -> Option<u64> {
        let hva = self.slots[&self.slot_at(gpa)?].hva(gpa);
        self.host.place(hva)
    }

    // What the tables must say.

    fn page_at(&self, gpa: u64) -> Option<&Page> {
        let slot = &self.slots[&self.slot_at(gpa)?];
        slot.pages.get(((gpa - slot.config.gpa.0) / self.shape.page) as usize)
    }

    fn page_at_mut(&mut self, gpa: u64) -> Option<&mut Page> {
        let slot = self.slots.get_mut(&self.slot_at(gpa)?)?;
        slot.pages.get_mut(((gpa - slot.config.gpa.0) / self.shape.page) as usize)
    }

    /// Compares all leaves, in order, with what is promised and allowed, and takes them for the facts.
    pub(crate) fn adopt(&mut self, leaves: &[Leaf]) -> Result<(), String> {
        let page_size = self.shape.page;
        let leaf_of = |gpa: u64| {
            let after = leaves.partition_point(|leaf| leaf.gpa <= gpa);
            leaves[..after].last().filter(|leaf| gpa - leaf.gpa < leaf.size)
        };
        for leaf in leaves {
            let slot = self.slot_at(leaf.gpa).map(|id| &self.slots[&id]);
            let largest = slot.map(|slot| self.largest_up_to(slot.max_leaf, slot, leaf.gpa));
            if largest.is_none_or(|largest| leaf.size > largest) {
                return Err(format!("{leaf:x?} must not be there"));
            }
        }
        for slot in self.slots.values_mut() {
            let (config, protects) = (slot.config, slot.logs() && !slot.hardware_logs());
            for (number, page) in slot.pages.iter_mut().enumerate() {
                let gpa = config.gpa.0 + number as u64 * page_size;
                let leaf = leaf_of(gpa);
                let rights = leaf.map_or(0, |leaf| leaf.rights);
                let bounded = page.least & !rights == 0 && rights & !page.most == 0;
                let expected = self.host.place(config.hva.0 + (gpa - config.gpa.0));
                let placed =
                    leaf.is_none_or(|leaf| expected == Some(leaf.place + (gpa - leaf.gpa)));
                let noticed = !protects || page.dirty || rights & WRITE == 0;
                if !bounded || !placed || !noticed {
                    return Err(format!("{gpa:#x} must be {page:?} at {expected:x?}: {leaf:x?}"));
                }
                (page.least, page.most) = (rights, rights);
            }
        }
        self.leaves.clear();
        self.leaves.extend(leaves);
        Ok(())
    }
}

pub(crate) fn right(access: Access) -> Rights {
    match access {
        Access::Read => READ,
        Access::Write => WRITE,
        Access::Execute => EXECUTE,
    }
}

/// The aligned block of a size around an address.
pub(crate) fn block(at: u64, size: u64) -> std::ops::Range<u64> {
    let start = at & !(size - 1);
    start..start + size
}
