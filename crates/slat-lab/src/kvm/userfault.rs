//! How page faults of guests are handed to threads of this process: userfaultfd, thinly.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use vmm_sys_util::ioctl::{ioctl_with_mut_ref, ioctl_with_val};
use vmm_sys_util::{ioctl_io_nr, ioctl_iowr_nr};

use super::memory::Memory;
use crate::failure::Failure;

/// The interface's number, in its calls and by itself.
const UFFD: u32 = 0xaa;
/// How memory is registered.
const MISSING: u64 = 1;
const MINOR: u64 = 4;
/// The message of a page fault.
const PAGE_FAULT: u8 = 0x12;
/// Bytes of a message, and where it has the address.
const MESSAGE: usize = 32;
const ADDRESS: usize = 16;
/// Names of features, by bit.
const FEATURES: [&str; 17] = [
    "write-protect",
    "fork",
    "remap",
    "remove",
    "missing-hugetlb",
    "missing-shmem",
    "unmap",
    "sigbus",
    "thread-id",
    "minor-hugetlb",
    "minor-shmem",
    "exact-address",
    "write-protect-shared",
    "write-protect-unpopulated",
    "poison",
    "write-protect-async",
    "move",
];

#[derive(Debug, Default)]
#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[derive(Debug, Default)]
#[repr(C)]
struct Register {
    start: u64,
    length: u64,
    mode: u64,
    ioctls: u64,
}

#[derive(Debug, Default)]
#[repr(C)]
struct Copy {
    to: u64,
    from: u64,
    length: u64,
    mode: u64,
    copied: i64,
}

#[derive(Debug, Default)]
#[repr(C)]
struct Continue {
    start: u64,
    length: u64,
    mode: u64,
    mapped: i64,
}

ioctl_io_nr!(USERFAULTFD_IOC_NEW, UFFD, 0x00);
ioctl_iowr_nr!(UFFDIO_API, UFFD, 0x3f, Api);
ioctl_iowr_nr!(UFFDIO_REGISTER, UFFD, 0x00, Register);
ioctl_iowr_nr!(UFFDIO_COPY, UFFD, 0x03, Copy);
ioctl_iowr_nr!(UFFDIO_CONTINUE, UFFD, 0x07, Continue);

/// Which faults are handed over.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Faults {
    /// Of pages that are not there.
    Missing,
    /// Of pages of shared memory that are there and not mapped.
    Minor,
}

/// A descriptor from which faults come.
#[derive(Debug)]
pub(crate) struct Userfault {
    fd: OwnedFd,
}

impl Userfault {
    /// # Errors
    /// [`Failure::Missing`]: this kernel has none, or not for us.
    pub(crate) fn new() -> Result<Self, Failure> {
        let userfault = Self { fd: descriptor().map_err(missing)? };
        userfault.agree().map_err(missing)?;
        Ok(userfault)
    }

    /// Agrees on the interface; what the kernel has, as bits.
    #[expect(unsafe_code, reason = "the kernel writes into the structure")]
    fn agree(&self) -> io::Result<u64> {
        let mut api = Api { api: UFFD.into(), ..Api::default() };
        // SAFETY: the kernel reads and writes the structure and nothing else of ours.
        done(unsafe { ioctl_with_mut_ref(&self.fd, UFFDIO_API(), &mut api) })?;
        Ok(api.features)
    }

    /// From now on faults on this part of memory come from here.
    ///
    /// # Errors
    /// [`Failure::Missing`]: not of this memory.
    #[expect(unsafe_code, reason = "the kernel writes into the structure")]
    pub(crate) fn register(
        &self,
        memory: &Memory,
        (offset, size): (u64, u64),
        faults: Faults,
    ) -> Result<(), Failure> {
        let mode = if faults == Faults::Missing { MISSING } else { MINOR };
        let start = memory.address() + offset;
        let mut register = Register { start, length: size, mode, ioctls: 0 };
        // SAFETY: the kernel reads and writes the structure; who touches the memory waits until it is served.
        let result = unsafe { ioctl_with_mut_ref(&self.fd, UFFDIO_REGISTER(), &mut register) };
        done(result).map_err(|error| {
            Failure::Missing(format!(
                "this host's userfaultfd does not take {faults:?} faults of such memory: {error}"
            ))
        })
    }

    /// The addresses of faults that have come; none if there are none.
    ///
    /// # Errors
    /// The kernel's.
    #[expect(unsafe_code, reason = "the kernel writes into the buffer")]
    pub(crate) fn faults(&self, mut fault: impl FnMut(u64)) -> io::Result<()> {
        let mut buffer = [0; 16 * MESSAGE];
        // SAFETY: the buffer has so many bytes.
        let read =
            unsafe { libc::read(self.fd.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len()) };
        let Ok(read) = usize::try_from(read) else {
            let error = io::Error::last_os_error();
            let nothing = error.kind() == io::ErrorKind::WouldBlock;
            return if nothing { Ok(()) } else { Err(error) };
        };
        for message in buffer[..read].chunks_exact(MESSAGE) {
            if message[0] == PAGE_FAULT {
                fault(u64::from_ne_bytes(std::array::from_fn(|byte| message[ADDRESS + byte])));
            }
        }
        Ok(())
    }

    /// Copies a page to where it is missing. Whether it was: somebody else may have done so.
    ///
    /// # Errors
    /// The kernel's.
    #[expect(unsafe_code, reason = "the kernel copies memory")]
    pub(crate) fn copy(&self, (memory, offset): (&Memory, u64), page: &[u8]) -> io::Result<bool> {
        let (to, from) = (memory.address() + offset, page.as_ptr().addr() as u64);
        let length = page.len() as u64;
        assert!(
            offset.checked_add(length).is_some_and(|end| end <= memory.size()),
            "memory of ours"
        );
        let mut copy = Copy { to, from, length, mode: 0, copied: 0 };
        // SAFETY: the kernel copies so many bytes to a page of `memory` that nobody has seen yet.
        there(unsafe { ioctl_with_mut_ref(&self.fd, UFFDIO_COPY(), &mut copy) })
    }

    /// Lets a page of shared memory through. Whether it was held.
    ///
    /// # Errors
    /// The kernel's.
    #[expect(unsafe_code, reason = "the kernel maps memory")]
    pub(crate) fn let_through(
        &self,
        (memory, offset): (&Memory, u64),
        length: u64,
    ) -> io::Result<bool> {
        let start = memory.address() + offset;
        let mut more = Continue { start, length, mode: 0, mapped: 0 };
        // SAFETY: the kernel maps what is in the file of `memory`.
        there(unsafe { ioctl_with_mut_ref(&self.fd, UFFDIO_CONTINUE(), &mut more) })
    }

    /// Waits for faults, for so many milliseconds at most.
    #[expect(unsafe_code, reason = "the kernel writes into the structure")]
    pub(crate) fn wait(&self, milliseconds: i32) {
        let mut poll = libc::pollfd { fd: self.fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one structure.
        unsafe { libc::poll(&raw mut poll, 1, milliseconds) };
    }
}

/// What this kernel's userfaultfd has, for a person.
pub(crate) fn features() -> String {
    let features = descriptor().and_then(|fd| Userfault { fd }.agree());
    match features {
        Ok(bits) => {
            let has =
                |(bit, name): (usize, &&str)| (bits >> bit & 1 == 1).then(|| (*name).to_owned());
            FEATURES.iter().enumerate().filter_map(has).collect::<Vec<_>>().join(" ")
        }
        Err(error) => format!("not for us: {error}"),
    }
}

/// By the device if it is there, which asks for no privilege, or else by the call.
#[expect(unsafe_code, reason = "the kernel returns a descriptor")]
fn descriptor() -> io::Result<OwnedFd> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    let device = OpenOptions::new().read(true).write(true).open("/dev/userfaultfd");
    let fd = match device {
        // SAFETY: no memory of ours is involved.
        Ok(device) => unsafe {
            ioctl_with_val(&device, USERFAULTFD_IOC_NEW(), flags as libc::c_ulong)
        },
        // SAFETY: no memory of ours is involved.
        Err(_) => unsafe { libc::syscall(libc::SYS_userfaultfd, flags) as i32 },
    };
    done(fd)?;
    // SAFETY: the descriptor is new, and nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn missing(error: io::Error) -> Failure {
    let what = match error.raw_os_error() {
        Some(libc::EPERM) => {
            "it is not permitted; run as root, or write 1 to /proc/sys/vm/unprivileged_userfaultfd"
                .to_owned()
        }
        Some(libc::ENOSYS) => "this kernel has none (CONFIG_USERFAULTFD)".to_owned(),
        _ => error.to_string(),
    };
    Failure::Missing(format!("userfaultfd: {what}"))
}

fn done(result: i32) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Whether a page was served, where it may have been already.
fn there(result: i32) -> io::Result<bool> {
    match done(result) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        Err(error) => Err(error),
    }
}
