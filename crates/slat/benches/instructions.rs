//! Instructions of each operation beside the direct loop of the same effect on the same tables, counted by callgrind,
//! so that a regression shows on a machine where times do not hold still.
//!
//! `cargo bench -p slat --bench instructions` compares with `instructions.toml`; `… -- --record` writes it. Needs
//! valgrind and `cargo install gungraun-runner` in the version that `crates/slat/Cargo.toml` names. Any other argument
//! goes to gungraun: `… -- '*::split::*'` shows one operation in its own words.
#![allow(missing_docs, unsafe_code)]

#[path = "../tests/machine/mod.rs"]
mod machine;
#[path = "instructions/recorded.rs"]
mod recorded;
#[path = "instructions/run.rs"]
mod run;

use std::hint::black_box;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};

use gungraun::{library_benchmark, library_benchmark_group};
use machine::Heap;
use run::{Asked, Row};
use slat::format::arm::{K4, Stage2};
use slat::format::ept::Ept;
use slat::format::npt::Npt;
use slat::{
    Attributes, Dirty, Edges, Format, Gpa, GpaRange, Hpa, Leaf, Level, Lookup, Participant,
    Reserve, Tree,
};

const BASE: u64 = 1 << 30;
const BLOCKS: u64 = 16;
const PAGES: u64 = BLOCKS * 512;
const PAGE: u64 = 1 << 12;
const BLOCK: u64 = 1 << 21;
/// What a leaf has beside its address: page, access flag, inner shareable, writable, readable, write-back.
const LEAF: u64 = 0x7c3;
const WRITE: u64 = 1 << 7;

const ROWS: [Row; 31] = [
    ("split.blocks", "fill.tables", "split 2M -> 4K"),
    ("split.pages", "fill.tables", "split what is split"),
    ("map.nothing", "fill.tables", "map a range of pages"),
    ("install.tables", "direct_install.tables", "map one page, pin included"),
    ("install_pinned.tables", "direct_install.tables", "map one page, inside a pin"),
    ("unmap.pages", "", "unmap whole tables"),
    ("unmap.dirty", "", "unmap whole tables, all dirty"),
    ("unmap_most.pages", "direct_clear.pages", "unmap 511 of 512 pages"),
    ("write_protect.writable", "direct_clear.pages", "write-protect, all change"),
    ("write_protect.protected", "direct_load.pages", "write-protect, none changes"),
    ("write_protect_sections.writable", "direct_clear.pages", "write-protect, 64-page sections"),
    ("write_protect_holes.writable", "direct_clear.pages", "write-protect, every other page"),
    ("age.young", "direct_clear.pages", "age, all young"),
    ("age.old", "direct_load.pages", "age, none young"),
    ("harvest.dirty", "direct_clear.pages", "harvest dirty, all dirty"),
    ("relax.protected", "direct_clear.pages", "relax, all change"),
    ("relax.writable", "direct_load.pages", "relax, none changes"),
    ("look_up.pages", "direct_look_up.pages", "look up, pin included"),
    ("look_up_pinned.pages", "direct_look_up.pages", "look up, inside a pin"),
    ("collapse.pages", "direct_clear.pages", "collapse 4K -> 2M"),
    ("trim.tables", "direct_clear.pages", "trim empty tables"),
    ("split_ept.blocks", "fill.tables", "EPT: split 2M -> 4K"),
    ("map_ept.nothing", "fill.tables", "EPT: map a range of pages"),
    ("write_protect_ept.writable", "direct_clear.pages", "EPT: write-protect, all change"),
    ("harvest_ept.dirty", "direct_clear.pages", "EPT: harvest dirty, all dirty"),
    ("look_up_ept.pages", "direct_look_up.pages", "EPT: look up, pin included"),
    ("split_npt.blocks", "fill.tables", "NPT: split 2M -> 4K"),
    ("map_npt.nothing", "fill.tables", "NPT: map a range of pages"),
    ("write_protect_npt.writable", "direct_clear.pages", "NPT: write-protect, all change"),
    ("harvest_npt.dirty", "direct_clear.pages", "NPT: harvest dirty, all dirty"),
    ("look_up_npt.pages", "direct_look_up.pages", "NPT: look up, pin included"),
];

/// A tree with something in the range, and all that operations on it need.
struct Bench<F: Format = Stage2<K4>> {
    tree: Tree<'static, F, Heap>,
    who: Participant<'static, Heap>,
    reserve: Reserve<'static, Heap>,
    range: GpaRange,
}

type Ready<F = Stage2<K4>> = Box<Bench<F>>;

/// Nothing is mapped, and there are tables in hand to map all of it.
fn nothing() -> Ready {
    with(Stage2::new(40).unwrap())
}

fn with<F: Format>(format: F) -> Ready<F> {
    let heap: &Heap = Box::leak(Box::new(Heap::new(4096, 4)));
    let mut reserve = Reserve::new(heap);
    reserve.top_up(2 * BLOCKS as usize + 8).unwrap();
    Box::new(Bench {
        tree: Tree::new(heap, format, 1).unwrap(),
        who: Participant::register(heap).unwrap(),
        reserve,
        range: GpaRange::new(Gpa(BASE), PAGES * PAGE).unwrap(),
    })
}

fn mapped<F: Format>(mut b: Ready<F>, attributes: Attributes, largest: Level) -> Ready<F> {
    let template = b.tree.template(attributes).unwrap();
    let output = Hpa(2 * BASE);
    b.tree.map(&b.who, &mut b.reserve, b.range, output, template, largest).unwrap();
    b
}

fn blocks() -> Ready {
    mapped(nothing(), Attributes::RW, Level::new(2).unwrap())
}

fn dirty_of<F: Format>(format: F) -> Ready<F> {
    mapped(with(format), Attributes { dirty: Dirty::Dirty, ..Attributes::RW }, Level::LAST)
}

fn pages_of<F: Format>(format: F) -> Ready<F> {
    mapped(with(format), Attributes::RW, Level::LAST)
}

fn pages() -> Ready {
    mapped(nothing(), Attributes::RW, Level::LAST)
}

fn protected() -> Ready {
    mapped(nothing(), Attributes::RO, Level::LAST)
}

fn old() -> Ready {
    mapped(nothing(), Attributes { accessed: false, ..Attributes::RW }, Level::LAST)
}

fn dirty() -> Ready {
    dirty_of(Stage2::<K4>::new(40).unwrap().with_hardware_dirty(true))
}

/// Tables are there, and nothing in them: page by page, so that each unmap covers its table in part only.
fn tables() -> Ready {
    let mut b = pages();
    for page in 0..PAGES {
        let page = GpaRange::new(Gpa(BASE + page * PAGE), PAGE).unwrap();
        b.tree.unmap(&mut b.who, &mut b.reserve, page, Edges::Exact, |_| {}).unwrap();
    }
    b
}

fn addresses() -> impl Iterator<Item = Gpa> {
    (0..PAGES).map(|page| Gpa(black_box(BASE + page * PAGE)))
}

#[library_benchmark]
#[bench::blocks(blocks(), BLOCKS)]
#[bench::pages(pages(), 0)]
fn split(mut b: Ready, blocks: u64) -> Ready {
    let done = b.tree.split(&b.who, &mut b.reserve, b.range, Level::LAST);
    assert_eq!(done, Ok(blocks));
    b
}

#[library_benchmark]
#[bench::nothing(nothing())]
fn map(mut b: Ready) -> Ready {
    let template = b.tree.template(Attributes::RW).unwrap();
    let output = Hpa(2 * BASE);
    let done = b.tree.map(&b.who, &mut b.reserve, b.range, output, template, Level::LAST);
    assert_eq!(done, Ok(PAGES));
    b
}

#[library_benchmark]
#[bench::tables(tables())]
fn install(mut b: Ready) -> Ready {
    let template = b.tree.template(Attributes::RW).unwrap();
    for gpa in addresses() {
        let pin = b.who.pin();
        let leaf = Leaf { gpa, level: Level::LAST, output: Hpa(gpa.0 + BASE), template };
        b.tree.install(&pin, &mut b.reserve, &leaf).unwrap();
    }
    b
}

#[library_benchmark]
#[bench::tables(tables())]
fn install_pinned(mut b: Ready) -> Ready {
    let template = b.tree.template(Attributes::RW).unwrap();
    let pin = b.who.pin();
    for gpa in addresses() {
        let leaf = Leaf { gpa, level: Level::LAST, output: Hpa(gpa.0 + BASE), template };
        b.tree.install(&pin, &mut b.reserve, &leaf).unwrap();
    }
    drop(pin);
    b
}

#[library_benchmark]
#[bench::pages(pages())]
#[bench::dirty(dirty())]
fn unmap(mut b: Ready) -> Ready {
    let Bench { tree, who, reserve, range } = &mut *b;
    tree.unmap(who, reserve, *range, Edges::Exact, |_| {}).unwrap();
    b
}

#[library_benchmark]
#[bench::pages(pages())]
fn unmap_most(mut b: Ready) -> Ready {
    let Bench { tree, who, reserve, .. } = &mut *b;
    for block in 0..BLOCKS {
        let most = GpaRange::new(Gpa(BASE + block * BLOCK), BLOCK - PAGE).unwrap();
        tree.unmap(who, reserve, most, Edges::Exact, |_| {}).unwrap();
    }
    b
}

#[library_benchmark]
#[bench::writable(pages(), PAGES)]
#[bench::protected(protected(), 0)]
fn write_protect(b: Ready, pages: u64) -> Ready {
    assert_eq!(b.tree.write_protect(&b.who, b.range, |_| {}), Ok(pages));
    b
}

fn protect_by_masks(b: &Bench, mask: u64) {
    for section in 0..PAGES / 64 {
        let first = Gpa(BASE + section * 64 * PAGE);
        let done = b.tree.write_protect_mask(&b.who, first, black_box(mask), |_| {});
        assert_eq!(done, Ok(mask.count_ones().into()));
    }
}

#[library_benchmark]
#[bench::writable(pages())]
fn write_protect_sections(b: Ready) -> Ready {
    protect_by_masks(&b, u64::MAX);
    b
}

#[library_benchmark]
#[bench::writable(pages())]
fn write_protect_holes(b: Ready) -> Ready {
    protect_by_masks(&b, u64::MAX / 3);
    b
}

#[library_benchmark]
#[bench::young(pages(), PAGES)]
#[bench::old(old(), 0)]
fn age(b: Ready, pages: u64) -> Ready {
    assert_eq!(b.tree.age(&b.who, b.range, true), Ok(pages));
    b
}

#[library_benchmark]
#[bench::dirty(dirty())]
fn harvest(b: Ready) -> Ready {
    let mut bytes = 0;
    let done = b.tree.harvest_dirty(&b.who, b.range, |range| bytes += range.size());
    assert_eq!((done, bytes), (Ok(PAGES), PAGES * PAGE));
    b
}

#[library_benchmark]
#[bench::protected(protected(), PAGES)]
#[bench::writable(pages(), 0)]
fn relax(b: Ready, pages: u64) -> Ready {
    let template = b.tree.template(Attributes::RW).unwrap();
    assert_eq!(b.tree.relax(&b.who, b.range, 0, template), Ok(pages));
    b
}

#[library_benchmark]
#[bench::pages(pages())]
fn look_up(b: Ready) -> Ready {
    for gpa in addresses() {
        let pin = b.who.pin();
        if let Ok(Lookup::Mapped { output, .. }) = b.tree.look_up(&pin, gpa) {
            black_box(output);
        }
    }
    b
}

#[library_benchmark]
#[bench::pages(pages())]
fn look_up_pinned(b: Ready) -> Ready {
    let pin = b.who.pin();
    for gpa in addresses() {
        if let Ok(Lookup::Mapped { output, .. }) = b.tree.look_up(&pin, gpa) {
            black_box(output);
        }
    }
    drop(pin);
    b
}

#[library_benchmark]
#[bench::pages(pages())]
fn collapse(mut b: Ready) -> Ready {
    let Bench { tree, who, range, .. } = &mut *b;
    assert_eq!(tree.collapse(who, *range, Level::TOP), Ok(BLOCKS));
    b
}

#[library_benchmark]
#[bench::tables(tables())]
fn trim(mut b: Ready) -> Ready {
    let Bench { tree, who, range, .. } = &mut *b;
    assert_eq!(tree.trim(who, *range), Ok(BLOCKS));
    b
}

/// The same on tables of x86.
macro_rules! x86 {
    ($format:ty: $split:ident $map:ident $write_protect:ident $harvest:ident $look_up:ident) => {
        #[library_benchmark]
        #[bench::blocks(mapped(with(<$format>::new(48).unwrap()), Attributes::RW, Level::new(2).unwrap()))]
        fn $split(mut b: Ready<$format>) -> Ready<$format> {
            assert_eq!(b.tree.split(&b.who, &mut b.reserve, b.range, Level::LAST), Ok(BLOCKS));
            b
        }

        #[library_benchmark]
        #[bench::nothing(with(<$format>::new(48).unwrap()))]
        fn $map(mut b: Ready<$format>) -> Ready<$format> {
            let template = b.tree.template(Attributes::RW).unwrap();
            let output = Hpa(2 * BASE);
            let done = b.tree.map(&b.who, &mut b.reserve, b.range, output, template, Level::LAST);
            assert_eq!(done, Ok(PAGES));
            b
        }

        #[library_benchmark]
        #[bench::writable(pages_of(<$format>::new(48).unwrap()))]
        fn $write_protect(b: Ready<$format>) -> Ready<$format> {
            assert_eq!(b.tree.write_protect(&b.who, b.range, |_| {}), Ok(PAGES));
            b
        }

        #[library_benchmark]
        #[bench::dirty(dirty_of(<$format>::new(48).unwrap().with_hardware_dirty(true)))]
        fn $harvest(b: Ready<$format>) -> Ready<$format> {
            let mut bytes = 0;
            let done = b.tree.harvest_dirty(&b.who, b.range, |range| bytes += range.size());
            assert_eq!((done, bytes), (Ok(PAGES), PAGES * PAGE));
            b
        }

        #[library_benchmark]
        #[bench::pages(pages_of(<$format>::new(48).unwrap()))]
        fn $look_up(b: Ready<$format>) -> Ready<$format> {
            for gpa in addresses() {
                let pin = b.who.pin();
                if let Ok(Lookup::Mapped { output, .. }) = b.tree.look_up(&pin, gpa) {
                    black_box(output);
                }
            }
            b
        }
    };
}

x86!(Ept: split_ept map_ept write_protect_ept harvest_ept look_up_ept);
x86!(Npt: split_npt map_npt write_protect_npt harvest_npt look_up_npt);

#[library_benchmark]
#[bench::tables(vec![[0; 512]; BLOCKS as usize])]
fn fill(mut tables: Vec<[u64; 512]>) -> Vec<[u64; 512]> {
    for (table, block) in tables.iter_mut().zip(0..) {
        for (entry, page) in black_box(table).iter_mut().zip(0..) {
            *entry = (2 * BASE + block * BLOCK + page * PAGE) | LEAF;
        }
    }
    tables
}

// One load of every entry and nothing else.
#[library_benchmark]
#[bench::pages(pages())]
fn direct_load(b: Ready) -> Ready {
    let mut found = 0;
    for block in 0..BLOCKS {
        for entry in table(&b, block) {
            found += u64::from(entry.load(Ordering::Relaxed) & WRITE != 0);
        }
    }
    black_box(found);
    b
}

// One read-modify-write of every entry.
#[library_benchmark]
#[bench::pages(pages())]
fn direct_clear(b: Ready) -> Ready {
    for block in 0..BLOCKS {
        for entry in table(&b, block) {
            black_box(entry.fetch_and(!WRITE, Ordering::AcqRel));
        }
    }
    b
}

#[library_benchmark]
#[bench::pages(pages())]
fn direct_look_up(b: Ready) -> Ready {
    let root = b.tree.root();
    for gpa in addresses() {
        let entry = descend(root, gpa).load(Ordering::Acquire);
        if entry & 1 != 0 {
            black_box(entry & NEXT | gpa.0 & (PAGE - 1));
        }
    }
    b
}

#[library_benchmark]
#[bench::tables(tables())]
fn direct_install(b: Ready) -> Ready {
    let root = b.tree.root();
    for gpa in addresses() {
        let new = (gpa.0 + BASE) | LEAF;
        let entry = descend(root, gpa);
        entry.compare_exchange(0, new, Ordering::AcqRel, Ordering::Acquire).unwrap();
    }
    b
}

/// The bits of a table entry that say where the table is.
const NEXT: u64 = 0xffff_ffff_f000;

/// A hand-written walk of three levels that checks each table entry, as it must.
#[inline(always)]
fn descend(root: Hpa, gpa: Gpa) -> &'static AtomicU64 {
    // SAFETY: an address is a pointer here; the tables belong to the tree of a benchmark, which is alive.
    let entry =
        |table: u64, index: u64| unsafe { &*(table as *const AtomicU64).add(index as usize) };
    let one: &AtomicU64 = entry(root.0, gpa.0 >> 30 & 1023);
    let value = one.load(Ordering::Acquire);
    if value & 3 != 3 {
        return one;
    }
    let two = entry(value & NEXT, gpa.0 >> 21 & 511);
    let value = two.load(Ordering::Acquire);
    if value & 3 != 3 {
        return two;
    }
    entry(value & NEXT, gpa.0 >> 12 & 511)
}

/// The last-level table of a block.
fn table(b: &Bench, block: u64) -> &[AtomicU64; 512] {
    let first: *const AtomicU64 = descend(b.tree.root(), Gpa(BASE + block * BLOCK));
    // SAFETY: the block is mapped in pages, so its first entry begins a table of 512.
    unsafe { &*first.cast() }
}

library_benchmark_group!(
    name = operations,
    benchmarks = [
        split,
        map,
        install,
        install_pinned,
        unmap,
        unmap_most,
        write_protect,
        write_protect_sections,
        write_protect_holes,
        age,
        harvest,
        relax,
        look_up,
        look_up_pinned,
        collapse,
        trim,
        split_ept,
        map_ept,
        write_protect_ept,
        harvest_ept,
        look_up_ept,
        split_npt,
        map_npt,
        write_protect_npt,
        harvest_npt,
        look_up_npt,
    ]
);

library_benchmark_group!(
    name = direct,
    benchmarks = [fill, direct_load, direct_clear, direct_look_up, direct_install]
);

/// gungraun's `main` within our own.
mod harness {
    use super::{direct, operations};

    gungraun::main!(library_benchmark_groups = operations, direct);

    pub(crate) fn run() {
        main();
    }
}

fn main() -> ExitCode {
    match Asked::from_arguments() {
        Asked::Gungraun => harness::run(),
        Asked::Nothing => {}
        Asked::Compare => return run::run(&ROWS, PAGES, false),
        Asked::Record => return run::run(&ROWS, PAGES, true),
    }
    ExitCode::SUCCESS
}
