//! Who splits a memslot ahead of write faults, and when.
//!
//! With `--split-threads` the log is enabled and then split as a whole, by all threads at once, whatever its mode. A log
//! whose bits are all set at first would otherwise have it split by the thread that clears, just ahead of the pages that
//! it protects: never more than one thread, and a clear that takes as long as the splitting. Splitting takes no
//! permission away, so nothing is lost by doing it early but the time, which is then in the enable phase in every mode.

use std::{io, thread};

use slat::GpaRange;
use slat_model::Model;
use slat_vm::{LogMode, SplitJob, Worker};

use crate::arch::Tables;
use crate::failure::Failure;
use crate::model::{self, ModelVm};
use crate::report::Counters;

/// The threads that split together with the one that enables the log.
pub(super) struct Splitters<'m> {
    others: Vec<Worker<'m, Model>>,
    /// Whether everything is split when the log is enabled.
    early: bool,
}

impl<'m> Splitters<'m> {
    /// As many as `--split-threads` says.
    ///
    /// # Errors
    /// [`Failure::Run`] if the machine has no place for so many.
    pub(super) fn new<T: Tables>(
        vm: &ModelVm<'m, T>,
        threads: Option<u32>,
    ) -> Result<Self, Failure> {
        let others = (1..threads.unwrap_or(1)).map(|_| vm.worker()).collect::<Result<_, _>>();
        let others = others.map_err(|error| Failure::Run(error.to_string()))?;
        Ok(Self { others, early: threads.is_some() })
    }

    /// Enables the log of the memslot `id`, which covers `range`.
    ///
    /// # Errors
    /// [`Failure::Run`] if the log is refused, or there are not so many threads.
    pub(super) fn enable<T: Tables>(
        &mut self,
        vm: &ModelVm<'m, T>,
        worker: &mut Worker<'m, Model>,
        (id, range): (u32, GpaRange),
        mode: LogMode,
    ) -> Result<(), Failure> {
        let mut split = Ok(());
        vm.enable_log_by(worker, id, mode, |worker, job| split = self.run(vm, worker, job))
            .map_err(Failure::from)?;
        if self.early && mode == (LogMode::Manual { initially_all_set: true }) {
            split = self.run(vm, worker, &vm.split_job(0, range));
        }
        split.map_err(|error| Failure::Run(format!("no thread to split with: {error}")))
    }

    /// Runs `job` on every thread.
    fn run<T: Tables>(
        &mut self,
        vm: &ModelVm<'m, T>,
        worker: &mut Worker<'m, Model>,
        job: &SplitJob,
    ) -> io::Result<()> {
        thread::scope(|scope| {
            for other in &mut self.others {
                let thread = thread::Builder::new().name("split".to_owned());
                thread.spawn_scoped(scope, || job.run(vm, other))?;
            }
            job.run(vm, worker);
            Ok(())
        })
    }

    /// What the other threads have done.
    pub(super) fn counters(&self) -> Counters {
        let done = |other: &Worker<'_, Model>| model::engine(&other.participant().counters);
        self.others.iter().map(done).sum()
    }
}
