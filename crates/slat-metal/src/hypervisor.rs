//! From the first instruction of Rust to the end of the run.
#![expect(unsafe_code, reason = "gives heap and frames the memory that the boot loader has left")]

use alloc::string::String;

use crate::arch::{Arch, Boot, Here};
use crate::console;
use crate::frames::Frames;
use crate::heap;

static FRAMES: Frames = Frames::empty();
/// The share of memory that is heap.
const HEAP_SHARE: u64 = 8;

/// The first CPU is up: called once, by the architecture.
pub(crate) fn start(boot: Boot) -> ! {
    let memory = boot.memory.clone();
    let split = memory.start + (memory.end - memory.start) / HEAP_SHARE;
    // SAFETY: the architecture says that nobody uses the memory, and this is the only call.
    unsafe {
        heap::init(memory.start..split);
        FRAMES.init(split..memory.end);
    }
    console::line(format_args!(
        "{}, {} CPUs, memory {:#x?}, command line {:?}",
        Here::NAME,
        boot.cpus,
        boot.memory,
        String::from(boot.command_line)
    ));
    console::line(format_args!("{:?} {:?}", Here::features(), FRAMES.tables(2)));
    Here::power_off(false)
}

/// Another CPU is up: called by the architecture.
pub(crate) fn start_secondary(cpu: usize) -> ! {
    console::fail(format_args!("cpu {cpu}: nothing to do"))
}
