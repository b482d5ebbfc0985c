//! The workload on this host's own KVM. KVM says of no call that it was interrupted after a leaf, so there is no phase for
//! that; and the guest's own tables lie in memory that is not mapped ahead, so that its reads may fault there.

use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use kvm_bindings::kvm_pre_fault_memory;
use serde::Serialize;

use super::SLOT;
use super::guest::{Seen, Step, content};
use super::options::Options;
use crate::check::{Check, Findings};
use crate::contents::Words;
use crate::failure::Failure;
use crate::kvm::memory::Memory;
use crate::kvm::program::Compare;
use crate::kvm::stage::{Ended, Stage};
use crate::kvm::vcpu::{Order, Stop, Vcpu};
use crate::kvm::vm::{Plan, Reach, Slot};
use crate::kvm::{self, capability, ioctl};
use crate::report::Report;
use crate::{backing, guest_mode, output};

/// What was found.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Found {
    /// Calls to map memory ahead, of all vCPUs.
    calls: u64,
    /// Calls that neither came further nor said why.
    unclear: u64,
    /// Ranges of which another part was left than no slot has.
    wrong_rest: u64,
    /// Ranges that ended with another error than that there is no slot, or without it.
    wrong_error: u64,
    /// Loads that did not return what the host had stored.
    wrong_loads: u64,
}

impl Findings for Found {
    const CLEAN: &'static str = "every call came further or said why not";

    fn compared(&self) -> String {
        format!("{} calls", self.calls)
    }

    fn wrong(&self) -> Vec<(u64, &'static str)> {
        vec![
            (self.unclear, "calls neither came further nor said why"),
            (self.wrong_rest, "ranges were not mapped as far as there are slots"),
            (self.wrong_error, "ranges did not end with the error that is due"),
            (self.wrong_loads, "loads did not return what the host had stored"),
        ]
    }
}

/// Runs the workload and prints its report.
///
/// # Errors
/// See [`Failure`].
pub(super) fn run(options: &Options) -> Result<(), Failure> {
    let Some(mode) = output::chosen(options.mode, guest_mode::list)? else { return Ok(()) };
    let Some(backing) = output::chosen(options.backing, backing::list)? else { return Ok(()) };
    kvm::check_mode(mode)?;
    let (kvm, machine) = kvm::open(&options.machine)?;
    capability::PRE_FAULT_MEMORY.require(&kvm)?;
    let mut options = options.clone();
    options.machine = machine;
    let (layout, config) = options.settle(backing, mode)?;
    let memory = Memory::new(layout.host_size, config.guest.backing)?;
    let pages = config.guest.bytes.0 / config.page;
    for index in 0..pages {
        let word = memory.word(index * config.page);
        word.inspect(|word| word.store(content(index), Ordering::Relaxed));
    }
    let (gpa, page) = (config.guest.gpa, config.page);
    let slot = Slot {
        id: SLOT,
        gpa,
        size: config.guest.bytes.0,
        memory: &memory,
        offset: 0,
        logged: false,
    };
    let plan = Plan::new(config.guest.vcpus, Reach { gpa, size: slot.size, page });
    let seen = Arc::new(Mutex::new(Seen::default()));
    let stage = Stage::new(&kvm, plan, 0)?;
    let (ended, ()) = stage.play(|stage| {
        stage.vm.set_slot(slot)?;
        for (number, step) in (1..).zip(config.steps()) {
            stage.begin("pre-fault", Some(number));
            let start = stage.crew.set(|_| {
                let (seen, race) = (Arc::clone(&seen), config.race);
                Box::new(move |vcpu, _| map(vcpu, step, race, &seen))
            });
            if config.race {
                stage.vm.set_slot(Slot { size: 0, ..slot })?;
                thread::yield_now();
                stage.vm.set_slot(slot)?;
            }
            let end = stage.wait()?;
            stage.end("pre-fault", Some(number), end - start)?;
        }
        stage.begin("read", Some(1));
        let start = stage.crew.set(|_| {
            Box::new(move |vcpu, wait| {
                (0..pages).try_for_each(|index| {
                    let read = Order::read(gpa + index * page, page, 1);
                    let (value, compare) = (content(index), Compare::WithValue);
                    vcpu.follow(&Order { value, compare, ..read }, wait)
                })
            })
        });
        let end = stage.wait()?;
        stage.end("read", Some(1), end - start)
    })?;
    let Ended { phases, counters, vcpus } = ended;
    let Seen { calls, unclear, wrong_rest, wrong_error, .. } =
        *seen.lock().unwrap_or_else(PoisonError::into_inner);
    let wrong_loads = vcpus.iter().map(Vcpu::wrong_loads).sum();
    let found = Found { calls, unclear, wrong_rest, wrong_error, wrong_loads };
    let report = Report {
        workload: "pre-fault",
        backend: "kvm",
        host: Some(kvm::facts()),
        notes: config.guest.notes(&layout),
        summary: Vec::new(),
        config,
        counters,
        phases,
        results: (),
        check: Some(Check { found, rules: None }),
    };
    output::print(&report, &options.output)
}

/// Calls again and again with the rest, until nothing is left or a call says why not. With `race` the slot may be gone
/// meanwhile, so that there is more to come as long as any of it has memory.
fn map(vcpu: &Vcpu, step: Step, race: bool, seen: &Mutex<Seen>) -> Result<(), Stop> {
    let Step { gpa, size, left } = step;
    let mut range = kvm_pre_fault_memory { gpa, size, ..Default::default() };
    let mut mine = Seen::default();
    let error = loop {
        let before = range.size;
        let called = ioctl::pre_fault(vcpu.fd(), &mut range);
        mine.calls += 1;
        let further = range.size < before && range.gpa == gpa + (size - range.size);
        mine.unclear += u64::from(called.is_ok() != further);
        match called.map_err(|error| error.raw_os_error()) {
            _ if range.size == 0 => break None,
            Ok(()) => {}
            Err(Some(libc::EINTR | libc::EAGAIN)) => {}
            Err(Some(libc::ENOENT)) if race && range.size > left => thread::yield_now(),
            Err(Some(errno)) => break Some(errno),
            Err(None) => return Err(Stop::Broken("an error without a number".to_owned())),
        }
        if vcpu.is_kicked() {
            return Err(Stop::Kicked);
        }
    };
    if let Some(errno) = error.filter(|&errno| errno != libc::ENOENT) {
        let why = io::Error::from_raw_os_error(errno);
        return Err(Stop::Broken(format!("mapping memory ahead: {why}")));
    }
    mine.wrong_rest += u64::from(range.size != left);
    mine.wrong_error += u64::from(error.is_some() != (left > 0));
    let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
    seen.calls += mine.calls;
    seen.unclear += mine.unclear;
    seen.wrong_rest += mine.wrong_rest;
    seen.wrong_error += mine.wrong_error;
    Ok(())
}
