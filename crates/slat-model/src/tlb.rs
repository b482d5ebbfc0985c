//! What one CPU remembers of the tables: translations and intermediate table pointers, none of them ever forgotten
//! before an invalidation takes it.

use std::collections::HashMap;
use std::ops::RangeInclusive;

use crate::descriptor::{MemoryType, Permissions};
use crate::tlb::leaves::Leaves;

mod fast;
mod hash;
pub(crate) mod leaves;

pub(crate) use fast::Fast;
pub(crate) use hash::FrameHash;

/// Levels -1 to 3.
pub(crate) const LEVELS: usize = 5;

/// Where `level` is in an array.
pub(crate) fn slot(level: i8) -> usize {
    (level + 1) as usize
}

/// A cached translation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Translation {
    /// Host-physical address of the block or page.
    pub(crate) output: u64,
    /// Address of the root that the walk began at.
    pub(crate) root: u64,
    /// When the translation was cached, counted in fills.
    pub(crate) filled: u64,
    pub(crate) permissions: Permissions,
    pub(crate) memory: MemoryType,
    /// Not writable, and hardware makes it so at the first write.
    pub(crate) clean: bool,
}

/// Addresses `start..=last`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Span {
    pub(crate) start: u64,
    pub(crate) last: u64,
}

impl Span {
    /// Every address.
    pub(crate) const ALL: Self = Self { start: 0, last: u64::MAX };

    pub(crate) fn new(start: u64, size: u64) -> Self {
        Self { start, last: start.saturating_add(size - 1) }
    }

    fn frames(self, shift: u32) -> (u64, u64) {
        (self.start >> shift, self.last >> shift)
    }
}

/// What is cached of one VMID.
#[derive(Debug)]
pub(crate) struct Space {
    pub(crate) vmid: u16,
    page_shift: u32,
    leaves: [Leaves; LEVELS],
    /// By level of the entry that was read: its frame, and the table that it points to.
    pointers: [HashMap<u64, u64, FrameHash>; LEVELS],
}

/// What a single CPU has cached.
#[derive(Debug)]
pub(crate) struct Tlb {
    page_shift: u32,
    spaces: Vec<Space>,
    pub(crate) fast: Fast,
    /// Walks of the tables.
    pub(crate) walks: u64,
    /// Translations cached.
    pub(crate) fills: u64,
    /// What the entries permitted that the last fault was about.
    pub(crate) granted: Permissions,
}

impl Space {
    fn new(vmid: u16, page_shift: u32) -> Self {
        Self { vmid, page_shift, leaves: Default::default(), pointers: Default::default() }
    }

    /// The levels that there are: with the 64K granule, none above 0.
    pub(crate) fn levels(&self) -> RangeInclusive<i8> {
        if self.page_shift == 16 { 0..=3 } else { -1..=3 }
    }

    /// log2 of the bytes that one entry at `level` covers.
    pub(crate) fn shift(&self, level: i8) -> u32 {
        self.page_shift + (self.page_shift - 3) * (3 - level) as u32
    }

    /// The translation that covers `gpa`, and its level: pages first.
    #[inline]
    pub(crate) fn find(&self, gpa: u64) -> Option<(i8, &Translation)> {
        self.levels().rev().find_map(|level| {
            let leaves = &self.leaves[slot(level)];
            leaves.get(gpa >> self.shift(level)).map(|found| (level, found))
        })
    }

    /// The first translation at `level` that overlaps `span` and passes `test`, and where it begins.
    pub(crate) fn any(
        &self,
        level: i8,
        span: Span,
        test: impl FnMut(u64, &Translation) -> bool,
    ) -> Option<(u64, Translation)> {
        let shift = self.shift(level);
        let (first, last) = span.frames(shift);
        let mut test = test;
        let found = self.leaves[slot(level)]
            .any(first, last, |frame, translation| test(frame << shift, translation));
        found.map(|(frame, translation)| (frame << shift, translation))
    }

    /// The table that the entry at `level` covering `gpa` points to.
    #[inline]
    pub(crate) fn pointer(&self, level: i8, gpa: u64) -> Option<u64> {
        self.pointers[slot(level)].get(&(gpa >> self.shift(level))).copied()
    }

    /// The first table pointer at `level` inside `span` that passes `test`, and where its entry's addresses begin.
    pub(crate) fn any_pointer(
        &self,
        level: i8,
        span: Span,
        mut test: impl FnMut(u64, u64) -> bool,
    ) -> Option<(u64, u64)> {
        let shift = self.shift(level);
        let (first, last) = span.frames(shift);
        let pointers = &self.pointers[slot(level)];
        if last - first < pointers.len() as u64 {
            return (first..=last).find_map(|frame| {
                let &table = pointers.get(&frame)?;
                test(frame << shift, table).then_some((frame << shift, table))
            });
        }
        pointers.iter().find_map(|(&frame, &table)| {
            let hit = first <= frame && frame <= last && test(frame << shift, table);
            hit.then_some((frame << shift, table))
        })
    }

    /// Remembers a table pointer; returns the one that was there.
    pub(crate) fn point(&mut self, level: i8, gpa: u64, table: u64) -> Option<u64> {
        let frame = gpa >> self.shift(level);
        self.pointers[slot(level)].insert(frame, table)
    }

    /// Invalidation by IPA, first half: translations that overlap `span` (at one level only, if it is named) are gone
    /// as far as stage 2 is concerned, and are still used in combination with stage 1. Table pointers are dropped,
    /// unless a level was named.
    fn invalidate_stage2(&mut self, span: Span, level: Option<i8>, dropped: &mut impl FnMut(u64)) {
        for at in self.levels() {
            let (first, last) = span.frames(self.shift(at));
            if level.is_none_or(|level| level == at) {
                self.leaves[slot(at)].mark(first, last);
            }
            if level.is_some() {
                continue;
            }
            let pointers = &mut self.pointers[slot(at)];
            if last - first < pointers.len() as u64 {
                for frame in first..=last {
                    if let Some(table) = pointers.remove(&frame) {
                        dropped(table);
                    }
                }
            } else {
                pointers.retain(|&frame, &mut table| {
                    let keep = frame < first || last < frame;
                    if !keep {
                        dropped(table);
                    }
                    keep
                });
            }
        }
    }
}

impl Tlb {
    pub(crate) fn new(page_shift: u32) -> Self {
        Self {
            page_shift,
            spaces: Vec::new(),
            fast: Fast::default(),
            walks: 0,
            fills: 0,
            granted: Permissions::default(),
        }
    }

    /// What is cached of a VMID.
    #[inline]
    pub(crate) fn space(&self, vmid: u16) -> Option<&Space> {
        self.spaces.iter().find(|space| space.vmid == vmid)
    }

    /// The same, made if there is nothing yet.
    #[inline]
    pub(crate) fn space_mut(&mut self, vmid: u16) -> &mut Space {
        let found = self.spaces.iter().position(|space| space.vmid == vmid);
        let at = found.unwrap_or_else(|| {
            self.spaces.push(Space::new(vmid, self.page_shift));
            self.spaces.len() - 1
        });
        &mut self.spaces[at]
    }

    /// Everything that is cached.
    pub(crate) fn spaces(&self) -> &[Space] {
        &self.spaces
    }

    /// Caches a translation of the block or page at `level` that covers `gpa`, in the place of one of the same size.
    pub(crate) fn fill(&mut self, vmid: u16, level: i8, gpa: u64, translation: Translation) {
        self.fills += 1;
        let space = self.space_mut(vmid);
        let shift = space.shift(level);
        space.leaves[slot(level)].insert(gpa >> shift, translation);
        self.fast.forget(vmid, gpa >> shift << shift, 1 << shift);
    }

    /// The stage-2 part of an invalidation by IPA. See [`Space::invalidate_stage2`].
    pub(crate) fn invalidate_stage2(
        &mut self,
        vmid: u16,
        span: Span,
        level: Option<i8>,
        dropped: &mut impl FnMut(u64),
    ) {
        if let Some(space) = self.spaces.iter_mut().find(|space| space.vmid == vmid) {
            space.invalidate_stage2(span, level, dropped);
        }
    }

    /// Invalidation of combined translations: those whose stage-2 part is gone cannot be made again.
    pub(crate) fn invalidate_combined(&mut self, vmid: u16) {
        let fast = &mut self.fast;
        if let Some(space) = self.spaces.iter_mut().find(|space| space.vmid == vmid) {
            for level in space.levels() {
                let shift = space.shift(level);
                space.leaves[slot(level)]
                    .sweep(|frame| fast.forget(vmid, frame << shift, 1 << shift));
            }
        }
    }

    /// Invalidation of both stages, of one VMID or of all.
    pub(crate) fn invalidate_all(&mut self, vmid: Option<u16>, dropped: &mut impl FnMut(u64)) {
        for space in &mut self.spaces {
            if vmid.is_none_or(|vmid| vmid == space.vmid) {
                space.leaves.iter_mut().for_each(Leaves::clear);
                for pointers in &mut space.pointers {
                    pointers.drain().for_each(|(_, table)| dropped(table));
                }
            }
        }
        self.fast.forget_all();
    }
}
