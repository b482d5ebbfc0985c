//! The sequences of each architecture, step by step (rule 12), and what they promise to vCPUs.
#![cfg(not(loom))]
#![expect(unsafe_code, reason = "implements Machine")]

use std::cell::Cell;
use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;

use Instruction::*;
use slat::gate::Requests;
use slat::maintenance::arm::{Arm, RANGE_PAGES, SINGLES, operand};
use slat::maintenance::x86::{Ept, Npt};
use slat::maintenance::{Context, Features, Instruction, Invalidation, Maintenance};
use slat::{Entry, Gpa, GpaRange, Hpa, Level, Machine, Participant, Slot};

/// A machine that writes down what it executes.
#[derive(Default)]
struct Recorder {
    features: Features,
    slots: Vec<Slot>,
    steps: Mutex<Vec<Instruction>>,
    no_preemption: AtomicUsize,
}

// SAFETY: it has no tables.
unsafe impl Machine for Recorder {
    fn allocate(&self, _: usize) -> Option<Hpa> {
        None
    }

    unsafe fn free(&self, _: Hpa, _: usize) {}

    fn entries(&self, _: Hpa) -> NonNull<Entry> {
        NonNull::dangling()
    }

    fn slots(&self) -> &[Slot] {
        &self.slots
    }

    fn features(&self) -> Features {
        self.features
    }

    fn execute(&self, instruction: Instruction) {
        if let EnterContext(_) | LeaveContext = instruction {
            assert_ne!(self.no_preemption.load(Ordering::Relaxed), 0);
        }
        self.steps.lock().unwrap().push(instruction);
    }

    fn preemption(&self, off: bool) {
        if off {
            self.no_preemption.fetch_add(1, Ordering::Relaxed);
        } else {
            assert_ne!(self.no_preemption.fetch_sub(1, Ordering::Relaxed), 0);
        }
    }
}

const PLAIN: Features = Features { tlb_range: false, ttl: false, bbm_level: 0 };
const TTL: Features = Features { ttl: true, ..PLAIN };
const RANGES: Features = Features { tlb_range: true, ttl: true, bbm_level: 2 };

const ROOT: u64 = 7 << 48 | 0x8000_0000;
const PAGE: u64 = 1 << 12;
const BLOCK: u64 = 2 << 20;

fn level(n: i8) -> Option<Level> {
    Some(Level::new(n).unwrap())
}

fn range(start: u64, size: u64) -> Option<GpaRange> {
    Some(GpaRange::new(Gpa(start), size).unwrap())
}

fn steps_of(features: Features, page_shift: u32, what: Invalidation) -> Vec<Instruction> {
    let machine = Recorder { features, ..Recorder::default() };
    Arm::invalidate(&machine, &Context { root: ROOT, page_shift }, what);
    assert_eq!(machine.no_preemption.load(Ordering::Relaxed), 0);
    machine.steps.into_inner().unwrap()
}

/// The whole broadcast sequence, in 4K granules, around what is invalidated by address.
fn whole(by_address: &[Instruction]) -> Vec<Instruction> {
    let mut steps = vec![DsbIshst, EnterContext(ROOT)];
    steps.extend(by_address);
    steps.extend([DsbIsh, TlbiVmalle1is, DsbIsh, Isb, LeaveContext]);
    steps
}

fn everything() -> Vec<Instruction> {
    vec![DsbIshst, EnterContext(ROOT), TlbiVmalls12e1is, DsbIsh, Isb, LeaveContext]
}

fn single(ipa: u64, level: Option<Level>) -> Instruction {
    TlbiIpas2e1is { ipa: Gpa(ipa), page_shift: 12, level }
}

fn ranged(ipa: u64, scale: u8, num: u8, level: Option<Level>) -> Instruction {
    TlbiRipas2e1is { ipa: Gpa(ipa), page_shift: 12, scale, num, level }
}

#[test]
fn a_page_is_one_invalidation_with_a_hint_where_there_are_hints() {
    let what = Invalidation { range: range(0x4000_3000, PAGE), level: level(3) };
    assert_eq!(steps_of(PLAIN, 12, what), whole(&[single(0x4000_3000, None)]));
    assert_eq!(steps_of(TTL, 12, what), whole(&[single(0x4000_3000, level(3))]));
    assert_eq!(steps_of(RANGES, 12, what), whole(&[single(0x4000_3000, level(3))]));
}

#[test]
fn a_block_is_one_invalidation_however_large() {
    let what = Invalidation { range: range(0x4000_0000, BLOCK), level: level(2) };
    assert_eq!(steps_of(PLAIN, 12, what), whole(&[single(0x4000_0000, None)]));
    assert_eq!(steps_of(TTL, 12, what), whole(&[single(0x4000_0000, level(2))]));
    let what = Invalidation { range: range(1 << 30, 1 << 30), level: level(1) };
    assert_eq!(steps_of(RANGES, 12, what), whole(&[single(1 << 30, level(1))]));
    let what = Invalidation { range: range(0, 3 * BLOCK), level: level(2) };
    let blocks = [0, BLOCK, 2 * BLOCK].map(|ipa| single(ipa, level(2)));
    assert_eq!(steps_of(RANGES, 12, what), whole(&blocks));
}

#[test]
fn a_detached_table_is_invalidated_without_a_hint_over_all_it_covered() {
    let what = Invalidation { range: range(0x4020_0000, BLOCK), level: None };
    assert_eq!(steps_of(PLAIN, 12, what), everything());
    assert_eq!(steps_of(TTL, 12, what), everything());
    // 512 granules are 8 units of 64.
    assert_eq!(steps_of(RANGES, 12, what), whole(&[ranged(0x4020_0000, 1, 7, None)]));
    let what = Invalidation { range: range(0x4000_0000, 1 << 30), level: None };
    // 2^18 granules are 4 units of 2^16.
    assert_eq!(steps_of(RANGES, 12, what), whole(&[ranged(0x4000_0000, 3, 3, None)]));
}

#[test]
fn a_word_of_pages_goes_page_by_page_and_more_goes_at_once() {
    let what = |pages| Invalidation { range: range(0x10_0000, pages * PAGE), level: level(3) };
    let pages: Vec<_> = (0..SINGLES).map(|n| single(0x10_0000 + n * PAGE, level(3))).collect();
    assert_eq!(steps_of(TTL, 12, what(SINGLES)), whole(&pages));
    assert_eq!(steps_of(TTL, 12, what(SINGLES + 1)), everything());
    assert_eq!(steps_of(RANGES, 12, what(64)), whole(&[ranged(0x10_0000, 1, 0, level(3))]));
    assert_eq!(
        steps_of(RANGES, 12, what(65)),
        whole(&[ranged(0x10_0000, 1, 0, level(3)), single(0x14_0000, level(3))])
    );
    assert_eq!(
        steps_of(RANGES, 12, what(67)),
        whole(&[
            ranged(0x10_0000, 1, 0, level(3)),
            ranged(0x14_0000, 0, 0, level(3)),
            single(0x14_2000, level(3))
        ])
    );
    assert_eq!(
        steps_of(RANGES, 12, what(RANGE_PAGES)),
        whole(&[ranged(0x10_0000, 3, 31, level(3))])
    );
    assert_eq!(steps_of(RANGES, 12, what(RANGE_PAGES + 1)), everything());
}

#[test]
fn a_range_begins_at_64k_and_loses_its_hint_if_that_widens_it() {
    let what = Invalidation { range: range(0x1_f000, 7 * PAGE), level: level(3) };
    // 15 granules before it and its 7: 11 pairs.
    assert_eq!(steps_of(RANGES, 12, what), whole(&[ranged(0x1_0000, 0, 10, None)]));
    let what = Invalidation { range: range(0x1_f000, 2 * PAGE), level: level(3) };
    let pages = [0x1_f000, 0x2_0000].map(|ipa| single(ipa, level(3)));
    assert_eq!(steps_of(RANGES, 12, what), whole(&pages));
}

#[test]
fn many_blocks_too_large_for_a_range_go_one_by_one() {
    let what = Invalidation { range: range(0, 10 << 30), level: level(1) };
    let blocks: Vec<_> = (0..10).map(|n| single(n << 30, level(1))).collect();
    assert_eq!(steps_of(RANGES, 12, what), whole(&blocks));
}

#[test]
fn the_whole_tree_is_invalidated_at_once() {
    for features in [PLAIN, TTL, RANGES] {
        let what = Invalidation { range: None, level: None };
        assert_eq!(steps_of(features, 12, what), everything());
    }
}

/// What one step removes: `start..end`, of leaves at which level.
fn covered(step: Instruction) -> Option<(u64, u64, Option<Level>)> {
    match step {
        TlbiIpas2e1is { ipa, page_shift, level } => {
            let height = level.map_or(0, Level::height);
            let size = 1 << (page_shift + height * (page_shift - 3));
            Some((ipa.0, ipa.0 + size, level))
        }
        TlbiRipas2e1is { ipa, page_shift, scale, num, level } => {
            let size = (u64::from(num) + 1) << (5 * scale + 1) << page_shift;
            Some((ipa.0, ipa.0 + size, level))
        }
        _ => None,
    }
}

#[test]
fn whatever_the_range_all_of_it_is_covered_by_legal_instructions() {
    let sizes = [1, 2, 3, 5, 31, 63, 64, 65, 100, 511, 512, 513, 2048, 2049, 70_001, 1 << 20];
    for page_shift in [12, 14, 16] {
        for features in [PLAIN, TTL, RANGES] {
            for (number, size) in [(3, 0), (2, page_shift - 3), (1, 2 * (page_shift - 3)), (-1, 0)]
            {
                for pages in sizes {
                    for start in [0, 1, 15, 16, 511, 512, 0x12345] {
                        let shift = page_shift + size;
                        let Some(range) = GpaRange::new(Gpa(start << shift), pages << shift) else {
                            continue;
                        };
                        let level = level(number).filter(|_| number >= 0);
                        let what = Invalidation { range: Some(range), level };
                        check(features, page_shift, what);
                    }
                }
            }
        }
    }
}

fn check(features: Features, page_shift: u32, what: Invalidation) {
    let (range, steps) = (what.range.unwrap(), steps_of(features, page_shift, what));
    if steps.contains(&TlbiVmalls12e1is) {
        return;
    }
    let mut at = range.start().0;
    let mut count = 0;
    for step in steps {
        let Some((start, end, hint)) = covered(step) else { continue };
        count += 1;
        assert!(hint.is_none() || (features.ttl && hint == what.level));
        // Without a hint a step from a leaf of a known level still removes all of it.
        let leaf = what.level.map_or(0, Level::height) * (page_shift - 3) + page_shift;
        let end = if let TlbiIpas2e1is { .. } = step { end.max(start + (1 << leaf)) } else { end };
        if let TlbiRipas2e1is { ipa, scale, num, level, .. } = step {
            assert!(features.tlb_range && scale < 4 && num < 32);
            assert_eq!(ipa.0 % 0x1_0000, 0);
            assert!(level.is_none() || ipa.0 % (1 << leaf) == 0);
        }
        assert!(start <= at, "{what:?}: {start:#x} leaves out what begins at {at:#x}");
        at = end;
    }
    assert!(at >= range.end().0, "{what:?} ends at {at:#x}");
    assert!(count <= if features.tlb_range { SINGLES.max(5) } else { SINGLES });
}

#[test]
fn nothing_that_a_context_may_say_panics() {
    for page_shift in [0, 2, 12, 30, 63, 64, u32::MAX] {
        for number in -1..=3 {
            for (start, size) in [(0, u64::MAX), (u64::MAX - 1, 1), (0x1000, 0x1000)] {
                for features in [PLAIN, RANGES] {
                    let what = Invalidation { range: range(start, size), level: level(number) };
                    steps_of(features, page_shift, what);
                }
            }
        }
    }
}

#[test]
fn locally_one_address_and_this_cpu_only() {
    let machine = Recorder::default();
    Arm::invalidate_local(&machine, &Context { root: ROOT, page_shift: 12 }, Gpa(0x5000));
    let ipas = TlbiIpas2e1 { ipa: Gpa(0x5000), page_shift: 12, level: None };
    assert_eq!(
        *machine.steps.lock().unwrap(),
        [DsbNshst, EnterContext(ROOT), ipas, DsbNsh, TlbiVmalle1, DsbNsh, Isb, LeaveContext]
    );
}

#[test]
fn all_vmids_at_once() {
    let machine = Recorder::default();
    Arm::publish(&machine);
    Arm::invalidate_all(&machine);
    assert_eq!(*machine.steps.lock().unwrap(), [DsbIshst, DsbIshst, TlbiAlle1is, DsbIsh, Isb]);
}

/// Values worked out by hand from the field tables of the Arm ARM (C5.5.14).
#[test]
fn operands_of_single_invalidations_are_those_of_the_manual() {
    let of = |ipa, page_shift, level| {
        let local = operand(TlbiIpas2e1 { ipa: Gpa(ipa), page_shift, level }, false);
        let broadcast = operand(TlbiIpas2e1is { ipa: Gpa(ipa), page_shift, level }, true);
        assert_eq!(local, broadcast);
        local
    };
    assert_eq!(of(0x1000, 12, None), 1);
    assert_eq!(of(0x000f_ffff_ffff_f000, 12, None), 0xff_ffff_ffff);
    // TTL is granule code, then level: 0b01_11, 0b01_10, 0b01_01, 0b01_00.
    assert_eq!(of(0x4000_3000, 12, level(3)), 0x7000_0004_0003);
    assert_eq!(of(0x4020_0000, 12, level(2)), 0x6000_0004_0200);
    assert_eq!(of(0x4000_0000, 12, level(1)), 0x5000_0004_0000);
    assert_eq!(of(1 << 39, 12, level(0)), 0x4000_0800_0000);
    // 16K: 0b10_11, 0b10_10; 64K: 0b11_11, 0b11_10, 0b11_01.
    assert_eq!(of(0x4000, 14, level(3)), 0xb000_0000_0004);
    assert_eq!(of(0x200_0000, 14, level(2)), 0xa000_0000_2000);
    assert_eq!(of(0x1_0000, 16, level(3)), 0xf000_0000_0010);
    assert_eq!(of(0x2000_0000, 16, level(2)), 0xe000_0002_0000);
    assert_eq!(of(1 << 42, 16, level(1)), 0xd000_4000_0000);
    // Reserved codes mean no hint, so none is given.
    assert_eq!(of(0, 14, level(0)), 0);
    assert_eq!(of(0, 16, level(0)), 0);
    assert_eq!(of(0, 12, level(-1)), 0);
}

/// Values worked out by hand from the field tables of the Arm ARM (C5.5.22).
#[test]
fn operands_of_ranges_are_those_of_the_manual() {
    let of = |ipa, page_shift, scale, num, level, ds| {
        operand(TlbiRipas2e1is { ipa: Gpa(ipa), page_shift, scale, num, level }, ds)
    };
    // TG 0b01 at 46, SCALE 1 at 44, NUM 7 at 39: 0x4000_0000_0000 + 0x1000_0000_0000 + 0x380_0000_0000.
    assert_eq!(of(0x4020_0000, 12, 1, 7, None, false), 0x5380_0004_0200);
    // The same with the address in units of 64K.
    assert_eq!(of(0x4020_0000, 12, 1, 7, None, true), 0x5380_0000_4020);
    // TTL 0b11 at 37, 0b10 at 37.
    assert_eq!(of(0x10_0000, 12, 1, 0, level(3), false), 0x5060_0000_0100);
    assert_eq!(of(0x4000_0000, 12, 3, 31, level(2), false), 0x7fc0_0004_0000);
    // TG 0b10 counts address bits from 14, 0b11 from 16.
    assert_eq!(of(0x1_0000, 14, 0, 0, None, false), 0x8000_0000_0004);
    assert_eq!(of(0x1_0000, 14, 0, 0, None, true), 0x8000_0000_0001);
    assert_eq!(of(0x1_0000, 16, 2, 1, level(3), false), 0xe0e0_0000_0001);
    // There is no code for level 0.
    assert_eq!(of(0, 12, 0, 0, level(0), true), 0x4000_0000_0000);
    assert_eq!(operand(TlbiVmalls12e1is, false), 0);
}

#[test]
fn a_vttbr_holds_the_vmid_and_52_address_bits() {
    assert_eq!(Arm::root(Hpa(0x8000_2000), 7), 0x0007_0000_8000_2000);
    assert_eq!(Arm::root(Hpa(0x000a_0000_8000_2000), 0xffff), 0xffff_0000_8000_2028);
}

#[test]
fn x86_roots_hold_what_identifies_them() {
    let eptp = Ept::WRITE_BACK | Ept::FOUR_LEVELS | Ept::ACCESSED_DIRTY;
    assert_eq!(Ept::root(Hpa(0x1234_5000), eptp), 0x1234_505e);
    let eptp = Ept::WRITE_BACK | Ept::FIVE_LEVELS;
    assert_eq!(Ept::root(Hpa(0x1234_5000), eptp), 0x1234_5026);
    for asid in [0, 1, 0xfff, 0x1000, 0x8001, 0xffff] {
        let root = Npt::root(Hpa(0x000f_1234_5678_9000), asid);
        assert_eq!((Npt::ncr3(root), Npt::asid(root)), (0x000f_1234_5678_9000, asid));
    }
}

#[test]
fn on_x86_nothing_is_executed_to_publish_and_one_instruction_locally() {
    let machine = Recorder::default();
    let eptp = Context { root: Ept::root(Hpa(0x5000), 0x5e), page_shift: 12 };
    let npt = Context { root: Npt::root(Hpa(0x5000), 0x3001), page_shift: 12 };
    Ept::publish(&machine);
    Npt::publish(&machine);
    Ept::invalidate_local(&machine, &eptp, Gpa(0));
    Npt::invalidate_local(&machine, &npt, Gpa(0));
    Ept::answer(&machine, &eptp);
    Npt::answer(&machine, &npt);
    let (ept, npt) = (InveptSingle(0x505e), FlushAsid(0x3001));
    assert_eq!(*machine.steps.lock().unwrap(), [ept, npt, ept, npt]);
}

#[test]
fn on_x86_vcpus_outside_are_not_waited_for_and_invalidate_before_they_enter() {
    let machine = Recorder { slots: vec![Slot::new(), Slot::new()], ..Recorder::default() };
    let context = Context { root: Ept::root(Hpa(0x5000), 0x5e), page_shift: 12 };
    let mut vcpu = Participant::register(&machine).unwrap();
    vcpu.switch(Hpa(0x5000));
    for range in [range(0x1000, 0x1000), None] {
        Ept::invalidate(&machine, &context, Invalidation { range, level: None });
    }
    assert_eq!(*machine.steps.lock().unwrap(), []);
    assert_eq!(vcpu.enter().err(), Some(Requests::INVALIDATE));
    assert!(vcpu.enter().is_ok());
}

thread_local! {
    /// The TLB of the CPU that this thread is: one translation.
    static TLB: Cell<Option<u64>> = const { Cell::new(None) };
}

/// A machine whose threads are CPUs with a TLB each.
struct Shootdown {
    slots: Vec<Slot>,
    kicked: Vec<AtomicBool>,
}

// SAFETY: it has no tables.
unsafe impl Machine for Shootdown {
    fn allocate(&self, _: usize) -> Option<Hpa> {
        None
    }

    unsafe fn free(&self, _: Hpa, _: usize) {}

    fn entries(&self, _: Hpa) -> NonNull<Entry> {
        NonNull::dangling()
    }

    fn slots(&self) -> &[Slot] {
        &self.slots
    }

    fn execute(&self, _: Instruction) {
        TLB.set(None);
    }

    fn kick(&self, index: usize) {
        self.kicked[index].store(true, Ordering::Release);
    }

    fn relax(&self) {
        thread::yield_now();
    }
}

fn no_vcpu_uses_what_is_gone<A: Maintenance>(identifier: u16) {
    const VCPUS: usize = 3;
    const CHANGES: u64 = 2_000;
    let machine = Shootdown {
        slots: (0..VCPUS).map(|_| Slot::new()).collect(),
        kicked: (0..VCPUS).map(|_| AtomicBool::new(false)).collect(),
    };
    let root = Hpa(0x5000);
    let context = Context { root: A::root(root, identifier), page_shift: 12 };
    // The one entry of the tree, and the newest value whose predecessors an invalidation promised to be gone.
    let (entry, promised) = (AtomicU64::new(0), AtomicU64::new(0));
    thread::scope(|scope| {
        for _ in 0..VCPUS {
            scope.spawn(|| {
                let mut vcpu = Participant::register(&machine).unwrap();
                let index = vcpu.index();
                vcpu.switch(root);
                while promised.load(Ordering::Relaxed) < CHANGES {
                    match vcpu.enter() {
                        Ok(_inside) => {
                            // The guest runs until it is kicked, or for ever if nothing changes any more.
                            while !machine.kicked[index].swap(false, Ordering::Acquire) {
                                let gone = promised.load(Ordering::Acquire);
                                let walk = || entry.load(Ordering::Relaxed);
                                let used = TLB.get().unwrap_or_else(walk);
                                TLB.set(Some(used));
                                assert!(used >= gone, "{used} was used, {gone} was promised");
                                if gone == CHANGES {
                                    break;
                                }
                                thread::yield_now();
                            }
                        }
                        Err(requests) => {
                            if requests.contains(Requests::INVALIDATE) {
                                A::answer(&machine, &context);
                            }
                        }
                    }
                }
            });
        }
        for change in 1..=CHANGES {
            entry.store(change, Ordering::Relaxed);
            A::invalidate(&machine, &context, Invalidation { range: None, level: None });
            promised.store(change, Ordering::Release);
        }
    });
}

#[test]
fn on_intel_no_vcpu_uses_what_an_invalidation_promised_to_be_gone() {
    no_vcpu_uses_what_is_gone::<Ept>(0x5e);
}

#[test]
fn on_amd_no_vcpu_uses_what_an_invalidation_promised_to_be_gone() {
    no_vcpu_uses_what_is_gone::<Npt>(3);
}
