//! What a VM is: memslots, the guest's program and tables in memory of their own, and vCPUs that begin at that program.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use kvm_bindings::{
    CpuId, KVM_MAX_CPUID_ENTRIES, KVM_MEM_LOG_DIRTY_PAGES, kvm_enable_cap,
    kvm_userspace_memory_region,
};
use kvm_ioctls::{Kvm, VmFd};

use super::memory::Memory;
use super::paging::{self, Mapping, PAGE};
use super::program::{self, PARAMETERS, Parameters};
use super::ring::Ring;
use super::vcpu::{Addresses, Vcpu};
use super::{capability, files, interrupt, ioctl};
use crate::failure::Failure;
use crate::guest::MAX_CHECKED_PAGES;
use crate::layout::Layout;
use crate::pinning::Pinning;
use crate::random::Dice;

/// Where the guest sees program and parameters.
const SYSTEM_VA: u64 = 1 << 39;
/// The task-state segment, in which the CPU looks up which ports a program may use, after the page of the program.
const TASK: u64 = PAGE;
/// Where it says where the bits of ports are, and where they are: all zero, so that none is forbidden.
const PORTS_FIELD: u64 = 102;
const PORTS: u16 = 104;
/// The parameters of vCPU 0.
const FIRST_PARAMETERS: u64 = 2 * PAGE;
/// Where it sees its memory, or less than a GiB above.
const MEMORY_VA: u64 = 1 << 40;
const GIB: u64 = 1 << 30;
/// The leaf of CPUID that tells, by a bit of edx, whether there are pages of 1G.
const FEATURES: u32 = 0x8000_0001;
const HUGE_PAGES: u32 = 26;
/// The leaf that tells the width of addresses.
const ADDRESS_SIZES: u32 = 0x8000_0008;
/// The memslot of program and tables; those of workloads come after it.
const SYSTEM_SLOT: u32 = 0;
const FIRST_SLOT: u32 = 1;

/// What a workload wants of its VM.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) vcpus: u32,
    /// Guest-physical memory that the guest reaches, in pages of a size; the first begins with page 0.
    pub(crate) memory: Vec<Reach>,
    /// Entries of each vCPU's dirty ring.
    pub(crate) dirty_ring: Option<u32>,
    /// The dirty bitmap is cleared by request, and all set at first.
    pub(crate) manual_protect: bool,
    pub(crate) seed: u64,
    pub(crate) pinning: Option<Pinning>,
}

impl Plan {
    /// vCPUs on one stretch of memory, without logs.
    pub(crate) fn new(vcpus: u32, memory: Reach) -> Self {
        Self {
            vcpus,
            memory: vec![memory],
            dirty_ring: None,
            manual_protect: false,
            seed: 0,
            pinning: None,
        }
    }
}

/// A part of guest-physical memory that the guest reaches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Reach {
    pub(crate) gpa: u64,
    pub(crate) size: u64,
    /// The guest's pages: 4K, 2M or 1G; where its CPU has none of 1G, they have 2M.
    pub(crate) page: u64,
}

impl Reach {
    /// All memory of a layout, in its guest's pages.
    pub(crate) fn of(layout: &Layout) -> Self {
        Self { gpa: layout.gpa, size: layout.size, page: layout.guest_page }
    }
}

/// A memslot. Numbers begin at 0.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slot<'a> {
    pub(crate) id: u32,
    pub(crate) gpa: u64,
    pub(crate) size: u64,
    pub(crate) memory: &'a Memory,
    /// Where it begins in `memory`.
    pub(crate) offset: u64,
    pub(crate) logged: bool,
}

/// A VM. Its vCPUs are made with it, and given away once.
#[derive(Debug)]
pub(crate) struct Vm {
    fd: VmFd,
    system: Arc<Memory>,
    /// What is to be added to a guest-physical address for the guest's virtual one.
    distance: u64,
    cpuid: CpuId,
    plan: Plan,
    system_gpa: u64,
}

impl Vm {
    /// A VM without vCPUs and without memslots but that of the guest's program.
    ///
    /// # Errors
    /// [`Failure::Missing`]: the host has not what the plan needs. [`Failure::Run`].
    pub(crate) fn new(kvm: &Kvm, plan: Plan) -> Result<Self, Failure> {
        let most = capability::MAX_VCPUS.require(kvm)?;
        if i64::from(plan.vcpus) > i64::from(most) {
            let why = format!("{} vCPUs: this host's KVM has {most} at most", plan.vcpus);
            return Err(Failure::Missing(why));
        }
        capability::IMMEDIATE_EXIT.require(kvm)?;
        files::allow(plan.vcpus)?;
        let cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES);
        let cpuid = cpuid.map_err(|error| broken("what CPUs it can have", error))?;
        let fd = kvm.create_vm().map_err(|error| broken("a VM", error))?;
        let low = plan.memory.iter().map(|reach| reach.gpa).min().unwrap_or(0);
        let high = plan.memory.iter().map(|reach| reach.gpa + reach.size).max().unwrap_or(0);
        let distance = MEMORY_VA.wrapping_sub(low - low % GIB);
        let parameters = u64::from(plan.vcpus) * PARAMETERS;
        let seen = FIRST_PARAMETERS + parameters;
        let system_va = Mapping { va: SYSTEM_VA, gpa: 0, size: seen, page: PAGE };
        let mut mappings = vec![system_va];
        let largest = largest_page(&cpuid);
        mappings.extend(plan.memory.iter().map(|&Reach { gpa, size, page }| Mapping {
            va: gpa.wrapping_add(distance),
            gpa,
            size,
            page: page.min(largest),
        }));
        let tables = seen;
        let size = tables + paging::tables(&mappings) * PAGE;
        // Below the guest's memory, or else above it.
        let system_gpa = if size <= low { 0 } else { high.next_multiple_of(PAGE) };
        let width = address_bits(&cpuid);
        if (system_gpa + size) >> width != 0 {
            return Err(Failure::Usage(format!(
                "guest memory from {low:#x} to {high:#x}: {size} bytes for the guest's program and page tables fit \
                 neither below nor above it, with {width}-bit guest-physical addresses"
            )));
        }
        mappings[0].gpa = system_gpa;
        let system = Arc::new(Memory::plain(size)?);
        system.write(0, program::code());
        system.write(TASK + PORTS_FIELD, &PORTS.to_le_bytes());
        paging::write(&system, system_gpa, tables, &mappings);
        let vm = Self { fd, system, distance, cpuid, plan, system_gpa };
        vm.enable_logs(kvm)?;
        let (gpa, memory) = (system_gpa, &*vm.system);
        let slot = Slot { id: 0, gpa, size, memory, offset: 0, logged: false };
        let refused = |error| Failure::Run(format!("the memslot of the guest's program: {error}"));
        vm.set_region(SYSTEM_SLOT, slot).map_err(refused)?;
        Ok(vm)
    }

    /// Chooses the kinds of logs, which must be done before anything else.
    fn enable_logs(&self, kvm: &Kvm) -> Result<(), Failure> {
        if self.plan.manual_protect {
            let protect = capability::MANUAL_DIRTY_LOG_PROTECT2;
            // With all bits set at first where the host has that.
            let how = protect.require(kvm)?.unsigned_abs() & 3;
            self.enable(protect.number(), how.into()).map_err(|e| broken(&protect.name(), e))?;
        }
        if let Some(entries) = self.plan.dirty_ring {
            let ring = Ring::capability(kvm)?;
            let most = ring.require(kvm)?.unsigned_abs() / Ring::ENTRY;
            if entries > most {
                let why = format!(
                    "--ring {entries}: this host's dirty rings have {most} entries at most"
                );
                return Err(Failure::Missing(why));
            }
            let bytes = u64::from(entries) * u64::from(Ring::ENTRY);
            self.enable(ring.number(), bytes).map_err(|e| broken(&ring.name(), e))?;
        }
        Ok(())
    }

    fn enable(&self, capability: u32, argument: u64) -> Result<(), kvm_ioctls::Error> {
        let args = [argument, 0, 0, 0];
        self.fd.enable_cap(&kvm_enable_cap { cap: capability, args, ..Default::default() })
    }

    /// The vCPUs, each of which has reported that it waits for an order.
    ///
    /// # Errors
    /// [`Failure::Run`].
    pub(crate) fn vcpus(&self) -> Result<Vec<Vcpu>, Failure> {
        (0..self.plan.vcpus).map(|index| self.vcpu(index)).collect()
    }

    fn vcpu(&self, index: u32) -> Result<Vcpu, Failure> {
        interrupt::check()?;
        let at = FIRST_PARAMETERS + u64::from(index) * PARAMETERS;
        let parameters: &Parameters = self.system.view(at);
        let first = self.plan.memory.first().map_or(0, |reach| reach.gpa);
        parameters.base.store(first.wrapping_add(self.distance), Ordering::Relaxed);
        // Tags lie above the bits of a page's number, and those of vCPUs are never the same.
        let step = u64::from(self.plan.vcpus) * MAX_CHECKED_PAGES;
        parameters.tag.store(u64::from(index) * MAX_CHECKED_PAGES, Ordering::Relaxed);
        parameters.tag_step.store(step, Ordering::Relaxed);
        let dice = Dice::new(self.plan.seed, index).below(u64::MAX) | 1;
        parameters.dice.store(dice, Ordering::Relaxed);
        let fd = self.fd.create_vcpu(index.into()).map_err(|error| broken("a vCPU", error))?;
        let mut vcpu = Vcpu::new(fd, (Arc::clone(&self.system), at), self.distance);
        let root = self.system_gpa + FIRST_PARAMETERS + u64::from(self.plan.vcpus) * PARAMETERS;
        let addresses =
            Addresses { root, code: SYSTEM_VA, task: SYSTEM_VA + TASK, parameters: SYSTEM_VA + at };
        vcpu.set_up(&self.cpuid, addresses)
            .map_err(|error| broken("the registers of a vCPU", error))?;
        vcpu.boot().map_err(|why| Failure::Run(format!("vCPU {index}: {why}")))?;
        Ok(vcpu)
    }

    pub(crate) fn fd(&self) -> &VmFd {
        &self.fd
    }

    /// Creates or changes a memslot, or deletes it if its size is 0.
    ///
    /// # Errors
    /// [`Failure::Run`]; somebody asked for the end, too.
    pub(crate) fn set_slot(&self, slot: Slot<'_>) -> Result<(), Failure> {
        interrupt::check()?;
        let id = slot.id;
        self.set_region(FIRST_SLOT + id, slot)
            .map_err(|error| Failure::Run(format!("memslot {id}: {error}")))
    }

    /// Creates all memslots of a layout, or changes whether they are logged.
    ///
    /// # Errors
    /// [`Failure::Run`].
    pub(crate) fn set_slots(
        &self,
        layout: &Layout,
        memory: &Memory,
        logged: bool,
    ) -> Result<(), Failure> {
        let size = layout.slot_size();
        (0..layout.slots).try_for_each(|id| {
            let offset = u64::from(id) * size;
            self.set_slot(Slot { id, gpa: layout.gpa + offset, size, memory, offset, logged })
        })
    }

    /// Reads the bitmap of a slot of so many pages; without manual protect it is cleared with that.
    ///
    /// # Errors
    /// [`Failure::Run`].
    pub(crate) fn dirty_log(&self, id: u32, pages: u64, bitmap: &mut [u64]) -> Result<(), Failure> {
        ioctl::get_dirty_log(&self.fd, FIRST_SLOT + id, pages, bitmap)
            .map_err(|error| of_log(id, &error))
    }

    /// Clears, and protects the pages of, the bits that are set.
    ///
    /// # Errors
    /// [`Failure::Run`].
    pub(crate) fn clear_dirty_log(
        &self,
        id: u32,
        pages: u64,
        bitmap: &[u64],
    ) -> Result<(), Failure> {
        // One call takes a number of pages of 32 bits, a multiple of 64.
        for first in (0..pages).step_by(1 << 31) {
            let count = (pages - first).min(1 << 31) as u32;
            let part = &bitmap[(first / 64) as usize..];
            ioctl::clear_dirty_log(&self.fd, FIRST_SLOT + id, (first, count), part)
                .map_err(|error| of_log(id, &error))?;
        }
        Ok(())
    }

    /// Takes everything out of a ring: the memslot and a page of it, each time. How many there were.
    pub(crate) fn harvest(ring: &mut Ring, mut taken: impl FnMut(u32, u64)) -> u64 {
        ring.harvest(|slot, page| taken(slot.wrapping_sub(FIRST_SLOT), page))
    }

    /// Protects the pages that were taken out of rings; how many entries are free again.
    ///
    /// # Errors
    /// [`Failure::Run`].
    pub(crate) fn reset_rings(&self) -> Result<u64, Failure> {
        ioctl::reset_dirty_rings(&self.fd)
            .map_err(|error| Failure::Run(format!("resetting dirty rings: {error}")))
    }

    #[expect(unsafe_code, reason = "gives memory to a guest")]
    fn set_region(&self, number: u32, slot: Slot<'_>) -> io::Result<()> {
        let Slot { gpa, size, memory, offset, logged, .. } = slot;
        assert!(offset.checked_add(size).is_some_and(|end| end <= memory.size()), "memory of ours");
        let region = kvm_userspace_memory_region {
            slot: number,
            flags: if logged { KVM_MEM_LOG_DIRTY_PAGES } else { 0 },
            guest_phys_addr: gpa,
            memory_size: size,
            userspace_addr: memory.address() + offset,
        };
        // SAFETY: the slot is memory that others only reach as atomics. KVM goes by this process's mappings, so after
        // they are gone the guest reaches nothing there; and it runs no longer, since its vCPUs end before.
        unsafe { self.fd.set_user_memory_region(region) }.map_err(io::Error::from)
    }
}

fn of_log(id: u32, error: &io::Error) -> Failure {
    Failure::Run(format!("the dirty log of memslot {id}: {error}"))
}

/// The width of guest-physical addresses.
pub(crate) fn address_bits(cpuid: &CpuId) -> u32 {
    let leaf = cpuid.as_slice().iter().find(|entry| entry.function == ADDRESS_SIZES);
    leaf.map_or(36, |leaf| leaf.eax & 0xff)
}

/// Bytes of the largest pages that the guest's CPU knows.
fn largest_page(cpuid: &CpuId) -> u64 {
    let leaf = cpuid.as_slice().iter().find(|entry| entry.function == FEATURES);
    let huge = leaf.is_some_and(|leaf| leaf.edx >> HUGE_PAGES & 1 == 1);
    if huge { GIB } else { 2 << 20 }
}

/// Whether a VM can have so many memslots beside that of the guest's program.
///
/// # Errors
/// [`Failure::Missing`].
pub(crate) fn check_slots(kvm: &Kvm, slots: u32) -> Result<(), Failure> {
    let limit = capability::NR_MEMSLOTS;
    let most = limit.require(kvm)?.unsigned_abs();
    if slots.saturating_add(FIRST_SLOT) <= most {
        return Ok(());
    }
    Err(Failure::Missing(format!(
        "{slots} memslots, and one for the guest's program: this host's KVM has {most} at most, {} (capability {})",
        limit.name(),
        limit.number()
    )))
}

pub(crate) fn broken(what: &str, error: kvm_ioctls::Error) -> Failure {
    Failure::Run(format!("KVM refuses {what}: {}", io::Error::from(error)))
}
