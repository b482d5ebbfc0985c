//! What guest memory must do, told as plainly as possible: maps and bitmaps; no tables, no CPUs, nothing at once.
//!
//! [`Reference::apply`] says what an operation returns. What a page permits lies between two bounds: what is promised
//! (`least`) and what is allowed (`most`). Most promises are exact. Where one leaves a choice (how much of a block an
//! invalidation takes along), [`Reference::adopt`] takes what was found for a fact from then on, if it lies between.
#![allow(dead_code, reason = "each program that includes this uses some of it")]

mod faults;
pub(crate) mod host;
pub(crate) mod judge;
mod logs;
mod memslots;
pub(crate) mod operation;

use std::collections::{BTreeMap, BTreeSet};

use slat::{Gpa, GpaRange};
use slat_vm::{
    Abort, Access, Exit, Fault, FaultError, FaultKind, HostError, Hva, InvalidateError, LogError,
    LogMode, LookUpError, Mmio, PreFault, PreFaultError, PrivateError, ReadOnly, SlotChange,
    SlotConfig, SlotError, SlotId,
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

/// An address space, and an address of it.
pub(crate) type At = (u16, u64);

/// The sizes of leaves, and where guest addresses end.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    /// Address spaces.
    pub(crate) spaces: u16,
    pub(crate) page: u64,
    /// Smallest first.
    pub(crate) blocks: Vec<u64>,
    pub(crate) limit: u64,
    /// Every page that can be read can be executed.
    pub(crate) coherent_instructions: bool,
    /// Hardware marks leaves young.
    pub(crate) hardware_ages: bool,
    /// Hardware marks leaves dirty, for a log.
    pub(crate) hardware_marks: bool,
    /// The window that is mapped with a page of it.
    pub(crate) around: u64,
}

/// One page of a slot.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Page {
    pub(crate) least: Rights,
    pub(crate) most: Rights,
    /// Its bit in the log, or that a dirty ring has it.
    pub(crate) dirty: bool,
    /// Its bit in the backup of the dirty rings.
    pub(crate) backup: bool,
    /// Its bit in the monitor's bitmap.
    pub(crate) monitored: bool,
    /// Whether the slot's private memory is behind it.
    pub(crate) private: bool,
    /// Whether it may be told with another page of its leaf, where hardware marks them.
    pub(crate) told: bool,
}

#[derive(Clone, Debug)]
pub(crate) struct Slot {
    pub(crate) config: SlotConfig,
    pub(crate) log: Option<LogMode>,
    /// Whether there is a bitmap of the monitor's.
    pub(crate) monitor: bool,
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
    Converted(Result<(), PrivateError>),
    /// How many leaves were young.
    Aged(u64),
    /// Of each range, whether it is being taken back.
    Begun(Vec<Result<(), InvalidateError>>),
    /// The pages in all dirty rings.
    Harvested(BTreeSet<(SlotId, u64)>),
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
    pub(crate) space: u16,
    pub(crate) gpa: u64,
    pub(crate) size: u64,
    pub(crate) place: u64,
    pub(crate) rights: Rights,
}

/// What an invalidation takes back, or aging asks for: guest addresses of every space, or whatever shows some of the
/// host's.
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
    pub(crate) slots: BTreeMap<SlotId, Slot>,
    /// The ranges of each invalidation in progress, the oldest first.
    pub(crate) invalidations: Vec<Vec<Taken>>,
    /// What the guest has stored, by host address, and how often it did.
    pub(crate) contents: BTreeMap<u64, u64>,
    pub(crate) stores: u64,
    /// What rings still hold of logs that have ended.
    left: BTreeSet<(SlotId, u64)>,
    /// Beside what the last collection had to return, what it could.
    may: Vec<u64>,
    /// The leaves that were found last.
    leaves: Vec<Leaf>,
    /// Where leaves have been, in units of the largest block.
    used: BTreeSet<At>,
}

impl Taken {
    /// All of the granules that some of it lies in.
    fn whole(self, shape: &Shape) -> Self {
        let start = |start: u64| start / shape.page * shape.page;
        let end = |end: u64| end.next_multiple_of(shape.page);
        match self {
            Self::Guest(from, to) => Self::Guest(start(from), end(to.min(shape.limit))),
            Self::Host(from, to) => Self::Host(start(from), end(to)),
        }
    }
}

impl Slot {
    pub(crate) fn range(&self) -> GpaRange {
        GpaRange::new(self.config.gpa, self.config.size).expect("checked when it was created")
    }

    fn page(&self, gpa: u64) -> &Page {
        let page = self.config.size / self.pages.len() as u64;
        &self.pages[((gpa - self.config.gpa.0) / page) as usize]
    }

    /// Where memory of the kind that an address of the slot has begins in the host.
    fn base(&self, gpa: u64) -> u64 {
        let private = self.config.private.filter(|_| self.page(gpa).private);
        private.unwrap_or(self.config.hva).0
    }

    /// The host address behind an address of the slot.
    pub(crate) fn hva(&self, gpa: u64) -> u64 {
        self.base(gpa) + (gpa - self.config.gpa.0)
    }

    /// Whether a leaf of some size at an address of the slot, and of its kind, would map some of what is taken.
    fn shows(&self, gpa: u64, size: u64, taken: Taken) -> bool {
        let range = block(gpa, size);
        match taken {
            Taken::Guest(start, end) => start < range.end && range.start < end,
            Taken::Host(start, end) => {
                // May lie outside of the slot, on either side.
                let hva = |at: u64| {
                    i128::from(at) - i128::from(self.config.gpa.0) + i128::from(self.base(gpa))
                };
                i128::from(start) < hva(range.end) && hva(range.start) < i128::from(end)
            }
        }
    }

    /// Nothing that shows some of what is taken is left, and of leaves that can reach so far perhaps nothing.
    fn lose(&mut self, taken: Taken, page: u64, reach: u64) {
        for number in 0..self.pages.len() {
            let gpa = self.config.gpa.0 + number as u64 * page;
            let (all, some) = (self.shows(gpa, page, taken), self.shows(gpa, reach, taken));
            let found = &mut self.pages[number];
            if all {
                (found.least, found.most) = (0, 0);
            } else if some && !self.config.pinned {
                found.least = 0;
            }
        }
    }

    fn logs(&self) -> bool {
        self.log.is_some() && !self.config.read_only
    }

    fn hardware_logs(&self) -> bool {
        self.logs() && self.log == Some(LogMode::Hardware)
    }

    /// Whether a page that was not written must not be writable.
    fn protects(&self) -> bool {
        self.logs() && !self.hardware_logs()
    }

    fn protect(&mut self, which: impl Fn(usize, &Page) -> bool) {
        for (number, page) in self.pages.iter_mut().enumerate() {
            if which(number, page) {
                page.protect();
            }
        }
    }
}

impl Page {
    /// The next write is noticed.
    fn protect(&mut self) {
        (self.least, self.most, self.dirty) = (self.least & !WRITE, self.most & !WRITE, false);
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
            &Operation::Access { at, access, .. } => self.access(at, access),
            Operation::Fault { space, fault, private, .. } => {
                Outcome::Exit(self.reported(*space, fault, *private))
            }
            &Operation::LookUp { at } => Outcome::Found(self.look_up(at)),
            &Operation::Create { id, config } => Outcome::Slot(self.create(id, config)),
            &Operation::Change { id, config } => Outcome::Changed(self.change(id, config)),
            &Operation::Delete { id } => {
                self.end_log(id);
                Outcome::Slot(self.slots.remove(&id).map(|_| ()).ok_or(SlotError::NotFound))
            }
            &Operation::Convert { id, range, private } => {
                Outcome::Converted(self.convert(id, range, private))
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
            &Operation::Emulate { at, .. } => Outcome::Log(self.emulate(at)),
            &Operation::Mark { space, range } => Outcome::Log(self.mark(space, range)),
            &Operation::Attach { id, pages } => Outcome::Log(self.attach(id, pages)),
            &Operation::Monitor { id, offset, bytes } => {
                self.monitor(id, offset, bytes);
                Outcome::Done
            }
            Operation::Split { .. } => Outcome::Split(true),
            &Operation::Collapse { id } => Outcome::Collapsed(self.collapse(id)),
            Operation::Trim { .. } => Outcome::Done,
            &Operation::PreFault { space, range, .. } => {
                Outcome::PreFaulted(self.pre_fault(space, range))
            }
            &Operation::Age { range, clear } => Outcome::Aged(self.age(range, clear)),
            Operation::Begin { ranges } => Outcome::Begun(self.begin(ranges)),
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

    pub(crate) fn slot_at(&self, (space, gpa): At) -> Option<SlotId> {
        let mut slots = self.slots.iter().filter(|(id, _)| id.space == space);
        slots.find(|(_, slot)| slot.range().contains(Gpa(gpa))).map(|(&id, _)| id)
    }

    // Faults.

    fn collapse(&mut self, id: SlotId) -> Result<(), LogError> {
        let slot = self.slots.get_mut(&id).ok_or(LogError::NoSlot)?;
        if slot.log.is_some() {
            return Err(LogError::Enabled);
        }
        if slot.config.pinned || slot.config.private.is_some() {
            return Ok(());
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

    fn age(&mut self, range: Taken, clear: bool) -> u64 {
        let range = range.whole(&self.shape);
        let is_young = |leaf: &&Leaf| {
            let id = self.slot_at((leaf.space, leaf.gpa)).expect("leaves lie in slots");
            leaf.rights & YOUNG != 0 && self.slots[&id].shows(leaf.gpa, leaf.size, range)
        };
        let young: Vec<_> = self.leaves.iter().filter(is_young).copied().collect();
        for leaf in young.iter().filter(|_| clear) {
            for gpa in (leaf.gpa..leaf.gpa + leaf.size).step_by(self.shape.page as usize) {
                let page = self.page_at_mut((leaf.space, gpa)).expect("leaves lie in slots");
                (page.least, page.most) = (page.least & !YOUNG, page.most & !YOUNG);
            }
        }
        young.len() as u64
    }

    // The log.

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

    /// Each by itself, unless some of it is pinned.
    fn begin(&mut self, ranges: &[Taken]) -> Vec<Result<(), InvalidateError>> {
        let (page, reach) = (self.shape.page, self.reach());
        let mut begun = Vec::new();
        let mut begin = |range: &Taken| {
            let taken = range.whole(&self.shape);
            let mut all: Vec<_> = self.slots.iter_mut().collect();
            all.sort_by_key(|(id, slot)| (id.space, slot.config.gpa));
            let pinned = all.iter().find(|(_, slot)| {
                let mut pages = (0..slot.config.size).step_by(page as usize);
                slot.config.pinned
                    && pages.any(|at| slot.shows(slot.config.gpa.0 + at, page, taken))
            });
            if let Some(&(&slot, _)) = pinned {
                return Err(InvalidateError::Pinned { slot });
            }
            all.into_iter().for_each(|(_, slot)| slot.lose(taken, page, reach));
            begun.push(taken);
            Ok(())
        };
        let results = ranges.iter().map(&mut begin).collect();
        self.invalidations.push(begun);
        results
    }

    /// Whether something of what a leaf at an address of a slot would map is taken back.
    fn taken_back(&self, at: At, size: u64) -> bool {
        let slot = &self.slots[&self.slot_at(at).expect("in a slot")];
        self.invalidations.iter().flatten().any(|&taken| slot.shows(at.1, size, taken))
    }

    /// Whether every guest page that shows the unit of host memory is taken back.
    pub(crate) fn may_change(&self, unit: usize) -> bool {
        let shown = self.host.range(unit);
        self.slots.iter().all(|(id, slot)| {
            let pages =
                (slot.range().start().0..slot.range().end().0).step_by(self.shape.page as usize);
            let mut shows = pages.filter(|&gpa| shown.contains(&slot.hva(gpa)));
            shows.all(|gpa| self.taken_back((id.space, gpa), self.shape.page))
        })
    }

    /// Where the byte at an address lies, if it is memory now.
    pub(crate) fn place(&self, at: At) -> Option<u64> {
        let hva = self.slots[&self.slot_at(at)?].hva(at.1);
        self.host.place(hva)
    }

    // What the tables must say.

    fn page_at(&self, at: At) -> Option<&Page> {
        Some(self.slots[&self.slot_at(at)?].page(at.1))
    }

    fn page_at_mut(&mut self, at: At) -> Option<&mut Page> {
        let slot = self.slots.get_mut(&self.slot_at(at)?)?;
        slot.pages.get_mut(((at.1 - slot.config.gpa.0) / self.shape.page) as usize)
    }

    /// Compares all leaves, in order, with what is promised and allowed, and takes them for the facts.
    pub(crate) fn adopt(&mut self, leaves: &[Leaf]) -> Result<(), String> {
        let page_size = self.shape.page;
        for leaf in leaves {
            let slot = self.slot_at((leaf.space, leaf.gpa)).map(|id| &self.slots[&id]);
            let largest = slot.map(|slot| self.largest_up_to(slot.max_leaf, slot, leaf.gpa));
            if largest.is_none_or(|largest| leaf.size > largest) {
                return Err(format!("{leaf:x?} must not be there"));
            }
        }
        for (id, slot) in &mut self.slots {
            let protects = slot.protects();
            let start = (id.space, slot.config.gpa.0);
            let before = |leaf: &Leaf| (leaf.space, leaf.gpa + leaf.size) <= start;
            let mut rest = leaves[leaves.partition_point(before)..].iter().peekable();
            for number in 0..slot.pages.len() {
                let gpa = slot.config.gpa.0 + number as u64 * page_size;
                while rest
                    .next_if(|leaf| leaf.space == id.space && leaf.gpa + leaf.size <= gpa)
                    .is_some()
                {}
                let leaf = rest.peek().filter(|leaf| leaf.space == id.space && leaf.gpa <= gpa);
                let expected = self.host.place(slot.hva(gpa));
                let page = &mut slot.pages[number];
                let rights = leaf.map_or(0, |leaf| leaf.rights);
                let bounded = page.least & !rights == 0 && rights & !page.most == 0;
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
