//! Creating, changing and deleting memslots.

use slat::{Edges, Error, Format, Gpa, GpaRange, Machine, Reserve};

use crate::bitmap::Bitmap;
use crate::chunks::At;
use crate::hands::Hands;
use crate::log::{Log, LogMode};
use crate::prefault::{PreFault, PreFaultError};
use crate::private::Private;
use crate::shared::Shared;
use crate::slot::{SlotConfig, SlotError, SlotId, Version};
use crate::slots::Change;
use crate::{Access, FaultError, Host, HostError, Hva, Vm, Worker};

/// What an embedder can know about a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Slot {
    /// Its name.
    pub id: SlotId,
    /// Its guest addresses.
    pub range: GpaRange,
    /// The host address behind the first of them.
    pub hva: Hva,
    /// Whether the guest's writes are exits.
    pub read_only: bool,
    /// Whether a dirty log is on.
    pub logged: bool,
}

/// What [`Vm::change_slot`] has changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SlotChange {
    /// Nothing: the slot was like this.
    Nothing,
    /// What may be done with the memory, or how large its leaves may be.
    Flags,
    /// Where the guest sees it.
    Moved,
}

impl<'m, F: Format, M: Machine, H: Host> Vm<'m, F, M, H> {
    /// Gives the guest memory: from the return on, its faults in the range are answered by the host. A
    /// [pinned](SlotConfig::pinned) slot is mapped wholly when it returns.
    ///
    /// Costs a copy of the list of slots and a grace period; a pinned slot also what a fault costs for each leaf. Waits
    /// while another thread changes slots, for a pinned slot also until invalidations by host address that have not
    /// returned yet have unmapped their pages; not to be called from interrupt context.
    ///
    /// # Errors
    /// [`SlotError`]: what is wrong with the configuration, with which slot it overlaps, what of a pinned slot could not
    /// be mapped (with [`HostError::Again`] if the host takes it back just now), or that memory is exhausted. Nothing was
    /// changed then.
    pub fn create_slot(
        &self,
        worker: &mut Worker<'m, M>,
        id: impl Into<SlotId>,
        config: SlotConfig,
    ) -> Result<(), SlotError> {
        let id = id.into();
        let range = self.check_slot(id, &config)?;
        let mut change = self.slots.lock(&mut worker.hands.participant)?;
        if change.map().get(id).is_some() {
            return Err(SlotError::Exists);
        }
        if let Some(other) = change.map().overlapping(id.space, range) {
            return Err(SlotError::Overlaps { other: other.id });
        }
        let private = match config.private {
            Some(_) => {
                let pages = Bitmap::new(range.size() >> F::PAGE_SHIFT, false)?;
                Some(Shared::new(Private(pages))?)
            }
            None => None,
        };
        let number = change.next_number();
        let version = Version { number, id, range, config, log: None, private, monitor: None };
        let with = change.plan(None, Some(version))?;
        let without = if config.pinned { Some(with.then(Some(id), None)?) } else { None };
        drop(change.commit(with));
        if let Some(without) = without {
            // Who has found another slot here has unmapped its pages: nobody meets these.
            self.aimed.wait(self.machine());
            // The list is not to change before all is mapped, or it is gone again.
            let held = change.keep();
            let access = if config.read_only { Access::Read } else { Access::Write };
            let mapped = self.map_ahead(&mut worker.hands, id.space, range, access);
            let Hands { participant, reserve, .. } = &mut worker.hands;
            let mut change = held.resume(participant);
            if let Err(error) = mapped {
                let gone = change.commit(without);
                let unmapped = self.unmap_slot(&mut change, reserve, (id.space, range), |_| {});
                drop(gone);
                return unmapped.and(Err(error));
            }
        }
        Ok(())
    }

    fn check_slot(&self, id: SlotId, config: &SlotConfig) -> Result<GpaRange, SlotError> {
        let spaces = self.options.address_spaces;
        if id.space >= spaces {
            return Err(SlotError::NoSpace { spaces });
        }
        config.check(self.tree().geometry())
    }

    /// Maps a pinned slot.
    fn map_ahead(
        &self,
        hands: &mut Hands<'m, M>,
        space: u16,
        range: GpaRange,
        access: Access,
    ) -> Result<(), SlotError> {
        let mut rest = Some(range);
        hands.space = space;
        while let Some(range) = rest {
            let PreFault { rest: left, stopped, .. } =
                hands.pre_fault(self, range, access, || true);
            rest = left;
            let error = match stopped {
                None => continue,
                Some(PreFaultError::Fault(FaultError::Host { error, .. })) => Some(error),
                Some(PreFaultError::Busy) => Some(HostError::Again),
                Some(_) => None,
            };
            let gpa = left.map_or(range.start(), |left| left.start());
            return Err(SlotError::NotMapped { gpa, error });
        }
        Ok(())
    }

    /// Changes a slot to what `config` says (`KVM_SET_USER_MEMORY_REGION` of a slot that exists): where the guest sees
    /// it, whether it is read-only, how large its leaves may be. Size and host address stay. A dirty log goes on; what a
    /// moved slot's log holds still means the same pages of the slot. When it returns, no CPU translates anything where
    /// the slot was, or lets a write through that it forbids now; leaves that are larger than it wants now stay until
    /// something else takes them.
    ///
    /// While a slot moves, the guest finds it nowhere for a moment: accesses are exits then. Costs a copy of the list of
    /// slots and a grace period, for a move two of them and an unmap. Waits as [`create_slot`](Self::create_slot).
    ///
    /// # Errors
    /// [`SlotError::NotFound`]; [`SlotError::Fixed`] for another size, host address or private memory;
    /// [`SlotError::Private`], [`SlotError::Pinned`]; what is wrong with the configuration, or with which slot it
    /// overlaps; that memory is exhausted. The slot is as it was then.
    pub fn change_slot(
        &self,
        worker: &mut Worker<'m, M>,
        id: impl Into<SlotId>,
        config: SlotConfig,
    ) -> Result<SlotChange, SlotError> {
        let id = id.into();
        let range = self.check_slot(id, &config)?;
        let Worker { hands: Hands { participant, reserve, .. }, statistics } = worker;
        let mut change = self.slots.lock(participant)?;
        let old = change.map().get(id).ok_or(SlotError::NotFound)?;
        let before = old.config;
        if config == before {
            return Ok(SlotChange::Nothing);
        }
        if (config.size, config.hva, config.private) != (before.size, before.hva, before.private) {
            return Err(SlotError::Fixed);
        }
        if old.private.is_some() {
            return Err(SlotError::Private);
        }
        let moves = config.gpa != before.gpa;
        if config.pinned != before.pinned || config.pinned && moves {
            return Err(SlotError::Pinned);
        }
        let number = change.next_number();
        let mut version = Version { number, range, config, ..old.clone() };
        let old_log = version.log.clone();
        if !moves {
            change.publish(Some(id), Some(version))?;
            if config.read_only && !before.read_only {
                // Rule 8: what hardware has marked until now is the log's.
                let dirty = |dirty| mark_all::<F>(&old_log, range, dirty);
                let moving = self.transit.enter();
                for tree in self.trees(id.space) {
                    let protected = tree.write_protect(change.who(), range, dirty);
                    statistics.protected += protected.map_err(SlotError::Tree)?;
                }
                drop(moving);
            }
            return Ok(SlotChange::Flags);
        }
        let old_range = old.range;
        // A log of its own: collections that are on their way find the old one gone.
        let log = match &old_log {
            Some(log) => Some(Shared::new(log.successor(number, range.size() >> F::PAGE_SHIFT)?)?),
            None => None,
        };
        version.log.clone_from(&log);
        let without = change.plan(Some(id), None)?;
        let map = without.map().and_then(|map| map.overlapping(id.space, range));
        if let Some(other) = map {
            return Err(SlotError::Overlaps { other: other.id });
        }
        let with = without.then(None, Some(version))?;
        // Rule 10: nobody installs anything in the slot once it is gone.
        let old_slots = change.commit(without);
        let dirty = |dirty| mark_all::<F>(&old_log, old_range, dirty);
        if let Err(error) = self.unmap_slot(&mut change, reserve, (id.space, old_range), dirty) {
            change.restore(old_slots);
            return Err(error);
        }
        if let (Some(old), Some(log)) = (&old_log, &log) {
            // Rule 8: what others have taken out of entries that this has found empty is in the old log then.
            self.transit.wait(self.machine());
            log.bitmap.add(&old.bitmap);
            if log.mode == LogMode::Hardware {
                // Who protects for a slot that lay there drops the marks that are to be this log's.
                self.aimed.wait(self.machine());
            }
        }
        drop(change.commit(with));
        Ok(SlotChange::Moved)
    }

    /// Takes memory from the guest: from the return on, an access in the range is an exit, and no CPU translates it.
    /// A dirty log that is on goes with the slot; collect it before.
    ///
    /// Costs a copy of the list of slots, a grace period, and an unmap. Waits as [`create_slot`](Self::create_slot).
    ///
    /// # Errors
    /// [`SlotError::NotFound`], [`SlotError::OutOfMemory`], [`SlotError::OtherMachine`]; the slot is as it was then.
    pub fn delete_slot(
        &self,
        worker: &mut Worker<'m, M>,
        id: impl Into<SlotId>,
    ) -> Result<(), SlotError> {
        let id = id.into();
        let Hands { participant, reserve, .. } = &mut worker.hands;
        let mut change = self.slots.lock(participant)?;
        let range = change.map().get(id).ok_or(SlotError::NotFound)?.range;
        // Rule 10: nobody installs anything in the slot once it is gone.
        let plan = change.plan(Some(id), None)?;
        let before = change.commit(plan);
        // The lock is held until the end: whoever creates a slot here next finds nothing of this one.
        let unmapped = self.unmap_slot(&mut change, reserve, (id.space, range), |_| {});
        if unmapped.is_err() {
            change.restore(before);
        }
        unmapped
    }

    fn unmap_slot(
        &self,
        change: &mut Change<'_, '_, 'm, 'm, M>,
        reserve: &mut Reserve<'m, M>,
        (space, range): (u16, GpaRange),
        mut dirty: impl FnMut(GpaRange),
    ) -> Result<(), SlotError> {
        for tree in self.trees(space) {
            let mut edges = Edges::Exact;
            let mut rest = Some(range);
            while let Some(part) = rest {
                rest = match self.unmap_in(tree, (change.who(), reserve), part, edges, &mut dirty) {
                    Ok(_) => None,
                    Err(Error::NeedTables { at, tables }) => {
                        // Nothing of a slot reaches beyond it, so this is rare; and then losing the neighbours'
                        // translations, which fault back, is better than keeping the slot's.
                        if reserve.top_up(tables).is_err() {
                            edges = Edges::Whole;
                        }
                        GpaRange::new(at, part.end().0.saturating_sub(at.0))
                    }
                    Err(error) => return Err(SlotError::Tree(error)),
                };
            }
        }
        Ok(())
    }

    /// The slot of address space `space` that `gpa` lies in.
    pub fn slot_at(&self, worker: &Worker<'m, M>, space: u16, gpa: Gpa) -> Option<Slot> {
        let pin = worker.hands.participant.pin();
        let map = self.slots.read(&pin).ok()?;
        map.find(space, gpa, &mut At::default()).map(Slot::of)
    }

    /// The slot with this name.
    pub fn slot(&self, worker: &Worker<'m, M>, id: impl Into<SlotId>) -> Option<Slot> {
        let pin = worker.hands.participant.pin();
        self.slots.read(&pin).ok()?.get(id.into()).map(Slot::of)
    }
}

/// Marks every page of a slot at `range` that hardware had marked in the entries of `dirty`.
fn mark_all<F: Format>(log: &Option<Shared<Log>>, range: GpaRange, dirty: GpaRange) {
    let page = |gpa: Gpa| gpa.0.saturating_sub(range.start().0) >> F::PAGE_SHIFT;
    if let Some(log) = log {
        log.bitmap.assign(page(dirty.start()), page(dirty.end()), true);
    }
}

impl Slot {
    fn of(version: &Version) -> Self {
        let &Version { id, range, config, .. } = version;
        let SlotConfig { hva, read_only, .. } = config;
        Self { id, range, hva, read_only, logged: version.log.is_some() }
    }
}
