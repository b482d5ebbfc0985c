//! A machine that charges virtual time for what the engine does.
#![expect(unsafe_code, reason = "implements `slat::Machine` by passing everything on to the model")]

use std::cell::{Cell, RefCell};
use std::ptr::NonNull;

use slat::maintenance::{Features, Instruction};
use slat::{Entry, Event, Hpa, Machine, Slot};

use super::lines::Lines;
use super::{Cause, Serial, Time, advance, sync};
use crate::Model;

/// What each thing costs that an engine does, in virtual time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Costs {
    /// Loading an entry whose line this CPU has.
    pub load: Time,
    /// Exchanging or storing an entry whose line this CPU has.
    pub exchange: Time,
    /// Moving a line from another CPU.
    pub transfer: Time,
    /// Taking a pin: the full fence.
    pub pin: Time,
    /// A barrier with nothing to wait for.
    pub barrier: Time,
    /// What each store since the last barrier adds to it.
    pub barrier_per_store: Time,
    /// An invalidation on this CPU.
    pub invalidate_local: Time,
    /// A broadcast invalidation: what the CPU that sends it waits.
    pub broadcast: Time,
    /// What a broadcast occupies the interconnect for, which all share.
    pub broadcast_shared: Time,
    /// Allocating a table, without clearing it.
    pub allocate: Time,
    /// Clearing or filling a table.
    pub clear_table: Time,
    /// Cleaning a KiB of data from the caches.
    pub clean_kib: Time,
    /// A look of a spin.
    pub relax: Time,
}

/// A model machine on which time is virtual: all its fibers run on one thread.
#[derive(Debug)]
pub struct Timed {
    model: Model,
    costs: Costs,
    state: OneThread<State>,
}

#[derive(Debug)]
struct State {
    lines: RefCell<Lines>,
    interconnect: Serial,
    /// Stores since the last barrier. By whom does not matter: a barrier follows before anybody else runs, or the line
    /// has moved and the store with it.
    stores: Cell<u64>,
    charged: Cell<Charged>,
}

/// What is charged of what the engine does. Where it is not everything, a design charges for the rest by itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Charged {
    Everything,
    /// Lines that come from other CPUs.
    Lines,
    /// Nothing, but lines of entries are this CPU's from then on.
    Owners,
    Nothing,
}

/// A value that is used by one thread only, though it is reached through what several could share.
#[derive(Debug)]
struct OneThread<T> {
    thread: usize,
    value: T,
}

thread_local! {
    static ME: u8 = const { 0 };
}

fn this_thread() -> usize {
    ME.with(|me| std::ptr::from_ref(me).addr())
}

// SAFETY: `get` refuses every thread but the one that made it.
unsafe impl<T> Sync for OneThread<T> {}

impl<T> OneThread<T> {
    fn new(value: T) -> Self {
        Self { thread: this_thread(), value }
    }

    #[inline]
    fn get(&self) -> &T {
        assert!(self.thread == this_thread(), "virtual time is one thread's");
        &self.value
    }
}

impl Timed {
    /// `model` with a price for everything. It must not check rules: those are about threads, and fibers are none.
    pub fn new(model: Model, costs: Costs) -> Self {
        let state = State {
            lines: RefCell::new(Lines::default()),
            interconnect: Serial::new(),
            stores: Cell::new(0),
            charged: Cell::new(Charged::Everything),
        };
        Self { model, costs, state: OneThread::new(state) }
    }

    /// The machine below.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// What everything costs.
    pub fn costs(&self) -> &Costs {
        &self.costs
    }

    /// How long broadcasts have occupied the interconnect.
    pub fn interconnect_busy(&self) -> Time {
        self.state.get().interconnect.busy()
    }

    /// Does something for which nothing is charged and after which every line is where it was: what hardware does, or
    /// nobody.
    pub fn silently<R>(&self, act: impl FnOnce() -> R) -> R {
        self.charging(Charged::Nothing, act)
    }

    /// Does something for which a design charges by itself. The lines of entries that it takes are this CPU's then.
    pub fn on_account<R>(&self, act: impl FnOnce() -> R) -> R {
        self.charging(Charged::Owners, act)
    }

    /// The same, but lines that come from other CPUs are charged here.
    pub fn by_line<R>(&self, act: impl FnOnce() -> R) -> R {
        self.charging(Charged::Lines, act)
    }

    fn charging<R>(&self, what: Charged, act: impl FnOnce() -> R) -> R {
        let charged = &self.state.get().charged;
        let before = charged.replace(what);
        let result = act();
        charged.set(before);
        result
    }

    fn is_charged(&self) -> bool {
        self.state.get().charged.get() == Charged::Everything
    }

    fn charge(&self, cost: Time, cause: Cause) {
        if self.is_charged() {
            advance(cost, cause);
        }
    }

    /// An access to an entry: by its own line, or after the line has come.
    fn access(&self, entry: Hpa, store: bool, (cost, cause): (Time, Cause)) {
        let state = self.state.get();
        let charged = state.charged.get();
        match charged {
            Charged::Nothing => return,
            Charged::Owners => return state.lines.borrow_mut().own(entry, store),
            Charged::Everything | Charged::Lines => {}
        }
        let elsewhere = state.lines.borrow_mut().is_elsewhere(entry, store);
        if elsewhere {
            sync();
        }
        state.lines.borrow_mut().take(entry, store, self.costs.transfer);
        if charged == Charged::Everything {
            advance(cost, cause);
        }
    }

    fn barrier(&self) {
        let stores = self.state.get().stores.replace(0);
        let Costs { barrier, barrier_per_store, .. } = self.costs;
        let cost = barrier.after(Time(barrier_per_store.0.saturating_mul(stores)));
        self.charge(cost, Cause::Barrier);
    }

    fn broadcast(&self) {
        if !self.is_charged() {
            return;
        }
        let state = self.state.get();
        let takes = |_| [(Cause::Interconnect, self.costs.broadcast_shared)];
        state.interconnect.occupy(Cause::InterconnectWait, takes);
        advance(self.costs.broadcast, Cause::Broadcast);
    }
}

// SAFETY: everything is the model's, which keeps the contract.
unsafe impl Machine for Timed {
    fn allocate(&self, tables: usize) -> Option<Hpa> {
        for _ in 0..tables {
            self.charge(self.costs.allocate, Cause::TableAllocate);
            self.charge(self.costs.clear_table, Cause::TableClear);
        }
        self.model.allocate(tables)
    }

    unsafe fn free(&self, first: Hpa, tables: usize) {
        self.charge(self.costs.allocate, Cause::TableAllocate);
        // SAFETY: as the caller promised.
        unsafe { self.model.free(first, tables) }
    }

    fn entries(&self, table: Hpa) -> NonNull<Entry> {
        self.model.entries(table)
    }

    fn slots(&self) -> &[Slot] {
        self.model.slots()
    }

    fn execute(&self, instruction: Instruction) {
        use Instruction as I;
        self.model.execute(instruction);
        match instruction {
            I::DsbIshst | I::DsbNshst | I::DsbIsh | I::DsbNsh | I::Isb => self.barrier(),
            I::TlbiIpas2e1 { .. } | I::TlbiVmalle1 => {
                self.charge(self.costs.invalidate_local, Cause::InvalidateLocal);
            }
            I::TlbiIpas2e1is { .. }
            | I::TlbiRipas2e1is { .. }
            | I::TlbiVmalle1is
            | I::TlbiVmalls12e1is
            | I::TlbiAlle1is => self.broadcast(),
            _ => {}
        }
    }

    fn features(&self) -> Features {
        self.model.features()
    }

    fn relax(&self) {
        // Whoever is waited for must be able to come on.
        advance(self.costs.relax.max(Time(1)), Cause::Spin);
        sync();
    }

    fn clean_data(&self, _: Hpa, size: u64) {
        let cost = Time(self.costs.clean_kib.0.saturating_mul(size) >> 10);
        self.charge(cost, Cause::Caches);
    }

    fn sync_instructions(&self, from: Hpa, size: u64) {
        self.clean_data(from, size);
    }

    fn observe(&self, event: Event) {
        match event {
            Event::Load { entry } => self.access(entry, false, (self.costs.load, Cause::Load)),
            Event::Store { entry, .. } | Event::Exchange { entry, .. } => {
                let stores = &self.state.get().stores;
                stores.set(stores.get() + 1);
                self.access(entry, true, (self.costs.exchange, Cause::Exchange));
            }
            Event::Fill { .. } => self.charge(self.costs.clear_table, Cause::TableClear),
            Event::Pinned => self.charge(self.costs.pin, Cause::Pin),
            _ => {}
        }
    }
}
