//! What can be done to guest memory, and how a stream of numbers chooses among it.

use slat::{Gpa, GpaRange};
use slat_model::Backing;
use slat_vm::{Access, Fault, FaultKind, HostError, Hva, LogMode, SlotConfig, SlotId};

use super::host::Answer;
use super::{At, Reference, Slot, Taken};

/// CPUs, each with a vCPU.
pub(crate) const CPUS: usize = 2;
/// Numbers that the slots of an address space can have.
const SLOTS: u64 = 4;
/// Invalidations in progress at once.
const INVALIDATIONS: usize = 4;

/// One operation.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Operation {
    /// A guest's access, with its faults handled.
    Access { cpu: usize, at: At, access: Access },
    /// A fault that no CPU has taken, and what hardware says that its page is taken for.
    Fault { cpu: usize, space: u16, fault: Fault, private: Option<bool> },
    /// The guest's memory seen from the hypervisor.
    LookUp { at: At },
    /// A new slot.
    Create { id: SlotId, config: SlotConfig },
    /// Another configuration for a slot.
    Change { id: SlotId, config: SlotConfig },
    /// No slot any more.
    Delete { id: SlotId },
    /// Pages become private, or shared.
    Convert { id: SlotId, range: GpaRange, private: bool },
    /// A dirty log begins.
    Enable { id: SlotId, mode: LogMode },
    /// It ends.
    Disable { id: SlotId },
    /// Its bits, into so many words.
    Collect { id: SlotId, words: usize },
    /// Some of its pages can be copied now.
    Clear { id: SlotId, first: u64, pages: u64, bitmap: Vec<u64> },
    /// What is in the dirty rings is read, and can be copied now.
    Rings,
    /// A vCPU has written without its translation.
    Emulate { cpu: usize, at: At },
    /// Somebody else has.
    Mark { space: u16, range: GpaRange },
    /// The monitor has a new bitmap for a slot of so many pages, or none any more.
    Attach { id: SlotId, pages: Option<u64> },
    /// It has written to the slot's memory.
    Monitor { id: SlotId, offset: u64, bytes: u64 },
    /// Blocks become pages.
    Split { range: GpaRange },
    /// Pages become blocks.
    Collapse { id: SlotId },
    /// Empty tables go.
    Trim { range: GpaRange },
    /// Pages are mapped ahead.
    PreFault { cpu: usize, space: u16, range: GpaRange },
    /// Which leaves were used?
    Age { range: Taken, clear: bool },
    /// The host begins to take pages back.
    Begin { ranges: Vec<Taken> },
    /// The host backs a unit of its addresses by something else.
    Back { unit: usize, answer: Result<Answer, HostError> },
    /// An invalidation ends; they are numbered by age.
    End { invalidation: usize },
}

/// The machine and its host.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Setup {
    /// log2 of the granule.
    pub(crate) page_shift: u32,
    pub(crate) backing: Backing,
    /// Split blocks ahead, in chunks of the smallest block.
    pub(crate) eager: bool,
    pub(crate) coherent_instructions: bool,
    pub(crate) hardware_marks: bool,
    /// Address spaces.
    pub(crate) spaces: u16,
    /// Pages that are mapped with one of them.
    pub(crate) around: u32,
    pub(crate) tables: Tables,
}

/// Whose tables; those of x86 have pages of 4 KiB.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Tables {
    Arm,
    Ept,
    /// Without accessed and dirty flags.
    PlainEpt,
    Npt,
}

/// A source of numbers below a bound. Small ones stand for what is simple.
pub(crate) trait Numbers {
    fn below(&mut self, bound: u64) -> u64;

    fn flag(&mut self) -> bool {
        self.below(2) == 1
    }

    fn one_of<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }
}

impl Setup {
    pub(crate) fn choose(numbers: &mut impl Numbers) -> Self {
        let huge = |page_size| Backing::AnonymousHugetlb { page_size };
        let (page_shift, backing) = numbers.one_of(&[
            (12, huge(2 << 20)),
            (12, Backing::Anonymous),
            (12, Backing::AnonymousThp),
            (12, huge(64 << 10)),
            (12, huge(1 << 30)),
            (14, huge(32 << 20)),
            (14, Backing::Shmem),
            (16, huge(512 << 20)),
        ]);
        let (eager, coherent_instructions) = (numbers.flag(), numbers.flag());
        // A block of 1 GiB in pages is more than a test should look at.
        let eager = eager && backing != huge(1 << 30);
        let hardware_marks = numbers.flag();
        let (spaces, around) = (numbers.one_of(&[1, 2]), numbers.one_of(&[1, 1, 16, 128]));
        let tables = match numbers.below(6) {
            3 if page_shift == 12 => Tables::Ept,
            4 if page_shift == 12 => Tables::PlainEpt,
            5 if page_shift == 12 => Tables::Npt,
            _ => Tables::Arm,
        };
        let hardware_marks = hardware_marks && tables != Tables::PlainEpt;
        Self {
            page_shift,
            backing,
            eager,
            coherent_instructions,
            hardware_marks,
            spaces,
            around,
            tables,
        }
    }
}

impl Operation {
    /// The next operation, of those that make sense at this moment and some that do not.
    pub(crate) fn choose(reference: &Reference, numbers: &mut impl Numbers) -> Self {
        let cpu = numbers.below(CPUS as u64) as usize;
        let any = |_: &Slot| true;
        let logged = |slot: &Slot| slot.log.is_some();
        let kind =
            if reference.slots.is_empty() { 10 + numbers.below(8) } else { numbers.below(56) };
        match kind {
            0..10 => Self::Access { cpu, at: address(reference, numbers), access: access(numbers) },
            10..15 => {
                Self::Create { id: id(reference, numbers), config: config(reference, numbers) }
            }
            15 | 46 => {
                let ((space, gpa), access) = (address(reference, numbers), access(numbers));
                let kinds = [FaultKind::Translation, FaultKind::Permission, FaultKind::AccessFlag];
                let fault = Fault { gpa: Gpa(gpa), access, kind: numbers.one_of(&kinds) };
                let private = numbers.one_of(&[None, Some(false), Some(true)]);
                Self::Fault { cpu, space, fault, private }
            }
            16 => Self::LookUp { at: address(reference, numbers) },
            17 => Self::Delete { id: slot(reference, any, numbers) },
            18..22 => {
                let id = slot(reference, |slot| slot.log.is_none(), numbers);
                let all_set = LogMode::Manual { initially_all_set: true };
                let manual = LogMode::Manual { initially_all_set: false };
                let ring = LogMode::Ring { backup: numbers.flag() };
                let modes = [LogMode::Protect, all_set, manual, ring, LogMode::Hardware];
                Self::Enable { id, mode: numbers.one_of(&modes) }
            }
            22 => Self::Disable { id: slot(reference, logged, numbers) },
            23..26 => {
                let id = slot(reference, logged, numbers);
                Self::Collect { id, words: words(reference, id, numbers) }
            }
            26..31 => {
                let id = slot(reference, logged, numbers);
                clear(reference, id, numbers)
            }
            31 => Self::Split { range: stretch(reference, numbers).1 },
            32..34 if reference.invalidations.len() < INVALIDATIONS => {
                let ranges = if numbers.flag() { 2 } else { 1 };
                Self::Begin { ranges: (0..ranges).map(|_| taken(reference, numbers)).collect() }
            }
            36..39 => {
                let id = slot(reference, any, numbers);
                let old = reference.slots.get(&id).map(|slot| slot.config);
                Self::Change { id, config: changed(old, config(reference, numbers), numbers) }
            }
            39 | 40 => Self::Collapse { id: slot(reference, |slot| slot.log.is_none(), numbers) },
            41 => Self::Trim { range: stretch(reference, numbers).1 },
            // Where it can only wait, mapping ahead tries for long.
            42 if may_map(reference) => {
                let (space, range) = stretch(reference, numbers);
                Self::PreFault { cpu, space, range: whole(reference, range, numbers) }
            }
            43 => Self::Age { range: taken(reference, numbers), clear: numbers.flag() },
            44 => Self::Rings,
            47..50 => {
                let id = slot(reference, |slot| slot.config.private.is_some(), numbers);
                let (_, range) = stretch(reference, numbers);
                let range = inside(reference, id, whole(reference, range, numbers));
                Self::Convert { id, range, private: !numbers.flag() }
            }
            50 | 55 => {
                let id = slot(reference, |slot| !slot.monitor, numbers);
                let pages = reference.slots.get(&id).map_or(3, |slot| slot.pages.len() as u64);
                let pages =
                    numbers.one_of(&[Some(pages), Some(pages), Some(pages), Some(pages + 1), None]);
                Self::Attach { id, pages }
            }
            51..53 => {
                let id = slot(reference, |slot| slot.monitor, numbers);
                let page = reference.shape.page;
                let pages = reference.slots.get(&id).map_or(3, |slot| slot.pages.len() as u64);
                let offset = numbers.below(pages + 1) * page + numbers.below(page);
                Self::Monitor { id, offset, bytes: numbers.one_of(&[8, 0, page, 70 * page]) }
            }
            53 => Self::Emulate { cpu, at: address(reference, numbers) },
            54 => {
                let (space, range) = stretch(reference, numbers);
                Self::Mark { space, range }
            }
            34..36 => change(reference, numbers),
            _ => {
                let invalidation = reference.invalidations.len() as u64;
                Self::End { invalidation: numbers.below(invalidation.max(1)) as usize }
            }
        }
    }
}

/// The name of a slot, there or not, and seldom of one that cannot be.
fn id(reference: &Reference, numbers: &mut impl Numbers) -> SlotId {
    let number = numbers.below(SLOTS) as u32;
    let spaces = reference.shape.spaces;
    let space = if numbers.below(64) == 63 { spaces } else { numbers.below(spaces.into()) as u16 };
    SlotId { space, number }
}

/// The name of a slot that `fits`, mostly.
fn slot(reference: &Reference, fits: impl Fn(&Slot) -> bool, numbers: &mut impl Numbers) -> SlotId {
    let fitting = reference.slots.iter().filter(|(_, slot)| fits(slot)).map(|(&id, _)| id);
    let fitting: Vec<_> = fitting.collect();
    if fitting.is_empty() || numbers.below(16) == 15 {
        return id(reference, numbers);
    }
    numbers.one_of(&fitting)
}

fn access(numbers: &mut impl Numbers) -> Access {
    numbers.one_of(&[Access::Write, Access::Read, Access::Execute])
}

/// An address, mostly in a slot, rather at its beginning and at its end.
fn address(reference: &Reference, numbers: &mut impl Numbers) -> At {
    let (page, limit) = (reference.shape.page, reference.shape.limit);
    let slot = numbers.below(reference.slots.len() as u64 + 1) as usize;
    let Some((id, slot)) = reference.slots.iter().nth(slot) else {
        let gpa = numbers.one_of(&[0, limit - page, limit, 1 << 62, 5 * page]);
        return (numbers.below(reference.shape.spaces.into()) as u16, gpa);
    };
    let pages = slot.config.size / page;
    let near = numbers.below(4.min(pages));
    let number = match numbers.below(4) {
        0 | 1 => near,
        2 => pages - 1 - near,
        _ => numbers.below(pages),
    };
    (id.space, slot.config.gpa.0 + number * page + 8 * numbers.below(3))
}

fn stretch(reference: &Reference, numbers: &mut impl Numbers) -> (u16, GpaRange) {
    let (page, block) = (reference.shape.page, reference.shape.blocks[0]);
    let size = numbers.one_of(&[page, 8, 3 * page, block, 2 * block, 1 << 61]);
    let (space, start) = address(reference, numbers);
    (space, GpaRange::new(Gpa(start.min(1 << 62)), size).expect("far from the end"))
}

/// Guest or host addresses.
fn taken(reference: &Reference, numbers: &mut impl Numbers) -> Taken {
    let (space, range) = stretch(reference, numbers);
    let (start, end) = (range.start().0, range.end().0);
    let slot = reference.slot_at((space, start)).map(|id| &reference.slots[&id]);
    match slot.filter(|_| numbers.flag()) {
        Some(slot) => Taken::Host(slot.hva(start), slot.hva(start) + (end - start)),
        None => Taken::Guest(start, end),
    }
}

/// Mostly what of a range lies in a slot.
fn inside(reference: &Reference, id: SlotId, range: GpaRange) -> GpaRange {
    let slot = reference.slots.get(&id).map(Slot::range);
    let cut = slot.and_then(|slot| {
        let start = range.start().max(slot.start());
        GpaRange::new(start, range.end().min(slot.end()).0.checked_sub(start.0)?)
    });
    cut.unwrap_or(range)
}

fn may_map(reference: &Reference) -> bool {
    reference.invalidations.is_empty() && !reference.host.answers.contains(&Err(HostError::Again))
}

/// Mostly a multiple of pages.
fn whole(reference: &Reference, range: GpaRange, numbers: &mut impl Numbers) -> GpaRange {
    let page = reference.shape.page;
    let start = range.start().0 / page * page;
    let size = range.size().next_multiple_of(page);
    let whole = GpaRange::new(Gpa(start), size).filter(|_| numbers.below(8) != 7);
    whole.filter(|range| range.size() < 1 << 40).unwrap_or(range)
}

/// Mostly what can be changed of a slot.
fn changed(old: Option<SlotConfig>, new: SlotConfig, numbers: &mut impl Numbers) -> SlotConfig {
    let Some(old) = old.filter(|_| numbers.below(16) != 15) else { return new };
    match numbers.below(4) {
        0 => SlotConfig { gpa: new.gpa, ..old },
        1 => SlotConfig { read_only: !old.read_only, ..old },
        2 => SlotConfig { max_page_size: new.max_page_size, ..old },
        _ => old,
    }
}

fn config(reference: &Reference, numbers: &mut impl Numbers) -> SlotConfig {
    let (page, limit) = (reference.shape.page, reference.shape.limit);
    let (unit, units) = (reference.host.unit, reference.host.answers.len() as u64);
    let block = reference.shape.blocks[0];
    let base = numbers.one_of(&[0, block, 2 * block, 1 << 30, limit - block, limit - page]);
    let shift = numbers.one_of(&[0, page, 3 * page]);
    let size = match numbers.below(6) {
        0 => unit.max(block).min(unit * units),
        1 => page * (1 + numbers.below(3)),
        2 => 67 * page,
        3 => 130 * page,
        4 => unit + page * numbers.below(80),
        _ => (unit * units).min(3 * block),
    };
    let hva = numbers.below(units) * unit + numbers.one_of(&[0, page, 3 * page]);
    let mut config = SlotConfig::new(Gpa(base + shift), size, Hva(hva));
    config.read_only = numbers.below(8) == 7;
    match numbers.below(8) {
        // Where it could only wait, it tries for long.
        5 if may_map(reference) => config.pinned = true,
        6 | 7 => {
            config.private = Some(Hva(numbers.below(units) * unit + numbers.one_of(&[0, page])));
        }
        _ => {}
    }
    match numbers.below(16) {
        12 => config.max_page_size = Some(page),
        13 => config.max_page_size = Some(block),
        14 => config.gpa = Gpa(config.gpa.0 & !(block - 1)),
        15 => nonsense(&mut config, page, numbers),
        _ => {}
    }
    config
}

/// Makes a configuration one that must be refused.
fn nonsense(config: &mut SlotConfig, page: u64, numbers: &mut impl Numbers) {
    let top = 0u64.wrapping_sub(page);
    match numbers.below(9) {
        0 => config.size = 0,
        1 => config.gpa.0 += 8,
        2 => config.hva.0 += 8,
        3 => config.size += 8,
        4 => config.gpa.0 = top,
        5 => config.hva.0 = top,
        6 => config.size = page << 31,
        7 => config.private = Some(Hva(top)),
        _ => config.max_page_size = Some(8),
    }
}

/// So many words as a slot's log has, or nearly.
fn words(reference: &Reference, id: SlotId, numbers: &mut impl Numbers) -> usize {
    let pages = reference.slots.get(&id).map_or(64, |slot| slot.pages.len());
    pages.div_ceil(64) + usize::from(numbers.below(8) == 7)
}

fn clear(reference: &Reference, id: SlotId, numbers: &mut impl Numbers) -> Operation {
    let all = reference.slots.get(&id).map_or(64, |slot| slot.pages.len()) as u64;
    let sections = all.div_ceil(64);
    let mut first = 64 * numbers.below(sections);
    let mut pages = match numbers.below(3) {
        0 => all - first,
        1 => 64.min(all - first),
        _ => (64 * numbers.below(sections)).min(all - first),
    };
    let mut words = pages.div_ceil(64);
    match numbers.below(32) {
        28 => first += 1,
        29 => pages += 64,
        30 => pages = pages.saturating_sub(1),
        31 => words += 1,
        _ => {}
    }
    let word = numbers.one_of(&[u64::MAX, 1, 0, 1 << 63, 0x0f0f << 8]);
    let other = numbers.one_of(&[word, 0, u64::MAX, 2]);
    let bitmap = (0..words).map(|n| if n % 2 == 0 { word } else { other }).collect();
    Operation::Clear { id, first, pages, bitmap }
}

/// Something else for a unit, most likely for one that can be changed now.
fn change(reference: &Reference, numbers: &mut impl Numbers) -> Operation {
    let units = reference.host.answers.len();
    let first = numbers.below(units as u64) as usize;
    let mut all = (0..units).map(|n| (first + n) % units);
    let unit = all.find(|&unit| reference.may_change(unit)).unwrap_or(first);
    // Moving a gigabyte moves contents that a test has no time for.
    let moves = reference.host.unit < 1 << 28;
    let target = if moves { numbers.below(reference.host.targets as u64) as usize } else { unit };
    let (writable, device) = numbers.one_of(&[(true, false), (false, false), (true, true)]);
    let errors = [HostError::NotMapped, HostError::Again, HostError::Poisoned, HostError::NoMemory];
    let error = numbers.one_of(&errors);
    let answer = Ok(Answer { target, writable, device });
    let answer = if numbers.below(4) == 3 { Err(error) } else { answer };
    Operation::Back { unit, answer }
}
