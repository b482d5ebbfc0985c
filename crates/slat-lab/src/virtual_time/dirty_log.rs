//! The phases of the dirty-log workload in virtual time: every vCPU is a fiber, and so is the hypervisor's thread.

use std::cell::{Cell, RefCell};

use slat::format::arm::{K4, Stage2};
use slat::{Gpa, GpaRange};
use slat_model::clock::{Fiber, Ledger, Simulation, Time, Timed, ledger, now, park, sync, unpark};
use slat_model::{Features, Model};
use slat_vm::{Hva, LogMode, SlotConfig, Vm, VmOptions, Worker};

use super::design::{Design, Maintenance};
use super::ground::{BLOCK, Blocks, Busy, Ground, Guest, PAGE, VirtualVm};
use super::profile::Profile;
use super::walks::{Broken, Walks};
use crate::failure::Failure;
use crate::model;
use crate::random::Dice;
use crate::report::Counters;

/// What is run.
#[derive(Clone, Debug)]
pub(crate) struct Scenario {
    pub(crate) vcpus: u32,
    /// Bytes of each vCPU, whole blocks.
    pub(crate) bytes: u64,
    /// Rounds of dirty, get, clear.
    pub(crate) iterations: u32,
    pub(crate) manual_protect: bool,
    pub(crate) eager_split: Option<u64>,
    pub(crate) seed: u64,
}

/// One phase.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Phase {
    pub(crate) name: &'static str,
    pub(crate) iteration: Option<u32>,
    pub(crate) took: Time,
    /// How many fibers worked: all vCPUs, or the hypervisor's thread. The others had nothing to do.
    pub(crate) workers: u32,
    /// What their time went into, each of which has worked or waited as long as the phase took.
    pub(crate) ledger: Ledger,
    pub(crate) busy: Busy,
    pub(crate) counters: Counters,
}

/// Runs all phases.
///
/// # Errors
/// [`Failure::Run`] if something broke off, [`Failure::Usage`] if the profile does not say what faults cost.
pub(crate) fn run(
    scenario: &Scenario,
    profile: &Profile,
    design: &Design,
) -> Result<Vec<Phase>, Failure> {
    let (costs, prices) = (profile.faults()?, profile.walks()?);
    let size = scenario.bytes * u64::from(scenario.vcpus);
    let tables = size / BLOCK * 2 + size / (1 << 30) * 2 + 4096;
    let model = Model::builder()
        .cpus(1)
        .slots(scenario.vcpus as usize + 4)
        .table_limit(u32::try_from(tables).unwrap_or(u32::MAX))
        .checked(false)
        .features(Features::default())
        .build()
        .map_err(broken)?;
    let machine = Timed::new(model, costs.costs);
    let ground = Ground::new(&costs, design, &machine, size);
    let format = Stage2::<K4>::new(44).map_err(broken)?;
    let options = VmOptions {
        eager_split: scenario.eager_split,
        coherent_data: design.maintenance == Maintenance::None,
        ..VmOptions::default()
    };
    let vm = Vm::new(&machine, Blocks(&ground), format, 1, options).map_err(broken)?;
    let mut worker = vm.worker().map_err(broken)?;
    let slot = SlotConfig::new(Gpa(0), size, Hva(0));
    vm.create_slot(&mut worker, 0, slot).map_err(broken)?;
    let stage = Stage::default();
    let vcpus = (0..scenario.vcpus).map(|_| vm.vcpu()).collect::<Result<Vec<_>, _>>();
    let mut simulation = Simulation::new();
    let conductor = Fiber(scenario.vcpus);
    for (index, vcpu) in (0..).zip(vcpus.map_err(broken)?) {
        let part = GpaRange::new(Gpa(u64::from(index) * scenario.bytes), scenario.bytes);
        let part = part.ok_or(Failure::Usage("a vCPU needs memory".to_owned()))?;
        let dice = Dice::new(scenario.seed, index);
        let mut guest = Guest { vm: &vm, ground: &ground, vcpu, part, dice };
        let stage = &stage;
        simulation
            .spawn(Time(0), move || stage.take_part(&mut guest, conductor))
            .map_err(broken)?;
    }
    let walks = (!ground.charges_steps())
        .then(|| Walks::new(vm.tree(), (design, prices), scenario.eager_split))
        .transpose()
        .map_err(broken)?;
    let range = GpaRange::new(Gpa(0), size);
    let range = range.ok_or(Failure::Usage("a vCPU needs memory".to_owned()))?;
    let mut conduct = Conductor {
        scenario,
        range,
        walks,
        books: Counters::default(),
        vm: &vm,
        worker,
        ground: &ground,
        stage: &stage,
        phases: Vec::new(),
    };
    let phases = RefCell::new(Vec::new());
    simulation
        .spawn(Time(0), || {
            if let Err(why) = conduct.all() {
                stage.failed.borrow_mut().get_or_insert(why);
            }
            phases.replace(conduct.phases);
            stage.ended.set(true);
            (0..scenario.vcpus).for_each(|index| unpark(Fiber(index)));
        })
        .map_err(broken)?;
    simulation.run();
    stage.failed.take().map_or_else(|| Ok(phases.take()), |why| Err(Failure::Run(why)))
}

fn broken(why: impl std::fmt::Display) -> Failure {
    Failure::Run(why.to_string())
}

/// How vCPUs are told what to do.
#[derive(Default)]
struct Stage {
    ended: Cell<bool>,
    failed: RefCell<Option<String>>,
}

impl Stage {
    fn take_part(&self, guest: &mut Guest<'_>, conductor: Fiber) {
        loop {
            park();
            if self.ended.get() {
                return;
            }
            if let Err(why) = guest.pass() {
                self.failed.borrow_mut().get_or_insert(why);
            }
            sync();
            let running = &guest.ground.running;
            running.set(running.get() - 1);
            if running.get() == 0 {
                unpark(conductor);
            }
        }
    }
}

struct Conductor<'a> {
    scenario: &'a Scenario,
    range: GpaRange,
    /// The thread's walks, where they are not the engine's.
    walks: Option<Walks<'a, 'a>>,
    /// What the engine did in such a design only to keep the books of the log.
    books: Counters,
    vm: &'a VirtualVm<'a>,
    worker: Worker<'a, Timed>,
    ground: &'a Ground<'a>,
    stage: &'a Stage,
    phases: Vec<Phase>,
}

impl<'a> Conductor<'a> {
    fn all(&mut self) -> Result<(), String> {
        let Scenario { manual_protect: manual, eager_split, iterations, .. } = *self.scenario;
        let (eager, range) = (eager_split.is_some(), self.range);
        let pages = range.size() / PAGE;
        self.pass("populate", None)?;
        let mode = match manual {
            true => LogMode::Manual { initially_all_set: true },
            false => LogMode::Protect,
        };
        self.step(
            ("enable", None),
            |walks| if manual { Ok(()) } else { walks.enable(range, eager) },
            |vm, worker| vm.enable_log(worker, 0, mode),
        )?;
        let mut bitmap = vec![0; pages.div_ceil(64) as usize];
        // Every page is written in every pass.
        let written = vec![u64::MAX; bitmap.len()];
        for round in 1..=iterations {
            self.pass("dirty", Some(round))?;
            self.step(
                ("get", Some(round)),
                |walks| if manual { Ok(()) } else { walks.clear(range, &written, false) },
                |vm, worker| vm.dirty_log(worker, 0, &mut bitmap).map(drop),
            )?;
            if manual {
                self.step(
                    ("clear", Some(round)),
                    |walks| walks.clear(range, &bitmap, eager),
                    |vm, worker| vm.clear_dirty_log(worker, 0, 0, pages, &bitmap).map(drop),
                )?;
            }
        }
        self.step(("disable", None), |_| Ok(()), |vm, worker| vm.disable_log(worker, 0))
    }

    fn pass(&mut self, name: &'static str, iteration: Option<u32>) -> Result<(), String> {
        let before = self.read(Who::Vcpus);
        self.ground.running.set(self.scenario.vcpus);
        (0..self.scenario.vcpus).for_each(|index| unpark(Fiber(index)));
        park();
        self.end((name, iteration), Who::Vcpus, before);
        self.stage.failed.borrow().clone().map_or(Ok(()), Err)
    }

    /// The hypervisor's thread does something: as the engine does it, or as the design's walks do, after which the engine
    /// keeps the books.
    fn step<E: std::fmt::Display>(
        &mut self,
        phase: (&'static str, Option<u32>),
        walk: impl FnOnce(&mut Walks<'a, 'a>) -> Result<(), Broken>,
        act: impl FnOnce(&VirtualVm<'a>, &mut Worker<'a, Timed>) -> Result<(), E>,
    ) -> Result<(), String> {
        let before = self.read(Who::Thread);
        let done = match &mut self.walks {
            None => act(self.vm, &mut self.worker),
            Some(walks) => {
                walk(walks).map_err(|why| why.to_string())?;
                let counted = self.counted();
                let Self { vm, ground, worker, .. } = self;
                let done = ground.machine.on_account(|| act(vm, worker));
                self.books = self.books + (self.counted() - counted);
                done
            }
        };
        done.map_err(|error| error.to_string())?;
        self.end(phase, Who::Thread, before);
        Ok(())
    }

    fn counted(&self) -> Counters {
        let engine = model::counters(self.ground.machine.model(), &self.worker);
        let walks = self.walks.as_ref().map(Walks::counters).unwrap_or_default();
        engine + walks + self.ground.counters.get()
    }

    /// What has come together until now.
    fn read(&self, who: Who) -> Moment {
        let vcpus = self.scenario.vcpus;
        let ledger = match who {
            Who::Vcpus => (0..vcpus).fold(Ledger::default(), |sum, n| sum.and(&ledger(Fiber(n)))),
            Who::Thread => ledger(Fiber(vcpus)),
        };
        let counters = self.counted() - self.books;
        Moment { at: now(), ledger, busy: self.ground.busy(), counters }
    }

    fn end(&mut self, (name, iteration): (&'static str, Option<u32>), who: Who, before: Moment) {
        let now = self.read(who);
        self.phases.push(Phase {
            name,
            iteration,
            took: now.at.since(before.at),
            workers: if who == Who::Vcpus { self.scenario.vcpus } else { 1 },
            ledger: now.ledger.since(&before.ledger),
            busy: now.busy.since(&before.busy),
            counters: now.counters - before.counters,
        });
    }
}

/// Who works in a phase.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Who {
    Vcpus,
    Thread,
}

/// What was counted until a moment.
struct Moment {
    at: Time,
    ledger: Ledger,
    busy: Busy,
    counters: Counters,
}

#[cfg(test)]
mod tests {
    use slat_model::clock::Cause;

    use super::*;

    fn phases(vcpus: u32, design: &Design) -> Vec<Phase> {
        let (bytes, iterations, manual_protect) = (8 << 20, 2, true);
        let scenario =
            Scenario { vcpus, bytes, iterations, manual_protect, eager_split: None, seed: 1 };
        run(&scenario, &Profile::load("arm-server-2022").unwrap(), design).unwrap()
    }

    fn dirty(vcpus: u32, design: &str) -> f64 {
        let phases = phases(vcpus, &Design::load(design).unwrap());
        phases.iter().rfind(|phase| phase.name == "dirty").unwrap().took.as_seconds()
    }

    #[test]
    fn what_time_went_into_adds_up_to_it_in_each_phase_of_each_design() {
        for design in Design::list().unwrap() {
            for phase in phases(5, &design) {
                let Phase { name, took, workers, ledger, busy, .. } = phase;
                let elapsed = Time(took.0 * u64::from(workers));
                assert_eq!(ledger.total(), elapsed, "{name} of {}", design.name);
                for (resource, _, busy) in busy.resources(&design) {
                    assert!(busy <= took, "{resource} in {name} of {}", design.name);
                }
            }
        }
    }

    #[test]
    fn an_exclusive_lock_is_what_everybody_waits_for() {
        let phases = phases(16, &Design::load("linux-5.18").unwrap());
        let dirty = phases.iter().rfind(|phase| phase.name == "dirty").unwrap();
        let share = |time: Time| time.as_ns() / dirty.ledger.total().as_ns();
        assert!(share(dirty.ledger.time(Cause::LockWait)) > 0.8);
        assert_eq!(dirty.ledger.count(Cause::LockWork), dirty.counters.faults);
    }

    #[test]
    fn the_same_run_takes_the_same_time() {
        let design = Design::load("slat").unwrap();
        assert_eq!(phases(3, &design), phases(3, &design));
    }

    #[test]
    fn an_exclusive_lock_grows_with_vcpus_a_shared_one_later_and_none_not_at_all() {
        let times = |design| [1, 4, 16, 32].map(|vcpus| dirty(vcpus, design));
        let [one, four, sixteen, many] = times("linux-5.18");
        assert!((3.5..4.5).contains(&(sixteen / four)) && (1.9..2.1).contains(&(many / sixteen)));
        assert!(four > 2.5 * one);
        let [one, _, sixteen, many] = times("linux-5.18+parallel");
        assert!(sixteen < 2.4 * one && many > 4.0 * one);
        let [one, _, _, many] = times("slat");
        assert!(many < 1.05 * one);
    }

    #[test]
    fn a_lock_for_each_vcpus_memory_is_no_lock_to_wait_for() {
        let whole = Design::load("linux-5.18").unwrap();
        let divided = Design { lock_region: Some("8M".parse().unwrap()), ..whole.clone() };
        let last = |design| phases(8, design)[5].took.as_seconds();
        assert!(last(&divided) < last(&whole) / 3.0);
    }
}
