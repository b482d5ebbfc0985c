//! The translations of one level of one VMID: any number of them, found by frame number, in groups of 64 neighbours.

use std::collections::HashMap;

use super::Translation;
use super::hash::FrameHash;

const GROUP: u64 = 64;

/// All translations of one level.
#[derive(Debug, Default)]
pub(crate) struct Leaves {
    groups: HashMap<u64, Box<Group>, FrameHash>,
    /// Groups with translations whose stage-2 part is gone.
    marked: Vec<u64>,
}

/// 64 neighbouring frames.
#[derive(Debug)]
struct Group {
    present: u64,
    /// Those of `present` whose stage-2 part was invalidated: only the combination with stage 1 is still cached.
    gone: u64,
    translations: [Translation; GROUP as usize],
}

/// Those of the frames `first..=last` that are in group `key`.
fn mask(key: u64, first: u64, last: u64) -> u64 {
    if key < first / GROUP || last / GROUP < key {
        return 0;
    }
    let low = if key == first / GROUP { first % GROUP } else { 0 };
    let high = if key == last / GROUP { last % GROUP } else { GROUP - 1 };
    (!0 << low) & (!0 >> (GROUP - 1 - high))
}

fn bits(mut mask: u64) -> impl Iterator<Item = u64> {
    std::iter::from_fn(move || {
        let bit = (mask != 0).then(|| u64::from(mask.trailing_zeros()))?;
        mask &= mask - 1;
        Some(bit)
    })
}

impl Leaves {
    #[inline]
    pub(crate) fn get(&self, frame: u64) -> Option<&Translation> {
        if self.groups.is_empty() {
            return None;
        }
        let group = self.groups.get(&(frame / GROUP))?;
        let bit = frame % GROUP;
        (group.present & (1 << bit) != 0).then(|| &group.translations[bit as usize])
    }

    /// Adds a translation, or replaces that of the same frame.
    pub(crate) fn insert(&mut self, frame: u64, translation: Translation) {
        let group = self.groups.entry(frame / GROUP).or_insert_with(|| {
            let translations = [Translation::default(); GROUP as usize];
            Box::new(Group { present: 0, gone: 0, translations })
        });
        let bit = frame % GROUP;
        group.present |= 1 << bit;
        group.gone &= !(1 << bit);
        group.translations[bit as usize] = translation;
    }

    /// Whether it is quicker to look at every group than at every key of the range.
    fn few(&self, first: u64, last: u64) -> bool {
        (last / GROUP - first / GROUP) >= self.groups.len() as u64
    }

    /// The first translation (in no order) of `first..=last` that passes `test`.
    pub(crate) fn any(
        &self,
        first: u64,
        last: u64,
        mut test: impl FnMut(u64, &Translation) -> bool,
    ) -> Option<(u64, Translation)> {
        let mut look = |key: u64, group: &Group| {
            bits(group.present & mask(key, first, last)).find_map(|bit| {
                let translation = &group.translations[bit as usize];
                let frame = key * GROUP + bit;
                test(frame, translation).then_some((frame, *translation))
            })
        };
        if self.few(first, last) {
            self.groups.iter().find_map(|(&key, group)| look(key, group))
        } else {
            (first / GROUP..=last / GROUP).find_map(|key| look(key, self.groups.get(&key)?))
        }
    }

    /// The stage-2 part of `first..=last` is gone.
    pub(crate) fn mark(&mut self, first: u64, last: u64) {
        let few = self.few(first, last);
        let Self { groups, marked } = self;
        let mut apply = |key: u64, group: &mut Group| {
            let gone = group.present & mask(key, first, last);
            if gone != 0 && group.gone == 0 {
                marked.push(key);
            }
            group.gone |= gone;
        };
        if few {
            groups.iter_mut().for_each(|(&key, group)| apply(key, group));
        } else {
            for key in first / GROUP..=last / GROUP {
                if let Some(group) = groups.get_mut(&key) {
                    apply(key, group);
                }
            }
        }
    }

    /// Drops what is marked, and calls `dropped` with each frame.
    pub(crate) fn sweep(&mut self, mut dropped: impl FnMut(u64)) {
        for key in self.marked.drain(..) {
            let Some(group) = self.groups.get_mut(&key) else { continue };
            bits(group.gone).for_each(|bit| dropped(key * GROUP + bit));
            group.present &= !group.gone;
            group.gone = 0;
            if group.present == 0 {
                self.groups.remove(&key);
            }
        }
    }

    /// Drops everything.
    pub(crate) fn clear(&mut self) {
        self.groups.clear();
        self.marked.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leaves(frames: impl IntoIterator<Item = u64>) -> Leaves {
        let mut leaves = Leaves::default();
        for frame in frames {
            leaves.insert(frame, Translation { output: frame << 12, ..Translation::default() });
        }
        leaves
    }

    #[test]
    fn nothing_is_forgotten_before_it_is_marked_and_swept() {
        let mut leaves = leaves(0..10_000);
        assert!(
            (0..10_000).all(|frame| leaves.get(frame).is_some_and(|t| t.output == frame << 12))
        );
        leaves.sweep(|_| panic!("nothing is marked"));
        leaves.mark(63, 64);
        assert!(leaves.get(63).is_some());
        let mut dropped = Vec::new();
        leaves.sweep(|frame| dropped.push(frame));
        assert_eq!(dropped, [63, 64]);
        assert!(leaves.get(62).is_some() && leaves.get(63).is_none() && leaves.get(65).is_some());
    }

    #[test]
    fn a_new_translation_is_whole_again() {
        let mut leaves = leaves([5]);
        leaves.mark(0, 100);
        leaves.insert(5, Translation::default());
        leaves.sweep(|_| panic!("it was filled again"));
        assert!(leaves.get(5).is_some());
    }

    #[test]
    fn a_range_is_searched_either_way() {
        for leaves in [leaves([7, 700]), leaves((0..64 * 100).step_by(64).chain([7, 700]))] {
            let find = |first, last| {
                leaves.any(first, last, |frame, _| frame % 64 != 0).map(|(frame, _)| frame)
            };
            assert_eq!(find(0, u64::MAX >> 12), find(7, 7).or(find(700, 700)));
            assert_eq!((find(8, 699), find(700, 700), find(701, 900)), (None, Some(700), None));
        }
    }
}
