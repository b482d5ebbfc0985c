//! The workload on this host's own KVM, with the kernel's userfaultfd. A page that somebody else has served meanwhile is a
//! duplicate, as in the kernel's test.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::{self, Scope};
use std::time::{Duration, Instant};

use serde::Serialize;

use super::options::{Config, Options};
use super::userfault::{Mode, Served};
use super::{READ, Results, WRITE, demand, source, summary};
use crate::check::{Check, Findings};
use crate::contents::{self, Words};
use crate::failure::Failure;
use crate::kvm;
use crate::kvm::interrupt;
use crate::kvm::memory::Memory;
use crate::kvm::stage::{Ended, Stage};
use crate::kvm::userfault::{Faults, Userfault};
use crate::kvm::vcpu::{Order, Vcpu};
use crate::kvm::vm::{Plan, Reach};
use crate::layout::Layout;
use crate::report::Report;
use crate::{config, output};

/// Milliseconds from one look at whether the end has come to the next.
const LOOK_UP: i32 = 50;

/// Bytes that are filled between two looks.
const PIECE: u64 = 1 << 20;

/// What `--check` found.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Found {
    /// Guest pages that were looked at.
    pages: u64,
    /// Pages of the backing that were not served, or served more than once; and requests that nobody has looked at.
    miscounted: u64,
    /// Guest pages without the contents that the handler has copied.
    unfilled: u64,
    /// Loads that did not return what a guest had stored there.
    wrong_loads: u64,
    /// Pages of host memory that do not hold what was stored last.
    misplaced: u64,
}

impl Findings for Found {
    const CLEAN: &'static str = "every page served once and filled, nothing misplaced";

    fn compared(&self) -> String {
        format!("{} pages", self.pages)
    }

    fn wrong(&self) -> Vec<(u64, &'static str)> {
        vec![
            (self.miscounted, "pages were not served once, or requests not at all"),
            (self.unfilled, "pages do not have the contents that were copied"),
            (self.wrong_loads, "loads did not return what was stored last"),
            (self.misplaced, "pages of host memory do not hold what was stored last"),
        ]
    }
}

/// Runs the workload and prints its report.
///
/// # Errors
/// See [`Failure`].
pub(super) fn run(options: &Options) -> Result<(), Failure> {
    let Some(chosen) = config::choose(&options.memory)? else { return Ok(()) };
    kvm::check_mode(chosen.1)?;
    let (kvm, machine) = kvm::open(&options.machine)?;
    let mut options = options.clone();
    options.machine = machine;
    let (layout, config) = options.settle(chosen)?;
    let memory = Memory::new(layout.host_size, config.guest.backing)?;
    let vcpus = config.guest.vcpus;
    let plan = Plan { pinning: config.pinning.clone(), ..Plan::new(vcpus, Reach::of(&layout)) };
    let accesses = layout.part(0).count() as u64 * u64::from(vcpus);
    let mut stage = Stage::new(&kvm, plan, accesses)?;
    // One handler may have to look at a request of every vCPU before a page is served.
    stage.crew.wait_longer(config.delay().saturating_mul(vcpus));
    let handlers = Handlers::new(&memory, &layout, &config)?;
    let played = thread::scope(|scope| {
        let _end = handlers.as_ref().map(End);
        stage.play(|stage| {
            stage.vm.set_slots(&layout, &memory, false)?;
            if config.userfault == Some(Mode::Minor) {
                stage.step("fill", None, |_| fill(&memory, &layout))?;
            }
            if let Some(handlers) = &handlers {
                handlers.start(scope, &config)?;
            }
            let check = config.guest.check;
            stage.order("demand", None, |index| Order::pass(&layout, index, WRITE, check))?;
            if check {
                stage.order("check", None, |index| Order::pass(&layout, index, READ, check))?;
            }
            Ok(())
        })
    });
    // A vCPU that has waited for a handler in vain has been kicked.
    handlers.as_ref().map_or(Ok(()), Handlers::failure)?;
    let (Ended { phases, counters, vcpus }, ()) = played?;
    let served = handlers.as_ref().map(Handlers::served);
    let check = config.guest.check.then(|| {
        let found = Found {
            pages: layout.guest_pages(),
            miscounted: served.map_or(0, |served| miscounted(served, &layout, &config)),
            unfilled: served.map_or(0, |_| unfilled(&memory, &layout)),
            wrong_loads: vcpus.iter().map(Vcpu::wrong_loads).sum(),
            misplaced: contents::misplaced(&memory, &layout, &[]),
        };
        Check { found, rules: None }
    });
    let mut notes = config.guest.notes(&layout);
    notes.extend(options.ignored());
    let demand = demand(&phases, &layout, &config, served);
    let report = Report {
        workload: "demand-paging",
        backend: "kvm",
        host: Some(kvm::facts()),
        notes,
        summary: summary(&phases, &demand),
        config,
        counters,
        phases,
        results: Results { demand },
        check,
    };
    output::print(&report, &options.output)
}

/// Gives shared memory its contents, through another mapping of it: in that of the guest no page is mapped.
fn fill(memory: &Memory, layout: &Layout) -> Result<(), Failure> {
    let failed = |error: io::Error| Failure::Run(format!("another mapping: {error}"));
    if let Some(alias) = memory.alias().map_err(failed)? {
        for start in (0..layout.size).step_by(PIECE as usize) {
            interrupt::check()?;
            source::copy(&alias, start..layout.size.min(start + PIECE), layout.guest_page);
        }
    }
    Ok(())
}

/// Requests and pages that do not come out even.
fn miscounted(served: Served, layout: &Layout, config: &Config) -> u64 {
    let Served { requests, served, duplicates } = served;
    let pages = layout.size.div_ceil(config.guest.backing_page.0);
    served.abs_diff(pages) + requests.abs_diff(served + duplicates)
}

fn unfilled(memory: &Memory, layout: &Layout) -> u64 {
    let mark = |page: u64| {
        let word = memory.word(page * layout.guest_page + source::MARK_OFFSET);
        word.map(|word| word.load(Ordering::Relaxed))
    };
    let wrong = |page: &u64| mark(*page) != Some(source::mark(*page));
    (0..layout.guest_pages()).filter(wrong).count() as u64
}

/// The threads that serve pages, a descriptor for each queue.
struct Handlers<'a> {
    memory: &'a Memory,
    layout: &'a Layout,
    faults: Faults,
    /// Bytes of a page, served as a whole.
    page: u64,
    queues: Vec<Userfault>,
    ended: AtomicBool,
    failed: Mutex<Option<String>>,
    requests: AtomicU64,
    served: AtomicU64,
    duplicates: AtomicU64,
}

/// Ends the handlers, whatever happens.
struct End<'a>(&'a Handlers<'a>);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.ended.store(true, Ordering::Relaxed);
    }
}

impl<'a> Handlers<'a> {
    /// Takes the faults of all memory, if that is asked for.
    fn new(
        memory: &'a Memory,
        layout: &'a Layout,
        config: &Config,
    ) -> Result<Option<Self>, Failure> {
        let faults = match config.userfault {
            None => return Ok(None),
            Some(Mode::Missing) => Faults::Missing,
            Some(Mode::Minor) => Faults::Minor,
        };
        let page = config.guest.backing_page.0;
        let count = u64::from(config.queues());
        // Regions are whole pages of the backing, all of memory together.
        let region = |index: u64| (layout.host_size / page * index / count) * page;
        let queue = |index| {
            let queue = Userfault::new()?;
            let Range { start, end } = region(index)..region(index + 1);
            if end > start {
                queue.register(memory, (start, end - start), faults)?;
            }
            Ok(queue)
        };
        let queues = (0..count).map(queue).collect::<Result<_, Failure>>()?;
        Ok(Some(Self {
            memory,
            layout,
            faults,
            page,
            queues,
            ended: AtomicBool::new(false),
            failed: Mutex::new(None),
            requests: AtomicU64::new(0),
            served: AtomicU64::new(0),
            duplicates: AtomicU64::new(0),
        }))
    }

    fn start<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        config: &Config,
    ) -> Result<(), Failure> {
        let delay = config.delay();
        for (number, queue) in self.queues.iter().enumerate() {
            for _ in 0..config.readers {
                let thread = thread::Builder::new().name(format!("handler-{number}"));
                let handle = move || self.handle(queue, delay);
                thread
                    .spawn_scoped(scope, handle)
                    .map_err(|error| Failure::Run(format!("no thread for a handler: {error}")))?;
            }
        }
        Ok(())
    }

    /// Serves what is asked for, until the end.
    fn handle(&self, queue: &Userfault, delay: Duration) {
        let mut copy = vec![0; self.page as usize];
        let mut asked = Vec::new();
        while !self.ended.load(Ordering::Relaxed) {
            queue.wait(LOOK_UP);
            let read = queue.faults(|address| asked.push(address));
            let done = read.and_then(|()| {
                asked.drain(..).try_for_each(|address| {
                    if self.is_ended_after(delay) {
                        return Ok(());
                    }
                    self.requests.fetch_add(1, Ordering::Relaxed);
                    self.serve(queue, address, &mut copy)
                })
            });
            if let Err(error) = done {
                let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
                failed.get_or_insert_with(|| error.to_string());
                return;
            }
        }
    }

    /// Sleeps; whether the end came meanwhile.
    fn is_ended_after(&self, delay: Duration) -> bool {
        let end = Instant::now() + delay;
        while let Some(rest) = end.checked_duration_since(Instant::now()) {
            if self.ended.load(Ordering::Relaxed) {
                return true;
            }
            thread::sleep(rest.min(Duration::from_millis(LOOK_UP.unsigned_abs().into())));
        }
        self.ended.load(Ordering::Relaxed)
    }

    fn serve(&self, queue: &Userfault, address: u64, copy: &mut [u8]) -> io::Result<()> {
        let offset = address.saturating_sub(self.memory.address());
        let offset = offset - offset % self.page;
        let served = match self.faults {
            Faults::Minor => queue.let_through((self.memory, offset), self.page)?,
            Faults::Missing => {
                source::fill(copy, offset, self.layout.guest_page);
                queue.copy((self.memory, offset), copy)?
            }
        };
        let count = if served { &self.served } else { &self.duplicates };
        count.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// A handler that could not go on; vCPUs that wait for it do so in vain.
    fn failure(&self) -> Result<(), Failure> {
        let failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        match &*failed {
            Some(why) => Err(Failure::Run(format!("a handler: {why}"))),
            None => Ok(()),
        }
    }

    fn served(&self) -> Served {
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Served {
            requests: of(&self.requests),
            served: of(&self.served),
            duplicates: of(&self.duplicates),
        }
    }
}
