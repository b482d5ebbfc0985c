//! What a host's KVM may have or not, by name.

use kvm_bindings as kvm;
use kvm_ioctls::Kvm;

use crate::failure::Failure;

/// A capability that slat uses, or that matters to who measures memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Capability {
    /// Without `KVM_CAP_`.
    name: &'static str,
    number: u32,
    /// What it is good for.
    pub(crate) what: &'static str,
}

macro_rules! capabilities {
    ($($name:ident = $number:ident, $what:literal;)*) => {
        $(pub(crate) const $name: Capability = Capability {
            name: stringify!($name),
            number: kvm::$number,
            what: $what,
        };)*

        /// All of them.
        pub(crate) const ALL: &[Capability] = &[$($name),*];
    };
}

capabilities! {
    MAX_VCPUS = KVM_CAP_MAX_VCPUS, "vCPUs of a VM at most";
    NR_MEMSLOTS = KVM_CAP_NR_MEMSLOTS, "memslots of an address space at most";
    MULTI_ADDRESS_SPACE = KVM_CAP_MULTI_ADDRESS_SPACE, "address spaces";
    USER_MEMORY = KVM_CAP_USER_MEMORY, "memslots of a process's memory";
    USER_MEMORY2 = KVM_CAP_USER_MEMORY2, "memslots with a part in guest_memfd";
    READONLY_MEM = KVM_CAP_READONLY_MEM, "read-only memslots";
    SYNC_MMU = KVM_CAP_SYNC_MMU, "guests follow what the host does to their memory";
    IMMEDIATE_EXIT = KVM_CAP_IMMEDIATE_EXIT, "a kick that is not lost before the guest is entered";
    MANUAL_DIRTY_LOG_PROTECT2 = KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2,
        "the dirty bitmap is cleared by request: 1; all set at first: 2";
    DIRTY_LOG_RING = KVM_CAP_DIRTY_LOG_RING, "dirty rings, bytes of each at most";
    DIRTY_LOG_RING_ACQ_REL = KVM_CAP_DIRTY_LOG_RING_ACQ_REL, "dirty rings with barriers, bytes of each at most";
    DIRTY_LOG_RING_WITH_BITMAP = KVM_CAP_DIRTY_LOG_RING_WITH_BITMAP, "and a bitmap beside them";
    PRE_FAULT_MEMORY = KVM_CAP_PRE_FAULT_MEMORY, "memory is mapped ahead by request";
    MEMORY_FAULT_INFO = KVM_CAP_MEMORY_FAULT_INFO, "a failed access says where";
    MEMORY_ATTRIBUTES = KVM_CAP_MEMORY_ATTRIBUTES, "private and shared pages";
    GUEST_MEMFD = KVM_CAP_GUEST_MEMFD, "memory that only the guest reaches";
    BINARY_STATS_FD = KVM_CAP_BINARY_STATS_FD, "statistics by descriptor";
    VM_DISABLE_NX_HUGE_PAGES = KVM_CAP_VM_DISABLE_NX_HUGE_PAGES, "a VM may leave NX huge pages out";
    DISABLE_QUIRKS2 = KVM_CAP_DISABLE_QUIRKS2, "quirks that can be left out, as bits";
    SYNC_REGS = KVM_CAP_SYNC_REGS, "registers in shared memory, as bits";
    VM_TYPES = KVM_CAP_VM_TYPES, "kinds of VMs, as bits";
}

impl Capability {
    pub(crate) fn name(self) -> String {
        format!("KVM_CAP_{}", self.name)
    }

    pub(crate) fn number(self) -> u32 {
        self.number
    }

    /// What the host says about it: 0 if it has it not.
    pub(crate) fn value(self, kvm: &Kvm) -> i32 {
        kvm.check_extension_raw(self.number.into()).max(0)
    }

    /// What the host says about it, for who cannot do without.
    ///
    /// # Errors
    /// [`Failure::Missing`].
    pub(crate) fn require(self, kvm: &Kvm) -> Result<i32, Failure> {
        match self.value(kvm) {
            0 => Err(Failure::Missing(format!(
                "this host's KVM has no {} (capability {}): {}",
                self.name(),
                self.number,
                self.what
            ))),
            value => Ok(value),
        }
    }
}
