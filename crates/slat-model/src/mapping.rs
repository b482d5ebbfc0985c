//! Where the model's memory really is: anonymous memory of this process, reserved whole, backed when it is touched.
#![expect(unsafe_code, reason = "makes references out of mapped memory")]

use std::io;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use memmap2::{Advice, MmapOptions, MmapRaw};

/// Words are 64 bits; hardware and guests access them whole.
const WORD: u64 = 8;

/// Mapped memory that is zero until it is written, reached as atomic words only. It stays mapped until it is dropped.
#[derive(Debug)]
pub(crate) struct Mapping {
    map: MmapRaw,
    /// Bytes from the start of `map` to the first aligned address.
    skip: usize,
    size: u64,
}

/// The page size that the operating system should use below a mapping.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Below {
    /// As it likes.
    Any,
    /// Base pages only.
    Small,
    /// Huge pages where it can.
    Huge,
}

impl Mapping {
    /// Reserves `size` bytes at an address aligned to `align`, a power of two.
    pub(crate) fn new(size: u64, align: u64, below: Below) -> io::Result<Self> {
        let too_large = || io::Error::from(io::ErrorKind::OutOfMemory);
        let total = size.checked_add(align).ok_or_else(too_large)?;
        let total = usize::try_from(total).map_err(|_| too_large())?;
        let map = MmapRaw::from(MmapOptions::new().len(total).no_reserve_swap().map_anon()?);
        let skip = map.as_ptr().align_offset(align as usize);
        // The operating system may not have huge pages; then it backs the memory with small ones.
        #[cfg(target_os = "linux")]
        let _ = match below {
            Below::Any => Ok(()),
            Below::Small => map.advise(Advice::NoHugePage),
            Below::Huge => map.advise(Advice::HugePage),
        };
        Ok(Self { map, skip, size })
    }

    /// Length in bytes.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// Where the byte at `offset` is; `None` beyond the end.
    #[inline(always)]
    pub(crate) fn pointer(&self, offset: u64) -> Option<NonNull<u8>> {
        if offset >= self.size {
            return None;
        }
        // SAFETY: `new` mapped `skip + size` bytes, `skip` at most `align`, and `offset` is below `size`.
        NonNull::new(unsafe { self.map.as_mut_ptr().add(self.skip + offset as usize) })
    }

    /// The word at `offset`, rounded down to a multiple of 8; `None` beyond the end.
    #[inline(always)]
    pub(crate) fn word(&self, offset: u64) -> Option<&AtomicU64> {
        let word = self.pointer(offset & !(WORD - 1))?.cast::<AtomicU64>();
        // SAFETY: eight mapped bytes, aligned since `offset` was rounded and `align` is at least 8, that live as long
        // as `self`, and that everybody reaches as atomics.
        Some(unsafe { word.as_ref() })
    }

    /// The words of `size` bytes from `offset`, both multiples of 8; `None` beyond the end.
    pub(crate) fn words(&self, offset: u64, size: u64) -> Option<&[AtomicU64]> {
        let end = offset.checked_add(size)?;
        if end > self.size || !offset.is_multiple_of(WORD) {
            return None;
        }
        let first = self.pointer(offset)?.cast::<AtomicU64>();
        // SAFETY: as in `word`, for each word of a range that lies inside the mapping.
        Some(unsafe { std::slice::from_raw_parts(first.as_ptr(), (size / WORD) as usize) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    #[test]
    fn memory_is_aligned_zero_and_ends_where_it_ends() {
        let memory = Mapping::new(1 << 20, 1 << 21, Below::Any).unwrap();
        assert_eq!(memory.pointer(0).unwrap().as_ptr() as usize % (1 << 21), 0);
        assert_eq!(memory.word((1 << 20) - 1).unwrap().load(Ordering::Relaxed), 0);
        assert!(memory.word(1 << 20).is_none());
        assert_eq!(memory.words(4096, 4096).unwrap().len(), 512);
        assert!(memory.words((1 << 20) - 8, 16).is_none());
    }
}
