//! Models of the rules that this crate keeps (DESIGN.md, rules 7, 8 and 10): the crate and the engine themselves, under
//! loom, on trees with tables of two entries and the machine of the engine's own models.
//!
//! Each model shows one promise in every execution with a bounded number of preemptions. Beside it stand the variants
//! that its rule forbids: the same model while a step is left out, which must fail.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p slat-vm --release --test models` runs them; `LOOM_MAX_PREEMPTIONS` raises the
//! bound.
#![cfg(loom)]

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

mod hardware;
mod host;
mod log;
mod ring;
mod slots;
mod world;
