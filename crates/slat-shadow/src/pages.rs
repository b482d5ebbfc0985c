//! All shadow pages of a guest, by number and by what they stand for.

use alloc::vec::Vec;

use crate::page::{Page, PageId, Role};
use crate::shadow::OutOfMemory;

/// Shadow pages by number, and a hash table of their frames.
#[derive(Debug)]
pub(crate) struct Pages<H> {
    slots: Vec<Option<Page<H>>>,
    /// Numbers without a page.
    vacant: Vec<PageId>,
    /// The first page of each bucket; a power of two of them.
    buckets: Vec<Option<PageId>>,
    /// Where recycling goes on.
    hand: PageId,
    in_use: usize,
}

impl<H> Pages<H> {
    /// Room for `limit` pages.
    pub(crate) fn new(limit: usize) -> Result<Self, OutOfMemory> {
        let mut buckets = Vec::new();
        let count = limit.next_power_of_two();
        buckets.try_reserve_exact(count).map_err(|_| OutOfMemory)?;
        buckets.resize(count, None);
        Ok(Self { slots: Vec::new(), vacant: Vec::new(), buckets, hand: 0, in_use: 0 })
    }

    /// Pages that there are, those that are zapped and still held included.
    pub(crate) fn count(&self) -> usize {
        self.in_use
    }

    #[inline]
    pub(crate) fn get(&self, id: PageId) -> &Page<H> {
        self.slots[id as usize]
            .as_ref()
            .unwrap_or_else(|| unreachable!("a page that is referred to is there"))
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, id: PageId) -> &mut Page<H> {
        self.slots[id as usize]
            .as_mut()
            .unwrap_or_else(|| unreachable!("a page that is referred to is there"))
    }

    /// Makes sure that one more page can be put in.
    pub(crate) fn reserve(&mut self) -> Result<(), OutOfMemory> {
        if self.vacant.is_empty() {
            self.slots.try_reserve(1).map_err(|_| OutOfMemory)?;
            // One for every slot, so that taking a page out never allocates.
            let slots = self.slots.len() + 1;
            self.vacant.try_reserve(slots - self.vacant.len()).map_err(|_| OutOfMemory)?;
        }
        Ok(())
    }

    /// Puts a page in, under its frame and role. Room was reserved.
    pub(crate) fn insert(&mut self, mut page: Page<H>) -> PageId {
        let bucket = self.bucket(page.frame);
        page.next = self.buckets[bucket];
        let id = match self.vacant.pop() {
            Some(id) => {
                self.slots[id as usize] = Some(page);
                id
            }
            None => {
                self.slots.push(Some(page));
                (self.slots.len() - 1) as PageId
            }
        };
        self.buckets[bucket] = Some(id);
        self.in_use += 1;
        id
    }

    /// Takes a page out of the hash table; its number stays.
    pub(crate) fn hide(&mut self, id: PageId) {
        let (bucket, next) = (self.bucket(self.get(id).frame), self.get(id).next);
        let mut at = self.buckets[bucket];
        if at == Some(id) {
            self.buckets[bucket] = next;
        }
        while let Some(other) = at {
            at = self.get(other).next;
            if at == Some(id) {
                self.get_mut(other).next = next;
            }
        }
        self.get_mut(id).next = None;
    }

    /// Takes out a page that is hidden.
    pub(crate) fn remove(&mut self, id: PageId) -> Option<Page<H>> {
        let page = self.slots[id as usize].take()?;
        self.vacant.push(id);
        self.in_use -= 1;
        Some(page)
    }

    pub(crate) fn find(&self, frame: u64, role: Role) -> Option<PageId> {
        self.of_frame(frame).find(|&id| self.get(id).role == role)
    }

    /// The pages whose frame this is.
    pub(crate) fn of_frame(&self, frame: u64) -> impl Iterator<Item = PageId> + '_ {
        core::iter::successors(self.buckets[self.bucket(frame)], |&id| self.get(id).next)
            .filter(move |&id| self.get(id).frame == frame)
    }

    /// The pages that shadow the guest's table at this frame.
    pub(crate) fn shadowing(&self, frame: u64) -> impl Iterator<Item = PageId> + '_ {
        self.of_frame(frame).filter(|&id| !self.get(id).role.direct)
    }

    /// Takes out every page.
    pub(crate) fn take_all(&mut self) -> impl Iterator<Item = Page<H>> + '_ {
        self.slots.drain(..).flatten()
    }

    /// Numbers below which all pages are.
    pub(crate) fn end(&self) -> PageId {
        self.slots.len() as PageId
    }

    /// Whether the page of this number is in the hash table.
    pub(crate) fn is_listed(&self, id: PageId) -> bool {
        matches!(self.slots.get(id as usize), Some(Some(page)) if !page.zapped)
    }

    /// Numbers of all pages in the hash table.
    pub(crate) fn all(&self) -> impl Iterator<Item = PageId> + '_ {
        self.slots
            .iter()
            .zip(0..)
            .filter_map(|(page, id)| page.as_ref().is_some_and(|page| !page.zapped).then_some(id))
    }

    /// A page that can be recycled: not a root, and not used since the hand came by last.
    pub(crate) fn idle(&mut self) -> Option<PageId> {
        for _ in 0..2 * self.slots.len() {
            let id = self.hand;
            self.hand = (self.hand + 1) % self.slots.len() as PageId;
            if let Some(page) = &mut self.slots[id as usize]
                && page.roots == 0
                && !page.zapped
                && !core::mem::take(&mut page.used)
            {
                return Some(id);
            }
        }
        None
    }

    fn bucket(&self, frame: u64) -> usize {
        let hash = frame.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        hash as usize & (self.buckets.len() - 1)
    }
}
