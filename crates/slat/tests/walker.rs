//! The walker shows each entry as the field's walkers do, and visits no level that nobody wants.
#![allow(missing_docs)]

mod machine;

use machine::Heap;
use slat::format::arm::{K4, K64, Stage2};
use slat::walk::{Flow, Visit, Visitor, Wants};
use slat::{
    Attributes, Error, Format, Gpa, GpaRange, Hpa, Leaf, Level, Participant, Reserve, Tree,
};

const M2: u64 = 2 << 20;

fn level(n: i8) -> Level {
    Level::new(n).unwrap()
}

fn range(start: u64, end: u64) -> GpaRange {
    GpaRange::new(Gpa(start), end - start).unwrap()
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Before,
    Leaf,
    After,
}

/// Records every visit of the kinds it wants.
struct Recorder<F: Fn(Level) -> Wants> {
    wants: F,
    seen: Vec<(Kind, i8, u64, u64)>,
}

impl<F: Fn(Level) -> Wants> Recorder<F> {
    fn note(&mut self, kind: Kind, visit: &Visit<'_, Heap>) -> Flow {
        self.seen.push((kind, visit.level().number(), visit.gpa().0, visit.end().0));
        Flow::Next
    }
}

impl<F: Fn(Level) -> Wants> Visitor<Heap> for Recorder<F> {
    fn wants(&self, level: Level) -> Wants {
        (self.wants)(level)
    }
    fn leaf(&mut self, visit: &Visit<'_, Heap>) -> Flow {
        self.note(Kind::Leaf, visit)
    }
    fn before(&mut self, visit: &Visit<'_, Heap>) -> Flow {
        self.note(Kind::Before, visit)
    }
    fn after(&mut self, visit: &Visit<'_, Heap>) -> Flow {
        self.note(Kind::After, visit)
    }
}

struct Setup<'m> {
    tree: Tree<'m, Stage2<K4>, Heap>,
    who: Participant<'m, Heap>,
    reserve: Reserve<'m, Heap>,
}

fn setup(heap: &Heap) -> Setup<'_> {
    let mut reserve = Reserve::new(heap);
    reserve.top_up(600).unwrap();
    Setup {
        tree: Tree::new(heap, Stage2::new(40).unwrap(), 1).unwrap(),
        who: Participant::register(heap).unwrap(),
        reserve,
    }
}

impl Setup<'_> {
    fn map(&mut self, at: u64, size: u64, largest: i8) {
        let rw = self.tree.template(Attributes::RW).unwrap();
        let range = range(at, at + size);
        let (who, reserve) = (&self.who, &mut self.reserve);
        self.tree.map(who, reserve, range, Hpa(at), rw, level(largest)).unwrap();
    }

    fn walk(&self, range: GpaRange, wants: impl Fn(Level) -> Wants) -> Vec<(Kind, i8, u64, u64)> {
        let mut recorder = Recorder { wants, seen: Vec::new() };
        self.tree.walk(&self.who, range, &mut recorder).unwrap();
        recorder.seen
    }
}

const ALL: Wants = Wants::LEAVES.and(Wants::BEFORE).and(Wants::AFTER);

#[test]
fn a_walk_from_the_middle_of_an_entry_advances_to_the_entrys_boundary() {
    let heap = Heap::new(4096, 1);
    let mut s = setup(&heap);
    s.map(0xff_00c0_0000, 4096, 3);
    let seen = s.walk(range(0xff_00ab_2000, 0xff_00cb_2000), |_| Wants::LEAVES);
    assert_eq!(seen[0], (Kind::Leaf, 2, 0xff_00ab_2000, 0xff_00c0_0000));
    assert_eq!(seen[1], (Kind::Leaf, 3, 0xff_00c0_0000, 0xff_00c0_1000));
    assert_eq!(seen.len(), 1 + 0xb2);
}

#[test]
fn tables_after_are_shown_once_also_when_their_entries_are_skipped() {
    let heap = Heap::new(4096, 1);
    let mut s = setup(&heap);
    s.map(0, 2 * M2, 3);
    let after = |l: Level| if l == level(2) { Wants::AFTER } else { Wants::NOTHING };
    let seen = s.walk(range(0x5000, 2 * M2), after);
    assert_eq!(seen, [(Kind::After, 2, 0x5000, M2), (Kind::After, 2, M2, 2 * M2)]);
}

#[test]
fn the_root_level_is_skipped_like_any_other() {
    let heap = Heap::new(4096, 1);
    let mut s = setup(&heap);
    s.map(0, M2, 2);
    let no_root = |l: Level| if l == level(1) { Wants::NOTHING } else { ALL };
    let seen = s.walk(range(0, 1 << 31), no_root);
    assert!(seen.iter().all(|visit| visit.1 == 2));
    assert_eq!(seen.len(), 512);
    assert!(s.walk(range(0, 1 << 31), |_| Wants::NOTHING).is_empty());
}

#[test]
fn a_level_that_nobody_wants_is_not_entered() {
    let heap = Heap::new(4096, 1);
    let mut s = setup(&heap);
    s.map(0, 64 * M2, 3);
    let before = s.who.counters.visited.get();
    let above = |l: Level| if l < Level::LAST { Wants::LEAVES } else { Wants::NOTHING };
    s.walk(range(0, 64 * M2), above);
    assert_eq!(s.who.counters.visited.get(), before, "only tables on the way");
}

#[test]
fn the_order_is_before_entries_after_and_each_once_over_many_pins() {
    let heap = Heap::new(4096, 1);
    let mut s = setup(&heap);
    s.map(0, 3 * M2, 3);
    for start in [0, 0x3000, M2 - 0x1000] {
        let seen = s.walk(range(start, 3 * M2), |_| ALL);
        let tables = |kind| seen.iter().filter(|v| v.0 == kind && v.1 == 2).count();
        assert_eq!((tables(Kind::Before), tables(Kind::After)), (3, 3), "from {start:#x}");
        let pages: Vec<u64> = seen.iter().filter(|v| v.1 == 3).map(|v| v.2).collect();
        let want: Vec<u64> = (start..3 * M2).step_by(4096).collect();
        assert_eq!(pages, want);
        assert_eq!(seen[0], (Kind::Before, 1, start, 3 * M2));
        assert_eq!(*seen.last().unwrap(), (Kind::After, 1, start, 3 * M2));
        let starts_ordered =
            seen.windows(2).all(|two| two[0].2 <= two[1].2 || two[1].0 == Kind::After);
        assert!(starts_ordered);
    }
}

/// Installs a page where it finds nothing, through the public operation.
struct Linker<'t, 'm> {
    tree: &'t Tree<'m, Stage2<K4>, Heap>,
    other: &'t Participant<'m, Heap>,
    reserve: Reserve<'m, Heap>,
    leaves: Vec<(i8, u64)>,
}

impl Visitor<Heap> for Linker<'_, '_> {
    fn wants(&self, _: Level) -> Wants {
        Wants::LEAVES
    }
    fn leaf(&mut self, visit: &Visit<'_, Heap>) -> Flow {
        self.leaves.push((visit.level().number(), visit.gpa().0));
        if visit.level() == level(2) {
            let template = self.tree.template(Attributes::RW).unwrap();
            let leaf = Leaf { gpa: visit.gpa(), level: Level::LAST, output: Hpa(0), template };
            self.tree.install(&self.other.pin(), &mut self.reserve, &leaf).unwrap();
        }
        Flow::Next
    }
}

#[test]
fn a_table_that_the_leaf_visit_linked_is_descended_into() {
    let heap = Heap::new(4096, 2);
    let mut s = setup(&heap);
    s.map(1 << 30, 4096, 3);
    let other = Participant::register(&heap).unwrap();
    let mut reserve = Reserve::new(&heap);
    reserve.top_up(3).unwrap();
    let mut linker = Linker { tree: &s.tree, other: &other, reserve, leaves: Vec::new() };
    let at = (1 << 30) + M2;
    s.tree.walk(&s.who, range(at, at + M2), &mut linker).unwrap();
    assert_eq!(linker.leaves[0], (2, at));
    assert_eq!(linker.leaves.len(), 1 + 512);
}

struct StopAt(u64, u32);

impl Visitor<Heap> for StopAt {
    fn wants(&self, _: Level) -> Wants {
        Wants::LEAVES
    }
    fn leaf(&mut self, visit: &Visit<'_, Heap>) -> Flow {
        if visit.gpa().0 != self.0 {
            return Flow::Next;
        }
        self.1 += 1;
        if self.1 < 3 { Flow::Again } else { Flow::Stop(Error::Retry) }
    }
}

#[test]
fn again_comes_back_to_the_same_entry_and_stop_ends_the_walk() {
    let heap = Heap::new(4096, 1);
    let mut s = setup(&heap);
    s.map(0, M2, 3);
    let mut stop = StopAt(0x7000, 0);
    assert_eq!(s.tree.walk(&s.who, range(0, M2), &mut stop), Err(Error::Retry));
    assert_eq!(stop.1, 3);
    assert_eq!(s.who.counters.retries.get(), 2);
}

#[test]
fn ranges_that_are_not_the_trees_are_refused() {
    let heap = Heap::new(4096, 1);
    let s = setup(&heap);
    let limit = Gpa(1 << 40);
    let walk = |range| s.tree.walk(&s.who, range, &mut StopAt(0, 9));
    assert_eq!(walk(range(0, (1 << 40) + 4096)), Err(Error::OutOfRange { limit }));
    assert_eq!(walk(range(1 << 40, 1 << 41)), Err(Error::OutOfRange { limit }));
    assert_eq!(walk(range(1, 4096)), Err(Error::Misaligned { to: 4096 }));
    assert_eq!(walk(range(0, 4095)), Err(Error::Misaligned { to: 4096 }));
    assert_eq!(GpaRange::new(Gpa(0), 0), None);
    assert_eq!(GpaRange::new(Gpa(u64::MAX), 2), None);
}

#[test]
fn sixty_four_k_pages_and_42_bits_make_two_levels_with_blocks_at_the_root() {
    let heap = Heap::new(65536, 1);
    let format = Stage2::<K64>::new(42).unwrap();
    assert_eq!(format.geometry().start(), level(2));
    let tree = Tree::new(&heap, format, 1).unwrap();
    let who = Participant::register(&heap).unwrap();
    let mut reserve = Reserve::new(&heap);
    reserve.top_up(2).unwrap();
    let template = tree.template(Attributes::RW).unwrap();
    let page = Leaf { gpa: Gpa(0x10000), level: Level::LAST, output: Hpa(0x10000), template };
    tree.install(&who.pin(), &mut reserve, &page).unwrap();
    let block = Leaf { gpa: Gpa(0), level: level(2), output: Hpa(0), template };
    let done = tree.install(&who.pin(), &mut reserve, &block).unwrap();
    assert_eq!(done, slat::Installed::Collapsed { dirty: false });
}
