//! What only bare metal is asked.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};

use crate::backend::Backend;
use crate::failure::Failure;

/// Seconds that a run may take if nobody says anything.
const TIME_LIMIT: u32 = 900;
/// The CPU with everything that QEMU knows.
const CPU: &str = "max";

/// Options of `--backend metal`.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Bare metal")]
pub(crate) struct MetalOptions {
    /// With --backend metal, the CPU that QEMU emulates: max, neoverse-n1, cortex-a57 (without hardware access flag), ...
    /// [default: max]
    #[arg(long, value_name = "NAME", value_parser = cpu)]
    cpu: Option<String>,

    /// With --backend metal, an image of the hypervisor, instead of building it
    #[arg(long, value_name = "FILE")]
    pub(super) image: Option<PathBuf>,

    /// With --backend metal, seconds after which QEMU is killed [default: 900]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..))]
    time_limit: Option<u32>,

    /// With --backend metal, time is counted in instructions, and all CPUs take turns: the same figures at every run
    #[arg(long)]
    pub(super) deterministic: bool,

    /// Leaves out a step that the engine asks for, so that a check has something to find
    #[arg(long, value_enum, value_name = "STEP", hide = true)]
    pub(super) sabotage: Option<Sabotage>,
}

/// What the hypervisor does not do.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Sabotage {
    /// No invalidation reaches a TLB.
    Invalidate,
}

impl MetalOptions {
    /// Refuses them on what is no bare metal.
    ///
    /// # Errors
    /// [`Failure::Usage`] with the first that was given.
    pub(crate) fn only_for(&self, backend: Backend) -> Result<(), Failure> {
        let given = [
            ("--cpu", self.cpu.is_some()),
            ("--image", self.image.is_some()),
            ("--time-limit", self.time_limit.is_some()),
            ("--deterministic", self.deterministic),
            ("--sabotage", self.sabotage.is_some()),
        ];
        match given.into_iter().find(|(_, given)| *given) {
            Some((option, _)) if backend != Backend::Metal => {
                Err(Failure::Usage(format!("{option}: only with --backend metal")))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn cpu(&self) -> &str {
        self.cpu.as_deref().unwrap_or(CPU)
    }

    pub(super) fn time_limit(&self) -> Duration {
        Duration::from_secs(self.time_limit.unwrap_or(TIME_LIMIT).into())
    }
}

/// A name, not another option or another property of the machine.
fn cpu(text: &str) -> Result<String, String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
    match text.is_empty() || text.starts_with('-') || !text.chars().all(plain) {
        true => Err("name a CPU of QEMU, such as max, neoverse-n1 or cortex-a57".to_owned()),
        false => Ok(text.to_owned()),
    }
}
