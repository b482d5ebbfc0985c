//! One execution of a scenario: a machine, a host, a VM with two slots, and what is true of them at every moment.
//!
//! The truth is kept beside the machine and changes between two steps of a schedule, when whoever acts is entitled to
//! say so. Every access that a TLB lets through is held against it.

use std::sync::{Mutex, MutexGuard};

use shuttle::rand::{Rng, thread_rng};
use slat::sync::{AtomicU64, Ordering};
use slat::{Gpa, GpaRange, Hpa, Lookup};
use slat_vm::{
    Access, Host, HostError, HostPage, Hva, HvaRange, SlotConfig, SlotError, Vm, VmOptions, Worker,
};

use crate::format::{PAGE, Tiny};
use crate::machine::Tables;

/// CPUs of the guest.
pub(crate) const CPUS: usize = 2;
/// Pages of a slot, and of a window of host addresses behind one.
pub(crate) const SLOT_PAGES: u64 = 4;
/// The slot that stays: guest pages 0 to 3, host addresses of window 0. The log is its.
pub(crate) const STAYS: u32 = 5;
/// The slot that comes and goes: guest pages 4 to 7, host addresses of window 1 or 2.
pub(crate) const COMES: u32 = 3;
/// Guest pages of both.
pub(crate) const PAGES: u64 = 2 * SLOT_PAGES;
/// Pages of host addresses.
const HOST_ADDRESSES: u64 = 3 * SLOT_PAGES;
/// Pages of host memory: one window's worth backs nothing.
const HOST_PAGES: u64 = HOST_ADDRESSES + SLOT_PAGES;
/// Entries of a dirty ring.
const RING: u32 = 4;
/// vCPUs, workers, and whoever looks up.
const PARTICIPANTS: usize = CPUS + 6;

/// What is behind a guest page while its slot is there.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Behind {
    /// The page of host addresses.
    hva: u64,
    /// Another one that it can be, while the page is converted.
    or: Option<u64>,
    pub(crate) read_only: bool,
}

/// A page of host addresses.
#[derive(Clone, Copy)]
struct Page {
    /// The page of host memory that backs it.
    backing: u64,
    /// Taken back: an invalidation has begun, and not yet ended.
    taken: bool,
    /// How often the guest has written to it.
    written: u64,
    /// What that was when a migration last copied it.
    copied: u64,
}

/// What is true.
pub(crate) struct Truth {
    /// By guest page.
    behind: [Option<Behind>; PAGES as usize],
    /// Beginnings of deletions and ends of creations of the slot that comes and goes: odd while it may not be there.
    changes: u64,
    /// The slot that stays moves to the place of the other and back, and that one is gone.
    moves: bool,
    /// vCPUs that are not through.
    pub(crate) running: usize,
    pages: [Page; HOST_ADDRESSES as usize],
    /// By page of host memory: the last write to it, as `written` counts them.
    contents: [u64; HOST_PAGES as usize],
    free: Vec<u64>,
}

/// The host: answers with the largest aligned page that its mapping has.
pub(crate) struct Memory<'m> {
    truth: &'m Mutex<Truth>,
    /// Takes a step, so that others can act between the question and the answer.
    asked: AtomicU64,
}

impl Host for Memory<'_> {
    fn page(&self, hva: Hva, _: Access) -> Result<HostPage, HostError> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        let truth = self.truth.lock().unwrap();
        let page = hva.0 / PAGE;
        let is_one = |size: &u64| {
            let first = page & !(size - 1);
            let backing = truth.pages[first as usize].backing;
            backing.is_multiple_of(*size)
                && (0..*size).all(|n| truth.pages[(first + n) as usize].backing == backing + n)
        };
        let size = [4, 2, 1].into_iter().find(is_one).unwrap();
        let backing = truth.pages[(page & !(size - 1)) as usize].backing;
        Ok(HostPage { output: host(backing), size: size * PAGE, writable: true, device: false })
    }
}

pub(crate) type TinyVm<'m> = Vm<'m, Tiny, Tables, Memory<'m>>;

/// Everything that the threads of one execution share.
#[derive(Clone, Copy)]
pub(crate) struct World<'v, 'm> {
    pub(crate) machine: &'m Tables,
    pub(crate) vm: &'v TinyVm<'m>,
    truth: &'m Mutex<Truth>,
}

/// Plays a scenario once, and prints what happens if `traced`; what went wrong.
pub(crate) fn play(scenario: fn(World<'_, '_>), traced: bool) -> Option<String> {
    let format = match draw(3) {
        0 => Tiny::levels(3).with_hardware_dirty(),
        _ => Tiny::levels(3),
    };
    let machine = Tables::new(format, PARTICIPANTS, CPUS).traced(traced);
    let truth = Mutex::new(Truth::new());
    {
        let memory = Memory { truth: &truth, asked: AtomicU64::new(0) };
        let eager_split = [None, Some(2 * PAGE), Some(4 * PAGE)][thread_rng().gen_range(0..3)];
        let dirty_ring = Some(RING);
        let options =
            VmOptions { eager_split, coherent_data: true, dirty_ring, ..VmOptions::default() };
        let vm = Vm::new(&machine, memory, format, 1, options).unwrap();
        machine.set_root(vm.tree().root());
        let world = World { machine: &machine, vm: &vm, truth: &truth };
        let mut worker = world.worker();
        let config = SlotConfig::new(Gpa(0), SLOT_PAGES * PAGE, Hva(0));
        vm.create_slot(&mut worker, STAYS, config).unwrap();
        world.create(&mut worker);
        drop(worker);
        scenario(world);
    }
    machine.verdict()
}

impl Truth {
    fn new() -> Self {
        let page = |backing| Page { backing, taken: false, written: 0, copied: 0 };
        let stays = |page: usize| Behind { hva: page as u64, or: None, read_only: false };
        Self {
            behind: std::array::from_fn(|page| ((page as u64) < SLOT_PAGES).then(|| stays(page))),
            changes: 1,
            moves: false,
            running: 0,
            pages: std::array::from_fn(|n| page(n as u64)),
            contents: [0; HOST_PAGES as usize],
            free: (HOST_ADDRESSES..HOST_PAGES).collect(),
        }
    }

    /// What is behind a guest page.
    pub(crate) fn behind(&self, page: u64) -> Option<Behind> {
        self.behind[page as usize]
    }

    /// The same even number for as long as the slot with this guest page is the same.
    pub(crate) fn changes(&self, page: u64) -> u64 {
        if page < SLOT_PAGES && !self.moves { 0 } else { self.changes }
    }

    /// Pages of the slot that stays which were written since they were copied.
    pub(crate) fn changed(&self) -> u64 {
        bits(|page| self.pages[page as usize].written != self.pages[page as usize].copied)
    }

    /// A migration copies those pages of the slot that stays.
    pub(crate) fn copy(&mut self, pages: u64) {
        for page in (0..SLOT_PAGES as usize).filter(|page| pages >> page & 1 == 1) {
            self.pages[page].copied = self.pages[page].written;
        }
    }
}

/// Those pages of a slot of which `holds` is true.
fn bits(holds: impl Fn(u64) -> bool) -> u64 {
    (0..SLOT_PAGES).map(|page| u64::from(holds(page)) << page).sum()
}

impl<'v, 'm> World<'v, 'm> {
    pub(crate) fn worker(self) -> Worker<'m, Tables> {
        self.vm.worker().unwrap()
    }

    /// The truth, between two steps: nothing that takes a step may happen while it is held.
    pub(crate) fn truth(self) -> MutexGuard<'m, Truth> {
        self.truth.lock().unwrap()
    }

    /// Remembers `what` as a violation, unless `holds`.
    pub(crate) fn expect(self, holds: bool, what: &str) {
        if !holds {
            self.machine.violation(what);
        }
    }

    /// An access to a guest page goes through to `output`. No step is taken here.
    pub(crate) fn reach(self, page: u64, output: Hpa, access: Access) {
        let mut truth = self.truth();
        let truth = &mut *truth;
        let Some(Behind { hva, or, read_only }) = truth.behind[page as usize] else {
            return self.expect(false, "stale: a page of a slot that is gone is reached");
        };
        let is_there = |hva: &u64| output == host(truth.pages[*hva as usize].backing);
        let hva = or.filter(is_there).unwrap_or(hva);
        let behind = &mut truth.pages[hva as usize];
        self.expect(!behind.taken, "stale: a page is reached that was taken back");
        self.expect(output == host(behind.backing), "stale: a page is reached that backs another");
        let contents = &mut truth.contents[behind.backing as usize];
        self.expect(*contents == behind.written, "a page does not hold what was written to it");
        if access == Access::Write {
            self.expect(!read_only, "a write goes through to a read-only slot");
            behind.written += 1;
            *contents = behind.written;
        }
    }

    /// Host addresses are taken back, those of the pages behind the guest pages of `range`, whatever slot is there.
    pub(crate) fn take(self, range: GpaRange) {
        self.each_behind(range, |page| page.taken = true);
    }

    fn each_behind(self, range: GpaRange, mut act: impl FnMut(&mut Page)) {
        let mut truth = self.truth();
        for hva in hvas(range) {
            act(&mut truth.pages[hva as usize]);
        }
    }

    /// The host backs what it took with other memory where it has some, and the old memory gets other contents. An
    /// aligned range keeps its shape where that is possible.
    pub(crate) fn move_and_give(self, range: GpaRange) {
        let mut truth = self.truth();
        let truth = &mut *truth;
        for window in hvas(range).collect::<Vec<_>>().chunks((range.size() / PAGE) as usize) {
            let len = window.len() as u64;
            let mut free = truth.free.clone();
            free.sort_unstable();
            let whole = free.windows(len as usize).find(|free| {
                free[0].is_multiple_of(len.next_power_of_two())
                    && free[len as usize - 1] == free[0] + len - 1
            });
            let to: Vec<u64> = whole.map_or_else(|| free.clone(), <[u64]>::to_vec);
            for (&hva, &to) in window.iter().zip(&to) {
                let page = &mut truth.pages[hva as usize];
                truth.contents[to as usize] = page.written;
                truth.contents[page.backing as usize] = u64::MAX;
                truth.free.retain(|&free| free != to);
                truth.free.push(page.backing);
                page.backing = to;
            }
        }
        for hva in hvas(range) {
            truth.pages[hva as usize].taken = false;
        }
    }

    /// Gives the guest the slot that comes and goes, with one window of host addresses or the other.
    pub(crate) fn create(self, worker: &mut Worker<'m, Tables>) {
        let window = thread_rng().gen_range(1..3);
        let read_only = thread_rng().gen_range(0..4) == 0;
        let config = SlotConfig { read_only, ..comes(window) };
        self.create_as(worker, window, config).unwrap();
    }

    /// The same with private memory: one window is behind what is shared, the other behind what is private.
    pub(crate) fn create_private(self, worker: &mut Worker<'m, Tables>) {
        let config = SlotConfig { private: Some(hva(2 * SLOT_PAGES)), ..comes(1) };
        self.create_as(worker, 1, config).unwrap();
    }

    /// The same pinned, unless the host takes some of it back just now. Whether it is there.
    pub(crate) fn create_pinned(self, worker: &mut Worker<'m, Tables>) -> bool {
        let config = SlotConfig { pinned: true, ..comes(1) };
        match self.create_as(worker, 1, config) {
            Ok(()) => true,
            Err(error) => {
                let again = Some(HostError::Again);
                let busy = matches!(error, SlotError::NotMapped { error, .. } if error == again);
                self.expect(busy, "a slot is not pinned, and nobody takes it back");
                self.truth().behind[SLOT_PAGES as usize..].fill(None);
                false
            }
        }
    }

    fn create_as(
        self,
        worker: &mut Worker<'m, Tables>,
        window: u64,
        config: SlotConfig,
    ) -> Result<(), SlotError> {
        {
            let mut truth = self.truth();
            for page in 0..SLOT_PAGES {
                let hva = window * SLOT_PAGES + page;
                let behind = Behind { hva, or: None, read_only: config.read_only };
                truth.behind[(SLOT_PAGES + page) as usize] = Some(behind);
            }
        }
        self.vm.create_slot(worker, COMES, config)?;
        self.truth().changes += 1;
        Ok(())
    }

    /// Makes pages of the slot that comes and goes private, or shared.
    pub(crate) fn convert(self, worker: &mut Worker<'m, Tables>, range: GpaRange, private: bool) {
        let first = range.start().0 / PAGE;
        let pages = first as usize..(first + range.size() / PAGE) as usize;
        let each = |change: fn(&mut Behind, u64)| {
            let mut truth = self.truth();
            for page in pages.clone() {
                let window = if private { 2 } else { 1 };
                let to = window * SLOT_PAGES + page as u64 - SLOT_PAGES;
                truth.behind[page].iter_mut().for_each(|behind| change(behind, to));
            }
        };
        each(|behind, to| behind.or = Some(to));
        self.vm.set_private(worker, COMES, range, private).unwrap();
        each(|behind, to| (behind.hva, behind.or) = (to, None));
    }

    /// Takes it from the guest.
    pub(crate) fn delete(self, worker: &mut Worker<'m, Tables>) {
        self.truth().changes += 1;
        self.vm.delete_slot(worker, COMES).unwrap();
        self.truth().behind[SLOT_PAGES as usize..].fill(None);
    }

    /// Moves the slot that stays to the place of the one that comes and goes, which is gone, or back.
    pub(crate) fn move_slot(self, worker: &mut Worker<'m, Tables>, to: u64) {
        let pages = |first: u64| first as usize..(first + SLOT_PAGES) as usize;
        {
            let mut truth = self.truth();
            truth.moves = true;
            truth.changes += truth.changes % 2 + 1;
            for page in 0..SLOT_PAGES {
                let behind = Behind { hva: page, or: None, read_only: false };
                truth.behind[page as usize] = Some(behind);
                truth.behind[(SLOT_PAGES + page) as usize] = Some(behind);
            }
        }
        let config = SlotConfig::new(gpa(to), SLOT_PAGES * PAGE, Hva(0));
        self.vm.change_slot(worker, STAYS, config).unwrap();
        let mut truth = self.truth();
        truth.behind[pages(SLOT_PAGES - to)].fill(None);
        truth.changes += 1;
    }

    /// Where a guest page is mapped to, and whether it may be written. `None` also while it is being changed.
    pub(crate) fn mapped(self, worker: &Worker<'m, Tables>, page: u64) -> Option<(Hpa, bool)> {
        match self.vm.tree().look_up(&worker.participant().pin(), gpa(page)) {
            Ok(Lookup::Mapped { output, template, .. }) => {
                Some((output, self.vm.tree().attributes(template).write))
            }
            _ => None,
        }
    }

    /// The pages of the slot that stays which a guest can write to without a fault. Not while anybody changes them.
    pub(crate) fn writable(self, worker: &Worker<'m, Tables>) -> u64 {
        bits(|page| {
            self.mapped(worker, page).is_some_and(|(_, write)| write)
                || self
                    .machine
                    .caches(gpa(page), |cached| cached.writes() || cached.writes_after_dirtying())
        })
    }
}

/// The pages of host addresses that can be behind the guest pages of a range, which lies in one slot's place.
fn hvas(range: GpaRange) -> impl Iterator<Item = u64> {
    let (first, pages) = (range.start().0 / PAGE, range.size() / PAGE);
    let windows = if first < SLOT_PAGES { 0..1 } else { 1..3 };
    windows.flat_map(move |window| {
        let first = window * SLOT_PAGES + first % SLOT_PAGES;
        first..first + pages
    })
}

/// The same as ranges.
pub(crate) fn behind(range: GpaRange) -> Vec<HvaRange> {
    hvas(range).filter_map(|page| HvaRange::new(hva(page), PAGE)).collect()
}

/// The slot that comes and goes, with a window of host addresses.
fn comes(window: u64) -> SlotConfig {
    SlotConfig::new(gpa(SLOT_PAGES), SLOT_PAGES * PAGE, hva(window * SLOT_PAGES))
}

fn hva(page: u64) -> Hva {
    Hva(page * PAGE)
}

pub(crate) fn gpa(page: u64) -> Gpa {
    Gpa(page * PAGE)
}

pub(crate) fn range(page: u64, pages: u64) -> GpaRange {
    GpaRange::new(gpa(page), pages * PAGE).unwrap()
}

/// Page `number` of the host's memory; blocks begin at multiples of their size.
pub(crate) fn host(number: u64) -> Hpa {
    Hpa((1 << 20) + number * PAGE)
}

/// One of `n`, drawn with the schedule.
pub(crate) fn draw(n: u64) -> u64 {
    thread_rng().gen_range(0..n)
}

/// A range of one, two or four pages, aligned to its size, of guest pages from `first` to `first + 4`.
pub(crate) fn draw_range(first: u64) -> GpaRange {
    let pages = 1 << draw(3);
    range(first + draw(SLOT_PAGES / pages) * pages, pages)
}
