//! What is behind the guest's addresses: memory that was set aside for it, and the registers of its devices.
#![expect(
    unsafe_code,
    reason = "memory that a guest uses too, which no Rust reference may point to"
)]

use alloc::vec::Vec;
use core::ops::Range;
use core::slice;
use core::sync::atomic::{AtomicU64, Ordering};

use slat::Hpa;
use slat_vm::{Access, Host, HostError, HostPage, Hva};

use crate::frames::Frames;

/// Bytes of a page.
pub(super) const PAGE: u64 = 4096;
const WORDS: u64 = PAGE / 8;

/// The host of one guest. Its addresses are host-physical ones.
#[derive(Debug)]
pub(super) struct Memory {
    /// Aligned to `page`, at both ends.
    ram: Range<u64>,
    /// Bytes of a page that it gives.
    page: u64,
    devices: Vec<Range<u64>>,
}

impl Memory {
    /// # Safety
    /// Nobody uses `ram` but the guest that this is for, and who calls [`words`](Self::words); both are mapped.
    pub(super) unsafe fn new(ram: Range<u64>, page: u64, devices: Vec<Range<u64>>) -> Self {
        Self { ram, page, devices }
    }

    pub(super) fn ram(&self) -> Range<u64> {
        self.ram.clone()
    }

    pub(super) fn pages(&self) -> u64 {
        (self.ram.end - self.ram.start) / PAGE
    }

    /// Puts bytes at an offset of the guest's memory, before it runs.
    pub(super) fn load(&self, offset: u64, bytes: &[u8]) -> Result<(), &'static str> {
        let room = (self.ram.end - self.ram.start).checked_sub(offset).ok_or("bytes: too few")?;
        if bytes.len() as u64 > room {
            return Err("bytes: too few");
        }
        // SAFETY: it is in the guest's memory, which nobody uses yet.
        unsafe { ((self.ram.start + offset) as *mut u8).copy_from(bytes.as_ptr(), bytes.len()) }
        Ok(())
    }

    /// The words of a page, which the guest may write meanwhile.
    pub(super) fn words(&self, page: u64) -> &[AtomicU64] {
        let first = self.ram.start + page.min(self.pages() - 1) * PAGE;
        // SAFETY: it is in the guest's memory, all of which is mapped, and looked at as atomics only.
        unsafe { slice::from_raw_parts(first as *const AtomicU64, WORDS as usize) }
    }
}

impl Host for Memory {
    fn page(&self, hva: Hva, _: Access) -> Result<HostPage, HostError> {
        let (size, device) = match hva.0 {
            address if self.ram.contains(&address) => (self.page, false),
            address if self.devices.iter().any(|device| device.contains(&address)) => (PAGE, true),
            _ => return Err(HostError::NotMapped),
        };
        Ok(HostPage { output: Hpa(hva.0 & !(size - 1)), size, writable: true, device })
    }

    fn present(&self, hva: Hva) -> Option<HostPage> {
        self.page(hva, Access::Read).ok().filter(|page| !page.device)
    }
}

/// A copy of the guest's memory, as a migration makes it.
pub(super) struct Copy {
    first: Hpa,
    pages: u64,
}

impl Copy {
    /// Takes as much memory as the guest has; `None` if there is not so much.
    pub(super) fn new(frames: &Frames, memory: &Memory) -> Option<Self> {
        let pages = memory.pages();
        Some(Self { first: frames.guest_memory(pages * PAGE, PAGE)?, pages })
    }

    fn words(&mut self, page: u64) -> &mut [u64] {
        let first = self.first.0 + page.min(self.pages - 1) * PAGE;
        // SAFETY: it is in the memory that was taken for the copy, which nobody else uses.
        unsafe { slice::from_raw_parts_mut(first as *mut u64, WORDS as usize) }
    }

    /// Copies a page.
    pub(super) fn take(&mut self, memory: &Memory, page: u64) {
        for (copy, word) in self.words(page).iter_mut().zip(memory.words(page)) {
            *copy = word.load(Ordering::Relaxed);
        }
    }

    /// Whether a page is as it was copied.
    pub(super) fn holds(&mut self, memory: &Memory, page: u64) -> bool {
        let words = self.words(page).iter().zip(memory.words(page));
        words.into_iter().all(|(copy, word)| *copy == word.load(Ordering::Relaxed))
    }
}
