//! The host's side: which unit of memory backs which address. The reference and the machine ask the same answers.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use slat::Hpa;
use slat_model::HostMemory;
use slat_vm::{Access, Host, HostError, HostPage, Hva};

/// One page of the host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Answer {
    /// Which unit of memory it is.
    pub(crate) target: usize,
    pub(crate) writable: bool,
    pub(crate) device: bool,
}

/// All answers of a host whose pages have one size.
#[derive(Clone, Debug)]
pub(crate) struct Answers {
    /// Bytes of a page.
    pub(crate) unit: u64,
    /// Pages of memory, of which some back nothing at first.
    pub(crate) targets: usize,
    pub(crate) answers: Vec<Result<Answer, HostError>>,
}

impl Answers {
    pub(crate) fn new(unit: u64, units: usize, spare: usize) -> Self {
        let answer = |target| Ok(Answer { target, writable: true, device: false });
        Self { unit, targets: units + spare, answers: (0..units).map(answer).collect() }
    }

    fn at(&self, hva: u64) -> Result<Answer, HostError> {
        let unit = usize::try_from(hva / self.unit).unwrap_or(usize::MAX);
        self.answers.get(unit).copied().unwrap_or(Err(HostError::NotMapped))
    }

    pub(crate) fn page(&self, hva: u64, access: Access) -> Result<Answer, HostError> {
        let answer = self.at(hva)?;
        let refused = access == Access::Write && !answer.writable;
        if refused { Err(HostError::NotWritable) } else { Ok(answer) }
    }

    /// The offset into memory that backs an address.
    pub(crate) fn place(&self, hva: u64) -> Option<u64> {
        let answer = self.at(hva).ok()?;
        Some(answer.target as u64 * self.unit + hva % self.unit)
    }

    /// The addresses of a unit.
    pub(crate) fn range(&self, unit: usize) -> Range<u64> {
        let start = unit as u64 * self.unit;
        start..start + self.unit
    }

    /// A unit gets another answer, unless another unit has its memory.
    pub(crate) fn change(&mut self, unit: usize, answer: Result<Answer, HostError>) {
        let mut others = self.answers.iter().enumerate().filter(|&(other, _)| other != unit);
        let taken = others.any(|(_, other)| match (other, answer) {
            (Ok(other), Ok(answer)) => other.target == answer.target,
            _ => false,
        });
        if let Some(old) = self.answers.get_mut(unit).filter(|_| !taken) {
            *old = answer;
        }
    }
}

/// The host as the machine sees it.
#[derive(Clone)]
pub(crate) struct SharedHost {
    pub(crate) memory: Arc<HostMemory>,
    pub(crate) answers: Arc<Mutex<Answers>>,
}

impl Host for SharedHost {
    fn page(&self, hva: Hva, access: Access) -> Result<HostPage, HostError> {
        let answers = self.answers.lock().unwrap();
        let Answer { target, writable, device } = answers.page(hva.0, access)?;
        let page = self.memory.page(target as u64 * answers.unit).expect("a unit of the memory");
        Ok(HostPage { output: Hpa(page.hpa.0), size: answers.unit, writable, device })
    }

    fn present(&self, hva: Hva) -> Option<HostPage> {
        self.page(hva, Access::Read).ok()
    }
}
