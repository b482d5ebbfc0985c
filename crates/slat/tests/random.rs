//! Random operations of all kinds against a reference model of what they promise: a map from page to state.
#![allow(missing_docs)]

mod machine;

use std::collections::BTreeMap;

use machine::Heap;
use slat::format::arm::{K4, K16, K64, Stage2};
use slat::format::ept::{Ept, InHardware, InSoftware, Suppressed};
use slat::format::npt::Npt;
use slat::{
    Attributes, Edges, Error, Execute, Format, Gpa, GpaRange, Hpa, Leaf, Level, Lookup, Owner,
    Participant, Reserve, Tree,
};

/// What one page is, as far as anybody was promised.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Page {
    #[default]
    Empty,
    Owned(u32),
    Mapped {
        output: u64,
        attributes: Attributes,
    },
}

/// Guest memory as a map. Leaves matter only in that some operations act on whole ones.
#[derive(Default)]
struct Reference(BTreeMap<u64, Page>);

impl Reference {
    fn at(&self, page: u64) -> Page {
        self.0.get(&page).copied().unwrap_or_default()
    }

    fn each(&mut self, pages: std::ops::Range<u64>, change: impl Fn(u64, &mut Attributes)) {
        for (&page, state) in self.0.range_mut(pages) {
            if let Page::Mapped { attributes, .. } = state {
                change(page, attributes);
            }
        }
    }

    fn set(&mut self, pages: std::ops::Range<u64>, state: impl Fn(u64) -> Page) {
        for page in pages {
            self.0.insert(page, state(page));
        }
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % n
    }
}

struct Run<'m, F: Format> {
    tree: Tree<'m, F, Heap>,
    who: Participant<'m, Heap>,
    reserve: Reserve<'m, Heap>,
    reference: Reference,
    random: Random,
    /// The pages that are played with, around the border of a table.
    first: u64,
    pages: u64,
}

impl<F: Format> Run<'_, F> {
    fn gpa(&self, page: u64) -> Gpa {
        Gpa(page << F::PAGE_SHIFT)
    }

    fn range(&self, pages: &std::ops::Range<u64>) -> GpaRange {
        GpaRange::new(self.gpa(pages.start), (pages.end - pages.start) << F::PAGE_SHIFT).unwrap()
    }

    fn pick(&mut self) -> std::ops::Range<u64> {
        let table = 1 << (F::PAGE_SHIFT - 3);
        let (a, b) = match self.random.below(4) {
            0 => (self.random.below(self.pages), 1),
            1 => (self.random.below(self.pages), 1 + self.random.below(40)),
            2 => (self.random.below(self.pages) / table * table, table),
            _ => (self.random.below(self.pages), 1 + self.random.below(self.pages)),
        };
        let start = self.first + a;
        start..(start + b).min(self.first + self.pages)
    }

    /// Where the leaf at `page` begins and ends, in pages.
    fn extent(&self, page: u64) -> std::ops::Range<u64> {
        match self.tree.look_up(&self.who.pin(), self.gpa(page)).unwrap() {
            Lookup::Mapped { level, .. } => {
                let leaf = 1u64 << ((F::PAGE_SHIFT - 3) * level.height());
                page / leaf * leaf..page / leaf * leaf + leaf
            }
            _ => page..page + 1,
        }
    }

    /// The leaves that a range of pages touches.
    fn leaves(&self, pages: &std::ops::Range<u64>) -> std::ops::Range<u64> {
        self.extent(pages.start).start..self.extent(pages.end - 1).end
    }

    fn attributes(&mut self) -> Attributes {
        let write = self.random.below(2) == 0;
        let execute = if self.random.below(3) == 0 { Execute::Yes } else { Execute::No };
        Attributes { write, execute, ..Attributes::RO }
    }

    /// Where a page is mapped, most of the time: what collapses again.
    fn output(&mut self, page: u64) -> u64 {
        let far = if self.random.below(20) == 0 { 1 << 40 } else { 1 << 36 };
        (page << F::PAGE_SHIFT) + far
    }

    fn step(&mut self) {
        let pages = self.pick();
        let range = self.range(&pages);
        self.reserve.top_up(64).unwrap();
        match self.random.below(14) {
            0 | 1 => self.map(pages),
            2 | 3 => self.install(pages.start),
            4 => {
                let owner = self.random.below(3) as u32;
                let (who, reserve) = (&mut self.who, &mut self.reserve);
                self.tree.set_owner(who, reserve, range, Owner(owner), |_| {}).unwrap();
                self.reference.set(pages, |_| Page::Owned(owner));
            }
            5 => {
                let (who, reserve) = (&mut self.who, &mut self.reserve);
                self.tree.unmap(who, reserve, range, Edges::Exact, |_| {}).unwrap();
                self.reference.set(pages, |_| Page::Empty);
            }
            6 => self.unmap_whole(pages),
            7 => {
                let leaves = self.leaves(&pages);
                self.tree.write_protect(&self.who, range, |_| {}).unwrap();
                self.reference.each(leaves, |_, attributes| attributes.write = false);
            }
            8 => self.protect_mask(pages.start),
            9 => {
                let to =
                    if self.random.below(2) == 0 { Level::LAST } else { Level::new(2).unwrap() };
                self.tree.split(&self.who, &mut self.reserve, range, to).unwrap();
            }
            10 => {
                let table = self.prepare_collapse(pages.start);
                self.collapse(table.unwrap_or(pages));
            }
            11 => {
                let leaves = self.leaves(&pages);
                let clear = self.random.below(2) == 0;
                self.tree.age(&self.who, range, clear).unwrap();
                self.reference.each(leaves, |_, attributes| attributes.accessed &= !clear);
            }
            12 => {
                let leaves = self.leaves(&pages);
                let (clear, set) = (self.random.below(16) as u8, self.random.below(16) as u8);
                self.tree.set_software(&self.who, range, clear, set).unwrap();
                self.reference.each(leaves, |_, a| a.software = a.software & !clear | set);
            }
            _ => {
                self.tree.trim(&mut self.who, range).unwrap();
                self.tree.reclaim(&mut self.who);
                let page = pages.start;
                let leaf = self.extent(page);
                if self.tree.mark_young(&self.who.pin(), self.gpa(page)).unwrap() {
                    self.reference.each(leaf, |_, attributes| attributes.accessed = true);
                }
            }
        }
    }

    fn map(&mut self, pages: std::ops::Range<u64>) {
        let attributes = self.attributes();
        let template = self.tree.template(attributes).unwrap();
        let output = self.output(pages.start);
        let largest = Level::new(2 + self.random.below(2) as i8).unwrap();
        let range = self.range(&pages);
        let (who, reserve) = (&self.who, &mut self.reserve);
        let result = self.tree.map(who, reserve, range, Hpa(output), template, largest);
        let end = match result {
            Ok(_) => pages.end,
            Err(Error::Owned { at, owner }) => {
                let at = at.0 >> F::PAGE_SHIFT;
                assert_eq!(self.reference.at(at), Page::Owned(owner.0));
                at
            }
            Err(error) => panic!("{error}"),
        };
        let offset = output - (pages.start << F::PAGE_SHIFT);
        for page in pages.start..end {
            self.now_mapped(page, (page << F::PAGE_SHIFT) + offset, attributes);
        }
    }

    /// The page is mapped to `output` with at least `attributes`: more if it was mapped there before.
    fn now_mapped(&mut self, page: u64, output: u64, wanted: Attributes) {
        let attributes = match self.reference.at(page) {
            Page::Mapped { output: old, attributes } if old == output => Attributes {
                write: attributes.write || wanted.write,
                execute: either(attributes.execute, wanted.execute),
                accessed: attributes.accessed || wanted.accessed,
                ..attributes
            },
            _ => wanted,
        };
        self.reference.0.insert(page, Page::Mapped { output, attributes });
    }

    fn install(&mut self, page: u64) {
        let attributes = self.attributes();
        let template = self.tree.template(attributes).unwrap();
        let height = self.random.below(3) / 2;
        let level = Level::new(3 - height as i8).unwrap();
        let leaf_pages = 1u64 << ((F::PAGE_SHIFT - 3) * height as u32);
        let start = page / leaf_pages * leaf_pages;
        let output = self.output(start) & !((leaf_pages << F::PAGE_SHIFT) - 1);
        let leaf = Leaf { gpa: self.gpa(start), level, output: Hpa(output), template };
        let done = self.tree.install(&self.who.pin(), &mut self.reserve, &leaf);
        match done {
            Ok(slat::Installed::Collapsed { .. }) => {
                let young = (start..start + leaf_pages).any(|page| {
                    matches!(self.reference.at(page),
                        Page::Mapped { attributes, .. } if attributes.accessed)
                });
                let accessed = young || attributes.accessed;
                let attributes = Attributes { accessed, ..attributes };
                for n in 0..leaf_pages {
                    let output = output + (n << F::PAGE_SHIFT);
                    self.reference.0.insert(start + n, Page::Mapped { output, attributes });
                }
            }
            Ok(_) => {
                for n in 0..leaf_pages {
                    self.now_mapped(start + n, output + (n << F::PAGE_SHIFT), attributes);
                }
            }
            Err(Error::Owned { owner, .. }) => {
                let mut pages = start..start + leaf_pages;
                assert!(pages.any(|page| self.reference.at(page) == Page::Owned(owner.0)));
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// Leaves that the range touches go as a whole; notes go where the range covers all of what they stand for.
    fn unmap_whole(&mut self, pages: std::ops::Range<u64>) {
        let mut gone = Vec::new();
        for page in pages.clone() {
            match self.tree.look_up(&self.who.pin(), self.gpa(page)).unwrap() {
                Lookup::Mapped { .. } => {
                    let leaf = self.extent(page);
                    if gone.last() != Some(&leaf) {
                        gone.push(leaf);
                    }
                }
                Lookup::Owned { level, .. } => {
                    let note = 1u64 << ((F::PAGE_SHIFT - 3) * level.height());
                    let start = page / note * note;
                    if pages.start <= start && start + note <= pages.end {
                        gone.push(page..page + 1);
                    }
                }
                Lookup::Empty { .. } => {}
            }
        }
        let range = self.range(&pages);
        let (who, reserve) = (&mut self.who, &mut self.reserve);
        self.tree.unmap(who, reserve, range, Edges::Whole, |_| {}).unwrap();
        for pages in gone {
            self.reference.set(pages, |_| Page::Empty);
        }
    }

    fn protect_mask(&mut self, first: u64) {
        let mask = self.random.below(u64::MAX >> 1) | 1 << self.random.below(64);
        let mask = mask & (u64::MAX >> (64 - (self.first + self.pages - first).min(64)));
        let mut protected = Vec::new();
        for bit in 0..64 {
            if mask >> bit & 1 == 1 {
                protected.push(self.extent(first + bit));
            }
        }
        self.tree.write_protect_mask(&self.who, self.gpa(first), mask, |_| {}).unwrap();
        for leaf in protected {
            self.reference.each(leaf, |_, attributes| attributes.write = false);
        }
    }

    /// Half of the time, gives the table around `page` leaves that differ in permission at most.
    fn prepare_collapse(&mut self, page: u64) -> Option<std::ops::Range<u64>> {
        if self.random.below(2) == 0 {
            return None;
        }
        let table = 1u64 << (F::PAGE_SHIFT - 3);
        let pages = page / table * table..page / table * table + table;
        let range = self.range(&pages);
        let (who, reserve) = (&mut self.who, &mut self.reserve);
        self.tree.unmap(who, reserve, range, Edges::Exact, |_| {}).unwrap();
        let rwx = self.tree.template(Attributes::RWX).unwrap();
        let output = (pages.start << F::PAGE_SHIFT) + (1 << 36);
        self.reserve.top_up(8).unwrap();
        let (who, reserve) = (&self.who, &mut self.reserve);
        self.tree.map(who, reserve, range, Hpa(output), rwx, Level::LAST).unwrap();
        self.reference.set(pages.clone(), |page| Page::Mapped {
            output: (page << F::PAGE_SHIFT) + (1 << 36),
            attributes: Attributes::RWX,
        });
        let some = pages.start + self.random.below(table);
        let some = some..(some + self.random.below(9)).min(pages.end).max(some + 1);
        let range = self.range(&some);
        self.tree.write_protect(&self.who, range, |_| {}).unwrap();
        self.reference.each(some, |_, attributes| attributes.write = false);
        Some(pages)
    }

    /// What became a block has the permissions that all its pages had.
    fn collapse(&mut self, pages: std::ops::Range<u64>) {
        let table = 1u64 << (F::PAGE_SHIFT - 3);
        let whole = pages.start.next_multiple_of(table)..pages.end / table * table;
        let blocks = whole.step_by(table as usize);
        let small: Vec<u64> = blocks.filter(|&page| self.extent(page).end == page + 1).collect();
        let range = self.range(&pages);
        let collapsed = self.tree.collapse(&mut self.who, range, Level::TOP).unwrap();
        let mut now = 0;
        for start in small {
            if self.extent(start).end == start + 1 {
                continue;
            }
            now += 1;
            let all: Vec<Attributes> = (start..start + table)
                .map(|page| match self.reference.at(page) {
                    Page::Mapped { attributes, .. } => attributes,
                    other => panic!("collapsed {other:?}"),
                })
                .collect();
            let write = all.iter().all(|a| a.write);
            let execute = match all.iter().all(|a| a.execute == Execute::Yes) {
                true => Execute::Yes,
                false => Execute::No,
            };
            let accessed = all.iter().any(|a| a.accessed);
            self.reference.each(start..start + table, |_, a| {
                *a = Attributes { write, execute, accessed, ..*a };
            });
        }
        assert_eq!(now, collapsed);
    }

    fn compare(&self, pages: std::ops::Range<u64>) {
        let pin = self.who.pin();
        for page in pages {
            let found = match self.tree.look_up(&pin, self.gpa(page)).unwrap() {
                Lookup::Empty { .. } => Page::Empty,
                Lookup::Owned { owner, .. } => Page::Owned(owner.0),
                Lookup::Mapped { output, template, .. } => {
                    Page::Mapped { output: output.0, attributes: self.tree.attributes(template) }
                }
            };
            assert_eq!(found, self.reference.at(page), "page {page:#x}");
        }
    }
}

fn either(a: Execute, b: Execute) -> Execute {
    if a == Execute::Yes { a } else { b }
}

fn run<F: Format>(format: F, seed: u64, steps: usize) {
    let heap = Heap::new(1 << F::PAGE_SHIFT, 1);
    {
        let table = 1u64 << (F::PAGE_SHIFT - 3);
        // Around the first border between two tables of level 2, where there is one.
        let first = if F::PAGE_SHIFT == 12 { table * table - 2 * table } else { 2 * table };
        let mut reserve = Reserve::new(&heap);
        reserve.top_up(64).unwrap();
        let mut run = Run::<F> {
            tree: Tree::new(&heap, format, 1).unwrap(),
            who: Participant::register(&heap).unwrap(),
            reserve,
            reference: Reference::default(),
            random: Random(seed),
            first,
            pages: 4 * table,
        };
        for step in 0..steps {
            run.step();
            if step % 16 == 0 {
                run.compare(first..first + 4 * table);
            }
        }
        run.compare(first..first + 4 * table);
        assert_eq!(run.tree.format().geometry().page_size(), 1 << F::PAGE_SHIFT);
    }
    assert_eq!(heap.in_use(), 0, "every table came back");
}

#[test]
fn all_operations_do_what_the_reference_says_with_4k() {
    for seed in 0..40 {
        run(Stage2::<K4>::new(42).unwrap(), seed, 300);
    }
}

#[test]
fn all_operations_do_what_the_reference_says_with_16k() {
    for seed in 0..8 {
        run(Stage2::<K16>::new(42).unwrap(), seed, 200);
    }
}

#[test]
fn all_operations_do_what_the_reference_says_with_64k() {
    for seed in 0..4 {
        run(Stage2::<K64>::new(42).unwrap(), seed, 120);
    }
}

#[test]
fn all_operations_do_what_the_reference_says_on_x86() {
    for seed in 0..10 {
        run(<Ept>::new(48).unwrap(), seed, 300);
        run(Ept::<InSoftware>::new(42).unwrap(), seed, 300);
        run(Ept::<InHardware, Suppressed>::new(52).unwrap(), seed, 300);
        run(Npt::new(48).unwrap(), seed, 300);
    }
}
