//! Which VMID a tree has: identifiers for more trees than the hardware has identifiers (rule 12).
//!
//! # How it works, and why it is enough
//! An identifier belongs to a *generation* and is given to one tree in it. When a generation has none left, whoever
//! needs one begins the next: it bumps the generation, asks every vCPU at its gate to come for its identifier again
//! ([`Requests::RENEW`]), waits until none is inside the guest that has not, and invalidates everything on every CPU.
//! Only then does anybody get an identifier of the new generation.
//!
//! So while a vCPU is inside the guest under an identifier, no other tree's translations are in a TLB under it. Those of
//! this generation are given once. Those of an earlier generation went with the invalidation at its end: no vCPU was
//! inside then, and one that had read its old identifier before finds the request when it enters, which orders it after
//! the bump (see [`gate`](crate::gate)).
//!
//! vCPUs of one tree agree because the first to need an identifier claims the tree's word and the others wait for it, a
//! few instructions; nobody waits for a claim of an earlier generation.
//!
//! # Invalidating
//! An operation reads the tree's identifier with [`TreeVmid::to_invalidate`], after its exchanges and after a full
//! fence. If it reads the old one of two, the new one had not been published, so each walk under the new one comes after
//! the fence of an entry that comes after the operation's fence, and sees the exchanges; and the old one is what vCPUs
//! that have not left yet still use. If it reads the new one, what was cached under the old one is gone.

use crate::gate::{Requests, request_everywhere};
use crate::machine::Machine;
use crate::maintenance::arm::Arm;
use crate::rcu::Participant;
use crate::sync::{AtomicU64, Ordering, fence};

/// A generation above bit 18, a flag that it has not begun yet, and the next identifier to be given (up to 65536).
#[derive(Clone, Copy, PartialEq, Eq)]
struct State(u64);

impl State {
    const NEXT: u64 = (1 << 17) - 1;
    const BEGINNING: u64 = 1 << 17;
    const GENERATION_SHIFT: u32 = 18;

    const fn new(generation: u64, next: u64) -> Self {
        Self(generation << Self::GENERATION_SHIFT | next)
    }

    const fn generation(self) -> u64 {
        self.0 >> Self::GENERATION_SHIFT
    }

    const fn next(self) -> u64 {
        self.0 & Self::NEXT
    }

    /// Whether the invalidation before the generation is still to be completed.
    const fn is_beginning(self) -> bool {
        self.0 & Self::BEGINNING != 0
    }
}

/// What a tree's word says: a generation, and the identifier, zero while a vCPU is taking one.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Word(u64);

impl Word {
    const fn new(generation: u64, id: u64) -> Self {
        Self(generation << 16 | id)
    }

    const fn generation(self) -> u64 {
        self.0 >> 16
    }

    const fn id(self) -> u16 {
        self.0 as u16
    }
}

/// The identifier of one tree.
#[derive(Debug)]
pub struct TreeVmid(AtomicU64);

impl TreeVmid {
    /// No identifier yet.
    #[cfg(not(loom))]
    pub const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// No identifier yet.
    #[cfg(loom)]
    pub fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// An identifier that the embedder assigned. A tree that has one is never given to [`Vmids::current`].
    #[cfg(not(loom))]
    pub const fn fixed(id: u16) -> Self {
        Self(AtomicU64::new(id as u64))
    }

    /// An identifier that the embedder assigned. A tree that has one is never given to [`Vmids::current`].
    #[cfg(loom)]
    pub fn fixed(id: u16) -> Self {
        Self(AtomicU64::new(id.into()))
    }

    /// The identifier under which translations of the tree may be cached, for an invalidation of what the caller
    /// has changed before the call. Zero, the host's identifier, if none are cached under any: a context made of it
    /// does no harm. Costs a full fence.
    pub fn to_invalidate(&self) -> u16 {
        // Rule 12: orders the caller's exchanges before the read, see the head of this file.
        fence(Ordering::SeqCst);
        Word(self.0.load(Ordering::Acquire)).id()
    }
}

impl Default for TreeVmid {
    fn default() -> Self {
        Self::new()
    }
}

/// The identifiers of one machine. Zero is never given: it is the host's.
#[derive(Debug)]
pub struct Vmids {
    state: AtomicU64,
    highest: u64,
}

impl Vmids {
    /// All identifiers of `bits` bits but zero: 8, or 16 where the machine has FEAT_VMID16 and `VTCR_EL2.VS` is set
    /// (Arm ARM, D24.2 "VTCR_EL2"). Other widths are taken as the nearest from 1 to 16.
    ///
    /// None is free at first: TLBs hold anything after a reset (Arm ARM, D8.16.1), so the first use invalidates.
    #[cfg(not(loom))]
    pub const fn new(bits: u32) -> Self {
        let highest = Self::highest(bits);
        Self { state: AtomicU64::new(State::new(1, highest + 1).0), highest }
    }

    /// All identifiers of `bits` bits but zero.
    #[cfg(loom)]
    pub fn new(bits: u32) -> Self {
        let highest = Self::highest(bits);
        Self { state: AtomicU64::new(State::new(1, highest + 1).0), highest }
    }

    const fn highest(bits: u32) -> u64 {
        let bits = if bits < 1 { 1 } else { bits };
        (1 << if bits > 16 { 16 } else { bits }) - 1
    }

    /// The identifier under which `vcpu` may enter the guest with this tree, now: call it before each entry. If the
    /// entry then hands out requests, call it again.
    ///
    /// Costs two loads while the tree's identifier is current. Else takes a new one, one exchange of a shared word per
    /// tree and generation; and once per generation makes every vCPU leave the guest and invalidates everything, while
    /// others that need a new one wait with [`Machine::relax`].
    pub fn current<M: Machine>(&self, vcpu: &mut Participant<'_, M>, tree: &TreeVmid) -> u16 {
        let machine = vcpu.machine();
        loop {
            // Acquire: pairs with the end of `begin`, the invalidation comes before any use of the generation.
            let state = State(self.state.load(Ordering::Acquire));
            // Acquire: whoever took the identifier had seen the generation begin.
            let word = Word(tree.0.load(Ordering::Acquire));
            if state.is_beginning() || word.generation() > state.generation() {
                machine.relax();
            } else if word.generation() == state.generation() {
                if word.id() != 0 {
                    return word.id();
                }
                machine.relax();
            } else if state.next() > self.highest {
                self.begin(machine, state);
            } else {
                // The others of this tree wait for what comes: not to be preempted in it.
                machine.preemption(true);
                let taken = self.take(tree, word, state.generation());
                machine.preemption(false);
                if let Some(id) = taken {
                    return id;
                }
            }
        }
    }

    /// Claims the tree's word, which was `old`, and gives it an identifier of the generation. `None` if another vCPU was
    /// faster, or the generation has none left or is over.
    fn take(&self, tree: &TreeVmid, old: Word, generation: u64) -> Option<u16> {
        let claim = Word::new(generation, 0);
        // Nothing is published by the claim itself: no order is needed.
        tree.0.compare_exchange(old.0, claim.0, Ordering::Relaxed, Ordering::Relaxed).ok()?;
        let Some(id) = self.next(generation) else {
            // Back to what it was. Whoever claimed it meanwhile did so for a later generation.
            let _ = tree.0.compare_exchange(claim.0, old.0, Ordering::Relaxed, Ordering::Relaxed);
            return None;
        };
        let word = Word::new(generation, id);
        // Release: pairs with the load of the tree's other vCPUs in `current`. If it fails, the identifier stays
        // unused until the next generation, which has begun.
        tree.0.compare_exchange(claim.0, word.0, Ordering::Release, Ordering::Relaxed).ok()?;
        Some(word.id())
    }

    /// The next identifier of the generation, if it is not over.
    fn next(&self, generation: u64) -> Option<u64> {
        let mut state = State(self.state.load(Ordering::Acquire));
        while state.generation() == generation && state.next() <= self.highest {
            // A generation that was seen to have begun begins once: the flag is not set here.
            let (old, new) = (state.0, state.0 + 1);
            // Acquire and release: keeps the order that the end of `begin` started, for whoever reads this.
            match self.state.compare_exchange_weak(old, new, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Some(state.next()),
                Err(now) => state = State(now),
            }
        }
        None
    }

    /// Begins the generation after `old`, if nobody else does.
    fn begin<M: Machine>(&self, machine: &M, old: State) {
        let new = State::new(old.generation() + 1, 1);
        let beginning = new.0 | State::BEGINNING;
        // The requests below publish it: a vCPU that takes its request sees the new generation.
        if self
            .state
            .compare_exchange(old.0, beginning, Ordering::Relaxed, Ordering::Relaxed)
            .is_ok()
        {
            request_everywhere(machine, None, Requests::RENEW);
            Arm::invalidate_all(machine);
            // Release: the invalidation comes before any use of the generation. Nobody else writes until then.
            self.state.store(new.0, Ordering::Release);
        }
    }
}

#[cfg(all(test, loom))]
mod models {
    //! Every interleaving of small cases, under the memory model of the language.

    use loom::sync::{Arc, Mutex};
    use loom::thread;

    use super::*;
    use crate::gate::models::{Gates, check};
    use crate::maintenance::Instruction;

    /// What all TLBs hold under each of four identifiers: whose translation, and the entry. A lock each: an
    /// invalidation is complete when the accesses that used what is gone are.
    type Tlb = [Mutex<Option<(u64, u64)>>; 4];

    /// Two trees, a TLB, and the one page of the first tree.
    struct World {
        vmids: Vmids,
        trees: [TreeVmid; 2],
        tlb: Arc<Tlb>,
        entry: AtomicU64,
        freed: AtomicU64,
    }

    impl World {
        /// Generation 5 has been used up, and the first tree has the highest identifier of it.
        fn used_up(highest: u64) -> Self {
            let tlb: Tlb = core::array::from_fn(|_| Mutex::new(None));
            *tlb[highest as usize].lock().unwrap() = Some((0, 1));
            Self {
                vmids: Vmids { state: AtomicU64::new(State::new(5, highest + 1).0), highest },
                trees: [TreeVmid(AtomicU64::new(Word::new(5, highest).0)), TreeVmid::new()],
                tlb: Arc::new(tlb),
                entry: AtomicU64::new(1),
                freed: AtomicU64::new(0),
            }
        }

        fn machine(&self, vcpus: usize) -> Gates<impl Fn(Instruction) + Sync + use<>> {
            let tlb = self.tlb.clone();
            Gates::new(vcpus, move |instruction| {
                if instruction == Instruction::TlbiAlle1is {
                    for translation in &*tlb {
                        *translation.lock().unwrap() = None;
                    }
                }
            })
        }

        /// Goes into the guest at most once, in at most `tries`, and uses the page there, twice.
        fn run<M: Machine>(&self, vcpu: &mut Participant<'_, M>, tree: u64, tries: u32) {
            for _ in 0..tries {
                let id = self.vmids.current(vcpu, &self.trees[tree as usize]);
                if let Ok(_inside) = vcpu.enter() {
                    self.access(id, tree);
                    self.access(id, tree);
                    return;
                }
            }
        }

        fn access(&self, id: u16, tree: u64) {
            let mut cached = self.tlb[usize::from(id)].lock().unwrap();
            let walk = || (tree, self.entry.load(Ordering::Relaxed));
            let (owner, entry) = *cached.get_or_insert_with(walk);
            assert_eq!(owner, tree, "another tree's translation was used");
            let freed = self.freed.load(Ordering::Relaxed);
            assert!(tree != 0 || entry == 0 || freed == 0, "used after it was freed");
        }
    }

    #[test]
    fn no_vcpu_uses_another_trees_translations() {
        check(|| {
            let world = Arc::new(World::used_up(1));
            let machine = Arc::new(world.machine(2));
            let other = {
                let (world, machine) = (world.clone(), machine.clone());
                thread::spawn(move || {
                    let mut vcpu = Participant::register(&*machine).unwrap();
                    world.run(&mut vcpu, 1, 2);
                })
            };
            let mut vcpu = Participant::register(&*machine).unwrap();
            world.run(&mut vcpu, 0, 2);
            other.join().unwrap();
        });
    }

    #[test]
    fn vcpus_of_one_tree_agree() {
        check(|| {
            let world = Arc::new(World::used_up(3));
            let machine = Arc::new(world.machine(2));
            let other = {
                let (world, machine) = (world.clone(), machine.clone());
                thread::spawn(move || {
                    let mut vcpu = Participant::register(&*machine).unwrap();
                    world.vmids.current(&mut vcpu, &world.trees[1])
                })
            };
            let mut vcpu = Participant::register(&*machine).unwrap();
            let id = world.vmids.current(&mut vcpu, &world.trees[1]);
            assert_eq!(other.join().unwrap(), id);
        });
    }

    /// The first tree's page is taken away while the other tree's need makes it change identifiers.
    fn invalidation_against_change(identifier_first: bool) {
        check(move || {
            let world = Arc::new(World::used_up(3));
            let machine = Arc::new(world.machine(2));
            let vcpu = {
                let (world, machine) = (world.clone(), machine.clone());
                thread::spawn(move || {
                    let mut vcpu = Participant::register(&*machine).unwrap();
                    world.vmids.current(&mut vcpu, &world.trees[1]);
                    world.run(&mut vcpu, 0, 2);
                })
            };
            let early = world.trees[0].to_invalidate();
            world.entry.store(0, Ordering::Relaxed);
            let id = if identifier_first { early } else { world.trees[0].to_invalidate() };
            *world.tlb[usize::from(id)].lock().unwrap() = None;
            world.freed.store(1, Ordering::Relaxed);
            vcpu.join().unwrap();
        });
    }

    #[test]
    fn an_invalidation_finds_the_identifier_that_matters() {
        invalidation_against_change(false);
    }

    #[test]
    #[should_panic(expected = "used after it was freed")]
    fn it_does_not_if_the_identifier_was_read_before_the_change() {
        invalidation_against_change(true);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![expect(unsafe_code, reason = "implements Machine")]

    use core::ptr::NonNull;
    use std::sync::Mutex;
    use std::thread;

    use super::*;
    use crate::maintenance::Instruction;
    use crate::{Entry, Hpa, Slot};

    /// A machine with one TLB for all CPUs that holds, for each identifier, whose translations are cached.
    struct OneTlb {
        slots: Vec<Slot>,
        kicked: Vec<AtomicU64>,
        tlb: Vec<AtomicU64>,
        flushes: AtomicU64,
        steps: Mutex<Vec<Instruction>>,
    }

    impl OneTlb {
        fn new(vcpus: usize, bits: u32) -> Self {
            Self {
                slots: (0..vcpus).map(|_| Slot::new()).collect(),
                kicked: (0..vcpus).map(|_| AtomicU64::new(0)).collect(),
                tlb: (0..1 << bits).map(|_| AtomicU64::new(0)).collect(),
                flushes: AtomicU64::new(0),
                steps: Mutex::new(Vec::new()),
            }
        }
    }

    // SAFETY: it has no tables.
    unsafe impl Machine for OneTlb {
        fn allocate(&self, _: usize) -> Option<Hpa> {
            None
        }

        unsafe fn free(&self, _: Hpa, _: usize) {}

        fn entries(&self, _: Hpa) -> NonNull<Entry> {
            NonNull::dangling()
        }

        fn slots(&self) -> &[Slot] {
            &self.slots
        }

        fn execute(&self, instruction: Instruction) {
            if instruction == Instruction::TlbiAlle1is {
                self.flushes.fetch_add(1, Ordering::Relaxed);
                self.tlb.iter().for_each(|owner| owner.store(0, Ordering::SeqCst));
            }
            let mut steps = self.steps.lock().unwrap();
            steps.push(instruction);
            let keep = steps.len().saturating_sub(4);
            steps.drain(..keep);
        }

        fn kick(&self, index: usize) {
            self.kicked[index].store(1, Ordering::Release);
        }

        fn relax(&self) {
            thread::yield_now();
        }
    }

    #[test]
    fn the_first_use_invalidates_and_later_ones_do_not() {
        let machine = OneTlb::new(1, 8);
        let vmids = Vmids::new(8);
        let mut vcpu = Participant::register(&machine).unwrap();
        let trees: Vec<_> = (0..255).map(|_| TreeVmid::new()).collect();
        assert!(trees.iter().all(|tree| tree.to_invalidate() == 0));
        for _ in 0..2 {
            for (n, tree) in trees.iter().enumerate() {
                assert_eq!(usize::from(vmids.current(&mut vcpu, tree)), n + 1);
                assert_eq!(usize::from(tree.to_invalidate()), n + 1);
            }
        }
        let all = [
            Instruction::DsbIshst,
            Instruction::TlbiAlle1is,
            Instruction::DsbIsh,
            Instruction::Isb,
        ];
        assert_eq!(*machine.steps.lock().unwrap(), all);
        assert_eq!(machine.flushes.load(Ordering::Relaxed), 1);
        // One tree more than there are identifiers: everybody's are taken back.
        assert_eq!(vmids.current(&mut vcpu, &TreeVmid::new()), 1);
        assert_eq!(vmids.current(&mut vcpu, &trees[0]), 2);
        assert_eq!(machine.flushes.load(Ordering::Relaxed), 2);
        assert_eq!(vcpu.enter().err(), Some(Requests::RENEW));
    }

    #[test]
    fn sixteen_bits_give_65535_identifiers_and_zero_is_the_hosts() {
        let machine = OneTlb::new(1, 1);
        let vmids = Vmids::new(16);
        let mut vcpu = Participant::register(&machine).unwrap();
        for id in 1..=u16::MAX {
            assert_eq!(vmids.current(&mut vcpu, &TreeVmid::new()), id);
        }
        assert_eq!(vmids.current(&mut vcpu, &TreeVmid::new()), 1);
        assert_eq!(machine.flushes.load(Ordering::Relaxed), 2);
        assert_eq!(TreeVmid::fixed(9).to_invalidate(), 9);
    }

    /// More trees than identifiers, and two vCPUs for each.
    #[test]
    fn under_any_load_no_vcpu_meets_another_trees_translations() {
        const TREES: usize = 3;
        const BITS: u32 = 1;
        let machine = OneTlb::new(2 * TREES, BITS);
        let vmids = Vmids::new(BITS);
        let trees: [TreeVmid; TREES] = Default::default();
        thread::scope(|scope| {
            for thread in 0..2 * TREES {
                let (machine, vmids) = (&machine, &vmids);
                let (tree, owner) = (&trees[thread % TREES], (thread % TREES + 1) as u64);
                scope.spawn(move || {
                    let mut vcpu = Participant::register(machine).unwrap();
                    let index = vcpu.index();
                    let mut entries = 0;
                    while entries < 500 {
                        let id = usize::from(vmids.current(&mut vcpu, tree));
                        assert_ne!(id, 0);
                        let Ok(_inside) = vcpu.enter() else { continue };
                        entries += 1;
                        // The guest runs until it is kicked, or for a while.
                        for _ in 0..50 {
                            let before = machine.tlb[id].swap(owner, Ordering::SeqCst);
                            assert!(before == 0 || before == owner, "{before} met {owner}");
                            if machine.kicked[index].swap(0, Ordering::Acquire) == 1 {
                                break;
                            }
                            thread::yield_now();
                        }
                    }
                });
            }
        });
        assert!(machine.flushes.load(Ordering::Relaxed) > 10);
    }
}
