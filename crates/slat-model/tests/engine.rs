//! Promise: the engine runs on the model, alone and from many threads, and breaks no rule.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use slat::format::arm::{K4, K16, K64, Stage2};
use slat::{
    Attributes, Dirty, Edges, Error, Format, Gpa, GpaRange, Hpa, Leaf, Level, Owner, Participant,
    Reserve, Template, Tree,
};
use slat_model::{Backing, Cpu, Fault, FaultKind, HostMemory, Model, Registers};

/// A guest whose memory begins at address 0.
struct Guest<'m, F: Format> {
    model: &'m Model,
    tree: Tree<'m, F, Model>,
    memory: Arc<HostMemory>,
    template: Template,
    vtcr: u64,
    /// Each fault may put another page where one was; contents mean nothing then.
    moving: bool,
}

impl<'m, F: Format> Guest<'m, F> {
    fn new(model: &'m Model, format: F, vtcr: u64, attributes: Attributes, blocks: u64) -> Self {
        let page_size = 1 << (2 * F::PAGE_SHIFT - 3);
        let backing = Backing::AnonymousHugetlb { page_size };
        let memory = model.host_memory(blocks * page_size, backing).unwrap();
        let tree = Tree::new(model, format, 9).unwrap();
        let template = tree.template(attributes).unwrap();
        Self { model, tree, memory, template, vtcr, moving: false }
    }

    fn registers(&self) -> Registers {
        Registers { vttbr: self.tree.root_register(), vtcr: self.vtcr }
    }

    fn cpu(&self, index: usize) -> Cpu<'m> {
        self.model.cpu(index, self.registers()).unwrap()
    }

    fn who(&self) -> Participant<'m, Model> {
        Participant::register(self.model).unwrap()
    }

    fn all(&self) -> GpaRange {
        GpaRange::new(Gpa(0), self.memory.size()).unwrap()
    }

    /// What is mapped at `gpa`, aligned as the largest leaf is.
    fn output(&self, gpa: Gpa, seed: u64) -> Hpa {
        let block = 1 << (2 * F::PAGE_SHIFT - 3);
        let shift = if self.moving { Random(seed | 1).below(3) * block } else { 0 };
        self.memory.page((gpa.0 + shift) % self.memory.size()).unwrap().hpa
    }

    /// Handles a fault as a hypervisor without memslots would, with a leaf at `level`.
    fn fault(
        &self,
        who: &mut Participant<'m, Model>,
        reserve: &mut Reserve<'m, Model>,
        fault: Fault,
        level: Level,
    ) {
        if let FaultKind::AccessFlag { .. } = fault.kind {
            let _ = self.tree.mark_young(&who.pin(), fault.gpa);
            return;
        }
        let size = self.tree.geometry().size(level);
        let gpa = Gpa(fault.gpa.0 & !(size - 1));
        let output = self.output(gpa, fault.gpa.0);
        let leaf = Leaf { gpa, level, output, template: self.template };
        let result = self.tree.install(&who.pin(), reserve, &leaf);
        match result {
            Ok(_) | Err(Error::Retry) => {}
            Err(Error::NeedTables { tables, .. }) => reserve.top_up(tables).unwrap(),
            Err(Error::Backlog) => self.tree.reclaim(who),
            Err(Error::Level(_)) => self.fault(who, reserve, fault, Level::LAST),
            Err(error) => panic!("{error}"),
        }
    }
}

/// How many accesses each vCPU makes in a storm.
const ROUNDS: u64 = if cfg!(debug_assertions) { 20_000 } else { 100_000 };

/// xorshift64
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

fn on_each_path<F: Format>(guest: &Guest<'_, F>) {
    let (mut who, mut reserve) = (guest.who(), Reserve::new(guest.model));
    let mut cpu = guest.cpu(0);
    let page = guest.tree.geometry().page_size();
    let block = Level::new(2).unwrap();
    let range = |first: u64, pages: u64| GpaRange::new(Gpa(first * page), pages * page).unwrap();
    reserve.top_up(guest.tree.tables_needed(guest.all(), Level::LAST)).unwrap();

    let output = guest.memory.page(0).unwrap().hpa;
    let tree = &guest.tree;
    tree.map(&who, &mut reserve, guest.all(), output, guest.template, block).unwrap();
    cpu.write(Gpa(page), 1).unwrap();
    tree.split(&who, &mut reserve, guest.all(), Level::LAST).unwrap();
    cpu.write(Gpa(2 * page), 2).unwrap();
    tree.write_protect(&who, range(1, 1), |_| {}).unwrap();
    let fault = cpu.write(Gpa(page), 3).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Permission { level: Level::LAST });
    guest.fault(&mut who, &mut reserve, fault, Level::LAST);
    cpu.write(Gpa(page), 3).unwrap();
    tree.write_protect_mask(&who, Gpa(0), 0b110, |_| {}).unwrap();
    assert!(cpu.write(Gpa(2 * page), 4).is_err() && cpu.read(Gpa(2 * page)) == Ok(2));
    tree.unmap(&mut who, &mut reserve, range(2, 1), Edges::Exact, |_| {}).unwrap();
    let fault = cpu.read(Gpa(2 * page)).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Translation { level: Level::LAST });
    guest.fault(&mut who, &mut reserve, fault, Level::LAST);
    assert_eq!(cpu.read(Gpa(2 * page)), Ok(2));
    tree.collapse(&mut who, guest.all(), Level::TOP).unwrap();
    assert_eq!(cpu.read(Gpa(page)), Ok(3));
    tree.unmap(&mut who, &mut reserve, guest.all(), Edges::Exact, |_| {}).unwrap();
    tree.trim(&mut who, guest.all()).unwrap();
    tree.reclaim(&mut who);
    assert!(cpu.read(Gpa(page)).is_err());
    guest.model.check_quiet(guest.registers());
}

#[test]
fn every_operation_of_each_granule_does_to_a_guest_what_it_says() {
    macro_rules! granule {
        ($($granule:ty)*) => {$(
            let format = Stage2::<$granule>::new(40).unwrap().with_xnx(true);
            let builder = Model::builder().page_shift(<Stage2<$granule>>::PAGE_SHIFT);
            let model = builder.memory_limit(4 << 30).build().unwrap();
            let guest = Guest::new(&model, format, format.vtcr(), Attributes::RWX, 2);
            on_each_path(&guest);
            drop(guest);
            model.check_freed();
            assert_eq!(model.counters().tables_in_use, 0);
        )*};
    }
    granule!(K4 K16 K64);
}

/// A vCPU: writes its own word of random pages and checks what it wrote last.
fn vcpu<F: Format>(guest: &Guest<'_, F>, index: usize) {
    let (mut who, mut reserve) = (guest.who(), Reserve::new(guest.model));
    let mut cpu = guest.cpu(index);
    let mut random = Random(0x9e37_79b9 + index as u64);
    let page = guest.tree.geometry().page_size();
    let pages = guest.memory.size() / page;
    let mut written = vec![0; pages as usize];
    for round in 1..=ROUNDS {
        let number = random.below(pages);
        let gpa = Gpa(number * page + 8 * index as u64);
        let level = if random.below(4) == 0 { Level::new(2).unwrap() } else { Level::LAST };
        if random.below(2) == 0 {
            while let Err(fault) = cpu.write(gpa, round) {
                guest.fault(&mut who, &mut reserve, fault, level);
            }
            written[number as usize] = round;
        } else {
            let found = loop {
                match cpu.read(gpa) {
                    Ok(found) => break found,
                    Err(fault) => guest.fault(&mut who, &mut reserve, fault, level),
                }
            };
            let expected = written[number as usize];
            assert!(guest.moving || found == expected, "page {number} of CPU {index}");
        }
    }
}

/// A thread of the host: one operation after another on random ranges.
fn host<F: Format>(guest: &Guest<'_, F>, seed: u64, running: &AtomicUsize) {
    let (mut who, mut reserve) = (guest.who(), Reserve::new(guest.model));
    let mut random = Random(seed);
    let page = guest.tree.geometry().page_size();
    let pages = guest.memory.size() / page;
    while running.load(Ordering::Relaxed) > 0 && guest.model.violation().is_none() {
        let first = random.below(pages);
        let longest = 1 << random.below(11);
        let count = 1 + random.below((pages - first).min(longest));
        let range = GpaRange::new(Gpa(first * page), count * page).unwrap();
        let tree = &guest.tree;
        let result = match random.below(9) {
            0 => tree.write_protect(&who, range, |_| {}),
            1 => {
                let first = Gpa((first & !63) * page);
                tree.write_protect_mask(&who, first, random.below(u64::MAX), |_| {})
            }
            2 => tree.unmap(&mut who, &mut reserve, range, Edges::Exact, |_| {}),
            3 => tree.unmap(&mut who, &mut reserve, range, Edges::Whole, |_| {}),
            4 => tree.split(&who, &mut reserve, range, Level::LAST),
            5 => tree.collapse(&mut who, guest.all(), Level::TOP),
            6 => tree.age(&who, range, true),
            7 => {
                // Mapped memory is contiguous up to the end of a block.
                let end = (range.start().0 | ((1 << (2 * F::PAGE_SHIFT - 3)) - 1)) + 1;
                let size = range.size().min(end - range.start().0);
                let range = GpaRange::new(range.start(), size).unwrap();
                let output = guest.output(range.start(), random.below(u64::MAX));
                let level = Level::new(2).unwrap();
                tree.map(&who, &mut reserve, range, output, guest.template, level)
            }
            _ => tree.harvest_dirty(&who, range, |_| {}),
        };
        match result {
            Ok(_) | Err(Error::Retry) => {}
            Err(Error::NeedTables { tables, .. }) => reserve.top_up(tables).unwrap(),
            Err(Error::Backlog) => tree.reclaim(&mut who),
            Err(error) => panic!("{error}"),
        }
    }
}

fn storm(attributes: Attributes, format: Stage2<K4>, moving: bool) {
    let model = Model::builder().cpus(2).slots(8).build().unwrap();
    let mut guest = Guest::new(&model, format, format.vtcr(), attributes, 4);
    guest.moving = moving;
    let running = AtomicUsize::new(2);
    std::thread::scope(|scope| {
        for index in 0..2 {
            let (guest, running) = (&guest, &running);
            scope.spawn(move || {
                vcpu(guest, index);
                running.fetch_sub(1, Ordering::Relaxed);
            });
        }
        for seed in 1..=2 {
            let (guest, running) = (&guest, &running);
            scope.spawn(move || host(guest, seed, running));
        }
    });
    model.check_quiet(guest.registers());
    drop(guest);
    model.check_freed();
    assert_eq!(model.counters().tables_in_use, 0);
}

#[test]
fn faults_and_all_operations_at_once_break_no_rule() {
    storm(Attributes::RWX, Stage2::new(40).unwrap().with_xnx(true), false);
}

#[test]
fn hardware_that_keeps_access_and_dirty_state_breaks_no_rule_either() {
    let attributes = Attributes { dirty: Dirty::Clean, ..Attributes::RW };
    storm(attributes, Stage2::new(40).unwrap().with_hardware_dirty(true), false);
}

#[test]
fn pages_that_move_under_running_guests_break_no_rule() {
    storm(Attributes::RWX, Stage2::new(40).unwrap(), true);
}

#[test]
fn a_split_is_published_also_where_the_operation_that_needed_it_ends_in_an_error() {
    let model = Model::builder().build().unwrap();
    let format = Stage2::<K4>::new(48).unwrap();
    let tree = Tree::new(&model, format, 7).unwrap();
    let mut who = Participant::register(&model).unwrap();
    let mut reserve = Reserve::new(&model);
    // One for the level above, and one that makes blocks of the gibibyte.
    reserve.top_up(2).unwrap();
    let template = tree.template(Attributes::RW).unwrap();
    let gib = GpaRange::new(Gpa(0), 1 << 30).unwrap();
    let level = Level::new(1).unwrap();
    tree.map(&who, &mut reserve, gib, Hpa(0), template, level).unwrap();
    let page = GpaRange::new(Gpa(5 << 12), 1 << 12).unwrap();
    // A third would be needed for the page.
    let unmapped = tree.unmap(&mut who, &mut reserve, page, Edges::Exact, |_| {});
    assert!(matches!(unmapped, Err(Error::NeedTables { .. })));
    reserve.top_up(1).unwrap();
    let owner = tree.set_owner(&mut who, &mut reserve, page, Owner(1), |_| {});
    assert_eq!(owner, Ok(1));
    assert!(model.violation().is_none());
    model.check_quiet(Registers { vttbr: tree.root_register(), vtcr: format.vtcr() });
}
