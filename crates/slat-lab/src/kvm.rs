//! What it takes to run a workload on this computer's own KVM.

use kvm_bindings::KVM_MAX_CPUID_ENTRIES;

use crate::guest_mode::GuestMode;

use crate::failure::Failure;
use crate::options::MachineOptions;

pub(crate) mod capability;
pub(crate) mod crew;
mod files;
mod host;
mod info;
pub(crate) mod interrupt;
pub(crate) mod ioctl;
pub(crate) mod memory;
mod paging;
pub(crate) mod program;
pub(crate) mod ring;
pub(crate) mod stage;
pub(crate) mod stats;
mod system;
pub(crate) mod userfault;
pub(crate) mod vcpu;
pub(crate) mod vm;

pub(crate) use host::facts;
pub(crate) use info::print as print_info;
pub(crate) use kvm_ioctls::{Error, Kvm};

/// Opens this host's KVM for a workload; the machine is the host's. From here on, who asks for the end is heard.
///
/// # Errors
/// [`Failure::Usage`]: something was asked for that cannot be chosen on a host. [`Failure::Missing`]: no KVM here.
pub(crate) fn open(machine: &MachineOptions) -> Result<(Kvm, MachineOptions), Failure> {
    // What makes no sense anywhere needs no host to be refused.
    machine.of_host(0)?;
    let kvm = system::open()?;
    interrupt::watch()?;
    let cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES);
    let cpuid = cpuid.map_err(|error| vm::broken("what CPUs it can have", error))?;
    let machine = machine.of_host(vm::address_bits(&cpuid))?;
    Ok((kvm, machine))
}

/// Refuses guests with other pages than those of x86.
///
/// # Errors
/// [`Failure::Usage`].
pub(crate) fn check_mode(mode: GuestMode) -> Result<(), Failure> {
    if mode.page_size.0 == paging::PAGE {
        return Ok(());
    }
    let why = "--backend kvm: guests on x86 have pages of 4K";
    Err(Failure::Usage(format!("-m {}: {why}", mode.name)))
}
