//! Models of the concurrency protocol (DESIGN.md, rules 1 to 10): the engine itself, under loom, on trees with tables of
//! two entries.
//!
//! Each model shows one promise in every execution with a bounded number of preemptions, stale reads of other threads'
//! stores included. Beside it stand the variants that its rule forbids: the same model while the engine (or, for rules
//! that the engine's callers keep, the model) leaves a step out, which must fail. A variant that does not fail would say
//! that the model cannot see what the rule is for.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p slat --release --test models` runs them; `LOOM_MAX_PREEMPTIONS` raises the
//! bound.
#![cfg(loom)]

mod collapse;
mod dirty;
mod explorer;
mod format;
mod host;
mod log;
mod machine;
mod map;
mod reclaim;
mod scheduled;
mod split;
mod tlb;
mod trim;
mod unmap;
mod world;
