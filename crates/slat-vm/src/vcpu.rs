//! A vCPU's side of guest memory: its participant, its tables in hand, and what it has done.

use slat::gate::{Gate, Inside, Requests};
use slat::{Format, Gpa, Machine, Participant};

use crate::fault::Purpose;
use crate::hands::Hands;
use crate::log::Mark;
use crate::ring::{DirtyRing, Ring};
use crate::shared::Shared;
use crate::{EntryError, Exit, Fault, FaultError, Host, LogError, SpaceError, VcpuError, Vm};

/// One vCPU. Everything in it is its own: two vCPUs that fault write nothing in common but the entries themselves.
#[derive(Debug)]
pub struct Vcpu<'m, M: Machine> {
    pub(crate) hands: Hands<'m, M>,
}

/// What a vCPU has done since it was made. The engine's own counters are in [`Vcpu::participant`]`().counters`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct VcpuStatistics {
    /// Faults taken: the sum of `fixed`, `spurious`, `retried`, `mmio`, `converted`, `ring_full`, `young`, `aborted` and
    /// `failed`.
    pub faults: u64,
    /// Faults that installed something or added a permission.
    pub fixed: u64,
    /// Those of the fixed ones for which the host was not asked.
    pub fast: u64,
    /// Faults that found everything there: another vCPU was faster, or this one's TLB was behind.
    pub spurious: u64,
    /// Faults that sent the guest back to try again: an entry was being changed, the slot changed, or the host took
    /// pages back.
    pub retried: u64,
    /// Faults outside every slot, and writes to read-only slots.
    pub mmio: u64,
    /// Faults on shared memory that was accessed as private, or the other way round.
    pub converted: u64,
    /// Faults for whose page there was no place in the dirty ring.
    pub ring_full: u64,
    /// Faults that only set the access flag.
    pub young: u64,
    /// Faults that the guest is to be told of.
    pub aborted: u64,
    /// Faults that failed.
    pub failed: u64,
    /// Faults that put a block in the place of smaller leaves.
    pub collapsed: u64,
    /// Pages that were mapped round the one of a fault, or ahead of any fault.
    pub ahead: u64,
    /// Pages that were clean in the log and that a fault has marked.
    pub marked: u64,
}

impl<'m, M: Machine> Vcpu<'m, M> {
    pub(crate) fn new(machine: &'m M, vm: u64, ring: Option<u32>) -> Result<Self, VcpuError> {
        let ring = match ring {
            Some(entries) => Some(Shared::new(Ring::new(entries, vm)?)?),
            None => None,
        };
        Ok(Self { hands: Hands { ring, vm: Some(vm), ..Hands::new(machine)? } })
    }

    /// Handles a fault of this vCPU. May block in [`Host::page`] and in [`Machine::allocate`]; otherwise waits for
    /// nobody, unless so many tables wait to be freed that it has to help, with a grace period.
    ///
    /// Costs, besides those two, two pins, a search among the slots (none if it is the slot of the fault before), one
    /// descent and one exchange. A write to a page that is mapped, and whose writing only a log forbids, costs one pin
    /// and does not ask the host.
    ///
    /// # Errors
    /// [`FaultError`]: the guest cannot go on; nothing has changed.
    pub fn fault<F: Format, H: Host>(
        &mut self,
        vm: &Vm<'m, F, M, H>,
        fault: Fault,
    ) -> Result<Exit, FaultError> {
        self.hands.fault(vm, &fault, Purpose::default())
    }

    /// As [`fault`](Self::fault), where hardware tells accesses to private memory from those to shared memory. If the
    /// page is not what the access says, the exit is [`Exit::Convert`].
    ///
    /// # Errors
    /// [`FaultError`]: the guest cannot go on; nothing has changed.
    pub fn fault_in<F: Format, H: Host>(
        &mut self,
        vm: &Vm<'m, F, M, H>,
        fault: Fault,
        private: bool,
    ) -> Result<Exit, FaultError> {
        let purpose = Purpose { private: Some(private), ahead: false };
        self.hands.fault(vm, &fault, purpose)
    }

    /// Goes inside the guest, on the tree of its address space: see [`Participant::enter`], whose rules hold. A request to
    /// invalidate is answered here, on the calling CPU. Where invalidations are broadcast (Arm) a guest can be entered without
    /// it; on x86 it must not. Before it enters on another CPU than it did last, say so with [`moved`](Self::moved).
    ///
    /// # Errors
    /// [`EntryError::Requests`]: do what they ask, and try again. [`EntryError::OtherMachine`].
    pub fn enter<F: Format, H: Host>(
        &mut self,
        vm: &Vm<'m, F, M, H>,
    ) -> Result<Inside<'_>, EntryError> {
        vm.admit_hands(&self.hands)?;
        let Hands { participant, space, .. } = &mut self.hands;
        let Some(tree) = vm.tree_of(*space) else { return Err(EntryError::OtherMachine) };
        participant.switch(tree.root());
        participant.enter().map_err(|requests| {
            if requests.contains(Requests::INVALIDATE) {
                tree.answer();
            }
            EntryError::Requests(requests.without(Requests::INVALIDATE))
        })
    }

    /// Says that it will enter on another CPU than it did last: see [`Participant::moved`].
    pub fn moved(&mut self) {
        self.hands.participant.moved();
    }

    /// From now on its faults are in this address space of the VM: it must run on [that tree](Vm::tree_of).
    ///
    /// # Errors
    /// [`SpaceError`]: nothing has changed.
    pub fn switch_space<F: Format, H: Host>(
        &mut self,
        vm: &Vm<'m, F, M, H>,
        space: u16,
    ) -> Result<(), SpaceError> {
        vm.admit_hands(&self.hands)?;
        let spaces = vm.options().address_spaces;
        if space >= spaces {
            return Err(SpaceError::NoSpace { spaces });
        }
        self.hands.space = space;
        Ok(())
    }

    /// Its dirty ring, for the thread that collects it.
    pub fn dirty_ring(&self) -> Option<DirtyRing> {
        self.hands.ring.clone().map(DirtyRing)
    }

    /// Whether the guest must not be entered before the dirty ring is [reset](Vm::reset_dirty_ring): ask before each
    /// entry. [`fault`](Self::fault) says so too, with [`Exit::DirtyRingFull`].
    pub fn is_ring_full(&self) -> bool {
        self.hands.ring_is_full()
    }

    /// Says that this vCPU has written to the page at `gpa` without the guest's own translation, such as when an
    /// instruction was emulated. Call it after the write.
    ///
    /// # Errors
    /// [`LogError::NotLogged`] where there is no slot with a log; [`LogError::RingFull`] if the dirty ring has no place: run
    /// nothing before it is reset, and call again. [`LogError::OtherMachine`].
    pub fn mark_dirty<F: Format, H: Host>(
        &mut self,
        vm: &Vm<'m, F, M, H>,
        gpa: Gpa,
    ) -> Result<(), LogError> {
        vm.admit_hands(&self.hands)?;
        let Hands { participant, space, hit, ring, .. } = &mut self.hands;
        let pin = participant.pin();
        let version = vm.slots.read(&pin)?.find(*space, gpa, hit);
        let logged = version.and_then(|version| Some((version, version.writes()?)));
        let (version, log) = logged.ok_or(LogError::NotLogged { gpa })?;
        let mark = Mark::new(log, version, gpa, F::PAGE_SHIFT, ring);
        if !mark.has_room() {
            return Err(LogError::RingFull);
        }
        mark.emulated();
        Ok(())
    }

    /// Pages of the window that its next fault maps round itself, the page of the fault included: what
    /// [`VmOptions::fault_around`](crate::VmOptions) says, or what it has adapted to.
    pub fn fault_around<F: Format, H: Host>(&self, vm: &Vm<'m, F, M, H>) -> u32 {
        self.hands.window_pages(vm)
    }

    /// Its participant, for the engine's own operations and their counters.
    pub fn participant(&self) -> &Participant<'m, M> {
        &self.hands.participant
    }

    /// The gate through which it enters the guest.
    pub fn gate(&self) -> &'m Gate {
        self.hands.participant.gate()
    }

    /// What it has done.
    pub fn statistics(&self) -> &VcpuStatistics {
        &self.hands.statistics
    }
}
