//! Where the hypervisor's image comes from: a file, or the sources that this command was built from.

use std::env;
use std::io::{self, IsTerminal};
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
        Some(file) if file.is_file() => Ok(file.to_owned()),
        Some(file) => {
            Err(Failure::Usage(format!("--image {}: there is no such file", file.display())))
        }
        None => build(arch),
    }
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
