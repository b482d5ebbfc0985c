//! What a guest does while slots change: it uses its own memory, and if it is told where, the slot that comes and goes.

use slat_vm::{Access, Exit, Mmio};

use crate::arch::Tables;
use crate::crew::{Guest, RunOn};
use crate::guest::{GuestMemory, Pass, Program, Watch};
use crate::model::{Broken, ModelVcpu};

/// A program, and what became of its stores into the slot.
#[derive(Debug)]
pub(super) struct Intruder {
    pub(super) program: Program,
    /// Where the slot is when it is there; `None` to leave it alone.
    slot: Option<u64>,
    /// Different for each store of this guest.
    next: u64,
    pub(super) landed: u64,
    pub(super) exits: u64,
}

impl Intruder {
    pub(super) fn new(program: Program, slot: Option<u64>) -> Self {
        Self { program, slot, next: 0, landed: 0, exits: 0 }
    }

    fn intrude<T: Tables>(
        &mut self,
        vcpu: &mut ModelVcpu<'_, '_, T>,
        gpa: u64,
    ) -> Result<(), Broken> {
        self.next += 1;
        match vcpu.store(gpa, self.next) {
            Ok(()) => self.landed += 1,
            Err(Broken::Exit(Exit::Mmio(Mmio { access: Access::Write, slot: None, .. }))) => {
                self.exits += 1;
            }
            Err(broken) => return Err(broken),
        }
        Ok(())
    }

    fn run_until<T: Tables>(
        &mut self,
        vcpu: &mut ModelVcpu<'_, '_, T>,
        pass: Pass,
        watch: Watch<'_>,
    ) -> Result<(), Broken> {
        let Some(slot) = self.slot else { return self.program.run_until(vcpu, pass, watch) };
        let mut at = 0;
        while !watch.stopped() {
            at = self.program.step(vcpu, pass, at)?;
            self.intrude(vcpu, slot)?;
            watch.beat();
        }
        Ok(())
    }
}

impl Guest for Intruder {
    type Order = Pass;

    fn accesses(&self) -> u64 {
        self.program.pages()
    }
}

impl<T: Tables> RunOn<ModelVcpu<'_, '_, T>> for Intruder {
    fn run(
        &mut self,
        vcpu: &mut ModelVcpu<'_, '_, T>,
        pass: Pass,
        watch: Watch<'_>,
    ) -> Result<(), String> {
        self.run_until(vcpu, pass, watch).map_err(|broken| broken.to_string())
    }
}
