//! What the fibers of a run share, and what a fault costs there: the engine's own steps, and round them what a design
//! with a lock adds.
//!
//! Guest memory is addresses only: tables are real, pages are not.

use std::cell::{Cell, RefCell};

use slat::format::arm::{K4, Stage2};
use slat::{Gpa, GpaRange, Hpa, Lookup};
use slat_model::clock::{Cause, Serial, Shared, Time, Timed, advance};
use slat_vm::{Access, Fault, FaultKind, Host, HostError, HostPage, Hva, Vcpu, Vm};

use super::design::{Design, HostLock, Maintenance, MmuLock};
use super::profile::Faults;
use crate::random::Dice;
use crate::report::Counters;

pub(crate) const PAGE: u64 = 4096;
pub(crate) const BLOCK: u64 = 2 << 20;

pub(crate) type VirtualVm<'a> = Vm<'a, Stage2<K4>, Timed, Blocks<'a>>;

/// How long what only one can use at a time was in use.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Busy {
    /// The MMU lock of each region, or its cache line where it is shared.
    locks: Vec<Time>,
    /// The cache line of the host's memory-map lock.
    host_lock: Time,
    interconnect: Time,
    /// What clearing takes of memory's bandwidth.
    memory: Time,
}

impl Busy {
    /// Since `earlier`.
    pub(crate) fn since(&self, earlier: &Self) -> Self {
        let locks = self.locks.iter().zip(&earlier.locks);
        Self {
            locks: locks.map(|(now, earlier)| now.since(*earlier)).collect(),
            host_lock: self.host_lock.since(earlier.host_lock),
            interconnect: self.interconnect.since(earlier.interconnect),
            memory: self.memory.since(earlier.memory),
        }
    }

    /// Each with its name in a report, its name in words, and its time; of locks the one that was in use longest.
    pub(crate) fn resources(&self, design: &Design) -> [(&'static str, &'static str, Time); 4] {
        let lock = match design.lock {
            MmuLock::Shared => "the MMU lock's cache line",
            MmuLock::Exclusive | MmuLock::None => "the MMU lock",
        };
        let locked = self.locks.iter().copied().max().unwrap_or_default();
        [
            ("mmu_lock", lock, locked),
            ("host_lock", "the cache line of the host's memory-map lock", self.host_lock),
            ("interconnect", "the interconnect", self.interconnect),
            ("memory", "memory bandwidth", self.memory),
        ]
    }
}

/// What is done under a lock: the fault's work, reference counts, and caches.
type Work = [(Cause, Time); 3];

/// What all fibers share.
pub(crate) struct Ground<'a> {
    pub(crate) costs: &'a Faults,
    pub(crate) design: &'a Design,
    pub(crate) machine: &'a Timed,
    /// One, or one for each region.
    locks: Vec<Serial>,
    /// The cache line of the host's memory-map lock.
    host_lock: Serial,
    /// Which blocks of the host have been touched.
    touched: RefCell<Vec<bool>>,
    /// vCPUs that are in a pass.
    pub(crate) running: Cell<u32>,
    /// What vCPUs have counted themselves.
    pub(crate) counters: Cell<Counters>,
    /// How long memory has been cleared.
    cleared: Cell<Time>,
}

impl<'a> Ground<'a> {
    pub(crate) fn new(
        costs: &'a Faults,
        design: &'a Design,
        machine: &'a Timed,
        size: u64,
    ) -> Self {
        let locks = design.lock_region.map_or(1, |region| size.div_ceil(region.0));
        Self {
            costs,
            design,
            machine,
            locks: (0..locks).map(|_| Serial::new()).collect(),
            host_lock: Serial::new(),
            touched: RefCell::new(vec![false; size.div_ceil(BLOCK) as usize]),
            running: Cell::new(0),
            counters: Cell::default(),
            cleared: Cell::default(),
        }
    }

    /// Whether what the engine does is charged step by step, and not by the design.
    pub(crate) fn charges_steps(&self) -> bool {
        self.design.lock == MmuLock::None
    }

    /// How long what only one can use was in use until now.
    pub(crate) fn busy(&self) -> Busy {
        Busy {
            locks: self.locks.iter().map(Serial::busy).collect(),
            host_lock: self.host_lock.busy(),
            interconnect: self.machine.interconnect_busy(),
            memory: self.cleared.get(),
        }
    }

    /// A shared line is written by this CPU.
    fn write(&self, line: &Serial, wait: Cause, moves: Cause) {
        let transfer = self.costs.costs.transfer;
        line.occupy(wait, |Shared { moved, .. }| [(moves, if moved { transfer } else { Time(0) })]);
    }

    fn host_lock(&self) {
        if self.design.host_lock == HostLock::Kept {
            self.write(&self.host_lock, Cause::HostLockWait, Cause::HostLock);
        }
    }

    /// A large page of the host is allocated and cleared by its first touch. What was cleared before is written back
    /// meanwhile, so that every CPU of the pass takes its share of the bandwidth all the time.
    fn populate(&self, block: usize) {
        let mut touched = self.touched.borrow_mut();
        if touched.get_mut(block).is_some_and(|touched| !std::mem::replace(touched, true)) {
            let clear = self.costs.clear_2m;
            let others = u64::from(self.running.get().saturating_sub(1));
            advance(self.costs.populate_2m, Cause::PageAllocate);
            advance(clear, Cause::PageClear);
            advance(Time(clear.0 * others), Cause::PageWait);
            self.cleared.set(self.cleared.get().after(clear));
        }
    }

    fn lock(&self, gpa: Gpa) -> &Serial {
        let region = self.design.lock_region.map_or(0, |region| gpa.0 / region.0);
        &self.locks[region as usize % self.locks.len()]
    }

    /// Holds the lock alone for `work`, and longer where it came from another CPU.
    fn hold(&self, lock: &Serial, work: Work) {
        lock.occupy(Cause::LockWait, |Shared { ahead, .. }| {
            let hand_over = match ahead {
                0 => Time(0),
                1 => self.costs.handover_short,
                _ => self.costs.handover,
            };
            let [work, counts, caches] = work;
            [(Cause::HandOver, hand_over), work, counts, caches]
        });
    }

    /// Holds the lock with others: before and after, its line is written.
    fn share(&self, lock: &Serial, work: Work) {
        let writes = self.design.lock_writes;
        let write = || self.write(lock, Cause::LockWait, Cause::LockLine);
        (0..writes.div_ceil(2)).for_each(|_| write());
        work.into_iter().for_each(|(cause, time)| advance(time, cause));
        advance(self.costs.shared_extra, Cause::SharedExtra);
        (0..writes / 2).for_each(|_| write());
    }
}

/// The host: block after block, from physical address 4 GiB on.
pub(crate) struct Blocks<'a>(pub(crate) &'a Ground<'a>);

// SAFETY: virtual time is one thread's; the machine refuses others.
#[expect(unsafe_code, reason = "fibers of one thread share what is not for threads")]
unsafe impl Sync for Blocks<'_> {}

impl Host for Blocks<'_> {
    fn page(&self, hva: Hva, _: Access) -> Result<HostPage, HostError> {
        // A design with a lock has asked already.
        if self.0.charges_steps() {
            self.0.host_lock();
            self.0.populate((hva.0 / BLOCK) as usize);
            self.0.host_lock();
        }
        let output = Hpa((4 << 30) + (hva.0 & !(BLOCK - 1)));
        Ok(HostPage { output, size: BLOCK, writable: true, device: false })
    }
}

/// One vCPU and its part of guest memory.
pub(crate) struct Guest<'a> {
    pub(crate) vm: &'a VirtualVm<'a>,
    pub(crate) ground: &'a Ground<'a>,
    pub(crate) vcpu: Vcpu<'a, Timed>,
    pub(crate) part: GpaRange,
    pub(crate) dice: Dice,
}

impl Guest<'_> {
    /// Stores to each page once.
    pub(crate) fn pass(&mut self) -> Result<(), String> {
        let before = self.counters();
        let mut at = self.part.start().0;
        while at < self.part.end().0 {
            match self.look_up(Gpa(at)) {
                Some((end, true)) => {
                    let end = end.min(self.part.end().0);
                    let pages = (end - at) / PAGE;
                    advance(Time(self.ground.costs.guest_access.0 * pages), Cause::Guest);
                    at = end;
                }
                found => self.fault(Gpa(at), found.is_some())?,
            }
        }
        let counters = &self.ground.counters;
        counters.set(counters.get() + (self.counters() - before));
        Ok(())
    }

    fn counters(&self) -> Counters {
        let engine = crate::model::engine(&self.vcpu.participant().counters);
        Counters { faults: self.vcpu.statistics().faults, ..engine }
    }

    /// Where the leaf that covers `gpa` ends, and whether it lets a store through.
    fn look_up(&self, gpa: Gpa) -> Option<(u64, bool)> {
        let tree = self.vm.tree();
        let found = self.ground.machine.silently(|| {
            let pin = self.vcpu.participant().pin();
            tree.look_up(&pin, gpa)
        });
        match found {
            Ok(Lookup::Mapped { level, template, .. }) => {
                let end = (gpa.0 | (tree.geometry().size(level) - 1)) + 1;
                Some((end, tree.attributes(template).write))
            }
            _ => None,
        }
    }

    fn fault(&mut self, gpa: Gpa, mapped: bool) -> Result<(), String> {
        let ground = self.ground;
        let (mean, spread) = (ground.costs.outside.0, ground.costs.spread);
        let percent = 100 - spread + self.dice.below(2 * spread + 1);
        advance(Time(mean / 100 * percent), Cause::Outside);
        let kind = if mapped { FaultKind::Permission } else { FaultKind::Translation };
        let fault = Fault { gpa, access: Access::Write, kind };
        if ground.charges_steps() {
            advance(ground.costs.engine, Cause::Engine);
            return self.handle(fault);
        }
        // The kernel asks the host at each fault, also where the page is mapped.
        ground.host_lock();
        ground.populate((gpa.0 / BLOCK) as usize);
        ground.host_lock();
        self.lock_and_map(gpa, if mapped { Time(0) } else { ground.costs.maintain_2m });
        ground.machine.on_account(|| self.handle(fault))
    }

    fn handle(&mut self, fault: Fault) -> Result<(), String> {
        self.vcpu.fault(self.vm, fault).map(drop).map_err(|error| error.to_string())
    }

    /// What a design with a lock does under it, and the cleaning of caches.
    fn lock_and_map(&self, gpa: Gpa, clean: Time) {
        let Ground { costs, design, .. } = self.ground;
        let counts = Time(costs.costs.exchange.0 * u64::from(design.reference_counts));
        let under = design.maintenance == Maintenance::UnderLock;
        let work = [
            (Cause::LockWork, costs.lock_work),
            (Cause::References, counts),
            (Cause::Caches, if under { clean } else { Time(0) }),
        ];
        let lock = self.ground.lock(gpa);
        match design.lock {
            MmuLock::Exclusive => self.ground.hold(lock, work),
            _ => self.ground.share(lock, work),
        }
        if design.maintenance == Maintenance::Outside {
            advance(clean, Cause::Caches);
        }
    }
}
