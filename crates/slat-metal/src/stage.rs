//! What every workload plays on: a guest whose vCPUs wait for orders, and a count of what each phase took.

use alloc::format;
use alloc::string::{String, ToString};
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::Ordering;

use slat_metal::layout::Layout;
use slat_metal::options::{Clock, Options};
use slat_metal::program::{Order, PAGE, Values, page_of};
use slat_metal::report::{Counters, GuestConfig, Instructions, Mode, Phase};
use slat_vm::Worker;

use crate::arch::{Arch, Here};
use crate::console;
use crate::crew::{assign, wait_until_alone};
use crate::guest::{Guest, MetalVm};
use crate::machine::{METAL, Metal};
use crate::vcpu::{Runner, engine};
use crate::watchdog::wait_for;

/// A guest that runs, and the first CPU, which has its vCPU 0 and does the hypervisor's work.
pub(crate) struct Stage<'g> {
    pub(crate) guest: &'g Guest,
    pub(crate) worker: Worker<'static, Metal>,
    runner: Runner<'g>,
    phases: Vec<Phase>,
    /// When the last phase ended.
    before: (Counters, u64),
    /// Instructions of the engine in what the hypervisor did.
    engine: u64,
}

/// Builds the vCPUs of a guest on as many CPUs, lets `workload` play, and takes everything down again.
///
/// # Errors
/// What `workload` returned.
pub(crate) fn play<R>(
    guest: Guest,
    workload: impl FnOnce(&mut Stage<'_>) -> Result<R, String>,
) -> Result<(Vec<Phase>, R), String> {
    let guest = Arc::new(guest);
    for cpu in 1..guest.privates.len() {
        assign(cpu, Arc::clone(&guest));
    }
    let worker = guest.vm.worker().map_err(|error| error.to_string())?;
    let runner = Runner::new(&guest, 0);
    let before = (Counters::NONE, 0);
    let mut stage = Stage { guest: &guest, worker, runner, phases: Vec::new(), before, engine: 0 };
    stage.wait();
    stage.before = stage.counters();
    let result = workload(&mut stage);
    let phases = stage.phases;
    drop((stage.worker, stage.runner));
    guest.posts.iter().for_each(|post| post.dismiss());
    Here::retire();
    wait_until_alone(&guest);
    Ok((phases, result?))
}

impl Stage<'_> {
    pub(crate) fn vm(&self) -> &MetalVm {
        &self.guest.vm
    }

    fn layout(&self) -> &Layout {
        &self.guest.layout
    }

    fn others(&self) -> core::ops::Range<usize> {
        1..self.guest.privates.len()
    }

    /// What vCPU `index` does in a pass over its part: every page once, with so many per cent of writes.
    pub(crate) fn pass_of(&self, index: usize, writes: u32) -> Order {
        let part = self.layout().part(index as u32);
        Order {
            memory: self.layout().gpa,
            first: part.start,
            pages: part.end - part.start,
            stretch: 1,
            read_from: 1,
            writes: writes.into(),
            random: 0,
            until_stopped: false,
            values: self.values(index),
        }
    }

    fn values(&self, index: usize) -> Values {
        let Guest { options, layout, privates, .. } = self.guest;
        match privates.get(index) {
            Some(private) if options.check => {
                let last = if layout.overlaps() { 0 } else { private.last() };
                Values::Unique { last, step: layout.vcpus.into() }
            }
            _ => Values::Plain,
        }
    }

    /// A phase in which every vCPU follows an order of its own.
    pub(crate) fn order(
        &mut self,
        name: &'static str,
        iteration: Option<u32>,
        order: impl Fn(&Self, usize) -> Order,
    ) {
        self.begin(name, iteration);
        let start = self.now();
        for index in 0..self.guest.privates.len() {
            self.put(index, &order(self, index));
        }
        for index in self.others() {
            self.guest.posts[index].tell();
        }
        self.runner.run();
        self.wait();
        self.end(name, iteration, self.now() - start);
    }

    /// The other vCPUs follow an order each, until [`stop`](Self::stop).
    pub(crate) fn begin_running(&mut self, order: impl Fn(&Self, usize) -> Order) {
        for index in self.others() {
            self.put(index, &Order { until_stopped: true, ..order(self, index) });
            self.guest.posts[index].tell();
        }
    }

    /// The first vCPU follows an order.
    pub(crate) fn burst(&mut self, order: &Order) {
        self.put(0, order);
        self.runner.run();
    }

    /// Returns when each of the other vCPUs has completed a touch that it began since the call.
    pub(crate) fn wait_for_touches(&self) {
        let others = self.guest.privates.iter().skip(1);
        // Acquire: what the touch did comes before what follows.
        let mailboxes = others.map(|private| &private.mailbox().completed);
        let before: Vec<_> =
            mailboxes.map(|completed| (completed, completed.load(Ordering::Acquire))).collect();
        let seconds = self.guest.options.watchdog;
        for (completed, before) in before {
            // One more may have been under way.
            wait_for(seconds, "a vCPU that runs", || {
                completed.load(Ordering::Acquire).wrapping_sub(before) >= 2
            });
        }
    }

    /// The other vCPUs have stopped.
    pub(crate) fn stop(&self) {
        for private in self.guest.privates.iter().skip(1) {
            private.mailbox().stop.store(1, Ordering::Relaxed);
        }
        self.wait();
    }

    fn put(&self, index: usize, order: &Order) {
        if let Some(private) = self.guest.privates.get(index) {
            private.mailbox().put(order);
        }
    }

    fn wait(&self) {
        for post in self.others().filter_map(|index| self.guest.posts.get(index)) {
            // The vCPU's own watchdog sees to its guest.
            wait_for(u64::MAX >> 32, "a vCPU", || post.is_done());
        }
    }

    /// A phase in which the hypervisor does something.
    ///
    /// # Errors
    /// What `step` returned.
    pub(crate) fn step<E: ToString>(
        &mut self,
        name: &'static str,
        iteration: Option<u32>,
        step: impl FnOnce(&MetalVm, &mut Worker<'static, Metal>) -> Result<(), E>,
    ) -> Result<(), String> {
        self.begin(name, iteration);
        let start = self.now();
        step(&self.guest.vm, &mut self.worker)
            .map_err(|error| format!("{name}: {}", error.to_string()))?;
        let took = self.now() - start;
        self.engine += took;
        self.end(name, iteration, took);
        Ok(())
    }

    /// A phase in which the hypervisor does something to each memslot in turn.
    ///
    /// # Errors
    /// What `step` returned.
    pub(crate) fn each_slot<E: ToString>(
        &mut self,
        name: &'static str,
        iteration: Option<u32>,
        mut step: impl FnMut(&MetalVm, &mut Worker<'static, Metal>, u32) -> Result<(), E>,
    ) -> Result<(), String> {
        let slots = self.layout().slots;
        self.step(name, iteration, |vm, worker| (0..slots).try_for_each(|id| step(vm, worker, id)))
    }

    /// Shows that a phase begins.
    pub(crate) fn begin(&self, name: &str, iteration: Option<u32>) {
        use slat_metal::report::PROGRESS;
        match iteration {
            Some(iteration) => console::line(format_args!("{PROGRESS}{name} {iteration}")),
            None => console::line(format_args!("{PROGRESS}{name}")),
        }
    }

    /// By the clock of the run.
    pub(crate) fn now(&self) -> u64 {
        match self.guest.options.clock {
            Clock::Real => Here::ticks(),
            Clock::Instructions => Here::instructions(),
        }
    }

    /// Notes a phase that took so long, with everything that was done since the one before.
    pub(crate) fn end(&mut self, name: &'static str, iteration: Option<u32>, took: u64) {
        let now = self.counters();
        let (counters, engine) = (now.0 - self.before.0, now.1 - self.before.1);
        let (rate, instructions) = match self.guest.options.clock {
            Clock::Real => (Here::ticks_per_second(), None),
            Clock::Instructions => (1_000_000_000, Some(Instructions { total: took, engine })),
        };
        let seconds = took as f64 / rate as f64;
        self.phases.push(Phase { name, iteration, seconds, instructions, counters });
        self.before = now;
    }

    /// Of everybody, since the machine was started; and instructions of the engine.
    fn counters(&self) -> (Counters, u64) {
        let machine = METAL.counts.iter().fold(Counters::NONE, |sum, cpu| sum + cpu.counters());
        let workers = engine(&self.worker.participant().counters)
            + engine(&self.guest.rings.lock().worker.participant().counters);
        let own = (
            machine + workers + self.runner.counters(),
            self.engine + self.runner.engine_instructions(),
        );
        self.others().filter_map(|index| self.guest.posts.get(index)).fold(own, |sum, post| {
            let (counters, engine) = post.counters();
            (sum.0 + counters, sum.1 + engine)
        })
    }

    /// Loads that did not return what was stored, of all guests.
    pub(crate) fn wrong_loads(&self) -> u64 {
        let mailboxes = self.guest.privates.iter().map(|private| private.mailbox());
        mailboxes.map(|mailbox| mailbox.wrong_loads.load(Ordering::Relaxed)).sum()
    }

    /// Pages that hold what was stored elsewhere, or not what was stored last. No vCPU runs.
    pub(crate) fn misplaced(&self) -> u64 {
        let Guest { vm, layout, privates, .. } = self.guest;
        let is_wrong = |page: u64, last: Option<u64>| {
            let value = vm.host().first_word(page);
            match last {
                Some(last) => value != last,
                None => value != 0 && page_of(value) != page,
            }
        };
        if layout.overlaps() {
            return (0..layout.pages()).filter(|&page| is_wrong(page, None)).count() as u64;
        }
        let parts = (0..).zip(privates).map(|(index, private)| (layout.part(index), private));
        let wrong = |(part, private): (core::ops::Range<u64>, &crate::guest::Private)| {
            let last = |page| private.last_of(page - part.start);
            part.clone().filter(|&page| is_wrong(page, Some(last(page)))).count() as u64
        };
        parts.map(wrong).sum()
    }
}

/// The part of the report's `config` that all workloads have.
pub(crate) fn config(options: &Options, guest: &Guest) -> GuestConfig {
    use slat::Format;
    GuestConfig {
        vcpus: guest.layout.vcpus,
        bytes: options.bytes,
        backing: match options.backing {
            PAGE => "anonymous",
            0x20_0000 => "anonymous_hugetlb_2mb",
            _ => "anonymous_hugetlb_1gb",
        },
        backing_page: options.backing,
        mode: Mode::P40V48_4K,
        gpa: guest.layout.gpa,
        arch: Here::NAME,
        granule: PAGE,
        ipa_bits: options.ipa_bits,
        fwb: Here::coherent_data(),
        hardware_access: guest.vm.tree().format().sets_accessed(),
        clock: options.clock,
        check: options.check,
        eager_split: options.eager_split,
        fault_around: options.fault_around,
        invalidate: options.invalidate,
    }
}
