//! `slat boot`: a guest touches what one touched that booted; or Linux boots, on bare metal.

use clap::Args;

use super::replay;
use crate::backend::Backend;
use crate::failure::Failure;
use crate::metal::MetalOptions;
use crate::options::CheckOption;
use crate::trace;

mod linux;

/// What follows the options in `--help`.
pub(crate) const LONG_HELP: &str = "\
On the model, boot has the touches that Debian's kernel was seen to make on slat's own hypervisor, unless --trace names others. \
touch --record, and --record here, write a trace; docs/README.md of crates/slat-lab describes the file. Windows of --fault-around \
are those of touch, 8 if none is named.

With --backend metal, Debian's kernel for arm64 itself boots on slat's hypervisor under QEMU, to its shell prompt: with windows of \
1, 8 and 64 pages by turns, or the one that --fault-around names. It prints how long that took, faults, and exits by reason. \
--record notes the pages that the guest touches, in their order. --check instead runs it with blocks of 2M while one more CPU \
switches eager split and dirty log on and off, has it check its own memory, and compares a copy of it that is kept by the log.

--json prints one object as dirty-log does; \"touched\" has touches, faults and faults_per_touch; with --backend metal, \"boots\" \
has a boot each: fault_around, init_seconds, prompt_seconds, vcpus_started, exits and migration.

Exit status: 0 done; 1 the run broke off, or the check found something; 2 the command makes no sense, or the file is no trace; \
4 this computer has no QEMU, no compiler for bare metal, or no way to fetch the kernel.";

/// Options of a boot.
#[derive(Clone, Debug, Args)]
#[group(id = "boot")]
pub(crate) struct Options {
    #[command(flatten)]
    replay: replay::Options,

    /// With --backend metal, the guest's vCPUs [default: 1]
    #[arg(short = 'v', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4))]
    vcpus: Option<u32>,

    #[command(flatten)]
    check: CheckOption,

    #[command(flatten)]
    metal: MetalOptions,
}

/// Runs the workload and prints its report.
///
/// # Errors
/// See [`Failure`].
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let backend = options.replay.backend();
    options.metal.only_for(backend)?;
    if backend == Backend::Metal {
        return linux::run(options);
    }
    for (option, given) in [("--vcpus", options.vcpus.is_some()), ("--check", options.check.check)]
    {
        if given {
            return Err(Failure::Usage(format!("boot {option}: only with --backend metal")));
        }
    }
    replay::run("boot", trace::boot, &options.replay)
}
