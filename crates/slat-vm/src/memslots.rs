//! Creating and deleting memslots.

use slat::{Edges, Error, Format, Gpa, GpaRange, Machine};

use crate::slot::{SlotConfig, SlotError, SlotId, Version};
use crate::{Host, Hva, Vm, Worker};

/// What an embedder can know about a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Slot {
    /// Its number.
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

impl<'m, F: Format, M: Machine, H: Host> Vm<'m, F, M, H> {
    /// Gives the guest memory: from the return on, its faults in the range are answered by the host.
    ///
    /// Costs a copy of the list of slots and a grace period. Waits while another thread changes slots; not to be
    /// called from interrupt context.
    ///
    /// # Errors
    /// [`SlotError`]: what is wrong with the configuration, with which slot it overlaps, or that memory is exhausted.
    /// Nothing was changed then.
    pub fn create_slot(
        &self,
        worker: &mut Worker<'m, M>,
        id: SlotId,
        config: SlotConfig,
    ) -> Result<(), SlotError> {
        let range = config.check(self.tree().geometry())?;
        let mut change = self.slots.lock(&mut worker.participant)?;
        let map = change.map();
        if map.get(id).is_some() {
            return Err(SlotError::Exists);
        }
        if let Some(other) = map.overlapping(range) {
            return Err(SlotError::Overlaps { other: other.id });
        }
        let version = Version {
            number: map.next_number(),
            id,
            range,
            hva: config.hva,
            read_only: config.read_only,
            max_page_size: config.max_page_size.unwrap_or(u64::MAX),
            log: None,
        };
        Ok(change.publish(None, Some(version))?)
    }

    /// Takes memory from the guest: from the return on, an access in the range is an exit, and no CPU translates it.
    /// A dirty log that is on goes with the slot; collect it before.
    ///
    /// Costs a copy of the list of slots, a grace period, and an unmap. Waits as [`create_slot`](Self::create_slot).
    ///
    /// # Errors
    /// [`SlotError::NotFound`], [`SlotError::OutOfMemory`], [`SlotError::OtherMachine`]; nothing was changed then.
    pub fn delete_slot(&self, worker: &mut Worker<'m, M>, id: SlotId) -> Result<(), SlotError> {
        let Worker { participant, reserve, .. } = worker;
        let mut change = self.slots.lock(participant)?;
        let range = change.map().get(id).ok_or(SlotError::NotFound)?.range;
        // Rule 10: nobody installs anything in the slot once this has returned.
        change.publish(Some(id), None)?;
        // The lock is held until the end: whoever creates a slot here next finds nothing of this one.
        for tree in self.trees() {
            let mut edges = Edges::Exact;
            let mut rest = Some(range);
            while let Some(part) = rest {
                rest = match tree.unmap(change.who(), reserve, part, edges, |_| {}) {
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

    /// The slot that `gpa` lies in.
    pub fn slot_at(&self, worker: &Worker<'m, M>, gpa: Gpa) -> Option<Slot> {
        let pin = worker.participant.pin();
        let map = self.slots.read(&pin).ok()?;
        map.find(gpa, &mut 0).map(Slot::of)
    }

    /// The slot with this number.
    pub fn slot(&self, worker: &Worker<'m, M>, id: SlotId) -> Option<Slot> {
        let pin = worker.participant.pin();
        self.slots.read(&pin).ok()?.get(id).map(Slot::of)
    }
}

impl Slot {
    fn of(version: &Version) -> Self {
        let &Version { id, range, hva, read_only, .. } = version;
        Self { id, range, hva, read_only, logged: version.log.is_some() }
    }
}
