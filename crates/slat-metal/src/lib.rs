//! The parts of a small bare-metal hypervisor on slat that need no hardware: what it is asked, what its guests do, what
//! its checks compare, and what it reports. `main.rs` is the hypervisor.
#![cfg_attr(not(test), no_std)]

extern crate alloc;

pub mod audit;
pub mod layout;
pub mod linux;
pub mod options;
pub mod program;
pub mod report;
pub mod rounds;
