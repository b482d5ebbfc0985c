//! Reverse maps as KVM had them: chains of descriptors with some slots each, searched from one end to the other.
//!
//! As in `arch/x86/kvm/mmu/mmu.c` of Linux 5.14 (3 slots), with the commit "KVM: X86: MMU: Tune PTE_LIST_EXT to be bigger"
//! (15), and with "KVM: X86: Optimize pte_list_desc with per-array counter" as version 2 of June 2021 had it (14 and a
//! counter), which is what the published figures are of; 5.15 has both, with counter and link moved before the slots.
//!
//! What is the same: a descriptor has its slots first, its counter if any, its link last, and lies in memory at a multiple
//! of its size, so that whoever walks past a full one reads one cache line of it with each design. Adding walks past the
//! full ones and takes the first free slot of the next; without a counter it looks at all before that slot. Removing looks
//! at each slot from the first descriptor on, fills the hole from the last slot of the same descriptor, which without a
//! counter is looked for from the end, and frees a descriptor that is empty. One left is not taken back into the head.
//!
//! What differs: links are numbers in one array, not addresses, and the head knows how many there are, since the shadow
//! asks before it adds; KVM compares what adding counted.

use std::fmt;

use slat_shadow::rmap::{AddError, EntryRef, ReverseMaps};

/// Chains of descriptors with `N` slots, that lie at multiples of what `A` says.
#[derive(Debug)]
pub(super) struct Slots<const N: usize, C, A> {
    /// All there ever were.
    descriptors: Vec<Descriptor<N, C, A>>,
    /// The chain of those that are free.
    free: Link,
    used: usize,
}

impl<const N: usize, C, A> Default for Slots<N, C, A> {
    fn default() -> Self {
        Self { descriptors: Vec::new(), free: 0, used: 0 }
    }
}

/// Half a cache line.
#[derive(Debug)]
#[repr(align(32))]
pub(super) struct HalfLine;

/// Two cache lines.
#[derive(Debug)]
#[repr(align(128))]
pub(super) struct TwoLines;

/// How a descriptor knows how many of its slots are used.
pub(super) trait Count: fmt::Debug + Default + Send {
    fn is_full(&self, slots: &[Word]) -> bool;
    /// The first slot that is free, of one that is not full.
    fn free(&self, slots: &[Word]) -> usize;
    fn find(&self, slots: &[Word], word: Word) -> Option<usize>;
    /// The last slot that is used, which is not before `from`.
    fn last(&self, slots: &[Word], from: usize) -> usize;
    fn add(&mut self);
    fn take(&mut self);
}

/// It looks.
#[derive(Debug, Default)]
pub(super) struct Searched;

impl Count for Searched {
    fn is_full(&self, slots: &[Word]) -> bool {
        slots.last().is_some_and(|&word| word != 0)
    }

    fn free(&self, slots: &[Word]) -> usize {
        slots.iter().position(|&word| word == 0).unwrap_or(slots.len())
    }

    fn find(&self, slots: &[Word], word: Word) -> Option<usize> {
        slots.iter().take_while(|&&slot| slot != 0).position(|&slot| slot == word)
    }

    fn last(&self, slots: &[Word], from: usize) -> usize {
        (from..slots.len()).rev().find(|&slot| slots[slot] != 0).unwrap_or(from)
    }

    fn add(&mut self) {}

    fn take(&mut self) {}
}

/// It counts.
#[derive(Debug, Default)]
pub(super) struct Counted(u64);

impl Count for Counted {
    fn is_full(&self, slots: &[Word]) -> bool {
        self.0 as usize == slots.len()
    }

    fn free(&self, _: &[Word]) -> usize {
        self.0 as usize
    }

    fn find(&self, slots: &[Word], word: Word) -> Option<usize> {
        slots.iter().take(self.0 as usize).position(|&slot| slot == word)
    }

    fn last(&self, _: &[Word], from: usize) -> usize {
        (self.0 as usize).saturating_sub(1).max(from)
    }

    fn add(&mut self) {
        self.0 += 1;
    }

    fn take(&mut self) {
        self.0 -= 1;
    }
}

/// One reverse map.
#[derive(Debug, Default)]
pub(super) enum Head {
    #[default]
    None,
    One(Word),
    Many {
        first: Link,
        entries: u32,
    },
}

/// An entry as the address that KVM keeps: eight bytes, not zero.
type Word = u64;

/// One more than the number of a descriptor, or 0: as wide as the address that KVM keeps.
type Link = u64;

fn word(entry: EntryRef) -> Word {
    (u64::from(entry.page()) << 9 | entry.index() as u64) + 1
}

fn entry(word: Word) -> Option<EntryRef> {
    let number = word - 1;
    EntryRef::new((number >> 9) as u32, number as usize & 511)
}

#[derive(Debug)]
#[repr(C)]
pub(super) struct Descriptor<const N: usize, C, A> {
    aligned: [A; 0],
    slots: [Word; N],
    count: C,
    more: Link,
}

const _: () = assert!(size_of::<Descriptor<3, Searched, HalfLine>>() == 32);
const _: () = assert!(size_of::<Descriptor<15, Searched, TwoLines>>() == 128);
const _: () = assert!(size_of::<Descriptor<14, Counted, TwoLines>>() == 128);

impl<const N: usize, C: Count, A> Descriptor<N, C, A> {
    fn is_full(&self) -> bool {
        self.count.is_full(&self.slots)
    }

    fn push(&mut self, new: Word) -> usize {
        let free = self.count.free(&self.slots);
        self.slots[free] = new;
        self.count.add();
        free
    }

    /// Fills the hole from the last slot.
    fn take(&mut self, gone: Word) -> bool {
        let Some(hole) = self.count.find(&self.slots, gone) else { return false };
        let last = self.count.last(&self.slots, hole);
        self.slots[hole] = self.slots[last];
        self.slots[last] = 0;
        self.count.take();
        true
    }

    fn is_empty(&self) -> bool {
        self.slots[0] == 0
    }
}

impl<const N: usize, C: Count, A> Slots<N, C, A> {
    fn get(&self, link: Link) -> Option<&Descriptor<N, C, A>> {
        self.descriptors.get((link as usize).wrapping_sub(1))
    }

    fn get_mut(&mut self, link: Link) -> &mut Descriptor<N, C, A> {
        &mut self.descriptors[link as usize - 1]
    }

    /// An empty descriptor.
    fn allocate(&mut self) -> Link {
        self.used += 1;
        if self.free != 0 {
            let link = self.free;
            self.free = std::mem::take(&mut self.get_mut(link).more);
            return link;
        }
        let empty = Descriptor { aligned: [], slots: [0; N], count: C::default(), more: 0 };
        self.descriptors.push(empty);
        self.descriptors.len() as Link
    }

    fn chain(&self, first: Link) -> impl Iterator<Item = &Descriptor<N, C, A>> {
        std::iter::successors(self.get(first), |descriptor| self.get(descriptor.more))
    }

    /// Adds to a chain and gives how many it walked past.
    fn push(&mut self, first: Link, new: Word) -> usize {
        let (mut count, mut link) = (0, first);
        while self.get_mut(link).is_full() {
            count += N;
            let more = self.get_mut(link).more;
            if more == 0 {
                let more = self.allocate();
                self.get_mut(link).more = more;
                link = more;
                break;
            }
            link = more;
        }
        count + self.get_mut(link).push(new)
    }

    /// Searches the chain. Gives its first descriptor, or 0 if none is left.
    fn take(&mut self, first: Link, gone: Word) -> Link {
        let (mut before, mut link) = (0, first);
        while link != 0 {
            let free = self.free;
            let descriptor = self.get_mut(link);
            let more = descriptor.more;
            if !descriptor.take(gone) {
                (before, link) = (link, more);
                continue;
            }
            if !descriptor.is_empty() {
                break;
            }
            descriptor.more = free;
            self.free = link;
            self.used -= 1;
            if before == 0 {
                return more;
            }
            self.get_mut(before).more = more;
            break;
        }
        first
    }
}

impl<const N: usize, C: Count, A: fmt::Debug + Send> ReverseMaps for Slots<N, C, A> {
    type Head = Head;

    fn add(&mut self, head: &mut Head, new: EntryRef) -> Result<usize, AddError> {
        match head {
            Head::None => {
                *head = Head::One(word(new));
                Ok(0)
            }
            &mut Head::One(one) => {
                let first = self.allocate();
                self.get_mut(first).push(one);
                self.get_mut(first).push(word(new));
                *head = Head::Many { first, entries: 2 };
                Ok(1)
            }
            Head::Many { first, entries } => {
                *entries += 1;
                Ok(self.push(*first, word(new)))
            }
        }
    }

    fn remove(&mut self, head: &mut Head, gone: EntryRef, _: usize) -> Option<EntryRef> {
        let gone = word(gone);
        match head {
            Head::None => {}
            Head::One(only) => {
                if *only == gone {
                    *head = Head::None;
                }
            }
            Head::Many { first, entries } => {
                *first = self.take(*first, gone);
                *entries -= 1;
                if *first == 0 {
                    *head = Head::None;
                }
            }
        }
        None
    }

    fn last(&self, head: &Head) -> Option<EntryRef> {
        match *head {
            Head::None => None,
            Head::One(only) => entry(only),
            Head::Many { first, .. } => {
                let first = self.get(first)?;
                entry(first.slots[first.count.last(&first.slots, 0)])
            }
        }
    }

    fn count(&self, head: &Head) -> usize {
        match *head {
            Head::None => 0,
            Head::One(_) => 1,
            Head::Many { entries, .. } => entries as usize,
        }
    }

    fn for_each(&self, head: &Head, mut f: impl FnMut(EntryRef)) {
        match *head {
            Head::None => {}
            Head::One(only) => entry(only).into_iter().for_each(f),
            Head::Many { first, .. } => {
                for descriptor in self.chain(first) {
                    let used = descriptor.slots.iter().take_while(|&&word| word != 0);
                    used.filter_map(|&word| entry(word)).for_each(&mut f);
                }
            }
        }
    }

    fn bytes(&self) -> usize {
        self.used * size_of::<Descriptor<N, C, A>>()
    }
}
