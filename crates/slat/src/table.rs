//! A table in memory: the only place where entries are reached through pointers.
#![expect(unsafe_code, reason = "entries live in the machine's table memory, behind pointers")]

use core::marker::PhantomData;
use core::ptr::NonNull;

use crate::machine::{Event, Machine};
use crate::sabotage::{Skip, skips};
use crate::sync::Ordering;
use crate::{Entry, Hpa};

/// The first entry of a table that belongs to this thread.
pub(crate) fn first_entry<M: Machine>(machine: &M, table: Hpa) -> &Entry {
    // SAFETY: `Machine` promises that the pointer of an allocated table is valid until it is freed; the callers own
    // `table` and free it themselves.
    unsafe { machine.entries(table).as_ref() }
}

/// A table that was found in a tree, or made, and that cannot be freed during `'p`: either a pin lives as long, or
/// this thread owns the table.
pub(crate) struct Table<'p, M> {
    machine: &'p M,
    base: Hpa,
    first: NonNull<Entry>,
    lives: PhantomData<&'p Entry>,
}

impl<M> Clone for Table<'_, M> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<M> Copy for Table<'_, M> {}

impl<'p, M: Machine> Table<'p, M> {
    /// The table at `base`.
    ///
    /// # Safety
    /// `base` is a table (or root) of `machine` that is not freed during `'p`. Every index given to the methods is
    /// below its number of entries.
    #[inline(always)]
    pub(crate) unsafe fn new(machine: &'p M, base: Hpa) -> Self {
        Self { machine, base, first: machine.entries(base), lives: PhantomData }
    }

    /// Where it is.
    #[inline(always)]
    pub(crate) fn base(&self) -> Hpa {
        self.base
    }

    #[inline(always)]
    pub(crate) fn machine(&self) -> &'p M {
        self.machine
    }

    #[inline(always)]
    fn address(&self, index: usize) -> Hpa {
        Hpa(self.base.0 + 8 * index as u64)
    }

    #[inline(always)]
    pub(crate) fn entry(&self, index: usize) -> &'p Entry {
        // SAFETY: `new`'s caller promised that the table lives during `'p` and has more than `index` entries.
        unsafe { self.first.add(index).as_ref() }
    }

    /// Reads one entry. Acquire: what the entry points to was stored before it was linked.
    #[inline(always)]
    pub(crate) fn load(&self, index: usize) -> u64 {
        self.machine.observe(Event::Load { entry: self.address(index) });
        self.entry(index).0.load(Ordering::Acquire)
    }

    /// Rule 2: changes one entry from exactly the value that was read.
    #[inline(always)]
    pub(crate) fn exchange(&self, index: usize, old: u64, new: u64) -> Result<(), u64> {
        // Release: what `new` points to is complete. Acquire: whoever put `old` there is done with it.
        let place = &self.entry(index).0;
        let result = if skips(Skip::Compare) {
            Ok(place.swap(new, Ordering::AcqRel))
        } else {
            place.compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire)
        };
        self.machine.observe(Event::Exchange {
            entry: self.address(index),
            old,
            new,
            done: result.is_ok(),
        });
        result.map(|_| ())
    }

    /// Stores one entry that this thread owns: it locked it (rule 3), or nobody else knows the table yet.
    #[inline(always)]
    pub(crate) fn settle(&self, index: usize, new: u64) {
        self.machine.observe(Event::Store { entry: self.address(index), new });
        self.entry(index).0.store(new, Ordering::Release);
    }

    /// Rule 2: changes two neighbours, `index` even, in one exchange of 16 bytes. `false`: nothing changed.
    #[inline(always)]
    pub(crate) fn exchange_pair(&self, index: usize, old: [u64; 2], new: [u64; 2]) -> bool {
        let done = pair_exchange(self.entry(index), old, new);
        for n in 0..2 {
            let entry = self.address(index + n);
            self.machine.observe(Event::Exchange { entry, old: old[n], new: new[n], done });
        }
        done
    }

    /// Stores `first`, `first + step`, … into entries `from..to` of a table that this thread owns and that is not linked.
    pub(crate) fn fill_steps(&self, from: usize, to: usize, first: u64, step: u64) {
        #[cfg(not(any(loom, shuttle)))]
        // SAFETY: as in `entry`; nobody else knows the table, so plain stores race with nothing.
        unsafe {
            fill_steps(self.first.add(from).cast(), to - from, first, step);
        }
        #[cfg(any(loom, shuttle))]
        for index in from..to {
            let entry = first + (index - from) as u64 * step;
            self.entry(index).0.store(entry, Ordering::Relaxed);
        }
        self.machine.observe(Event::Fill { table: self.base });
    }

    /// Stores `entry(i)` for each `i` of `from..to` of a table that this thread owns and that is not linked. The
    /// exchange that links it releases them.
    #[inline(always)]
    pub(crate) fn fill(&self, from: usize, to: usize, entry: impl Fn(usize) -> u64) {
        for index in from..to {
            #[cfg(not(any(loom, shuttle)))]
            // SAFETY: as in `entry`; nobody else knows the table, so a plain store races with nothing.
            unsafe {
                self.first.add(index).cast::<u64>().write(entry(index));
            }
            #[cfg(any(loom, shuttle))]
            self.entry(index).0.store(entry(index), Ordering::Relaxed);
        }
        self.machine.observe(Event::Fill { table: self.base });
    }
}

/// Out of line, so that the loop is compiled on its own terms wherever it is called from.
///
/// # Safety
/// `count` entries from `place` on are the caller's alone.
#[cfg(not(any(loom, shuttle)))]
#[inline(never)]
unsafe fn fill_steps(place: NonNull<u64>, count: usize, first: u64, step: u64) {
    // SAFETY: the caller's promise.
    let entries = unsafe { core::slice::from_raw_parts_mut(place.as_ptr(), count) };
    let steps: [u64; 16] = core::array::from_fn(|n| step.wrapping_mul(n as u64));
    let mut first = first;
    let mut pieces = entries.chunks_exact_mut(steps.len());
    for piece in &mut pieces {
        for (entry, step) in piece.iter_mut().zip(steps) {
            *entry = first.wrapping_add(step);
        }
        first = first.wrapping_add(step.wrapping_mul(steps.len() as u64));
    }
    for (entry, step) in pieces.into_remainder().iter_mut().zip(steps) {
        *entry = first.wrapping_add(step);
    }
}

/// Whether this CPU exchanges 16 bytes at once: x86, CPUID.01H:ECX.CMPXCHG16B\[13\] (Intel SDM vol. 2A); Arm, FEAT_LSE,
/// `ID_AA64ISAR0_EL1.Atomic` from 2 on (Arm ARM, D24.2), which can be read at EL1 and up, and by processes of Linux.
pub(crate) fn has_pair_exchange() -> bool {
    #[cfg(all(target_arch = "x86_64", not(any(loom, shuttle))))]
    {
        core::arch::x86_64::__cpuid(1).ecx & 1 << 13 != 0
    }
    #[cfg(all(
        target_arch = "aarch64",
        any(target_os = "none", target_os = "linux"),
        not(any(loom, shuttle))
    ))]
    {
        let features: u64;
        // SAFETY: reading the register changes nothing.
        unsafe {
            core::arch::asm!(
                "mrs {}, id_aa64isar0_el1",
                out(reg) features,
                options(nomem, nostack, preserves_flags)
            );
        }
        features >> 20 & 0xf >= 2
    }
    #[cfg(not(all(
        any(
            target_arch = "x86_64",
            all(target_arch = "aarch64", any(target_os = "none", target_os = "linux"))
        ),
        not(any(loom, shuttle))
    )))]
    {
        false
    }
}

/// Callers have asked [`has_pair_exchange`].
#[cfg(all(target_arch = "x86_64", not(any(loom, shuttle))))]
#[inline(always)]
fn pair_exchange(first: &Entry, old: [u64; 2], new: [u64; 2]) -> bool {
    let done: u64;
    // SAFETY: `first` is the even one of two neighbours of one table, so 16 aligned bytes are there, all of them
    // atomics that may change at any time; the CPU has the instruction. rbx, which the compiler keeps to itself, is
    // put back.
    unsafe {
        core::arch::asm!(
            "xchg rsi, rbx",
            "lock cmpxchg16b xmmword ptr [rdi]",
            "sete cl",
            "mov rbx, rsi",
            in("rdi") first,
            inout("rsi") new[0] => _,
            inout("rcx") new[1] => done,
            inout("rax") old[0] => _,
            inout("rdx") old[1] => _,
            options(nostack),
        );
    }
    done as u8 != 0
}

/// Callers have asked [`has_pair_exchange`].
#[cfg(all(target_arch = "aarch64", not(any(loom, shuttle))))]
#[inline(always)]
fn pair_exchange(first: &Entry, old: [u64; 2], new: [u64; 2]) -> bool {
    let found: [u64; 2];
    // SAFETY: as on x86; acquire and release. The instruction wants pairs of registers that begin with an even one.
    unsafe {
        let (low, high);
        core::arch::asm!(
            ".arch_extension lse",
            "caspal x2, x3, x4, x5, [{first}]",
            first = in(reg) first,
            inout("x2") old[0] => low,
            inout("x3") old[1] => high,
            in("x4") new[0],
            in("x5") new[1],
            options(nostack, preserves_flags),
        );
        found = [low, high];
    }
    found == old
}

#[cfg(not(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(any(loom, shuttle)))))]
#[inline(always)]
fn pair_exchange(_: &Entry, _: [u64; 2], _: [u64; 2]) -> bool {
    false
}
