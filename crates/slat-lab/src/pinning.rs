//! Which processor each thread of a run stays on, if that was said.

use clap::Args;
use serde::Serialize;

use crate::failure::Failure;

/// The choice of processors.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct PinOption {
    /// Processors of this computer that the threads of vCPUs stay on, one for each, in order; one more is the main
    /// thread's
    #[arg(short = 'c', long = "pin", value_name = "CPU,...", value_delimiter = ',')]
    processors: Vec<u32>,
}

impl PinOption {
    /// Whether anything was said.
    pub(crate) fn is_given(&self) -> bool {
        !self.processors.is_empty()
    }

    /// Who stays where, of so many vCPUs.
    ///
    /// # Errors
    /// [`Failure::Usage`] if it is too few or too many, or this process may not run there.
    pub(crate) fn settle(&self, vcpus: u32) -> Result<Option<Pinning>, Failure> {
        if !self.is_given() {
            return Ok(None);
        }
        let (given, vcpus) = (self.processors.len(), vcpus as usize);
        if given != vcpus && given != vcpus + 1 {
            return Err(Failure::Usage(format!(
                "-c: {given} processors for {vcpus} vCPUs; name one for each, and one more for the main thread if it is \
                 to stay too"
            )));
        }
        if let Some(processor) = self.processors.iter().find(|&&one| !thread::may_run_on(one)) {
            return Err(Failure::Usage(format!(
                "-c: this process may not run on processor {processor}{}",
                thread::WHERE_IT_MAY
            )));
        }
        let (vcpus, main) = self.processors.split_at(vcpus);
        Ok(Some(Pinning { vcpus: vcpus.to_vec(), main: main.first().copied() }))
    }
}

/// Who stays where.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct Pinning {
    vcpus: Vec<u32>,
    main: Option<u32>,
}

impl Pinning {
    /// The calling thread is that of vCPU `index` from now on.
    ///
    /// # Errors
    /// The operating system refused, in words.
    pub(crate) fn pin_vcpu(&self, index: usize) -> Result<(), String> {
        self.vcpus.get(index).map_or(Ok(()), |&processor| thread::pin(processor))
    }

    /// The calling thread is the main one.
    ///
    /// # Errors
    /// As [`pin_vcpu`](Self::pin_vcpu).
    pub(crate) fn pin_main(&self) -> Result<(), String> {
        self.main.map_or(Ok(()), thread::pin)
    }
}

#[cfg(target_os = "linux")]
mod thread {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

    pub(super) const WHERE_IT_MAY: &str = "; taskset -p $$ shows where it may";

    /// Whether the calling process has this processor.
    pub(super) fn may_run_on(processor: u32) -> bool {
        let processor = processor as usize;
        processor < CpuSet::MAX_CPU
            && sched_getaffinity(None).is_ok_and(|set| set.is_set(processor))
    }

    /// The calling thread runs nowhere else from now on.
    pub(super) fn pin(processor: u32) -> Result<(), String> {
        let mut set = CpuSet::new();
        set.set(processor as usize);
        sched_setaffinity(None, &set)
            .map_err(|error| format!("cannot stay on processor {processor}: {error}"))
    }
}

#[cfg(not(target_os = "linux"))]
mod thread {
    pub(super) const WHERE_IT_MAY: &str = ": only Linux is asked to keep threads in place";

    pub(super) fn may_run_on(_: u32) -> bool {
        false
    }

    pub(super) fn pin(_: u32) -> Result<(), String> {
        Ok(())
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use rustix::thread::sched_getaffinity;

    use super::*;

    fn option(processors: &[u32]) -> PinOption {
        PinOption { processors: processors.to_vec() }
    }

    /// A processor that this process may run on.
    fn here() -> u32 {
        let set = sched_getaffinity(None).unwrap();
        (0..1024).find(|&processor| set.is_set(processor as usize)).unwrap()
    }

    #[test]
    fn each_vcpu_has_a_processor_and_one_more_is_the_main_threads() {
        let one = here();
        assert_eq!(option(&[]).settle(2).unwrap(), None);
        let main = |processors: &[u32]| option(processors).settle(2).unwrap().unwrap().main;
        assert_eq!(main(&[one, one]), None);
        assert_eq!(main(&[one, one, one]), Some(one));
        for wrong in [&[one][..], &[one; 4], &[one, 100_000], &[one, u32::MAX]] {
            assert!(matches!(option(wrong).settle(2), Err(Failure::Usage(_))), "{wrong:?}");
        }
    }

    #[test]
    fn a_pinned_thread_may_run_nowhere_else() {
        let one = here();
        let pinning = option(&[one]).settle(1).unwrap().unwrap();
        std::thread::spawn(move || {
            pinning.pin_vcpu(0).unwrap();
            let set = sched_getaffinity(None).unwrap();
            assert!(set.is_set(one as usize) && set.count() == 1);
        })
        .join()
        .unwrap();
    }
}
