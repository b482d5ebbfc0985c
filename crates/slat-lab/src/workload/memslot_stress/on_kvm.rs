//! The workload on this host's own KVM. With `--check` one vCPU more stores into the slot that comes and goes.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::options::{Config, Options};
use super::{Found, PASSING, STORM, WRITE, summary};
use crate::check::Check;
use crate::contents::{self, Words};
use crate::failure::Failure;
use crate::kvm;
use crate::kvm::memory::Memory;
use crate::kvm::stage::{Ended, Stage};
use crate::kvm::vcpu::{Order, Vcpu};
use crate::kvm::vm::{Plan, Reach, Slot};
use crate::layout::Layout;
use crate::report::Report;
use crate::{config, output};

/// What is stored into the slot.
const INTRUSION: u64 = 0x5107;

/// Runs the workload and prints its report.
///
/// # Errors
/// See [`Failure`].
pub(super) fn run(options: &Options) -> Result<(), Failure> {
    let Some(chosen) = config::choose(&options.memory)? else { return Ok(()) };
    kvm::check_mode(chosen.1)?;
    let (kvm, machine) = kvm::open(&options.machine)?;
    let mut options = options.clone();
    options.machine = machine;
    let (layout, config) = options.settle(chosen)?;
    let memory = Memory::new(layout.host_size, config.guest.backing)?;
    let (vcpus, check) = (config.guest.vcpus, config.guest.check);
    let mut plan = Plan::new(vcpus + u32::from(check), Reach::of(&layout));
    let slot = Reach { gpa: config.slot_gpa, size: config.slot_size.0, page: layout.guest_page };
    plan.memory.push(slot);
    let stage = Stage::new(&kvm, plan, 0)?;
    let (ended, stray) = stage.play(|stage| {
        stage.vm.set_slots(&layout, &memory, false)?;
        modify(stage, &layout, &config, &memory)
    })?;
    let Ended { phases, counters, vcpus } = ended;
    let check = check.then(|| {
        let intruder = vcpus.last();
        let exits = intruder.map_or(0, |vcpu| vcpu.met().absent);
        let found = Found {
            pages: layout.guest_pages(),
            landed: intruder.map_or(0, Vcpu::accesses) - exits,
            exits,
            stray,
            wrong_loads: vcpus.iter().map(Vcpu::wrong_loads).sum(),
            misplaced: contents::misplaced(&memory, &layout, &[]),
        };
        Check { found, rules: None }
    });
    let report = Report {
        workload: "memslot-stress",
        backend: "kvm",
        host: Some(kvm::facts()),
        notes: config.guest.notes(&layout),
        summary: summary(&phases, config.iterations),
        config,
        counters,
        phases,
        results: (),
        check,
    };
    output::print(&report, &options.output)
}

/// Creates and deletes the slot while all vCPUs run; how often something was stored into it afterwards.
fn modify(
    stage: &mut Stage,
    layout: &Layout,
    config: &Config,
    memory: &Memory,
) -> Result<u64, Failure> {
    let (check, vcpus, page) = (config.guest.check, config.guest.vcpus, layout.guest_page);
    let (gpa, size) = (config.slot_gpa, config.slot_size.0);
    let slot = Slot { id: PASSING, gpa, size, memory, offset: config.slot_hva, logged: false };
    let word = || memory.word(config.slot_hva);
    let mut stray = 0;
    stage.begin("modify", None);
    stage.crew.tell(|index| {
        let order = if index < vcpus {
            Order::pass(layout, index, if check { STORM } else { WRITE }, check)
        } else {
            let absent = gpa..gpa + size;
            Order { value: INTRUSION, absent, ..Order::write(gpa, page, 1) }
        };
        Order { forever: true, ..order }
    });
    let mut took = Duration::ZERO;
    for _ in 0..config.iterations {
        let start = Instant::now();
        stage.crew.rest::<Failure>(config.delay(), &mut || Ok(()))?;
        stage.vm.set_slot(slot)?;
        if check {
            // The access under way, and one that begins when the slot is there.
            stage.crew.wait_for_accesses(2, &mut || Ok::<_, Failure>(()))?;
        }
        stage.vm.set_slot(Slot { size: 0, ..slot })?;
        took += start.elapsed();
        if check {
            word().inspect(|word| word.store(0, Ordering::Relaxed));
            stage.crew.wait_for_accesses(2, &mut || Ok::<_, Failure>(()))?;
            stray += u64::from(word().is_none_or(|word| word.load(Ordering::Relaxed) != 0));
        }
        stage.crew.look_up()?;
    }
    stage.crew.stop();
    stage.wait()?;
    stage.end("modify", None, took)?;
    Ok(stray)
}
