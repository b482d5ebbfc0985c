//! Which slot an address belongs to: an immutable map of all slots, replaced as a whole, read without waiting.
//!
//! Readers find the current map under a pin. A change builds a new map, publishes it, waits for a grace period, and
//! only then frees the old map and the version that it replaced (rule 10). Versions of the slots that did not change
//! are shared by both maps.
#![expect(unsafe_code, reason = "maps are shared by pointer and freed after a grace period")]

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::ptr::NonNull;

use slat::{Gpa, GpaRange, Machine, Participant, Pin};

use crate::OtherMachine;
use crate::heap::{OutOfMemory, boxed, with_room};
use crate::lock::{Held, Lock};
use crate::sabotage::{Skip, skips};
use crate::slot::{SlotId, Version};
use crate::sync::{AtomicPtr, Ordering};

/// The slots of one VM.
#[derive(Debug)]
pub(crate) struct Slots<'m, M> {
    machine: &'m M,
    current: AtomicPtr<Map>,
    changing: Lock,
}

/// All slots at one moment.
#[derive(Debug)]
pub(crate) struct Map {
    /// Different for every map of a VM.
    generation: u64,
    /// In order of their addresses, which do not overlap.
    places: Vec<Place>,
    /// In order of their numbers: where in `places`.
    ids: Vec<(SlotId, u32)>,
}

#[derive(Clone, Copy, Debug)]
struct Place {
    start: u64,
    end: u64,
    version: NonNull<Version>,
}

/// What several threads reach through one map must be fit for it.
const _: fn() = || {
    fn shared<T: Send + Sync>() {}
    shared::<Version>();
};

impl Place {
    fn version(&self) -> &Version {
        // SAFETY: a version is freed after a grace period that began when no current map had it any more. Whoever
        // reaches this place has the map from `Slots::read` and is pinned since before, or holds the lock under which
        // alone maps are replaced.
        unsafe { self.version.as_ref() }
    }
}

impl Map {
    /// The slot that `gpa` lies in: log time, two comparisons where it is the slot that was `hit` last, which is a guess
    /// that may be wrong and comes from any map.
    #[inline]
    pub(crate) fn find(&self, gpa: Gpa, hit: &mut usize) -> Option<&Version> {
        let inside = |place: &&Place| place.start <= gpa.0 && gpa.0 < place.end;
        if let Some(place) = self.places.get(*hit).filter(inside) {
            return Some(place.version());
        }
        let after = self.places.partition_point(|place| place.start <= gpa.0);
        let index = after.checked_sub(1)?;
        let place = self.places.get(index).filter(inside)?;
        *hit = index;
        Some(place.version())
    }

    /// The slot with this number: log time.
    pub(crate) fn get(&self, id: SlotId) -> Option<&Version> {
        self.places.get(self.index_of(id)?).map(Place::version)
    }

    /// The first slot that shares an address with `range`: log time.
    pub(crate) fn overlapping(&self, range: GpaRange) -> Option<&Version> {
        let first = self.places.partition_point(|place| place.end <= range.start().0);
        self.places.get(first).filter(|place| place.start < range.end().0).map(Place::version)
    }

    /// The same slots without `remove` and with `add`, whose addresses and number are free then.
    fn changed(
        &self,
        remove: Option<SlotId>,
        add: Option<NonNull<Version>>,
    ) -> Result<Self, OutOfMemory> {
        let mut places = with_room(self.places.len() + 1)?;
        let mut ids = with_room(self.places.len() + 1)?;
        let removed = remove.and_then(|id| self.index_of(id)).unwrap_or(usize::MAX);
        let kept = self.places.iter().enumerate().filter(|&(index, _)| index != removed);
        places.extend(kept.map(|(_, place)| *place));
        ids.extend(
            self.ids
                .iter()
                .filter(|&&(_, index)| index as usize != removed)
                .map(|&(id, index)| (id, index - u32::from(index as usize > removed))),
        );
        if let Some(version) = add {
            // SAFETY: `publish` has just made it and nobody else has it.
            let (range, id) = unsafe { (version.as_ref().range, version.as_ref().id) };
            let (start, end) = (range.start().0, range.end().0);
            let at = places.partition_point(|place: &Place| place.start < start);
            places.insert(at, Place { start, end, version });
            for (_, index) in &mut ids {
                *index += u32::from(*index as usize >= at);
            }
            let number = ids.partition_point(|&(other, _)| other < id);
            ids.insert(number, (id, at as u32));
        }
        Ok(Self { generation: self.generation + 1, places, ids })
    }

    fn index_of(&self, id: SlotId) -> Option<usize> {
        let at = self.ids.binary_search_by_key(&id, |&(id, _)| id).ok()?;
        self.ids.get(at).map(|&(_, index)| index as usize)
    }

    /// The number for what the next map adds: different for every map of a VM.
    pub(crate) fn next_number(&self) -> u64 {
        self.generation + 1
    }
}

impl<'m, M: Machine> Slots<'m, M> {
    /// No slots.
    pub(crate) fn new(machine: &'m M) -> Result<Self, OutOfMemory> {
        let map = boxed(Map { generation: 0, places: Vec::new(), ids: Vec::new() })?;
        let current = AtomicPtr::new(Box::into_raw(map));
        Ok(Self { machine, current, changing: Lock::new() })
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
    pub(crate) fn lock<'c, 'p>(
        &'c self,
        who: &'c mut Participant<'p, M>,
    ) -> Result<Change<'c, 'p, 'm, M>, OtherMachine> {
        if !core::ptr::eq(self.machine, who.machine()) {
            return Err(OtherMachine);
        }
        Ok(Change { slots: self, who, held: self.changing.lock(self.machine) })
    }
}

impl<M> Drop for Slots<'_, M> {
    fn drop(&mut self) {
        // SAFETY: nobody else has the slots any more; the current map owns its versions, each in one place.
        unsafe {
            let map = Box::from_raw(self.current.load(Ordering::Acquire));
            for place in &map.places {
                drop(Box::from_raw(place.version.as_ptr()));
            }
        }
    }
}

/// The right to change slots, for a participant of their machine.
#[derive(Debug)]
pub(crate) struct Change<'c, 'p, 'm, M: Machine> {
    slots: &'c Slots<'m, M>,
    who: &'c mut Participant<'p, M>,
    #[expect(dead_code, reason = "held until it is dropped")]
    held: Held<'c>,
}

impl<'p, M: Machine> Change<'_, 'p, '_, M> {
    /// The current map.
    pub(crate) fn map(&self) -> &Map {
        // SAFETY: only the holder of the lock replaces the map, in `publish`, which takes `self` mutably.
        unsafe { &*self.slots.current.load(Ordering::Acquire) }
    }

    /// Who changes slots.
    pub(crate) fn who(&mut self) -> &mut Participant<'p, M> {
        self.who
    }

    /// Publishes the slots without `remove` and with `add`, and waits for a grace period: when it returns, whoever
    /// pins sees the new slots, and nobody is left who saw the old (rule 10).
    ///
    /// # Errors
    /// [`OutOfMemory`]; nothing was changed then.
    pub(crate) fn publish(
        &mut self,
        remove: Option<SlotId>,
        add: Option<Version>,
    ) -> Result<(), OutOfMemory> {
        let added = match add {
            Some(version) => Some(NonNull::from(Box::leak(boxed(version)?))),
            None => None,
        };
        // The pointer itself, not one made from a reference: it is what may be freed.
        let removed = remove.and_then(|id| self.map().index_of(id));
        let removed = removed.and_then(|index| self.map().places.get(index)).map(|p| p.version);
        match self.map().changed(remove, added).and_then(boxed) {
            Ok(map) => {
                // Release: the map is complete before it is seen.
                let old = self.slots.current.swap(Box::into_raw(map), Ordering::AcqRel);
                if skips(Skip::SlotGrace) {
                    // What is still read is not freed either, so that the execution can go on.
                    return Ok(());
                }
                self.who.synchronize();
                // SAFETY: the grace period of the slots' own machine is over, so nobody reads the old map or the
                // version that only it had; both came from boxes.
                unsafe {
                    drop(Box::from_raw(old));
                    if let Some(version) = removed {
                        drop(Box::from_raw(version.as_ptr()));
                    }
                }
                Ok(())
            }
            Err(refused) => {
                if let Some(version) = added {
                    // SAFETY: it was made above and no map has it.
                    unsafe { drop(Box::from_raw(version.as_ptr())) }
                }
                Err(refused)
            }
        }
    }
}
