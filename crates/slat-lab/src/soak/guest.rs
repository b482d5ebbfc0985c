//! What a vCPU does: loads, stores and fetches words of its own, and knows what each must hold.

use std::sync::atomic::{AtomicU64, Ordering};

use slat::Gpa;

use slat_model::{Access, Architecture, Cpu, Model};
use slat_vm::{DirtyRing, Exit, FaultError, HostError, PreFault, PreFaultError, Vcpu};

use crate::failure::Failure;
use crate::model;
use crate::random::Dice;
use crate::soak::config::Soaked;
use crate::soak::place::{Behind, Place};
use crate::soak::round::Ground;

/// How many pages of a slot most accesses go to, so that threads meet.
const HOT: u64 = 24;

/// A vCPU on a CPU of its own.
pub(crate) struct Guest<'r, 'v, 'm, T: Soaked> {
    ground: &'r Ground<'v, 'm, T>,
    cpu: Cpu<'m>,
    vcpu: Vcpu<'m, Model>,
    /// The CPU knows whose gate it is behind.
    attended: bool,
    dice: Dice,
    /// By page of host addresses, what its word holds.
    written: Vec<u64>,
    stores: u64,
}

impl<'r, 'v, 'm, T: Soaked> Guest<'r, 'v, 'm, T> {
    /// vCPU `index`.
    ///
    /// # Errors
    /// [`Failure::Run`] if the machine has no place for it.
    pub(crate) fn new(
        ground: &'r Ground<'v, 'm, T>,
        index: u32,
        dice: Dice,
    ) -> Result<Self, Failure> {
        let vm = ground.vm;
        let cpu = vm.machine().cpu(index as usize, T::control_of(vm.tree()));
        let cpu = cpu.ok_or_else(|| Failure::Run(format!("the machine has no CPU {index}")))?;
        let vcpu = vm.vcpu().map_err(|error| Failure::Run(error.to_string()))?;
        let attended = false;
        Ok(Self {
            ground,
            cpu,
            vcpu,
            attended,
            dice,
            written: vec![0; ground.host_pages()],
            stores: 0,
        })
    }

    /// Faults that it has taken.
    pub(crate) fn faults(&self) -> u64 {
        self.vcpu.statistics().faults
    }

    /// Its dirty ring, if it has one.
    pub(crate) fn ring(&self) -> Option<DirtyRing> {
        self.vcpu.dirty_ring()
    }

    /// What its word in each page of host addresses must hold.
    pub(crate) fn written(&self) -> &[u64] {
        &self.written
    }

    /// One access that is drawn.
    ///
    /// # Errors
    /// What was wrong about it.
    pub(crate) fn step(&mut self) -> Result<(), String> {
        let places = &self.ground.places;
        let place = &places[self.dice.below(places.len() as u64) as usize];
        let page = if self.dice.happens(70) {
            self.dice.below(HOT) * place.pages / HOT
        } else {
            self.dice.below(place.pages)
        };
        let access = match self.dice.below(20) {
            0..=9 => Access::Write,
            10..=17 => Access::Read,
            _ => Access::Execute,
        };
        let spot = place.behind().map_or_else(|| self.dice.below(2), Behind::spot);
        if self.dice.below(500) == 0 {
            return self.pre_fault(place, spot, page);
        }
        self.access(place, spot, page, access)
    }

    /// Maps some pages ahead of any access, as far as there are pages.
    fn pre_fault(&mut self, place: &Place, spot: u64, page: u64) -> Result<(), String> {
        let Some(range) = place.range(spot, page, 1 + self.dice.below(32)) else { return Ok(()) };
        let PreFault { stopped, .. } = self.vcpu.pre_fault(self.ground.vm, range, || true);
        match stopped {
            None | Some(PreFaultError::NoSlot | PreFaultError::Busy) => Ok(()),
            Some(PreFaultError::Fault(FaultError::Host { error: HostError::Again, .. })) => Ok(()),
            Some(error) => Err(format!("mapping ahead at {}: {error}", range.start())),
        }
    }

    /// One access, with faults mended until it goes through, or has no memory.
    fn access(
        &mut self,
        place: &Place,
        spot: u64,
        page: u64,
        access: Access,
    ) -> Result<(), String> {
        let Gpa(gpa) = place.gpa(spot, page);
        let gpa = Gpa(gpa + 8 * self.cpu.index() as u64);
        let there = place.there();
        let behind = place.behind();
        let read_only = behind.is_some_and(|behind| behind.read_only);
        let here = behind.is_some_and(|behind| behind.spot() == spot);
        loop {
            match self.try_access(place, (spot, page), gpa, access) {
                Ok(through) => return through.map_err(|why| format!("{access:?} at {gpa}: {why}")),
                Err(fault) if self.ground.is_over() => {
                    let _ = fault;
                    return Ok(());
                }
                Err(fault) => {
                    let fault = model::fault(fault)
                        .ok_or_else(|| format!("no hypervisor mends this fault: {fault:?}"))?;
                    match self.vcpu.fault(self.ground.vm, fault) {
                        Ok(Exit::Resume) => {}
                        // Whoever is in the way may need the processor.
                        Ok(Exit::Retry) => std::thread::yield_now(),
                        // A worker that sees this empties it.
                        Ok(Exit::DirtyRingFull) => {
                            while self.vcpu.is_ring_full() && !self.ground.is_over() {
                                std::thread::yield_now();
                            }
                        }
                        Ok(Exit::Mmio(exit)) => {
                            let same = there.is_some() && place.there() == there;
                            let refused =
                                read_only && exit.slot.is_some() && access == Access::Write;
                            if same && here && !refused {
                                return Err(format!("memory at {gpa} is taken for a device"));
                            }
                            return Ok(());
                        }
                        Ok(exit) => return Err(format!("{access:?} at {gpa} ends with {exit:?}")),
                        Err(error) => return Err(format!("{access:?} at {gpa}: {error}")),
                    }
                }
            }
        }
    }

    /// The access itself. Whoever takes the page away waits until the checks are done.
    fn try_access(
        &mut self,
        place: &Place,
        (spot, page): (u64, u64),
        gpa: Gpa,
        access: Access,
    ) -> Result<Result<(), String>, slat_model::Fault> {
        let Self { ground, cpu, vcpu, attended, written, stores, .. } = self;
        let index = cpu.index() as u32;
        // Where invalidations are broadcast nobody asks whether a vCPU is inside.
        let gated = T::ARCHITECTURE != Architecture::Arm;
        if gated && !std::mem::replace(attended, true) {
            cpu.attend(vcpu.participant().index());
        }

        let compare = |word: &AtomicU64| {
            let Some(behind) = place.behind() else {
                return Err("a page of a deleted memslot is reached".to_owned());
            };
            if behind.spots >> spot & 1 == 0 {
                return Err("a page is reached where its memslot is no more".to_owned());
            }
            let host = ground.vm.host();
            let is_it = |page: &u64| host.is_at(ground.vm.machine(), *page, index, word);
            let Some(page) = place.host_pages(behind, page).find(is_it) else {
                return Err("a page is reached where it is no more".to_owned());
            };
            if host.is_taken(page) {
                return Err("a page is reached that the host has taken back".to_owned());
            }
            let (found, expected) = (word.load(Ordering::Relaxed), &mut written[page as usize]);
            if found != *expected {
                return Err(format!("the word holds {found:#x}, {expected:#x} was stored last"));
            }
            if access == Access::Write {
                if behind.read_only {
                    return Err("a store to a read-only memslot goes through".to_owned());
                }
                *stores += 1;
                *expected = *stores;
                word.store(*stores, Ordering::Relaxed);
            }
            Ok(())
        };
        loop {
            if !gated {
                return cpu.access(access, gpa, compare);
            }
            if let Ok(_inside) = vcpu.enter(ground.vm) {
                return cpu.access(access, gpa, compare);
            }
        }
    }
}
