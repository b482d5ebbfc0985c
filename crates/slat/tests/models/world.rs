//! One execution of a model: a machine, a tree, and who acts on it.
#![expect(unsafe_code, reason = "threads of loom borrow for 'static what outlives them by a join")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use slat::sabotage::{Skip, leave_out};
use slat::{
    Attributes, Edges, Error, Gpa, GpaRange, Hpa, Installed, Leaf, Level, Lookup, Participant,
    Reserve, Tree,
};

use crate::format::{PAGE, Tiny};
use crate::machine::Tables;

/// How a model is explored.
#[derive(Clone, Copy)]
pub(crate) struct Model {
    levels: u32,
    cpus: usize,
    bbm_level: u8,
    hardware_dirty: bool,
    preemptions: usize,
    left_out: Option<Skip>,
}

impl Model {
    /// Two levels, one CPU, at most two preemptions in an execution.
    pub(crate) fn new() -> Self {
        Self {
            levels: 2,
            cpus: 1,
            bbm_level: 0,
            hardware_dirty: false,
            preemptions: 2,
            left_out: None,
        }
    }

    /// The same, while the engine leaves out a step.
    pub(crate) fn without(step: Skip) -> Self {
        Self { left_out: Some(step), ..Self::new() }
    }

    pub(crate) fn levels(self, levels: u32) -> Self {
        Self { levels, ..self }
    }

    pub(crate) fn cpus(self, cpus: usize) -> Self {
        Self { cpus, ..self }
    }

    /// How well the CPUs tolerate a change of block size (FEAT_BBM).
    pub(crate) fn bbm_level(self, bbm_level: u8) -> Self {
        Self { bbm_level, ..self }
    }

    pub(crate) fn hardware_dirty(self) -> Self {
        Self { hardware_dirty: true, ..self }
    }

    /// Where more are quickly explored, or where it takes more to see anything.
    pub(crate) fn preemptions(self, preemptions: usize) -> Self {
        Self { preemptions, ..self }
    }

    /// Runs every execution of `model`; prints what happens in the one whose number MODEL_TRACE is.
    ///
    /// # Panics
    /// With the first violation, when its execution has ended.
    pub(crate) fn explore(self, model: impl Fn(World) + Send + Sync + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = builder.preemption_bound.max(Some(self.preemptions));
        builder.max_branches = 20_000;
        let executions = Arc::new(AtomicUsize::new(0));
        let (counted, began) = (executions.clone(), Instant::now());
        let trace = std::env::var("MODEL_TRACE").ok().and_then(|number| number.parse().ok());
        builder.check(move || {
            let execution = counted.fetch_add(1, Ordering::Relaxed) + 1;
            leave_out(self.left_out);
            let world = World::new(self, trace == Some(execution));
            model(world);
            let verdict = world.end();
            leave_out(None);
            if let Some(violation) = verdict {
                panic!("in execution {execution}: {violation}");
            }
        });
        let executions = executions.load(Ordering::Relaxed);
        println!("{executions} executions, {:.1} s", began.elapsed().as_secs_f64());
    }
}

/// A machine with one tree, for the threads of one execution.
#[derive(Clone, Copy)]
pub(crate) struct World {
    pub(crate) machine: &'static Tables,
    pub(crate) tree: &'static Tree<'static, Tiny, Tables>,
}

impl World {
    fn new(model: Model, trace: bool) -> Self {
        let mut format = Tiny::levels(model.levels);
        if model.hardware_dirty {
            format = format.with_hardware_dirty();
        }
        let machine = Tables::new(format, 3, model.cpus).bbm_level(model.bbm_level).traced(trace);
        let machine: &'static Tables = Box::leak(Box::new(machine));
        let tree = Box::leak(Box::new(Tree::new(machine, format, 1).unwrap()));
        machine.set_root(tree.root());
        Self { machine, tree }
    }

    /// Frees everything; what went wrong.
    fn end(self) -> Option<String> {
        let (machine, tree) = (&raw const *self.machine, &raw const *self.tree);
        // SAFETY: `new` leaked these boxes; models join all their threads and drop their actors before they return.
        unsafe {
            drop(Box::from_raw(tree.cast_mut()));
            let verdict = (*machine).verdict();
            drop(Box::from_raw(machine.cast_mut()));
            verdict
        }
    }

    /// Somebody who works on the tree, with `tables` tables in hand.
    pub(crate) fn worker(self, tables: usize) -> Actor {
        let who = Participant::register(self.machine).unwrap();
        let mut reserve = Reserve::new(self.machine);
        reserve.top_up(tables).unwrap();
        Actor { world: self, who, reserve, cpu: None }
    }

    /// The same on CPU `cpu` of the guest.
    pub(crate) fn vcpu(self, cpu: usize, tables: usize) -> Actor {
        Actor { cpu: Some(cpu), ..self.worker(tables) }
    }

    /// Remembers `what` as a violation, unless `holds`.
    pub(crate) fn expect(self, holds: bool, what: &str) {
        if !holds {
            self.machine.violation(what);
        }
    }

    /// Attributes as bits.
    pub(crate) fn leaf(self, page: u64, level: Level, output: Hpa, attributes: Attributes) -> Leaf {
        let template = self.tree.template(attributes).unwrap();
        Leaf { gpa: gpa(page), level, output, template }
    }
}

/// A participant with its tables, on a thread of its own or on the model's.
pub(crate) struct Actor {
    pub(crate) world: World,
    pub(crate) who: Participant<'static, Tables>,
    pub(crate) reserve: Reserve<'static, Tables>,
    cpu: Option<usize>,
}

impl Actor {
    /// Acts on a thread of its own.
    pub(crate) fn spawn<T: Send + 'static>(
        mut self,
        act: impl FnOnce(&mut Self) -> T + Send + 'static,
    ) -> Acting<T> {
        let act = move || {
            self.run_cpu();
            let result = act(&mut self);
            (self, result)
        };
        Acting(loom::thread::Builder::new().stack_size(0x4000).spawn(act).unwrap())
    }

    /// Its CPU, if it has one, runs on the calling thread.
    pub(crate) fn run_cpu(&self) {
        if let Some(cpu) = self.cpu {
            self.world.machine.run_cpu(cpu);
        }
    }

    /// Maps `pages` pages from `page` on in one call.
    pub(crate) fn map(&mut self, page: u64, pages: u64, output: Hpa, attributes: Attributes) {
        self.map_as(page, pages, output, attributes, Level::LAST);
    }

    /// The same with leaves up to `largest`.
    pub(crate) fn map_as(
        &mut self,
        page: u64,
        pages: u64,
        output: Hpa,
        attributes: Attributes,
        largest: Level,
    ) {
        let tree = self.world.tree;
        let template = tree.template(attributes).unwrap();
        let (range, reserve) = (range(page, pages), &mut self.reserve);
        tree.map(&self.who, reserve, range, output, template, largest).unwrap();
    }

    /// What a fault asks of the engine: one try, in one pin.
    pub(crate) fn install(
        &mut self,
        page: u64,
        level: Level,
        output: Hpa,
        attributes: Attributes,
    ) -> Result<Installed, Error> {
        let leaf = self.world.leaf(page, level, output, attributes);
        self.world.tree.install(&self.who.pin(), &mut self.reserve, &leaf)
    }

    /// A fault whose guest comes back until it goes through.
    pub(crate) fn fault(
        &mut self,
        page: u64,
        level: Level,
        output: Hpa,
        attributes: Attributes,
    ) -> Installed {
        loop {
            match self.install(page, level, output, attributes) {
                Ok(done) => return done,
                Err(Error::Retry) => slat::Machine::relax(self.world.machine),
                Err(error) => panic!("{error}"),
            }
        }
    }

    pub(crate) fn unmap(&mut self, page: u64, pages: u64) -> u64 {
        let (who, reserve) = (&mut self.who, &mut self.reserve);
        let range = range(page, pages);
        self.world.tree.unmap(who, reserve, range, Edges::Exact, |_| {}).unwrap()
    }

    pub(crate) fn write_protect(&mut self, page: u64, pages: u64) -> u64 {
        self.world.tree.write_protect(&self.who, range(page, pages), |_| {}).unwrap()
    }

    /// What stands at a page when nobody changes it.
    pub(crate) fn look_up(&self, page: u64) -> Result<Lookup, Error> {
        self.world.tree.look_up(&self.who.pin(), gpa(page))
    }

    /// Where a page is mapped to, and whether it may be written. Not while anybody changes it.
    pub(crate) fn mapped(&self, page: u64) -> Option<(Hpa, bool)> {
        match self.look_up(page).unwrap() {
            Lookup::Mapped { output, template, .. } => {
                Some((output, self.world.tree.attributes(template).write))
            }
            _ => None,
        }
    }

    /// Its CPU's guest loads from or stores to a page. Whether that went through.
    pub(crate) fn access(&self, page: u64, write: bool, with: impl FnOnce(Hpa)) -> bool {
        self.world.machine.access(self.cpu.unwrap(), gpa(page), write, with)
    }
}

/// An actor at work.
pub(crate) struct Acting<T>(loom::thread::JoinHandle<(Actor, T)>);

impl<T> Acting<T> {
    pub(crate) fn join(self) -> (Actor, T) {
        self.0.join().unwrap()
    }
}

pub(crate) fn gpa(page: u64) -> Gpa {
    Gpa(page * PAGE)
}

pub(crate) fn range(page: u64, pages: u64) -> GpaRange {
    GpaRange::new(gpa(page), pages * PAGE).unwrap()
}

/// Page `number` of the host's memory; even ones are where blocks can begin.
pub(crate) fn host(number: u64) -> Hpa {
    Hpa((1 << 20) + number * PAGE)
}
