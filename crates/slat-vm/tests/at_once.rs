//! Real threads: vCPUs that load and store through their TLBs while the log is collected, the host moves pages, and
//! slots and logs come and go. Contents are compared at the end, and the model stops at the first broken rule.

mod guest;

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use guest::*;
use slat::{Gpa, Hpa};
use slat_model::Backing;
use slat_vm::{Exit, Hva, LogMode, SlotConfig, Vcpu, VmOptions, Worker};

/// xorshift64
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        Self(0x9e37_79b9_7f4a_7c15 ^ seed << 17 | 1)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

/// Counts down when its thread ends, however it ends, so that nobody waits for one that failed.
struct Running<'a>(&'a AtomicUsize);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A vCPU that writes its own word of random pages, reads back what it wrote last, and returns the last values.
fn run(guest: &mut Guest<'_, '_>, index: u64, pages: u64, rounds: u64) -> Vec<u64> {
    let mut random = Random::new(index);
    let mut written = vec![0; pages as usize];
    for round in 1..=rounds {
        let page = random.below(pages);
        let gpa = page * PAGE + 8 * index;
        if random.below(3) > 0 {
            guest.write(gpa, round);
            written[page as usize] = round;
        } else {
            assert_eq!(guest.read(gpa), written[page as usize], "page {page}");
        }
    }
    written
}

/// What migration does: a copy of guest memory that is brought up to date by what each collection reports.
struct Migrated<'v, 'm> {
    vm: &'v TestVm<'m>,
    pages: u64,
    words: Vec<[u64; 2]>,
}

impl<'v, 'm> Migrated<'v, 'm> {
    fn new(vm: &'v TestVm<'m>, pages: u64) -> Self {
        Self { vm, pages, words: vec![[0; 2]; pages as usize] }
    }

    fn now(&self, page: u64) -> [u64; 2] {
        let word = |n: u64| self.vm.host().memory.word(page * PAGE + 8 * n).unwrap();
        [0, 1].map(|n| word(n).load(Ordering::Relaxed))
    }

    fn page(&mut self, page: u64) {
        self.words[page as usize] = self.now(page);
    }

    fn whole(&mut self) {
        (0..self.pages).for_each(|page| self.page(page));
    }

    /// One round: collect, and copy what was written. What has changed before the collection is in it, once the faults
    /// that were in flight have finished: they make a page writable, for other vCPUs too, before they mark it.
    fn round(&mut self, worker: &mut Worker<'m, Watched>, mode: LogMode, section: u64) -> u64 {
        let mut bitmap = vec![0; self.pages.div_ceil(64) as usize];
        let changed = |page: &u64| self.now(*page) != self.words[*page as usize];
        let changed: Vec<_> = (0..self.pages).filter(changed).collect();
        worker.parts().0.synchronize();
        self.vm.dirty_log(worker, 0, &mut bitmap).unwrap();
        for page in changed {
            assert!(bitmap[(page / 64) as usize] >> (page % 64) & 1 == 1, "page {page} was lost");
        }
        let mut copied = 0;
        for first in (0..self.pages).step_by(section as usize) {
            let pages = section.min(self.pages - first);
            let words = (first / 64) as usize..(first + pages).div_ceil(64) as usize;
            if mode != LogMode::Protect {
                let words = &bitmap[words.clone()];
                self.vm.clear_dirty_log(worker, 0, first, pages, words).unwrap();
            }
            for page in first..first + pages {
                if bitmap[(page / 64) as usize] >> (page % 64) & 1 == 1 {
                    self.page(page);
                    copied += 1;
                }
            }
        }
        copied
    }
}

/// Two vCPUs write while a third thread migrates the guest; then the copy is compared.
fn migrate(mode: LogMode, backing: Backing, options: VmOptions, pages: u64, section: u64) {
    let machine = Watched::new(2);
    let size = if backing == HUGE_1G { GIB } else { pages.next_multiple_of(512) * PAGE };
    let vm = vm(&machine, size, backing, options);
    let mut worker = vm.worker().unwrap();
    vm.create_slot(&mut worker, 0, SlotConfig::new(Gpa(0), pages * PAGE, Hva(0))).unwrap();
    let running = AtomicUsize::new(2);
    let mut copy = Migrated::new(&vm, pages);
    let mut copied = 0;
    let written: Vec<_> = std::thread::scope(|scope| {
        let vcpus: Vec<_> = (0..2)
            .map(|index| {
                let (vm, running) = (&vm, &running);
                scope.spawn(move || {
                    let _running = Running(running);
                    let mut guest = Guest::new(vm, index);
                    let written = run(&mut guest, index as u64, pages, 10_000);
                    (written, *guest.vcpu.statistics())
                })
            })
            .collect();
        vm.enable_log(&mut worker, 0, mode).unwrap();
        if mode != (LogMode::Manual { initially_all_set: true }) {
            copy.whole();
        }
        while running.load(Ordering::SeqCst) > 0 {
            copied += copy.round(&mut worker, mode, section);
        }
        vcpus.into_iter().map(|vcpu| vcpu.join().unwrap()).collect()
    });
    // The guest is stopped: the last round.
    copied += copy.round(&mut worker, mode, section);
    assert!(copied > 0);
    for page in 0..pages {
        let words = copy.words[page as usize];
        for (index, (written, _)) in written.iter().enumerate() {
            assert_eq!(words[index], written[page as usize], "page {page} of vCPU {index}");
        }
    }
    let marked: u64 = written.iter().map(|(_, statistics)| statistics.marked).sum();
    assert!(marked <= worker.statistics().collected);
    finish(vm, vec![worker]);
}

const MANUAL: LogMode = LogMode::Manual { initially_all_set: false };
const ALL_SET: LogMode = LogMode::Manual { initially_all_set: true };

#[test]
fn no_write_is_lost_when_each_collection_protects() {
    migrate(LogMode::Protect, Backing::Anonymous, VmOptions::default(), 1027, 64);
    migrate(LogMode::Protect, HUGE_2M, VmOptions::default(), 1536, 64);
    migrate(LogMode::Protect, HUGE_2M, eager(BLOCK), 1536, 64);
}

#[test]
fn no_write_is_lost_when_sections_are_cleared() {
    migrate(MANUAL, Backing::Anonymous, VmOptions::default(), 1027, 64);
    migrate(ALL_SET, HUGE_2M, VmOptions::default(), 1536, 64);
    migrate(ALL_SET, HUGE_2M, eager(BLOCK), 1536, 256);
    migrate(ALL_SET, HUGE_1G, eager(BLOCK), 1024, 1024);
}

#[test]
fn no_write_is_lost_when_pages_are_cleared_one_by_one() {
    // Only some bits of each word: the masks of `clear_dirty_log`, and bits that stay set.
    let machine = Watched::new(2);
    let pages = 512;
    let (vm, mut worker) = vm_with_slot(&machine, BLOCK, HUGE_2M, VmOptions::default());
    let running = AtomicUsize::new(1);
    let mut copy = Migrated::new(&vm, pages);
    let written = std::thread::scope(|scope| {
        let vcpu = scope.spawn(|| {
            let _running = Running(&running);
            run(&mut Guest::new(&vm, 0), 0, pages, 10_000)
        });
        vm.enable_log(&mut worker, 0, ALL_SET).unwrap();
        let mut random = Random::new(7);
        let mut last = false;
        while !last {
            last = running.load(Ordering::SeqCst) == 0;
            let mut bitmap = vec![0; 8];
            vm.dirty_log(&mut worker, 0, &mut bitmap).unwrap();
            for word in 0..8 {
                let mask = if last { u64::MAX } else { random.below(u64::MAX) };
                let mask = mask & bitmap[word as usize];
                vm.clear_dirty_log(&mut worker, 0, word * 64, 64, &[mask]).unwrap();
                (0..64)
                    .filter(|bit| mask >> bit & 1 == 1)
                    .for_each(|bit| copy.page(word * 64 + bit));
            }
        }
        vcpu.join().unwrap()
    });
    for page in 0..pages {
        assert_eq!(copy.words[page as usize][0], written[page as usize], "page {page}");
    }
    finish(vm, vec![worker]);
}

#[test]
fn no_write_is_lost_while_logs_are_enabled_and_disabled_and_blocks_come_back() {
    let machine = Watched::new(2);
    let (vm, mut worker) = vm_with_slot(&machine, 3 * BLOCK, HUGE_2M, VmOptions::default());
    let running = AtomicUsize::new(2);
    let pages = 3 * BLOCK / PAGE;
    std::thread::scope(|scope| {
        for index in 0..2 {
            let (vm, running) = (&vm, &running);
            scope.spawn(move || {
                let _running = Running(running);
                run(&mut Guest::new(vm, index), index as u64, pages, 10_000);
            });
        }
        let mut round = 0;
        while running.load(Ordering::SeqCst) > 0 {
            let mode = [LogMode::Protect, MANUAL, ALL_SET][round % 3];
            vm.enable_log(&mut worker, 0, mode).unwrap();
            let mut copy = Migrated::new(&vm, pages);
            copy.whole();
            for _ in 0..3 {
                copy.round(&mut worker, mode, 512);
            }
            vm.disable_log(&mut worker, 0).unwrap();
            round += 1;
        }
    });
    finish(vm, vec![worker]);
}

#[test]
fn collections_from_two_threads_report_every_write_to_one_of_them() {
    let machine = Watched::new(2);
    let pages = 512;
    let (vm, mut worker) = vm_with_slot(&machine, BLOCK, Backing::Anonymous, VmOptions::default());
    vm.enable_log(&mut worker, 0, LogMode::Protect).unwrap();
    let running = AtomicUsize::new(2);
    let reported: Vec<AtomicU64> = (0..pages).map(|_| AtomicU64::new(0)).collect();
    let marked: u64 = std::thread::scope(|scope| {
        let vcpus: Vec<_> = (0..2)
            .map(|index| {
                let (vm, running) = (&vm, &running);
                scope.spawn(move || {
                    let _running = Running(running);
                    let mut guest = Guest::new(vm, index);
                    run(&mut guest, index as u64, pages, 10_000);
                    guest.vcpu.statistics().marked
                })
            })
            .collect();
        for _ in 0..2 {
            scope.spawn(|| {
                let mut worker = vm.worker().unwrap();
                while running.load(Ordering::SeqCst) > 0 {
                    for page in collect(&vm, &mut worker, 0, pages) {
                        reported[page as usize].fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
        vcpus.into_iter().map(|vcpu| vcpu.join().unwrap()).sum()
    });
    let rest = collect(&vm, &mut worker, 0, pages).len() as u64;
    let sum: u64 = reported.iter().map(|count| count.load(Ordering::Relaxed)).sum();
    assert_eq!(sum + rest, marked);
    finish(vm, vec![worker]);
}

#[test]
fn pages_that_the_host_moves_keep_their_contents() {
    let machine = Watched::new(2);
    let pages = 64;
    let vm = vm(&machine, BLOCK, Backing::Anonymous, VmOptions::default());
    let mut worker = vm.worker().unwrap();
    vm.create_slot(&mut worker, 0, SlotConfig::new(Gpa(0), pages * PAGE, Hva(0))).unwrap();
    let running = AtomicUsize::new(2);
    std::thread::scope(|scope| {
        for index in 0..2 {
            let (vm, running) = (&vm, &running);
            scope.spawn(move || {
                let _running = Running(running);
                run(&mut Guest::new(vm, index), index as u64, pages, 10_000);
            });
        }
        // Pages of the host that back nothing: those beyond the slot, at first.
        let natural = |hva| vm.host().natural(Hva(hva)).unwrap();
        let mut spare: Vec<Hpa> =
            (pages..2 * pages).map(|page| natural(page * PAGE).output).collect();
        let mut backs: Vec<Hpa> = (0..pages).map(|page| natural(page * PAGE).output).collect();
        let mut random = Random::new(99);
        while running.load(Ordering::SeqCst) > 0 {
            let first = random.below(pages);
            let count = 1 + random.below(4.min(pages - first));
            let guard =
                vm.invalidate_begin(&mut worker, &[range(first * PAGE, count * PAGE)]).unwrap();
            for page in first..first + count {
                let to = spare.remove(random.below(spare.len() as u64) as usize);
                let from = std::mem::replace(&mut backs[page as usize], to);
                for word in 0..2 {
                    let word = |page: Hpa| machine.model.host_word(Hpa(page.0 + 8 * word)).unwrap();
                    word(to).store(word(from).load(Ordering::Relaxed), Ordering::Relaxed);
                    // Whoever still reads or writes the old page is found out.
                    word(from).store(u64::MAX, Ordering::Relaxed);
                }
                let answer = slat_vm::HostPage { output: to, ..natural(page * PAGE) };
                vm.host().answer(page * PAGE, Ok(answer));
                spare.push(from);
            }
            guard.end();
        }
    });
    finish(vm, vec![worker]);
}

#[test]
fn slots_come_and_go_while_vcpus_use_their_neighbours() {
    let machine = Watched::new(2);
    let (vm, mut worker) = vm_with_slot(&machine, 2 * BLOCK, HUGE_2M, VmOptions::default());
    let running = AtomicUsize::new(1);
    // How often the slot that comes and goes was memory, and how often an exit.
    let (memory, exits) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let watched = AtomicUsize::new(1);
    std::thread::scope(|scope| {
        let (vm, running, memory, exits, watched) = (&vm, &running, &memory, &exits, &watched);
        scope.spawn(move || {
            let _running = Running(running);
            run(&mut Guest::new(vm, 0), 0, 1024, 20_000);
        });
        scope.spawn(move || {
            let mut guest = Guest::new(vm, 1);
            while watched.load(Ordering::SeqCst) > 0 {
                let gpa = GIB + memory.load(Ordering::SeqCst) as u64 % 512 * PAGE + 64;
                match guest.cpu.write(Gpa(gpa), 5) {
                    Ok(()) => _ = memory.fetch_add(1, Ordering::SeqCst),
                    Err(fault) => match guest.handle(fault) {
                        Exit::Mmio(_) => _ = exits.fetch_add(1, Ordering::SeqCst),
                        exit => assert!(matches!(exit, Exit::Resume | Exit::Retry), "{exit:?}"),
                    },
                }
            }
        });
        let _watched = Running(watched);
        let once = |count: &AtomicUsize| count.load(Ordering::SeqCst) > 0;
        while once(running) || !once(memory) || !once(exits) {
            // Its memory is also the first block of the other slot, of which it uses another word.
            let config = SlotConfig::new(Gpa(GIB), BLOCK, Hva(0));
            vm.create_slot(&mut worker, 1, config).unwrap();
            vm.delete_slot(&mut worker, 1).unwrap();
        }
    });
    finish(vm, vec![worker]);
}

#[test]
fn several_threads_split_one_slot_while_it_is_used() {
    let machine = Watched::new(1);
    let (vm, mut worker) = vm_with_slot(&machine, 64 * BLOCK, HUGE_2M, VmOptions::default());
    let mut guest = Guest::new(&vm, 0);
    for block in 0..64 {
        guest.write(block * BLOCK, 0);
    }
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let mut worker = vm.worker().unwrap();
                assert_eq!(vm.split(&mut worker, range(0, 64 * BLOCK)), Ok(true));
            });
        }
        run(&mut guest, 0, 64 * 512, 5_000);
    });
    assert_eq!(vm.split(&mut worker, range(0, 64 * BLOCK)), Ok(true));
    for block in 0..64 {
        assert_eq!(level(&vm, &worker, block * BLOCK), Some(LAST));
    }
    drop(guest);
    finish(vm, vec![worker]);
}

#[test]
fn a_vcpu_moves_between_threads_between_faults() {
    fn sendable<T: Send>(_: &T) {}
    let machine = Watched::new(1);
    let (vm, worker) = vm_with_slot(&machine, BLOCK, Backing::Anonymous, VmOptions::default());
    let mut guest = Guest::new(&vm, 0);
    sendable::<Vcpu<'_, Watched>>(&guest.vcpu);
    for page in 0..4 {
        guest = std::thread::scope(|scope| {
            scope
                .spawn(move || {
                    guest.write(page * PAGE, page);
                    guest
                })
                .join()
                .unwrap()
        });
    }
    drop(guest);
    finish(vm, vec![worker]);
}
