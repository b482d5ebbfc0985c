//! Host memory whose pages a handler must serve before a guest gets them, as with Linux's userfaultfd.
//!
//! A vCPU that faults on a page that was not served asks for it and sleeps in [`Host::page`]. Handlers read what was
//! asked, region by region, and serve it: a missing page is copied in, one that is there but not mapped (a minor fault)
//! is let through. Who asks twice, or asks in two regions, is served once: the second time, the page is there already,
//! and nothing is done.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use slat_model::HostMemory;
use slat_vm::{Access, Host, HostError, HostPage, Hva};

use super::source;
use crate::model;

/// Which faults a handler serves.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize)]
pub(crate) enum Mode {
    /// There is no page: it is copied in
    #[value(name = "MISSING")]
    #[serde(rename = "MISSING")]
    Missing,
    /// There is a page in shared memory, not mapped yet: it is let through
    #[value(name = "MINOR")]
    #[serde(rename = "MINOR")]
    Minor,
}

/// Nobody has served the page.
const ABSENT: u8 = 0;
/// A handler copies it.
const ARRIVING: u8 = 1;
/// Guests get it.
const PRESENT: u8 = 2;

/// What a memory is divided into.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Division {
    /// Bytes of a page, served as a whole.
    pub(crate) page: u64,
    /// Bytes of a region with handlers of its own.
    pub(crate) region: u64,
    /// How many regions.
    pub(crate) regions: usize,
    /// Bytes of a guest page, for the marks in what is copied.
    pub(crate) guest_page: u64,
}

/// The memory, its pages' states, and who waits for them.
#[derive(Debug)]
pub(crate) struct Userfault {
    memory: Arc<HostMemory>,
    mode: Mode,
    division: Division,
    pages: Vec<AtomicU8>,
    regions: Vec<Region>,
    asked: AtomicU64,
    served: AtomicU64,
    duplicates: AtomicU64,
}

/// One userfaultfd.
#[derive(Debug, Default)]
struct Region {
    queue: Mutex<Queue>,
    /// Something was asked, or nothing will be any more.
    asked: Condvar,
    /// A page was served, or none will be any more.
    served: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    pages: VecDeque<u64>,
    closed: bool,
}

/// What handlers have done.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Served {
    /// Pages that vCPUs asked for, each time.
    pub(crate) requests: u64,
    /// Pages that were served.
    pub(crate) served: u64,
    /// Requests for a page that was there already.
    pub(crate) duplicates: u64,
}

impl Region {
    /// Nothing in a queue can be half done, so a thread that panicked leaves it as good as any.
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Userfault {
    /// All of `memory`, with no page served.
    pub(crate) fn new(memory: Arc<HostMemory>, mode: Mode, division: Division) -> Self {
        let pages = memory.size().div_ceil(division.page);
        Self {
            memory,
            mode,
            division,
            pages: (0..pages).map(|_| AtomicU8::new(ABSENT)).collect(),
            regions: (0..division.regions).map(|_| Region::default()).collect(),
            asked: AtomicU64::new(0),
            served: AtomicU64::new(0),
            duplicates: AtomicU64::new(0),
        }
    }

    /// The life of a handler: serves what is asked in one region, each after a delay, until everything is closed.
    pub(crate) fn handle(&self, region: usize, delay: Duration) {
        let _close = CloseAtEnd(self);
        while let Some(page) = self.next(&self.regions[region]) {
            if !delay.is_zero() {
                thread::sleep(delay);
            }
            self.serve(page);
        }
    }

    /// The next page that is asked for; `None` when nothing will be any more.
    fn next(&self, region: &Region) -> Option<u64> {
        let mut queue = region.lock();
        loop {
            if let Some(page) = queue.pages.pop_front() {
                return Some(page);
            }
            if queue.closed {
                return None;
            }
            queue = region.asked.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Serves a page, unless it was or is being served.
    fn serve(&self, page: u64) {
        let Some(state) = self.pages.get(page as usize) else { return };
        let claim = state.compare_exchange(ABSENT, ARRIVING, Ordering::Relaxed, Ordering::Relaxed);
        if claim.is_err() {
            self.duplicates.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let start = page * self.division.page;
        let end = (start + self.division.page).min(self.memory.size());
        if self.mode == Mode::Missing {
            source::copy(&self.memory, start..end, self.division.guest_page);
        }
        self.served.fetch_add(1, Ordering::Relaxed);
        // Release: who sees the page present sees what is in it.
        state.store(PRESENT, Ordering::Release);
        for region in self.region(start)..=self.region(end - 1) {
            // Whoever looked at the state before it changed sleeps by now.
            drop(self.regions[region].lock());
            self.regions[region].served.notify_all();
        }
    }

    fn region(&self, offset: u64) -> usize {
        ((offset / self.division.region) as usize).min(self.regions.len() - 1)
    }

    /// Waits until the page at `offset` was served.
    fn wait(&self, offset: u64, state: &AtomicU8) -> Result<(), HostError> {
        let region = &self.regions[self.region(offset)];
        let mut queue = region.lock();
        let mut asked = false;
        while state.load(Ordering::Acquire) != PRESENT {
            if queue.closed {
                return Err(HostError::NotMapped);
            }
            if !asked {
                asked = true;
                self.asked.fetch_add(1, Ordering::Relaxed);
                queue.pages.push_back(offset / self.division.page);
                region.asked.notify_one();
            }
            queue = region.served.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        Ok(())
    }

    /// Nobody asks any more, or nobody can be served. Handlers serve what was asked, and end.
    pub(crate) fn close(&self) {
        for region in &self.regions {
            region.lock().closed = true;
            region.asked.notify_all();
            region.served.notify_all();
        }
    }

    /// Whether the page at `offset` was served.
    pub(crate) fn is_present(&self, offset: u64) -> bool {
        let state = self.pages.get((offset / self.division.page) as usize);
        state.is_some_and(|state| state.load(Ordering::Acquire) == PRESENT)
    }

    /// How many pages have been served.
    pub(crate) fn present(&self) -> u64 {
        let present = |state: &&AtomicU8| state.load(Ordering::Acquire) == PRESENT;
        self.pages.iter().filter(present).count() as u64
    }

    /// What was done so far.
    pub(crate) fn served(&self) -> Served {
        Served {
            requests: self.asked.load(Ordering::Relaxed),
            served: self.served.load(Ordering::Relaxed),
            duplicates: self.duplicates.load(Ordering::Relaxed),
        }
    }
}

impl Host for Userfault {
    fn page(&self, hva: Hva, _access: Access) -> Result<HostPage, HostError> {
        let state = self.pages.get((hva.0 / self.division.page) as usize);
        let state = state.ok_or(HostError::NotMapped)?;
        if state.load(Ordering::Acquire) != PRESENT {
            self.wait(hva.0, state)?;
        }
        model::page(&self.memory, hva)
    }
}

/// Closes everything when it is dropped, so that no vCPU sleeps for a handler that has ended.
#[derive(Debug)]
pub(crate) struct CloseAtEnd<'a>(pub(crate) &'a Userfault);

impl Drop for CloseAtEnd<'_> {
    fn drop(&mut self) {
        self.0.close();
    }
}

#[cfg(test)]
mod tests {
    use slat_model::{Backing, Model};

    use super::*;

    const PAGE: u64 = 4096;

    fn userfault(mode: Mode, regions: usize) -> Userfault {
        let model = Model::builder().build().unwrap();
        let memory = model.host_memory(8 * PAGE, Backing::Shmem).unwrap();
        let region = 8 * PAGE / regions as u64;
        let division = Division { page: PAGE, region, regions, guest_page: PAGE };
        Userfault::new(memory, mode, division)
    }

    fn word(userfault: &Userfault, offset: u64) -> u64 {
        userfault.memory.word(offset).unwrap().load(Ordering::Relaxed)
    }

    #[test]
    fn a_page_is_given_when_it_was_served_and_not_before() {
        let userfault = userfault(Mode::Missing, 2);
        thread::scope(|scope| {
            let _close = CloseAtEnd(&userfault);
            let ask = scope.spawn(|| userfault.page(Hva(5 * PAGE + 8), Access::Read));
            let page = userfault.next(&userfault.regions[1]).unwrap();
            assert_eq!((page, word(&userfault, 5 * PAGE + 8)), (5, 0));
            assert!(!ask.is_finished() && !userfault.is_present(5 * PAGE));
            userfault.serve(page);
            let given = ask.join().unwrap().unwrap();
            assert_eq!(given, model::page(&userfault.memory, Hva(5 * PAGE + 8)).unwrap());
            assert!(userfault.is_present(5 * PAGE) && !userfault.is_present(4 * PAGE));
            assert_eq!(word(&userfault, 5 * PAGE + 8), source::mark(5));
        });
    }

    #[test]
    fn the_second_to_serve_a_page_leaves_it_alone() {
        let userfault = userfault(Mode::Missing, 1);
        userfault.serve(3);
        userfault.memory.word(3 * PAGE).unwrap().store(7, Ordering::Relaxed);
        userfault.serve(3);
        assert_eq!(word(&userfault, 3 * PAGE), 7);
        assert_eq!(userfault.served(), Served { requests: 0, served: 1, duplicates: 1 });
    }

    #[test]
    fn a_minor_fault_lets_through_what_is_there() {
        let userfault = userfault(Mode::Minor, 1);
        userfault.memory.word(PAGE).unwrap().store(7, Ordering::Relaxed);
        userfault.serve(1);
        assert!(userfault.is_present(PAGE));
        assert_eq!(word(&userfault, PAGE), 7);
    }

    #[test]
    fn handlers_serve_every_page_once_however_many_ask() {
        let userfault = userfault(Mode::Missing, 1);
        thread::scope(|scope| {
            let close = CloseAtEnd(&userfault);
            for _ in 0..3 {
                scope.spawn(|| userfault.handle(0, Duration::ZERO));
            }
            let asks: Vec<_> = (0..4)
                .map(|_| {
                    scope.spawn(|| {
                        (0..8).all(|n| userfault.page(Hva(n * PAGE), Access::Write).is_ok())
                    })
                })
                .collect();
            assert!(asks.into_iter().all(|ask| ask.join().unwrap()));
            drop(close);
        });
        let Served { requests, served, duplicates } = userfault.served();
        assert_eq!((served, requests), (8, served + duplicates));
    }

    #[test]
    fn nobody_sleeps_for_handlers_that_have_ended() {
        let userfault = userfault(Mode::Missing, 2);
        thread::scope(|scope| {
            let ask = scope.spawn(|| userfault.page(Hva(0), Access::Read));
            userfault.close();
            assert_eq!(ask.join().unwrap(), Err(HostError::NotMapped));
        });
        assert_eq!(userfault.page(Hva(8 * PAGE), Access::Read), Err(HostError::NotMapped));
    }
}
