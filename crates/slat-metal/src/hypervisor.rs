//! From the first instruction in Rust to the end of the run.
#![expect(unsafe_code, reason = "gives heap and frames the memory that the boot loader has left")]

use core::ops::Range;

use slat_metal::options::Options;
use slat_metal::report::DONE;

use crate::arch::{Arch, Boot, Here};
use crate::machine::METAL;
use crate::{console, crew, heap, workload};

/// One part of memory in so many is heap.
const HEAP_SHARE: u64 = 8;

/// The first CPU is up: called once, by the architecture.
pub(crate) fn start(boot: Boot) -> ! {
    let Boot { memory, command_line, cpus } = boot;
    // SAFETY: the architecture says that nobody uses the memory, and this is the only call.
    unsafe { take_memory(memory) }
    for cpu in 1..cpus {
        if let Err(why) = Here::start_cpu(cpu) {
            console::fail(format_args!("CPU {cpu}: {why}"));
        }
    }
    match run(command_line, cpus) {
        Ok(()) => {
            console::line(format_args!("{DONE}"));
            Here::power_off(false)
        }
        Err(why) => console::fail(format_args!("{why}")),
    }
}

/// Gives heap and frames the memory of the machine.
///
/// # Safety
/// Once, with memory that nobody else uses.
pub(crate) unsafe fn take_memory(memory: Range<u64>) {
    let split = memory.start + (memory.end - memory.start) / HEAP_SHARE;
    // SAFETY: the caller's promise.
    unsafe {
        heap::init(memory.start..split);
        METAL.frames.init(split..memory.end);
    }
}

/// Another CPU is up: called by the architecture.
pub(crate) fn start_secondary(cpu: usize) -> ! {
    crew::serve(cpu)
}

fn run(command_line: &str, cpus: usize) -> Result<(), alloc::string::String> {
    let options = Options::parse(command_line)?;
    let vcpus = options.vcpus.unwrap_or(cpus as u32);
    if vcpus as usize > cpus {
        return Err(alloc::format!("vcpus={vcpus}: this machine has {cpus} CPUs, one for each"));
    }
    if !options.invalidate {
        METAL.drop_invalidations();
    }
    workload::run(&options, vcpus)
}
