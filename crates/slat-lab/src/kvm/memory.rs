//! Where guest memory comes from on a real host: mappings of this process, of the backing that was asked for.

use std::ffi::CStr;
use std::fs;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::AtomicU64;

use libc::c_int;

use crate::backing::{Backing, Pages};
use crate::contents::Words;
use crate::failure::Failure;
use crate::granule::GranuleSize;
use crate::size::Size;

/// Guest memory begins at a multiple of this, so that a transparent huge page of the host can be one of the guest's.
const HUGE: u64 = 2 << 20;
/// The size of hugetlb pages that this file counts.
const DEFAULT_HUGETLB: u64 = 2 << 20;
const NAME: &CStr = c"slat";

/// Memory of this process that a guest may have. Everybody reaches it as atomics.
#[derive(Debug)]
pub(crate) struct Memory {
    /// All of the mapping.
    map: NonNull<u8>,
    length: usize,
    /// Bytes of it before the memory.
    skip: usize,
    size: u64,
    /// What is mapped, if it is shared memory.
    file: Option<OwnedFd>,
}

// SAFETY: the mapping belongs to this value wherever that goes.
#[expect(unsafe_code, reason = "a raw pointer to a mapping")]
unsafe impl Send for Memory {}
// SAFETY: what is in it is only reached as atomics, or by system calls.
#[expect(unsafe_code, reason = "a raw pointer to a mapping")]
unsafe impl Sync for Memory {}

impl Memory {
    /// `size` bytes of a backing.
    ///
    /// # Errors
    /// [`Failure::Usage`]: the computer has not so much. [`Failure::Missing`]: not of this backing. [`Failure::Run`].
    pub(crate) fn new(size: u64, backing: Backing) -> Result<Self, Failure> {
        let huge = match backing.pages {
            Pages::Base | Pages::Transparent => {
                check_available(size)?;
                None
            }
            Pages::Huge | Pages::HugeOf(_) => {
                let page = backing.page_size(GranuleSize::K4).0;
                check_pool(size, page, backing)?;
                Some(page)
            }
        };
        let refused =
            |error: io::Error| Failure::Run(format!("{} of {backing} memory: {error}", Size(size)));
        let memory = if backing.shared {
            Self::map_file(size, memory_file(size, huge).map_err(refused)?, reserve(huge))
        } else {
            let flags = huge.map_or(0, |page| libc::MAP_HUGETLB | size_flag(page));
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | reserve(huge) | flags;
            Self::map(size, flags, None, huge.is_none())
        };
        let memory = match (memory, huge) {
            (Err(error), Some(page)) if error.raw_os_error() == Some(libc::ENOMEM) => {
                // Somebody else was faster.
                check_pool(size, page, backing)?;
                return Err(Failure::Missing(format!("-s {backing}: {}: {error}", Size(size))));
            }
            (memory, _) => memory.map_err(refused)?,
        };
        match backing.pages {
            Pages::Transparent => memory.advise(0..size, libc::MADV_HUGEPAGE).map_err(|error| {
                Failure::Missing(format!(
                    "this host's kernel has no transparent huge pages: {error}"
                ))
            })?,
            // Without any in the kernel there is nothing to leave out.
            Pages::Base if !backing.shared => {
                let _ = memory.advise(0..size, libc::MADV_NOHUGEPAGE);
            }
            _ => {}
        }
        Ok(memory)
    }

    /// `size` bytes for what is the hypervisor's.
    ///
    /// # Errors
    /// [`Failure::Run`].
    pub(crate) fn plain(size: u64) -> Result<Self, Failure> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        Self::map(size, flags, None, true).map_err(|error| Failure::Run(format!("memory: {error}")))
    }

    /// The same shared memory at another address; `None` if it is private.
    pub(crate) fn alias(&self) -> io::Result<Option<Self>> {
        let Some(file) = &self.file else { return Ok(None) };
        // Hugetlb pages are reserved for the file, by the first mapping.
        Self::map_file(self.size, file.try_clone()?, libc::MAP_NORESERVE).map(Some)
    }

    fn map_file(size: u64, file: OwnedFd, reserve: c_int) -> io::Result<Self> {
        Self::map(size, libc::MAP_SHARED | reserve, Some(file), false)
    }

    /// With `align`, at a multiple of [`HUGE`].
    #[expect(unsafe_code, reason = "maps memory")]
    fn map(size: u64, flags: c_int, file: Option<OwnedFd>, align: bool) -> io::Result<Self> {
        let too_large = || io::Error::from(io::ErrorKind::OutOfMemory);
        let extra = if align { HUGE } else { 0 };
        let length = size.checked_add(extra).and_then(|length| usize::try_from(length).ok());
        let length = length.ok_or_else(too_large)?;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let fd = file.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        // SAFETY: a new mapping at an address that the kernel chooses.
        let map = unsafe { libc::mmap(ptr::null_mut(), length, access, flags, fd, 0) };
        if map == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let map = NonNull::new(map.cast::<u8>()).ok_or_else(too_large)?;
        let address = map.addr().get() as u64;
        let skip = if align { address.next_multiple_of(HUGE) - address } else { 0 };
        Ok(Self { map, length, skip: skip as usize, size, file })
    }

    /// Where it begins in this process.
    pub(crate) fn address(&self) -> u64 {
        (self.map.addr().get() + self.skip) as u64
    }

    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// Where an offset that is inside is in this process, and what remains from there.
    fn pointer(&self, offset: u64) -> Option<NonNull<u8>> {
        // SAFETY: the mapping has `skip + size` bytes at least.
        #[expect(unsafe_code, reason = "an address inside of the mapping")]
        (offset < self.size).then(|| unsafe { self.map.add(self.skip + offset as usize) })
    }

    /// Copies bytes to an offset; they must fit.
    #[expect(unsafe_code, reason = "writes to the mapping")]
    pub(crate) fn write(&self, offset: u64, bytes: &[u8]) {
        let end = offset.checked_add(bytes.len() as u64);
        assert!(end.is_some_and(|end| end <= self.size), "inside of the memory");
        if let Some(place) = self.pointer(offset) {
            // SAFETY: so many bytes are there, as was checked, and `bytes` are not among them.
            unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), place.as_ptr(), bytes.len()) };
        }
    }

    /// What is at an offset, seen as a `T` of atomics.
    ///
    /// # Panics
    /// It is not aligned for it, or does not fit.
    #[expect(unsafe_code, reason = "reads the mapping as a structure of atomics")]
    pub(crate) fn view<T: Atomics>(&self, offset: u64) -> &T {
        let size = size_of::<T>() as u64;
        assert!(
            offset.checked_add(size).is_some_and(|end| end <= self.size),
            "inside of the memory"
        );
        let place = self.pointer(offset).map(NonNull::cast::<T>);
        let place = place.filter(|place| place.is_aligned()).expect("aligned memory");
        // SAFETY: mapped, aligned, as long as `self` lives; any bytes are a `T`, and others change them as atomics.
        unsafe { place.as_ref() }
    }

    /// Has the kernel take pages back. What was there is gone, also for other mappings of it.
    pub(crate) fn release(&self, range: Range<u64>) -> io::Result<()> {
        let advice = if self.file.is_some() { libc::MADV_REMOVE } else { libc::MADV_DONTNEED };
        self.advise(range, advice)
    }

    #[expect(unsafe_code, reason = "a system call on the mapping")]
    fn advise(&self, range: Range<u64>, advice: c_int) -> io::Result<()> {
        let (place, length) = self.part(range)?;
        // SAFETY: only pages of this mapping, which are reached as atomics.
        done(unsafe { libc::madvise(place.as_ptr().cast(), length, advice) })
    }

    /// Lets everybody write to it, or nobody.
    #[expect(unsafe_code, reason = "a system call on the mapping")]
    pub(crate) fn set_writable(&self, writable: bool) -> io::Result<()> {
        let access = if writable { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_READ };
        let (place, length) = self.part(0..self.size)?;
        // SAFETY: only pages of this mapping.
        done(unsafe { libc::mprotect(place.as_ptr().cast(), length, access) })
    }

    /// Unmaps a part; nothing else of this process will be at these addresses, which nobody can reach.
    #[expect(unsafe_code, reason = "a system call on the mapping")]
    pub(crate) fn unmap(&mut self, range: Range<u64>) -> io::Result<()> {
        let (place, length) = self.part(range)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
        let place = place.as_ptr().cast();
        // SAFETY: replaces pages of this mapping, which stays as long as it is.
        let map = unsafe { libc::mmap(place, length, libc::PROT_NONE, flags, -1, 0) };
        if map == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    fn part(&self, range: Range<u64>) -> io::Result<(NonNull<u8>, usize)> {
        let outside = || io::Error::from(io::ErrorKind::InvalidInput);
        let place = self.pointer(range.start).filter(|_| range.end <= self.size);
        let length = range.end.checked_sub(range.start).ok_or_else(outside)?;
        Ok((place.ok_or_else(outside)?, length as usize))
    }
}

impl Words for Memory {
    fn word(&self, offset: u64) -> Option<&AtomicU64> {
        let offset = offset & !7;
        (offset < self.size).then(|| self.view(offset))
    }
}

impl Drop for Memory {
    #[expect(unsafe_code, reason = "unmaps the mapping")]
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's; nobody has a reference into it any more.
        unsafe { libc::munmap(self.map.as_ptr().cast(), self.length) };
    }
}

/// Structures of atomics alone.
///
/// # Safety
/// Any bytes are one, and it is changed through shared references only as atomics are.
#[expect(unsafe_code, reason = "says what may be seen in memory that others write")]
pub(crate) unsafe trait Atomics {}

// SAFETY: an atomic.
#[expect(unsafe_code, reason = "an atomic")]
unsafe impl Atomics for AtomicU64 {}

fn done(result: c_int) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The flag that asks for hugetlb pages of a size; that of `memfd_create` is the same.
fn size_flag(page: u64) -> c_int {
    (page.trailing_zeros() << libc::MAP_HUGE_SHIFT) as c_int
}

/// Hugetlb pages are reserved when they are mapped: a fault that finds none would end the process.
fn reserve(huge: Option<u64>) -> c_int {
    if huge.is_some() { 0 } else { libc::MAP_NORESERVE }
}

#[expect(unsafe_code, reason = "makes a file of memory")]
fn memory_file(size: u64, huge: Option<u64>) -> io::Result<OwnedFd> {
    let flags = huge.map_or(0, |page| libc::MFD_HUGETLB | size_flag(page) as u32);
    // SAFETY: the name is a string that the kernel copies.
    let fd = unsafe { libc::memfd_create(NAME.as_ptr(), libc::MFD_CLOEXEC | flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new, and nobody else's.
    let file = unsafe { OwnedFd::from_raw_fd(fd) };
    let size = libc::off_t::try_from(size).map_err(|_| io::ErrorKind::OutOfMemory)?;
    // SAFETY: a descriptor of ours.
    done(unsafe { libc::ftruncate(file.as_raw_fd(), size) })?;
    Ok(file)
}

fn check_available(size: u64) -> Result<(), Failure> {
    match slat_model::available() {
        Some(available) if size > available => Err(Failure::Usage(format!(
            "{} MiB of guest memory are more than this computer has: {} MiB are available; -v and -b choose how much",
            size >> 20,
            available >> 20
        ))),
        _ => Ok(()),
    }
}

/// Whether enough hugetlb pages are free and not reserved.
fn check_pool(size: u64, page: u64, backing: Backing) -> Result<(), Failure> {
    let pool = format!("/sys/kernel/mm/hugepages/hugepages-{}kB", page >> 10);
    let number = |name: &str| {
        let text = fs::read_to_string(format!("{pool}/{name}")).ok()?;
        text.trim().parse::<u64>().ok()
    };
    let Some((free, all)) = number("free_hugepages").zip(number("nr_hugepages")) else {
        return Err(Failure::Missing(format!(
            "-s {backing}: this host's kernel has no hugetlb pages of {}",
            Size(page)
        )));
    };
    let free = free.saturating_sub(number("resv_hugepages").unwrap_or(0));
    let needed = size.div_ceil(page);
    if needed <= free {
        return Ok(());
    }
    let pool = if page == DEFAULT_HUGETLB {
        "/proc/sys/vm/nr_hugepages".to_owned()
    } else {
        format!("{pool}/nr_hugepages")
    };
    Err(Failure::Missing(format!(
        "-s {backing}: {needed} hugetlb pages of {} are needed and {free} are free; as root: echo {} > {pool}",
        Size(page),
        all + needed - free
    )))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    fn memory(backing: &str) -> Memory {
        Memory::new(4 << 20, backing.parse().unwrap()).unwrap()
    }

    #[test]
    fn a_word_is_where_it_was_written_and_nothing_is_beyond_the_end() {
        let memory = memory("anonymous");
        memory.write(4096, &7u64.to_le_bytes());
        assert_eq!(memory.word(4096).unwrap().load(Ordering::Relaxed), 7);
        assert!(memory.word(4 << 20).is_none());
        assert!(memory.address().is_multiple_of(HUGE));
    }

    #[test]
    fn shared_memory_is_the_same_at_another_address_and_private_memory_is_not_shared() {
        let memory = memory("shmem");
        let alias = memory.alias().unwrap().unwrap();
        alias.word(8192).unwrap().store(9, Ordering::Relaxed);
        assert_eq!(memory.word(8192).unwrap().load(Ordering::Relaxed), 9);
        assert!(self::memory("anonymous").alias().unwrap().is_none());
    }

    #[test]
    fn released_pages_come_back_empty() {
        for backing in ["anonymous", "anonymous_thp", "shmem"] {
            let memory = memory(backing);
            memory.word(0).unwrap().store(5, Ordering::Relaxed);
            memory.release(0..4096).unwrap();
            assert_eq!(memory.word(0).unwrap().load(Ordering::Relaxed), 0, "{backing}");
        }
    }

    #[test]
    fn hugetlb_pages_are_reserved_so_that_who_comes_later_is_refused() {
        let pool = "/sys/kernel/mm/hugepages/hugepages-2048kB";
        let number = |name: &str| {
            let text = fs::read_to_string(format!("{pool}/{name}")).unwrap_or_default();
            text.trim().parse::<u64>().unwrap_or(0)
        };
        let free = number("free_hugepages").saturating_sub(number("resv_hugepages"));
        for backing in ["anonymous_hugetlb_2mb", "shared_hugetlb_2mb"] {
            let backing: Backing = backing.parse().unwrap();
            // An empty pool refuses the first already.
            let all = Memory::new(free.max(1) << 21, backing);
            let refused = Memory::new(1 << 21, backing).unwrap_err();
            assert!(matches!(refused, Failure::Missing(_)), "{refused}");
            drop(all);
        }
        assert_eq!(reserve(Some(1 << 21)) & libc::MAP_NORESERVE, 0);
    }

    #[test]
    fn memory_that_the_host_has_not_is_refused_with_what_to_do() {
        let refused = |size, backing: &str| {
            Memory::new(size, backing.parse().unwrap()).unwrap_err().to_string()
        };
        assert!(refused(1 << 50, "anonymous").contains("more than this computer has"));
        let huge = refused(1 << 50, "anonymous_hugetlb_2mb");
        assert!(
            huge.contains("/proc/sys/vm/nr_hugepages") || huge.contains("has no hugetlb pages")
        );
        assert!(refused(1 << 30, "shared_hugetlb_16kb").contains("has no hugetlb pages of 16K"));
    }
}
