//! What a vCPU of `slat page-table` does in each stage.

use crate::crew::{Guest, RunOn, Vcpu};
use crate::guest::{Program, Watch};
use crate::layout::Layout;
use crate::random::Dice;

use super::options::Config;

/// The stages of the kernel's test.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Order {
    /// The first page of each large page.
    Create,
    /// What tears blocks apart under a log.
    Update,
    /// Every page.
    Adjust,
}

/// A guest that touches all of memory together with all others.
#[derive(Debug)]
pub(crate) struct Toucher {
    program: Program,
    /// Whether it writes when translations are created.
    writes: bool,
    /// Pages of the host in a page of the backing.
    pages_per_large: u64,
    /// Whether every page is written while the log is on.
    updates_all: bool,
}

impl Toucher {
    /// The guest of vCPU `index`.
    pub(crate) fn new(layout: &Layout, config: &Config, index: u32) -> Self {
        let dice = Dice::new(0, index);
        let program = Program::new(layout.gpa, layout.page, 0..layout.guest_pages(), dice);
        let vcpus = config.guest.vcpus;
        let program = match config.guest.check {
            true => program.checked(index, vcpus, vcpus == 1),
            false => program,
        };
        Self {
            program,
            writes: index.is_multiple_of(2),
            pages_per_large: config.pages_per_large(layout),
            updates_all: config.updates_all,
        }
    }

    pub(crate) fn into_program(self) -> Program {
        self.program
    }
}

impl Guest for Toucher {
    type Order = Order;

    fn accesses(&self) -> u64 {
        self.program.pages()
    }
}

/// What happens to each stretch of so many pages: its first page is read or written, then some others are read.
struct Stretch {
    pages: u64,
    write_first: bool,
    read_from: u64,
}

impl Toucher {
    fn stretch(&self, order: Order) -> Stretch {
        let large = self.pages_per_large;
        match order {
            Order::Create => Stretch { pages: large, write_first: self.writes, read_from: large },
            Order::Update if self.updates_all => {
                Stretch { pages: 1, write_first: true, read_from: 1 }
            }
            Order::Update => Stretch { pages: large, write_first: true, read_from: large / 2 },
            Order::Adjust => Stretch { pages: 1, write_first: false, read_from: 1 },
        }
    }
}

impl<V: Vcpu> RunOn<V> for Toucher {
    fn run(&mut self, vcpu: &mut V, order: Order, watch: Watch<'_>) -> Result<(), String> {
        let Stretch { pages, write_first, read_from } = self.stretch(order);
        let end = self.program.pages();
        let mut touch = |page, percent| {
            let done = self.program.touch(vcpu, page, percent);
            watch.beat();
            done.map_err(|error| error.to_string())
        };
        for first in (0..end).step_by(pages as usize) {
            touch(first, if write_first { 100 } else { 0 })?;
            for page in first + read_from..first + pages {
                touch(page, 0)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;
    use crate::guest::{GuestMemory, Pulse};
    use crate::layout::lay_out;
    use crate::report::Counters;

    const PAGE: u64 = 4096;

    /// Remembers each access: the page, and whether it was a store.
    #[derive(Default)]
    struct Recorder(Vec<(u64, bool)>);

    impl GuestMemory for Recorder {
        type Error = String;

        fn load(&mut self, gpa: u64) -> Result<u64, String> {
            self.0.push((gpa / PAGE, false));
            Ok(0)
        }

        fn store(&mut self, gpa: u64, _: u64) -> Result<(), String> {
            self.0.push((gpa / PAGE, true));
            Ok(())
        }
    }

    impl Vcpu for Recorder {
        fn counters(&self) -> Counters {
            Counters::default()
        }
    }

    /// What a guest with eight pages does, four to a large page unless `updates_all`.
    fn accesses(index: u32, updates_all: bool, order: Order) -> Vec<(u64, bool)> {
        let layout = lay_out("-b 32K -p 0");
        let program = Program::new(0, PAGE, 0..layout.guest_pages(), Dice::new(0, index));
        let pages_per_large = if updates_all { 1 } else { 4 };
        let writes = index.is_multiple_of(2);
        let mut toucher = Toucher { program, writes, pages_per_large, updates_all };
        let (mut vcpu, pulse, stop) =
            (Recorder::default(), Pulse::default(), AtomicBool::new(false));
        toucher.run(&mut vcpu, order, Watch { pulse: &pulse, stop: &stop }).unwrap();
        assert_eq!(pulse.completed(), vcpu.0.len() as u64);
        vcpu.0
    }

    #[test]
    fn creating_touches_each_large_page_and_only_even_vcpus_write() {
        assert_eq!(accesses(0, false, Order::Create), [(0, true), (4, true)]);
        assert_eq!(accesses(1, false, Order::Create), [(0, false), (4, false)]);
    }

    #[test]
    fn updating_writes_the_first_page_and_reads_the_second_half() {
        let large = [(0, true), (2, false), (3, false), (4, true), (6, false), (7, false)];
        assert_eq!(accesses(1, false, Order::Update), large);
        let small = accesses(1, true, Order::Update);
        assert_eq!(small, (0..8).map(|page| (page, true)).collect::<Vec<_>>());
    }

    #[test]
    fn adjusting_reads_every_page() {
        let all: Vec<_> = (0..8).map(|page| (page, false)).collect();
        assert_eq!(accesses(0, false, Order::Adjust), all);
    }
}
