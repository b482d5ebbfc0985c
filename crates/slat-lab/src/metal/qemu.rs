//! Which QEMU there is, and how it is told to be the machine that a run needs.

use std::io;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::arch::Arch;
use crate::failure::Failure;
use crate::size::Size;

/// A QEMU that is installed here.
#[derive(Clone, Debug)]
pub(super) struct Qemu {
    arch: Arch,
    /// Such as `10.0.2`.
    pub(super) version: String,
}

/// What it is to be.
#[derive(Clone, Debug)]
pub(super) struct Board<'a> {
    pub(super) cpu: &'a str,
    pub(super) cpus: u32,
    /// Contiguous memory that the hypervisor needs.
    pub(super) memory: Size,
    pub(super) image: &'a Path,
    /// The hypervisor's command line.
    pub(super) words: &'a str,
    /// Time is counted in instructions.
    pub(super) deterministic: bool,
}

/// Below the memory that the hypervisor finds: firmware's, the device tree's and its own image.
const TAKEN: u64 = 32 << 20;
/// Where it begins on Arm.
const MEMORY: u64 = 1 << 30;
/// With more than this, q35 has a hole in its memory, and so much below it.
const HOLE: (u64, u64) = (2816 << 20, 2 << 30);

impl Qemu {
    /// The one for an architecture.
    ///
    /// # Errors
    /// [`Failure::Missing`]: there is none, and how it is installed.
    pub(super) fn find(arch: Arch) -> Result<Self, Failure> {
        let (program, package) = names(arch);
        let mut command = Command::new(program);
        let output = command.arg("--version").stdin(Stdio::null()).output();
        let output = output.map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => Failure::Missing(format!(
                "--backend metal --arch {arch} needs {program}, and it is not installed: apt-get install {package}"
            )),
            _ => Failure::Missing(format!("{program} does not start: {error}")),
        })?;
        let said = String::from_utf8_lossy(&output.stdout);
        let version = version(&said);
        let version = version.ok_or_else(|| {
            Failure::Missing(format!("{program} --version says {said:?}, which is no QEMU"))
        })?;
        Ok(Self { arch, version })
    }

    /// Its command line.
    pub(super) fn command(&self, board: &Board<'_>) -> Command {
        let &Board { cpu, cpus, memory, image, words, deterministic } = board;
        let mut command = Command::new(names(self.arch).0);
        let cpus = cpus.to_string();
        let memory = format!("{}M", self.memory(memory).div_ceil(1 << 20));
        let threads = if deterministic { "single" } else { "multi" };
        let cpu = match self.arch {
            Arch::Arm => cpu.to_owned(),
            Arch::Ept | Arch::Npt => format!("{cpu},+svm,+npt"),
        };
        command.args(["-accel", &format!("tcg,thread={threads}"), "-cpu", &cpu, "-smp", &cpus]);
        command.args(["-m", &memory, "-display", "none", "-monitor", "none", "-serial", "stdio"]);
        command.args(["-no-reboot", "-nodefaults"]);
        match self.arch {
            Arch::Arm => {
                command.args(["-M", "virt,virtualization=on,gic-version=3", "-semihosting"])
            }
            Arch::Ept | Arch::Npt => {
                command.args(["-M", "q35", "-device", "isa-debug-exit,iobase=0xf4,iosize=4"])
            }
        };
        if deterministic {
            command.args(["-icount", "shift=0,sleep=off", "-seed", "1"]);
        }
        command.arg("-kernel").arg(image).args(["-append", words]);
        command
    }

    /// Where memory ends on Arm, of a machine that has so much in one piece.
    pub(super) fn memory_end(&self, contiguous: Size) -> u64 {
        MEMORY + self.memory(contiguous)
    }

    /// All memory of a machine that has so much in one piece.
    fn memory(&self, contiguous: Size) -> u64 {
        let plain = contiguous.0.saturating_add(TAKEN);
        let (most, below) = HOLE;
        match self.arch {
            Arch::Arm => plain,
            Arch::Ept | Arch::Npt if plain <= below => plain,
            Arch::Ept | Arch::Npt => contiguous.0.saturating_add(below).max(most),
        }
    }
}

/// Program and Debian package.
fn names(arch: Arch) -> (&'static str, &'static str) {
    match arch {
        Arch::Arm => ("qemu-system-aarch64", "qemu-system-arm"),
        Arch::Ept | Arch::Npt => ("qemu-system-x86_64", "qemu-system-x86"),
    }
}

/// The number in `QEMU emulator version 10.0.2 (Debian ...)`.
fn version(said: &str) -> Option<String> {
    let (_, rest) = said.split_once("QEMU emulator version ")?;
    rest.split_whitespace().next().map(str::to_owned)
}
