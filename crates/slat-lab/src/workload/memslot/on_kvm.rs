//! The workload on this host's own KVM: pages are unmapped by giving them back to the kernel, so that they come back empty.
//! Guests and host meet where an order ends.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::area::{CHUNK, MOVED, Slots, Test};
use super::guest::{FIRST, SECOND};
use super::options::{Config, Options};
use super::{Found, Measured, Outcome, Results, divided, summary};
use crate::backing::Pages;
use crate::check::Check;
use crate::contents::Words;
use crate::failure::Failure;
use crate::kvm::interrupt;
use crate::kvm::memory::Memory;
use crate::kvm::program::Compare;
use crate::kvm::stage::Stage;
use crate::kvm::stats::KvmCounts;
use crate::kvm::vcpu::Order;
use crate::kvm::vm::{self, Plan, Reach, Slot};
use crate::kvm::{self, Kvm};
use crate::report::{Phase, Report};
use crate::{backing, guest_mode, output};

/// Runs the workload and prints its report.
///
/// # Errors
/// See [`Failure`].
pub(super) fn run(options: &Options) -> Result<(), Failure> {
    let Some(mode) = output::chosen(options.mode, guest_mode::list)? else { return Ok(()) };
    let Some(backing) = output::chosen(options.backing, backing::list)? else { return Ok(()) };
    kvm::check_mode(mode)?;
    let (kvm, machine) = kvm::open(&options.machine)?;
    let mut options = options.clone();
    options.machine = machine;
    let (layout, config) = options.settle(backing, mode)?;
    vm::check_slots(&kvm, config.slots)?;
    let mut all = All::default();
    for test in config.tests() {
        for run in 1..=config.runs {
            all.run(&kvm, test, run, layout.page, &config)?;
        }
    }
    let All { mut notes, phases, counters, results, found } = all;
    results.must_be_some(&notes)?;
    notes.extend(config.guest.notes(&layout));
    let report = Report {
        workload: "memslot",
        backend: "kvm",
        host: Some(kvm::facts()),
        notes,
        summary: summary(&results),
        config,
        counters,
        phases,
        results,
        check: Some(Check { found, rules: None }),
    };
    output::print(&report, &options.output)
}

/// What all tests together have given.
#[derive(Debug, Default)]
struct All {
    notes: Vec<String>,
    phases: Vec<Phase<KvmCounts>>,
    counters: KvmCounts,
    results: Results,
    found: Found,
}

impl All {
    fn run(
        &mut self,
        kvm: &Kvm,
        test: Test,
        run: u32,
        page: u64,
        config: &Config,
    ) -> Result<(), Failure> {
        let mut outcome = Outcome {
            name: test,
            run,
            slots: config.slots.into(),
            pages_per_slot: 0,
            refused: None,
            measured: Measured::default(),
        };
        match Slots::new(test, test.area(config.guest.bytes.0), page, config.slots.into()) {
            Ok(slots) => {
                outcome.pages_per_slot = slots.pages_per_slot();
                if config.verbose && run == 1 {
                    self.notes.push(divided(test, &slots));
                }
                outcome.measured = self.measure(kvm, test, slots, run, config)?;
            }
            Err(misfit) => {
                let note = || format!("{}: {misfit}", test.name());
                self.notes.extend((run == 1).then(note));
                outcome.refused = Some(misfit.to_string());
            }
        }
        self.results.tests.push(outcome);
        Ok(())
    }

    fn measure(
        &mut self,
        kvm: &Kvm,
        test: Test,
        slots: Slots,
        run: u32,
        config: &Config,
    ) -> Result<Measured, Failure> {
        let size = slots.pages * slots.page;
        let size = size.next_multiple_of(config.guest.backing_page.0);
        let memory = Memory::new(size, config.guest.backing)?;
        // No test measures that the kernel finds pages.
        for offset in (0..memory.size()).step_by(slots.page as usize) {
            interrupt::check()?;
            memory.word(offset).inspect(|word| word.store(0, Ordering::Relaxed));
        }
        let reach = Reach { gpa: slots.gpa(0), size: slots.pages * slots.page, page: slots.page };
        let stage = Stage::new(kvm, Plan::new(config.guest.vcpus, reach), 0)?;
        let run = (config.runs > 1).then_some(run);
        let (ended, (measured, mut found)) = stage.play(|stage| {
            let mut host =
                Host { test, slots, config, memory: &memory, stage, found: Found::default() };
            let measured = host.all(run)?;
            Ok((measured, host.found))
        })?;
        found.exits = ended.vcpus.iter().map(|vcpu| vcpu.met().absent).sum();
        found.wrong_loads = ended.vcpus.iter().map(|vcpu| vcpu.wrong_loads()).sum();
        self.found.add(found);
        self.counters.add(&ended.counters);
        self.phases.extend(ended.phases);
        Ok(measured)
    }
}

/// The host's side of one test.
struct Host<'a, 'r> {
    test: Test,
    slots: Slots,
    config: &'a Config,
    memory: &'a Memory,
    stage: &'r mut Stage,
    found: Found,
}

impl Host<'_, '_> {
    fn all(&mut self, run: Option<u32>) -> Result<Measured, Failure> {
        let (setup, slots) = (self.test.setup(), self.slots);
        self.stage.begin(setup, run);
        let start = Instant::now();
        (1..=slots.last()).try_for_each(|id| self.stage.vm.set_slot(self.slot(id)))?;
        let setup_time = start.elapsed();
        self.stage.end(setup, run, setup_time)?;
        self.stage.begin(self.test.name(), run);
        let moves = matches!(self.test, Test::MoveActive | Test::MoveInactive);
        let start = Instant::now();
        if moves {
            self.write_moved();
        }
        let mut iterations = 0;
        let took = loop {
            let took = start.elapsed();
            let begun = iterations > 0 || self.config.length.is_zero();
            if begun && took >= self.config.length {
                break took;
            }
            self.turn()?;
            self.stage.crew.look_up()?;
            iterations += 1;
        };
        if moves {
            self.stage.crew.stop();
            self.stage.wait()?;
        }
        self.stage.end(self.test.name(), run, took)?;
        let seconds = took.as_secs_f64();
        Ok(Measured {
            iterations: Some(iterations),
            setup_seconds: Some(setup_time.as_secs_f64()),
            seconds: Some(seconds),
            average_seconds: (iterations > 0).then(|| seconds / iterations as f64),
        })
    }

    /// A slot in its place; numbers begin at 1.
    fn slot(&self, id: u32) -> Slot<'_> {
        let config = self.slots.config(id);
        let (gpa, size, offset) = (config.gpa.0, config.size, config.hva.0);
        Slot { id: id - 1, gpa, size, memory: self.memory, offset, logged: false }
    }

    /// Once through the test.
    fn turn(&mut self) -> Result<(), Failure> {
        let [first, second] = self.slots.halves();
        match self.test {
            Test::Map => {
                self.tell_share(&first, Order { value: FIRST, ..self.write() });
                self.unmap(second.clone(), u64::MAX)?;
                self.stage.wait()?;
                self.compare_all(&first, FIRST);
                self.tell_share(&second, Order { value: SECOND, ..self.write() });
                self.unmap(first, u64::MAX)?;
                self.stage.wait()?;
                self.compare_all(&second, SECOND);
                Ok(())
            }
            Test::Unmap => self.unmap_both(1),
            Test::UnmapChunked => self.unmap_both(CHUNK / self.slots.page),
            Test::MoveActive | Test::MoveInactive => self.move_slot(),
            Test::ReadWrite => self.read_and_write(),
        }
    }

    fn write(&self) -> Order {
        Order::write(0, self.slots.page, 0)
    }

    /// Has each vCPU follow an order on its share of a range of pages.
    fn tell_share(&mut self, pages: &Range<u64>, order: Order) {
        let vcpus = u64::from(self.config.guest.vcpus);
        let length = pages.end - pages.start;
        let at = |index: u64| pages.start + length * index / vcpus;
        let slots = self.slots;
        self.stage.crew.tell(|index| {
            let (first, end) = (at(index.into()), at(u64::from(index) + 1));
            Order { gpa: slots.gpa(first) + order.gpa, count: end - first, ..order.clone() }
        });
    }

    /// Unmaps each half of the area, some pages at once, after each guest has written to one page of it.
    fn unmap_both(&mut self, at_once: u64) -> Result<(), Failure> {
        let vcpus = u64::from(self.config.guest.vcpus);
        for (half, value) in self.slots.halves().into_iter().zip([FIRST, SECOND]) {
            let (slots, length) = (self.slots, half.end - half.start);
            let write = self.write();
            self.stage.crew.tell(|index| {
                let gpa = slots.gpa(half.start + u64::from(index) % length);
                Order { gpa, count: 1, value, ..write.clone() }
            });
            self.stage.wait()?;
            self.compare_all(&(half.start..half.start + vcpus.min(length)), value);
            self.unmap(half, at_once)?;
        }
        Ok(())
    }

    fn read_and_write(&mut self) -> Result<(), Failure> {
        let (pages, half) = (self.slots.area()..self.slots.pages, self.slots.page / 2);
        for page in pages.clone() {
            let word = self.memory.word(page * self.slots.page + half);
            word.inspect(|word| word.store(SECOND, Ordering::Relaxed));
        }
        self.tell_share(&pages, Order { value: FIRST, ..self.write() });
        self.stage.wait()?;
        self.compare(&pages, FIRST);
        let there = Order { gpa: half, ..self.write() };
        let (value, compare) = (SECOND, Compare::WithValue);
        self.tell_share(&pages, Order { write_percent: 0, value, compare, ..there.clone() });
        self.stage.wait()?;
        self.found.loads += pages.end - pages.start;
        // So that the host's next values are seen to come.
        self.tell_share(&pages, Order { value: FIRST, ..there });
        self.stage.wait()?;
        Ok(())
    }

    /// Has guests write where the last slot is moved, or next to it, until they are stopped.
    fn write_moved(&mut self) {
        let slots = self.slots;
        let active = self.test == Test::MoveActive;
        let pages = slots.moved(active);
        let absent = match active {
            true => slots.gpa(slots.pages_of(slots.last()).start)..slots.gpa(pages.end),
            false => 0..0,
        };
        let count = pages.end - pages.start;
        let order = Order {
            forever: true,
            value: FIRST,
            absent,
            ..Order::write(slots.gpa(pages.start), slots.page, count)
        };
        self.stage.crew.tell(|_| order.clone());
    }

    /// Moves the last slot beyond all others, and back.
    fn move_slot(&mut self) -> Result<(), Failure> {
        let memory = self.memory;
        let back = Slot { memory, ..self.slot(self.slots.last()) };
        self.stage.vm.set_slot(Slot { gpa: self.slots.beyond(), ..back })?;
        if self.config.verify {
            // The slot is where no guest writes: what its memory holds stays.
            let pages = self.slots.pages_of(self.slots.last());
            for page in pages.clone() {
                let word = memory.word(page * self.slots.page);
                word.inspect(|word| word.store(0, Ordering::Relaxed));
            }
            self.wait_for_round()?;
            self.compare(&pages, 0);
        }
        self.stage.vm.set_slot(back)?;
        if self.config.verify {
            // Guests use it again, so that there are translations that the next move must take away.
            self.wait_for_round()?;
        }
        Ok(())
    }

    /// Waits until every guest has written to all its pages.
    fn wait_for_round(&mut self) -> Result<(), Failure> {
        let round = MOVED / self.slots.page;
        self.stage.crew.wait_for_accesses(1 + round, &mut || Ok(()))
    }

    /// Compares what guests wrote, if that is asked for, and clears it.
    fn compare_all(&mut self, pages: &Range<u64>, value: u64) {
        if self.config.verify {
            self.compare(pages, value);
        }
    }

    fn compare(&mut self, pages: &Range<u64>, value: u64) {
        let words = pages.clone().filter_map(|page| self.memory.word(page * self.slots.page));
        let values = words.map(|word| word.swap(0, Ordering::Relaxed));
        self.found.wrong += values.filter(|&found| found != value).count() as u64;
        self.found.compared += pages.end - pages.start;
    }

    /// Gives pages back to the kernel, so many at once as lie in one slot, and not more than `at_once`. Of hugetlb pages
    /// only whole ones can go.
    fn unmap(&self, pages: Range<u64>, at_once: u64) -> Result<(), Failure> {
        let (page, backing) = (self.slots.page, &self.config.guest);
        let whole = match backing.backing.pages {
            Pages::Base | Pages::Transparent => page,
            Pages::Huge | Pages::HugeOf(_) => backing.backing_page.0,
        };
        let failed = |error| Failure::Run(format!("pages cannot be given back: {error}"));
        for piece in self.slots.pieces(pages) {
            let at_once = at_once.min(piece.end - piece.start);
            for first in piece.clone().step_by(at_once as usize) {
                let end = piece.end.min(first + at_once) * page;
                let range = (first * page).next_multiple_of(whole)..end - end % whole;
                if !range.is_empty() {
                    self.memory.release(range).map_err(failed)?;
                }
            }
        }
        Ok(())
    }
}
