//! Random guests beside a CPU without TLB: whatever the guest does to its tables, and whatever happens below, after it
//! has flushed, every address leads where its tables say.
#![allow(missing_docs, clippy::precedence)]

mod guest;

use guest::{A, D, Guest, HOST, Heap, LARGE, LINEAR, NX, Outcome, P, PAGE, U, W, naive, range};
use proptest::prelude::*;
use slat::Gpa;
use slat_shadow::{GuestAccess, ShadowOptions};
use slat_vm::Access;

/// The guest's memory: tables first, then data. Two blocks of 2M, so that large pages lie over tables and beside them.
const FRAMES: u64 = 1024;
const CPUS: usize = 2;
/// Roots 1 and 2; the linear map at 3 and 4; tables of levels 1, 2 and 3 from 8, 12 and 16 on, and in the other block.
const ROOTS: [u64; 2] = [1, 2];
const TABLES: [[u64; 4]; 3] = [[8, 9, 10, 600], [12, 13, 14, 601], [16, 17, 18, 602]];
/// Entries of tables that are used.
const SLOTS: u64 = 3;

/// An entry of the guest: its table by level and number, which one, and what it says.
#[derive(Clone, Copy, Debug)]
struct Entry {
    level: usize,
    table: usize,
    slot: u64,
    says: Says,
}

#[derive(Clone, Copy, Debug)]
enum Says {
    Nothing,
    /// A lower table (or, in the last level, a page) by number, with bits.
    Next(u64, u64),
    /// A large page.
    Large(u64, u64),
    Reserved,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    /// The guest's kernel stores an entry through its linear map.
    Store(usize, Entry),
    /// The guest clears accessed and dirty flags of an entry.
    Clean(usize, Entry),
    Access(usize, u64, GuestAccess),
    Load(usize, usize),
    Invalidate(usize, u64),
    /// The host takes a frame back, and perhaps gives another page for it.
    Zap(u64, bool),
    Collect(u64, u64),
    Age(u64),
    Unprotect(u64),
    /// The memory below a block is, or is not, in one piece.
    Block(u64, bool),
}

fn bits() -> impl Strategy<Value = u64> {
    // Rights that are often there, flags that are often not.
    (any::<[bool; 5]>(), 0..4u8).prop_map(|([w, u, nx, a, d], often)| {
        let mut bits = P;
        bits |= if w || often > 0 { W } else { 0 };
        bits |= if u || often > 0 { U } else { 0 };
        bits |= if nx && often == 0 { NX } else { 0 };
        bits | if a { A } else { 0 } | if a && d { D } else { 0 }
    })
}

fn entry() -> impl Strategy<Value = Entry> {
    let says = prop_oneof![
        1 => Just(Says::Nothing),
        6 => (0..8u64, bits()).prop_map(|(next, bits)| Says::Next(next, bits)),
        1 => (0..2u64, bits()).prop_map(|(block, bits)| Says::Large(block, bits)),
        1 => Just(Says::Reserved),
    ];
    // The last levels change most.
    let level = prop_oneof![1 => Just(0usize), 1 => Just(1), 2 => Just(2), 4 => Just(3)];
    (level, 0..4usize, 0..SLOTS, says).prop_map(|(level, table, slot, says)| Entry {
        level,
        table,
        slot,
        says,
    })
}

impl Entry {
    fn gpa(&self) -> u64 {
        let table = match self.level {
            0 => ROOTS[self.table % 2],
            level => TABLES[level - 1][self.table],
        };
        table * PAGE + self.slot * 8
    }

    fn value(&self) -> u64 {
        match (self.level, self.says) {
            (_, Says::Nothing) => 0,
            (_, Says::Reserved) => 5 * PAGE | P | W | U | 1 << 51,
            // Data, or a table, or a frame that the kernel's map has too.
            (3, Says::Next(next, bits)) => {
                [30, 31, 32, 33, 17, 9, 640, 641][next as usize] * PAGE | bits
            }
            (level, Says::Next(next, bits)) => TABLES[level][next as usize % 4] * PAGE | bits,
            // In the root and in the last level this bit means something else: both CPUs must agree on it.
            (_, Says::Large(block, bits)) => block << 21 | LARGE | bits,
        }
    }
}

/// An address that goes through slots of all levels.
fn address() -> impl Strategy<Value = u64> {
    [0..SLOTS, 0..SLOTS, 0..SLOTS, 0..SLOTS]
        .prop_map(|slots| slots.iter().fold(0, |gva, slot| gva << 9 | slot) << 12)
}

fn access() -> impl Strategy<Value = GuestAccess> {
    let kind = prop_oneof![Just(Access::Read), Just(Access::Write), Just(Access::Execute)];
    (kind, any::<bool>()).prop_map(|(kind, user)| GuestAccess {
        kind,
        user,
        user_data_allowed: false,
    })
}

fn frame() -> impl Strategy<Value = u64> {
    prop_oneof![
        prop::sample::select(vec![30, 31, 32, 33, 640, 641]),
        prop::sample::select(vec![1, 8, 12, 16, 17, 600, 601, 602]),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let cpu = || 0..CPUS;
    prop_oneof![
        6 => (cpu(), entry()).prop_map(|(cpu, entry)| Step::Store(cpu, entry)),
        1 => (cpu(), entry()).prop_map(|(cpu, entry)| Step::Clean(cpu, entry)),
        10 => (cpu(), address(), access()).prop_map(|(cpu, gva, access)| Step::Access(cpu, gva, access)),
        2 => (cpu(), 0..2usize).prop_map(|(cpu, root)| Step::Load(cpu, root)),
        1 => (cpu(), address()).prop_map(|(cpu, gva)| Step::Invalidate(cpu, gva)),
        1 => (frame(), any::<bool>()).prop_map(|(frame, moves)| Step::Zap(frame, moves)),
        1 => (0..16u64, any::<u64>()).prop_map(|(word, mask)| Step::Collect(word, mask)),
        1 => frame().prop_map(Step::Age),
        1 => frame().prop_map(Step::Unprotect),
        1 => (0..2u64, any::<bool>()).prop_map(|(block, whole)| Step::Block(block, whole)),
    ]
}

/// What is done to the guest, and what its tables have said about each address that matters since its CPU last flushed.
struct Play<'m> {
    guest: Guest<'m>,
    /// Which root each CPU runs with.
    roots: [usize; CPUS],
    /// By CPU: entries that changed since it flushed, as they were.
    changed: [Vec<(u64, u64)>; CPUS],
    /// Host pages that were given so far.
    given: u64,
}

impl<'m> Play<'m> {
    fn new(machine: &'m Heap) -> Self {
        let options = ShadowOptions { pages: 64, mappings: 8 };
        let mut guest = Guest::new(machine, FRAMES as usize, CPUS, options);
        let kernel = P | W | A | D;
        for root in ROOTS {
            guest.poke(root * PAGE + 256 * 8, 3 * PAGE | kernel);
        }
        guest.poke(3 * PAGE, 4 * PAGE | kernel);
        for block in 0..2 {
            guest.poke(4 * PAGE + 8 * block, block << 21 | LARGE | kernel);
        }
        for cpu in 0..CPUS {
            guest.load(cpu, ROOTS[0] * PAGE);
        }
        Self { guest, roots: [0; CPUS], changed: Default::default(), given: 0 }
    }

    fn play(&mut self, step: Step) {
        match step {
            Step::Store(cpu, entry) => self.store(cpu, entry.gpa(), entry.value()),
            Step::Clean(cpu, entry) => {
                let said = self.guest.memory.word(entry.gpa()).get();
                if said & P != 0 {
                    self.store(cpu, entry.gpa(), said & !(A | D));
                }
            }
            Step::Access(cpu, gva, access) => self.access(cpu, gva, access),
            Step::Load(cpu, root) => self.load(cpu, root),
            Step::Invalidate(cpu, gva) => {
                self.guest.invalidate(cpu, gva);
                // Unless other addresses are looked at, this one is exact.
                let expected = self.expected(cpu, gva, GuestAccess::user(Access::Read));
                let found = self.guest.access(cpu, gva, GuestAccess::user(Access::Read), None);
                assert_eq!(found, expected, "{gva:#x} after it was invalidated");
            }
            Step::Zap(frame, moves) => {
                self.split(frame);
                if moves {
                    self.given += 1;
                }
                let output = HOST + (FRAMES + self.given) * PAGE;
                let backed = moves.then_some(guest::Backed { output, writable: true, size: PAGE });
                self.guest.memory.backed.borrow_mut()[frame as usize] = backed;
                if moves {
                    self.guest.memory.dirty.borrow_mut()[frame as usize] = true;
                }
                self.guest.shadow.zap(&self.guest.memory, range(frame, 1));
            }
            Step::Collect(word, mask) => {
                for bit in (0..64).filter(|bit| mask >> bit & 1 != 0) {
                    self.split(64 * word + bit);
                    let frame = (64 * word + bit) as usize;
                    self.guest.memory.dirty.borrow_mut()[frame] = false;
                    if let Some(backed) = &mut self.guest.memory.backed.borrow_mut()[frame] {
                        backed.writable = false;
                    }
                }
                let first = Gpa(64 * word * PAGE);
                self.guest.shadow.write_protect_pages(&self.guest.memory, first, &[mask]);
            }
            Step::Age(frame) => {
                self.guest.shadow.clear_young(range(frame, 1));
                assert!(!self.guest.shadow.test_young(range(frame, 1)));
            }
            Step::Unprotect(frame) => {
                self.guest.shadow.unprotect(&self.guest.memory, range(frame, 1));
            }
            Step::Block(block, whole) => self.block(block, whole),
        }
    }

    /// The block below that the frame lies in is no longer in one piece.
    fn split(&mut self, frame: u64) {
        let mut backed = self.guest.memory.backed.borrow_mut();
        let block = &mut backed[frame as usize & !511..][..512];
        block.iter_mut().flatten().for_each(|backed| backed.size = PAGE);
    }

    /// Makes a block of the memory below one piece, if it is, or says that it is none.
    fn block(&mut self, block: u64, whole: bool) {
        let mut backed = self.guest.memory.backed.borrow_mut();
        let frames = &mut backed[512 * block as usize..][..512];
        let congruent = frames.iter().zip(512 * block..).all(|(backed, frame)| {
            backed.is_some_and(|backed| backed.output == HOST + frame * PAGE && backed.writable)
        });
        let size = if whole && congruent { 2 << 20 } else { PAGE };
        frames.iter_mut().flatten().for_each(|backed| backed.size = size);
        drop(backed);
        // Taking a block apart below takes its translations.
        self.guest.shadow.zap(&self.guest.memory, range(512 * block, 512));
    }

    fn store(&mut self, cpu: usize, gpa: u64, value: u64) {
        let said = self.guest.memory.word(gpa).get();
        self.changed.iter_mut().for_each(|changed| changed.push((gpa, said)));
        self.guest.store(cpu, gpa, value);
    }

    fn load(&mut self, cpu: usize, root: usize) {
        self.roots[cpu] = root;
        self.guest.load(cpu, ROOTS[root] * PAGE);
        self.changed[cpu].clear();
    }

    fn expected(&self, cpu: usize, gva: u64, access: GuestAccess) -> Outcome {
        let cr3 = ROOTS[self.roots[cpu]] * PAGE;
        naive::walk(&self.guest.memory, self.guest.mode, cr3, gva, access)
    }

    /// An access, which is exact if the tables have not changed since the CPU flushed. Otherwise it may go where they
    /// said at any time since.
    fn access(&mut self, cpu: usize, gva: u64, access: GuestAccess) {
        let expected = self.expected(cpu, gva, access);
        let found = self.guest.access(cpu, gva, access, None);
        if self.changed[cpu].is_empty() {
            assert_eq!(found, expected, "{gva:#x} {access:?}");
            if found.is_ok() {
                self.is_noted(cpu, gva, access);
            }
        }
    }

    /// The way to the address says that it was used.
    fn is_noted(&self, cpu: usize, gva: u64, access: GuestAccess) {
        let mut table = ROOTS[self.roots[cpu]] * PAGE;
        for height in (0..4).rev() {
            let entry = self.guest.memory.word(table + (gva >> (12 + 9 * height) & 511) * 8).get();
            assert!(entry & A != 0, "an entry of {gva:#x} was used unseen");
            if height == 0 || entry & LARGE != 0 {
                assert!(
                    access.kind != Access::Write || entry & D != 0,
                    "{gva:#x} was written unseen"
                );
                return;
            }
            table = entry & guest::ADDRESS;
        }
    }

    /// Every address, for every access, on every CPU that has just flushed.
    fn check(&mut self) {
        for cpu in 0..CPUS {
            self.load(cpu, self.roots[cpu]);
            for n in 0..SLOTS.pow(4) {
                let slots = [n / 27, n / 9 % 3, n / 3 % 3, n % 3];
                let gva = slots.iter().fold(0, |gva, slot| gva << 9 | slot) << 12;
                for kind in [Access::Read, Access::Execute, Access::Write] {
                    for user in [false, true] {
                        let access = GuestAccess { kind, user, user_data_allowed: false };
                        self.access(cpu, gva, access);
                    }
                }
            }
            let all =
                self.guest.access(cpu, LINEAR + 30 * PAGE, GuestAccess::kernel(Access::Read), None);
            assert_eq!(all, Ok(30 * PAGE));
        }
    }
}

fn cases() -> ProptestConfig {
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok());
    let cases = cases.unwrap_or(64);
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn after_a_flush_every_address_leads_where_the_guests_tables_say(
        steps in prop::collection::vec(step(), 1..80),
    ) {
        let machine = Heap::new(4096, 1);
        let mut play = Play::new(&machine);
        // A way to some pages, so that there is something to change.
        for level in 0..4 {
            for slot in 0..SLOTS {
                let entry = Entry { level, table: 0, slot, says: Says::Next(slot, P | W | U) };
                play.store(0, entry.gpa(), entry.value());
            }
        }
        for cpu in 0..CPUS {
            play.load(cpu, 0);
        }
        let all = steps.len();
        for (n, step) in steps.into_iter().enumerate() {
            play.play(step);
            if n % 27 == 26 || n + 1 == all {
                play.check();
            }
        }
    }
}
