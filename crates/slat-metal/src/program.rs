//! What a guest does: it touches pages of its memory as its mailbox says, then calls the hypervisor.
//!
//! All of it is inlined into one function, which runs in the guest: see `guest.rs`. Nothing here may call anything that is
//! not, index anything, or panic.

use core::sync::atomic::{AtomicU64, Ordering};

/// Bytes of a page as guests go by them.
pub const PAGE: u64 = 4096;
/// What is stored where nobody checks contents.
pub const PLAIN: u64 = 0x0123_4567_89ab_cdef;
/// Bits of a checked value that hold the number of its page; the bits above count stores.
pub const PAGE_BITS: u32 = 28;

/// The number of the page that a checked value was stored in.
pub const fn page_of(value: u64) -> u64 {
    value & ((1 << PAGE_BITS) - 1)
}

/// What is stored, and what loads must return.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Values {
    /// [`PLAIN`]; loads are not looked at.
    Plain,
    /// Values that never come twice: `step` after `step` of the store's number, with the page's number below. What was
    /// stored last in each of the pages from `Order::first` on is kept at `last`, unless that is zero.
    Unique {
        /// Guest-physical address of one word for each page.
        last: u64,
        /// vCPUs, so that each counts apart from the others.
        step: u64,
    },
    /// The number of the round, [`Mailbox::round`].
    Round,
}

/// How pages are touched.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Order {
    /// Guest-physical address of page 0.
    pub memory: u64,
    /// The first page.
    pub first: u64,
    /// How many pages.
    pub pages: u64,
    /// In order: of each stretch of so many pages the first is touched as `writes` says, and those from `read_from` on are
    /// read. 1 and 1: every page is touched once.
    pub stretch: u64,
    /// See `stretch`.
    pub read_from: u64,
    /// Per cent of the touches that are writes.
    pub writes: u64,
    /// So many touches of pages at random instead; zero: in order.
    pub random: u64,
    /// Over and over, at least one touch, until [`Mailbox::stop`] is set.
    pub until_stopped: bool,
    /// What is stored.
    pub values: Values,
}

/// Where the hypervisor and the program of one vCPU meet. It begins with zeroes.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Mailbox {
    memory: AtomicU64,
    first: AtomicU64,
    pages: AtomicU64,
    stretch: AtomicU64,
    read_from: AtomicU64,
    writes: AtomicU64,
    random: AtomicU64,
    until_stopped: AtomicU64,
    values: AtomicU64,
    last: AtomicU64,
    step: AtomicU64,
    /// The number of the next unique value.
    next: AtomicU64,
    /// State of the dice.
    dice: AtomicU64,
    /// What is stored with [`Values::Round`].
    pub round: AtomicU64,
    /// Not zero: come back after the next touch.
    pub stop: AtomicU64,
    /// Touches that were completed, ever.
    pub completed: AtomicU64,
    /// Loads that did not return what was stored last.
    pub wrong_loads: AtomicU64,
}

/// Memory as the program sees it.
pub trait GuestMemory {
    /// Loads eight bytes.
    fn load(&self, gpa: u64) -> u64;
    /// Stores eight bytes.
    fn store(&self, gpa: u64, value: u64);
}

const RELAXED: Ordering = Ordering::Relaxed;

impl Mailbox {
    /// Before the first order: vCPU `index`, in a run with `seed`.
    pub fn begin(&self, seed: u64, index: u64) {
        self.next.store(index + 1, RELAXED);
        // Far apart in the sequence, by an odd constant that has nothing to do with its own.
        self.dice.store(seed.wrapping_add(index).wrapping_mul(0xd134_2543_de82_ef95), RELAXED);
    }

    /// What the vCPU does when it runs next. It is outside of its guest.
    pub fn put(&self, order: &Order) {
        let Order { memory, first, pages, stretch, read_from, writes, random, .. } = *order;
        let (values, last, step) = match order.values {
            Values::Plain => (0, 0, 0),
            Values::Unique { last, step } => (1, last, step),
            Values::Round => (2, 0, 0),
        };
        let fields = [
            (&self.memory, memory),
            (&self.first, first),
            (&self.pages, pages),
            (&self.stretch, stretch),
            (&self.read_from, read_from),
            (&self.writes, writes),
            (&self.random, random),
            (&self.until_stopped, order.until_stopped.into()),
            (&self.values, values),
            (&self.last, last),
            (&self.step, step),
            (&self.stop, 0),
        ];
        for (field, value) in fields {
            field.store(value, RELAXED);
        }
    }

    /// The guest's part: follows the order.
    #[inline(always)]
    pub fn follow(&self, memory: &impl GuestMemory) {
        let mut program = Program {
            mailbox: self,
            guest: memory,
            memory: self.memory.load(RELAXED),
            first: self.first.load(RELAXED),
            writes: self.writes.load(RELAXED),
            values: self.values.load(RELAXED),
            last: self.last.load(RELAXED),
            dice: self.dice.load(RELAXED),
            completed: self.completed.load(RELAXED),
        };
        let (pages, random) = (self.pages.load(RELAXED), self.random.load(RELAXED));
        let (stretch, read_from) = (self.stretch.load(RELAXED), self.read_from.load(RELAXED));
        let until_stopped = self.until_stopped.load(RELAXED) != 0;
        loop {
            let stopped = if random == 0 {
                program.in_order(pages, stretch, read_from, until_stopped)
            } else {
                program.at_random(pages, random, until_stopped)
            };
            if stopped || !until_stopped {
                break;
            }
        }
        self.dice.store(program.dice, RELAXED);
    }
}

/// An order that is being followed.
struct Program<'m, G> {
    mailbox: &'m Mailbox,
    guest: &'m G,
    memory: u64,
    first: u64,
    writes: u64,
    values: u64,
    last: u64,
    dice: u64,
    completed: u64,
}

impl<G: GuestMemory> Program<'_, G> {
    /// Whether it was stopped.
    #[inline(always)]
    fn in_order(&mut self, pages: u64, stretch: u64, read_from: u64, stops: bool) -> bool {
        let mut start = 0;
        while start < pages {
            self.touch(start, true);
            let mut index = start.wrapping_add(read_from);
            start = start.wrapping_add(stretch);
            while index < start {
                self.touch(index, false);
                index = index.wrapping_add(1);
            }
            if stops && self.is_stopped() {
                return true;
            }
        }
        false
    }

    /// Whether it was stopped.
    #[inline(always)]
    fn at_random(&mut self, pages: u64, touches: u64, stops: bool) -> bool {
        let mut left = touches;
        while left > 0 {
            let index = self.below(pages);
            self.touch(index, true);
            left = left.wrapping_sub(1);
            if stops && self.is_stopped() {
                return true;
            }
        }
        false
    }

    #[inline(always)]
    fn is_stopped(&self) -> bool {
        self.mailbox.stop.load(RELAXED) != 0
    }

    /// Touches a page; `may_write`: writes so often as the order says.
    #[inline(always)]
    fn touch(&mut self, index: u64, may_write: bool) {
        let page = self.first.wrapping_add(index);
        let gpa = self.memory.wrapping_add(page.wrapping_mul(PAGE));
        let write =
            may_write && (self.writes == 100 || self.writes != 0 && self.below(100) < self.writes);
        if write {
            let value = self.value(page, index);
            self.guest.store(gpa, value);
        } else {
            let value = self.guest.load(gpa);
            self.compare(page, index, value);
        }
        self.completed = self.completed.wrapping_add(1);
        // Release: whoever sees it completed sees what it did.
        self.mailbox.completed.store(self.completed, Ordering::Release);
    }

    /// The value to store next.
    #[inline(always)]
    fn value(&self, page: u64, index: u64) -> u64 {
        match self.values {
            0 => PLAIN,
            1 => {
                let number = self.mailbox.next.load(RELAXED);
                let value = number << PAGE_BITS | page;
                self.mailbox
                    .next
                    .store(number.wrapping_add(self.mailbox.step.load(RELAXED)), RELAXED);
                if self.last != 0 {
                    self.guest.store(self.last.wrapping_add(index.wrapping_mul(8)), value);
                }
                value
            }
            _ => self.mailbox.round.load(RELAXED),
        }
    }

    #[inline(always)]
    fn compare(&self, page: u64, index: u64, value: u64) {
        if self.values != 1 {
            return;
        }
        let right = if self.last != 0 {
            value == self.guest.load(self.last.wrapping_add(index.wrapping_mul(8)))
        } else {
            value == 0 || page_of(value) == page
        };
        if !right {
            let wrong = self.mailbox.wrong_loads.load(RELAXED);
            self.mailbox.wrong_loads.store(wrong.wrapping_add(1), RELAXED);
        }
    }

    /// A number below `end` (SplitMix64, of which the high half is scaled).
    #[inline(always)]
    fn below(&mut self, end: u64) -> u64 {
        self.dice = self.dice.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.dice;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        ((u128::from(z) * u128::from(end)) >> 64) as u64
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::{HashMap, HashSet};

    use super::*;

    const MEMORY: u64 = 0xff_0000_0000;
    const LAST: u64 = 0x5000_0000;

    /// Words, and each access to guest memory: the page, and whether it was a store.
    #[derive(Default)]
    struct Fake {
        words: RefCell<HashMap<u64, u64>>,
        touched: RefCell<Vec<(u64, bool)>>,
    }

    impl GuestMemory for Fake {
        fn load(&self, gpa: u64) -> u64 {
            if gpa >= MEMORY {
                self.touched.borrow_mut().push(((gpa - MEMORY) / PAGE, false));
            }
            self.words.borrow().get(&gpa).copied().unwrap_or(0)
        }

        fn store(&self, gpa: u64, value: u64) {
            if gpa >= MEMORY {
                self.touched.borrow_mut().push(((gpa - MEMORY) / PAGE, true));
            }
            self.words.borrow_mut().insert(gpa, value);
        }
    }

    const PASS: Order = Order {
        memory: MEMORY,
        first: 0,
        pages: 8,
        stretch: 1,
        read_from: 1,
        writes: 100,
        random: 0,
        until_stopped: false,
        values: Values::Plain,
    };

    fn touched(order: Order) -> Vec<(u64, bool)> {
        let (mailbox, memory) = (Mailbox::default(), Fake::default());
        mailbox.begin(1, 0);
        mailbox.put(&order);
        mailbox.follow(&memory);
        assert_eq!(mailbox.completed.load(RELAXED), memory.touched.borrow().len() as u64);
        memory.touched.take()
    }

    #[test]
    fn a_pass_touches_every_page_of_its_part_once() {
        let all =
            |first, write| (first..first + 8).map(move |page| (page, write)).collect::<Vec<_>>();
        assert_eq!(touched(PASS), all(0, true));
        assert_eq!(touched(Order { first: 100, writes: 0, ..PASS }), all(100, false));
    }

    #[test]
    fn of_a_stretch_the_first_page_is_touched_and_the_rest_read() {
        let stretches = Order { stretch: 4, read_from: 2, ..PASS };
        let want = [(0, true), (2, false), (3, false), (4, true), (6, false), (7, false)];
        assert_eq!(touched(stretches), want);
        assert_eq!(touched(Order { read_from: 4, ..stretches }), [(0, true), (4, true)]);
    }

    #[test]
    fn random_touches_are_as_many_as_asked_and_write_as_often() {
        let touched = touched(Order { random: 10_000, writes: 20, ..PASS });
        let writes = touched.iter().filter(|(_, write)| *write).count();
        assert_eq!(touched.len(), 10_000);
        assert!((1800..2200).contains(&writes), "{writes}");
        assert!((0..8).all(|page| touched.iter().any(|&(touched, _)| touched == page)));
    }

    #[test]
    fn it_goes_on_until_it_is_stopped_and_touches_at_least_once() {
        let (mailbox, memory) = (Mailbox::default(), Fake::default());
        mailbox.put(&Order { until_stopped: true, ..PASS });
        mailbox.stop.store(1, RELAXED);
        mailbox.follow(&memory);
        assert_eq!(*memory.touched.borrow(), [(0, true)]);
    }

    #[test]
    fn unique_values_name_their_page_and_never_repeat() {
        let memory = Fake::default();
        let mut seen = HashSet::new();
        for index in 0..2 {
            let mailbox = Mailbox::default();
            mailbox.begin(1, index);
            for _ in 0..3 {
                mailbox.put(&Order { values: Values::Unique { last: 0, step: 2 }, ..PASS });
                mailbox.follow(&memory);
                for (gpa, &value) in &*memory.words.borrow() {
                    assert_eq!(page_of(value), (gpa - MEMORY) / PAGE);
                    assert!(seen.insert(value));
                }
            }
        }
    }

    #[test]
    fn a_load_that_returns_something_else_is_counted() {
        let (mailbox, memory) = (Mailbox::default(), Fake::default());
        let unique = Order { first: 4, values: Values::Unique { last: LAST, step: 1 }, ..PASS };
        let follow = |writes| {
            mailbox.put(&Order { writes, ..unique });
            mailbox.follow(&memory);
            mailbox.wrong_loads.load(RELAXED)
        };
        follow(100);
        assert_eq!(follow(0), 0);
        let stale = memory.words.borrow()[&(MEMORY + 5 * PAGE)];
        follow(100);
        assert_eq!(memory.words.borrow()[&(LAST + 8)], memory.words.borrow()[&(MEMORY + 5 * PAGE)]);
        memory.words.borrow_mut().insert(MEMORY + 5 * PAGE, stale);
        assert_eq!(follow(0), 1);
    }

    #[test]
    fn rounds_store_their_number() {
        let (mailbox, memory) = (Mailbox::default(), Fake::default());
        mailbox.round.store(7, RELAXED);
        mailbox.put(&Order { values: Values::Round, ..PASS });
        mailbox.follow(&memory);
        assert!(memory.words.borrow().values().all(|&value| value == 7));
    }
}
