//! Which workloads there are. Each has a file of its own, with its options and its phases.

use clap::Subcommand;

use crate::failure::Failure;

mod access_tracking;
mod app;
mod boot;
mod demand_paging;
mod dirty_log;
mod dirty_log_test;
mod memslot;
mod memslot_stress;
mod mmu_stress;
mod page_table;
mod pre_fault;
pub(crate) mod replay;
pub(crate) mod rmap_fork;
pub(crate) mod touch;

/// Everything that is said about each workload: its variant and module, its name on the command line, the kernel's test
/// whose options and phases it has, and what it does.
macro_rules! workloads {
    ($($variant:ident($module:ident) $name:literal, as $test:literal: $what:literal)*) => {
        /// A workload with its options.
        #[derive(Debug, Subcommand)]
        pub(crate) enum Workload {
            $(
                #[command(
                    name = $name,
                    about = concat!($what, ": the kernel's ", $test),
                    after_long_help = $module::LONG_HELP,
                    args_override_self = true,
                    allow_negative_numbers = true,
                )]
                $variant(Box<$module::Options>),
            )*
        }

        impl Workload {
            /// Runs it and prints what it found.
            ///
            /// # Errors
            /// Nonsense among the options, a run that broke off, or a check that found something.
            pub(crate) fn run(&self) -> Result<(), Failure> {
                match self {
                    $(Self::$variant(options) => $module::run(options),)*
                }
            }

            fn name(&self) -> &'static str {
                match self {
                    $(Self::$variant(_) => $name,)*
                }
            }
        }

        /// Name, the kernel's test, and what it does.
        const LIST: &[[&str; 3]] = &[$([$name, $test, $what]),*];
    };
}

workloads! {
    DirtyLog(dirty_log) "dirty-log", as "dirty_log_perf_test": "Populate, log, dirty, collect"
    DirtyLogTest(dirty_log_test) "dirty-log-test", as "dirty_log_test": "Compare what dirty logs report with memory"
    PageTable(page_table) "page-table", as "kvm_page_table_test": "Map, split under a log, make blocks again"
    DemandPaging(demand_paging) "demand-paging", as "demand_paging_test": "Write to pages that a handler must serve first"
    AccessTracking(access_tracking) "access-tracking", as "access_tracking_perf_test": "Use memory that was marked idle"
    Memslot(memslot) "memslot", as "memslot_perf_test":
        "Map, unmap, move and use memory in few or very many memslots"
    MemslotStress(memslot_stress) "memslot-stress", as "memslot_modification_stress_test":
        "Memslots come and go while vCPUs run"
    PreFault(pre_fault) "pre-fault", as "pre_fault_memory_test": "Map memory ahead of any access"
    MmuStress(mmu_stress) "mmu-stress", as "mmu_stress_test":
        "Write all memory while the host makes it read-only and writable"
    RmapFork(rmap_fork) "rmap-fork", as "rmap_fork": "Fork many processes of a guest whose tables are shadowed"
    Touch(touch) "touch", as "trailing prefetch": "Touch the first byte of every page"
    Boot(boot) "boot", as "trailing prefetch": "Touch the pages that a guest touched as it booted"
    App(app) "app", as "trailing prefetch": "Touch the pages that a guest touched with an application"
}

impl Workload {
    /// Runs it in virtual time and says where the time of a fault went.
    ///
    /// # Errors
    /// [`Failure::Usage`] for a workload that does not run in virtual time; as [`run`](Self::run).
    pub(crate) fn explain(&self) -> Result<(), Failure> {
        match self {
            Self::DirtyLog(options) => dirty_log::explain(options),
            other => Err(Failure::Usage(format!(
                "explain {}: it does not run in virtual time; dirty-log does",
                other.name()
            ))),
        }
    }
}

/// One line for each workload.
pub(crate) fn list() -> String {
    let width = |column: usize| LIST.iter().map(|line| line[column].len()).max().unwrap_or(0);
    let (names, tests) = (width(0), width(1));
    let lines =
        LIST.iter().map(|[name, test, what]| format!("{name:names$}  {test:tests$}  {what}"));
    lines.collect::<Vec<_>>().join("\n")
}
