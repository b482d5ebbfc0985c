//! What each operation promises, on small inputs that broke others, in every kind of tables.
#![allow(missing_docs)]

mod machine;

use std::sync::atomic::Ordering;

use machine::Heap;
use slat::format::arm::{K4, Stage2};
use slat::format::ept::{Ept, InHardware, InSoftware, Suppressed};
use slat::format::npt::Npt;
use slat::{
    Attributes, Destroy, Edges, Error, Format, Gpa, GpaRange, Hpa, Installed, Leaf, Level, Lookup,
    Owner, Participant, Reserve, Tree,
};

/// A format that the promises are kept in: 40-bit addresses, 4K tables.
trait Kind: Format {
    fn plain() -> Self;
    /// With dirty state that hardware keeps, where it can.
    fn tracking() -> Self;
}

impl Kind for Stage2<K4> {
    fn plain() -> Self {
        Self::new(40).unwrap()
    }
    fn tracking() -> Self {
        Self::plain().with_hardware_dirty(true)
    }
}

impl Kind for Ept {
    fn plain() -> Self {
        Self::new(40).unwrap()
    }
    fn tracking() -> Self {
        Self::plain().with_hardware_dirty(true)
    }
}

impl Kind for Ept<InHardware, Suppressed> {
    fn plain() -> Self {
        Self::new(40).unwrap()
    }
    fn tracking() -> Self {
        Self::plain().with_hardware_dirty(true)
    }
}

impl Kind for Ept<InSoftware> {
    fn plain() -> Self {
        Self::new(40).unwrap()
    }
    fn tracking() -> Self {
        Self::plain()
    }
}

impl Kind for Npt {
    fn plain() -> Self {
        Self::new(40).unwrap()
    }
    fn tracking() -> Self {
        Self::plain().with_hardware_dirty(true)
    }
}

/// Tests of what every format promises, and of what those with dirty state promise.
macro_rules! promises {
    (all: $($all:ident)*; dirty: $($dirty:ident)*) => {
        promises!(arm: super::Stage2<super::K4>: $($all)* $($dirty)*);
        promises!(ept: super::Ept: $($all)* $($dirty)*);
        promises!(ept_without_flags: super::Ept<super::InSoftware>: $($all)*);
        promises!(ept_without_ve: super::Ept<super::InHardware, super::Suppressed>: $($all)* $($dirty)*);
        promises!(npt: super::Npt: $($all)* $($dirty)*);
    };
    ($module:ident: $format:ty: $($test:ident)*) => {
        mod $module {
            $(#[test]
            fn $test() {
                super::$test::<$format>();
            })*
        }
    };
}

promises! {
    all:
        a_range_is_mapped_in_the_largest_leaves_that_alignment_allows
        addresses_that_are_not_congruent_get_pages_only
        the_same_page_from_two_vcpus_is_installed_once
        an_owner_note_survives_look_ups_and_is_never_offset
        a_note_on_a_large_entry_is_opened_up_where_a_part_of_it_changes
        a_block_over_pages_leaves_no_page_and_the_old_table_is_freed_after_a_grace_period
        a_hundred_rounds_of_splitting_and_collapsing_leak_no_table
        destroying_in_steps_frees_every_table_once
        dropping_half_way_frees_the_rest
        write_protect_over_holes_protects_every_page
        a_section_of_64_pages_protects_exactly_the_masked_ones
        a_piece_of_a_bitmap_protects_exactly_its_pages_wherever_it_begins_and_however_they_lie
        a_block_that_a_piece_of_a_bitmap_touches_is_protected_as_a_whole
        a_reserve_that_runs_out_says_where_and_going_on_completes_the_work
        an_allocation_that_fails_loses_nothing
        a_block_is_split_to_pages_with_the_same_translation_and_permission
        a_split_with_a_short_reserve_goes_level_by_level_and_on
        split_stops_at_the_level_that_was_asked_for
        unmap_is_exact_and_whole_only_when_told_so
        an_exact_unmap_without_a_table_for_the_edge_changes_nothing_there
        unmapping_more_tables_than_the_backlog_holds_frees_them_all
        unmap_of_whole_tables_costs_one_invalidation_for_their_range
        collapse_gives_a_block_what_all_pages_had_and_any_page_remembers
        collapse_goes_up_level_by_level
        what_does_not_agree_is_not_collapsed
        trim_frees_empty_tables_and_only_those
        aging_counts_and_clears_and_marking_young_sets_again
        relaxing_only_adds
        a_leaf_with_another_output_is_replaced_with_one_invalidation
        an_unlinked_tree_is_linked_whole_or_comes_back
        bad_input_is_refused_with_what_it_should_be
        a_note_that_reaches_beyond_the_range_outlives_an_unmap_of_whole_leaves
        participants_and_reserves_of_another_machine_are_refused;
    dirty:
        dirty_state_is_harvested_once_and_write_protect_takes_the_licence_too
        unmapping_reports_what_hardware_had_marked_dirty
}

const K: u64 = 4096;
const M2: u64 = 2 << 20;
const G1: u64 = 1 << 30;

/// Tables from the root's entries down to a page.
fn depth<F: Kind>() -> usize {
    F::plain().geometry().start().height() as usize
}

fn level(n: i8) -> Level {
    Level::new(n).unwrap()
}

fn range(start: u64, size: u64) -> GpaRange {
    GpaRange::new(Gpa(start), size).unwrap()
}

struct Setup<'m, F: Format> {
    tree: Tree<'m, F, Heap>,
    who: Participant<'m, Heap>,
    reserve: Reserve<'m, Heap>,
}

fn with<F: Format>(heap: &Heap, format: F) -> Setup<'_, F> {
    let tree = Tree::new(heap, format, 1).unwrap();
    let who = Participant::register(heap).unwrap();
    let mut reserve = Reserve::new(heap);
    reserve.top_up(1200).unwrap();
    Setup { tree, who, reserve }
}

fn setup<F: Kind>(heap: &Heap) -> Setup<'_, F> {
    with(heap, F::plain())
}

impl<F: Format> Setup<'_, F> {
    fn map_as(&mut self, at: u64, size: u64, largest: i8, attributes: Attributes) -> u64 {
        let template = self.tree.template(attributes).unwrap();
        let (who, reserve) = (&self.who, &mut self.reserve);
        let output = Hpa(at + G1);
        self.tree.map(who, reserve, range(at, size), output, template, level(largest)).unwrap()
    }

    fn map(&mut self, at: u64, size: u64, largest: i8) -> u64 {
        self.map_as(at, size, largest, Attributes::RW)
    }

    fn unmap(&mut self, at: u64, size: u64) -> u64 {
        let (who, reserve) = (&mut self.who, &mut self.reserve);
        self.tree.unmap(who, reserve, range(at, size), Edges::Exact, |_| {}).unwrap()
    }

    fn install(
        &mut self,
        at: u64,
        at_level: i8,
        attributes: Attributes,
    ) -> Result<Installed, Error> {
        let template = self.tree.template(attributes).unwrap();
        let leaf = Leaf { gpa: Gpa(at), level: level(at_level), output: Hpa(at + G1), template };
        self.tree.install(&self.who.pin(), &mut self.reserve, &leaf)
    }

    fn look(&self, at: u64) -> Lookup {
        self.tree.look_up(&self.who.pin(), Gpa(at)).unwrap()
    }

    /// Level, output and attributes of a mapped address.
    fn leaf(&self, at: u64) -> Option<(i8, u64, Attributes)> {
        match self.look(at) {
            Lookup::Mapped { output, level, template } => {
                Some((level.number(), output.0, self.tree.attributes(template)))
            }
            _ => None,
        }
    }

    fn writable(&self, at: u64) -> bool {
        self.leaf(at).unwrap().2.write
    }
}

fn a_range_is_mapped_in_the_largest_leaves_that_alignment_allows<F: Kind>() {
    let heap = Heap::new(4096, 1);
    let mut s = setup::<F>(&heap);
    let leaves = s.map(G1 - M2 - K, 2 * G1, 1);
    assert_eq!(leaves, 1 + 1 + 1 + 510 + 511);
    for (at, want) in [(G1 - M2 - K, 3), (G1 - M2, 2), (G1, 1), (2 * G1 + 5 * K, 2)] {
        let (level, output, _) = s.leaf(at).unwrap();
        assert_eq!((level, output), (want, at + G1), "{at:#x}");
    }
    assert_eq!(s.look(3 * G1), Lookup::Empty { level: level(1) });
}

fn addresses_that_are_not_congruent_get_pages_only<F: Kind>() {
    let heap = Heap::new(4096, 1);
    let mut s = setup::<F>(&heap);
    let template = s.tree.template(Attributes::RW).unwrap();
    let to = Hpa(G1 + K);
    s.tree.map(&s.who, &mut s.reserve, range(0, 2 * M2), to, template, level(1)).unwrap();
    assert_eq!(s.leaf(M2).unwrap().0, 3);
    assert_eq!(s.leaf(M2).unwrap().1, G1 + K + M2);
}

fn the_same_page_from_two_vcpus_is_installed_once<F: Kind>() {
    let heap = Heap::new(4096, 2);
    let mut s = setup::<F>(&heap);
    assert_eq!(s.install(0x5000, 3, Attributes::RW), Ok(Installed::New));
    let before = s.who.counters.invalidations.get();
    assert_eq!(s.install(0x5000, 3, Attributes::RW), Ok(Installed::Present));
    assert_eq!(s.install(0x5000, 3, Attributes::RO), Ok(Installed::Present));
    assert_eq!(s.who.counters.invalidations.get(), before, "no break-before-make");
}

fn an_owner_note_survives_look_ups_and_is_never_offset<F: Kind>() {
    let heap = Heap::new(4096, 1);
    let mut s = setup::<F>(&heap);
    s.map(0, M2, 3);
    let (who, reserve) = (&mut s.who, &mut s.reserve);
    s.tree.set_owner(who, reserve, range(2 * K, 4 * K), Owner(7), |_| {}).unwrap();
    for page in 2..6 {
        assert_eq!(s.look(page * K), Lookup::Owned { owner: Owner(7), level: Level::LAST });
    }
    assert!(s.leaf(K).is_some() && s.leaf(6 * K).is_some());
    let owned = Error::Owned { at: Gpa(3 * K), owner: Owner(7) };
    assert_eq!(s.install(3 * K, 3, Attributes::RW), Err(owned));
    assert_eq!(s.unmap(2 * K, K), 1);
    assert_eq!(s.look(2 * K), Lookup::Empty { level: Level::LAST });
    assert_eq!(s.look(3 * K), Lookup::Owned { owner: Owner(7), level: Level::LAST });
}

fn a_note_on_a_large_entry_is_opened_up_where_a_part_of_it_changes<F: Kind>() {
    let heap = Heap::new(4096, 1);
    let mut s = setup::<F>(&heap);
    let (who, reserve) = (&mut s.who, &mut s.reserve);
    s.tree.set_owner(who, reserve, range(0, G1), Owner(1), |_| {}).unwrap();
    assert_eq!(s.look(M2), Lookup::Owned { owner: Owner(1), level: level(1) });
    s.unmap(M2 + K, K);
    assert_eq!(s.look(M2 + K), Lookup::Empty { level: Level::LAST });
    assert_eq!(s.look(M2), Lookup::Owned { owner: Owner(1), level: Level::LAST });
    assert_eq!(s.look(3 * M2), Lookup::Owned { owner: Owner(1), level: level(2) });
}

fn a_block_over_pages_leaves_no_page_and_the_old_table_is_freed_after_a_grace_period<F: Kind>() {
    let heap = Heap::new(4096, 1);
    let mut s = setup::<F>(&heap);
    s.map(0, M2, 3);
    let freed = heap.freed.load(Ordering::Relaxed);
    assert_eq!(s.install(0, 2, Attributes::RW), Ok(Installed::Collapsed { dirty: false }));
    assert_eq!(s.leaf(5 * K).unwrap().0, 2);
    assert_eq!(heap.freed.load(Ordering::Relaxed), freed);
    assert_eq!(s.tree.waiting(), 1);
    s.tree.reclaim(&mut s.who);
    assert_eq!(heap.freed.load(Ordering::Relaxed), freed + 1);
}

fn a_hundred_rounds_of_splitting_and_collapsing_leak_no_table<F: Kind>() {
    let heap = Heap::new(4096, 1);
    let mut s = setup::<F>(&heap);
    s.map(0, M2, 2);
    let tables = heap.in_use() - s.reserve.len();
    for _ in 0..100 {
        s.tree.write_protect(&s.who, range(0, M2), |_| {}).unwrap();
        assert_eq!(s.install(5 * K, 3, Attributes::RW), Ok(Installed::Relaxed));
        assert!(s.writable(5 * K) && !s.writable(4 * K));
        assert!(matches!(s.install(0, 2, Attributes::RW), Ok(Installed::Collapsed { .. })));
        s.tree.reclaim(&mut s.who);
        s.reserve.top_up(10).unwrap();
        assert_eq!(heap.in_use() - s.reserve.len(), tables);
    }
}

fn destroying_in_steps_frees_every_table_once<F: Kind>() {
    let heap = Heap::new(4096, 1);
    {
        let mut s = setup::<F>(&heap);
        s.map(0, G1, 3);
        s.map(5 * G1, M2, 3);
        let Setup { tree, who, reserve } = s;
        drop(reserve);
        let mut destroy: Destroy<'_, _, _> = tree.destroy();
        let mut steps = 0;
        while destroy.step(10) {
            steps += 1;
        }
        assert_eq!(steps, (513 + 2) / 10);
        assert!(!destroy.step(1));
        drop((destroy, who));
    }
    assert_eq!(heap.in_use(), 0);
}

fn dropping_half_way_frees_the_rest<F: Kind>() {
    let heap = Heap::new(4096, 1);
    {
        let mut s = setup::<F>(&heap);
        s.map(0, G1, 3);
        s.unmap(0, 4 * M2);
        let mut destroy = s.tree.destroy();
        assert!(destroy.step(100));
    }
    assert_eq!(heap.in_use(), 0);
}

fn write_protect_over_holes_protects_every_page<F: Kind>() {
    let heap = Heap::new(4096, 1);
    let mut s = setup::<F>(&heap);
    s.map(K, K, 3);
    s.map(3 * K, K, 3);
    assert_eq!(s.tree.write_protect(&s.who, range(0, 4 * K), |_| {}), Ok(2));
    assert!(!s.writable(K) && !s.writable(3 * K));
    assert_eq!(s.tree.write_protect(&s.who, range(0, 4 * K), |_| {}), Ok(0));
}

fn a_section_of_64_pages_protects_exactly_the_masked_ones<F: Kind>() {
    let heap = Heap::new(4096, 1);
    let mut s = setup::<F>(&heap);
    s.map(0, M2, 3);
    let mask = 0x8000_0000_0000_0001 | 0b1011 << 20;
    let before = s.who.counters.invalidations.get();
    assert_eq!(s.tree.write_protect_mask(&s.who, Gpa(64 * K), mask, |_| {}), Ok(5));
    assert_eq!(s.who.counters.invalidations.get(), before + 1, "one for the section");
    for page in 0..512u64 {
        let masked = (64..128).contains(&page) && mask >> (page - 64) & 1 == 1;
        assert_eq!(s.writable(page * K), !masked, "page {page}");
    }
    assert_eq!(s.tree.write_protect_mask(&s.who, Gpa(0), 0, |_| {}), Ok(0));
    let limit = Gpa(1 << 40);
    let beyond = s.tree.write_protect_mask(&s.who, Gpa((1 << 40) - 64 * K), 1 << 63, |_| {});
    assert_eq!(beyond, Ok(0));
    let beyond = s.tree.write_protect_mask(&s.who, Gpa((1 << 40) - K), 2, |_| {});
    assert_eq!(beyond, Err(Error::OutOfRange { limit }));
}

fn a_piece_of_a_bitmap_protects_exactly_its_pages_wherever_it_begins_and_however_they_lie<
    F: Kind,
>() {
    let heap = Heap::new(4096, 1);
    let mut s = setup::<F>(&heap);
    let pages = 3 * 512;
    s.map(0, 3 * M2, 3);
    // Nothing, one, all, half, the ends of a word, and a seldom one, in every order of neighbours.
    let words = [0, 1 << 63, u64::MAX, 0x5555_5555_5555_5555, 0, 0, 1 << 63 | 1, 1 << 37, u64::MAX];
    for first in [0, 1, 7, 8, 63, 64, 509] {
        s.unmap(0, 3 * M2);
        s.map(0, 3 * M2, 3);
        let bit = |page: u64| {
            let ahead = page.checked_sub(first)?;
            Some(words.get((ahead / 64) as usize)? >> (ahead % 64) & 1 == 1)
        };
        let wanted = (0..pages).filter(|&page| bit(page) == Some(true)).count() as u64;
        let before = s.who.counters.invalidations.get();
        let done = s.tree.write_protect_pages(&s.who, Gpa(first * K), &words, |_| {});
        assert_eq!(done, Ok(wanted), "from {first}");
        assert_eq!(s.who.counters.invalidations.get(), before + 1, "one for all");
        for page in 0..pages {
            assert_eq!(s.writable(page * K), bit(page) != Some(true), "page {page} from {first}");
        }
        let again = s.tree.write_protect_pages(&s.who, Gpa(first * K), &words, |_| {});
        assert_eq!(again, Ok(0));
    }
    assert_eq!(s.tree.write_protect_pages(&s.who, Gpa(0), &[], |_| {}), Ok(0));
    assert_eq!(s.tree.write_protect_pages(&s.who, Gpa(0), &[0, 0], |_| {}), Ok(0));
    let limit = Gpa(1 << 40);
    let last = Gpa((1 << 40) - 64 * K);
    let beyond = s.tree.write_protect_pages(&s.who, last, &[1, 1], |_| {});
    assert_eq!(beyond, Err(Error::OutOfRange { limit }));
    let beyond = s.tree.write_protect_pages(&s.who, Gpa(u64::MAX - 4095), &[1, 1], |_| {});
    assert_eq!(beyond, Err(Error::OutOfRange { limit }));
}

fn a_block_that_a_piece_of_a_bitmap_touches_is_protected_as_a_whole<F: Kind>() {
    let heap = Heap::new(4096, 1);
    let mut s = setup::<F>(&heap);
    s.map(0, 2 * M2, 2);
    // The set bits are in the second block; the walk begins and ends there.
    let mut words = [0; 16];
    (words[8], words[15]) = (1 << 5, 1 << 63);
    assert_eq!(s.tree.write_protect_pages(&s.who, Gpa(0), &words, |_| {}), Ok(1));
    assert!(s.writable(0) && !s.writable(M2));
    // From the first block to the third there are bits, but none of the second.
    s.unmap(0, 2 * M2);
    s.map(0, 3 * M2, 2);
    let mut words = [0; 24];
    (words[0], words[23]) = (1, 1 << 63);
    assert_eq!(s.tree.write_protect_pages(&s.who, Gpa(0), &words, |_| {}), Ok(2));
    assert!(!s.writable(0) && s.writable(M2) && !s.writable(2 * M2));
}

fn a_reserve_that_runs_out_says_where_and_going_on_completes_the_work<F: Kind>() {
    let heap = Heap::new(4096, 1);
    let mut s = setup::<F>(&heap);
    let rw = s.tree.template(Attributes::RW).unwrap();
    for first in 0..6 {
        let mut reserve = Reserve::new(&heap);
        reserve.top_up(first).unwrap();
        let (mut at, end) = (G1 - 2 * M2, G1 + 2 * M2);
        let mut rounds = 0;
        loop {
            let rest = range(at, end - at);
            match s.tree.map(&s.who, &mut reserve, rest, Hpa(at), rw, Level::LAST) {
                Ok(_) => break,
                Err(Error::NeedTables { at: stopped, tables }) => {
                    assert!(stopped.0 >= at && tables > 0);
                    at = stopped.0;
                    reserve.top_up(1).unwrap();
                }
                Err(error) => panic!("{error}"),
            }
            rounds += 1;
        }
        // A table above those of pages for each level, one for each GiB where they begin at the root.
        assert!(rounds <= 4 + 2 * depth::<F>());
        for at in (G1 - 2 * M2..end).step_by(K as usize) {
            assert_eq!(s.leaf(at).map(|leaf| (leaf.0, leaf.1)), Some((3, at)));
        }
        s.unmap(0, 2 * G1);
        s.tree.reclaim(&mut s.who);
    }
}

fn an_allocation_that_fails_loses_nothing<F: Kind>() {
    for allowed in 0..4 {
        let heap = Heap::new(4096, 1);
        {
            heap.allowed.store(allowed, Ordering::Relaxed);
            let tree = Tree::new(&heap, F::plain(), 1);
            assert_eq!(tree.is_ok(), allowed >= 2);
            let Ok(tree) = tree else { continue };
            let mut reserve = Reserve::new(&heap);
            let missing = reserve.top_up(5).unwrap_err().missing;
            assert_eq!(missing as isize, 5 - (allowed - 2));
            assert_eq!(reserve.len() as isize, allowed - 2);
            let who = Participant::register(&heap).unwrap();
            let template = tree.template(Attributes::RW).unwrap();
            let leaf = Leaf { gpa: Gpa(0), level: Level::LAST, output: Hpa(0), template };
            let needed = tree.install(&who.pin(), &mut reserve, &leaf);
            assert_eq!(needed, Err(Error::NeedTables { at: Gpa(0), tables: depth::<F>() }));
            heap.allowed.store(-1, Ordering::Relaxed);
            reserve.top_up(depth::<F>()).unwrap();
            assert_eq!(tree.install(&who.pin(), &mut reserve, &leaf), Ok(Installed::New));
        }
        assert_eq!(heap.in_use(), 0);
    }
}

fn a_block_is_split_to_pages_with_the_same_translation_and_permission<F: Kind>() {
    let heap = Heap::new(4096, 1);
    let mut s = setup::<F>(&heap);
    let odd = Attributes { software: 9, accessed: false, ..Attributes::RO };
    s.map_as(G1, G1, 1, odd);
    assert_eq!(s.tree.split(&s.who, &mut s.reserve, range(G1 + 7 * M2, K), Level::LAST), Ok(1));
    for at in (G1..2 * G1).step_by((M2 - K) as usize) {
        assert_eq!(s.leaf(at & !(K - 1)), Some((3, (at & !(K - 1)) + G1, odd)));
    }
    assert_eq!(s.tree.split(&s.who, &mut s.reserve, range(G1, G1), Level::LAST), Ok(0));
}

fn a_split_with_a_short_reserve_goes_level_by_level_and_on<F: Kind>() {
    let heap = Heap::new(4096, 1);
    let mut s = setup::<F>(&heap);
    s.map(G1, G1, 1);
    let mut reserve = Reserve::new(&heap);
    let (mut at, mut split, mut rounds) = (G1, 0, 0);
    loop {
        reserve.top_up(7).unwrap();
        match s.tree.split(&s.who, &mut reserve, range(at, 2 * G1 - at), Level::LAST) {
            Ok(n) => {
                split += n;
                break;
            }
            Err(Error::NeedTables { at: stopped, .. }) => at = stopped.0,
            Err(error) => panic!("{error}"),
        }
        rounds += 1;
    }
    assert!(rounds > 70 && split < 8, "{rounds} {split}");
    assert_eq!(s.who.counters.splits.get(), 513);
    assert!((G1..2 * G1).step_by(M2 as usize).all(|at| s.leaf(at + 3 * K).unwrap().0 == 3));
}

fn split_stops_at_the_level_that_was_asked_for<F: Kind>() {
    let heap = Heap::new(4096, 1);
    let mut s = setup::<F>(&heap);
    s.map(G1, G1, 1);
    assert_eq!(s.tree.split(&s.who, &mut s.reserve, range(G1, G1), level(2)), Ok(1));
    assert_eq!(s.leaf(G1 + M2).unwrap().0, 2);
    let refused = s.tree.split(&s.who, &mut s.reserve, range(G1, G1), level(0));
    assert_eq!(refused, Err(Error::Level(level(0))));
}

fn unmap_is_exact_and_whole_only_when_told_so<F: Kind>() {
    let heap = Heap::new(4096, 1);
    let mut s = setup::<F>(&heap);
    s.map(0, 2 * M2, 2);
    s.unmap(5 * K, K);
    assert_eq!(s.leaf(5 * K), None);
    assert!(s.leaf(4 * K).is_some() && s.leaf(6 * K).is_some() && s.leaf(511 * K).is_some());
    let (who, reserve) = (&mut s.who, &mut s.reserve);
    s.tree.unmap(who, reserve, range(M2 + K, K), Edges::Whole, |_| {}).unwrap();
    assert_eq!(s.leaf(M2), None);
}

fn an_exact_unmap_without_a_table_for_the_edge_changes_nothing_there<F: Kind>() {
    let heap = Heap::new(4096, 1);
    let mut s = setup::<F>(&heap);
    s.map(0, 2 * M2, 2);
    let mut empty = Reserve::new(&heap);
    let stopped = s.tree.unmap(&mut s.who, &mut empty, range(0, M2 + K), Edges::Exact, |_| {});
    assert_eq!(stopped, Err(Error::NeedTables { at: Gpa(M2), tables: 1 }));
    assert_eq!(s.leaf(0), None);
    assert_eq!(s.leaf(M2).unwrap().0, 2);
}

fn unmapping_more_tables_than_the_backlog_holds_frees_them_all<F: Kind>() {
    let heap = Heap::new(4096, 1);
    let mut s = setup::<F>(&heap);
    let tables = heap.in_use() - s.reserve.len();
    for part in [1024, 700, 3] {
        s.reserve.top_up(1200).unwrap();
        s.map(G1, part * M2, 3);
        s.unmap(G1, part * M2);
        s.tree.trim(&mut s.who, range(0, 1 << 40)).unwrap();
        s.tree.reclaim(&mut s.who);
        assert_eq!(heap.in_use() - s.reserve.len(), tables);
        assert_eq!(s.tree.waiting(), 0);
    }
}

fn unmap_of_whole_tables_costs_one_invalidation_for_their_range<F: Kind>() {
    let heap = Heap::new(4096, 1);
    let mut s = setup::<F>(&heap);
    s.map(G1, 256 * M2, 3);
    s.tree.reclaim(&mut s.who);
    let before = s.who.counters.invalidations.get();
    assert_eq!(s.unmap(G1, 256 * M2), 256);
    assert_eq!(s.who.counters.invalidations.get(), before + 1);
}

fn collapse_gives_a_block_what_all_pages_had_and_any_page_remembers<F: Kind>() {
    let heap = Heap::new(4096, 1);
    let mut s = setup::<F>(&heap);
    s.map_as(0, 2 * M2, 3, Attributes { accessed: false, ..Attributes::RW });
    s.tree.write_protect(&s.who, range(9 * K, K), |_| {}).unwrap();
    s.tree.mark_young(&s.who.pin(), Gpa(30 * K)).unwrap();
    assert_eq!(s.tree.collapse(&mut s.who, range(0, 2 * M2), Level::TOP), Ok(2));
    assert_eq!(s.leaf(0), Some((2, G1, Attributes::RO)));
    assert_eq!(s.leaf(M2), Some((2, G1 + M2, Attributes { accessed: false, ..Attributes::RW })));
}

fn collapse_goes_up_level_by_level<F: Kind>() {
    let heap = Heap::new(4096, 1);
    let mut s = setup::<F>(&heap);
    s.map(G1, G1, 3);
    assert_eq!(s.tree.collapse(&mut s.who, range(G1, G1), Level::TOP), Ok(513));
    assert_eq!(s.leaf(G1 + 12345 * K).unwrap().0, 1);
}

fn what_does_not_agree_is_not_collapsed<F: Kind>() {
    let heap = Heap::new(4096, 1);
    let mut s = setup::<F>(&heap);
    s.map(0, 5 * M2, 3);
    s.unmap(3 * K, K);
    s.tree.set_software(&s.who, range(M2 + K, K), 0, 1).unwrap();
    let device = s.tree.template(Attributes::DEVICE).unwrap();
    s.unmap(2 * M2, K);
    let leaf =
        Leaf { gpa: Gpa(2 * M2), level: Level::LAST, output: Hpa(G1 + 2 * M2), template: device };
    s.tree.install(&s.who.pin(), &mut s.reserve, &leaf).unwrap();
    let other = Leaf { gpa: Gpa(3 * M2), output: Hpa(0), ..leaf };
    assert!(matches!(
        s.tree.install(&s.who.pin(), &mut s.reserve, &other),
        Ok(Installed::Replaced { .. })
    ));
    assert_eq!(s.tree.collapse(&mut s.who, range(0, 4 * M2), Level::TOP), Ok(0));
    assert_eq!(
        s.tree.collapse(&mut s.who, range(4 * M2, M2 - K), Level::TOP),
        Ok(0),
        "not wholly inside"
    );
    for table in 0..5 {
        assert_eq!(s.leaf(table * M2 + 7 * K).unwrap().0, 3);
    }
}

fn trim_frees_empty_tables_and_only_those<F: Kind>() {
    let heap = Heap::new(4096, 1);
    let mut s = setup::<F>(&heap);
    s.map(0, K, 3);
    s.map(M2, K, 3);
    let (who, reserve) = (&mut s.who, &mut s.reserve);
    s.tree.set_owner(who, reserve, range(2 * M2, K), Owner(1), |_| {}).unwrap();
    s.unmap(0, K);
    assert_eq!(s.tree.trim(&mut s.who, range(0, G1)), Ok(1));
    assert_eq!(s.look(0), Lookup::Empty { level: level(2) });
    assert!(s.leaf(M2).is_some());
    s.unmap(M2, K);
    s.unmap(2 * M2, K);
    assert_eq!(s.tree.trim(&mut s.who, range(0, G1)), Ok(3), "and the table above");
    assert_eq!(s.look(0), Lookup::Empty { level: level(1) });
}

fn aging_counts_and_clears_and_marking_young_sets_again<F: Kind>() {
    let heap = Heap::new(4096, 1);
    let mut s = setup::<F>(&heap);
    s.map(0, 20 * K, 3);
    s.map(M2, M2, 2);
    let before = s.who.counters.invalidations.get();
    assert_eq!(s.tree.age(&s.who, range(0, 2 * M2), false), Ok(21));
    assert_eq!(s.tree.age(&s.who, range(0, 2 * M2), true), Ok(21));
    assert_eq!(s.tree.age(&s.who, range(0, 2 * M2), true), Ok(0));
    assert_eq!(s.tree.mark_young(&s.who.pin(), Gpa(M2 + 3 * K)), Ok(true));
    assert_eq!(s.tree.mark_young(&s.who.pin(), Gpa(4 * M2)), Ok(false));
    assert_eq!(s.tree.age(&s.who, range(0, 2 * M2), false), Ok(1));
    assert_eq!(s.who.counters.invalidations.get(), before, "aging invalidates nothing");
}

fn relaxing_only_adds<F: Kind>() {
    let heap = Heap::new(4096, 1);
    let mut s = setup::<F>(&heap);
    s.map_as(0, 4 * K, 3, Attributes::RO);
    let rwx = s.tree.template(Attributes::RWX).unwrap();
    assert_eq!(s.tree.relax(&s.who, range(0, 2 * K), 0, rwx), Ok(2));
    assert_eq!(s.leaf(0).unwrap().2, Attributes::RWX);
    let ro = s.tree.template(Attributes::RO).unwrap();
    assert_eq!(s.tree.relax(&s.who, range(0, 4 * K), 0, ro), Ok(0));
    assert_eq!(s.leaf(0).unwrap().2, Attributes::RWX);
    assert_eq!(s.leaf(2 * K).unwrap().2, Attributes::RO);
}

fn dirty_state_is_harvested_once_and_write_protect_takes_the_licence_too<F: Kind>() {
    let heap = Heap::new(4096, 1);
    let format = F::tracking();
    let mut s = with(&heap, format);
    let dirty = Attributes { dirty: slat::Dirty::Dirty, ..Attributes::RW };
    let clean = Attributes { dirty: slat::Dirty::Clean, ..Attributes::RW };
    s.map_as(0, 10 * K, 3, clean);
    s.map_as(3 * K, 2 * K, 3, dirty);
    s.unmap(3 * K, 2 * K);
    s.map_as(3 * K, 2 * K, 3, dirty);
    let mut seen = Vec::new();
    let mut sink = |range: GpaRange| seen.push((range.start().0, range.size()));
    assert_eq!(s.tree.harvest_dirty(&s.who, range(0, 10 * K), &mut sink), Ok(2));
    assert_eq!(s.tree.harvest_dirty(&s.who, range(0, 10 * K), &mut sink), Ok(0));
    assert_eq!(seen, [(3 * K, K), (4 * K, K)]);
    assert_eq!(s.leaf(3 * K).unwrap().2, clean);
    s.tree.write_protect(&s.who, range(0, 10 * K), |_| {}).unwrap();
    assert_eq!(s.leaf(3 * K).unwrap().2, Attributes::RO);
}

fn unmapping_reports_what_hardware_had_marked_dirty<F: Kind>() {
    let heap = Heap::new(4096, 1);
    let format = F::tracking();
    let mut s = with(&heap, format);
    let tables = heap.in_use() - s.reserve.len();
    s.map_as(0, M2, 3, Attributes { dirty: slat::Dirty::Clean, ..Attributes::RW });
    s.unmap(7 * K, K);
    s.map_as(7 * K, K, 3, Attributes { dirty: slat::Dirty::Dirty, ..Attributes::RW });
    let mut seen = Vec::new();
    let sink = |range: GpaRange| seen.push((range.start().0, range.size()));
    s.tree.unmap(&mut s.who, &mut s.reserve, range(0, 1 << 40), Edges::Exact, sink).unwrap();
    assert_eq!(seen, [(7 * K, K)]);
    s.tree.reclaim(&mut s.who);
    assert_eq!(heap.in_use() - s.reserve.len(), tables, "covered tables leave too");
}

fn a_leaf_with_another_output_is_replaced_with_one_invalidation<F: Kind>() {
    let heap = Heap::new(4096, 1);
    let mut s = setup::<F>(&heap);
    s.map(0, K, 3);
    let template = s.tree.template(Attributes::RO).unwrap();
    let leaf = Leaf { gpa: Gpa(0), level: Level::LAST, output: Hpa(8 * K), template };
    let before = s.who.counters.invalidations.get();
    let done = s.tree.install(&s.who.pin(), &mut s.reserve, &leaf);
    assert_eq!(done, Ok(Installed::Replaced { dirty: false }));
    assert_eq!(s.who.counters.invalidations.get(), before + 1);
    assert_eq!(s.leaf(0), Some((3, 8 * K, Attributes::RO)));
}

fn an_unlinked_tree_is_linked_whole_or_comes_back<F: Kind>() {
    let heap = Heap::new(4096, 1);
    let mut s = setup::<F>(&heap);
    let held = s.reserve.len();
    let rw = s.tree.template(Attributes::RW).unwrap();
    fn build<'m, F: Kind>(s: &mut Setup<'m, F>) -> slat::Unlinked<'m, F, Heap> {
        let rw = s.tree.template(Attributes::RW).unwrap();
        s.tree.build_unlinked(&mut s.reserve, level(2), Hpa(4 * M2), rw, Level::LAST).unwrap()
    }
    s.map(M2, K, 3);
    let unlinked = build(&mut s);
    let (error, unlinked) = s.tree.link(&s.who.pin(), Gpa(M2), unlinked).unwrap_err();
    assert_eq!(error, Error::Occupied { at: Gpa(M2) });
    let (error, unlinked) = s.tree.link(&s.who.pin(), Gpa(5 * G1), unlinked).unwrap_err();
    assert_eq!(error, Error::NoTable { level: level(1) });
    s.tree.link(&s.who.pin(), Gpa(2 * M2), unlinked).unwrap();
    assert_eq!(s.leaf(2 * M2 + 5 * K), Some((3, 4 * M2 + 5 * K, Attributes::RW)));
    let unlinked = build(&mut s);
    s.tree.dismantle(&mut s.reserve, unlinked).unwrap();
    assert_eq!(s.reserve.len(), held - 1 - depth::<F>());
    let bad = s.tree.build_unlinked(&mut s.reserve, level(2), Hpa(K), rw, Level::LAST);
    assert_eq!(bad.unwrap_err(), Error::Misaligned { to: M2 });
}

fn bad_input_is_refused_with_what_it_should_be<F: Kind>() {
    let heap = Heap::new(4096, 1);
    let mut s = setup::<F>(&heap);
    let (limit, bits) = (Gpa(1 << 40), F::plain().output_bits());
    assert_eq!(s.install(1 << 40, 3, Attributes::RW), Err(Error::OutOfRange { limit }));
    assert_eq!(s.install(K, 2, Attributes::RW), Err(Error::Misaligned { to: M2 }));
    assert_eq!(s.install(0, 0, Attributes::RW), Err(Error::Level(level(0))));
    let template = s.tree.template(Attributes::RW).unwrap();
    let leaf = Leaf { gpa: Gpa(0), level: Level::LAST, output: Hpa(1 << bits), template };
    let refused = s.tree.install(&s.who.pin(), &mut s.reserve, &leaf);
    assert_eq!(refused, Err(Error::OutputTooLarge { bits }));
    let wraps = Hpa(u64::MAX - K + 1);
    let refused = s.tree.map(&s.who, &mut s.reserve, range(0, 2 * K), wraps, template, Level::LAST);
    assert_eq!(refused, Err(Error::OutputTooLarge { bits }));
    assert_eq!(s.tree.look_up(&s.who.pin(), limit), Err(Error::OutOfRange { limit }));
    assert!(Participant::register(&heap).is_err());
}

fn a_note_that_reaches_beyond_the_range_outlives_an_unmap_of_whole_leaves<F: Kind>() {
    let heap = Heap::new(4096, 1);
    let mut s = setup::<F>(&heap);
    let (who, reserve) = (&mut s.who, &mut s.reserve);
    s.tree.set_owner(who, reserve, range(0, M2), Owner(3), |_| {}).unwrap();
    let mut empty = Reserve::new(&heap);
    s.tree.unmap(&mut s.who, &mut empty, range(K, K), Edges::Whole, |_| {}).unwrap();
    assert_eq!(s.look(K), Lookup::Owned { owner: Owner(3), level: level(2) });
}

fn participants_and_reserves_of_another_machine_are_refused<F: Kind>() {
    let (heap, other) = (Heap::new(4096, 1), Heap::new(4096, 1));
    let (mut s, mut strange) = (setup::<F>(&heap), setup::<F>(&other));
    s.map(0, M2, 3);
    let refused = Error::OtherMachine;
    let template = s.tree.template(Attributes::RW).unwrap();
    let leaf = Leaf { gpa: Gpa(M2), level: Level::LAST, output: Hpa(0), template };
    let pin = strange.who.pin();
    assert_eq!(s.tree.look_up(&pin, Gpa(0)), Err(refused));
    assert_eq!(s.tree.mark_young(&pin, Gpa(0)), Err(refused));
    assert_eq!(s.tree.install(&pin, &mut s.reserve, &leaf), Err(refused));
    drop(pin);
    let pin = s.who.pin();
    assert_eq!(s.tree.install(&pin, &mut strange.reserve, &leaf), Err(refused));
    drop(pin);
    let all = range(0, M2);
    assert_eq!(s.tree.write_protect(&strange.who, all, |_| {}), Err(refused));
    assert_eq!(s.tree.split(&s.who, &mut strange.reserve, all, Level::LAST), Err(refused));
    let unmap = |who, reserve| s.tree.unmap(who, reserve, all, Edges::Exact, |_| {});
    assert_eq!(unmap(&mut s.who, &mut strange.reserve), Err(refused));
    assert_eq!(unmap(&mut strange.who, &mut s.reserve), Err(refused));
    s.install(0, 2, Attributes::RW).unwrap();
    s.tree.reclaim(&mut strange.who);
    assert_eq!(s.tree.waiting(), 1, "nothing is freed after somebody else's grace period");
}

// The machine keeps its log in debug builds only, so that benches do not measure it.
#[cfg(debug_assertions)]
#[test]
fn removing_a_table_invalidates_its_aligned_range_without_a_level_hint() {
    let heap = Heap::new(4096, 1);
    let mut s = setup::<Stage2<K4>>(&heap);
    s.map(0, 4 * M2, 3);
    heap.log.lock().unwrap().clear();
    s.unmap(M2, M2);
    let log = heap.log.lock().unwrap();
    let hints = log.iter().filter(|(_, level)| level.is_some()).count();
    assert_eq!(hints, 0);
    assert!(!log.is_empty());
}

#[test]
fn concatenated_roots_live_on() {
    let heap = Heap::new(4096, 1);
    let mut s = with(&heap, Stage2::<K4>::new(43).unwrap());
    assert_eq!(s.tree.geometry().root_tables(), 16);
    let at = 7 * (512 * G1) + 3 * G1;
    s.map(at, M2, 3);
    assert_eq!(s.leaf(at + K).unwrap().0, 3);
    s.unmap(7 * 512 * G1, 512 * G1);
    assert_eq!(s.leaf(at + K), None);
    s.tree.reclaim(&mut s.who);
    s.map(0, K, 3);
    s.map(15 * 512 * G1, K, 3);
    assert!(s.leaf(0).is_some() && s.leaf(15 * 512 * G1).is_some());
}

#[test]
fn templates_and_unlinked_trees_of_another_configuration_are_refused() {
    let heap = Heap::new(4096, 1);
    let mut s = setup::<Stage2<K4>>(&heap);
    let wide = Tree::new(&heap, Stage2::<K4>::wide(48).unwrap(), 2).unwrap();
    let dirty =
        Tree::new(&heap, Stage2::<K4>::new(40).unwrap().with_hardware_dirty(true), 3).unwrap();
    let clean = Attributes { dirty: slat::Dirty::Clean, ..Attributes::RW };
    for template in [wide.template(Attributes::RW).unwrap(), dirty.template(clean).unwrap()] {
        let leaf = Leaf { gpa: Gpa(0), level: Level::LAST, output: Hpa(0), template };
        let refused = Err(Error::OtherFormat);
        assert_eq!(s.tree.install(&s.who.pin(), &mut s.reserve, &leaf), refused);
        let (who, reserve) = (&s.who, &mut s.reserve);
        let all = range(0, M2);
        assert_eq!(
            s.tree.map(who, reserve, all, Hpa(0), template, level(2)),
            Err(Error::OtherFormat)
        );
        assert_eq!(s.tree.relax(who, all, 0, template), Err(Error::OtherFormat));
    }
    let rw = s.tree.template(Attributes::RW).unwrap();
    let built = s.tree.build_unlinked(&mut s.reserve, level(2), Hpa(0), rw, Level::LAST).unwrap();
    let (error, built) = wide.link(&s.who.pin(), Gpa(0), built).unwrap_err();
    assert_eq!(error, Error::OtherFormat);
    s.tree.dismantle(&mut s.reserve, built).unwrap();
}

#[test]
fn levels_that_a_tree_has_not_are_refused() {
    let heap = Heap::new(65536, 1);
    let tree = Tree::new(&heap, Stage2::<slat::format::arm::K64>::new(48).unwrap(), 1).unwrap();
    let who = Participant::register(&heap).unwrap();
    let mut reserve = Reserve::new(&heap);
    let template = tree.template(Attributes::RW).unwrap();
    let leaf = Leaf { gpa: Gpa(0), level: Level::TOP, output: Hpa(0), template };
    assert_eq!(tree.install(&who.pin(), &mut reserve, &leaf), Err(Error::Level(Level::TOP)));
    let built = tree.build_unlinked(&mut reserve, Level::TOP, Hpa(0), template, Level::LAST);
    assert_eq!(built.unwrap_err(), Error::Level(Level::TOP));
    assert_eq!(tree.geometry().size(Level::TOP), 0);
}

#[test]
fn a_split_on_x86_invalidates_nothing_and_the_next_change_of_a_page_everything() {
    fn check<F: Kind>() {
        let heap = Heap::new(4096, 1);
        let mut s = setup::<F>(&heap);
        s.map(0, 2 * M2, 2);
        let before = s.who.counters.invalidations.get();
        s.tree.split(&s.who, &mut s.reserve, range(0, 2 * M2), Level::LAST).unwrap();
        assert_eq!((s.who.counters.splits.get(), s.who.counters.invalidations.get()), (2, before));
        s.tree.write_protect(&s.who, range(K, K), |_| {}).unwrap();
        assert_eq!(s.who.counters.invalidations.get(), before + 1);
    }
    check::<Ept>();
    check::<Ept<InSoftware>>();
    check::<Npt>();
}
