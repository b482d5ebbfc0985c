//! One CPU that runs a guest: accesses by guest-physical address, through its own TLB.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use slat::{Gpa, Hpa, Level};

use crate::arm::descriptor::{MemoryType, Permissions};
use crate::arm::registers::{Regime, Registers};
use crate::arm::walk::Walk;
use crate::checker::{Order, Violation};
use crate::lock::{Held, Spin};
use crate::model::Model;
use crate::physical::Place;
use crate::thread;
use crate::tlb::{Tlb, Translation};

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
}

impl Core {
    pub(crate) fn new(page_shift: u32) -> Self {
        Self {
            tlb: Spin::new(Tlb::new(page_shift)),
            taken: AtomicBool::new(false),
            loaded: AtomicBool::new(false),
            vttbr: AtomicU64::new(0),
            vmid: AtomicU64::new(0),
            root: AtomicU64::new(0),
        }
    }

    pub(crate) fn vttbr(&self) -> u64 {
        self.vttbr.load(Ordering::Relaxed)
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
    registers: Registers,
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
    /// Takes CPU `index` and loads `registers`. `None` if there is no such CPU, or it is taken.
    pub fn cpu(&self, index: usize, registers: Registers) -> Option<Cpu<'_>> {
        let core = self.cores.get(index)?;
        if core.taken.swap(true, Ordering::Acquire) {
            return None;
        }
        let (regime, _) = Regime::decode(registers, self.features, self.page_shift);
        let mut cpu = Cpu { model: self, core, index, registers, regime };
        cpu.load(registers);
        Some(cpu)
    }
}

impl<'m> Cpu<'m> {
    /// Its number.
    pub fn index(&self) -> usize {
        self.index
    }

    /// The registers that it has loaded.
    pub fn registers(&self) -> Registers {
        self.registers
    }

    /// Loads other registers: another root, or another VMID.
    pub fn load(&mut self, registers: Registers) {
        self.unload();
        let model = self.model;
        let (regime, complaint) = Regime::decode(registers, model.features, model.page_shift);
        if let Some(why) = complaint {
            let Registers { vttbr, vtcr } = registers;
            model.raise(Violation::BadRegisters { vttbr, vtcr, why });
        }
        model.check_vmid(&regime);
        (self.registers, self.regime) = (registers, regime);
        let resolved = regime.shift(regime.start);
        let entries = 1u64 << regime.input_bits.saturating_sub(resolved);
        let tables = (entries >> (regime.page_shift - 3)).max(1) as u32;
        model.checker.hold_root(model, regime.root, tables);
        self.core.vttbr.store(registers.vttbr, Ordering::Relaxed);
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

    /// The guest is about to use `gpa`, on the calling thread.
    #[inline(always)]
    fn run_guest(&self, gpa: Gpa) -> Result<(), FaultKind> {
        self.bind();
        if gpa.0 >> self.regime.input_bits != 0 || gpa.0 & 7 != 0 || !self.regime.consistent {
            return Err(self.never(gpa));
        }
        if self.model.checker.is_on() {
            self.model.check_before_guest();
        }
        Ok(())
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
                return Err(FaultKind::Permission { level });
            }
            _ => {
                let (model, cpu, regime) = (self.model, self.index, &self.regime);
                Walk { model, cpu, regime, tlb: &mut tlb, order }.run(gpa.0, needed)?
            }
        };
        let place = self.place(gpa, level, &translation)?;
        tlb.fast.remember(self.regime.vmid, gpa.0, place, translation.permissions);
        Ok(Missed { tlb, place, level, translation })
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
        self.core.taken.store(false, Ordering::Release);
    }
}
