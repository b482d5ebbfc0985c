//! Linux on slat's own hypervisor: what is fetched, loaded and typed, and what is heard of it.

use std::iter::Sum;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use slat_metal::report::{DONE, FAILED, LINE, PROGRESS, RESULT};

use super::process::{self, Heard};
use super::qemu::{Board, Qemu};
use super::{MetalOptions, Told, failure, image, refusal, switch, told};
use crate::arch::Arch;
use crate::check::Unchecked;
use crate::config::Emulated;
use crate::failure::Failure;
use crate::progress::Progress;
use crate::size::Size;
use crate::trace::Run;

mod files;

use files::Files;

/// Bytes of the guest's memory, and of one of its pages.
pub(crate) const MEMORY: Size = Size(128 << 20);
pub(crate) const PAGE: u64 = 4096;
/// What the guest's shell prints when it waits for a command.
const PROMPT: &str = "guest#";
/// What its first program prints.
const INIT: &str = "guest: init";
/// What memory-check begins its verdict with.
const VERDICT: &str = "memory ";
/// A page that does not hold what was stored there, or a process that found one.
const BAD: &str = "memory BAD";
/// Runs of pages that were touched.
const TOUCHED: &str = "touched ";
const COMMAND_LINE: &str = "console=ttyAMA0 nokaslr quiet panic=-1";
/// More than the hypervisor, its heap and its tables take.
const HYPERVISOR: u64 = 96 << 20;
/// What kernel and first file system are loaded at multiples of.
const ALIGN: u64 = 2 << 20;

/// How a guest boots, and what it does then.
#[derive(Clone, Debug)]
pub(crate) struct Asked {
    pub(crate) vcpus: u32,
    /// Pages that a fault maps.
    pub(crate) around: u32,
    /// Pages of the host have 2M, and not 4K.
    pub(crate) large_pages: bool,
    /// The dirty log goes on and off while it runs, with blocks split ahead.
    pub(crate) migrate: bool,
    /// The pages that it touches are told.
    pub(crate) touches: bool,
    /// What is typed at its prompt, one command after the other, before it is turned off.
    pub(crate) commands: Vec<String>,
}

/// What the hypervisor reports of it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Booted {
    pub(crate) vcpus_started: u32,
    pub(crate) exits: Vec<Exit>,
    pub(crate) migration: Option<Migration>,
}

/// A reason to leave the guest.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Exit {
    pub(crate) reason: String,
    pub(crate) samples: u64,
    samples_percent: f64,
    time_percent: f64,
    min_us: f64,
    max_us: f64,
    mean_us: f64,
    /// Leaves that an exit mapped, as a mean.
    leaves: f64,
}

/// What a copy of its memory came to that was kept by the dirty log.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Migration {
    pub(crate) rounds: u64,
    pub(crate) collections: u64,
    pub(crate) dirty: u64,
    pub(crate) compared: u64,
    pub(crate) changed: u64,
    pub(crate) lost: u64,
}

impl Sum for Migration {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |a, b| Self {
            rounds: a.rounds + b.rounds,
            collections: a.collections + b.collections,
            dirty: a.dirty + b.dirty,
            compared: a.compared + b.compared,
            changed: a.changed + b.changed,
            lost: a.lost + b.lost,
        })
    }
}

/// What was seen of one guest.
pub(crate) struct Seen {
    pub(crate) told: Told<Booted, Unchecked>,
    /// From its first instruction to the first line of its first program, and to its prompt.
    pub(crate) to_init: Duration,
    pub(crate) to_prompt: Duration,
    /// What memory-check said.
    pub(crate) verdicts: Vec<String>,
    /// In order, if they were asked for.
    pub(crate) touches: Vec<Run>,
}

/// Kernel, hypervisor and machine, ready to boot any number of guests.
pub(crate) struct Ready<'a> {
    options: &'a MetalOptions,
    files: Files,
    qemu: Qemu,
    image: PathBuf,
}

impl<'a> Ready<'a> {
    /// Fetches and builds what is not there.
    ///
    /// # Errors
    /// [`Failure::Usage`]: it was asked for what Linux has not. [`Failure::Missing`]: this computer has not what it takes.
    /// [`Failure::Run`]: it does not build.
    pub(crate) fn new(options: &'a MetalOptions) -> Result<Self, Failure> {
        if options.deterministic || options.sabotage.is_some() {
            return Err(refusal(
                "--deterministic: a guest that waits for its timer is not counted",
            ));
        }
        let qemu = Qemu::find(Arch::Arm)?;
        let image = image::find(Arch::Arm, options.image.as_deref())?;
        Ok(Self { options, files: Files::fetch()?, qemu, image })
    }

    /// What QEMU is.
    pub(crate) fn emulated(&self) -> Emulated {
        Emulated { cpu: self.options.cpu().to_owned(), qemu: self.qemu.version.clone() }
    }

    /// The packages that the guest is from.
    pub(crate) fn version(&self) -> &str {
        &self.files.version
    }

    /// Boots a guest, types, and turns it off.
    ///
    /// # Errors
    /// [`Failure::Run`]: it broke off.
    pub(crate) fn boot(&self, asked: &Asked) -> Result<Seen, Failure> {
        // From the top of memory: the first file system, the kernel; the hypervisor's memory ends there.
        let copies = if asked.migrate { 2 } else { 1 };
        let (kernel, initrd) = (self.files.kernel.1, self.files.initrd.1);
        let loaded = kernel.next_multiple_of(ALIGN) + initrd.next_multiple_of(ALIGN);
        let memory = Size(copies * MEMORY.0 + HYPERVISOR + loaded);
        let top = self.qemu.memory_end(memory);
        let initrd_at = (top - initrd) & !(ALIGN - 1);
        let kernel_at = (initrd_at - kernel) & !(ALIGN - 1);
        let words = format!(
            "workload=linux kernel={kernel_at:#x}+{kernel} initrd={initrd_at:#x}+{initrd} vcpus={} bytes={}M backing={} \
             fault-around={} eager-split={} migrate={} touches={} -- {COMMAND_LINE}",
            asked.vcpus,
            MEMORY.0 >> 20,
            if asked.large_pages { "2m" } else { "4k" },
            asked.around,
            switch(asked.migrate),
            switch(asked.migrate),
            switch(asked.touches),
        );
        let board = Board {
            cpu: self.options.cpu(),
            cpus: asked.vcpus + u32::from(asked.migrate),
            memory,
            image: &self.image,
            words: &words,
            deterministic: false,
        };
        let mut command = self.qemu.command(&board);
        for (file, at) in [(&self.files.kernel.0, kernel_at), (&self.files.initrd.0, initrd_at)] {
            // A comma is doubled in QEMU's options.
            let file = file.display().to_string().replace(',', ",,");
            command.args(["-device", &format!("loader,file={file},addr={at:#x},force-raw=on")]);
        }
        let mut heard = Console::new(asked);
        let report =
            process::follow(&mut command, self.options.time_limit(), |line| heard.line(line));
        let report = report.map_err(|broken| failure("boot", broken))?;
        let told = told(&report).map_err(|why| {
            Failure::Run(format!("boot on bare metal: its report is none of this version's: {why}"))
        })?;
        let (Some(to_init), Some(to_prompt)) = (heard.to_init, heard.to_prompt) else {
            return Err(Failure::Run("boot on bare metal: it ended before its prompt".to_owned()));
        };
        let Console { verdicts, touches, .. } = heard;
        Ok(Seen { told, to_init, to_prompt, verdicts, touches })
    }
}

/// What the console has said so far, of hypervisor and guest.
struct Console {
    progress: Progress,
    began: Instant,
    to_init: Option<Duration>,
    to_prompt: Option<Duration>,
    commands: std::vec::IntoIter<String>,
    verdicts: Vec<String>,
    touches: Vec<Run>,
    report: Option<String>,
}

impl Console {
    fn new(asked: &Asked) -> Self {
        let mut commands = asked.commands.clone();
        commands.push("poweroff -f".to_owned());
        let progress = Progress::new(2 + commands.len() as u64);
        progress.phase("starting", None);
        Self {
            progress,
            began: Instant::now(),
            to_init: None,
            to_prompt: None,
            commands: commands.into_iter(),
            verdicts: Vec::new(),
            touches: Vec::new(),
            report: None,
        }
    }

    fn line(&mut self, line: &str) -> Heard<String> {
        match line.strip_prefix(LINE) {
            Some(said) => self.hypervisor(said),
            None => self.guest(line),
        }
    }

    fn hypervisor(&mut self, said: &str) -> Heard<String> {
        if let Some(phase) = said.strip_prefix(PROGRESS) {
            self.began = Instant::now();
            self.progress.phase(phase, None);
            self.progress.set(1);
        } else if let Some(run) = said.strip_prefix(TOUCHED) {
            match touched(run) {
                Some(run) => self.touches.push(run),
                None => return Heard::Failed(format!("no run of pages: {run}")),
            }
            return Heard::Quiet;
        } else if let Some(json) = said.strip_prefix(RESULT) {
            self.report = Some(json.to_owned());
            return Heard::Quiet;
        } else if let Some(why) = said.strip_prefix(FAILED) {
            return Heard::Failed(why.to_owned());
        } else if said == DONE {
            return match self.report.take() {
                Some(report) => Heard::Result(report),
                None => Heard::Failed("it was done without a report".to_owned()),
            };
        }
        Heard::Chatter
    }

    fn guest(&mut self, line: &str) -> Heard<String> {
        if line.contains(INIT) {
            self.to_init.get_or_insert(self.began.elapsed());
        } else if line.ends_with(PROMPT) {
            self.to_prompt.get_or_insert(self.began.elapsed());
            if let Some(command) = self.commands.next() {
                self.progress.phase(&command, None);
                self.progress.set(2 + self.verdicts.len() as u64);
                return Heard::Answer(command);
            }
        } else if line.starts_with(VERDICT) {
            self.verdicts.push(line.to_owned());
        } else if line.contains("Kernel panic") {
            return Heard::Failed(line.to_owned());
        }
        Heard::Chatter
    }
}

/// Whether a verdict of memory-check is a bad one.
pub(crate) fn is_bad(verdict: &str) -> bool {
    verdict.starts_with(BAD)
}

/// `7+2w`: pages 7 and 8 were written.
fn touched(text: &str) -> Option<Run> {
    let (pages, write) = match text.strip_suffix('w') {
        Some(pages) => (pages, true),
        None => (text.strip_suffix('r')?, false),
    };
    let (first, count) = pages.split_once('+')?;
    let (first, count) = (first.parse().ok()?, count.parse().ok().filter(|&count| count > 0)?);
    let end = u64::checked_add(first, count)?;
    (end <= MEMORY.0 / PAGE).then_some(Run { first, count, write })
}

impl Exit {
    /// Titles of the columns, and a line for each reason.
    pub(crate) fn lines(exits: &[Self]) -> Vec<String> {
        let title = format!(
            "{:23} {:>9} {:>9} {:>7} {:>8} {:>10} {:>8} {:>7}",
            "exits", "samples", "samples%", "time%", "min us", "max us", "mean us", "leaves"
        );
        let line = |exit: &Self| {
            format!(
                "{:23} {:>9} {:>9.2} {:>7.2} {:>8.2} {:>10.2} {:>8.2} {:>7.2}",
                exit.reason,
                exit.samples,
                exit.samples_percent,
                exit.time_percent,
                exit.min_us,
                exit.max_us,
                exit.mean_us,
                exit.leaves
            )
        };
        std::iter::once(title).chain(exits.iter().map(line)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn console(commands: &[&str]) -> Console {
        Console::new(&Asked {
            vcpus: 1,
            around: 8,
            large_pages: false,
            migrate: false,
            touches: false,
            commands: commands.iter().map(|&command| command.to_owned()).collect(),
        })
    }

    #[test]
    fn each_prompt_gets_the_next_command_and_the_last_turns_the_guest_off() {
        let mut console = console(&["memory-check 8 1 1"]);
        let mut answers = Vec::new();
        for line in
            ["slat: progress boot", "guest: init", PROMPT, "memory ok: 8 MiB", PROMPT, PROMPT]
        {
            if let Heard::Answer(answer) = console.line(line) {
                answers.push(answer);
            }
        }
        assert_eq!(answers, ["memory-check 8 1 1", "poweroff -f"]);
        assert_eq!(console.verdicts, ["memory ok: 8 MiB"]);
        assert!(console.to_init.is_some() && console.to_prompt >= console.to_init);
    }

    #[test]
    fn a_guest_that_panics_has_failed() {
        let line = "[    1.2] Kernel panic - not syncing: no init";
        assert!(matches!(console(&[]).line(line), Heard::Failed(why) if why == line));
    }

    #[test]
    fn runs_of_pages_are_inside_of_the_guests_memory() {
        assert_eq!(touched("7+2w"), Some(Run { first: 7, count: 2, write: true }));
        assert_eq!(touched("32767+1r"), Some(Run { first: 32767, count: 1, write: false }));
        for text in ["", "7+2", "7w", "7+0w", "32767+2r", "x+1r"] {
            assert_eq!(touched(text), None, "{text}");
        }
    }

    #[test]
    fn a_bad_page_is_a_bad_verdict() {
        assert!(is_bad("memory BAD at 0x1000: 0x0 instead of 0x5a5a0001"));
        assert!(!is_bad("memory ok: 8 MiB, 1 processes, 1 rounds"));
    }
}
