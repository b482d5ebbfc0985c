//! Workloads on bare metal: slat's own hypervisor under QEMU, which is told on its command line what to run, says on its
//! console how far it is, and ends with a report in the shape of ours.

use std::process::Command;
use std::time::Duration;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use slat_metal::layout as metal_layout;
use slat_metal::options::Options as Words;
use slat_metal::report::{DONE, FAILED, LINE, PROGRESS, RESULT};

use crate::arch::Arch;
use crate::check::Check;
use crate::config::{Emulated, GuestConfig, TablesConfig};
use crate::failure::Failure;
use crate::granule::GranuleSize;
use crate::layout::Layout;
use crate::options::{Clock, EagerSplit, MachineOptions, MemoryOptions};
use crate::progress::Progress;
use crate::report::{Counters, Instructions, Phase};
use crate::size::Size;

mod image;
pub(crate) mod linux;
mod memory;
mod options;
mod process;
mod qemu;

pub(crate) use options::MetalOptions;
use process::{Broken, Heard};
use qemu::{Board, Qemu};

/// As many CPUs as the hypervisor starts.
const MAX_VCPUS: u32 = 8;
/// The widest guest-physical addresses that it translates.
const MAX_BITS: u32 = 48;

/// A run that the hypervisor is asked for.
pub(crate) struct Request<'a> {
    pub(crate) workload: &'static str,
    pub(crate) options: &'a MetalOptions,
    pub(crate) layout: &'a Layout,
    /// As the hypervisor counts it.
    pub(crate) bytes: u64,
    /// What only this workload is told, as words of its command line.
    pub(crate) words: String,
    /// How many phases will come, about.
    pub(crate) phases: u64,
}

/// What the hypervisor has reported.
#[derive(Debug)]
pub(crate) struct Told<R, F> {
    pub(crate) notes: Vec<String>,
    pub(crate) phases: Vec<Phase>,
    pub(crate) counters: Counters,
    pub(crate) results: R,
    pub(crate) check: Option<Check<F>>,
}

/// What workloads report that measure nothing of their own.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(crate) struct Nothing {}

/// Refuses what the hypervisor has not, of what every workload is asked.
///
/// # Errors
/// [`Failure::Usage`].
pub(crate) fn check(memory: &MemoryOptions, machine: &MachineOptions) -> Result<(), Failure> {
    check_machine(machine)?;
    if machine.exits {
        return Err(refusal("--exits: its hypervisor counts faults only"));
    }
    if memory.vcpus > MAX_VCPUS {
        let vcpus = memory.vcpus;
        return Err(refusal(&format!(
            "-v {vcpus}: a CPU for each vCPU, and there are {MAX_VCPUS} at most"
        )));
    }
    Ok(())
}

/// The same, of what the machine is asked.
///
/// # Errors
/// [`Failure::Usage`].
pub(crate) fn check_machine(machine: &MachineOptions) -> Result<(), Failure> {
    let refused = [
        (
            machine.arch() == Arch::Ept,
            "--arch ept: QEMU emulates no EPT without Intel's hardware; npt and arm are there",
        ),
        (
            machine.granule() != GranuleSize::K4,
            "--granule: its hypervisor has tables and pages of 4K",
        ),
        (
            machine.clock_or(Clock::Real) == Clock::Virtual,
            "--clock virtual: only the model has costs to charge; --deterministic counts instructions",
        ),
        (machine.fwb, "--fwb: its hypervisor keeps memory write-back without"),
    ];
    match refused.into_iter().find(|(asked, _)| *asked) {
        Some((_, why)) => Err(refusal(why)),
        None => Ok(()),
    }
}

/// As its command line says yes and no.
pub(crate) fn switch(on: bool) -> &'static str {
    if on { "on" } else { "off" }
}

/// Says that it has not what was asked for.
pub(crate) fn refusal(why: &str) -> Failure {
    Failure::Usage(format!("--backend metal {why}"))
}

/// Runs it, and notes in `guest` on what.
///
/// # Errors
/// [`Failure::Usage`]: the hypervisor has not what was asked for. [`Failure::Missing`]: it cannot be built or started here.
/// [`Failure::Run`]: it broke off.
pub(crate) fn run<R: DeserializeOwned, F: DeserializeOwned>(
    request: &Request<'_>,
    guest: &mut GuestConfig,
) -> Result<Told<R, F>, Failure> {
    let Request { workload, options, layout, .. } = *request;
    let words = request.words(guest)?;
    let memory = memory::needed(layout, guest)?;
    let arch = guest.slats_tables()?.arch;
    let qemu = Qemu::find(arch)?;
    let image = image::find(arch, options.image.as_deref())?;
    let board = Board {
        cpu: options.cpu(),
        cpus: guest.vcpus,
        memory,
        image: &image,
        words: &words,
        deterministic: options.deterministic,
    };
    guest.emulated = Some(Emulated { cpu: options.cpu().to_owned(), qemu: qemu.version.clone() });
    if options.deterministic {
        guest.clock = Clock::Instructions;
    }
    let mut command = qemu.command(&board);
    let report = listen(&mut command, options.time_limit(), request.phases);
    let report = report.map_err(|broken| failure(workload, broken))?;
    let mut told = told(&report).map_err(|why| {
        Failure::Run(format!(
            "{workload} on bare metal: its report is none of this version's: {why}"
        ))
    })?;
    told.notes.splice(..0, layout.remark(guest.backing));
    if options.deterministic {
        let why = "time is counted in instructions of guests and hypervisor, a nanosecond each";
        told.notes.push(why.to_owned());
    }
    Ok(told)
}

impl Request<'_> {
    /// Everything as the hypervisor's command line.
    fn words(&self, guest: &GuestConfig) -> Result<String, Failure> {
        let usage = |why: String| Err(refusal(&why));
        let backing = match guest.backing_page.0 >> 12 {
            0x1 => "4k",
            0x200 => "2m",
            0x4_0000 => "1g",
            _ => {
                let (backing, page) = (guest.backing, guest.backing_page);
                return usage(format!(
                    "-s {backing}: there are pages of 4K, 2M and 1G, and none of {page}"
                ));
            }
        };
        if self.layout.guest_page != self.layout.page {
            return usage(format!("-m {}: its guests go by pages of 4K", guest.mode.name));
        }
        let &TablesConfig { ipa_bits: bits, hardware_access, .. } = guest.slats_tables()?;
        if bits > MAX_BITS {
            return usage(format!(
                "--ipa-bits {bits}: its tables translate {MAX_BITS} bits at most"
            ));
        }
        let mut words = format!(
            "workload={} vcpus={} bytes={} backing={backing} gpa={:#x} ipa-bits={} hardware-access={} check={} {}",
            self.workload,
            guest.vcpus,
            self.bytes,
            guest.gpa,
            bits,
            switch(hardware_access),
            switch(guest.check),
            self.words,
        );
        if let EagerSplit::Chunk(Size(bytes)) = self.layout.eager_split {
            words += &format!(" eager-split={bytes}");
        }
        if self.options.deterministic {
            words += " clock=instructions";
        }
        if self.options.sabotage.is_some() {
            words += " invalidate=off";
        }
        // It would refuse them itself, but only when it runs.
        let parsed = Words::parse(&words);
        match parsed.and_then(|parsed| metal_layout::Layout::new(&parsed, guest.vcpus)) {
            Ok(_) => Ok(words),
            Err(why) => usage(format!("{}: its hypervisor refuses {why}", self.workload)),
        }
    }
}

/// Runs the machine until its report has come, and shows how far it is.
fn listen(command: &mut Command, limit: Duration, phases: u64) -> Result<String, Broken> {
    let progress = Progress::new(phases);
    progress.phase("starting", None);
    let mut begun = 0;
    let mut report = None;
    process::follow(command, limit, |line| {
        let Some(said) = line.strip_prefix(LINE) else { return Heard::Chatter };
        if let Some(phase) = said.strip_prefix(PROGRESS) {
            progress.phase(phase, None);
            progress.set(begun);
            begun += 1;
        } else if let Some(json) = said.strip_prefix(RESULT) {
            report = Some(json.to_owned());
            return Heard::Quiet;
        } else if let Some(why) = said.strip_prefix(FAILED) {
            return Heard::Failed(why.to_owned());
        } else if said == DONE {
            return match report.take() {
                Some(report) => Heard::Result(report),
                None => Heard::Failed("it was done without a report".to_owned()),
            };
        }
        Heard::Chatter
    })
}

fn failure(workload: &str, Broken { why, tail }: Broken) -> Failure {
    let mut text = format!("{workload} on bare metal: {why}");
    if !tail.is_empty() {
        text += &format!("\nthe last lines of its console:\n  {}", tail.join("\n  "));
    }
    Failure::Run(text)
}

/// Takes a report apart.
fn told<R: DeserializeOwned, F: DeserializeOwned>(
    report: &str,
) -> Result<Told<R, F>, serde_json::Error> {
    #[derive(Deserialize)]
    struct Report<R, F> {
        notes: Vec<String>,
        phases: Vec<ToldPhase>,
        counters: Counters,
        #[serde(flatten)]
        results: R,
        check: Option<Check<F>>,
    }
    #[derive(Deserialize)]
    struct ToldPhase {
        name: String,
        iteration: Option<u32>,
        seconds: f64,
        instructions: Option<Instructions>,
        counters: Counters,
    }
    let Report { notes, phases, counters, results, check } = serde_json::from_str(report)?;
    let phase = |ToldPhase { name, iteration, seconds, instructions, counters }| Phase {
        // A run has a few, and one run is what this process does.
        name: String::leak(name),
        iteration,
        seconds,
        instructions,
        counters,
        exits: None,
    };
    let phases = phases.into_iter().map(phase).collect();
    Ok(Told { notes, phases, counters, results, check })
}
