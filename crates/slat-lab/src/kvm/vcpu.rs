//! What a vCPU does: it follows orders, and tells how each of them ended.

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use kvm_bindings::{CpuId, KVM_EXIT_DIRTY_RING_FULL, kvm_regs, kvm_segment, kvm_sregs};
use kvm_ioctls::{VcpuExit, VcpuFd};
use vmm_sys_util::signal::SIGRTMIN;

use super::memory::{Atomics, Memory};
use super::program::{self, Compare, Parameters, REPORT, What};
use super::ring::Ring;
use crate::guest::{PLAIN, Pass};
use crate::layout::Layout;

// SAFETY: all of it is atomics.
#[expect(unsafe_code, reason = "atomics")]
unsafe impl Atomics for Parameters {}

/// Protection and paging are on; 64 bits.
const CR0: u64 = 1 << 31 | 1 << 16 | 1 << 5 | 1 << 4 | 1 << 1 | 1;
const CR4: u64 = 1 << 5;
const EFER: u64 = 1 << 11 | 1 << 10 | 1 << 8;
/// Programs may use ports.
const RFLAGS: u64 = 3 << 12 | 1 << 1;

/// What a guest is told.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Order {
    pub(crate) what: What,
    /// The guest-physical address of the first access.
    pub(crate) gpa: u64,
    pub(crate) stride: u64,
    pub(crate) count: u64,
    pub(crate) write_percent: u32,
    /// Addresses are drawn, some more than once and some not at all.
    pub(crate) random: bool,
    /// Again and again, until it is stopped.
    pub(crate) forever: bool,
    /// What is stored; if zero, values that never come twice, which tell the page.
    pub(crate) value: u64,
    pub(crate) compare: Compare,
    pub(crate) if_refused: IfRefused,
    /// Guest-physical addresses that may be in no memslot.
    pub(crate) absent: Range<u64>,
}

/// What becomes of an access that the host's memory refuses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum IfRefused {
    /// The run breaks off.
    Break,
    /// It is counted, and the guest goes on after it, if it is a store.
    LeaveOut,
    /// It is tried again.
    Repeat,
}

impl Order {
    /// What vCPU `index` does to its part of memory in a pass. With `check` it stores what never comes twice, and compares.
    pub(crate) fn pass(layout: &Layout, index: u32, pass: Pass, check: bool) -> Self {
        let part = layout.part(index);
        let gpa = layout.gpa + part.start * layout.guest_page;
        Self {
            write_percent: pass.write_percent,
            random: pass.random,
            value: if check { 0 } else { PLAIN },
            compare: if check { Compare::WithPage } else { Compare::Nothing },
            ..Self::write(gpa, layout.guest_page, part.end - part.start)
        }
    }

    /// One store at each of `count` pages.
    pub(crate) fn write(gpa: u64, stride: u64, count: u64) -> Self {
        Self {
            what: What::Touch,
            gpa,
            stride,
            count,
            write_percent: 100,
            random: false,
            forever: false,
            value: 0,
            compare: Compare::Nothing,
            if_refused: IfRefused::Break,
            absent: 0..0,
        }
    }

    /// One load from each.
    pub(crate) fn read(gpa: u64, stride: u64, count: u64) -> Self {
        Self { write_percent: 0, ..Self::write(gpa, stride, count) }
    }
}

/// What a vCPU met on its way.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Met {
    /// Times that it left the guest because its dirty ring was full.
    pub(crate) ring_full: u64,
    /// Accesses to guest memory that is in no memslot.
    pub(crate) absent: u64,
    /// Stores that the host's memory refused.
    pub(crate) refused: u64,
}

/// Why an order was not followed to its end.
#[derive(Debug)]
pub(crate) enum Stop {
    /// It was kicked.
    Kicked,
    /// What the guest or the kernel did.
    Broken(String),
}

impl fmt::Display for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kicked => f.write_str("it was told to end"),
            Self::Broken(why) => f.write_str(why),
        }
    }
}

/// How others make a vCPU leave the guest, and the kernel.
#[derive(Debug, Default)]
pub(crate) struct Kick {
    quit: AtomicBool,
    target: Mutex<Option<Target>>,
}

/// Where a kick goes.
#[derive(Clone, Copy, Debug)]
struct Target {
    thread: libc::pthread_t,
    immediate_exit: *mut u8,
}

// SAFETY: the pointer is used as an atomic, under the lock, while the vCPU that it belongs to is there.
#[expect(unsafe_code, reason = "a raw pointer to a byte that the kernel reads")]
unsafe impl Send for Target {}

impl Kick {
    /// Makes the vCPU leave the guest for good. To be repeated until its thread has ended: it may be about to sleep.
    #[expect(unsafe_code, reason = "tells a thread and the kernel")]
    pub(crate) fn kick(&self) {
        self.quit.store(true, Ordering::Release);
        let target = self.target.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(Target { thread, immediate_exit }) = *target {
            // SAFETY: the vCPU's thread is still in `on_thread`, which keeps the page mapped.
            unsafe { AtomicU8::from_ptr(immediate_exit) }.store(1, Ordering::Relaxed);
            // SAFETY: the thread is there, and has a handler for the signal.
            unsafe { libc::pthread_kill(thread, SIGRTMIN()) };
        }
    }

    pub(crate) fn is_kicked(&self) -> bool {
        self.quit.load(Ordering::Acquire)
    }
}

/// What a vCPU left the guest for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Left {
    Reported,
    RingFull,
}

/// Where a vCPU finds what it begins with: its tables by guest-physical address, the rest by virtual ones.
#[derive(Clone, Copy, Debug)]
pub(super) struct Addresses {
    pub(super) root: u64,
    pub(super) code: u64,
    /// The task-state segment.
    pub(super) task: u64,
    pub(super) parameters: u64,
}

/// A vCPU with its guest.
#[derive(Debug)]
pub(crate) struct Vcpu {
    fd: VcpuFd,
    /// The page of parameters: in which memory, and where.
    system: (Arc<Memory>, u64),
    /// From guest-physical to the guest's virtual addresses.
    distance: u64,
    kick: Arc<Kick>,
    /// What it began with.
    start: (kvm_sregs, kvm_regs),
    met: Met,
}

impl Vcpu {
    /// A vCPU that has no registers yet.
    pub(super) fn new(fd: VcpuFd, system: (Arc<Memory>, u64), distance: u64) -> Self {
        let start = (kvm_sregs::default(), kvm_regs::default());
        Self { fd, system, distance, kick: Arc::default(), start, met: Met::default() }
    }

    /// At the program, in 64-bit mode, at privilege level 3: a host that has no virtualization in hardware
    /// executes only that natively, and to others it is all the same.
    pub(super) fn set_up(
        &mut self,
        cpuid: &CpuId,
        addresses: Addresses,
    ) -> Result<(), kvm_ioctls::Error> {
        let Addresses { root, code, task, parameters } = addresses;
        self.fd.set_cpuid2(cpuid)?;
        let mut special = self.fd.get_sregs()?;
        let data = kvm_segment {
            limit: u32::MAX,
            selector: 0x23,
            type_: 3,
            present: 1,
            dpl: 3,
            db: 1,
            s: 1,
            g: 1,
            ..Default::default()
        };
        special.cs = kvm_segment { selector: 0x1b, type_: 11, db: 0, l: 1, ..data };
        for segment in [&mut special.ds, &mut special.es, &mut special.fs, &mut special.gs] {
            *segment = data;
        }
        special.ss = data;
        // Where privileges are not virtualized, this says that the program may use ports.
        special.tr.base = task;
        special.tr.limit = 0xfff;
        (special.cr0, special.cr3, special.cr4, special.efer) = (CR0, root, CR4, EFER);
        let general = kvm_regs { rip: code, rdi: parameters, rflags: RFLAGS, ..Default::default() };
        self.start = (special, general);
        self.reset()
    }

    /// Loads the registers that it began with.
    pub(crate) fn reset(&mut self) -> Result<(), kvm_ioctls::Error> {
        self.fd.set_sregs(&self.start.0)?;
        self.fd.set_regs(&self.start.1)
    }

    /// Has the guest report for the first time.
    ///
    /// # Errors
    /// Why it does not.
    pub(crate) fn boot(&mut self) -> Result<(), Stop> {
        self.run(&Order::read(0, 0, 0)).map(drop)
    }

    pub(crate) fn fd(&self) -> &VcpuFd {
        &self.fd
    }

    pub(crate) fn kick(&self) -> Arc<Kick> {
        Arc::clone(&self.kick)
    }

    /// What it met since it was made.
    pub(crate) fn met(&self) -> Met {
        self.met
    }

    /// Accesses of its guest.
    pub(crate) fn accesses(&self) -> u64 {
        self.parameters().accesses().load(Ordering::Relaxed)
    }

    /// Whether it is to end.
    pub(crate) fn is_kicked(&self) -> bool {
        self.kick.is_kicked()
    }

    /// Loads that returned something else than they were compared with.
    pub(crate) fn wrong_loads(&self) -> u64 {
        self.parameters().wrong().load(Ordering::Relaxed)
    }

    pub(crate) fn parameters(&self) -> &Parameters {
        self.system.0.view(self.system.1)
    }

    /// The memory with its parameters, and where they are.
    pub(crate) fn system(&self) -> (Arc<Memory>, u64) {
        (Arc::clone(&self.system.0), self.system.1)
    }

    /// Its dirty ring, of so many entries.
    pub(crate) fn ring(&self, entries: u32) -> io::Result<Ring> {
        Ring::new(&self.fd, entries)
    }

    /// Lets others kick this thread while it does `work` with the vCPU.
    pub(crate) fn on_thread<R>(&mut self, work: impl FnOnce(&mut Self) -> R) -> R {
        struct Gone<'a>(&'a Kick);
        impl Drop for Gone<'_> {
            fn drop(&mut self) {
                *self.0.target.lock().unwrap_or_else(PoisonError::into_inner) = None;
            }
        }

        let immediate_exit = &raw mut self.fd.get_kvm_run().immediate_exit;
        // SAFETY: asks for the name of this thread.
        #[expect(unsafe_code, reason = "a call without arguments")]
        let thread = unsafe { libc::pthread_self() };
        let kick = self.kick();
        let target = Some(Target { thread, immediate_exit });
        *kick.target.lock().unwrap_or_else(PoisonError::into_inner) = target;
        let _gone = Gone(&kick);
        work(self)
    }

    /// Follows an order. `wait` is called when the dirty ring is full, and returns when it has room again.
    ///
    /// # Errors
    /// What went wrong, or that it was kicked.
    pub(crate) fn follow(&mut self, order: &Order, wait: &dyn Fn() -> bool) -> Result<(), Stop> {
        let parameters = self.parameters();
        let set = [
            (&parameters.order, order.what as u64),
            (&parameters.start, order.gpa.wrapping_add(self.distance)),
            (&parameters.stride, order.stride),
            (&parameters.count, order.count),
            (&parameters.write_percent, order.write_percent.into()),
            (&parameters.shuffle, order.random.into()),
            (&parameters.forever, order.forever.into()),
            (&parameters.value, order.value),
            (&parameters.compare, order.compare as u64),
        ];
        set.into_iter().for_each(|(parameter, value)| parameter.store(value, Ordering::Relaxed));
        while self.run(order)? == Left::RingFull {
            self.met.ring_full += 1;
            if !wait() {
                return Err(Stop::Kicked);
            }
        }
        Ok(())
    }

    /// Enters the guest until it reports, or cannot go on.
    fn run(&mut self, order: &Order) -> Result<Left, Stop> {
        loop {
            if self.kick.is_kicked() {
                return Err(Stop::Kicked);
            }
            let failed = match self.fd.run() {
                Ok(VcpuExit::IoOut(REPORT, _)) => return Ok(Left::Reported),
                Ok(VcpuExit::MmioWrite(gpa, _) | VcpuExit::MmioRead(gpa, _))
                    if order.absent.contains(&gpa) =>
                {
                    self.met.absent += 1;
                    continue;
                }
                Ok(VcpuExit::Unsupported(KVM_EXIT_DIRTY_RING_FULL)) => return Ok(Left::RingFull),
                Ok(VcpuExit::Intr) => continue,
                Ok(VcpuExit::MemoryFault { .. }) => libc::EFAULT,
                Ok(exit) => return Err(Stop::Broken(described(&exit))),
                Err(error) => error.errno(),
            };
            match failed {
                libc::EINTR | libc::EAGAIN => {}
                libc::EFAULT if order.if_refused == IfRefused::LeaveOut => self.leave_out()?,
                libc::EFAULT if order.if_refused == IfRefused::Repeat => thread::yield_now(),
                errno => return Err(Stop::Broken(refused(errno))),
            }
        }
    }

    /// The host refused a store: goes on after it.
    fn leave_out(&mut self) -> Result<(), Stop> {
        let regs = |error: kvm_ioctls::Error| Stop::Broken(format!("its registers: {error}"));
        let mut general = self.fd.get_regs().map_err(regs)?;
        let (store, stored) = program::store();
        if general.rip != self.start.1.rip + store {
            let why = format!(
                "the host's memory refused an access at {:#x}, which is no store",
                general.rip
            );
            return Err(Stop::Broken(why));
        }
        general.rip = self.start.1.rip + stored;
        self.met.refused += 1;
        self.fd.set_regs(&general).map_err(regs)
    }
}

fn described(exit: &VcpuExit<'_>) -> String {
    match exit {
        VcpuExit::Shutdown => {
            "the guest has shut down: it met a fault that it has no handler for".to_owned()
        }
        VcpuExit::InternalError => "KVM cannot emulate what the guest did".to_owned(),
        VcpuExit::MmioWrite(gpa, _) => format!("a store to {gpa:#x}, which is in no memslot"),
        VcpuExit::MmioRead(gpa, _) => format!("a load from {gpa:#x}, which is in no memslot"),
        exit => format!("it left the guest for what nobody expects: {exit:?}"),
    }
}

fn refused(errno: i32) -> String {
    match errno {
        libc::EFAULT => "the host's memory failed under an access of the guest: it cannot be had, or not like this".to_owned(),
        libc::ENOMEM => "the host is out of memory".to_owned(),
        errno => format!("KVM_RUN: {}", io::Error::from_raw_os_error(errno)),
    }
}
