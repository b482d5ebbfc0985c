//! Promise: millions of random operations of all kinds, from four threads at once, each with a CPU that uses what they
//! leave, break no rule of the architecture and no promise of the reference model.
//!
//! Every thread owns every fourth page of some tables that all threads change the shape of, and some tables of its own
//! where it also acts on whole ranges. It knows what it did to its pages, and that is the reference: a page is mapped
//! where it mapped it, with at most the permission that it gave (collapse may take some away), and holds what it wrote.
//!
//! `SLAT_RANDOM_OPERATIONS` sets how many, over all threads.

use std::env;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use slat::format::arm::{K4, K16, K64, Stage2};
use slat::format::ept::{Ept, InHardware, InSoftware, Suppressed};
use slat::format::npt::Npt;
use slat::gate::Requests;
use slat::{
    Attributes, Dirty, Edges, Error, Format, Gpa, GpaRange, Hpa, Leaf, Level, Lookup, Owner,
    Participant, Reserve, Template, Tree,
};
use slat_model::{Backing, Control, Cpu, FaultKind, Features, HostMemory, Model, Modelled};

const THREADS: u64 = 4;
/// Tables of which each thread owns every fourth page.
const SHARED: u64 = 3;
/// Tables that each thread has for itself.
const OWN: u64 = 2;

fn operations() -> u64 {
    let default = if cfg!(debug_assertions) { 40_000 } else { 400_000 };
    env::var("SLAT_RANDOM_OPERATIONS").ok().and_then(|n| n.parse().ok()).unwrap_or(default)
}

struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

/// What the thread last did to a page of its own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Page {
    Empty,
    Owned(u32),
    /// Mapped to its place or to the other one, writable at most if `write`.
    Mapped {
        other: bool,
        write: bool,
    },
}

struct World<'m, F: Format> {
    tree: Tree<'m, F, Model>,
    model: &'m Model,
    /// Two places for each page.
    places: [Arc<HostMemory>; 2],
    control: Control,
    /// By whether writing is permitted.
    templates: [Template; 2],
    hardware_dirty: bool,
    done: AtomicU64,
}

struct Worker<'w, 'm, F: Format> {
    world: &'w World<'m, F>,
    me: u64,
    who: Participant<'m, Model>,
    reserve: Reserve<'m, Model>,
    cpu: Cpu<'m>,
    random: Random,
    pages: Vec<Page>,
    /// What this thread wrote to each page, by place.
    values: Vec<[u64; 2]>,
    /// Whether hardware may have marked the page since it was last harvested.
    written: Vec<bool>,
    next: u64,
}

impl<F: Format> Worker<'_, '_, F> {
    const ENTRIES: u64 = 1 << F::INDEX_BITS;

    fn gpa(page: u64) -> Gpa {
        Gpa(page << F::PAGE_SHIFT)
    }

    fn range(first: u64, pages: u64) -> GpaRange {
        GpaRange::new(Self::gpa(first), pages << F::PAGE_SHIFT).unwrap()
    }

    fn output(&self, page: u64, other: bool) -> Hpa {
        self.world.places[usize::from(other)].page(page << F::PAGE_SHIFT).unwrap().hpa
    }

    /// The first page of this thread's own tables.
    fn first_own(&self) -> u64 {
        (SHARED + self.me * OWN) * Self::ENTRIES
    }

    fn is_shared(page: u64) -> bool {
        page < SHARED * Self::ENTRIES
    }

    /// A page of its own, shared table or not.
    fn pick(&mut self) -> u64 {
        if self.random.below(2) == 0 {
            self.random.below(SHARED * Self::ENTRIES / THREADS) * THREADS + self.me
        } else {
            self.first_own() + self.random.below(OWN * Self::ENTRIES)
        }
    }

    /// A range in its own tables: some pages, or a whole table.
    fn pick_range(&mut self) -> (u64, u64) {
        let first = self.first_own();
        if self.random.below(3) == 0 {
            return (first + self.random.below(OWN) * Self::ENTRIES, Self::ENTRIES);
        }
        let at = self.random.below(OWN * Self::ENTRIES);
        let len = 1 + self.random.below(100).min(OWN * Self::ENTRIES - at - 1);
        (first + at, len)
    }

    fn step(&mut self) {
        self.reserve.top_up(8).unwrap();
        match self.random.below(16) {
            0..=3 => {
                let (page, write) = (self.pick(), self.random.below(3) > 0);
                let other = self.random.below(16) == 0;
                self.install(page, other, write);
                self.check(page);
            }
            4 => {
                let page = self.pick();
                let (range, mut dirty) = (Self::range(page, 1), Vec::new());
                let sink = |part| dirty.push(part);
                self.world.tree.write_protect(&self.who, range, sink).unwrap();
                self.reported(&dirty);
                self.now_read_only(page, 1);
                self.check(page);
            }
            5 => self.protect_section(),
            6 => {
                let page = self.pick();
                self.unmap(page, 1);
                self.check(page);
            }
            7 => {
                let (first, pages) = self.pick_range();
                self.unmap(first, pages);
                self.check(first + pages - 1);
            }
            8 => self.map(),
            9 => {
                let (first, pages) = self.pick_range();
                let owner = self.random.below(3) as u32;
                let (who, reserve) = (&mut self.who, &mut self.reserve);
                let range = Self::range(first, pages);
                self.world.tree.set_owner(who, reserve, range, Owner(owner), |_| {}).unwrap();
                self.set(first, pages, Page::Owned(owner));
                self.check(first);
            }
            10 => {
                let (table, tables) = self.any_tables();
                let range = Self::range(table, tables);
                let to = if self.random.below(4) == 0 { 2 } else { 3 };
                let to = Level::new(to).unwrap();
                match self.world.tree.split(&self.who, &mut self.reserve, range, to) {
                    Ok(_) | Err(Error::NeedTables { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
            11 => {
                let (table, tables) = self.any_tables();
                self.world
                    .tree
                    .collapse(&mut self.who, Self::range(table, tables), Level::TOP)
                    .unwrap();
            }
            12 => {
                let (table, tables) = self.any_tables();
                self.world.tree.trim(&mut self.who, Self::range(table, tables)).unwrap();
                if self.random.below(4) == 0 {
                    self.world.tree.reclaim(&mut self.who);
                }
            }
            13 => {
                let clear = self.random.below(2) == 0;
                let (table, tables) = self.any_tables();
                self.world.tree.age(&self.who, Self::range(table, tables), clear).unwrap();
            }
            14 => {
                let (first, pages) = self.pick_range();
                if self.world.hardware_dirty {
                    self.harvest(first, pages);
                } else {
                    let write = self.random.below(2) == 0;
                    let template = self.world.templates[usize::from(write)];
                    let range = Self::range(first, pages);
                    self.world.tree.relax(&self.who, range, 0, template).unwrap();
                    for page in first..first + pages {
                        if let Page::Mapped { write: may, .. } = &mut self.pages[page as usize] {
                            *may |= write;
                        }
                    }
                    // A block that the range touches was relaxed as a whole.
                    self.now_maybe_writable(first, pages, write);
                    self.check(first);
                }
            }
            _ => {
                let page = self.pick();
                self.check(page);
            }
        }
    }

    /// Some neighbouring tables, shared ones or its own.
    fn any_tables(&mut self) -> (u64, u64) {
        let (first, tables) =
            if self.random.below(2) == 0 { (0, SHARED) } else { (self.first_own(), OWN) };
        let from = self.random.below(tables);
        (first + from * Self::ENTRIES, (1 + self.random.below(tables - from)) * Self::ENTRIES)
    }

    fn set(&mut self, first: u64, pages: u64, state: Page) {
        for page in first..first + pages {
            self.pages[page as usize] = state;
            self.written[page as usize] = false;
        }
    }

    /// Hardware's marks went with the permission, and were reported.
    fn reported(&mut self, dirty: &[GpaRange]) {
        for part in dirty {
            let pages = part.start().0 >> F::PAGE_SHIFT..part.end().0 >> F::PAGE_SHIFT;
            self.written[pages.start as usize..pages.end as usize].fill(false);
        }
    }

    fn now_read_only(&mut self, first: u64, pages: u64) {
        for page in first..first + pages {
            if let Page::Mapped { write, .. } = &mut self.pages[page as usize] {
                *write = false;
            }
        }
    }

    /// In its own tables: every page of a table in which a block may have been relaxed.
    fn now_maybe_writable(&mut self, first: u64, pages: u64, write: bool) {
        let start = first / Self::ENTRIES * Self::ENTRIES;
        let end = (first + pages).next_multiple_of(Self::ENTRIES);
        for page in start..end {
            if let Page::Mapped { write: may, .. } = &mut self.pages[page as usize] {
                *may |= write;
            }
        }
    }

    fn install(&mut self, page: u64, other: bool, write: bool) {
        let template = self.world.templates[usize::from(write)];
        let gpa = Self::gpa(page);
        let leaf = Leaf { gpa, level: Level::LAST, output: self.output(page, other), template };
        loop {
            let result = self.world.tree.install(&self.who.pin(), &mut self.reserve, &leaf);
            match result {
                Ok(_) => break,
                Err(Error::Retry) => thread::yield_now(),
                Err(Error::NeedTables { tables, .. }) => self.reserve.top_up(tables).unwrap(),
                Err(Error::Owned { owner, .. }) => {
                    assert_eq!(self.pages[page as usize], Page::Owned(owner.0));
                    return;
                }
                Err(error) => panic!("{error}"),
            }
        }
        let index = page as usize;
        let before = match self.pages[index] {
            Page::Mapped { other: o, write } if o == other => write,
            _ => false,
        };
        if !matches!(self.pages[index], Page::Mapped { other: o, .. } if o == other) {
            self.written[index] = false;
        }
        self.pages[index] = Page::Mapped { other, write: write || before };
    }

    /// One section of a dirty bitmap: its own pages among 64.
    fn protect_section(&mut self) {
        let (first, mask) = if self.random.below(2) == 0 {
            let section = self.random.below(SHARED * Self::ENTRIES / 64);
            (section * 64, 0x1111_1111_1111_1111 << self.me)
        } else {
            let section = self.random.below(OWN * Self::ENTRIES / 64);
            (self.first_own() + section * 64, u64::MAX)
        };
        let random = u64::MAX << self.random.below(64) >> self.random.below(32);
        let mask = mask & random;
        let (gpa, mut dirty) = (Self::gpa(first), Vec::new());
        let sink = |part| dirty.push(part);
        self.world.tree.write_protect_mask(&self.who, gpa, mask, sink).unwrap();
        self.reported(&dirty);
        for bit in 0..64 {
            if mask >> bit & 1 == 1 {
                self.now_read_only(first + bit, 1);
            }
        }
        if mask != 0 {
            self.check(first + u64::from(mask.trailing_zeros()));
        }
    }

    fn unmap(&mut self, first: u64, pages: u64) {
        let range = Self::range(first, pages);
        let shared = Self::is_shared(first);
        let mut dirty = Vec::new();
        loop {
            let (who, reserve) = (&mut self.who, &mut self.reserve);
            let sink = |part: GpaRange| dirty.push(part);
            match self.world.tree.unmap(who, reserve, range, Edges::Exact, sink) {
                Ok(_) => break,
                Err(Error::NeedTables { tables, .. }) => self.reserve.top_up(tables).unwrap(),
                Err(error) => panic!("{error}"),
            }
        }
        if self.world.hardware_dirty && !shared {
            for page in first..first + pages {
                let seen = dirty.iter().any(|part| part.contains(Self::gpa(page)));
                assert!(seen || !self.written[page as usize], "page {page:#x}: a write was lost");
            }
        }
        self.set(first, pages, Page::Empty);
    }

    /// Maps a range of its own tables, in blocks where they fit.
    fn map(&mut self) {
        let (first, pages) = self.pick_range();
        let write = self.random.below(3) > 0;
        let template = self.world.templates[usize::from(write)];
        let largest = Level::new(2 + self.random.below(2) as i8).unwrap();
        let mut at = first;
        while at < first + pages {
            let range = Self::range(at, first + pages - at);
            let output = self.output(at, false);
            let (who, reserve) = (&self.who, &mut self.reserve);
            match self.world.tree.map(who, reserve, range, output, template, largest) {
                Ok(_) => at = first + pages,
                Err(Error::NeedTables { at: stopped, tables }) => {
                    self.mapped(at, stopped.0 >> F::PAGE_SHIFT, write);
                    at = stopped.0 >> F::PAGE_SHIFT;
                    self.reserve.top_up(tables).unwrap();
                    continue;
                }
                Err(Error::Owned { at: stopped, owner }) => {
                    let stopped = stopped.0 >> F::PAGE_SHIFT;
                    assert_eq!(self.pages[stopped as usize], Page::Owned(owner.0));
                    self.mapped(at, stopped, write);
                    return;
                }
                Err(error) => panic!("{error}"),
            }
            self.mapped(first, first + pages, write);
        }
        self.check(first);
    }

    fn mapped(&mut self, first: u64, end: u64, write: bool) {
        for page in first..end {
            let state = &mut self.pages[page as usize];
            let before = match *state {
                Page::Mapped { other: false, write } => write,
                Page::Mapped { other: true, .. } => {
                    self.written[page as usize] = false;
                    false
                }
                _ => false,
            };
            *state = Page::Mapped { other: false, write: write || before };
        }
    }

    fn harvest(&mut self, first: u64, pages: u64) {
        // Whole tables: a dirty block is marked clean as a whole.
        let start = first / Self::ENTRIES * Self::ENTRIES;
        let end = (first + pages).next_multiple_of(Self::ENTRIES);
        let mut dirty = vec![false; (end - start) as usize];
        let sink = |part: GpaRange| {
            let from = (part.start().0 >> F::PAGE_SHIFT) - start;
            let to = (part.end().0 >> F::PAGE_SHIFT) - start;
            dirty[from as usize..to as usize].fill(true);
        };
        self.world.tree.harvest_dirty(&self.who, Self::range(start, end - start), sink).unwrap();
        for page in start..end {
            let written = std::mem::take(&mut self.written[page as usize]);
            assert!(dirty[(page - start) as usize] || !written, "page {page:#x}: a write was lost");
        }
    }

    /// Uses the page as a guest would, and compares.
    fn check(&mut self, page: u64) {
        let (gpa, index) = (Self::gpa(page), page as usize);
        let state = self.pages[index];
        let found = loop {
            let found = self.world.tree.look_up(&self.who.pin(), gpa);
            match found {
                Ok(found) => break found,
                Err(Error::Retry) => thread::yield_now(),
                Err(error) => panic!("{error}"),
            }
        };
        match state {
            Page::Empty => assert!(matches!(found, Lookup::Empty { .. }), "{found:?}"),
            Page::Owned(id) => {
                assert!(matches!(found, Lookup::Owned { owner: Owner(n), .. } if n == id));
            }
            Page::Mapped { other, write } => {
                let Lookup::Mapped { output, template, .. } = found else { panic!("{found:?}") };
                assert_eq!(output, self.output(page, other));
                assert!(write || !self.world.tree.attributes(template).write, "page {page:#x}");
            }
        }
        let value = self.access(gpa, |cpu| cpu.read(gpa));
        match state {
            Page::Mapped { other, write } => {
                assert_eq!(value, Some(self.values[index][usize::from(other)]), "page {page:#x}");
                self.next += THREADS;
                let next = self.next;
                let written = self.access(gpa, |cpu| cpu.write(gpa, next).map(|()| 0)).is_some();
                assert!(write || !written, "page {page:#x}: a write went through");
                if written {
                    self.values[index][usize::from(other)] = next;
                    self.written[index] = true;
                }
            }
            _ => assert_eq!(value, None, "page {page:#x} is not mapped"),
        }
    }

    /// Inside the guest, which it is entered for.
    fn in_guest<R>(&mut self, f: impl FnOnce(&mut Cpu<'_>) -> R) -> R {
        loop {
            match self.who.enter() {
                Ok(_inside) => return f(&mut self.cpu),
                Err(requests) if requests.contains(Requests::INVALIDATE) => {
                    self.world.tree.answer()
                }
                Err(_) => {}
            }
        }
    }

    /// One access, with access-flag faults and meetings with LOCKED handled. `None`: it is not permitted.
    fn access<R>(
        &mut self,
        gpa: Gpa,
        mut access: impl FnMut(&mut Cpu<'_>) -> Result<R, slat_model::Fault>,
    ) -> Option<R> {
        loop {
            let fault = match self.in_guest(&mut access) {
                Ok(done) => return Some(done),
                Err(fault) => fault,
            };
            let pin = self.who.pin();
            match fault.kind {
                FaultKind::AccessFlag { .. } => {
                    let _ = self.world.tree.mark_young(&pin, gpa);
                }
                FaultKind::Permission { .. } => return None,
                _ => match self.world.tree.look_up(&pin, gpa) {
                    Ok(Lookup::Mapped { .. }) => {
                        // Where an access flag is kept in software, a clear one looks like this.
                        let _ = self.world.tree.mark_young(&pin, gpa);
                    }
                    Ok(_) => return None,
                    Err(_) => thread::yield_now(),
                },
            }
        }
    }
}

fn run<F: Modelled>(format: F, hardware_dirty: bool, operations: u64) {
    run_on(Features::default(), format, hardware_dirty, operations);
}

fn run_on<F: Modelled>(features: Features, format: F, hardware_dirty: bool, operations: u64) {
    let pages = (SHARED + THREADS * OWN) << F::INDEX_BITS;
    let model = Model::builder()
        .page_shift(F::PAGE_SHIFT)
        .architecture(F::ARCHITECTURE)
        .cpus(THREADS as usize)
        .slots(THREADS as usize)
        .checked(true)
        .features(features)
        .build()
        .unwrap();
    let block = 1 << (F::PAGE_SHIFT + F::INDEX_BITS);
    let backing = Backing::AnonymousHugetlb { page_size: block };
    let place = || model.host_memory(pages << F::PAGE_SHIFT, backing).unwrap();
    {
        let tree = Tree::new(&model, format, 1).unwrap();
        let dirty = if hardware_dirty { Dirty::Clean } else { Dirty::Untracked };
        let templates = [
            tree.template(Attributes::RO).unwrap(),
            tree.template(Attributes { dirty, ..Attributes::RW }).unwrap(),
        ];
        let control = F::control_of(&tree);
        let world = World {
            places: [place(), place()],
            model: &model,
            tree,
            control,
            templates,
            hardware_dirty,
            done: AtomicU64::new(0),
        };
        thread::scope(|scope| {
            for me in 0..THREADS {
                let world = &world;
                scope.spawn(move || {
                    let mut who = Participant::register(world.model).unwrap();
                    who.switch(world.tree.root());
                    let mut cpu = world.model.cpu(me as usize, world.control).unwrap();
                    cpu.attend(who.index());
                    let mut worker = Worker {
                        world,
                        me,
                        who,
                        reserve: Reserve::new(world.model),
                        cpu,
                        random: Random(0x9e37_79b9_7f4a_7c15 ^ (me + 1) << 40),
                        pages: vec![Page::Empty; pages as usize],
                        values: vec![[0; 2]; pages as usize],
                        written: vec![false; pages as usize],
                        next: me,
                    };
                    for _ in 0..operations / THREADS {
                        worker.step();
                    }
                    for page in 0..pages {
                        let mine = if Worker::<F>::is_shared(page) {
                            page % THREADS == me
                        } else {
                            (worker.first_own()..worker.first_own() + OWN * Worker::<F>::ENTRIES)
                                .contains(&page)
                        };
                        if mine {
                            worker.check(page);
                        }
                    }
                    world.done.fetch_add(operations / THREADS, Ordering::Relaxed);
                });
            }
        });
        assert_eq!(world.done.load(Ordering::Relaxed), operations / THREADS * THREADS);
        model.check_quiet(control);
    }
    assert_eq!(model.violations(), 0);
    assert_eq!(model.counters().tables_in_use, 0, "every table came back");
}

#[test]
fn random_operations_from_four_threads_break_no_rule() {
    let format = Stage2::<K4>::new(40).unwrap();
    run(format, false, operations());
}

#[test]
fn random_operations_where_hardware_marks_dirty_pages_lose_no_write() {
    let format = Stage2::<K4>::new(40).unwrap().with_hardware_dirty(true);
    run(format, true, operations() / 4);
}

#[test]
fn random_operations_without_hints_or_with_blocks_that_change_size_break_no_rule() {
    let format = Stage2::<K4>::new(40).unwrap();
    let plain = Features { tlb_range: false, ttl: false, ..Features::default() };
    run_on(plain, format, false, operations() / 8);
    let tolerant = Features { block_change: true, ..Features::default() };
    run_on(tolerant, format, false, operations() / 4);
}

#[test]
fn random_operations_with_larger_granules_break_no_rule() {
    let format = Stage2::<K16>::new(40).unwrap();
    run(format, false, operations() / 8);
    let format = Stage2::<K64>::wide(44).unwrap();
    run(format, false, operations() / 16);
}

#[test]
fn random_operations_under_ept_break_no_rule() {
    let format = <Ept>::new(48).unwrap();
    run(format, false, operations() / 4);
    run(format.with_hardware_dirty(true), true, operations() / 4);
    run(Ept::<InSoftware>::new(48).unwrap(), false, operations() / 8);
    run(Ept::<InHardware, Suppressed>::new(52).unwrap(), false, operations() / 8);
}

#[test]
fn random_operations_under_npt_break_no_rule() {
    let format = Npt::new(48).unwrap();
    run(format, false, operations() / 4);
    run(format.with_hardware_dirty(true), true, operations() / 4);
    run(Npt::new(52).unwrap(), false, operations() / 8);
}
