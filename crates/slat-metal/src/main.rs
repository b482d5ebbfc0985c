//! The hypervisor. On a host there is nothing for it to run on.
#![cfg_attr(target_os = "none", no_std, no_main)]

#[cfg(target_os = "none")]
extern crate alloc;

#[cfg(target_os = "none")]
mod arch;
#[cfg(target_os = "none")]
mod console;
#[cfg(target_os = "none")]
mod counts;
#[cfg(target_os = "none")]
mod crew;
#[cfg(target_os = "none")]
mod frames;
#[cfg(target_os = "none")]
mod guest;
#[cfg(target_os = "none")]
mod heap;
#[cfg(target_os = "none")]
mod host;
#[cfg(target_os = "none")]
mod hypervisor;
#[cfg(target_os = "none")]
mod machine;
#[cfg(target_os = "none")]
mod rings;
#[cfg(target_os = "none")]
mod served;
#[cfg(target_os = "none")]
mod stage;
#[cfg(target_os = "none")]
mod vcpu;
#[cfg(target_os = "none")]
mod watchdog;
#[cfg(target_os = "none")]
mod workload;

#[cfg(not(target_os = "none"))]
fn main() {
    eprintln!(
        "slat-metal runs on bare metal: RUSTC=$(scripts/metal-toolchain.sh) cargo build -p slat-metal --profile metal \
         --target aarch64-unknown-none, and see its README.md"
    );
    std::process::exit(2);
}
