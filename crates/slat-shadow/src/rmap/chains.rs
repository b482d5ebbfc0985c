//! Reverse maps whose every operation takes as long for a thousand entries as for ten.
//!
//! A [`Head`] is one word: empty, one entry inline, or a pointer to a descriptor, which holds the count before the slots.
//! Up to seven entries are one descriptor of 32 bytes. More are one of 128: two cache lines with sixteen slots and
//! pointers to tiers, arrays of 16, 32, … 512 slots. So a position says where its slot is: below 16 in the descriptor,
//! otherwise in the tier of its highest bit. Adding writes the slot after the last and copies seven entries at most;
//! removing moves the last entry into the hole.
#![expect(
    unsafe_code,
    reason = "descriptors are blocks of memory of several shapes behind one word"
)]

use core::ptr::{NonNull, without_provenance_mut};
use core::{fmt, slice};

use super::pool::{Exhausted, Pool};
use super::{AddError, EntryRef, ReverseMaps};

/// The most entries of one reverse map.
pub const MAX_ENTRIES: usize = NEAR << TIERS;

/// Slots of the small descriptor.
const FEW: usize = 7;
/// Slots of the large descriptor.
const NEAR: usize = 16;
const NEAR_BITS: u32 = NEAR.ilog2();
/// Arrays of a large descriptor; tier `t` has `NEAR << t` slots.
const TIERS: usize = 6;

/// Pool classes: a small descriptor has 32 bytes, a large one 128, the first tier 64.
const SMALL_CLASS: usize = 0;
const LARGE_CLASS: usize = 2;
const TIER_CLASS: usize = 1;

#[repr(C)]
struct Small {
    count: u32,
    slots: [EntryRef; FEW],
}

#[repr(C)]
struct Large {
    count: u32,
    /// Behind the last slot that is used, in its array.
    end: NonNull<EntryRef>,
    /// Dangling where the count does not reach the tier.
    tiers: [NonNull<EntryRef>; TIERS],
    near: [EntryRef; NEAR],
}

const _: () = assert!(size_of::<Small>() == 32 && size_of::<Large>() <= 128);

/// The reverse maps of this crate.
#[derive(Debug, Default)]
pub struct Chains(Pool);

/// One reverse map of [`Chains`]. One that is dropped with entries leaves their descriptors to the `Chains`, which free
/// them when they are dropped.
///
/// Null: empty. Bit 0: an entry, in the bits from 2 on. Bit 1: a pointer to a large descriptor. Neither: to a small one.
pub struct Head(*mut u8);

// SAFETY: a head owns its descriptors, which nothing reaches but this head together with its `Chains`.
unsafe impl Send for Head {}

const ONE: usize = 1;
const MANY: usize = 2;

enum Shape {
    None,
    One(EntryRef),
    Few(NonNull<Small>),
    Many(NonNull<Large>),
}

impl Head {
    #[inline(always)]
    fn shape(&self) -> Shape {
        let word = self.0.addr();
        if word & MANY != 0 {
            // A tagged pointer is not null without its tag.
            match NonNull::new(self.0.map_addr(|word| word & !MANY)) {
                Some(large) => Shape::Many(large.cast()),
                None => Shape::None,
            }
        } else if word & ONE != 0 {
            Shape::One(EntryRef((word >> 2) as u32))
        } else {
            match NonNull::new(self.0) {
                Some(small) => Shape::Few(small.cast()),
                None => Shape::None,
            }
        }
    }

    #[inline]
    const fn one(entry: EntryRef) -> Self {
        Self(without_provenance_mut((entry.0 as usize) << 2 | ONE))
    }

    /// How many entries there are: one load beyond the head.
    #[inline]
    pub fn count(&self) -> usize {
        match self.shape() {
            Shape::None => 0,
            Shape::One(_) => 1,
            // SAFETY: the head owns the descriptor that it points to.
            Shape::Few(small) => unsafe { small.as_ref() }.count as usize,
            // SAFETY: as above.
            Shape::Many(large) => unsafe { large.as_ref() }.count as usize,
        }
    }

    /// Calls `f` with each entry.
    #[inline]
    pub fn for_each(&self, mut f: impl FnMut(EntryRef)) {
        match self.shape() {
            Shape::None => {}
            Shape::One(entry) => f(entry),
            Shape::Few(small) => {
                // SAFETY: the head owns the descriptor that it points to.
                let small = unsafe { small.as_ref() };
                small.slots[..(small.count as usize).min(FEW)].iter().copied().for_each(f);
            }
            Shape::Many(large) => {
                // SAFETY: as above.
                let large = unsafe { large.as_ref() };
                let count = large.count as usize;
                large.near[..count.min(NEAR)].iter().copied().for_each(&mut f);
                for (tier, slots) in large.tiers.iter().enumerate() {
                    let first = NEAR << tier;
                    if count <= first {
                        break;
                    }
                    // SAFETY: a tier that the count reaches has `first` slots, those below the count are written, and
                    // nobody changes them while the head is borrowed.
                    let slots = unsafe {
                        slice::from_raw_parts(slots.as_ptr(), (count - first).min(first))
                    };
                    slots.iter().copied().for_each(&mut f);
                }
            }
        }
    }
}

impl Default for Head {
    fn default() -> Self {
        Self(core::ptr::null_mut())
    }
}

impl fmt::Debug for Head {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Head({} entries)", self.count())
    }
}

/// Where the slot at `position` is.
///
/// # Safety
/// `large` points to a descriptor whose count reaches, or whose tier was made for, `position`.
#[inline(always)]
unsafe fn slot(large: NonNull<Large>, position: usize) -> NonNull<EntryRef> {
    let large = large.as_ptr();
    if position < NEAR {
        // SAFETY: the position is one of the descriptor's own slots.
        return unsafe {
            NonNull::new_unchecked((&raw mut (*large).near).cast::<EntryRef>().add(position))
        };
    }
    let bits = position.ilog2();
    // SAFETY: positions are below `MAX_ENTRIES`, so there is such a tier; the caller promises that it is there.
    unsafe { (*large).tiers[(bits - NEAR_BITS) as usize].add(position & !(1 << bits)) }
}

/// Behind the slot at `last`.
///
/// # Safety
/// As for [`slot`].
#[inline]
unsafe fn behind(large: NonNull<Large>, last: usize) -> NonNull<EntryRef> {
    // SAFETY: the caller's promise; what is behind a slot may be the end of its array, and is not used then.
    unsafe { slot(large, last).add(1) }
}

impl Chains {
    /// Room behind the last of a large descriptor, all of whose arrays are full.
    #[cold]
    fn grow(&mut self, large: NonNull<Large>, count: usize) -> Result<(), AddError> {
        if count == MAX_ENTRIES {
            return Err(AddError::Full);
        }
        let tier = (count.ilog2() - NEAR_BITS) as usize;
        let slots = self.0.take(TIER_CLASS + tier)?.cast();
        // SAFETY: the caller's head owns the descriptor, and is borrowed for it alone.
        unsafe {
            (*large.as_ptr()).tiers[tier] = slots;
            (*large.as_ptr()).end = slots;
        }
        Ok(())
    }
}

impl From<Exhausted> for AddError {
    fn from(_: Exhausted) -> Self {
        Self::OutOfMemory
    }
}

impl ReverseMaps for Chains {
    type Head = Head;

    #[inline]
    fn add(&mut self, head: &mut Head, entry: EntryRef) -> Result<usize, AddError> {
        match head.shape() {
            Shape::None => {
                *head = Head::one(entry);
                Ok(0)
            }
            Shape::One(first) => {
                let small: NonNull<Small> = self.0.take(SMALL_CLASS)?.cast();
                let slots = [first, entry, entry, entry, entry, entry, entry];
                // SAFETY: the block is ours, of this size and aligned.
                unsafe { small.write(Small { count: 2, slots }) };
                head.0 = small.as_ptr().cast();
                Ok(1)
            }
            Shape::Few(mut small) => {
                // SAFETY: the head owns the descriptor, and is borrowed for us alone.
                let few = unsafe { small.as_mut() };
                let count = few.count as usize;
                if let Some(slot) = few.slots.get_mut(count) {
                    *slot = entry;
                    few.count += 1;
                    return Ok(count);
                }
                let large: NonNull<Large> = self.0.take(LARGE_CLASS)?.cast();
                let mut near = [entry; NEAR];
                near[..FEW].copy_from_slice(&few.slots);
                let (count, dangling) = (FEW as u32 + 1, NonNull::dangling());
                // SAFETY: the block is ours, large enough and aligned.
                unsafe {
                    large.write(Large { count, end: dangling, tiers: [dangling; TIERS], near });
                    (*large.as_ptr()).end = behind(large, FEW);
                }
                // SAFETY: it was taken with this class when the head got it, and the head forgets it.
                unsafe { self.0.put(small.cast(), SMALL_CLASS) };
                head.0 = large.as_ptr().cast::<u8>().map_addr(|address| address | MANY);
                Ok(FEW)
            }
            Shape::Many(large) => {
                // SAFETY: the head owns the descriptor, and is borrowed for us alone.
                let count = unsafe { large.as_ref() }.count as usize;
                if count.is_power_of_two() && count >= NEAR {
                    self.grow(large, count)?;
                }
                // SAFETY: as above. Arrays end where the count is a power of two; if this one did, it has been followed by
                // another.
                unsafe {
                    let end = (*large.as_ptr()).end;
                    end.write(entry);
                    (*large.as_ptr()).end = end.add(1);
                    (*large.as_ptr()).count = count as u32 + 1;
                }
                Ok(count)
            }
        }
    }

    #[inline]
    fn remove(&mut self, head: &mut Head, entry: EntryRef, position: usize) -> Option<EntryRef> {
        match head.shape() {
            Shape::None => None,
            Shape::One(first) => {
                if first == entry {
                    *head = Head::default();
                }
                None
            }
            Shape::Few(mut small) => {
                // SAFETY: the head owns the descriptor, and is borrowed for us alone.
                let few = unsafe { small.as_mut() };
                let last = few.count as usize - 1;
                if position > last || few.slots[position] != entry {
                    return None;
                }
                let moved = few.slots[last];
                few.slots[position] = moved;
                few.count -= 1;
                if last == 1 {
                    *head = Head::one(few.slots[0]);
                    // SAFETY: it was taken with this class when the head got it, and the head forgot it.
                    unsafe { self.0.put(small.cast(), SMALL_CLASS) };
                }
                (position != last).then_some(moved)
            }
            Shape::Many(large) => {
                // SAFETY: as above.
                let last = unsafe { large.as_ref() }.count as usize - 1;
                if position > last {
                    return None;
                }
                // SAFETY: the position is below the count.
                let hole = unsafe { slot(large, position) };
                // SAFETY: slots below the count are written, and nobody else has references to them.
                if unsafe { hole.read() } != entry {
                    return None;
                }
                // SAFETY: as above.
                let moved = unsafe {
                    let end = (*large.as_ptr()).end.sub(1);
                    let moved = end.read();
                    hole.write(moved);
                    (*large.as_ptr()).end = end;
                    (*large.as_ptr()).count = last as u32;
                    moved
                };
                if last.is_power_of_two() && last >= NEAR {
                    let tier = (last.ilog2() - NEAR_BITS) as usize;
                    // SAFETY: the tier was taken with this class when the count reached it, and no longer does.
                    unsafe {
                        (*large.as_ptr()).end = behind(large, last - 1);
                        self.0.put((*large.as_ptr()).tiers[tier].cast(), TIER_CLASS + tier);
                    }
                } else if last == 1 {
                    // SAFETY: one slot is left, which is written.
                    *head = Head::one(unsafe { slot(large, 0).read() });
                    // SAFETY: it was taken with this class when the head got it, and the head forgot it.
                    unsafe { self.0.put(large.cast(), LARGE_CLASS) };
                }
                (position != last).then_some(moved)
            }
        }
    }

    #[inline]
    fn last(&self, head: &Head) -> Option<EntryRef> {
        match head.shape() {
            Shape::None => None,
            Shape::One(entry) => Some(entry),
            Shape::Few(small) => {
                // SAFETY: the head owns the descriptor that it points to.
                let small = unsafe { small.as_ref() };
                small.slots.get((small.count as usize).checked_sub(1)?).copied()
            }
            Shape::Many(large) => {
                // SAFETY: as above.
                let last = (unsafe { large.as_ref() }.count as usize).checked_sub(1)?;
                // SAFETY: the position is below the count, so its slot is there and written.
                Some(unsafe { slot(large, last).read() })
            }
        }
    }

    #[inline]
    fn count(&self, head: &Head) -> usize {
        head.count()
    }

    #[inline]
    fn for_each(&self, head: &Head, f: impl FnMut(EntryRef)) {
        head.for_each(f);
    }

    fn bytes(&self) -> usize {
        self.0.in_use()
    }
}
