//! The guest's memory as the shadow knows it: which entries map each frame, and where the guest's tables are.

use alloc::vec::Vec;

use slat::{Gpa, GpaRange, Level};

use crate::pte::{INDEX_BITS, PAGE_SHIFT, pages};
use crate::shadow::OutOfMemory;

/// Heights above the last level at which pages are mapped: 4 KiB, 2 MiB, 1 GiB.
pub(crate) const SIZES: usize = 3;

/// Frames, from the first up to but not including `end`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Frames {
    pub(crate) first: u64,
    pub(crate) end: u64,
}

impl Frames {
    /// Those that the range touches.
    pub(crate) fn of(range: GpaRange) -> Self {
        let first = range.start().0 >> PAGE_SHIFT;
        Self { first, end: ((range.end().0 - 1) >> PAGE_SHIFT) + 1 }
    }

    pub(crate) fn contains(self, frame: u64) -> bool {
        (self.first..self.end).contains(&frame)
    }

    pub(crate) fn common(self, other: Self) -> Option<Self> {
        let common = Self { first: self.first.max(other.first), end: self.end.min(other.end) };
        (common.first < common.end).then_some(common)
    }
}

/// One slot of guest memory.
#[derive(Debug)]
pub(crate) struct Area<H> {
    pub(crate) frames: Frames,
    /// By height: the reverse map of each frame.
    heads: [Vec<H>; SIZES],
    /// By height from 1: how many shadowed tables of the guest lie in each frame of that size.
    tables: [Vec<u32>; SIZES - 1],
}

impl<H: Default> Area<H> {
    pub(crate) fn new(frames: Frames) -> Result<Self, OutOfMemory> {
        fn filled<T: Default>(count: usize) -> Result<Vec<T>, OutOfMemory> {
            let mut vec = Vec::new();
            vec.try_reserve_exact(count).map_err(|_| OutOfMemory)?;
            vec.resize_with(count, T::default);
            Ok(vec)
        }
        let count = |height: usize| {
            let shift = INDEX_BITS * height as u32;
            (((frames.end - 1) >> shift) - (frames.first >> shift) + 1) as usize
        };
        Ok(Self {
            frames,
            heads: [filled(count(0))?, filled(count(1))?, filled(count(2))?],
            tables: [filled(count(1))?, filled(count(2))?],
        })
    }
}

impl<H> Area<H> {
    fn at(&self, height: usize, frame: u64) -> usize {
        let shift = INDEX_BITS * height as u32;
        ((frame >> shift) - (self.frames.first >> shift)) as usize
    }

    /// The reverse map of the frame of this height that `frame` lies in.
    #[inline]
    pub(crate) fn head(&self, height: usize, frame: u64) -> &H {
        &self.heads[height][self.at(height, frame)]
    }

    #[inline]
    pub(crate) fn head_mut(&mut self, height: usize, frame: u64) -> &mut H {
        let at = self.at(height, frame);
        &mut self.heads[height][at]
    }

    /// All reverse maps of one height.
    pub(crate) fn heads(&self, height: usize) -> &[H] {
        &self.heads[height]
    }

    /// Whether an entry at `level` may map all that surrounds `frame`: it lies in the slot, and none of the guest's
    /// tables that must be protected lies in it.
    pub(crate) fn may_map(&self, level: Level, frame: u64) -> bool {
        let height = level.height() as usize;
        if height == 0 {
            return true;
        }
        let (first, count) = (frame & !(pages(level) - 1), pages(level));
        height < SIZES
            && first >= self.frames.first
            && first + count <= self.frames.end
            && self.tables[height - 1][self.at(height, frame)] == 0
    }

    /// Counts a shadowed table at `frame`, or no longer.
    pub(crate) fn count_table(&mut self, frame: u64, there: bool) {
        for height in 1..SIZES {
            let at = self.at(height, frame);
            let count = &mut self.tables[height - 1][at];
            *count = if there { count.saturating_add(1) } else { count.saturating_sub(1) };
        }
    }
}

/// All slots, in the order of their frames.
#[derive(Debug)]
pub(crate) struct Areas<H>(Vec<Area<H>>);

impl<H> Default for Areas<H> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<H> Areas<H> {
    fn position(&self, frame: u64) -> Option<usize> {
        let after = self.0.partition_point(|area| area.frames.first <= frame);
        let position = after.checked_sub(1)?;
        (frame < self.0[position].frames.end).then_some(position)
    }

    #[inline]
    pub(crate) fn of(&self, frame: u64) -> Option<&Area<H>> {
        self.position(frame).map(|position| &self.0[position])
    }

    #[inline]
    pub(crate) fn of_mut(&mut self, frame: u64) -> Option<&mut Area<H>> {
        self.position(frame).map(|position| &mut self.0[position])
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Area<H>> {
        self.0.iter()
    }

    /// The first slot that shares frames with these.
    pub(crate) fn overlap(&self, frames: Frames) -> Option<&Area<H>> {
        self.0.iter().find(|area| area.frames.common(frames).is_some())
    }

    /// Puts a slot in that overlaps no other.
    pub(crate) fn insert(&mut self, area: Area<H>) -> Result<(), OutOfMemory> {
        self.0.try_reserve(1).map_err(|_| OutOfMemory)?;
        let position = self.0.partition_point(|other| other.frames.first < area.frames.first);
        self.0.insert(position, area);
        Ok(())
    }

    pub(crate) fn remove(&mut self, frames: Frames) -> Option<Area<H>> {
        let position = self.0.iter().position(|area| area.frames == frames)?;
        Some(self.0.remove(position))
    }
}

/// The guest-physical address of entry `index` of the table at `frame`.
pub(crate) fn entry_gpa(frame: u64, index: usize) -> Gpa {
    Gpa((frame << PAGE_SHIFT) + 8 * index as u64)
}
