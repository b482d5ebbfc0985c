//! What runs on a vCPU, and how it is told what to do: the guest's own program and its page of parameters.
#![expect(unsafe_code, reason = "assembles a program and finds its labels")]

use std::arch::global_asm;
use std::mem::offset_of;
use std::slice;
use std::sync::atomic::AtomicU64;

use crate::guest::MAX_CHECKED_PAGES;

/// Where the guest writes when it has done what it was told.
pub(crate) const REPORT: u16 = 0x53;
/// What parameters take.
pub(crate) const PARAMETERS: u64 = 4096;

/// What is to be done; the numbers are the program's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u64)]
pub(crate) enum What {
    /// Loads and stores at each stride.
    Touch = 0,
    /// A store at each stride, and loads from every page of its second half.
    Halves = 1,
    /// At each stride a store of an instruction, [`JUMP_BACK`], which is executed then.
    Execute = 2,
    /// Nothing, for ever.
    Spin = 3,
}

/// What an order to execute stores: `jmp rbp`.
pub(crate) const JUMP_BACK: u64 = 0xe5ff;

/// What loads are compared with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u64)]
pub(crate) enum Compare {
    Nothing = 0,
    /// The number of the page, in the bits that a tag leaves; or zero, where nothing was stored yet.
    WithPage = 1,
    /// The value of the order.
    WithValue = 2,
}

/// What the guest reads and writes there, each eight bytes.
#[derive(Debug)]
#[repr(C, align(4096))]
pub(crate) struct Parameters {
    pub(crate) order: AtomicU64,
    /// The address of the first access.
    pub(crate) start: AtomicU64,
    pub(crate) stride: AtomicU64,
    pub(crate) count: AtomicU64,
    pub(crate) write_percent: AtomicU64,
    /// Whether addresses are drawn.
    pub(crate) shuffle: AtomicU64,
    /// Whether the order is followed again and again.
    pub(crate) forever: AtomicU64,
    /// What is stored; if zero, tags that never come twice, each with the number of its page.
    pub(crate) value: AtomicU64,
    pub(crate) compare: AtomicU64,
    /// The address of page 0.
    pub(crate) base: AtomicU64,
    pub(crate) dice: AtomicU64,
    /// The last that was stored, and how far one is from the next.
    pub(crate) tag: AtomicU64,
    pub(crate) tag_step: AtomicU64,
    /// On cache lines of their own: whether the guest is to stop,
    stop: Line,
    /// and what it counts.
    counts: Counts,
}

#[derive(Debug)]
#[repr(C, align(128))]
struct Line(AtomicU64);

#[derive(Debug)]
#[repr(C, align(128))]
struct Counts {
    accesses: AtomicU64,
    wrong: AtomicU64,
}

impl Parameters {
    /// Not zero: the guest reports after the access that it is in.
    pub(crate) fn stop(&self) -> &AtomicU64 {
        &self.stop.0
    }

    /// Accesses that are done.
    pub(crate) fn accesses(&self) -> &AtomicU64 {
        &self.counts.accesses
    }

    /// Loads that returned something else than they were compared with.
    pub(crate) fn wrong(&self) -> &AtomicU64 {
        &self.counts.wrong
    }
}

global_asm!(
    ".pushsection .rodata.slat_guest, \"a\", @progbits",
    include_str!("program.s"),
    ".popsection",
    port = const REPORT,
    halves = const What::Halves as u64,
    execute = const What::Execute as u64,
    spin = const What::Spin as u64,
    with_page = const Compare::WithPage as u64,
    page_mask = const MAX_CHECKED_PAGES - 1,
    order = const offset_of!(Parameters, order),
    start = const offset_of!(Parameters, start),
    stride = const offset_of!(Parameters, stride),
    count = const offset_of!(Parameters, count),
    write_percent = const offset_of!(Parameters, write_percent),
    shuffle = const offset_of!(Parameters, shuffle),
    forever = const offset_of!(Parameters, forever),
    value = const offset_of!(Parameters, value),
    compare = const offset_of!(Parameters, compare),
    base = const offset_of!(Parameters, base),
    dice = const offset_of!(Parameters, dice),
    tag = const offset_of!(Parameters, tag),
    tag_step = const offset_of!(Parameters, tag_step),
    stop = const offset_of!(Parameters, stop),
    accesses = const offset_of!(Parameters, counts.accesses),
    wrong = const offset_of!(Parameters, counts.wrong),
);

unsafe extern "C" {
    safe static slat_guest_begin: u8;
    safe static slat_guest_store: u8;
    safe static slat_guest_stored: u8;
    safe static slat_guest_end: u8;
}

/// Where a label is, from the start of the program.
fn offset(label: &u8) -> u64 {
    (&raw const *label).addr() as u64 - (&raw const slat_guest_begin).addr() as u64
}

/// The store that may be refused, and what follows it, from the start of the program.
pub(crate) fn store() -> (u64, u64) {
    (offset(&slat_guest_store), offset(&slat_guest_stored))
}

/// The program. It runs wherever it is copied to.
pub(crate) fn code() -> &'static [u8] {
    // SAFETY: the assembler has put the program between these labels, into read-only data that is always there.
    unsafe { slice::from_raw_parts(&raw const slat_guest_begin, offset(&slat_guest_end) as usize) }
}
