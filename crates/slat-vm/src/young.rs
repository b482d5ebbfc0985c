//! Aging: which pages the guest has used since it was last asked, for the host's reclaim.

use slat::{Format, GpaRange, Machine};

use crate::{Host, HvaRange, InvalidateError, Vm, Worker};

impl<'m, F: Format, M: Machine, H: Host> Vm<'m, F, M, H> {
    /// How many leaves in `range`, of every address space, have been used since their access flags were last cleared.
    ///
    /// Costs a load an entry and waits for nobody.
    ///
    /// # Errors
    /// [`InvalidateError::OtherMachine`], [`InvalidateError::Tree`].
    pub fn test_young(
        &self,
        worker: &mut Worker<'m, M>,
        range: GpaRange,
    ) -> Result<u64, InvalidateError> {
        self.age(worker, range, false)
    }

    /// The same, and clears the access flags: the next use of each page sets it again, in hardware or by an access-flag
    /// fault. Nothing is invalidated: a CPU that has the translation cached may use the page for a while without setting
    /// the flag. Costs also an exchange for each leaf that was used.
    ///
    /// # Errors
    /// [`InvalidateError::OtherMachine`], [`InvalidateError::Tree`].
    pub fn clear_young(
        &self,
        worker: &mut Worker<'m, M>,
        range: GpaRange,
    ) -> Result<u64, InvalidateError> {
        self.age(worker, range, true)
    }

    /// [`clear_young`](Self::clear_young), and takes the translations out of every CPU's TLB where there were any, so that
    /// the very next use of each page sets its flag. Costs also one invalidation for each address space.
    ///
    /// # Errors
    /// [`InvalidateError::OtherMachine`], [`InvalidateError::Tree`].
    pub fn clear_flush_young(
        &self,
        worker: &mut Worker<'m, M>,
        range: GpaRange,
    ) -> Result<u64, InvalidateError> {
        let young = self.age(worker, range, true)?;
        if let Some(range) = self.whole_pages(range).filter(|_| young > 0) {
            for tree in self.all_trees() {
                tree.flush(&worker.hands.participant, range).map_err(InvalidateError::Tree)?;
            }
        }
        Ok(young)
    }

    /// [`test_young`](Self::test_young) of what lies behind host addresses, wherever in the guest that is mapped.
    ///
    /// # Errors
    /// [`InvalidateError::OtherMachine`], [`InvalidateError::Tree`].
    pub fn test_host_young(
        &self,
        worker: &mut Worker<'m, M>,
        range: HvaRange,
    ) -> Result<u64, InvalidateError> {
        self.age_host(worker, range, false)
    }

    /// [`clear_young`](Self::clear_young) of what lies behind host addresses, wherever in the guest that is mapped.
    ///
    /// # Errors
    /// [`InvalidateError::OtherMachine`], [`InvalidateError::Tree`].
    pub fn clear_host_young(
        &self,
        worker: &mut Worker<'m, M>,
        range: HvaRange,
    ) -> Result<u64, InvalidateError> {
        self.age_host(worker, range, true)
    }

    fn age(
        &self,
        worker: &mut Worker<'m, M>,
        range: GpaRange,
        clear: bool,
    ) -> Result<u64, InvalidateError> {
        self.admit(worker.hands.participant.machine())?;
        let Some(range) = self.whole_pages(range) else { return Ok(0) };
        (0..self.options.address_spaces).map(|space| self.age_in(worker, space, range, clear)).sum()
    }

    fn age_host(
        &self,
        worker: &mut Worker<'m, M>,
        range: HvaRange,
        clear: bool,
    ) -> Result<u64, InvalidateError> {
        self.admit(worker.hands.participant.machine())?;
        let mut young = 0;
        let Some(range) = self.whole_host_pages(range) else { return Ok(0) };
        self.each_backed(worker, range, |worker, space, piece| {
            young += self.age_in(worker, space, piece, clear)?;
            Ok::<_, InvalidateError>(())
        })?;
        Ok(young)
    }

    fn age_in(
        &self,
        worker: &Worker<'m, M>,
        space: u16,
        range: GpaRange,
        clear: bool,
    ) -> Result<u64, InvalidateError> {
        let participant = &worker.hands.participant;
        let young = self.trees(space).iter().map(|tree| tree.age(participant, range, clear));
        young.sum::<Result<u64, _>>().map_err(InvalidateError::Tree)
    }
}
