//! What vCPUs do: load, store and fetch, and have their faults handled.

use slat::Machine;
use slat_vm::{Access, DirtyRing, Exit, Fault, FaultKind, Vcpu};

use crate::machine::Tables;
use crate::world::{PAGES, World, draw, gpa};

/// More exits than any access needs.
const PATIENCE: usize = 2_000;

/// A vCPU on a CPU of its own.
pub(crate) struct Guest<'v, 'm> {
    world: World<'v, 'm>,
    vcpu: Vcpu<'m, Tables>,
    cpu: usize,
}

impl<'v, 'm> Guest<'v, 'm> {
    pub(crate) fn new(world: World<'v, 'm>, cpu: usize) -> Self {
        Self { world, vcpu: world.vm.vcpu().unwrap(), cpu }
    }

    /// Its dirty ring.
    pub(crate) fn ring(&self) -> DirtyRing {
        self.vcpu.dirty_ring().unwrap()
    }

    /// Accesses drawn pages below `pages`, and sometimes its CPU walks ahead.
    pub(crate) fn run(&mut self, accesses: usize, pages: u64) {
        self.world.machine.run_cpu(self.cpu);
        for _ in 0..accesses {
            if draw(4) == 0 {
                self.world.machine.speculate(self.cpu, gpa(draw(pages)));
            }
            let access =
                [Access::Write, Access::Write, Access::Read, Access::Execute][draw(4) as usize];
            self.access(draw(pages), access);
        }
    }

    /// Accesses every page once.
    pub(crate) fn all(&mut self, access: Access) {
        self.world.machine.run_cpu(self.cpu);
        for page in 0..PAGES {
            self.access(page, access);
        }
    }

    /// One access, with faults handled until it goes through or has no memory.
    pub(crate) fn access(&mut self, page: u64, access: Access) {
        let (world, cpu) = (self.world, self.cpu);
        let (changes, behind) = {
            let truth = world.truth();
            (truth.changes(page), truth.behind(page))
        };
        for _ in 0..PATIENCE {
            let through = |output| world.reach(page, output, access);
            let done = match access {
                Access::Execute => world.machine.fetch(cpu, gpa(page), through),
                _ => world.machine.access(cpu, gpa(page), access == Access::Write, through),
            };
            if done {
                return;
            }
            let fault = Fault { gpa: gpa(page), access, kind: FaultKind::Translation };
            match self.vcpu.fault(world.vm, fault).unwrap() {
                Exit::Resume => {}
                Exit::Retry => world.machine.relax(),
                Exit::Mmio(exit) => {
                    let changed = changes % 2 == 1 || world.truth().changes(page) != changes;
                    let read_only = behind.is_some_and(|behind| behind.read_only);
                    let refused = exit.slot.is_some() && read_only && access == Access::Write;
                    let expected = refused || behind.is_none() && exit.slot.is_none();
                    return world.expect(changed || expected, "memory is taken for a device");
                }
                // Whoever collects goes on until this vCPU is through.
                Exit::DirtyRingFull => {
                    while self.vcpu.is_ring_full() {
                        world.machine.relax();
                    }
                }
                exit => return world.expect(false, &format!("a guest gets {exit:?}")),
            }
        }
        world.expect(false, "a page faults for ever");
    }
}
