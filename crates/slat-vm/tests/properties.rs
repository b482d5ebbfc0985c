//! Any sequence of operations does to guest memory what the reference says.
//!
//! `PROPTEST_CASES` is how many sequences are tried. A sequence that fails is shrunk, printed, and its seed kept in
//! `proptest-regressions`; what it found gets a test with a name besides, at the end of this file.

mod reference;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::{env, fmt};

use proptest::collection::vec;
use proptest::num::u16::ANY;
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;
use proptest_state_machine::ReferenceStateMachine;

use slat::{Gpa, GpaRange};
use slat_model::Backing;
use slat_vm::{Access, Hva, LogMode, SlotConfig, SlotId};

use reference::judge;
use reference::operation::{Numbers, Operation, Setup, Tables};
use reference::{Reference, Taken};

const REGRESSIONS: &str = "tests/properties.regressions";

/// What the numbers of one choice say; when they are used up, always 0.
struct Chosen(std::vec::IntoIter<u16>);

impl Numbers for Chosen {
    fn below(&mut self, bound: u64) -> u64 {
        // Not the remainder: a smaller number is then a smaller choice, which is what shrinking wants.
        (u64::from(self.0.next().unwrap_or(0)) * bound) >> 16
    }
}

fn chosen(numbers: Vec<u16>) -> Chosen {
    Chosen(numbers.into_iter())
}

struct Machine;

/// A machine, and what the operations chosen so far have made of it.
#[derive(Clone)]
struct State {
    setup: Setup,
    reference: Reference,
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.setup.fmt(f)
    }
}

impl ReferenceStateMachine for Machine {
    type State = State;
    type Transition = Operation;

    fn init_state() -> BoxedStrategy<Self::State> {
        let setup = vec(ANY, 8).prop_map(|numbers| Setup::choose(&mut chosen(numbers)));
        setup.prop_map(|setup| State { setup, reference: setup.reference() }).boxed()
    }

    fn transitions(state: &State) -> BoxedStrategy<Operation> {
        let reference = state.reference.clone();
        let operation = move |numbers| Operation::choose(&reference, &mut chosen(numbers));
        vec(ANY, 20).prop_map(operation).boxed()
    }

    fn apply(mut state: State, operation: &Operation) -> State {
        state.reference.apply(operation);
        state
    }
}

/// Does these operations, in this order, and counts those that it came to.
fn replay(setup: &Setup, operations: &[Operation], reached: &AtomicUsize) {
    let mut operations = operations.iter().cloned();
    judge::run(setup, |_| {
        operations.next().inspect(|_| _ = reached.fetch_add(1, Ordering::Relaxed))
    });
}

fn cases() -> ProptestConfig {
    let cases = env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok());
    ProptestConfig {
        cases: cases.unwrap_or(64),
        max_shrink_iters: 5_000,
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct(REGRESSIONS))),
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn every_result_every_translation_and_every_bit_is_as_the_reference_says(
        (state, operations, reached) in Machine::sequential_strategy(1..80)
    ) {
        replay(&state.setup, &operations, &reached.unwrap_or_default());
    }
}

const SMALL: Setup = Setup {
    page_shift: 12,
    backing: Backing::Anonymous,
    eager: false,
    coherent_instructions: false,
    hardware_marks: false,
    spaces: 1,
    around: 1,
    tables: Tables::Arm,
};

/// The slot of the tests below.
const ID: SlotId = SlotId { space: 0, number: 0 };

fn slot(gpa: u64, pages: u64) -> Operation {
    Operation::Create { id: ID, config: SlotConfig::new(Gpa(gpa), pages << 12, Hva(0)) }
}

fn holds(setup: &Setup, operations: &[Operation]) {
    replay(setup, operations, &AtomicUsize::new(0));
}

#[test]
fn pages_that_are_mapped_ahead_are_no_faults() {
    let range = GpaRange::new(Gpa(0x40_0000), 3 << 12).unwrap();
    holds(&SMALL, &[slot(0x40_0000, 4), Operation::PreFault { cpu: 0, space: 0, range }]);
}

#[test]
fn an_old_page_that_may_not_be_written_becomes_young_before_the_write_is_refused() {
    let Operation::Create { id, config } = slot(0, 1) else { unreachable!() };
    let config = SlotConfig { read_only: true, ..config };
    holds(
        &SMALL,
        &[
            Operation::Create { id, config },
            Operation::Access { cpu: 0, at: (0, 0), access: Access::Read },
            Operation::Age { range: Taken::Guest(0, 1 << 12), clear: true },
            Operation::Access { cpu: 1, at: (0, 0), access: Access::Write },
        ],
    );
}

#[test]
fn dirty_state_of_a_page_that_goes_is_in_the_backup_of_a_ring() {
    let setup = Setup { hardware_marks: true, ..SMALL };
    holds(
        &setup,
        &[
            slot(0, 4),
            Operation::Enable { id: ID, mode: LogMode::Ring { backup: true } },
            Operation::Access { cpu: 0, at: (0, 0), access: Access::Write },
            Operation::Begin { ranges: vec![Taken::Guest(0, 8)] },
            Operation::Collect { id: ID, words: 1 },
            Operation::Rings,
        ],
    );
}
