//! Which slot an address belongs to: an immutable map of all slots, replaced as a whole, read without waiting.
//!
//! Its lists are in pieces that a changed map shares with the old one, so that a change among many slots copies few.
//! Readers find the current map under a pin. A change builds a new map, publishes it, waits for a grace period, and
//! only then frees the old map and the version that it replaced (rule 10). Versions of the slots that did not change
//! are shared by both maps.
#![expect(unsafe_code, reason = "maps are shared by pointer and freed after a grace period")]

use alloc::boxed::Box;
use core::ptr::NonNull;

use slat::{Gpa, GpaRange, Machine, Participant, Pin};

use crate::bitmap::Bitmap;
use crate::chunks::{At, Chunks};
use crate::heap::{OutOfMemory, boxed};
use crate::lock::{Held, Lock};
use crate::log::Log;
use crate::sabotage::{Skip, skips};
use crate::shared::Shared;
use crate::slot::{SlotId, Version};
use crate::sync::{AtomicPtr, AtomicU64, Ordering};
use crate::{HvaRange, OtherMachine};

/// The slots of one VM.
#[derive(Debug)]
pub(crate) struct Slots<'m, M> {
    machine: &'m M,
    current: AtomicPtr<Map>,
    changing: Lock,
    /// The last number of a version or a log.
    numbers: AtomicU64,
}

/// All slots at one moment.
#[derive(Debug)]
pub(crate) struct Map {
    /// In order of address spaces, and of their addresses, which do not overlap in one space.
    places: Chunks<Place>,
    /// In order of their names: where each begins.
    ids: Chunks<(SlotId, u64)>,
    /// How many of them are pinned.
    pinned: usize,
    /// What the last change has taken out, for those who must know what may still be translated.
    leaving: Option<Leaving>,
}

/// A slot that is no more, and whose translations may not be gone yet: they are when the next map is published.
#[derive(Debug)]
pub(crate) struct Leaving {
    /// That of its version.
    pub(crate) number: u64,
    pub(crate) id: SlotId,
    pub(crate) range: GpaRange,
    pub(crate) backing: Backing,
    pub(crate) log: Option<Shared<Log>>,
}

impl Leaving {
    /// The log that hears of writes to `gpa`, and the page of it.
    pub(crate) fn log_of(&self, space: u16, gpa: Gpa, page_shift: u32) -> Option<(&Log, u64)> {
        let here = space == self.id.space && self.range.contains(gpa);
        let log = self.log.as_deref().filter(|_| here)?;
        Some((log, (gpa.0 - self.range.start().0) >> page_shift))
    }
}

/// The host addresses behind a slot, shared and private.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Backing {
    shared: u64,
    private: u64,
    size: u64,
}

impl Backing {
    fn of(version: &Version) -> Self {
        let Version { config, range, .. } = version;
        let private = config.private.unwrap_or(config.hva).0;
        Self { shared: config.hva.0, private, size: range.size() }
    }

    /// Whether some of `range` is among them.
    pub(crate) fn is_in(self, range: HvaRange) -> bool {
        let overlaps =
            |base: u64| base < range.end().0 && range.start().0 < base.saturating_add(self.size);
        overlaps(self.shared) || overlaps(self.private)
    }
}

#[derive(Clone, Copy, Debug)]
struct Place {
    space: u16,
    pinned: bool,
    start: u64,
    end: u64,
    /// A copy, so that those who look for a host address need not follow the pointer.
    backing: Backing,
    version: NonNull<Version>,
}

/// What several threads reach through one map must be fit for it.
const _: fn() = || {
    fn shared<T: Send + Sync>() {}
    shared::<Version>();
};

impl Place {
    /// Of a version that has just been made.
    fn new(version: NonNull<Version>) -> Self {
        // SAFETY: the caller has just made it and nobody else has it.
        let new = unsafe { version.as_ref() };
        let (start, end) = (new.range.start().0, new.range.end().0);
        let (space, pinned, backing) = (new.id.space, new.config.pinned, Backing::of(new));
        Self { space, pinned, start, end, backing, version }
    }

    fn version(&self) -> &Version {
        // SAFETY: a version is freed after a grace period that began when no current map had it any more. Whoever
        // reaches this place has the map from `Slots::read` and is pinned since before, or holds the lock under which
        // alone maps are replaced.
        unsafe { self.version.as_ref() }
    }
}

impl Map {
    fn empty() -> Self {
        Self { places: Chunks::EMPTY, ids: Chunks::EMPTY, pinned: 0, leaving: None }
    }

    /// The slot of address space `space` that `gpa` lies in: log time, a few comparisons where it is the slot that was
    /// `hit` last, which is a guess that may be wrong and comes from any map.
    #[inline]
    pub(crate) fn find(&self, space: u16, gpa: Gpa, hit: &mut At) -> Option<&Version> {
        let inside =
            |place: &&Place| place.space == space && place.start <= gpa.0 && gpa.0 < place.end;
        if let Some(place) = self.places.get(*hit).filter(inside) {
            return Some(place.version());
        }
        let after = self.places.first(|place| (place.space, place.start) <= (space, gpa.0));
        let at = self.places.before(after)?;
        let place = self.places.get(at).filter(inside)?;
        *hit = at;
        Some(place.version())
    }

    /// The slot whose collections report what is in a monitor's bitmap: linear time.
    pub(crate) fn reporting(&self, bitmap: &Shared<Bitmap>) -> Option<SlotId> {
        let its = |version: &&Version| version.monitor.as_ref().is_some_and(|own| own.is(bitmap));
        self.places.iter().map(Place::version).find(its).map(|version| version.id)
    }

    /// The slot with this name: log time.
    pub(crate) fn get(&self, id: SlotId) -> Option<&Version> {
        self.places.get(self.at(id)?).map(Place::version)
    }

    fn at(&self, id: SlotId) -> Option<At> {
        let &(_, start) = self.ids.get(self.at_id(id)).filter(|&&(other, _)| other == id)?;
        Some(self.places.first(|place| (place.space, place.start) < (id.space, start)))
    }

    fn at_id(&self, id: SlotId) -> At {
        self.ids.first(|&(other, _)| other < id)
    }

    /// The first slot of an address space that shares an address with `range`: log time.
    pub(crate) fn overlapping(&self, space: u16, range: GpaRange) -> Option<&Version> {
        let before = |place: &Place| (place.space, place.end) <= (space, range.start().0);
        let overlaps = |place: &&Place| place.space == space && place.start < range.end().0;
        self.places.get(self.places.first(before)).filter(overlaps).map(Place::version)
    }

    /// The slots behind which some of `range` lies and that end after an address of an address space, in order, those of
    /// later spaces included: a look at each.
    pub(crate) fn backed_after(
        &self,
        range: HvaRange,
        space: u16,
        at: u64,
    ) -> impl Iterator<Item = &Version> {
        let first = self.places.first(|place| (place.space, place.end) <= (space, at));
        self.places.from(first).filter(move |place| place.backing.is_in(range)).map(Place::version)
    }

    /// The slot that was deleted or is being moved, if that was the last change.
    pub(crate) fn leaving(&self) -> Option<&Leaving> {
        self.leaving.as_ref()
    }

    /// The slots that are pinned.
    pub(crate) fn pinned(&self) -> impl Iterator<Item = &Version> {
        let all = self.places.iter().take_while(|_| self.pinned > 0);
        all.filter(|place| place.pinned).map(Place::version)
    }

    /// The same slots without `remove` and with `add`, whose addresses and number are free then.
    fn changed(
        &self,
        remove: Option<SlotId>,
        add: Option<NonNull<Version>>,
    ) -> Result<Self, OutOfMemory> {
        let gone = remove.and_then(|id| Some((self.at_id(id), self.at(id)?)));
        let (mut places, mut ids, mut pinned) = match gone {
            Some((id, at)) => (self.places.without(at)?, self.ids.without(id)?, self.pinned),
            None => (self.places.same()?, self.ids.same()?, self.pinned),
        };
        let removed = gone.and_then(|(_, at)| self.places.get(at));
        pinned -= removed.map_or(0, |place| usize::from(place.pinned));
        if let Some(version) = add {
            let place = Place::new(version);
            let before = |other: &Place| (other.space, other.start) < (place.space, place.start);
            places = places.with(places.first(before), place)?;
            let id = place.version().id;
            ids = ids.with(ids.first(|&(other, _)| other < id), (id, place.start))?;
            pinned += usize::from(place.pinned);
        }
        let leaving = removed.filter(|_| add.is_none()).map(|place| {
            let &Version { number, id, range, .. } = place.version();
            let log = place.version().log.clone();
            Leaving { number, id, range, backing: place.backing, log }
        });
        Ok(Self { places, ids, pinned, leaving })
    }
}

impl<'m, M: Machine> Slots<'m, M> {
    /// No slots.
    pub(crate) fn new(machine: &'m M) -> Result<Self, OutOfMemory> {
        let current = AtomicPtr::new(Box::into_raw(boxed(Map::empty())?));
        Ok(Self { machine, current, changing: Lock::new(), numbers: AtomicU64::new(0) })
    }

    /// The current map, for as long as the pin is held.
    ///
    /// # Errors
    /// [`OtherMachine`] if the pin belongs to a participant of another machine: grace periods do not wait for it.
    #[inline]
    pub(crate) fn read<'p>(&'p self, pin: &'p Pin<'_, M>) -> Result<&'p Map, OtherMachine> {
        if !core::ptr::eq(self.machine, pin.machine()) {
            return Err(OtherMachine);
        }
        // SAFETY: the pointer is that of a map until `change` replaces it and has waited for a grace period of this
        // machine, so for this pin if it read the old one. Acquire: the map is complete.
        Ok(unsafe { &*self.current.load(Ordering::Acquire) })
    }

    /// Waits until nobody else changes slots.
    ///
    /// # Errors
    /// [`OtherMachine`] if the participant belongs to one.
    pub(crate) fn lock<'s, 'c, 'p>(
        &'s self,
        who: &'c mut Participant<'p, M>,
    ) -> Result<Change<'s, 'c, 'p, 'm, M>, OtherMachine> {
        if !core::ptr::eq(self.machine, who.machine()) {
            return Err(OtherMachine);
        }
        let held = Kept { slots: self, held: self.changing.lock(self.machine) };
        Ok(held.resume(who))
    }
}

impl<M> Drop for Slots<'_, M> {
    fn drop(&mut self) {
        // SAFETY: nobody else has the slots any more; the current map owns its versions, each in one place.
        unsafe {
            let map = Box::from_raw(self.current.load(Ordering::Acquire));
            for place in map.places.iter() {
                drop(Box::from_raw(place.version.as_ptr()));
            }
        }
    }
}

/// The right to change slots, for a participant of their machine.
#[derive(Debug)]
pub(crate) struct Change<'s, 'c, 'p, 'm, M: Machine> {
    slots: &'s Slots<'m, M>,
    who: &'c mut Participant<'p, M>,
    held: Held<'s>,
}

/// The same while the participant does something else.
#[derive(Debug)]
pub(crate) struct Kept<'s, 'm, M: Machine> {
    slots: &'s Slots<'m, M>,
    held: Held<'s>,
}

impl<'s, 'm, M: Machine> Kept<'s, 'm, M> {
    /// The right to change slots again, for a participant of their machine.
    pub(crate) fn resume<'c, 'p>(
        self,
        who: &'c mut Participant<'p, M>,
    ) -> Change<'s, 'c, 'p, 'm, M> {
        Change { slots: self.slots, who, held: self.held }
    }
}

/// Slots that can be published without allocating anything. Dropped, they never were.
#[derive(Debug)]
pub(crate) struct Plan {
    map: Option<Box<Map>>,
    added: Option<NonNull<Version>>,
    removed: Option<NonNull<Version>>,
}

/// The slots that were published before, which nobody reads any more, and the way back to them. Dropped, they are gone.
#[derive(Debug)]
pub(crate) struct Replaced {
    map: Option<NonNull<Map>>,
    added: Option<NonNull<Version>>,
    removed: Option<NonNull<Version>>,
}

/// Frees a version that no map has that anybody reads.
fn free(version: Option<NonNull<Version>>) {
    if let Some(version) = version {
        // SAFETY: callers own it: it never was in a published map, or a grace period is over since; it came from a box.
        unsafe { drop(Box::from_raw(version.as_ptr())) }
    }
}

impl Plan {
    /// The slots as they will be.
    pub(crate) fn map(&self) -> Option<&Map> {
        self.map.as_deref()
    }

    /// What comes after this plan: its slots without `remove` and with `add`.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub(crate) fn then(
        &self,
        remove: Option<SlotId>,
        add: Option<Version>,
    ) -> Result<Self, OutOfMemory> {
        self.map.as_deref().map_or(Err(OutOfMemory), |map| plan(map, remove, add))
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        if self.map.is_some() {
            free(self.added);
        }
    }
}

impl Drop for Replaced {
    fn drop(&mut self) {
        if let Some(map) = self.map {
            // SAFETY: the grace period of the slots' own machine was over when this was made, so nobody reads the old
            // map or the version that only it had; both came from boxes.
            unsafe { drop(Box::from_raw(map.as_ptr())) }
            free(self.removed);
        }
    }
}

fn plan(map: &Map, remove: Option<SlotId>, add: Option<Version>) -> Result<Plan, OutOfMemory> {
    let added = match add {
        Some(version) => Some(NonNull::from(Box::leak(boxed(version)?))),
        None => None,
    };
    // The pointer itself, not one made from a reference: it is what may be freed.
    let removed = remove.and_then(|id| map.places.get(map.at(id)?)).map(|place| place.version);
    match map.changed(remove, added).and_then(boxed) {
        Ok(map) => Ok(Plan { map: Some(map), added, removed }),
        Err(refused) => {
            free(added);
            Err(refused)
        }
    }
}

impl<'s, 'p, 'm, M: Machine> Change<'s, '_, 'p, 'm, M> {
    /// Lets the participant go, and nobody else in.
    pub(crate) fn keep(self) -> Kept<'s, 'm, M> {
        Kept { slots: self.slots, held: self.held }
    }

    /// The current map.
    pub(crate) fn map(&self) -> &Map {
        // SAFETY: only the holder of the lock replaces the map, in `commit`, which takes `self` mutably.
        unsafe { &*self.slots.current.load(Ordering::Acquire) }
    }

    /// Who changes slots.
    pub(crate) fn who(&mut self) -> &mut Participant<'p, M> {
        self.who
    }

    /// A number for a version or a log: different for every one of a VM.
    pub(crate) fn next_number(&self) -> u64 {
        // Only the holder of the lock counts.
        self.slots.numbers.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Makes ready to publish the slots without `remove` and with `add`.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub(crate) fn plan(
        &self,
        remove: Option<SlotId>,
        add: Option<Version>,
    ) -> Result<Plan, OutOfMemory> {
        plan(self.map(), remove, add)
    }

    /// Publishes what was planned, and waits for a grace period: when it returns, whoever pins sees the new slots, and
    /// nobody is left who saw the old (rule 10). The plan must come from the current slots.
    pub(crate) fn commit(&mut self, mut plan: Plan) -> Replaced {
        let Some(map) = plan.map.take() else {
            return Replaced { map: None, added: None, removed: None };
        };
        let map = self.exchange(Box::into_raw(map));
        Replaced { map, added: plan.added, removed: plan.removed }
    }

    /// Goes back to the slots that were published before the last commit.
    pub(crate) fn restore(&mut self, mut replaced: Replaced) {
        if let Some(map) = replaced.map.take() {
            let map = self.exchange(map.as_ptr());
            drop(Replaced { map, added: None, removed: replaced.added });
        }
    }

    /// The old map, when nobody reads it any more.
    fn exchange(&mut self, map: *mut Map) -> Option<NonNull<Map>> {
        // Release: the map is complete before it is seen.
        let old = self.slots.current.swap(map, Ordering::AcqRel);
        if skips(Skip::SlotGrace) {
            // What is still read is not freed either, so that the execution can go on.
            return None;
        }
        self.who.synchronize();
        NonNull::new(old)
    }

    /// Plans, commits, and lets the old slots go.
    ///
    /// # Errors
    /// [`OutOfMemory`]; nothing was changed then.
    pub(crate) fn publish(
        &mut self,
        remove: Option<SlotId>,
        add: Option<Version>,
    ) -> Result<(), OutOfMemory> {
        let plan = self.plan(remove, add)?;
        drop(self.commit(plan));
        Ok(())
    }
}
