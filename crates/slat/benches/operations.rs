//! Each operation beside the direct loop of the same effect on the same tables and beside what the machine can do at
//! all: nanoseconds an entry of 4K, medians of one run, and their ratio.
//!
//! `cargo bench -p slat --bench operations`
#![allow(unsafe_code, missing_docs)]

#[path = "../tests/machine/mod.rs"]
mod machine;

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use machine::Heap;
use slat::format::arm::{K4, Stage2};
use slat::{
    Attributes, Edges, Gpa, GpaRange, Hpa, Leaf, Level, Lookup, Participant, Reserve, Template,
    Tree,
};

const BASE: u64 = 1 << 30;
const PAGES: u64 = 1 << 16;
const SIZE: u64 = PAGES << 12;
const TABLES: usize = (PAGES / 512) as usize;
const ROUNDS: usize = 31;
const W: u64 = 1 << 7;
const AF: u64 = 1 << 10;

type Stage2K4 = Stage2<K4>;

/// A tree with 256 MiB to work on, and raw views of its tables for the direct loops.
struct Bench<'m> {
    tree: Tree<'m, Stage2K4, Heap>,
    who: Participant<'m, Heap>,
    reserve: Reserve<'m, Heap>,
    range: GpaRange,
    rw: Template,
}

impl<'m> Bench<'m> {
    fn new(heap: &'m Heap) -> Self {
        let tree = Tree::new(heap, Stage2K4::new(40).unwrap(), 1).unwrap();
        let rw = tree.template(Attributes::RW).unwrap();
        Self {
            who: Participant::register(heap).unwrap(),
            reserve: Reserve::new(heap),
            range: GpaRange::new(Gpa(BASE), SIZE).unwrap(),
            tree,
            rw,
        }
    }

    fn map(&mut self, level: Level) {
        self.reserve.top_up(TABLES + 8).unwrap();
        let output = Hpa(BASE * 2);
        self.tree.map(&self.who, &mut self.reserve, self.range, output, self.rw, level).unwrap();
    }

    fn unmap(&mut self) {
        let (who, reserve) = (&mut self.who, &mut self.reserve);
        self.tree.unmap(who, reserve, self.range, Edges::Exact, |_| {}).unwrap();
    }

    fn clear(&mut self) {
        self.unmap();
        self.tree.reclaim(&mut self.who);
    }

    /// The last-level tables of the range, mapped in pages.
    fn tables(&self) -> Vec<&'static [AtomicU64; 512]> {
        // SAFETY: table memory is pointers here, and stays allocated while the caller uses it.
        unsafe {
            let root = self.tree.root().0 as *const u64;
            let two = (*root.add((BASE >> 30) as usize) & 0xffff_ffff_f000) as *const u64;
            (0..TABLES).map(|i| &*((*two.add(i) & 0xffff_ffff_f000) as *const _)).collect()
        }
    }
}

fn ns(entries: u64, work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_nanos() as f64 / entries as f64
}

/// Medians of two things measured in turn.
fn both(mut one: impl FnMut() -> f64, mut other: impl FnMut() -> f64) -> (f64, f64) {
    let mut times: [Vec<f64>; 2] = [Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        times[0].push(one());
        times[1].push(other());
    }
    let median = |times: &mut Vec<f64>| {
        times.sort_by(f64::total_cmp);
        times[ROUNDS / 2]
    };
    (median(&mut times[0]), median(&mut times[1]))
}

fn row(what: &str, beside: &str, (ours, direct): (f64, f64), goal: &str) {
    println!("{what:<34} {ours:>8.3}   {beside:<30} {direct:>8.3} {:>8.2}   {goal}", ours / direct);
}

fn fill(table: &mut [u64; 512], first: u64) {
    for (index, entry) in table.iter_mut().enumerate() {
        *entry = (first + ((index as u64) << 12)) | 0x7c3;
    }
}

fn all(tables: &[&[AtomicU64; 512]], each: impl Fn(&AtomicU64)) {
    for table in tables {
        for entry in table.iter() {
            each(entry);
        }
    }
}

fn main() {
    let heap = Heap::new(4096, 4);
    let mut memory = vec![[0u64; 512]; TABLES];
    let mut fill_all = || {
        ns(PAGES, || {
            for (n, table) in memory.iter_mut().enumerate() {
                fill(black_box(table), (n as u64) << 21);
            }
        })
    };
    println!(
        "{:<34} {:>8}   {:<30} {:>8} {:>8}   goal",
        "ns per 4K entry", "slat", "beside", "ns", "ratio"
    );

    let mut b = Bench::new(&heap);
    let times = both(
        || {
            b.map(Level::new(2).unwrap());
            b.reserve.top_up(TABLES).unwrap();
            let time = ns(PAGES, || {
                let n = b.tree.split(&b.who, &mut b.reserve, b.range, Level::LAST).unwrap();
                assert_eq!(n, TABLES as u64);
            });
            b.clear();
            time
        },
        &mut fill_all,
    );
    row("split 2M -> 4K", "fill", times, "<= 2x");

    b.map(Level::LAST);
    let times = both(
        || {
            ns(PAGES, || {
                b.tree.split(&b.who, &mut b.reserve, b.range, Level::LAST).unwrap();
            })
        },
        &mut fill_all,
    );
    row("split what is split", "fill", times, "<= 0.02 ns");
    b.clear();

    let times = both(
        || {
            b.reserve.top_up(TABLES + 8).unwrap();
            let time = ns(PAGES, || b.map(Level::LAST));
            b.clear();
            time
        },
        &mut fill_all,
    );
    row("map a range of pages", "fill", times, "<= 2x");

    // Unmap of whole tables: what detaching costs, and with the grace period and the frees.
    let cell = std::cell::RefCell::new(&mut b);
    let times = both(
        || {
            let mut b = cell.borrow_mut();
            b.map(Level::LAST);
            let time = ns(PAGES, || b.unmap());
            let Bench { tree, who, .. } = &mut **b;
            tree.reclaim(who);
            time
        },
        || {
            let mut b = cell.borrow_mut();
            b.map(Level::LAST);
            ns(PAGES, || b.clear())
        },
    );
    row("unmap whole tables", "the same, and freeing them", times, "<= 0.1 ns");

    // One page: the tables are there.
    b.map(Level::LAST);
    let tables = b.tables();
    let root = b.tree.root().0;
    let empty = || all(&tables, |entry| entry.store(0, Ordering::Relaxed));
    let direct_map = || {
        empty();
        ns(PAGES, || {
            for page in 0..PAGES {
                let gpa = black_box(BASE + (page << 12));
                let entry = direct(root, gpa);
                let new = (gpa + BASE) | 0x7c3;
                entry.compare_exchange(0, new, Ordering::AcqRel, Ordering::Acquire).unwrap();
            }
        })
    };
    let times = both(
        || {
            empty();
            ns(PAGES, || {
                for page in 0..PAGES {
                    let gpa = Gpa(black_box(BASE + (page << 12)));
                    let pin = b.who.pin();
                    let output = Hpa(gpa.0 + BASE);
                    let leaf = Leaf { gpa, level: Level::LAST, output, template: b.rw };
                    b.tree.install(&pin, &mut b.reserve, &leaf).unwrap();
                }
            })
        },
        direct_map,
    );
    row("map one page, pin included", "descent + compare-exchange", times, "<= 2x");
    let times = both(
        || {
            empty();
            ns(PAGES, || {
                let pin = b.who.pin();
                for page in 0..PAGES {
                    let gpa = Gpa(black_box(BASE + (page << 12)));
                    let output = Hpa(gpa.0 + BASE);
                    let leaf = Leaf { gpa, level: Level::LAST, output, template: b.rw };
                    b.tree.install(&pin, &mut b.reserve, &leaf).unwrap();
                }
            })
        },
        direct_map,
    );
    row("map one page, inside a pin", "descent + compare-exchange", times, "<= 2x");

    let set = |bits: u64| {
        all(&tables, |entry| {
            entry.store(entry.load(Ordering::Relaxed) | bits, Ordering::Relaxed);
        })
    };
    let clear = |bits: u64| {
        all(&tables, |entry| {
            entry.store(entry.load(Ordering::Relaxed) & !bits, Ordering::Relaxed);
        })
    };
    let rmw = |bit: u64| {
        set(bit);
        ns(PAGES, || {
            all(&tables, |entry| {
                black_box(entry.fetch_and(!bit, Ordering::AcqRel));
            })
        })
    };
    let loads = |bit: u64| {
        clear(bit);
        ns(PAGES, || {
            let mut found = 0;
            for table in &tables {
                for entry in table.iter() {
                    found += u64::from(entry.load(Ordering::Relaxed) & bit != 0);
                }
            }
            black_box(found);
        })
    };
    let protect = || {
        ns(PAGES, || {
            b.tree.write_protect(&b.who, b.range, |_| {}).unwrap();
        })
    };
    let times = both(
        || {
            set(W);
            protect()
        },
        || rmw(W),
    );
    row("write-protect, all change", "one RMW each", times, "<= 0.6x");
    let times = both(
        || {
            clear(W);
            protect()
        },
        || loads(W),
    );
    row("write-protect, none changes", "one load each", times, "<= 1.5x");
    let times = both(
        || {
            set(W);
            ns(PAGES, || {
                for section in 0..PAGES / 64 {
                    let first = Gpa(BASE + (section << 18));
                    b.tree.write_protect_mask(&b.who, first, black_box(u64::MAX), |_| {}).unwrap();
                }
            })
        },
        || {
            set(W);
            protect()
        },
    );
    row("write-protect, 64-page sections", "the range at once", times, "<= 1.3x");
    let age = || {
        ns(PAGES, || {
            b.tree.age(&b.who, b.range, true).unwrap();
        })
    };
    let times = both(
        || {
            set(AF);
            age()
        },
        || rmw(AF),
    );
    row("age, all young", "one RMW each", times, "<= 0.6x");
    let times = both(
        || {
            clear(AF);
            age()
        },
        || loads(AF),
    );
    row("age, none young", "one load each", times, "<= 1.5x");
    set(AF | W);

    let direct_lookup = || {
        ns(PAGES, || {
            for page in 0..PAGES {
                let gpa = black_box(BASE + (page << 12));
                let entry = direct(root, gpa).load(Ordering::Acquire);
                if entry & 1 != 0 {
                    black_box(entry & 0xffff_ffff_f000 | gpa & 0xfff);
                }
            }
        })
    };
    let times = both(
        || {
            ns(PAGES, || {
                let pin = b.who.pin();
                for page in 0..PAGES {
                    let gpa = Gpa(black_box(BASE + (page << 12)));
                    if let Ok(Lookup::Mapped { output, .. }) = b.tree.look_up(&pin, gpa) {
                        black_box(output);
                    }
                }
            })
        },
        direct_lookup,
    );
    row("look up, inside a pin", "descent", times, "<= 2x");
    let times = both(
        || {
            ns(PAGES, || {
                for page in 0..PAGES {
                    let gpa = Gpa(black_box(BASE + (page << 12)));
                    let pin = b.who.pin();
                    if let Ok(Lookup::Mapped { output, .. }) = b.tree.look_up(&pin, gpa) {
                        black_box(output);
                    }
                }
            })
        },
        direct_lookup,
    );
    row("look up, pin included", "descent", times, "");

    set(W);
    let cell = AtomicU64::new(0);
    let exchange = both(
        || {
            ns(PAGES, || {
                for n in 0..PAGES {
                    let _ = cell.compare_exchange(n, n + 1, Ordering::AcqRel, Ordering::Acquire);
                }
                cell.store(0, Ordering::Relaxed);
            })
        },
        || {
            let chain: Vec<u64> = (0..512).map(|n| (n * 7 + 1) % 512).collect();
            ns(PAGES, || {
                let mut at = 0;
                for _ in 0..PAGES {
                    at = black_box(&chain)[at as usize];
                }
                black_box(at);
            })
        },
    );
    row("one compare-exchange, hot", "dependent load", exchange, "");
    let times = both(
        || {
            set(W);
            // SAFETY: the engine has found the CPU to have it, or this row says nothing.
            ns(PAGES, || unsafe { pairs(&tables) })
        },
        || rmw(W),
    );
    row("16-byte exchange, per entry", "one RMW each", times, "");
}

/// A hand-written walk of three levels that checks each table entry, as it must.
#[inline(always)]
fn direct(root: u64, gpa: u64) -> &'static AtomicU64 {
    // SAFETY: the tables are there: the caller mapped the address.
    unsafe {
        let entry = |table: u64, shift: u32, mask: u64| {
            &*((table as *const AtomicU64).add((gpa >> shift & mask) as usize))
        };
        let one: &AtomicU64 = entry(root, 30, 1023);
        let value = one.load(Ordering::Acquire);
        if value & 3 != 3 {
            return one;
        }
        let two: &AtomicU64 = entry(value & 0xffff_ffff_f000, 21, 511);
        let value = two.load(Ordering::Acquire);
        if value & 3 != 3 {
            return two;
        }
        entry(value & 0xffff_ffff_f000, 12, 511)
    }
}

/// What this CPU can do at best: two neighbours in one exchange, nothing else.
#[cfg(target_arch = "x86_64")]
unsafe fn pairs(tables: &[&[AtomicU64; 512]]) {
    for table in tables {
        for two in table.chunks(2) {
            let (a, b) = (two[0].load(Ordering::Acquire), two[1].load(Ordering::Acquire));
            // SAFETY: two entries at an even index of an aligned table; rbx is put back.
            unsafe {
                std::arch::asm!(
                    "xchg rsi, rbx",
                    "lock cmpxchg16b xmmword ptr [rdi]",
                    "mov rbx, rsi",
                    in("rdi") two.as_ptr(),
                    inout("rsi") a & !W => _,
                    in("rcx") b & !W,
                    inout("rax") a => _,
                    inout("rdx") b => _,
                    options(nostack),
                );
            }
        }
    }
}

/// Elsewhere the engine exchanges entries singly.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn pairs(_: &[&[AtomicU64; 512]]) {}
