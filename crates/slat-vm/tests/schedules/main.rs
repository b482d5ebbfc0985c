//! Long scenarios of a whole VM (rules 7, 8 and 10, and the engine's below them): the crate and the engine themselves,
//! under shuttle, on trees with tables of two entries and the machine of the engine's own models.
//!
//! Shuttle takes every atomic for sequentially consistent: what an `Acquire` or `Release` is for is shown by the loom
//! models (`tests/models`), which try every execution, of a few steps by two or three threads. Here six threads take
//! thousands of steps in schedules that are drawn at random, and with few but decisive preemptions (PCT): what is found
//! is what comes together only after a while. What each thread does is drawn with the schedule.
//!
//! Beside each scenario stand the variants that a rule forbids: the same while a step is left out, which must fail.
//!
//! `RUSTFLAGS="--cfg shuttle" cargo test -p slat-vm --release --test schedules` runs them. `SLAT_SCHEDULES` sets how many
//! schedules of each kind a test tries, `SLAT_SCHEDULES_SEED` draws others. A schedule that fails is printed, with the
//! command that repeats it and prints each step.
#![cfg(shuttle)]

#[path = "../../../slat/tests/models/explorer.rs"]
mod explorer;
#[path = "../../../slat/tests/models/format.rs"]
#[allow(dead_code, reason = "the engine's models use all of it")]
mod format;
#[path = "../../../slat/tests/models/machine.rs"]
#[allow(dead_code, reason = "the engine's models use all of it")]
mod machine;
#[path = "../../../slat/tests/models/tlb.rs"]
#[allow(dead_code, reason = "the engine's models use all of it")]
mod tlb;

mod collections;
mod everything;
mod guest;
mod host;
mod log;
mod pinned;
mod private;
mod ring;
mod schedules;
mod slots;
mod tables;
mod world;
