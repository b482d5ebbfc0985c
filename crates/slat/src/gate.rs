//! Entering the guest: who must be asked, and who is asked at his next entry (rule 11).
//!
//! # How it works, and why it is enough
//! Each vCPU owns one [`Gate`] with a counter: odd means that it is inside the guest. Only its own thread writes it,
//! once at each entry and once at each exit. Whoever wants something of the vCPU sets a bit among its requests.
//!
//! An entry makes the counter odd, issues a full fence, and then looks for requests; if there are any it steps back
//! outside and hands them to the vCPU. A request sets its bits, issues a full fence, and then reads the counter. The
//! two fences are totally ordered. If the request's comes first, the vCPU sees the bits and does not enter. If the
//! vCPU's comes first, the request reads the odd counter (or a later one): the vCPU is inside, is kicked, and has
//! acknowledged as soon as its counter has changed, since it cannot enter again without seeing the bits. So nobody
//! waits for a vCPU that is outside, whatever it does there, and nobody waits for more than one exit of a vCPU
//! inside, however often it enters again.
//!
//! Where an invalidation reaches other CPUs only by interrupt (x86), the same argument covers translations: what the
//! requester changed before its fence is seen by every walk after the vCPU's next entry, and a vCPU that finds
//! [`Requests::INVALIDATE`] invalidates on its CPU before it enters.

use core::marker::PhantomData;
use core::ops::BitOr;

use crate::Hpa;
use crate::machine::Machine;
use crate::rcu::Participant;
use crate::sync::{AtomicU64, Ordering, fence, store_then_fence};

/// What a vCPU is asked to do before it enters the guest again: a set.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[must_use = "requests that were taken are asked only once"]
pub struct Requests(u64);

impl Requests {
    /// Nothing.
    pub const NONE: Self = Self(0);
    /// Remove this tree's translations from the TLB of the CPU on which the guest will be entered:
    /// [`Maintenance::answer`](crate::maintenance::Maintenance::answer).
    pub const INVALIDATE: Self = Self(1 << 0);
    /// Nothing but to come outside for a moment.
    pub const KICK: Self = Self(1 << 1);
    /// Move what a hardware log of writes holds (x86: PML) to the dirty log. The vCPU that was inside has done so
    /// when it has left, if it drains before it drops [`Inside`].
    pub const DRAIN: Self = Self(1 << 2);
    /// Go back to the embedder: the dirty ring is full.
    pub const DIRTY_RING: Self = Self(1 << 3);
    /// Ask for the current VMID again: [`Vmids::current`](crate::vmid::Vmids::current).
    pub const RENEW: Self = Self(1 << 4);

    /// Request `n` of the 32 that the embedder gives a meaning; `None` from 32 on.
    pub const fn embedder(n: u32) -> Option<Self> {
        if n < 32 { Some(Self(1 << (32 + n))) } else { None }
    }

    /// Whether nothing is asked.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// What is left without those of `other`.
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Whether all of `other` is asked.
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

impl BitOr for Requests {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// The gate of one vCPU, part of its [`Slot`](crate::Slot).
///
/// Anybody may ask through it. Entering is for its [`Participant`] alone: see [`Participant::enter`].
#[derive(Debug)]
pub struct Gate {
    /// Odd: inside the guest. Written by the vCPU's own thread only.
    state: AtomicU64,
    requests: AtomicU64,
    /// Root table of the tree that the vCPU runs; zero while it has not said. Written by its own thread only.
    tree: AtomicU64,
}

impl Gate {
    /// A gate in front of which its vCPU stands.
    #[cfg(not(loom))]
    pub const fn new() -> Self {
        Self { state: AtomicU64::new(0), requests: AtomicU64::new(0), tree: AtomicU64::new(0) }
    }

    /// A gate in front of which its vCPU stands.
    #[cfg(loom)]
    pub fn new() -> Self {
        Self { state: AtomicU64::new(0), requests: AtomicU64::new(0), tree: AtomicU64::new(0) }
    }

    /// Asks the vCPU for something, and tells whether it is inside the guest: then it must be kicked
    /// ([`Machine::kick`]) to come and do it. One that is outside does it before its next entry. What the caller
    /// stored before is visible to the vCPU when it gets the request.
    ///
    /// Costs one atomic operation and one full fence.
    #[must_use = "a vCPU that is inside the guest must be kicked"]
    pub fn request(&self, requests: Requests) -> bool {
        // Release: what the caller did before is visible to the vCPU that takes the request.
        self.requests.fetch_or(requests.0, Ordering::Release);
        // Rule 11: pairs with the fence of `enter`, see the head of this file.
        fence(Ordering::SeqCst);
        self.is_inside()
    }

    /// [`request`](Self::request), a kick if the vCPU is inside, and the wait until it has left. `index` is that of
    /// the gate's slot. On return the vCPU is outside or has taken the requests since the call.
    ///
    /// Spins with [`Machine::relax`] for as long as one exit takes, and not at all for a vCPU outside. The vCPU's
    /// own thread must not call it from inside the guest.
    pub fn request_and_wait<M: Machine>(&self, machine: &M, index: usize, requests: Requests) {
        if self.request(requests) {
            machine.kick(index);
            self.wait(machine, requests);
        }
    }

    /// What is asked and not taken yet: for a vCPU that sleeps outside and wants to know when to wake up.
    pub fn pending(&self) -> Requests {
        Requests(self.requests.load(Ordering::Acquire))
    }

    /// Whether the vCPU is inside the guest, or was when it was last seen.
    pub fn is_inside(&self) -> bool {
        // Acquire: what the vCPU did before it left comes before what follows.
        self.state.load(Ordering::Acquire) & 1 == 1
    }

    /// Sets bits without a fence of its own: the caller issues one before and one after, for many gates at once.
    fn raise(&self, requests: Requests) {
        // Bits that are there already need no store, so that a vCPU that stays outside costs its askers a shared
        // read. The caller's fence orders its stores before this read, which comes before the exchange that will
        // take the bits, which comes before the fence after it: the vCPU sees what was stored.
        if self.requests.load(Ordering::Relaxed) & requests.0 != requests.0 {
            self.requests.fetch_or(requests.0, Ordering::Release);
        }
    }

    /// Waits until the vCPU has been outside since `requests` were raised.
    fn wait<M: Machine>(&self, machine: &M, requests: Requests) {
        // Acquire: what the vCPU did inside comes before what the caller does next.
        let seen = self.state.load(Ordering::Acquire);
        // Requests are taken outside only: if some are gone, the vCPU has been there.
        if seen & 1 == 0 || !self.pending().contains(requests) {
            return;
        }
        while self.state.load(Ordering::Acquire) == seen {
            machine.relax();
        }
    }

    /// Whether the vCPU may use translations of the tree (`None`: of any).
    fn may_run(&self, tree: Option<Hpa>) -> bool {
        let runs = self.tree.load(Ordering::Relaxed);
        runs == 0 || tree.is_none_or(|tree| tree.0 == runs)
    }

    #[inline]
    fn enter(&self) -> Result<Inside<'_>, Requests> {
        // The guard of the last entry may have been leaked; the vCPU is outside all the same.
        self.leave_for_good();
        // Rule 11: the full fence orders "inside" before the look for requests, see the head of this file. The store
        // releases: who waits for the last exit may see this entry instead.
        store_then_fence(&self.state, self.state.load(Ordering::Relaxed) + 1);
        self.look()
    }

    /// The second half of `enter`: inside already, look for requests.
    #[inline]
    fn look(&self) -> Result<Inside<'_>, Requests> {
        if self.requests.load(Ordering::Relaxed) == 0 {
            return Ok(Inside { gate: self, not_send: PhantomData });
        }
        self.leave();
        // Release: whoever sees the requests taken knows that the vCPU has left. Acquire: what those who raised them
        // stored is visible now; and so it is, by the fence, for those who found them raised (see `raise`).
        let taken = self.requests.swap(0, Ordering::AcqRel);
        fence(Ordering::SeqCst);
        Err(Requests(taken))
    }

    /// Outside, also if the guard of the last entry was leaked.
    pub(crate) fn leave_for_good(&self) {
        if self.state.load(Ordering::Relaxed) & 1 == 1 {
            self.leave();
        }
    }

    #[inline]
    fn leave(&self) {
        // Release: what was done inside comes before whoever sees the vCPU outside (rule 11: leaving acknowledges).
        self.state.store(self.state.load(Ordering::Relaxed) + 1, Ordering::Release);
    }
}

impl Default for Gate {
    fn default() -> Self {
        Self::new()
    }
}

/// The proof that the vCPU is inside the guest as far as the others can tell; dropping it is leaving.
///
/// It holds its participant, so that a vCPU can neither walk nor wait for others while it is inside.
#[derive(Debug)]
#[must_use = "dropping it leaves the guest"]
pub struct Inside<'v> {
    gate: &'v Gate,
    not_send: PhantomData<*const ()>,
}

impl Drop for Inside<'_> {
    #[inline]
    fn drop(&mut self) {
        self.gate.leave();
    }
}

impl<M: Machine> Participant<'_, M> {
    /// Goes inside the guest, unless something is asked of this vCPU.
    ///
    /// Call it as the last thing before the instruction that enters, with interrupts masked from before the call
    /// until the guest runs: a kick that comes in between must make the guest exit at once. Drop the guard as the
    /// first thing after the exit, but after a hardware log of writes was drained. Costs one full fence.
    ///
    /// ```
    /// use slat::gate::Requests;
    /// use slat::{Machine, Participant};
    ///
    /// fn run_once<M: Machine>(
    ///     vcpu: &mut Participant<'_, M>,
    ///     mut answer: impl FnMut(Requests),
    ///     guest: impl FnOnce(),
    /// ) {
    ///     loop {
    ///         match vcpu.enter() {
    ///             Ok(_inside) => return guest(),
    ///             Err(requests) => answer(requests),
    ///         }
    ///     }
    /// }
    /// ```
    ///
    /// # Errors
    /// The requests, taken: the vCPU stays outside, does what they ask on the CPU on which it will enter, and
    /// tries again.
    #[inline]
    pub fn enter(&mut self) -> Result<Inside<'_>, Requests> {
        self.gate().enter()
    }

    /// Says whose translations this vCPU will use: those of the tree with this root table. Until it has said so, it
    /// is asked for every tree. If the tree is another one than before, the vCPU must invalidate before it enters
    /// (it was not asked for this one lately), and finds the request.
    pub fn switch(&mut self, root: Hpa) {
        let gate = self.gate();
        if gate.tree.load(Ordering::Relaxed) != root.0 {
            // Rule 11: the fence of the next entry orders this before every walk inside. Who reads the old tree and
            // does not ask has issued its fence before, and those walks see what it changed.
            gate.tree.store(root.0, Ordering::Relaxed);
            self.moved();
        }
    }

    /// Says that this vCPU will enter on another CPU than it did last. That CPU's TLB may hold translations that
    /// were invalidated since, if invalidations reach it only through gates: the vCPU finds the request to
    /// invalidate at its next entry. Machines that invalidate by broadcast (Arm) need no such call.
    ///
    /// One that has just registered counts as moved: its slot may have been another's on another CPU. A thread that can
    /// be moved calls it, answers and enters without being moved in between.
    pub fn moved(&mut self) {
        // Its own thread takes it: no order is needed.
        self.gate().requests.fetch_or(Requests::INVALIDATE.0, Ordering::Relaxed);
    }
}

/// Asks every vCPU that may use the tree with this root table (`None`: every vCPU) for something, kicks those that
/// are inside the guest, and waits until each of them has left. On return each is outside or has taken the requests
/// since the call; what the caller stored before the call is visible to each walk that it makes in the guest later.
///
/// Costs a look at each slot, two full fences, and the time of the slowest exit if any vCPU is inside. The calling
/// thread must not be inside the guest, nor hold LOCKED entries that code inside the guest's exit path waits for
/// (the engine has none: a vCPU that has left is never waited for).
pub fn request_everywhere<M: Machine>(machine: &M, tree: Option<Hpa>, requests: Requests) {
    let gates = || machine.slots().iter().map(|slot| &slot.gate).enumerate();
    // Rule 11: orders the caller's stores before the looks at each gate's tree and requests.
    fence(Ordering::SeqCst);
    for (_, gate) in gates().filter(|(_, gate)| gate.may_run(tree)) {
        gate.raise(requests);
    }
    // Rule 11: pairs with the fence of each entry.
    fence(Ordering::SeqCst);
    for (index, gate) in gates().filter(|(_, gate)| gate.may_run(tree)) {
        if gate.is_inside() && gate.pending().contains(requests) {
            machine.kick(index);
        }
    }
    for (_, gate) in gates().filter(|(_, gate)| gate.may_run(tree)) {
        gate.wait(machine, requests);
    }
}

#[cfg(all(test, loom))]
pub(crate) mod models {
    //! Every interleaving of small cases, under the memory model of the language.
    #![expect(unsafe_code, reason = "implements Machine")]

    use core::ptr::NonNull;

    use loom::sync::Arc;
    use loom::thread;

    use super::*;
    use crate::maintenance::Instruction;
    use crate::{Entry, Slot};

    /// A machine of gates, whose instructions do what `step` says. Its vCPUs leave the guest by themselves.
    pub(crate) struct Gates<F> {
        pub(crate) slots: Vec<Slot>,
        pub(crate) step: F,
    }

    impl<F> Gates<F> {
        pub(crate) fn new(slots: usize, step: F) -> Self {
            Self { slots: (0..slots).map(|_| Slot::new()).collect(), step }
        }
    }

    // SAFETY: it has no tables.
    unsafe impl<F: Fn(Instruction) + Sync> Machine for Gates<F> {
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
            (self.step)(instruction)
        }

        fn relax(&self) {
            thread::yield_now();
        }
    }

    pub(crate) fn check(model: impl Fn() + Sync + Send + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = builder.preemption_bound.max(Some(2));
        builder.max_branches = 20_000;
        builder.check(model);
    }

    impl Gate {
        /// `enter` with the fence left out.
        fn enter_unfenced(&self) -> Result<Inside<'_>, Requests> {
            self.state.store(self.state.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
            self.look()
        }
    }

    /// A guest page: whether it is mapped, and whether its memory went to somebody else.
    #[derive(Default)]
    struct Page {
        entry: AtomicU64,
        freed: AtomicU64,
    }

    impl Page {
        fn mapped() -> Self {
            Self { entry: AtomicU64::new(1), freed: AtomicU64::new(0) }
        }

        /// Takes the page away from the vCPUs, by `invalidate`.
        fn reclaim(&self, invalidate: impl FnOnce()) {
            self.entry.store(0, Ordering::Relaxed);
            invalidate();
            self.freed.store(1, Ordering::Relaxed);
        }

        /// Uses it through a TLB, if it is mapped.
        fn access(&self, tlb: &mut Option<u64>) {
            let entry = *tlb.get_or_insert_with(|| self.entry.load(Ordering::Relaxed));
            assert!(
                entry == 0 || self.freed.load(Ordering::Relaxed) == 0,
                "used after it was freed"
            );
        }
    }

    fn request_against_enter(enter: fn(&Gate) -> Result<Inside<'_>, Requests>) {
        check(move || {
            let machine = Arc::new(Gates::new(1, |_| ()));
            let page = Arc::new(Page::mapped());
            let vcpu = {
                let (machine, page) = (machine.clone(), page.clone());
                thread::spawn(move || {
                    for _ in 0..2 {
                        if let Ok(_inside) = enter(&machine.slots[0].gate) {
                            page.access(&mut None);
                        }
                    }
                })
            };
            page.reclaim(|| {
                machine.slots[0].gate.request_and_wait(&*machine, 0, Requests::INVALIDATE);
            });
            vcpu.join().unwrap();
        });
    }

    #[test]
    fn a_vcpu_inside_sees_what_was_changed_before_a_request() {
        request_against_enter(Gate::enter);
    }

    #[test]
    #[should_panic(expected = "used after it was freed")]
    fn without_the_fence_of_the_entry_it_does_not() {
        request_against_enter(Gate::enter_unfenced);
    }

    /// A thread invalidates and perhaps finds its request raised by another already; the vCPU keeps its TLB from one
    /// entry to the next unless it is asked to invalidate. (Only one of the two waits: loom is not fair to a third
    /// thread while two spin.)
    fn request_that_is_raised_already(answers: bool) {
        check(move || {
            let machine = Arc::new(Gates::new(1, |_| ()));
            let page = Arc::new(Page::mapped());
            let other = {
                let machine = machine.clone();
                thread::spawn(move || machine.slots[0].gate.request(Requests::INVALIDATE))
            };
            let asker = {
                let (machine, page) = (machine.clone(), page.clone());
                thread::spawn(move || {
                    page.reclaim(|| request_everywhere(&*machine, None, Requests::INVALIDATE));
                })
            };
            let mut tlb = Some(1);
            for _ in 0..3 {
                match machine.slots[0].gate.enter() {
                    Ok(_inside) => page.access(&mut tlb),
                    Err(requests) => {
                        assert_eq!(requests, Requests::INVALIDATE);
                        tlb = tlb.filter(|_| !answers);
                    }
                }
            }
            other.join().unwrap();
            asker.join().unwrap();
        });
    }

    #[test]
    fn a_request_that_another_raised_before_is_as_good() {
        request_that_is_raised_already(true);
    }

    #[test]
    #[should_panic(expected = "used after it was freed")]
    fn it_is_not_if_the_vcpu_does_not_answer() {
        request_that_is_raised_already(false);
    }

    #[test]
    fn what_a_vcpu_did_inside_is_visible_to_who_waited_for_it() {
        check(|| {
            let machine = Arc::new(Gates::new(1, |_| ()));
            let page = Arc::new(Page::default());
            let vcpu = {
                let (machine, page) = (machine.clone(), page.clone());
                thread::spawn(move || {
                    if let Ok(_inside) = machine.slots[0].gate.enter() {
                        // A write, and the log of it that is drained before the vCPU leaves.
                        page.freed.store(1, Ordering::Relaxed);
                        page.entry.store(1, Ordering::Relaxed);
                    }
                    let _ = machine.slots[0].gate.enter();
                })
            };
            machine.slots[0].gate.request_and_wait(&*machine, 0, Requests::DRAIN);
            if page.freed.load(Ordering::Relaxed) == 1 {
                assert_eq!(page.entry.load(Ordering::Relaxed), 1);
            }
            vcpu.join().unwrap();
        });
    }

    #[test]
    fn what_was_stored_before_a_request_is_visible_to_who_takes_it() {
        check(|| {
            let machine = Arc::new(Gates::new(1, |_| ()));
            let work = Arc::new(AtomicU64::new(0));
            let vcpu = {
                let (machine, work) = (machine.clone(), work.clone());
                thread::spawn(move || {
                    if machine.slots[0].gate.enter().is_err() {
                        assert_eq!(work.load(Ordering::Relaxed), 1);
                    }
                })
            };
            work.store(1, Ordering::Relaxed);
            machine.slots[0].gate.request_and_wait(&*machine, 0, Requests::KICK);
            vcpu.join().unwrap();
        });
    }

    /// A vCPU that ran another tree comes to this one while it is invalidated.
    #[test]
    fn a_vcpu_that_changes_trees_uses_nothing_that_is_gone() {
        check(|| {
            let machine = Arc::new(Gates::new(1, |_| ()));
            let page = Arc::new(Page::mapped());
            machine.slots[0].gate.tree.store(0x2000, Ordering::Relaxed);
            let vcpu = {
                let (machine, page) = (machine.clone(), page.clone());
                thread::spawn(move || {
                    let mut tlb = Some(1);
                    let mut vcpu = Participant::register(&*machine).unwrap();
                    vcpu.switch(Hpa(0x1000));
                    for _ in 0..3 {
                        match vcpu.enter() {
                            Ok(_inside) => page.access(&mut tlb),
                            Err(_) => tlb = None,
                        }
                    }
                })
            };
            page.reclaim(|| {
                request_everywhere(&*machine, Some(Hpa(0x1000)), Requests::INVALIDATE);
            });
            vcpu.join().unwrap();
        });
    }
}
