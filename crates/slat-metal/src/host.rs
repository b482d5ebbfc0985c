//! The memory behind a guest: what `slat-vm` asks of an embedder.
#![expect(unsafe_code, reason = "looks at the words of guest memory")]

use core::ops::Range;
use core::sync::atomic::{AtomicU64, Ordering};

use slat::Hpa;
use slat_vm::{Access, Host, HostError, HostPage, Hva};

use crate::frames::Frames;
use crate::served::Served;

/// Host addresses from here on are host-physical ones: of what is no guest memory of the workload's. Below they are
/// offsets into that.
const IDENTITY: u64 = 1 << 62;

/// Memory of a guest, in pages that lie in descending order: no two neighbours make a larger page by chance.
pub(crate) struct Memory {
    first: Hpa,
    size: u64,
    /// Bytes of a page, a power of two.
    page: u64,
    /// Memory that is the guest's besides, and the image's part that runs there.
    private: [Range<u64>; 2],
    /// Who serves pages before guests get them, if anybody has to.
    pub(crate) served: Option<Served>,
}

impl Host for Memory {
    fn page(&self, hva: Hva, _access: Access) -> Result<HostPage, HostError> {
        if let Some(served) = &self.served {
            served.serve(self, hva);
        }
        self.present(hva).ok_or(HostError::NotMapped)
    }

    fn present(&self, hva: Hva) -> Option<HostPage> {
        let (output, size) = match hva.0.checked_sub(IDENTITY) {
            Some(hpa) => {
                let known = self.private.iter().any(|range| range.contains(&hpa));
                known.then_some((Hpa(hpa & !0xfff), 0x1000))?
            }
            None => (self.page_at(hva.0)?, self.page),
        };
        Some(HostPage { output, size, writable: true, device: false })
    }
}

impl Memory {
    /// `size` bytes in pages of `page` bytes; `private` is the guest's besides. `None`: there is not so much memory.
    pub(crate) fn new(
        frames: &Frames,
        (size, page): (u64, u64),
        private: [Range<u64>; 2],
        served: Option<Served>,
    ) -> Option<Self> {
        let size = size.next_multiple_of(page);
        let first = frames.guest_memory(size, page)?;
        Some(Self { first, size, page, private, served })
    }

    /// The host address of private memory.
    pub(crate) fn private(hpa: Hpa) -> Hva {
        Hva(IDENTITY + hpa.0)
    }

    /// Where the page at an offset begins.
    fn page_at(&self, offset: u64) -> Option<Hpa> {
        let from_end = (offset & !(self.page - 1)).checked_add(self.page)?;
        Some(Hpa(self.first.0 + self.size.checked_sub(from_end)?))
    }

    /// Where the byte at an offset is.
    pub(crate) fn output(&self, offset: u64) -> Option<Hpa> {
        Some(Hpa(self.page_at(offset)?.0 + (offset & (self.page - 1))))
    }

    /// The aligned word at an offset.
    pub(crate) fn word(&self, offset: u64) -> Option<&AtomicU64> {
        let at = self.output(offset & !7)?;
        // SAFETY: the memory is there, mapped one to one, for as long as the machine runs; everybody uses it by atomics, as
        // does whatever runs in the guest, as far as this program can tell.
        Some(unsafe { &*(at.0 as *const AtomicU64) })
    }

    /// The first word of a guest page.
    pub(crate) fn first_word(&self, page: u64) -> u64 {
        let word = self.word(page * slat_metal::program::PAGE);
        word.map_or(0, |word| word.load(Ordering::Relaxed))
    }
}
