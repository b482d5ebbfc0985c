//! What it costs to read a dirty log and to protect its pages again, in each of its kinds, beside the direct loop of the
//! same effect over a bare bitmap, a bare ring, and the bare entries of the same tables: nanoseconds, medians of rounds
//! in which both are measured in turn, of the processor's time: others may use the computer.
//!
//! `cargo bench -p slat-vm --bench dirty_log -- --size 1G` for less than 16 GiB of guest memory. There is no such
//! memory: only tables, and addresses that the host makes up. Pages are dirty at random, and are written in order.
#![allow(unsafe_code, missing_docs)]

#[path = "../../slat/tests/machine/mod.rs"]
mod machine;

use machine::Heap;
use slat::format::arm::{K4, Stage2};
use slat::{Gpa, Hpa};
use slat_vm::{
    Access, DirtyRing, Exit, Fault, FaultKind, Host, HostError, HostPage, Hva, LogMode, SlotConfig,
    Vcpu, Vm, VmOptions, Worker,
};
use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};

const PAGE: u64 = 4096;
const ROUNDS: usize = 5;
const PERCENT: [u64; 3] = [1, 50, 100];
const RING: u32 = 65536;
/// The permission to write; with `DBM`, dirty.
const W: u64 = 1 << 7;

type Table = &'static [AtomicU64; 512];

/// Host memory that nobody looks at.
struct Nowhere;

impl Host for Nowhere {
    fn page(&self, hva: Hva, _: Access) -> Result<HostPage, HostError> {
        let output = Hpa((1 << 40) + (hva.0 & !(PAGE - 1)));
        Ok(HostPage { output, size: PAGE, writable: true, device: false })
    }
}

/// A guest whose memory is mapped by pages, and what the direct loops work on.
struct Bench<'m> {
    vm: Vm<'m, Stage2<K4>, Heap, Nowhere>,
    worker: Worker<'m, Heap>,
    vcpu: Vcpu<'m, Heap>,
    pages: u64,
    tables: Vec<Table>,
    /// The pages that are written, in order.
    dirty: Vec<u64>,
    /// The bare bitmap.
    words: Vec<AtomicU64>,
    out: Vec<u64>,
    /// The bare ring: states and pages.
    ring: Vec<[AtomicU64; 2]>,
    elsewhere: Vec<u64>,
}

impl<'m> Bench<'m> {
    fn new(heap: &'m Heap, format: Stage2<K4>, pages: u64) -> Self {
        let options = VmOptions { dirty_ring: Some(RING), ..VmOptions::default() };
        let vm = Vm::new(heap, Nowhere, format, 1, options).unwrap();
        let mut worker = vm.worker().unwrap();
        let ram = SlotConfig::new(Gpa(0), pages * PAGE, Hva(0));
        vm.create_slot(&mut worker, 0, ram).unwrap();
        let vcpu = vm.vcpu().unwrap();
        let words = pages.div_ceil(64) as usize;
        let mut bench = Self {
            worker,
            vcpu,
            pages,
            tables: Vec::new(),
            dirty: (0..pages).collect(),
            words: (0..words).map(|_| AtomicU64::new(0)).collect(),
            out: vec![0; words],
            ring: (0..RING).map(|_| [AtomicU64::new(0), AtomicU64::new(0)]).collect(),
            elsewhere: vec![1; 8 << 20],
            vm,
        };
        bench.write(FaultKind::Translation, |_| panic!("no log yet"));
        bench.tables = bench.tables();
        bench
    }

    /// The last-level tables of guest memory, all of it mapped in pages.
    fn tables(&self) -> Vec<Table> {
        let root = self.vm.tree().root().0;
        // SAFETY: table memory is pointers here, and stays allocated as long as the tree.
        let entry = |table: u64, index: u64| unsafe {
            *(table as *const u64).add(index as usize) & 0xffff_ffff_f000
        };
        let leaf = |n: u64| entry(entry(root, n >> 9), n & 511);
        // SAFETY: as above.
        (0..self.pages / 512).map(|n| unsafe { &*(leaf(n) as *const _) }).collect()
    }

    fn entry(&self, page: u64) -> &AtomicU64 {
        &self.tables[page as usize >> 9][page as usize & 511]
    }

    /// From now on so many of a hundred pages are written.
    fn choose(&mut self, percent: u64) {
        let mixed = |page: u64| (page + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(31);
        let chosen = |page| mixed(mixed(page)) % 100 < percent;
        self.dirty = (0..self.pages).filter(|&page| chosen(page)).collect();
    }

    /// The guest writes to the pages; `full` empties its ring.
    fn write(&mut self, kind: FaultKind, mut full: impl FnMut(&mut Self)) {
        for n in 0..self.dirty.len() {
            let gpa = Gpa(self.dirty[n] * PAGE);
            match self.vcpu.fault(&self.vm, Fault { gpa, access: Access::Write, kind }) {
                Ok(Exit::Resume) => {}
                Ok(Exit::DirtyRingFull) => full(self),
                other => panic!("{other:?}"),
            }
        }
    }

    /// The same effect on the bare bitmap and the entries.
    fn write_bare(&self) {
        for &page in &self.dirty {
            self.words[page as usize / 64].fetch_or(1 << (page % 64), Ordering::Relaxed);
            self.entry(page).fetch_or(W, Ordering::Relaxed);
        }
    }

    /// Nanoseconds of `work`, with little of what it needs in the caches.
    fn time(&mut self, work: impl FnOnce(&mut Self)) -> f64 {
        black_box(self.elsewhere.iter().sum::<u64>());
        let start = now();
        work(self);
        now() - start
    }

    fn enable(&mut self, mode: LogMode) {
        self.vm.enable_log(&mut self.worker, 0, mode).unwrap();
    }

    fn disable(&mut self) {
        self.vm.disable_log(&mut self.worker, 0).unwrap();
    }

    fn get(&mut self) {
        let pages = self.vm.dirty_log(&mut self.worker, 0, &mut self.out).unwrap();
        assert_eq!(pages, self.dirty.len() as u64);
    }

    fn clear(&mut self) {
        self.vm.clear_dirty_log(&mut self.worker, 0, 0, self.pages, &self.out).unwrap();
    }

    fn clear_sections(&mut self) {
        for (n, word) in (0..).zip(&self.out) {
            if *word != 0 {
                let section = std::slice::from_ref(word);
                self.vm.clear_dirty_log(&mut self.worker, 0, n * 64, 64, section).unwrap();
            }
        }
    }

    fn protect_bare(&self, word: usize, mut bits: u64) {
        while bits != 0 {
            let page = word as u64 * 64 + u64::from(bits.trailing_zeros());
            black_box(self.entry(page).fetch_and(!W, Ordering::AcqRel));
            bits &= bits - 1;
        }
    }

    fn get_and_protect_bare(&mut self) {
        for n in 0..self.words.len() {
            self.out[n] = self.words[n].swap(0, Ordering::AcqRel);
            self.protect_bare(n, self.out[n]);
        }
    }

    fn get_bare(&mut self) {
        for (out, word) in self.out.iter_mut().zip(&self.words) {
            *out = word.load(Ordering::Relaxed);
        }
    }

    fn clear_bare(&mut self) {
        for n in 0..self.words.len() {
            let taken = self.words[n].fetch_and(!self.out[n], Ordering::AcqRel) & self.out[n];
            self.protect_bare(n, taken);
        }
    }

    fn harvest_bare(&mut self) {
        for (n, table) in self.tables.iter().enumerate() {
            for (index, entry) in table.iter().enumerate() {
                if entry.load(Ordering::Relaxed) & W != 0 {
                    entry.fetch_and(!W, Ordering::AcqRel);
                    let page = n * 512 + index;
                    self.out[page / 64] |= 1 << (page % 64);
                }
            }
        }
    }
}

/// Nanoseconds that this thread has run.
#[cfg(target_os = "linux")]
fn now() -> f64 {
    #[repr(C)]
    struct Time {
        seconds: std::ffi::c_long,
        nanoseconds: std::ffi::c_long,
    }
    unsafe extern "C" {
        fn clock_gettime(clock: std::ffi::c_int, time: *mut Time) -> std::ffi::c_int;
    }
    const THREAD_CPUTIME_ID: std::ffi::c_int = 3;
    let mut time = Time { seconds: 0, nanoseconds: 0 };
    // SAFETY: the time is there to be written to.
    assert_eq!(unsafe { clock_gettime(THREAD_CPUTIME_ID, &mut time) }, 0);
    time.seconds as f64 * 1e9 + time.nanoseconds as f64
}

/// Nanoseconds since the first call.
#[cfg(not(target_os = "linux"))]
fn now() -> f64 {
    static START: std::sync::LazyLock<std::time::Instant> =
        std::sync::LazyLock::new(std::time::Instant::now);
    START.elapsed().as_nanos() as f64
}

/// Medians of each of the things that a round measures.
fn medians<const N: usize>(mut round: impl FnMut() -> [f64; N]) -> [f64; N] {
    let rounds: Vec<_> = (0..ROUNDS).map(|_| round()).collect();
    std::array::from_fn(|n| {
        let mut times: Vec<_> = rounds.iter().map(|round| round[n]).collect();
        times.sort_by(f64::total_cmp);
        times[ROUNDS / 2]
    })
}

fn row(bench: &Bench<'_>, percent: u64, what: &str, (ours, direct): (f64, f64)) {
    let (pages, dirty) = (bench.pages as f64, bench.dirty.len() as f64);
    println!(
        "{what:<32} {percent:>5}% {:>9.3} {:>9.3} {:>9.2} {:>9.2} {:>7.2}",
        ours / pages,
        direct / pages,
        ours / dirty,
        direct / dirty,
        ours / direct
    );
}

fn protect(b: &mut Bench<'_>, percent: u64) {
    let [ours, direct] = medians(|| {
        b.write(FaultKind::Permission, |_| unreachable!("no ring"));
        let ours = b.time(Bench::get);
        b.write_bare();
        [ours, b.time(Bench::get_and_protect_bare)]
    });
    row(b, percent, "bitmap, get and protect", (ours, direct));
}

fn manual(b: &mut Bench<'_>, percent: u64) {
    let [get, get_bare, clear, sections, clear_bare] = medians(|| {
        b.write(FaultKind::Permission, |_| unreachable!("no ring"));
        let get = b.time(Bench::get);
        let clear = b.time(Bench::clear);
        b.write(FaultKind::Permission, |_| unreachable!("no ring"));
        b.get();
        let sections = b.time(Bench::clear_sections);
        b.write_bare();
        let get_bare = b.time(Bench::get_bare);
        [get, get_bare, clear, sections, b.time(Bench::clear_bare)]
    });
    row(b, percent, "bitmap, get", (get, get_bare));
    row(b, percent, "bitmap, clear at once", (clear, clear_bare));
    row(b, percent, "bitmap, clear by 64 pages", (sections, clear_bare));
}

/// Rings are emptied as often as they are full.
fn rings(b: &mut Bench<'_>, percent: u64) {
    let ring = b.vcpu.dirty_ring().unwrap();
    let [harvest, reset, harvest_bare, reset_bare] = medians(|| {
        let mut times = [0.0; 4];
        let mut empty = |b: &mut Bench<'_>| {
            for (sum, time) in times.iter_mut().zip(empty(b, &ring)) {
                *sum += time;
            }
        };
        b.write(FaultKind::Permission, &mut empty);
        empty(b);
        times
    });
    row(b, percent, "ring, harvest", (harvest, harvest_bare));
    row(b, percent, "ring, reset", (reset, reset_bare));
}

/// Empties the ring, and a bare one with the same pages in it.
fn empty(b: &mut Bench<'_>, ring: &DirtyRing) -> [f64; 4] {
    let mut pages = Vec::with_capacity(RING as usize);
    let harvest = b.time(|_| {
        ring.harvest(|found| pages.push(found.page));
    });
    let reset = b.time(|b| {
        b.vm.reset_dirty_ring(&mut b.worker, ring).unwrap();
    });
    for (n, &page) in pages.iter().enumerate() {
        b.ring[n][0].store(1, Ordering::Relaxed);
        b.ring[n][1].store(page, Ordering::Relaxed);
        b.entry(page).fetch_or(W, Ordering::Relaxed);
    }
    let count = pages.len();
    pages.clear();
    let harvest_bare = b.time(|b| {
        for [state, page] in &b.ring[..count] {
            state.swap(3, Ordering::AcqRel);
            pages.push(page.load(Ordering::Relaxed));
        }
    });
    let reset_bare = b.time(|b| {
        for [state, page] in &b.ring[..count] {
            let page = page.load(Ordering::Relaxed);
            black_box(b.entry(page).fetch_and(!W, Ordering::AcqRel));
            state.store(0, Ordering::Release);
        }
    });
    [harvest, reset, harvest_bare, reset_bare]
}

fn hardware(b: &mut Bench<'_>, percent: u64) {
    let [ours, direct] = medians(|| {
        b.write_bare();
        let ours = b.time(Bench::get);
        b.write_bare();
        b.out.fill(0);
        [ours, b.time(Bench::harvest_bare)]
    });
    row(b, percent, "hardware, get", (ours, direct));
}

/// Pages of `--size`, in whole tables of the last level.
fn pages() -> u64 {
    let mut arguments = std::env::args().skip_while(|argument| argument != "--size").skip(1);
    let size = arguments.next().unwrap_or_else(|| "16G".to_owned());
    let (number, unit) = size.split_at(size.len().saturating_sub(1));
    let shift = match unit {
        "M" => 20,
        "G" => 30,
        _ => panic!("--size {size}: say how many M or G"),
    };
    let bytes = number.parse::<u64>().ok().and_then(|number| number.checked_mul(1 << shift));
    let pages =
        bytes.map(|bytes| bytes / PAGE / 512 * 512).filter(|pages| (512..1 << 28).contains(pages));
    pages.unwrap_or_else(|| panic!("--size {size}: 2M to 512G"))
}

/// Measures with so many of a hundred pages dirty.
type Measure = fn(&mut Bench<'_>, u64);

fn main() {
    let pages = pages();
    let format = Stage2::<K4>::new(40).unwrap();
    println!(
        "{:<38} {:>19} {:>19}\n{:<32} {:>6} {:>9} {:>9} {:>9} {:>9} {:>7}",
        format!("{} MiB, ns", (pages * PAGE) >> 20),
        "each page",
        "each dirty page",
        "",
        "dirty",
        "slat",
        "direct",
        "slat",
        "direct",
        "ratio"
    );
    let heap = Heap::new(4096, 4);
    let mut bench = Bench::new(&heap, format, pages);
    let modes: [(LogMode, Measure); 3] = [
        (LogMode::Protect, protect),
        (LogMode::Manual { initially_all_set: false }, manual),
        (LogMode::Ring { backup: false }, rings),
    ];
    for (mode, measure) in modes {
        bench.enable(mode);
        for percent in PERCENT {
            bench.choose(percent);
            measure(&mut bench, percent);
        }
        bench.disable();
    }
    drop(bench);
    let mut bench = Bench::new(&heap, format.with_hardware_dirty(true), pages);
    bench.enable(LogMode::Hardware);
    for percent in PERCENT {
        bench.choose(percent);
        hardware(&mut bench, percent);
    }
}
