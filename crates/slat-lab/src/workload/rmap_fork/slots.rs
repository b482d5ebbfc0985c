//! Reverse maps as KVM had them: chains of descriptors with some slots each, searched from one end to the other.
//!
//! With 3 slots a descriptor fills 32 bytes, with 15 two cache lines; both find their own count by looking for the first
//! slot that is empty. With 14 and a counter, they need not.

use std::fmt;
use std::marker::PhantomData;

use slat_shadow::rmap::{AddError, EntryRef, ReverseMaps};

/// Chains of descriptors with `N` slots.
#[derive(Debug, Default)]
pub(super) struct Slots<const N: usize, C> {
    descriptors: usize,
    how: PhantomData<C>,
}

/// How a descriptor knows how many of its slots are used.
pub(super) trait Count: fmt::Debug + Default + Send {
    fn used(&self, slots: &[Word]) -> usize;
    fn add(&mut self);
    fn take(&mut self);
}

/// It looks.
#[derive(Debug, Default)]
pub(super) struct Searched;

impl Count for Searched {
    fn used(&self, slots: &[Word]) -> usize {
        // The last first: that one says whether it is full.
        match slots.last() {
            Some(0) => slots.iter().position(|&word| word == 0).unwrap_or(slots.len()),
            _ => slots.len(),
        }
    }

    fn add(&mut self) {}

    fn take(&mut self) {}
}

/// It counts.
#[derive(Debug, Default)]
pub(super) struct Counted(u64);

impl Count for Counted {
    fn used(&self, _: &[Word]) -> usize {
        self.0 as usize
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
pub(super) enum Head<const N: usize, C> {
    #[default]
    None,
    One(Word),
    Many(Box<Descriptor<N, C>>),
}

/// An entry as the address that KVM keeps: eight bytes, not zero.
type Word = u64;

fn word(entry: EntryRef) -> Word {
    (u64::from(entry.page()) << 9 | entry.index() as u64) + 1
}

fn entry(word: Word) -> Option<EntryRef> {
    let number = word - 1;
    EntryRef::new((number >> 9) as u32, number as usize & 511)
}

#[derive(Debug)]
#[repr(C)]
pub(super) struct Descriptor<const N: usize, C> {
    more: Option<Box<Self>>,
    count: C,
    slots: [Word; N],
}

const _: () = assert!(size_of::<Descriptor<3, Searched>>() == 32);
const _: () = assert!(size_of::<Descriptor<15, Searched>>() == 128);
const _: () = assert!(size_of::<Descriptor<14, Counted>>() == 128);

impl<const N: usize, C: Count> Descriptor<N, C> {
    fn new() -> Box<Self> {
        Box::new(Self { more: None, count: C::default(), slots: [0; N] })
    }

    fn used(&self) -> usize {
        self.count.used(&self.slots)
    }

    fn push(&mut self, new: Word) -> usize {
        let used = self.used();
        self.slots[used] = new;
        self.count.add();
        used
    }

    /// Fills the hole from the last slot.
    fn take(&mut self, gone: Word) -> bool {
        let used = self.used();
        let Some(hole) = self.slots[..used].iter().position(|&word| word == gone) else {
            return false;
        };
        self.slots[hole] = self.slots[used - 1];
        self.slots[used - 1] = 0;
        self.count.take();
        true
    }

    fn is_empty(&self) -> bool {
        self.slots[0] == 0
    }
}

impl<const N: usize, C: Count> ReverseMaps for Slots<N, C> {
    type Head = Head<N, C>;

    fn add(&mut self, head: &mut Head<N, C>, new: EntryRef) -> Result<usize, AddError> {
        match head {
            Head::None => {
                *head = Head::One(word(new));
                Ok(0)
            }
            &mut Head::One(first) => {
                let mut descriptor = Descriptor::new();
                self.descriptors += 1;
                descriptor.push(first);
                descriptor.push(word(new));
                *head = Head::Many(descriptor);
                Ok(1)
            }
            Head::Many(first) => {
                let mut count = 0;
                let mut descriptor = first;
                while descriptor.used() == N {
                    count += N;
                    if descriptor.more.is_none() {
                        self.descriptors += 1;
                    }
                    descriptor = descriptor.more.get_or_insert_with(Descriptor::new);
                }
                Ok(count + descriptor.push(word(new)))
            }
        }
    }

    fn remove(&mut self, head: &mut Head<N, C>, gone: EntryRef, _: usize) -> Option<EntryRef> {
        let gone = word(gone);
        match head {
            Head::None => {}
            Head::One(only) => {
                if *only == gone {
                    *head = Head::None;
                }
            }
            Head::Many(first) => {
                self.descriptors -= remove_from(first, gone);
                if first.is_empty() {
                    self.descriptors -= 1;
                    *head = first.more.take().map_or(Head::None, Head::Many);
                }
                if let Head::Many(first) = head
                    && first.used() == 1
                    && first.more.is_none()
                {
                    let last = first.slots[0];
                    self.descriptors -= 1;
                    *head = Head::One(last);
                }
            }
        }
        None
    }

    fn last(&self, head: &Head<N, C>) -> Option<EntryRef> {
        match head {
            Head::None => None,
            &Head::One(only) => entry(only),
            Head::Many(first) => {
                let used = first.used();
                entry(first.slots[used.checked_sub(1)?])
            }
        }
    }

    fn count(&self, head: &Head<N, C>) -> usize {
        match head {
            Head::None => 0,
            Head::One(_) => 1,
            Head::Many(first) => {
                let mut count = 0;
                let mut next = Some(first);
                while let Some(descriptor) = next {
                    count += descriptor.used();
                    next = descriptor.more.as_ref();
                }
                count
            }
        }
    }

    fn for_each(&self, head: &Head<N, C>, mut f: impl FnMut(EntryRef)) {
        match head {
            Head::None => {}
            &Head::One(only) => entry(only).into_iter().for_each(f),
            Head::Many(first) => {
                let mut next = Some(first);
                while let Some(descriptor) = next {
                    let used = descriptor.slots.iter().take_while(|&&word| word != 0);
                    used.filter_map(|&word| entry(word)).for_each(&mut f);
                    next = descriptor.more.as_ref();
                }
            }
        }
    }

    fn bytes(&self) -> usize {
        self.descriptors * size_of::<Descriptor<N, C>>()
    }
}

/// Searches the chain. Gives how many descriptors after the first were freed.
fn remove_from<const N: usize, C: Count>(first: &mut Box<Descriptor<N, C>>, gone: Word) -> usize {
    if first.take(gone) {
        return 0;
    }
    let mut before = first;
    while let Some(mut descriptor) = before.more.take() {
        let found = descriptor.take(gone);
        if found && descriptor.is_empty() {
            before.more = descriptor.more.take();
            return 1;
        }
        let here = before.more.insert(descriptor);
        if found {
            return 0;
        }
        before = here;
    }
    0
}
