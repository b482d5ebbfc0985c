//! Reverse maps beside a plain list.
#![allow(missing_docs)]

use proptest::prelude::*;
use slat_shadow::rmap::{AddError, Chains, EntryRef, Head, MAX_ENTRIES, ReverseMaps};

/// The entries of one reverse map, and the position that each was told.
#[derive(Default)]
struct Listed {
    head: Head,
    positions: Vec<(EntryRef, usize)>,
}

fn entry(n: usize) -> EntryRef {
    EntryRef::new(n as u32, n % 512).expect("few pages")
}

impl Listed {
    fn add(&mut self, chains: &mut Chains, entry: EntryRef) -> Result<(), AddError> {
        let position = chains.add(&mut self.head, entry)?;
        self.positions.push((entry, position));
        Ok(())
    }

    fn remove(&mut self, chains: &mut Chains, which: usize) {
        let (entry, position) = self.positions.swap_remove(which);
        if let Some(moved) = chains.remove(&mut self.head, entry, position) {
            let place = self.positions.iter_mut().find(|(entry, _)| *entry == moved);
            place.expect("an entry that is there").1 = position;
        }
    }

    /// The count, the entries, their positions and the last one are those of the list.
    fn check(&self, chains: &Chains) {
        assert_eq!(chains.count(&self.head), self.positions.len());
        let mut found = Vec::new();
        chains.for_each(&self.head, |entry| found.push(entry));
        let mut listed = vec![None; self.positions.len()];
        for &(entry, position) in &self.positions {
            assert_eq!(listed[position].replace(entry), None, "two at one position");
        }
        assert_eq!(found.iter().copied().map(Some).collect::<Vec<_>>(), listed);
        assert_eq!(chains.last(&self.head), found.last().copied());
    }
}

#[test]
fn removing_any_one_of_k_mappings_keeps_every_other_findable() {
    for k in [1, 2, 3, 7, 8, 9, 14, 15, 16, 17, 28, 29, 32, 33, 500, 1000, MAX_ENTRIES] {
        let mut chains = Chains::default();
        for which in [0, k / 2, k - 1] {
            let mut map = Listed::default();
            (0..k).for_each(|n| map.add(&mut chains, entry(n)).unwrap());
            map.check(&chains);
            map.remove(&mut chains, which);
            map.check(&chains);
            while !map.positions.is_empty() {
                let which = which % map.positions.len();
                map.remove(&mut chains, which);
                map.check(&chains);
            }
            assert_eq!(chains.bytes(), 0, "removing the last frees the descriptors");
        }
    }
}

#[test]
fn a_full_reverse_map_says_so_and_loses_nothing() {
    let mut chains = Chains::default();
    let mut map = Listed::default();
    (0..MAX_ENTRIES).for_each(|n| map.add(&mut chains, entry(n)).unwrap());
    assert_eq!(map.add(&mut chains, entry(MAX_ENTRIES)), Err(AddError::Full));
    map.check(&chains);
}

#[test]
fn what_is_not_there_is_not_removed() {
    let mut chains = Chains::default();
    for k in [0, 1, 2, 8, 40] {
        let mut map = Listed::default();
        (0..k).for_each(|n| map.add(&mut chains, entry(n)).unwrap());
        for position in [0, 1, 7, 8, 39, 40, MAX_ENTRIES] {
            assert_eq!(chains.remove(&mut map.head, entry(999), position), None);
        }
        map.check(&chains);
    }
}

#[test]
fn a_short_one_takes_little_and_a_long_one_less_for_each() {
    for (k, most) in [(1, 0), (2, 24), (8, 16), (15, 10), (100, 10), (500, 10)] {
        let mut chains = Chains::default();
        let mut map = Listed::default();
        (0..k).for_each(|n| map.add(&mut chains, entry(n)).unwrap());
        assert!(chains.bytes() <= most * k, "{k} entries take {} bytes", chains.bytes());
    }
    assert_eq!(size_of::<Head>(), 8);
}

#[test]
fn entries_beyond_the_numbers_there_are_cannot_be_named() {
    assert_eq!(EntryRef::new(EntryRef::PAGES, 0), None);
    assert_eq!(EntryRef::new(0, 512), None);
    let last = EntryRef::new(EntryRef::PAGES - 1, 511).unwrap();
    assert_eq!((last.page(), last.index()), (EntryRef::PAGES - 1, 511));
}

proptest! {
    #[test]
    fn reverse_maps_are_lists(steps in prop::collection::vec((0usize..3, 0usize..4096, any::<bool>()), 1..400)) {
        let mut chains = Chains::default();
        let mut maps: [Listed; 3] = Default::default();
        let mut next = 0;
        for (map, which, add) in steps {
            let map = &mut maps[map];
            if add || map.positions.is_empty() {
                for _ in 0..which % 9 + 1 {
                    map.add(&mut chains, entry(next)).unwrap();
                    next += 1;
                }
            } else {
                map.remove(&mut chains, which % map.positions.len());
            }
            map.check(&chains);
        }
    }
}
