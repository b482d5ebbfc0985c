//! The parts of a small bare-metal hypervisor on slat that need no hardware.
#![cfg_attr(not(test), no_std)]
