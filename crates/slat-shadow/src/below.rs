//! [`slat_vm::Vm`] as the second level of a guest that is shadowed.

use core::sync::atomic::{AtomicU64, Ordering};

use slat::{Format, Gpa, Hpa, Machine, Memory, Participant};
use slat_vm::{Host, Mapping, Vm};

use crate::guest::{Below, GuestMemory, Missing};

/// Reaches the host's memory by physical address.
pub trait HostBytes {
    /// The eight bytes at `hpa`, a multiple of eight, of a page that the host gave to a guest.
    fn word(&self, hpa: Hpa) -> Option<&AtomicU64>;
    /// Removes every translation that shadow tables made from all CPUs of the guest: [`GuestMemory::flush`].
    fn flush(&self);
}

/// The memory of a [`Vm`], address space 0, as what lies below a shadow.
///
/// The trees of the VM are walked by no hardware; they say what the guest has, for the shadow to be composed with. So
/// all that `slat-vm` promises about slots, host invalidation and dirty logs (bitmap or ring) holds for the shadowed guest,
/// if each operation that takes something away there is followed by its namesake here:
///
/// | after | call |
/// |---|---|
/// | [`Vm::invalidate_begin`] | [`Shadow::zap`](crate::Shadow::zap) of the same range, before the host goes on |
/// | [`Vm::enable_log`] | [`Shadow::write_protect`](crate::Shadow::write_protect) of the slot |
/// | [`Vm::dirty_log`] that protects, [`Vm::clear_dirty_log`] | [`Shadow::write_protect_pages`](crate::Shadow::write_protect_pages) with its bitmap, before it is used |
/// | [`Vm::reset_dirty_ring`] | [`Shadow::write_protect`](crate::Shadow::write_protect) of the pages that were harvested |
/// | [`Vm::delete_slot`], [`Vm::change_slot`] | [`Shadow::delete_slot`](crate::Shadow::delete_slot) of the old range |
/// | [`Vm::clear_young`] | [`Shadow::clear_young`](crate::Shadow::clear_young); young is what either says |
///
/// The format of the VM must keep no dirty state in hardware ([`LogMode::Hardware`](slat_vm::LogMode)): no hardware looks
/// at it.
#[derive(Debug)]
pub struct VmMemory<'a, 'm, F: Format, M: Machine, H: Host, B> {
    /// The guest's memory.
    pub vm: &'a Vm<'m, F, M, H>,
    /// The caller's, on the machine of the VM.
    pub who: &'a Participant<'m, M>,
    /// The host's memory.
    pub bytes: &'a B,
}

impl<F: Format, M: Machine, H: Host, B: HostBytes> VmMemory<'_, '_, F, M, H, B> {
    fn with<T>(&self, gpa: Gpa, f: impl Fn(&AtomicU64, bool) -> Option<T>) -> Result<T, Missing> {
        let look = |hpa, writable| self.bytes.word(hpa).and_then(|word| f(word, writable));
        self.vm.look_up(self.who, gpa, look).ok().flatten().ok_or(Missing)
    }
}

impl<F: Format, M: Machine, H: Host, B: HostBytes> GuestMemory for VmMemory<'_, '_, F, M, H, B> {
    fn below(&self, gpa: Gpa) -> Option<Below> {
        // Whatever is in the middle of a change is not there: its fault of the second level is tried again.
        let Mapping { output, size, attributes } = self.vm.mapping(self.who, 0, gpa).ok()?;
        let device = attributes.memory != Memory::Normal;
        Some(Below { output, size, writable: attributes.write, device })
    }

    fn read(&self, gpa: Gpa) -> Result<u64, Missing> {
        // Acquire: what the guest wrote before it made the entry is seen with it.
        self.with(gpa, |word, _| Some(word.load(Ordering::Acquire)))
    }

    fn exchange(&self, gpa: Gpa, old: u64, new: u64) -> Result<bool, Missing> {
        self.with(gpa, |word, writable| {
            writable.then(|| {
                word.compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire).is_ok()
            })
        })
    }

    fn flush(&self) {
        self.bytes.flush();
    }
}
