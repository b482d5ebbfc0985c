//! One round: a VM, its threads, and what is true when they have ended.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use slat::{Gpa, Lookup};
use slat_model::{Backing, Model, OnViolation};
use slat_vm::{DirtyRing, HostError, SlotError, Vm, Worker};

use crate::failure::Failure;
use crate::random::Dice;
use crate::soak::config::{Config, Soaked};
use crate::soak::guest::Guest;
use crate::soak::memory::Memory;
use crate::soak::place::{Behind, Place, SHARED, State};
use crate::soak::work::Work;

/// Accesses of each vCPU. Workers go on until all vCPUs are through.
const ACCESSES: u64 = if cfg!(debug_assertions) { 5_000 } else { 100_000 };
/// Pages of memory that back nothing at first.
const SPARE: u64 = 256;
/// How often the round looks whether anything goes on.
const LOOK: Duration = Duration::from_millis(20);
/// Host memory that a round may have; most of it is never touched.
const MEMORY_LIMIT: u64 = 1 << 40;

/// What a round has done and found.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) operations: u64,
    pub(crate) faults: u64,
    /// What was wrong first, if anything was.
    pub(crate) finding: Option<String>,
}

/// A VM on memory that moves.
pub(crate) type SoakVm<'m, T> = Vm<'m, T, Model, Memory>;

/// What all threads of a round share.
pub(crate) struct Ground<'v, 'm, T: Soaked> {
    pub(crate) vm: &'v SoakVm<'m, T>,
    pub(crate) places: Vec<Place>,
    host_pages: usize,
    block_pages: u64,
    /// Of all vCPUs. Whoever has them has harvested, reset and reported when it lets them go.
    rings: Mutex<Vec<DirtyRing>>,
    /// Operations of all threads.
    operations: AtomicU64,
    /// vCPUs that are not through.
    running: AtomicUsize,
    finding: OnceLock<String>,
}

impl<'m, T: Soaked> Ground<'_, 'm, T> {
    /// Pages of host addresses.
    pub(crate) fn host_pages(&self) -> usize {
        self.host_pages
    }

    /// Pages of a block.
    pub(crate) fn block_pages(&self) -> u64 {
        self.block_pages
    }

    /// Bytes of a page.
    pub(crate) fn page_size(&self) -> u64 {
        self.vm.tree().geometry().page_size()
    }

    /// The words in a page of host addresses, as the host sees them.
    pub(crate) fn contents(&self, page: u64) -> Vec<u64> {
        self.vm.host().contents(self.vm.machine(), page)
    }

    /// Creates a slot. Whether it is there: one is not pinned while the host takes some of it back.
    ///
    /// # Errors
    /// Why the VM refused.
    pub(crate) fn create(
        &self,
        worker: &mut Worker<'m, Model>,
        place: &Place,
        to: Behind,
    ) -> Result<bool, String> {
        place.set_kinds(0, place.pages, SHARED);
        let config = place.begin_change(Some(to));
        match self.vm.create_slot(worker, place.id, config) {
            Ok(()) => {
                place.end_change(Some(to));
                Ok(true)
            }
            Err(SlotError::NotMapped { error: Some(HostError::Again), .. }) => {
                place.end_change(None);
                Ok(false)
            }
            Err(why) => Err(format!("creating a slot: {why}")),
        }
    }

    fn rings(&self) -> MutexGuard<'_, Vec<DirtyRing>> {
        self.rings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a vCPU may be waiting for its ring.
    pub(crate) fn is_ring_full(&self) -> bool {
        self.rings.try_lock().is_ok_and(|rings| rings.iter().any(DirtyRing::is_full))
    }

    /// Harvests and resets all dirty rings, and reports to each place what was in them.
    ///
    /// # Errors
    /// What was wrong about it.
    pub(crate) fn harvest(&self, worker: &mut Worker<'m, Model>) -> Result<(), String> {
        for ring in self.rings().iter() {
            let mut pages = Vec::new();
            ring.harvest(|page| pages.push(page));
            let reset = self.vm.reset_dirty_ring(worker, ring);
            reset.map_err(|why| format!("resetting a dirty ring: {why}"))?;
            for page in pages {
                let place = self.places.iter().find(|place| page.slot == place.id.into());
                if !place.is_some_and(|place| place.report(page.page)) {
                    return Err(format!(
                        "a dirty ring has {page:?}, which nobody can have written"
                    ));
                }
            }
        }
        Ok(())
    }

    /// Whether something was found, so that every thread is to end.
    pub(crate) fn is_over(&self) -> bool {
        self.finding.get().is_some() || self.vm.machine().violations() > 0
    }

    fn found(&self, finding: String) {
        let _ = self.finding.set(finding);
    }

    /// Does `step` again and again, while `go_on`.
    fn repeat(
        &self,
        mut go_on: impl FnMut() -> bool,
        mut step: impl FnMut() -> Result<(), String>,
    ) {
        while go_on() && !self.is_over() {
            if let Err(finding) = step() {
                return self.found(finding);
            }
            self.operations.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// A thread of a round, for as long as it runs. One that panics ends the round.
struct Running<'a, 'v, 'm, T: Soaked> {
    ground: &'a Ground<'v, 'm, T>,
    is_vcpu: bool,
}

impl<T: Soaked> Drop for Running<'_, '_, '_, T> {
    fn drop(&mut self) {
        if thread::panicking() {
            let _ = self.ground.finding.set("a thread panicked".to_owned());
        }
        self.ground.running.fetch_sub(usize::from(self.is_vcpu), Ordering::SeqCst);
    }
}

/// Plays the round of a seed. `stuck` is called if nothing goes on for as long as `patience`, and does not return.
///
/// # Errors
/// [`Failure::Run`] if the machine cannot be had.
pub(crate) fn play<T: Soaked>(
    config: &Config,
    seed: u64,
    patience: Duration,
    stuck: impl Fn(),
) -> Result<Outcome, Failure> {
    on_ground::<T>(config, |ground| ground.play(config, seed, patience, stuck))
}

/// Makes the VM, lets `act` use it, which returns how many faults there were, and looks at what is left of it.
fn on_ground<T: Soaked>(
    config: &Config,
    act: impl FnOnce(&Ground<'_, '_, T>) -> Result<u64, Failure>,
) -> Result<Outcome, Failure> {
    let run = |error: &dyn std::fmt::Display| Failure::Run(error.to_string());
    let (page, block) = (config.page_size(), config.granule.huge_page_size().0);
    let participants = (config.vcpus + config.workers + 1) as usize;
    let tables = u64::from(config.slots) * config.span() / block * 4 + 4096;
    let model = Model::builder()
        .architecture(config.arch.of_model())
        .page_shift(page.ilog2())
        .cpus(config.vcpus as usize)
        .slots(participants)
        .table_limit(tables as u32)
        .features(config.features())
        .memory_limit(MEMORY_LIMIT)
        .on_violation(OnViolation::Record)
        .build()
        .map_err(|error| run(&error))?;
    let backing = config.backing.of_model(config.granule);
    let own = model.host_memory(Place::host_size(config), backing).map_err(|error| run(&error))?;
    let spare = model.host_memory(SPARE * page, Backing::Anonymous).map_err(|error| run(&error))?;
    let memory = Memory::new(own, &spare, (page, block), config.vcpus);
    let format = T::of(config).map_err(|error| run(&error))?;
    let vm = Vm::new(&model, memory, format, 1, config.options()).map_err(|error| run(&error))?;
    let ground = Ground {
        vm: &vm,
        places: (0..config.slots).map(|n| Place::new(config, n)).collect(),
        host_pages: (Place::host_size(config) / page) as usize,
        block_pages: block / page,
        rings: Mutex::default(),
        operations: AtomicU64::new(0),
        running: AtomicUsize::new(config.vcpus as usize),
        finding: OnceLock::new(),
    };
    let faults = act(&ground)?;
    let Ground { operations, finding, .. } = ground;
    model.check_quiet(T::control_of(vm.tree()));
    drop(vm);
    model.check_freed();
    let left = model.counters().tables_in_use;
    let violation = model.violation().map(|report| report.to_string());
    let leaked = (left > 0).then(|| format!("{left} tables were never freed"));
    let finding = violation.or(finding.into_inner()).or(leaked);
    Ok(Outcome { operations: operations.into_inner(), faults, finding })
}

impl<'m, T: Soaked> Ground<'_, 'm, T> {
    /// Runs all threads to their end, and looks at what they leave. Returns how many faults there were.
    fn play(
        &self,
        config: &Config,
        seed: u64,
        patience: Duration,
        stuck: impl Fn(),
    ) -> Result<u64, Failure> {
        let mut worker = self.worker()?;
        for place in &self.places {
            let created = self.create(&mut worker, place, Behind::ordinary());
            if let (Some(mut state), Ok(true)) = (place.state(), created) {
                *state = State::There(None);
            }
        }
        // Stream 0 has drawn the VM.
        let dice = |thread: u32| Dice::new(seed, 1 + thread);
        let guests = (0..config.vcpus).map(|n| Guest::new(self, n, dice(n)));
        let guests = guests.collect::<Result<Vec<_>, _>>()?;
        self.rings().extend(guests.iter().filter_map(Guest::ring));
        let works = (0..config.workers)
            .map(|n| Ok(Work::new(self, self.worker()?, dice(config.vcpus + n))));
        let works = works.collect::<Result<Vec<_>, Failure>>()?;
        let guests = thread::scope(|scope| {
            let guests: Vec<_> = guests
                .into_iter()
                .map(|mut guest| {
                    scope.spawn(move || {
                        let _running = Running { ground: self, is_vcpu: true };
                        let mut left = ACCESSES;
                        let go_on = || left.checked_sub(1).map(|rest| left = rest).is_some();
                        self.repeat(go_on, || guest.step());
                        guest
                    })
                })
                .collect();
            let works: Vec<_> = works
                .into_iter()
                .map(|mut work| {
                    let go_on = || self.running.load(Ordering::SeqCst) > 0;
                    scope.spawn(move || {
                        let _running = Running { ground: self, is_vcpu: false };
                        self.repeat(go_on, || work.step());
                    })
                })
                .collect();
            self.watch(patience, stuck, || {
                guests.iter().all(|guest| guest.is_finished())
                    && works.iter().all(|work| work.is_finished())
            });
            // Those that have panicked are found already.
            works.into_iter().for_each(|work| drop(work.join()));
            guests.into_iter().filter_map(|guest| guest.join().ok()).collect::<Vec<_>>()
        });
        if !self.is_over()
            && let Err(finding) = self.judge(&mut worker, &guests, &mut dice(u32::MAX - 1))
        {
            self.found(finding);
        }
        Ok(guests.iter().map(Guest::faults).sum())
    }

    fn worker(&self) -> Result<Worker<'m, Model>, Failure> {
        self.vm.worker().map_err(|error| Failure::Run(error.to_string()))
    }

    /// Waits until the round has ended, or nothing went on for as long as `patience`.
    fn watch(&self, patience: Duration, stuck: impl Fn(), ended: impl Fn() -> bool) {
        let mut last = (0, Instant::now());
        while !ended() {
            let operations = self.operations.load(Ordering::Relaxed);
            if operations != last.0 {
                last = (operations, Instant::now());
            } else if last.1.elapsed() > patience {
                stuck();
            }
            thread::sleep(LOOK);
        }
    }

    /// All threads have ended: each migration's copy becomes what memory is, nothing is writable that a log has
    /// protected, and every word holds what its vCPU stored last.
    fn judge(
        &self,
        worker: &mut Worker<'m, Model>,
        guests: &[Guest<'_, '_, 'm, T>],
        dice: &mut Dice,
    ) -> Result<(), String> {
        for place in &self.places {
            let Some(mut state) = place.state() else { continue };
            let State::There(Some(migration)) = &mut *state else { continue };
            let lost = migration.round(self, worker, place, dice, true);
            let lost = lost.map_err(|why| format!("the last collection: {why}"))?;
            if let Some(page) = lost.or(migration.changed(self).first().copied()) {
                return Err(migration.lost(place, page));
            }
            let spot = place.behind().map_or(0, Behind::spot);
            let writable = |&page: &u64| self.is_writable(worker, place.gpa(spot, page));
            if migration.protects()
                && let Some(page) = (0..place.pages).find(writable)
            {
                return Err(format!("page {page} of slot {} is collected, and writable", place.id));
            }
        }
        for (n, guest) in guests.iter().enumerate() {
            let mut pages = (0..).zip(guest.written());
            let wrong = pages.find_map(|(page, &stored)| {
                let found = self.contents(page)[n];
                (found != stored).then_some((page, found, stored))
            });
            if let Some((page, found, stored)) = wrong {
                return Err(format!(
                    "vCPU {n}'s word in page {page} of host addresses holds {found:#x}, {stored:#x} was stored last"
                ));
            }
        }
        Ok(())
    }

    fn is_writable(&self, worker: &Worker<'m, Model>, gpa: Gpa) -> bool {
        let tree = self.vm.tree();
        let found = tree.look_up(&worker.participant().pin(), gpa);
        matches!(found, Ok(Lookup::Mapped { template, .. }) if tree.attributes(template).write)
    }
}

#[cfg(test)]
mod tests {
    use slat::Edges;
    use slat::format::arm::{K4, Stage2};

    use super::*;
    use crate::arch::Arch;
    use crate::granule::GranuleSize;
    use crate::soak::migration::Migration;
    use crate::soak::place::{Kind, PRIVATE};

    /// A VM of few pages.
    fn small() -> Config {
        let small = |config: &Config| config.granule == GranuleSize::K4 && config.pages < 200;
        (0..).map(|seed| Config::draw(seed, 2, Some(Arch::Arm))).find(small).unwrap()
    }

    /// What is found where `act` does something wrong to the first of a VM's slots.
    fn found(
        act: impl for<'m> FnOnce(
            &Ground<'_, 'm, Stage2<K4>>,
            &mut Worker<'m, Model>,
            &Place,
            Behind,
        ) -> Option<String>,
    ) -> Option<String> {
        let outcome = on_ground::<Stage2<K4>>(&small(), |ground| {
            let behind = Behind::ordinary();
            let place = &ground.places[0];
            let mut worker = ground.worker()?;
            ground.create(&mut worker, place, behind).unwrap();
            if let Some(finding) = act(ground, &mut worker, place, behind) {
                ground.found(finding);
            }
            Ok(0)
        });
        outcome.unwrap().finding
    }

    /// The first of so many accesses that is wrong.
    fn wrong(guest: &mut Guest<'_, '_, '_, Stage2<K4>>, accesses: u64) -> Option<String> {
        (0..accesses).find_map(|_| guest.step().err())
    }

    #[test]
    fn a_vm_to_which_nothing_wrong_is_done_is_clean() {
        let nothing = found(|ground, _, _, _| {
            wrong(&mut Guest::new(ground, 0, Dice::new(1, 1)).unwrap(), 2_000)
        });
        assert_eq!(nothing, None);
    }

    #[test]
    fn a_page_that_moves_without_an_invalidation_is_found() {
        let finding = found(|ground, _, place, behind| {
            let mut guest = Guest::new(ground, 0, Dice::new(1, 1)).unwrap();
            assert_eq!(wrong(&mut guest, 2_000), None);
            let claim = ground.vm.host().claim(place.host_page(behind, 0), 8).unwrap();
            claim.scatter(ground.vm.machine(), &mut Dice::new(2, 2));
            claim.give();
            wrong(&mut guest, 10_000)
        });
        assert!(finding.unwrap().contains("where it is no more"));
    }

    #[test]
    fn a_page_that_is_reached_while_the_host_has_it_is_found() {
        let finding = found(|ground, _, place, behind| {
            let mut guest = Guest::new(ground, 0, Dice::new(1, 1)).unwrap();
            let claim = ground.vm.host().claim(place.host_page(behind, 0), 8).unwrap();
            claim.take();
            wrong(&mut guest, 10_000)
        });
        assert!(finding.unwrap().contains("taken back"));
    }

    /// The slot is deleted, and one of another kind is created in its place.
    fn replace<'m>(
        ground: &Ground<'_, 'm, Stage2<K4>>,
        worker: &mut Worker<'m, Model>,
        place: &Place,
        kind: Kind,
    ) {
        place.begin_change(None);
        ground.vm.delete_slot(worker, place.id).unwrap();
        place.end_change(None);
        let to = Behind { kind, ..Behind::ordinary() };
        assert_eq!(ground.create(worker, place, to), Ok(true));
    }

    #[test]
    fn a_page_that_is_reached_as_what_it_is_no_more_is_found() {
        let finding = found(|ground, worker, place, _| {
            replace(ground, worker, place, Kind::Private);
            let mut guest = Guest::new(ground, 0, Dice::new(1, 1)).unwrap();
            assert_eq!(wrong(&mut guest, 2_000), None);
            place.set_kinds(0, place.pages, PRIVATE);
            wrong(&mut guest, 10_000)
        });
        assert!(finding.unwrap().contains("where it is no more"));
    }

    #[test]
    fn a_pinned_page_that_vanishes_is_found() {
        let finding = found(|ground, worker, place, _| {
            replace(ground, worker, place, Kind::Pinned);
            let mut work = Work::new(ground, ground.worker().unwrap(), Dice::new(1, 1));
            assert_eq!(work.look_at_pinned(place), Ok(()));
            let (participant, reserve) = worker.parts();
            let page = place.range(0, 3, 1).unwrap();
            let unmapped = ground.vm.tree().unmap(participant, reserve, page, Edges::Whole, |_| {});
            assert!(unmapped.is_ok());
            work.look_at_pinned(place).err()
        });
        assert!(finding.unwrap().contains("has vanished"));
    }

    #[test]
    fn a_write_that_the_log_does_not_hear_of_is_found() {
        let lost = found(|ground, worker, place, behind| {
            let dice = &mut Dice::new(3, 3);
            let mut migration = Migration::begin(ground, worker, place, behind, dice).unwrap();
            // In some modes the first round reports every page.
            assert_eq!(migration.round(ground, worker, place, dice, true), Ok(None));
            let hpa = ground.vm.host().place(place.host_page(behind, 5)).unwrap();
            ground.vm.machine().host_word(hpa).unwrap().store(77, Ordering::Relaxed);
            let lost = migration.round(ground, worker, place, dice, true).unwrap();
            lost.map(|page| page.to_string())
        });
        assert_eq!(lost.as_deref(), Some("5"));
    }
}
