//! A real guest: Linux, on the board's own console, timer and interrupt controller.
//!
//! A vCPU is a CPU, and all its interrupts are the guest's: nothing of the devices is emulated but the firmware's calls,
//! and the guest's device tree is the board's less what it is not given. Memory is what this is about: it is mapped by
//! faults, and one more CPU may log what is written while the guest runs.
#![expect(unsafe_code, reason = "the memory in which the loader has put the guest")]

use alloc::string::String;
use alloc::vec::Vec;
use core::hint;
use core::ops::Range;
use core::slice;
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};

use slat::{Gpa, Hpa, Participant};
use slat_metal::linux::exits::Exits;
use slat_metal::linux::options::{self, Options};
use slat_metal::linux::report::{Booted, Migration};
use slat_metal::linux::touches::Touches;
use slat_metal::report::{Counters, DONE, PROGRESS, Phase, RESULT, Report};
use slat_vm::{Hva, SlotConfig, Vm, VmOptions};
use spin::{Mutex, Once};

use super::{board, features};
use crate::arch::{Arch, Boot, Here, Wanted};
use crate::machine::{METAL, Metal};
use crate::{console, hypervisor};

mod device_tree;
mod identification;
mod memory;
mod migration;
mod psci;
mod vcpu;

use device_tree::Given;
use memory::Memory;

/// Where the guest's memory begins, as on the board.
const RAM: u64 = 1 << 30;
/// Numbers of memslots; each device has one of those from `DEVICES` on.
const RAM_SLOT: u32 = 0;
const DEVICES: u32 = 1;
/// What the kernel, and the largest pages, begin at multiples of.
const ALIGN: u64 = 2 << 20;
/// The most vCPUs.
const MOST: usize = 4;
const VMID: u16 = 1;
const IPA_BITS: u32 = 40;

/// The one guest, once it is there.
static GUEST: Once<Guest> = Once::new();

struct Guest {
    options: Options,
    vm: Vm<'static, <Here as Arch>::Format, Metal, Memory>,
    vcpus: [VcpuState; MOST],
    started: AtomicUsize,
    /// Ticks when the first vCPU began.
    began: AtomicU64,
    over: AtomicBool,
    touches: Mutex<Touches>,
    migration: Mutex<Option<Migration>>,
    /// What the walks of each CPU came to.
    walks: [Mutex<Counters>; MOST + 1],
}

#[derive(Default)]
struct VcpuState {
    start: Mutex<Option<Start>>,
    on: AtomicBool,
    /// Odd while it is in a fault that may make memory writable.
    writes: AtomicU64,
    exits: Mutex<Exits>,
}

/// Where a vCPU begins, and what is in its first register then.
struct Start {
    entry: u64,
    context: u64,
}

/// Runs Linux, if that is what the command line is about: called on the first CPU.
pub(super) fn start_if_asked(boot: &Boot) {
    let Some(loaded) = options::loaded_from(boot.command_line) else { return };
    let memory = boot.memory.start..boot.memory.end.min(loaded);
    // SAFETY: the memory is nobody's up to where the guest has been loaded, and nothing comes back from here.
    unsafe { hypervisor::take_memory(memory) }
    match Options::parse(boot.command_line).and_then(|options| build(options, boot.cpus)) {
        Ok((guest, first)) => start(guest, first),
        Err(why) => console::fail(format_args!("{why}")),
    }
}

fn start(guest: Guest, first: Start) -> ! {
    let guest = GUEST.call_once(|| guest);
    guest.vcpus[0].on.store(true, SeqCst);
    *guest.vcpus[0].start.lock() = Some(first);
    for cpu in 1..guest.options.vcpus + usize::from(guest.options.migrate) {
        if let Err(why) = Here::start_cpu(cpu) {
            console::fail(format_args!("CPU {cpu}: {why}"));
        }
    }
    console::line(format_args!("{PROGRESS}boot"));
    guest.began.store(Here::ticks(), SeqCst);
    vcpu::run(guest, 0)
}

/// The other CPUs, if it is Linux that runs here.
pub(super) fn start_secondary(cpu: usize) {
    if let Some(guest) = GUEST.get() {
        if cpu < guest.options.vcpus {
            vcpu::run(guest, cpu);
        }
        migration::run(guest);
    }
}

/// Memory, device tree and VM, and where the first vCPU begins.
fn build(options: Options, cpus: usize) -> Result<(Guest, Start), String> {
    let used = options.vcpus + usize::from(options.migrate);
    if used > cpus {
        return Err(alloc::format!(
            "{used} CPUs are needed, one for each vCPU and one to migrate; there are {cpus}"
        ));
    }
    let size = options.bytes.next_multiple_of(ALIGN);
    let kernel = loaded(&options.kernel);
    let initrd = loaded(&options.initrd);
    let tree = board::device_tree()?;
    // From the top: the first file system, then the device tree; the kernel is at the bottom.
    let initrd_gpa =
        (RAM + size).checked_sub(initrd.len() as u64).ok_or("bytes: too few")? & !(ALIGN - 1);
    let given = Given {
        memory: RAM..RAM + size,
        initrd: initrd_gpa..initrd_gpa + initrd.len() as u64,
        vcpus: options.vcpus,
        command_line: &options.command_line,
    };
    let (tree, devices) = device_tree::for_guest(tree, cpus, &given)?;
    let tree_gpa = initrd_gpa
        .checked_sub(ALIGN)
        .filter(|_| (tree.len() as u64) < ALIGN)
        .ok_or("bytes: too few")?;
    let (offset, kernel_size) = image(kernel).ok_or("kernel: no Image for arm64")?;
    if RAM + offset + kernel_size > tree_gpa {
        return Err("bytes: too few for this kernel".into());
    }

    let Hpa(first) = METAL
        .frames
        .guest_memory(size, ALIGN)
        .ok_or("bytes: the machine has not so much memory")?;
    // SAFETY: it was just taken for this guest, and is mapped, as devices are.
    let memory = unsafe { Memory::new(first..first + size, options.backing_page, devices.clone()) };
    memory.load(offset, kernel)?;
    memory.load(initrd_gpa - RAM, initrd)?;
    memory.load(tree_gpa - RAM, &tree)?;

    let wanted = Wanted { address_bits: IPA_BITS, hardware_access: None, hardware_dirty: false };
    let vm_options = VmOptions {
        eager_split: options.eager_split.then_some(ALIGN),
        coherent_instructions: Here::coherent_instructions(),
        coherent_data: Here::coherent_data(),
        fault_around: options.fault_around,
        ..VmOptions::default()
    };
    let ram = memory.ram();
    let vm = Vm::new(&METAL, memory, features::format(wanted)?, VMID, vm_options).map_err(text)?;
    let mut worker = vm.worker().map_err(text)?;
    let slot = SlotConfig::new(Gpa(RAM), size, Hva(ram.start));
    vm.create_slot(&mut worker, RAM_SLOT, slot).map_err(text)?;
    for (device, number) in devices.iter().zip(DEVICES..) {
        let slot = SlotConfig::new(Gpa(device.start), device.end - device.start, Hva(device.start));
        vm.create_slot(&mut worker, number, slot).map_err(text)?;
    }
    drop(worker);
    let guest = Guest {
        options,
        vm,
        vcpus: Default::default(),
        started: AtomicUsize::new(1),
        began: AtomicU64::new(0),
        over: AtomicBool::new(false),
        touches: Mutex::default(),
        migration: Mutex::new(None),
        walks: [const { Mutex::new(Counters::NONE) }; MOST + 1],
    };
    Ok((guest, Start { entry: RAM + offset, context: tree_gpa }))
}

fn text(why: impl core::fmt::Display) -> String {
    alloc::format!("{why}")
}

/// What the loader has put there.
fn loaded(at: &Range<u64>) -> &'static [u8] {
    // SAFETY: whoever started the machine has loaded it there, and the hypervisor's own memory ends before it.
    unsafe { slice::from_raw_parts(at.start as *const u8, (at.end - at.start) as usize) }
}

/// Where the kernel wants to be, from the beginning of memory, and how many bytes it uses there.
fn image(kernel: &[u8]) -> Option<(u64, u64)> {
    let number = |at: usize| Some(u64::from_le_bytes(kernel.get(at..at + 8)?.try_into().ok()?));
    let size = number(16)?.max(kernel.len() as u64);
    (kernel.get(56..60)? == b"ARM\x64").then_some((number(8)?, size))
}

impl Guest {
    fn wait_for_start(&self, number: usize) -> Start {
        loop {
            if let Some(start) = self.vcpus[number].start.lock().take() {
                return start;
            }
            hint::spin_loop();
        }
    }

    fn state(&self, vcpu: u64) -> Option<&VcpuState> {
        self.vcpus[..self.options.vcpus].get(usize::try_from(vcpu).ok()?)
    }

    /// The firmware's answer.
    fn start_vcpu(&self, vcpu: u64, start: Start) -> i64 {
        let Some(state) = self.state(vcpu) else { return psci::INVALID };
        if state.on.swap(true, SeqCst) {
            return psci::ALREADY_ON;
        }
        self.started.fetch_add(1, SeqCst);
        *state.start.lock() = Some(start);
        psci::DONE
    }

    /// The firmware's answer.
    fn is_off(&self, vcpu: u64) -> i64 {
        self.state(vcpu).map_or(psci::INVALID, |state| i64::from(!state.on.load(SeqCst)))
    }

    /// Before and after a fault that may make memory writable.
    fn count_write(&self, number: usize) {
        self.vcpus[number].writes.fetch_add(1, SeqCst);
    }

    /// Waits for the faults that may make memory writable and are under way.
    fn wait_for_writes(&self) {
        let under_way = self.vcpus.each_ref().map(|vcpu| vcpu.writes.load(SeqCst));
        for (vcpu, before) in self.vcpus.iter().zip(under_way) {
            while before % 2 == 1 && vcpu.writes.load(SeqCst) == before {
                hint::spin_loop();
            }
        }
    }

    /// Notes what the walks of this CPU have come to so far.
    fn note_walks(&self, participant: &Participant<'_, Metal>, collapses: u64) {
        let counted = &participant.counters;
        let (splits, entries_visited) = (counted.splits.get(), counted.visited.get());
        let walks = Counters { splits, collapses, entries_visited, ..Counters::NONE };
        if let Some(noted) = self.walks.get(Here::cpu()) {
            *noted.lock() = walks;
        }
    }

    /// Waits for the guest to end, for so many ticks at most.
    fn is_over_within(&self, ticks: u64) -> bool {
        let began = Here::ticks();
        while Here::ticks() - began < ticks {
            if self.over.load(SeqCst) {
                return true;
            }
            hint::spin_loop();
        }
        false
    }

    /// The guest has turned itself off: tells what there was.
    fn finish(&self) -> ! {
        let ticks = Here::ticks() - self.began.load(SeqCst);
        self.over.store(true, SeqCst);
        let migration = self.options.migrate.then(|| self.wait_for_migration());
        for run in self.touches.lock().runs() {
            console::line(format_args!("touched {run}"));
        }
        let mut exits = Exits::default();
        self.vcpus.iter().for_each(|vcpu| exits.add(&vcpu.exits.lock()));
        let counters = self.counters(&exits);
        let seconds = ticks as f64 / Here::ticks_per_second() as f64;
        let phase = Phase { name: "boot", iteration: None, seconds, instructions: None, counters };
        let report = Report {
            workload: "boot",
            backend: "metal",
            config: self.options.clone(),
            notes: Vec::new(),
            phases: [phase].into(),
            counters,
            results: Booted {
                vcpus_started: self.started.load(SeqCst),
                exits: exits.rows(Here::ticks_per_second()),
                migration,
            },
            check: None::<()>,
        };
        match serde_json::to_string(&report) {
            Ok(report) => console::line(format_args!("{RESULT}{report}")),
            Err(why) => console::fail(format_args!("{why}")),
        }
        console::line(format_args!("{DONE}"));
        Here::power_off(false)
    }

    /// What was done for this guest since the machine began.
    fn counters(&self, exits: &Exits) -> Counters {
        let machine = METAL.counts.iter().fold(Counters::NONE, |sum, cpu| sum + cpu.counters());
        let walks = self.walks.iter().fold(Counters::NONE, |sum, walks| sum + *walks.lock());
        Counters { faults: exits.faults(), ..machine + walks }
    }

    fn wait_for_migration(&self) -> Migration {
        loop {
            if let Some(found) = *self.migration.lock() {
                return found;
            }
            hint::spin_loop();
        }
    }
}
