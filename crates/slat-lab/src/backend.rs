//! What a workload runs on: the model, or real hypervisors.

use clap::{Args, ValueEnum};

use crate::failure::Failure;

/// Who plays the hypervisor and the CPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, ValueEnum)]
pub(crate) enum Backend {
    /// slat on a machine made of software
    #[default]
    Model,
    /// slat as a hypervisor without a host below it
    Metal,
    /// The hypervisor of this computer's Linux
    Kvm,
}

/// The choice among them.
#[derive(Clone, Copy, Debug, Default, Args)]
#[command(next_help_heading = "Machine")]
pub(crate) struct BackendOption {
    /// What the workload runs on: slat on a model of the CPU, slat on bare metal, or this computer's own KVM
    #[arg(
        long,
        value_enum,
        value_name = "model|metal|kvm",
        default_value = "model",
        hide_possible_values = true
    )]
    pub(crate) backend: Backend,
}

impl Backend {
    /// As `--backend` calls it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Model => "model",
            Self::Metal => "metal",
            Self::Kvm => "kvm",
        }
    }

    /// The workloads that run on it, for who asked for another one.
    fn workloads(self) -> Option<&'static str> {
        match self {
            Self::Model => Some("every workload"),
            Self::Metal => Some("boot, dirty-log, dirty-log-test, page-table and demand-paging"),
            Self::Kvm => Some("all but rmap-fork, touch, boot and app"),
        }
    }

    /// Says that a workload does not run on this backend.
    pub(crate) fn lacks(self, workload: &str) -> Failure {
        let there = match self.workloads() {
            Some(workloads) => format!("{} has {workloads}", self.name()),
            None => "no workload has it".to_owned(),
        };
        Failure::Usage(format!(
            "{workload} --backend {}: not yet; {there}, and --backend model is there",
            self.name()
        ))
    }
}
