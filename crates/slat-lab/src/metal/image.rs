//! Where the hypervisor's image comes from: a file, or the sources that this command was built from.

use std::env;
use std::fs::File;
use std::io::{self, IsTerminal, Read};
use std::path::{self, Path, PathBuf};
use std::process::{Command, Stdio};

use crate::arch::Arch;
use crate::failure::Failure;

/// Of the workspace, where this was built.
const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
/// What a build that is for the computer itself must not lend to one for bare metal.
const NOT_OURS: [&str; 6] = [
    "RUSTFLAGS",
    "CARGO_ENCODED_RUSTFLAGS",
    "CARGO_BUILD_TARGET",
    "CARGO_BUILD_RUSTFLAGS",
    "RUSTC_WRAPPER",
    "RUSTC_WORKSPACE_WRAPPER",
];

/// The image that was asked for, or one that is built now.
///
/// # Errors
/// [`Failure::Usage`]: there is no such file. [`Failure::Missing`]: there is nothing to build it with. [`Failure::Run`]: it
/// does not build.
pub(super) fn find(arch: Arch, given: Option<&Path>) -> Result<PathBuf, Failure> {
    match given {
        Some(file) if !file.is_file() => {
            Err(Failure::Usage(format!("--image {}: there is no such file", file.display())))
        }
        Some(file) if !is_image(arch, file) => Err(Failure::Usage(format!(
            "--image {}: not an ELF image for --arch {arch}",
            file.display()
        ))),
        Some(file) => Ok(file.to_owned()),
        None => build(arch),
    }
}

/// Whether a file begins as a 64-bit ELF file for a CPU of this kind does. QEMU would load anything else as it is.
fn is_image(arch: Arch, file: &Path) -> bool {
    let machine = match arch {
        Arch::Arm => 183,
        Arch::Ept | Arch::Npt => 62,
    };
    let mut header = [0; 20];
    let read = File::open(file).and_then(|mut file| file.read_exact(&mut header));
    read.is_ok() && header.starts_with(b"\x7fELF\x02") && header[18..] == [machine, 0]
}

fn build(arch: Arch) -> Result<PathBuf, Failure> {
    let root = Path::new(ROOT).canonicalize().unwrap_or_else(|_| PathBuf::from(ROOT));
    if !root.join("crates/slat-metal/Cargo.toml").is_file() {
        return Err(Failure::Missing(format!(
            "--backend metal builds the hypervisor from its sources, and there are none at {}; --image takes one that is \
             built",
            root.display()
        )));
    }
    let compiler = compiler(&root)?;
    let target = match arch {
        Arch::Arm => "aarch64-unknown-none",
        Arch::Ept | Arch::Npt => "x86_64-unknown-none",
    };
    let into = env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
    let into = path::absolute(&into).unwrap_or(into).join("metal");
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(&root).args([
        "build",
        "-p",
        "slat-metal",
        "--profile",
        "metal",
        "--target",
        target,
    ]);
    cargo.arg("--target-dir").arg(&into).env("RUSTC", compiler);
    NOT_OURS.iter().for_each(|name| {
        cargo.env_remove(name);
    });
    let seen = io::stderr().is_terminal();
    let stderr = if seen { Stdio::inherit() } else { Stdio::piped() };
    let output = cargo.stdin(Stdio::null()).stderr(stderr).output();
    let output =
        output.map_err(|error| Failure::Missing(format!("cargo does not start: {error}")))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(Failure::Run(format!(
            "the hypervisor does not build for {target}\n{}",
            said.trim_end()
        )));
    }
    Ok(into.join(target).join("metal/slat-metal"))
}

/// A compiler for bare metal that is here already.
fn compiler(root: &Path) -> Result<PathBuf, Failure> {
    let script = root.join("scripts/metal-toolchain.sh");
    let output = Command::new(&script).arg("--present").stdin(Stdio::null()).output();
    let output = output.map_err(|error| {
        Failure::Missing(format!("{} does not start: {error}", script.display()))
    })?;
    let path = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    if output.status.success() && !path.is_empty() {
        return Ok(path.into());
    }
    Err(Failure::Missing(format!(
        "--backend metal needs a Rust compiler for bare metal, and there is none: {} installs one, once",
        script.display()
    )))
}
