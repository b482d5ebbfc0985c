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

    pub(crate) fn slot_at(&self, gpa: u64) -> Option<u32> {
        let mut slots = self.slots.iter();
        slots.find(|(_, slot)| slot.range().contains(Gpa(gpa))).map(|(&id, _)| id)
    }

    // Faults.

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
