//! What runs in the guest: processes that fill memory, rewrite it at random, give pages back, and check every word of it.
//!
//!     memory-check MIB PROCESSES ROUNDS
//!
//! It prints "memory ok" or, for each page that does not hold what was stored there last, "memory BAD at" its address.
//! A program for Linux on aarch64 without a C library, built by a compiler for bare metal.
#![no_std]
#![no_main]

use core::arch::{asm, global_asm};
use core::ffi::CStr;
use core::fmt::{self, Write};
use core::panic::PanicInfo;
use core::slice;

const PAGE: usize = 4096;
const WORDS: usize = PAGE / 8;

// The kernel starts a program with the stack pointer at its arguments.
global_asm!(".global _start", "_start:", "mov x0, sp", "mov x29, xzr", "mov x30, xzr", "b {start}", start = sym start);

/// The system calls that are used, by their numbers on aarch64.
mod call {
    pub const WRITE: usize = 64;
    pub const EXIT: usize = 93;
    pub const CLONE: usize = 220;
    pub const MMAP: usize = 222;
    pub const MADVISE: usize = 233;
    pub const WAIT4: usize = 260;
}

fn system_call(number: usize, arguments: [usize; 6]) -> isize {
    let result;
    let [first, second, third, fourth, fifth, sixth] = arguments;
    // SAFETY: what the call does to memory is up to the caller, which gives it only memory that it owns.
    unsafe {
        asm!("svc #0", in("x8") number, inlateout("x0") first => result, in("x1") second, in("x2") third,
            in("x3") fourth, in("x4") fifth, in("x5") sixth, options(nostack));
    }
    result
}

fn exit(code: usize) -> ! {
    loop {
        system_call(call::EXIT, [code, 0, 0, 0, 0, 0]);
    }
}

/// A line on standard output, in one write where it fits: several processes print.
struct Line {
    bytes: [u8; 160],
    used: usize,
}

impl Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for &byte in text.as_bytes() {
            if self.used == self.bytes.len() {
                return Err(fmt::Error);
            }
            self.bytes[self.used] = byte;
            self.used += 1;
        }
        Ok(())
    }
}

fn say(arguments: fmt::Arguments) {
    let mut line = Line { bytes: [0; 160], used: 0 };
    let _ = line.write_fmt(arguments);
    system_call(call::WRITE, [1, line.bytes.as_ptr() as usize, line.used, 0, 0, 0]);
}

#[panic_handler]
fn panic(info: &PanicInfo) -> ! {
    say(format_args!("memory BAD: {}\n", info.message()));
    exit(1)
}

/// xorshift64*: the order in which pages are rewritten.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % limit
    }
}

/// Private zeroed memory of the kernel's.
fn memory<T>(items: usize) -> &'static mut [T] {
    const READ_WRITE: usize = 3;
    const PRIVATE_ANONYMOUS: usize = 0x22;
    let address = system_call(
        call::MMAP,
        [0, items * size_of::<T>(), READ_WRITE, PRIVATE_ANONYMOUS, usize::MAX, 0],
    );
    assert!(address > 0, "no memory: {address}");
    // SAFETY: nothing else is mapped there, and zero is a value of what is asked for here: numbers.
    unsafe { slice::from_raw_parts_mut(address as *mut T, items) }
}

/// The pages of one process, and how often each was written; never written, or given back: zero.
struct Pages {
    process: u64,
    words: &'static mut [[u64; WORDS]],
    versions: &'static mut [u32],
    bad: usize,
}

impl Pages {
    fn word(&self, page: usize, word: usize) -> u64 {
        match self.versions[page] {
            0 => 0,
            version => {
                (self.process << 56 | (page as u64) << 36 | u64::from(version) << 9 | word as u64)
                    ^ 0x5a5a << 16
            }
        }
    }

    fn check(&mut self, page: usize) {
        for word in 0..WORDS {
            let (found, stored) = (self.words[page][word], self.word(page, word));
            if found != stored {
                let address = &raw const self.words[page][word];
                say(format_args!("memory BAD at {address:p}: {found:#x} instead of {stored:#x}\n"));
                self.bad += 1;
                return;
            }
        }
    }

    fn write(&mut self, page: usize) {
        self.versions[page] += 1;
        for word in 0..WORDS {
            self.words[page][word] = self.word(page, word);
        }
    }

    /// Gives 64 pages back to the kernel, which gives out zeroed ones at the next use.
    fn give_back(&mut self, first: usize) {
        const DONT_NEED: usize = 4;
        let pages = 64.min(self.words.len() - first);
        let failed = system_call(
            call::MADVISE,
            [(&raw const self.words[first]) as usize, pages * PAGE, DONT_NEED, 0, 0, 0],
        );
        assert!(failed == 0, "cannot give memory back: {failed}");
        self.versions[first..first + pages].fill(0);
    }
}

/// What one process does; how many pages were not as they should be.
fn work(process: u64, pages: usize, rounds: usize) -> usize {
    let mut random = Random(process + 1);
    let mut mine = Pages { process, words: memory(pages), versions: memory(pages), bad: 0 };
    (0..pages).for_each(|page| mine.write(page));
    for _ in 0..rounds {
        for _ in 0..pages {
            let page = random.below(pages);
            mine.check(page);
            mine.write(page);
        }
        mine.give_back(random.below(pages));
    }
    (0..pages).for_each(|page| mine.check(page));
    mine.bad
}

extern "C" fn start(stack: *const usize) -> ! {
    // SAFETY: the kernel puts the number of arguments there, and a pointer to each, which ends with a zero byte.
    let arguments = unsafe { slice::from_raw_parts(stack.add(1).cast::<*const i8>(), *stack) };
    let number = |position: usize| {
        let &text = arguments.get(position)?;
        // SAFETY: as above.
        unsafe { CStr::from_ptr(text.cast()) }
            .to_str()
            .ok()?
            .parse::<usize>()
            .ok()
            .filter(|&number| number > 0)
    };
    let (Some(mebibytes), Some(processes), Some(rounds)) = (number(1), number(2), number(3)) else {
        say(format_args!("usage: memory-check MIB PROCESSES ROUNDS\n"));
        exit(2);
    };
    const SIGCHLD: usize = 17;
    for process in 0..processes {
        match system_call(call::CLONE, [SIGCHLD, 0, 0, 0, 0, 0]) {
            0 => exit(usize::from(
                work(process as u64, (mebibytes << 20) / PAGE / processes, rounds) > 0,
            )),
            child => assert!(child > 0, "no process: {child}"),
        }
    }
    let mut failed = 0;
    for _ in 0..processes {
        let mut status = 0_u32;
        let child = system_call(call::WAIT4, [usize::MAX, (&raw mut status) as usize, 0, 0, 0, 0]);
        failed += usize::from(child < 0 || status != 0);
    }
    match failed {
        0 => say(format_args!(
            "memory ok: {mebibytes} MiB, {processes} processes, {rounds} rounds\n"
        )),
        _ => say(format_args!("memory BAD: {failed} of {processes} processes\n")),
    }
    exit(usize::from(failed > 0))
}
