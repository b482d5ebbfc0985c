//! What a guest does: one vCPU's program, which touches each page of its part of guest memory once a pass, as the
//! guests of the kernel's memory stress tests do.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::random::Dice;

/// What the kernel's guests store, where nobody checks contents.
pub(crate) const PLAIN: u64 = 0x0123_4567_89ab_cdef;
/// Accesses from one yield to the next.
const YIELD_EVERY: u64 = 32;
/// Bits of a checked value that hold the number of its guest page; the bits above count stores.
const PAGE_BITS: u32 = 28;
/// More guest pages than this cannot be told apart.
pub(crate) const MAX_CHECKED_PAGES: u64 = 1 << PAGE_BITS;

/// A guest page's number from a value that was stored into it by a checked program.
pub(crate) fn page_of(value: u64) -> u64 {
    value & (MAX_CHECKED_PAGES - 1)
}

/// Memory as a vCPU's loads and stores see it.
pub(crate) trait GuestMemory {
    /// Why an access could not be completed.
    type Error;
    /// Loads eight bytes of guest-physical memory.
    fn load(&mut self, gpa: u64) -> Result<u64, Self::Error>;
    /// Stores eight bytes of guest-physical memory.
    fn store(&mut self, gpa: u64, value: u64) -> Result<(), Self::Error>;
}

/// How a pass goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Pass {
    /// How many of a hundred accesses are stores.
    pub(crate) write_percent: u32,
    /// Pages in random order, some more than once and some not at all; otherwise ascending.
    pub(crate) random: bool,
}

/// What a vCPU that runs a [`Program`] is told.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Order {
    /// One pass.
    Pass(Pass),
    /// Passes until it is stopped.
    RunUntilStopped(Pass),
}

/// What a guest looks at between two accesses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Watch<'a> {
    pub(crate) pulse: &'a Pulse,
    pub(crate) stop: &'a AtomicBool,
}

impl Watch<'_> {
    /// An access was completed.
    #[inline(always)]
    pub(crate) fn beat(self) {
        self.pulse.beat();
    }

    /// Whether it is to stop.
    #[inline(always)]
    pub(crate) fn stopped(self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// How far a vCPU is, on a cache line of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Pulse {
    completed: AtomicU64,
    yields: bool,
}

impl Pulse {
    /// A vCPU that now and then lets another thread run, between two accesses.
    ///
    /// Where there are fewer processors than threads, the operating system takes the processor away at any moment,
    /// most likely in an access; and whoever invalidates then waits for it a whole round of all threads.
    pub(crate) fn yielding() -> Self {
        Self { yields: true, ..Self::default() }
    }

    /// Accesses that were completed.
    pub(crate) fn completed(&self) -> u64 {
        // Acquire: what the access did, marks in the log included, comes before whoever sees it completed.
        self.completed.load(Ordering::Acquire)
    }

    #[inline(always)]
    fn beat(&self) {
        let completed = self.completed.load(Ordering::Relaxed) + 1;
        self.completed.store(completed, Ordering::Release);
        if self.yields && completed.is_multiple_of(YIELD_EVERY) {
            std::thread::yield_now();
        }
    }
}

/// One vCPU's program and what it remembers.
#[derive(Debug)]
pub(crate) struct Program {
    /// Where guest memory begins.
    gpa: u64,
    /// Bytes of a guest page.
    page: u64,
    /// The guest pages that it uses.
    part: Range<u64>,
    dice: Dice,
    memory: Memory,
}

/// What is stored, and what loads must return.
#[derive(Debug)]
enum Memory {
    /// The kernel's constant; loads are not looked at.
    Plain,
    /// Values that never come twice.
    Checked {
        /// Counts stores of all vCPUs apart: this one, then `step` further.
        next: u64,
        step: u64,
        /// What was stored last in each page of the part; empty if other vCPUs store there too.
        last: Vec<u64>,
        wrong_loads: u64,
    },
}

impl Program {
    /// A program that stores the kernel's constant.
    pub(crate) fn new(gpa: u64, page: u64, part: Range<u64>, dice: Dice) -> Self {
        Self { gpa, page, part, dice, memory: Memory::Plain }
    }

    /// Stores values that never come twice, and compares what it loads. The program is the one of vCPU `index` of
    /// `vcpus`; `alone` if no other vCPU uses its part.
    pub(crate) fn checked(mut self, index: u32, vcpus: u32, alone: bool) -> Self {
        let pages = if alone { self.pages() } else { 0 };
        self.memory = Memory::Checked {
            next: u64::from(index) + 1,
            step: vcpus.into(),
            last: vec![0; pages as usize],
            wrong_loads: 0,
        };
        self
    }

    /// Guest pages of its part: accesses of a pass.
    pub(crate) fn pages(&self) -> u64 {
        self.part.end - self.part.start
    }

    /// Touches as many pages as its part has.
    pub(crate) fn pass<M: GuestMemory>(
        &mut self,
        memory: &mut M,
        pass: Pass,
        pulse: &Pulse,
    ) -> Result<(), M::Error> {
        let pages = self.pages();
        for at in 0..pages {
            let index = if pass.random { self.dice.below(pages) } else { at };
            self.touch(memory, index, pass.write_percent)?;
            pulse.beat();
        }
        Ok(())
    }

    /// Touches pages until it is stopped, at least one.
    pub(crate) fn run_until<M: GuestMemory>(
        &mut self,
        memory: &mut M,
        pass: Pass,
        watch: Watch<'_>,
    ) -> Result<(), M::Error> {
        let mut at = 0;
        loop {
            at = self.step(memory, pass, at)?;
            watch.beat();
            if watch.stopped() {
                return Ok(());
            }
        }
    }

    /// One access, to page `at` of the part unless the order is random; which page is next.
    #[inline(always)]
    pub(crate) fn step<M: GuestMemory>(
        &mut self,
        memory: &mut M,
        pass: Pass,
        at: u64,
    ) -> Result<u64, M::Error> {
        let pages = self.pages();
        let index = if pass.random { self.dice.below(pages) } else { at };
        self.touch(memory, index, pass.write_percent)?;
        Ok(if at + 1 == pages { 0 } else { at + 1 })
    }

    /// One access to page `index` of the part.
    #[inline]
    pub(crate) fn touch<M: GuestMemory>(
        &mut self,
        memory: &mut M,
        index: u64,
        write_percent: u32,
    ) -> Result<(), M::Error> {
        let page = self.part.start + index;
        let gpa = self.gpa + page * self.page;
        if self.dice.happens(write_percent) {
            memory.store(gpa, self.memory.value(page, index))
        } else {
            let value = memory.load(gpa)?;
            self.memory.compare(page, index, value);
            Ok(())
        }
    }

    /// Loads that did not return what was stored.
    pub(crate) fn wrong_loads(&self) -> u64 {
        match self.memory {
            Memory::Plain => 0,
            Memory::Checked { wrong_loads, .. } => wrong_loads,
        }
    }

    /// Whether `value` is what page `page` of guest memory must hold; `None` if this program cannot tell.
    pub(crate) fn agrees(&self, page: u64, value: u64) -> Option<bool> {
        let index = page.checked_sub(self.part.start)?;
        match &self.memory {
            Memory::Checked { last, .. } => last.get(index as usize).map(|&last| last == value),
            Memory::Plain => None,
        }
    }
}

impl Memory {
    /// The value to store next.
    #[inline]
    fn value(&mut self, page: u64, index: u64) -> u64 {
        match self {
            Self::Plain => PLAIN,
            Self::Checked { next, step, last, .. } => {
                let value = *next << PAGE_BITS | page;
                *next += *step;
                if let Some(last) = last.get_mut(index as usize) {
                    *last = value;
                }
                value
            }
        }
    }

    #[inline]
    fn compare(&mut self, page: u64, index: u64, value: u64) {
        if let Self::Checked { last, wrong_loads, .. } = self {
            let right = match last.get(index as usize) {
                Some(&last) => value == last,
                None => value == 0 || page_of(value) == page,
            };
            *wrong_loads += u64::from(!right);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    const GPA: u64 = 0xff_0000_0000;

    #[derive(Default)]
    struct Fake {
        words: HashMap<u64, u64>,
        stores: usize,
    }

    impl GuestMemory for Fake {
        type Error = u64;

        fn load(&mut self, gpa: u64) -> Result<u64, u64> {
            Ok(self.words.get(&gpa).copied().unwrap_or(0))
        }

        fn store(&mut self, gpa: u64, value: u64) -> Result<(), u64> {
            self.stores += 1;
            self.words.insert(gpa, value);
            Ok(())
        }
    }

    fn program() -> Program {
        Program::new(GPA, 4096, 100..200, Dice::new(1, 0))
    }

    const POPULATE: Pass = Pass { write_percent: 100, random: false };

    #[test]
    fn a_pass_in_order_stores_the_kernels_value_once_into_each_page_of_the_part() {
        let (mut memory, pulse) = (Fake::default(), Pulse::default());
        program().pass(&mut memory, POPULATE, &pulse).unwrap();
        assert_eq!((memory.stores, memory.words.len(), pulse.completed()), (100, 100, 100));
        assert!((100..200).all(|page| memory.words[&(GPA + page * 4096)] == PLAIN));
    }

    #[test]
    fn the_share_of_stores_is_the_write_percentage() {
        let mut memory = Fake::default();
        let mut program = program();
        for _ in 0..100 {
            let pass = Pass { write_percent: 20, random: true };
            program.pass(&mut memory, pass, &Pulse::default()).unwrap();
        }
        assert!((1800..2200).contains(&memory.stores), "{}", memory.stores);
        let stores = memory.stores;
        program
            .pass(&mut memory, Pass { write_percent: 0, random: true }, &Pulse::default())
            .unwrap();
        assert_eq!(memory.stores, stores);
    }

    #[test]
    fn checked_values_name_their_page_and_never_repeat() {
        let mut memory = Fake::default();
        let mut seen = std::collections::HashSet::new();
        for index in 0..2 {
            let mut program = program().checked(index, 2, false);
            for _ in 0..3 {
                program.pass(&mut memory, POPULATE, &Pulse::default()).unwrap();
                for (gpa, value) in &memory.words {
                    assert_eq!(page_of(*value), (gpa - GPA) / 4096);
                    assert!(seen.insert(*value));
                }
            }
        }
    }

    #[test]
    fn a_load_that_returns_something_else_is_counted() {
        let mut memory = Fake::default();
        let mut program = program().checked(0, 1, true);
        program.pass(&mut memory, POPULATE, &Pulse::default()).unwrap();
        let read = Pass { write_percent: 0, random: false };
        program.pass(&mut memory, read, &Pulse::default()).unwrap();
        assert_eq!(program.wrong_loads(), 0);
        let stale = memory.words[&(GPA + 100 * 4096)];
        program.pass(&mut memory, POPULATE, &Pulse::default()).unwrap();
        memory.words.insert(GPA + 100 * 4096, stale);
        program.pass(&mut memory, read, &Pulse::default()).unwrap();
        assert_eq!(program.wrong_loads(), 1);
        assert_eq!(program.agrees(100, stale), Some(false));
        assert_eq!(program.agrees(101, memory.words[&(GPA + 101 * 4096)]), Some(true));
        assert_eq!((program.agrees(99, 0), program.agrees(200, 0)), (None, None));
    }
}
