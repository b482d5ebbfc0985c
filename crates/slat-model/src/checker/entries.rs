//! What a thread owes for the entries that it changed: a publish, and the end of LOCKED.

use std::sync::atomic::Ordering;

use slat::{Event, Hpa};

use crate::arm::descriptor::{ACCESS_FLAG, WRITABLE};
use crate::checker::{Before, Reach, Until, Violation, freed};
use crate::model::Model;
use crate::regime::Architecture;
use crate::thread::{self, Step, Thread, Unpublished};

/// What the engine writes into invalid entries (`slat`'s `entry` module): LOCKED is this bit alone, DEAD has it too.
const LOCK_BIT: u64 = 1 << 62;
const DEAD_BIT: u64 = 1 << 61;
/// Software bits of a valid descriptor, which hardware ignores.
const SOFTWARE: u64 = 0xf << 55;

pub(crate) fn is_valid(value: u64) -> bool {
    value & 1 != 0
}

pub(crate) fn is_locked(value: u64) -> bool {
    !is_valid(value) && value & (LOCK_BIT | DEAD_BIT) == LOCK_BIT
}

/// LOCKED or DEAD.
pub(crate) fn is_tagged(value: u64) -> bool {
    !is_valid(value) && value & LOCK_BIT != 0
}

/// What a change of an entry gives and takes: `(gives, takes)`.
fn effect(old: u64, new: u64) -> (bool, bool) {
    match (is_valid(old), is_valid(new)) {
        (false, new) => (new, false),
        (true, false) => (false, true),
        (true, true) => {
            let changed = (old ^ new) & !SOFTWARE;
            if changed & !(ACCESS_FLAG | WRITABLE) != 0 {
                return (true, true);
            }
            // An access flag that was cleared stays in TLBs until something else removes it, and nobody minds.
            (changed & new != 0, changed & old & WRITABLE != 0)
        }
    }
}

impl Unpublished {
    /// It permits what was not permitted before.
    fn gives(&self) -> bool {
        effect(self.before, self.value).0
    }

    /// It takes away what was permitted before.
    fn takes(&self) -> bool {
        effect(self.before, self.value).1
    }
}

/// A thread has changed an entry. What it changed and put back before a barrier, nobody need ever see.
fn owe(thread: &mut Thread, entry: Hpa, old: u64, new: u64) {
    let operation = thread.operation();
    let before = thread.unpublished.get(&entry.0).map_or(old, |store| store.before);
    if effect(before, new) == (false, false) {
        thread.unpublished.remove(&entry.0);
    } else {
        let store = Unpublished { before, value: new, operation, locally: false };
        thread.unpublished.insert(entry.0, store);
    }
}

impl Model {
    /// An entry is or was accessed by the engine.
    pub(crate) fn check_event(&self, event: Event) {
        thread::with(self.id, |thread| thread.note(Step::Event(event)));
        match event {
            Event::Load { entry } => self.check_access(entry),
            Event::Store { entry, new } => {
                self.check_access(entry);
                // The store comes after its event.
                let old = self.tables.entry(entry).map_or(0, slat::Entry::read);
                self.changed(entry, old, new);
            }
            Event::Exchange { entry, old, new, done } => {
                self.check_access(entry);
                if done {
                    self.changed(entry, old, new);
                }
            }
            Event::Fill { table } => self.check_access(table),
            Event::Unpinned => self.check_settled(Until::Unpinned),
            Event::Begin => self.begin(),
            Event::End(promise) => self.end(promise),
            Event::Pinned | Event::GracePeriod => {}
        }
    }

    fn check_access(&self, entry: Hpa) {
        let Some(number) = self.tables.number(entry) else {
            return self.raise(Violation::NotATable { address: entry });
        };
        let state = self.checker.states.of(number).load(Ordering::Acquire);
        if !freed::is_allocated(state) {
            let table = self.tables.address(number);
            self.raise(Violation::FreedWhileReachable { table, by: Reach::Engine { entry } });
        }
        thread::with(self.id, |thread| {
            // Those that it is part of have touched the tree with it.
            for operation in thread.operations.iter_mut().rev() {
                if operation.root.is_some() {
                    break;
                }
                operation.root = Some(self.tables.address(number - freed::index_in_root(state)));
            }
        });
    }

    fn changed(&self, entry: Hpa, old: u64, new: u64) {
        if let Some(table) = self.linked_table(new) {
            self.checker.states.of(table).fetch_or(freed::LINKED, Ordering::Relaxed);
        }
        let owned = thread::with(self.id, |thread| {
            // On x86 every store is published as it is made (`slat`'s `maintenance::x86`).
            if self.architecture == Architecture::Arm {
                owe(thread, entry, old, new);
            }
            let owned = !is_locked(old) || thread.locked.remove(&entry.0).is_some();
            if is_locked(new) {
                thread.locked.insert(entry.0, thread.operations.len());
            }
            owned
        });
        if !owned && self.is_linked(entry) {
            self.raise(Violation::NotOwner { entry, new });
        }
    }

    /// The table that a valid entry links, if it is a table entry of any descriptor format.
    fn linked_table(&self, value: u64) -> Option<u32> {
        if self.architecture != Architecture::Arm {
            // A page or block leads to host memory.
            let present = value & if self.architecture == Architecture::Npt { 1 } else { 0b111 };
            let address = Hpa(value & 0xf_ffff_ffff_f000);
            return if present == 0 { None } else { self.tables.number(address) };
        }
        if value & 0b11 != 0b11 {
            return None;
        }
        let page = (1u64 << self.page_shift) - 1;
        let narrow = value & ((1 << 48) - 1) & !page;
        let wide = match self.page_shift {
            16 => narrow | ((value >> 12) & 0xf) << 48,
            _ => (value & ((1 << 50) - 1) & !page) | ((value >> 8) & 0b11) << 50,
        };
        [narrow, wide].into_iter().find_map(|address| self.tables.number(Hpa(address)))
    }

    fn is_linked(&self, entry: Hpa) -> bool {
        self.tables.number(entry).is_some_and(|number| {
            freed::is_linked(self.checker.states.of(number).load(Ordering::Relaxed))
        })
    }

    /// A change by the calling thread that is not published and that `matters`, in a table that walkers can reach.
    fn unpublished(&self, matters: impl Fn(&Unpublished) -> bool) -> Option<(Hpa, u64)> {
        let stores: Vec<(Hpa, u64)> = thread::with(self.id, |thread| {
            let stores = thread.unpublished.iter().filter(|(_, store)| matters(store));
            stores.map(|(&entry, store)| (Hpa(entry), store.value)).collect()
        });
        stores.into_iter().find(|&(entry, _)| self.is_linked(entry))
    }

    /// Checks that what the calling thread took away was published before it invalidates.
    pub(crate) fn check_published_before(&self, before: Before) {
        let local = before == Before::Invalidation { local: true };
        let missing = self.unpublished(|store| store.takes() && !(local && store.locally));
        self.raise_unpublished(missing, before);
    }

    /// Checks what a thread owes before its guest runs.
    #[inline]
    pub(crate) fn check_before_guest(&self) {
        let clear = |thread: &mut Thread| thread.unpublished.is_empty() && thread.locked.is_empty();
        if thread::with(self.id, clear) {
            return;
        }
        self.check_settled(Until::Guest);
        let missing = self.unpublished(|store| store.gives() && !store.locally);
        self.raise_unpublished(missing, Before::Guest);
    }

    /// Checks what a thread owes for its outermost operation, which has just ended, and forgets it. What an operation
    /// took away, it owes if it promised something.
    pub(crate) fn check_published_at_end(&self, promised: bool) {
        let ended = thread::with(self.id, |thread| thread.begun);
        let missing = self.unpublished(|store| {
            store.operation == ended && (store.gives() || (promised && store.takes()))
        });
        thread::with(self.id, |thread| {
            thread.unpublished.retain(|_, store| store.operation != ended);
        });
        self.raise_unpublished(missing, Before::End);
    }

    fn raise_unpublished(&self, missing: Option<(Hpa, u64)>, before: Before) {
        if let Some((entry, value)) = missing {
            self.raise(Violation::NeverPublished { entry, value, before });
        }
    }

    /// Checks that the thread holds no LOCKED entry that it should have settled.
    pub(crate) fn check_settled(&self, until: Until) {
        let left = thread::with(self.id, |thread| {
            let inner = thread.operations.len().saturating_sub(1);
            let mut locked = thread.locked.iter();
            let found = locked.find(|(_, depth)| until != Until::End || **depth > inner);
            let entry = found.map(|(&entry, _)| Hpa(entry));
            if let Some(entry) = entry {
                thread.locked.remove(&entry.0);
            }
            entry
        });
        if let Some(entry) = left {
            self.raise(Violation::LockedOutlived { entry, until });
        }
    }
}
