//! One CPU that runs a guest: accesses by guest-physical address, through its own TLB.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use slat::gate::Requests;
use slat::{Gpa, Hpa, Level, Slot};

use crate::checker::{Order, Violation};
use crate::descriptor::{MemoryType, Permissions};
use crate::lock::{Held, Spin};
use crate::model::Model;
use crate::physical::Place;
use crate::regime::{Control, Kind, Regime};
use crate::thread;
use crate::tlb::{Span, Tlb, Translation};
use crate::walk::Walk;

/// What a guest does with an address.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Access {
    /// A load.
    Read,
    /// A store.
    Write,
    /// An instruction fetch.
    Execute,
}

impl Access {
    #[inline(always)]
    fn permission(self) -> Permissions {
        match self {
            Self::Read => Permissions::READ,
            Self::Write => Permissions::WRITE,
            Self::Execute => Permissions::EXECUTE,
        }
    }
}

/// Where an access goes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Translated {
    /// The host-physical address.
    pub hpa: Hpa,
    /// The level of the leaf that translates it.
    pub level: Level,
    /// The kind of memory that the leaf says it is.
    pub memory: MemoryType,
}

/// Why a guest's access did not get through, as the syndrome of a stage-2 abort tells it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Fault {
    /// The address.
    pub gpa: Gpa,
    /// What was tried.
    pub access: Access,
    /// Why it failed.
    pub kind: FaultKind,
}

/// The kinds of stage-2 aborts, with the level of the entry that caused them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum FaultKind {
    /// An entry is invalid; or the address is too large, then at level 0.
    Translation {
        /// The level of the entry.
        level: Level,
    },
    /// The leaf does not permit the access.
    Permission {
        /// The level of the leaf.
        level: Level,
    },
    /// The access flag is clear and hardware does not set it.
    AccessFlag {
        /// The level of the leaf.
        level: Level,
    },
    /// An entry, or the root register at level 0, has a larger address than the CPU is set to use.
    AddressSize {
        /// The level of the entry.
        level: Level,
    },
    /// An entry has reserved bits set, or a reserved encoding (Intel: an EPT misconfiguration). Also a violation.
    Reserved {
        /// The level of the entry.
        level: Level,
    },
    /// The address is not a multiple of eight: an error of the guest.
    Alignment,
    /// There is no memory where the translation leads. Also a violation.
    External,
}

/// The part of a CPU that others can see: they invalidate in its TLB.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) tlb: Spin<Tlb>,
    taken: AtomicBool,
    loaded: AtomicBool,
    vttbr: AtomicU64,
    vmid: AtomicU64,
    root: AtomicU64,
    /// The participant slot of the vCPU that runs here, if it has said so.
    slot: AtomicUsize,
    /// VMIDs (or what stands for them) of which others rely on what is cached here to be gone before the guest uses it.
    /// Changed with the TLB locked.
    due: Mutex<Vec<u16>>,
    any_due: AtomicBool,
}

/// No participant slot.
const NO_SLOT: usize = usize::MAX;

impl Core {
    pub(crate) fn new(page_shift: u32) -> Self {
        Self {
            tlb: Spin::new(Tlb::new(page_shift)),
            taken: AtomicBool::new(false),
            loaded: AtomicBool::new(false),
            vttbr: AtomicU64::new(0),
            vmid: AtomicU64::new(0),
            root: AtomicU64::new(0),
            slot: AtomicUsize::new(NO_SLOT),
            due: Mutex::default(),
            any_due: AtomicBool::new(false),
        }
    }

    pub(crate) fn vttbr(&self) -> u64 {
        self.vttbr.load(Ordering::Relaxed)
    }

    /// Whether its vCPU is outside the guest, or runs another one, or there is none. Then what is cached under the VMID has
    /// to be invalidated before it is used.
    pub(crate) fn must_invalidate(&self, slots: &[Slot], vmid: u16) -> bool {
        let slot = slots.get(self.slot.load(Ordering::Acquire));
        // A vCPU that enters is inside for a moment before it finds a request and steps back. The request is looked for
        // first: once it was taken, the vCPU stays outside until it has invalidated, for which it needs this TLB.
        let outside = slot.is_some_and(|slot| {
            slot.gate.pending().contains(Requests::INVALIDATE) || !slot.gate.is_inside()
        });
        let unused = outside || self.vmid() != Some(vmid);
        if unused {
            let mut due = self.due();
            if !due.contains(&vmid) {
                due.push(vmid);
            }
            self.any_due.store(true, Ordering::Relaxed);
        }
        unused
    }

    /// What was cached under a VMID, or all, is invalidated, with the TLB locked.
    pub(crate) fn invalidated(&self, vmid: Option<u16>) {
        let mut due = self.due();
        due.retain(|due| vmid.is_some_and(|vmid| vmid != *due));
        self.any_due.store(!due.is_empty(), Ordering::Relaxed);
    }

    fn due(&self) -> MutexGuard<'_, Vec<u16>> {
        self.due.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The VMID that the CPU runs under, if it has loaded registers.
    pub(crate) fn vmid(&self) -> Option<u16> {
        let loaded = self.loaded.load(Ordering::Relaxed);
        loaded.then(|| self.vmid.load(Ordering::Relaxed) as u16)
    }

    /// The root that it has loaded.
    pub(crate) fn root(&self) -> Option<u64> {
        self.loaded.load(Ordering::Relaxed).then(|| self.root.load(Ordering::Relaxed))
    }
}

/// A CPU of the model with a guest's registers loaded, owned by whoever runs the vCPU. What it has cached stays in the
/// model when it is dropped, and is there when the CPU is taken again.
///
/// The thread that uses it last is the thread that runs on it: instructions that act on one CPU act on this one.
#[derive(Debug)]
pub struct Cpu<'m> {
    model: &'m Model,
    core: &'m Core,
    index: usize,
    control: Control,
    regime: Regime,
}

/// What a miss of the fast cache ends with; the TLB is still locked.
struct Missed<'m> {
    tlb: Held<'m, Tlb>,
    place: Place,
    level: i8,
    translation: Translation,
}

impl Model {
    /// Takes CPU `index` and loads the registers. `None` if there is no such CPU, or it is taken.
    pub fn cpu(&self, index: usize, control: impl Into<Control>) -> Option<Cpu<'_>> {
        let control = control.into();
        let core = self.cores.get(index)?;
        if core.taken.swap(true, Ordering::Acquire) {
            return None;
        }
        let (regime, _) = Regime::decode(control, self);
        let mut cpu = Cpu { model: self, core, index, control, regime };
        cpu.load(control);
        Some(cpu)
    }
}

impl<'m> Cpu<'m> {
    /// Its number.
    pub fn index(&self) -> usize {
        self.index
    }

    /// What it has loaded.
    pub fn control(&self) -> Control {
        self.control
    }

    /// Says that it runs the vCPU with this participant, by [`Participant::index`](slat::Participant::index). On x86 its
    /// guest runs inside that gate only, from now on.
    pub fn attend(&mut self, participant: usize) {
        self.bind();
        self.core.slot.store(participant, Ordering::Release);
    }

    /// Loads other registers: another root, or another VMID.
    pub fn load(&mut self, control: impl Into<Control>) {
        let control = control.into();
        self.unload();
        let model = self.model;
        let (regime, complaint) = Regime::decode(control, model);
        if let Some(why) = complaint {
            model.raise(Violation::BadRegisters { control, why });
        }
        model.check_vmid(&regime);
        (self.control, self.regime) = (control, regime);
        let resolved = regime.shift(regime.start);
        let entries = 1u64 << regime.input_bits.saturating_sub(resolved);
        let tables = (entries >> (regime.page_shift - 3)).max(1) as u32;
        model.checker.hold_root(model, regime.root, tables);
        let vttbr = if let Control::Arm(registers) = control { registers.vttbr } else { 0 };
        self.core.vttbr.store(vttbr, Ordering::Relaxed);
        self.core.vmid.store(regime.vmid.into(), Ordering::Relaxed);
        self.core.root.store(regime.root, Ordering::Relaxed);
        self.core.loaded.store(true, Ordering::Release);
    }

    fn unload(&mut self) {
        if self.core.loaded.swap(false, Ordering::Relaxed) {
            self.model.checker.release(self.model, self.regime.root);
        }
    }

    /// The calling thread runs on this CPU from now on. Every access says so too.
    pub fn bind(&self) {
        thread::run_on(self.model.id, self.index);
    }

    /// Loads the word at `gpa`, a multiple of 8.
    ///
    /// # Errors
    /// The fault that the guest takes to its hypervisor.
    #[inline]
    pub fn read(&mut self, gpa: Gpa) -> Result<u64, Fault> {
        self.access(Access::Read, gpa, |word| word.load(Ordering::Relaxed))
    }

    /// Stores `value` at `gpa`, a multiple of 8.
    ///
    /// # Errors
    /// The fault that the guest takes to its hypervisor.
    #[inline]
    pub fn write(&mut self, gpa: Gpa, value: u64) -> Result<(), Fault> {
        self.access(Access::Write, gpa, |word| word.store(value, Ordering::Relaxed))
    }

    /// Fetches the word at `gpa`, a multiple of 8, as the guest's kernel (EL1).
    ///
    /// # Errors
    /// The fault that the guest takes to its hypervisor.
    #[inline]
    pub fn fetch(&mut self, gpa: Gpa) -> Result<u64, Fault> {
        self.access(Access::Execute, gpa, |word| word.load(Ordering::Relaxed))
    }

    /// Fetches the word at `gpa`, a multiple of 8, as a user program of the guest (EL0).
    ///
    /// # Errors
    /// The fault that the guest takes to its hypervisor.
    #[inline]
    pub fn fetch_user(&mut self, gpa: Gpa) -> Result<u64, Fault> {
        let load = |word: &AtomicU64| word.load(Ordering::Relaxed);
        self.with_permission(Access::Execute, Permissions::EXECUTE_USER, gpa, load)
    }

    /// Makes one access to the word at `gpa`, a multiple of 8: `f` gets the word of host memory behind it. Invalidations
    /// that would take the translation away wait until `f` returns; `f` must not use the model.
    ///
    /// # Errors
    /// The fault that the guest takes to its hypervisor; `f` was not called then.
    #[inline]
    pub fn access<R>(
        &mut self,
        access: Access,
        gpa: Gpa,
        f: impl FnOnce(&AtomicU64) -> R,
    ) -> Result<R, Fault> {
        self.with_permission(access, access.permission(), gpa, f)
    }

    #[inline(always)]
    fn with_permission<R>(
        &mut self,
        access: Access,
        needed: Permissions,
        gpa: Gpa,
        f: impl FnOnce(&AtomicU64) -> R,
    ) -> Result<R, Fault> {
        let fault = |kind| Fault { gpa, access, kind };
        self.run_guest(gpa).map_err(fault)?;
        let tlb = self.core.tlb.lock();
        let (_tlb, place) = match tlb.fast.find(self.regime.vmid, gpa.0, needed) {
            Some(place) => (tlb, place),
            None => {
                let missed = self.miss(tlb, gpa, needed).map_err(fault)?;
                (missed.tlb, missed.place)
            }
        };
        let memory = self.model.physical.memory(place.memory);
        match memory.and_then(|memory| memory.word_at(place.offset)) {
            Some(word) => Ok(f(word)),
            None => Err(fault(FaultKind::External)),
        }
    }

    /// Where an access to `gpa`, a multiple of 8, would go, as the `at` instruction asks: by this CPU's TLB, or by a walk
    /// that fills it and has all effects of an access but the access itself.
    ///
    /// # Errors
    /// The fault that the access would take.
    pub fn translate(&mut self, access: Access, gpa: Gpa) -> Result<Translated, Fault> {
        let fault = |kind| Fault { gpa, access, kind };
        self.run_guest(gpa).map_err(fault)?;
        let needed = access.permission();
        let Missed { level, translation, .. } =
            self.miss(self.core.tlb.lock(), gpa, needed).map_err(fault)?;
        let inside = gpa.0 & ((1 << self.regime.shift(level)) - 1);
        Ok(Translated {
            hpa: Hpa(translation.output + inside),
            level: Level::new(level).unwrap_or(Level::LAST),
            memory: translation.memory,
        })
    }

    /// What hardware tells the hypervisor about `fault`, the last one of this CPU: the exit qualification of an EPT violation
    /// (Intel SDM vol. 3C, table 28-7), or EXITINFO1 of a nested page fault (AMD APM vol. 2, 15.25.6). `None` on Arm, and for
    /// what is neither.
    pub fn qualification(&self, fault: &Fault) -> Option<u64> {
        let granted = self.core.tlb.lock().granted;
        let bit = |bit: u32, set: bool| u64::from(set) << bit;
        let (write, fetch) = (fault.access == Access::Write, fault.access == Access::Execute);
        let reserved = matches!(fault.kind, FaultKind::Reserved { .. });
        let absent = matches!(fault.kind, FaultKind::Translation { .. });
        if !reserved && !absent && !matches!(fault.kind, FaultKind::Permission { .. }) {
            return None;
        }
        match self.regime.kind {
            Kind::Arm => None,
            // A misconfiguration is an exit of its own, without a qualification.
            Kind::Ept { .. } if reserved => None,
            Kind::Ept { mode_based } => Some(
                bit(0, fault.access == Access::Read)
                    | bit(1, write)
                    | bit(2, fetch)
                    | bit(3, granted.has(Permissions::READ))
                    | bit(4, granted.has(Permissions::WRITE))
                    | bit(5, granted.has(Permissions::EXECUTE))
                    | bit(6, mode_based && granted.has(Permissions::EXECUTE_USER))
                    // The linear address is known, and this is its final translation.
                    | 0b11 << 7,
            ),
            Kind::Npt => Some(
                bit(0, !absent)
                    | bit(1, write)
                    // A nested walk is a user access; this is that of the final address.
                    | 1 << 2
                    | bit(3, reserved)
                    | bit(4, fetch)
                    | 1 << 32,
            ),
        }
    }

    /// The guest is about to use `gpa`, on the calling thread.
    #[inline(always)]
    fn run_guest(&self, gpa: Gpa) -> Result<(), FaultKind> {
        self.bind();
        if gpa.0 >> self.regime.input_bits != 0 || gpa.0 & 7 != 0 || !self.regime.consistent {
            return Err(self.never(gpa));
        }
        if self.model.checker.is_on() {
            self.model.check_before_guest();
            if self.regime.kind != Kind::Arm {
                self.check_entered(gpa);
            }
        }
        Ok(())
    }

    /// The vCPU is inside, and has invalidated what others asked for.
    fn check_entered(&self, gpa: Gpa) {
        let slot = self.model.slots.get(self.core.slot.load(Ordering::Relaxed));
        let Some(slot) = slot else { return };
        let cpu = self.index;
        if !slot.gate.is_inside() {
            self.model.raise(Violation::OutsideGate { cpu, gpa });
        }
        // Set while its vCPU was outside, which it saw when it entered.
        if self.core.any_due.load(Ordering::Relaxed) {
            let tlb = self.core.tlb.lock();
            let due = self.core.due().contains(&self.regime.vmid);
            drop(tlb);
            if due {
                self.model.raise(Violation::NotInvalidated { cpu, gpa });
            }
        }
    }

    /// Why `gpa` can never be accessed.
    #[cold]
    fn never(&self, gpa: Gpa) -> FaultKind {
        if gpa.0 >> self.regime.input_bits != 0 || !self.regime.consistent {
            FaultKind::Translation { level: Level::new(0).unwrap_or(Level::TOP) }
        } else {
            FaultKind::Alignment
        }
    }

    /// The way of a miss: the whole TLB, then a walk. Returns with the TLB locked.
    #[inline(never)]
    fn miss(
        &self,
        tlb: Held<'m, Tlb>,
        gpa: Gpa,
        needed: Permissions,
    ) -> Result<Missed<'m>, FaultKind> {
        if !self.model.checker.is_on() {
            return self.miss_in_order(tlb, gpa, needed, None);
        }
        // `order` comes before a TLB's lock.
        drop(tlb);
        self.model.stop_if_broken();
        let mut order = self.model.checker.order();
        let tlb = self.core.tlb.lock();
        self.miss_in_order(tlb, gpa, needed, order.as_deref_mut())
    }

    fn miss_in_order(
        &self,
        mut tlb: Held<'m, Tlb>,
        gpa: Gpa,
        needed: Permissions,
        order: Option<&mut Order>,
    ) -> Result<Missed<'m>, FaultKind> {
        let cached = tlb.space(self.regime.vmid).and_then(|space| space.find(gpa.0));
        let (level, translation) = match cached {
            Some((level, found)) if found.permissions.has(needed) => (level, *found),
            // What a CPU has cached decides, until it is invalidated; but hardware notes a first write in memory.
            Some((level, found)) if !(found.clean && needed == Permissions::WRITE) => {
                let level = Level::new(level).unwrap_or(Level::LAST);
                tlb.granted = found.permissions;
                self.faulted(&mut tlb, gpa);
                return Err(FaultKind::Permission { level });
            }
            _ => {
                let (model, cpu, regime) = (self.model, self.index, &self.regime);
                let walked = Walk { model, cpu, regime, tlb: &mut tlb, order }.run(gpa.0, needed);
                walked.inspect_err(|_| self.faulted(&mut tlb, gpa))?
            }
        };
        let place = self.place(gpa, level, &translation)?;
        tlb.fast.remember(self.regime.vmid, gpa.0, place, translation.permissions);
        Ok(Missed { tlb, place, level, translation })
    }

    /// What a fault takes out of the CPU.
    fn faulted(&self, tlb: &mut Tlb, gpa: Gpa) {
        if self.regime.fault_invalidates() {
            let dropped = &mut |table| self.model.checker.release(self.model, table);
            tlb.invalidate_stage2(self.regime.vmid, Span::new(gpa.0, 1), None, dropped);
            tlb.invalidate_combined(self.regime.vmid);
        }
    }

    fn place(&self, gpa: Gpa, level: i8, translation: &Translation) -> Result<Place, FaultKind> {
        let inside = gpa.0 & ((1 << self.regime.shift(level)) - 1);
        let hpa = Hpa(translation.output + inside);
        let place = self.model.physical.find(hpa);
        let backed = place.filter(|place| {
            let memory = self.model.physical.memory(place.memory);
            memory.is_some_and(|memory| memory.offset_of(hpa).is_some())
        });
        backed.ok_or_else(|| {
            self.model.raise(Violation::NoMemory { gpa, hpa });
            FaultKind::External
        })
    }
}

impl Drop for Cpu<'_> {
    fn drop(&mut self) {
        self.unload();
        self.core.slot.store(NO_SLOT, Ordering::Release);
        self.core.taken.store(false, Ordering::Release);
    }
}
