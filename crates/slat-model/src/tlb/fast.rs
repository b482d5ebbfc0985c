//! The translations used last, found with one comparison: which byte of host memory is behind a 4 KiB frame.

use crate::descriptor::Permissions;
use crate::physical::Place;

const SLOTS: usize = 1024;
/// Frames here are 4 KiB whatever the granule is: host memory of base pages is not contiguous beyond.
pub(crate) const FRAME_SHIFT: u32 = 12;
const VALID: u64 = 1 << 63;
const VMID_SHIFT: u32 = 40;
const MEMORY_SHIFT: u32 = 54;
const OFFSET: u64 = (1 << MEMORY_SHIFT) - (1 << FRAME_SHIFT);

/// A direct-mapped cache in front of a TLB. It holds nothing that the TLB does not hold.
#[derive(Debug)]
pub(crate) struct Fast {
    slots: Box<[Slot; SLOTS]>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    tag: u64,
    /// Memory number, offset of the frame, permissions.
    place: u64,
}

impl Default for Fast {
    fn default() -> Self {
        Self { slots: Box::new([Slot::default(); SLOTS]) }
    }
}

#[inline(always)]
fn tag(vmid: u16, gpa: u64) -> u64 {
    VALID | u64::from(vmid) << VMID_SHIFT | gpa >> FRAME_SHIFT
}

#[inline(always)]
fn index(gpa: u64) -> usize {
    (gpa >> FRAME_SHIFT) as usize % SLOTS
}

impl Fast {
    /// Where the frame of `gpa` (below 2^52) is, if all of `needed` is permitted.
    #[inline(always)]
    pub(crate) fn find(&self, vmid: u16, gpa: u64, needed: Permissions) -> Option<Place> {
        let slot = &self.slots[index(gpa)];
        let hit = slot.tag == tag(vmid, gpa) && slot.place as u8 & needed.bits() == needed.bits();
        let inside = gpa & ((1 << FRAME_SHIFT) - 1);
        hit.then_some(Place {
            memory: (slot.place >> MEMORY_SHIFT) as u16,
            offset: slot.place & OFFSET | inside,
        })
    }

    /// Remembers where the frame of `gpa` is.
    #[inline]
    pub(crate) fn remember(&mut self, vmid: u16, gpa: u64, at: Place, permissions: Permissions) {
        let place = u64::from(at.memory) << MEMORY_SHIFT | at.offset & OFFSET;
        let place = place | u64::from(permissions.bits());
        self.slots[index(gpa)] = Slot { tag: tag(vmid, gpa), place };
    }

    /// Forgets the frames of `size` bytes from `start`.
    pub(crate) fn forget(&mut self, vmid: u16, start: u64, size: u64) {
        if size >> FRAME_SHIFT >= SLOTS as u64 {
            return self.forget_all();
        }
        for gpa in (start..start + size).step_by(1 << FRAME_SHIFT) {
            let slot = &mut self.slots[index(gpa)];
            if slot.tag == tag(vmid, gpa) {
                *slot = Slot::default();
            }
        }
    }

    /// Forgets everything.
    pub(crate) fn forget_all(&mut self) {
        self.slots.fill(Slot::default());
    }
}
