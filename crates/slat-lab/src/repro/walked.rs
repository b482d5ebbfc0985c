//! What a walk of the hypervisor's thread takes on real tables, by the engine or as an old design walks.

use std::cell::RefCell;
use std::fmt::Display;

use slat::format::arm::{K4, Stage2};
use slat::{Attributes, Gpa, GpaRange, Hpa, Level, Participant, Reserve, Template, Tree};
use slat_model::Model;
use slat_model::clock::{Cause, Costs, Ledger, Simulation, Time, Timed, advance, current, ledger};

use crate::failure::Failure;
use crate::virtual_time::design::{Design, MmuLock};
use crate::virtual_time::ground::PAGE;
use crate::virtual_time::profile::Profile;
use crate::virtual_time::walks::Walks;

/// What is done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Scenario {
    /// The log is enabled without manual protect: everything is split and protected at once.
    Enable,
    /// The log is cleared twice with manual protect, first of every page, then of those that guests have written.
    Clear,
}

/// What memory is mapped with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Backing {
    /// Those pages that guests have written.
    Pages,
    /// Blocks of 2 MiB.
    Blocks,
    /// Blocks of 1 GiB.
    Gigabytes,
}

/// One design on one machine, and what its thread does to how much memory.
#[derive(Clone, Copy)]
pub(super) struct Walked<'a> {
    pub(super) profile: &'a Profile,
    pub(super) design: &'a Design,
    pub(super) scenario: Scenario,
    pub(super) backing: Backing,
    pub(super) size: u64,
    /// Guests write one of so many pages.
    pub(super) written: u64,
}

fn broken(why: impl Display) -> Failure {
    Failure::Run(why.to_string())
}

fn range(start: u64, size: u64) -> Result<GpaRange, Failure> {
    GpaRange::new(Gpa(start), size).ok_or_else(|| broken("there is no memory to walk over"))
}

impl Walked<'_> {
    /// Whether the engine's own steps are charged, and not the calls of a general walker.
    fn is_engine(&self) -> bool {
        self.design.lock == MmuLock::None
    }

    /// What is charged for, and what each costs in nanoseconds.
    ///
    /// # Errors
    /// [`Failure::Usage`]: the profile does not say.
    pub(super) fn prices(&self) -> Result<[(Cause, f64); 5], Failure> {
        let walks = self.profile.walks()?;
        let barrier = (Cause::WalkBarrier, walks.barrier);
        let prices = if self.is_engine() {
            let Costs { load, exchange, clear_table, pin, .. } = self.profile.engine()?;
            [
                (Cause::Load, load),
                (Cause::Exchange, exchange),
                (Cause::TableClear, clear_table),
                (Cause::Pin, pin),
                barrier,
            ]
        } else {
            [
                (Cause::Visit, walks.visit),
                (Cause::Protect, walks.protect),
                (Cause::Split, walks.split),
                (Cause::Section, walks.section),
                barrier,
            ]
        };
        Ok(prices.map(|(cause, price)| (cause, price.as_ns())))
    }

    /// What the thread's time goes into.
    ///
    /// # Errors
    /// The walk broke off.
    pub(super) fn walk(&self) -> Result<Ledger, Failure> {
        let costs = if self.is_engine() { self.profile.engine()? } else { Costs::default() };
        let model = Model::builder().slots(4).checked(false).build().map_err(broken)?;
        let machine = Timed::new(model, costs);
        let taken = RefCell::new(Ok(Ledger::default()));
        let mut simulation = Simulation::new();
        let play = || drop(taken.replace(self.play(&machine)));
        simulation.spawn(Time(0), play).map_err(broken)?;
        simulation.run();
        taken.into_inner()
    }

    fn play(&self, machine: &Timed) -> Result<Ledger, Failure> {
        let format = Stage2::<K4>::new(40).map_err(broken)?;
        let tree = machine.on_account(|| Tree::new(machine, format, 1)).map_err(broken)?;
        let mut memory = Memory {
            tree: &tree,
            hands: Participant::register(machine).map_err(broken)?,
            reserve: Reserve::new(machine),
            template: tree.template(Attributes::RWX).map_err(broken)?,
            size: self.size,
        };
        machine.on_account(|| memory.map(self.backing, self.written))?;
        match self.scenario {
            Scenario::Enable => self.collect(&mut memory, None)?,
            Scenario::Clear => {
                let step = self.written as usize;
                let written = (0..64).step_by(step).fold(0, |word, bit| word | 1 << bit);
                self.collect(&mut memory, Some(u64::MAX))?;
                machine.on_account(|| memory.write(self.written))?;
                self.collect(&mut memory, Some(written))?;
            }
        }
        Ok(current().map(ledger).unwrap_or_default())
    }

    /// Enables the log, or clears it of the pages that have their bit in `word`, 64 pages after another.
    fn collect(&self, memory: &mut Memory<'_, '_>, word: Option<u64>) -> Result<(), Failure> {
        let all = range(0, memory.size)?;
        let bits = word.map(|word| vec![word; (memory.size / PAGE / 64) as usize]);
        let prices = self.profile.walks()?;
        if self.is_engine() {
            return memory.split_and_protect(all, bits.as_deref(), prices.barrier);
        }
        let chunk = self.design.eager_split.chunk().map(|chunk| chunk.0);
        let mut walks = Walks::new(memory.tree, (self.design, prices), chunk).map_err(broken)?;
        match bits {
            None => walks.enable(all, true)?,
            Some(bits) => walks.clear(all, &bits, true)?,
        }
        Ok(())
    }
}

/// Guest memory, and who maps it.
struct Memory<'t, 'm> {
    tree: &'t Tree<'m, Stage2<K4>, Timed>,
    hands: Participant<'m, Timed>,
    reserve: Reserve<'m, Timed>,
    template: Template,
    size: u64,
}

impl Memory<'_, '_> {
    /// Maps it; by pages, one of `every`.
    fn map(&mut self, backing: Backing, every: u64) -> Result<(), Failure> {
        let (largest, step, each) = match backing {
            Backing::Pages => (Level::LAST, PAGE * every, PAGE),
            Backing::Blocks => (Level::new(2).unwrap_or(Level::LAST), self.size, self.size),
            Backing::Gigabytes => (Level::new(1).unwrap_or(Level::LAST), self.size, self.size),
        };
        let Self { tree, hands, reserve, template, .. } = self;
        for start in (0..self.size).step_by(step as usize) {
            let part = range(start, each)?;
            reserve.top_up(tree.tables_needed(part, largest)).map_err(broken)?;
            let output = Hpa((4 << 30) + start);
            tree.map(hands, reserve, part, output, *template, largest).map_err(broken)?;
        }
        Ok(())
    }

    /// Guests write one of `every` pages, which become writable again.
    fn write(&self, every: u64) -> Result<(), Failure> {
        for start in (0..self.size).step_by((PAGE * every) as usize) {
            let part = range(start, PAGE)?;
            self.tree.relax(&self.hands, part, 0, self.template).map_err(broken)?;
        }
        Ok(())
    }

    /// As this engine does it: everything is split, then protected, or those pages whose bits are set. One barrier.
    fn split_and_protect(
        &mut self,
        all: GpaRange,
        bits: Option<&[u64]>,
        barrier: Time,
    ) -> Result<(), Failure> {
        let Self { tree, hands, reserve, .. } = self;
        let needed = tree.tables_needed(all, Level::LAST);
        tree.machine().on_account(|| reserve.top_up(needed)).map_err(broken)?;
        tree.split(hands, reserve, all, Level::LAST).map_err(broken)?;
        match bits {
            None => tree.write_protect(hands, all, |_| {}).map_err(broken)?,
            Some(bits) => {
                tree.write_protect_pages(hands, all.start(), bits, |_| {}).map_err(broken)?
            }
        };
        advance(barrier, Cause::WalkBarrier);
        Ok(())
    }
}
