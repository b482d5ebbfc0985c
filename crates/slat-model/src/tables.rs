//! Where tables come from: numbered tables in one mapping, free ones kept in shards so that threads do not meet.
#![expect(unsafe_code, reason = "clears table memory and casts it to entries")]

use std::cell::Cell;
use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicI64, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use slat::{Entry, Hpa};

use crate::lock::Spin;
use crate::mapping::{Below, Mapping};

const SHARDS: usize = 16;
/// Fresh tables that a shard takes at once.
const CHUNK: u32 = 64;
/// A root has up to `1 << MAX_ROOT_ORDER` tables.
pub(crate) const MAX_ROOT_ORDER: u32 = 4;
/// `countdown` when no failure is wanted.
const NEVER: i64 = i64::MAX;

/// All table memory.
#[derive(Debug)]
pub(crate) struct Tables {
    memory: Mapping,
    base: u64,
    shift: u32,
    capacity: u32,
    spare: Mutex<Spare>,
    shards: Box<[Spin<Shard>]>,
    /// Allocations that still succeed.
    countdown: AtomicI64,
}

/// What no shard has: single tables are taken from below, roots from above.
#[derive(Debug)]
struct Spare {
    fresh: Range<u32>,
    /// Free roots by log2 of their tables.
    roots: [Vec<u32>; MAX_ROOT_ORDER as usize + 1],
}

#[derive(Debug, Default)]
struct Shard {
    recycled: Vec<u32>,
    fresh: Range<u32>,
    allocated: u64,
    freed: u64,
}

/// Tables that were taken, and whether they were used before.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Taken {
    pub(crate) first: u32,
    pub(crate) recycled: bool,
}

static THREADS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static THREAD: Cell<usize> = const { Cell::new(usize::MAX) };
}

/// A small number of the calling thread, to pick a shard by.
#[inline]
pub(crate) fn thread_number() -> usize {
    THREAD.with(|number| {
        if number.get() == usize::MAX {
            number.set(THREADS.fetch_add(1, Ordering::Relaxed));
        }
        number.get()
    })
}

impl Tables {
    /// `capacity` tables of `1 << shift` bytes from `base` on.
    pub(crate) fn new(base: Hpa, shift: u32, capacity: u32) -> io::Result<Self> {
        let align = 1 << (shift + MAX_ROOT_ORDER);
        let memory = Mapping::new(u64::from(capacity) << shift, align, Below::Any)?;
        Ok(Self {
            memory,
            base: base.0,
            shift,
            capacity,
            spare: Mutex::new(Spare { fresh: 0..capacity, roots: Default::default() }),
            shards: (0..SHARDS).map(|_| Spin::default()).collect(),
            countdown: AtomicI64::new(NEVER),
        })
    }

    /// The number of the table that `address` lies in; `None` outside table memory.
    #[inline(always)]
    pub(crate) fn number(&self, address: Hpa) -> Option<u32> {
        let offset = address.0.wrapping_sub(self.base);
        (offset < self.memory.size()).then_some((offset >> self.shift) as u32)
    }

    /// The address of a table.
    pub(crate) fn address(&self, number: u32) -> Hpa {
        Hpa(self.base + (u64::from(number) << self.shift))
    }

    /// The entry at `address`, rounded down to a multiple of 8; `None` outside table memory.
    #[inline(always)]
    pub(crate) fn entry(&self, address: Hpa) -> Option<&Entry> {
        let pointer = self.memory.pointer(address.0.wrapping_sub(self.base) & !7)?;
        // SAFETY: eight aligned mapped bytes that live as long as `self`; an entry is an atomic word.
        Some(unsafe { pointer.cast::<Entry>().as_ref() })
    }

    /// The first entry of the table at `address`; `None` outside table memory.
    #[inline(always)]
    pub(crate) fn first_entry(&self, table: Hpa) -> Option<NonNull<Entry>> {
        self.memory.pointer(table.0.wrapping_sub(self.base)).map(NonNull::cast)
    }

    /// From now on `n` calls of [`may_take`](Self::may_take) say yes and all later ones no; `None`: all say yes.
    pub(crate) fn fail_after(&self, n: Option<u64>) {
        let n = n.map_or(NEVER, |n| i64::try_from(n).unwrap_or(NEVER - 1));
        self.countdown.store(n, Ordering::Relaxed);
    }

    /// Whether an allocation that is wanted now should not fail on purpose. To be asked once for each.
    pub(crate) fn may_take(&self) -> bool {
        self.countdown.load(Ordering::Relaxed) == NEVER
            || self.countdown.fetch_sub(1, Ordering::Relaxed) > 0
    }

    /// Takes `tables` neighbours, aligned to their total size. Their contents are arbitrary if they were used before.
    pub(crate) fn take(&self, tables: usize) -> Option<Taken> {
        let taken = if tables == 1 { self.take_one() } else { self.take_root(tables) }?;
        self.shard().lock().allocated += tables as u64;
        Some(taken)
    }

    /// Takes back what `take` gave, without yet making it available.
    pub(crate) fn count_freed(&self, tables: usize) {
        self.shard().lock().freed += tables as u64;
    }

    /// Makes tables available again.
    pub(crate) fn put(&self, first: u32, tables: usize) {
        if tables == 1 {
            self.shard().lock().recycled.push(first);
        } else {
            self.spare().roots[tables.ilog2() as usize].push(first);
        }
    }

    fn take_one(&self) -> Option<Taken> {
        let mut shard = self.shard().lock();
        if let Some(taken) = shard.take() {
            return Some(taken);
        }
        let mut spare = self.spare();
        let start = spare.fresh.start;
        let end = spare.fresh.end.min(start + CHUNK);
        spare.fresh.start = end;
        drop(spare);
        shard.fresh = start..end;
        let taken = shard.take();
        drop(shard);
        taken.or_else(|| self.shards.iter().find_map(|shard| shard.lock().take()))
    }

    fn take_root(&self, tables: usize) -> Option<Taken> {
        if !tables.is_power_of_two() || tables.ilog2() > MAX_ROOT_ORDER {
            return None;
        }
        let mut spare = self.spare();
        if let Some(first) = spare.roots[tables.ilog2() as usize].pop() {
            return Some(Taken { first, recycled: true });
        }
        let first = spare.fresh.end.checked_sub(tables as u32)? & !(tables as u32 - 1);
        if first < spare.fresh.start {
            return None;
        }
        spare.fresh.end = first;
        Some(Taken { first, recycled: false })
    }

    /// Touches the memory of the tables that are taken first, so that the operating system has it ready.
    pub(crate) fn warm(&self, tables: u32) {
        for number in 0..tables.min(self.capacity) {
            if let Some(word) = self.memory.word(u64::from(number) << self.shift) {
                word.store(0, Ordering::Relaxed);
            }
        }
    }

    /// Zeroes tables that were taken.
    ///
    /// # Safety
    /// Nobody else can reach them.
    pub(crate) unsafe fn clear(&self, first: u32, tables: usize) {
        if let Some(start) = self.memory.pointer(u64::from(first) << self.shift) {
            // SAFETY: the tables lie inside the mapping, since their first does and `take` checked their number;
            // the caller promises that they are his alone.
            unsafe { start.as_ptr().write_bytes(0, tables << self.shift) }
        }
    }

    /// Every entry of `tables` tables.
    pub(crate) fn words(&self, first: u32, tables: usize) -> &[std::sync::atomic::AtomicU64] {
        let size = (tables as u64) << self.shift;
        self.memory.words(u64::from(first) << self.shift, size).unwrap_or_default()
    }

    /// Tables allocated and freed since the model was made.
    pub(crate) fn counts(&self) -> (u64, u64) {
        self.shards.iter().fold((0, 0), |(allocated, freed), shard| {
            let shard = shard.lock();
            (allocated + shard.allocated, freed + shard.freed)
        })
    }

    fn shard(&self) -> &Spin<Shard> {
        &self.shards[thread_number() % SHARDS]
    }

    fn spare(&self) -> std::sync::MutexGuard<'_, Spare> {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shard {
    fn take(&mut self) -> Option<Taken> {
        if let Some(first) = self.recycled.pop() {
            return Some(Taken { first, recycled: true });
        }
        self.fresh.next().map(|first| Taken { first, recycled: false })
    }
}

/// One number for each table, zero at first, made when it is first looked at.
#[derive(Debug, Default)]
pub(crate) struct PerTable {
    pieces: Box<[OnceLock<Piece>]>,
}

const PIECE: usize = 1024;
type Piece = Box<[AtomicU32]>;

impl PerTable {
    pub(crate) fn new(tables: &Tables) -> Self {
        let pieces = (tables.capacity as usize).div_ceil(PIECE);
        Self { pieces: (0..pieces).map(|_| OnceLock::new()).collect() }
    }

    /// The number of a table.
    #[inline]
    pub(crate) fn of(&self, table: u32) -> &AtomicU32 {
        let piece = self.pieces[table as usize / PIECE]
            .get_or_init(|| (0..PIECE).map(|_| AtomicU32::new(0)).collect());
        &piece[table as usize % PIECE]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn every_table_is_given_once_and_roots_are_aligned() {
        let tables = Tables::new(Hpa(1 << 30), 12, 200).unwrap();
        let root = tables.take(16).unwrap().first;
        assert_eq!(tables.address(root).0 % (16 << 12), 0);
        let mut given = HashSet::new();
        while let Some(taken) = tables.take(1) {
            assert!(given.insert(taken.first));
            assert!(!(root..root + 16).contains(&taken.first));
        }
        assert_eq!(given.len(), root as usize);
        tables.put(root, 16);
        assert_eq!(tables.take(16).unwrap().first, root);
        assert!(tables.take(2).is_none());
    }

    #[test]
    fn the_nth_allocation_from_now_and_all_later_ones_fail_until_cleared() {
        let tables = Tables::new(Hpa(1 << 30), 12, 200).unwrap();
        tables.fail_after(Some(2));
        assert_eq!([(); 4].map(|()| tables.may_take()), [true, true, false, false]);
        tables.fail_after(None);
        assert!(tables.may_take());
    }

    #[test]
    fn addresses_outside_table_memory_are_nobodys() {
        let tables = Tables::new(Hpa(1 << 30), 12, 16).unwrap();
        assert_eq!(tables.number(Hpa((1 << 30) + 0x1fff)), Some(1));
        assert_eq!(tables.number(Hpa((1 << 30) - 1)), None);
        assert_eq!(tables.number(Hpa((1 << 30) + 0x10000)), None);
        assert!(tables.entry(Hpa(0)).is_none());
    }

    #[test]
    fn threads_that_run_dry_take_from_each_other() {
        let tables = Tables::new(Hpa(1 << 30), 12, 64).unwrap();
        let taken: Vec<_> = (0..64).map(|_| tables.take(1).unwrap().first).collect();
        std::thread::scope(|scope| {
            scope.spawn(|| taken.iter().for_each(|&first| tables.put(first, 1)));
        });
        assert!((0..64).all(|_| tables.take(1).is_some()));
    }
}
