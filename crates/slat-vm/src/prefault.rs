//! Mapping guest memory ahead of any access.

use slat::{Format, Gpa, GpaRange, Level, Machine};

use crate::fault::Purpose;
use crate::hands::Hands;
use crate::{Access, Exit, Fault, FaultError, FaultKind, Host, Vcpu, Vm};

/// How far [`Vcpu::pre_fault`] came.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use = "it may have mapped only a part"]
pub struct PreFault {
    /// Bytes that are mapped now, from the start of the range.
    pub done: u64,
    /// The rest, for the next call; `None`: all of it is mapped.
    pub rest: Option<GpaRange>,
    /// Why it stopped there; `None` with a rest: `go_on` said so.
    pub stopped: Option<PreFaultError>,
}

/// Why pages could not be mapped ahead.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum PreFaultError {
    /// There is no slot with this page.
    NoSlot,
    /// The range must consist of whole granules, and lie below the end of guest addresses.
    Range {
        /// The granule in bytes.
        granule: u64,
        /// The first address that is too large.
        limit: Gpa,
    },
    /// The page cannot be mapped.
    Fault(FaultError),
    /// The host takes the page back, or is interrupted again and again: call again when that is over.
    Busy,
}

impl core::fmt::Display for PreFaultError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::NoSlot => f.write_str("no memslot has this page"),
            Self::Range { granule, limit } => write!(
                f,
                "a range to map ahead must be a multiple of {granule:#x} and end at or below {limit}"
            ),
            Self::Fault(error) => error.fmt(f),
            Self::Busy => f.write_str("the page is being taken back: try again when that is over"),
        }
    }
}

impl core::error::Error for PreFaultError {}

/// A page may be found in change this often in a row.
const RETRIES: u32 = 1 << 10;

impl<'m, M: Machine> Vcpu<'m, M> {
    /// Maps `range` of its address space for reading, page after page, as if it were read, before anybody does
    /// (`KVM_PRE_FAULT_MEMORY`). The access flag stays clear where hardware sets it. Asks `go_on` before each leaf but
    /// the first, so that a signal can interrupt it. What it returns says how far it came: call again with the rest.
    ///
    /// Pages are mapped as a read fault maps them: writable unless a log protects them, in leaves as large as can be.
    /// May block as [`fault`](Self::fault) does; costs as much for each leaf.
    pub fn pre_fault<F: Format, H: Host>(
        &mut self,
        vm: &Vm<'m, F, M, H>,
        range: GpaRange,
        go_on: impl FnMut() -> bool,
    ) -> PreFault {
        self.hands.pre_fault(vm, range, Access::Read, go_on)
    }
}

impl<'m, M: Machine> Hands<'m, M> {
    pub(crate) fn pre_fault<F: Format, H: Host>(
        &mut self,
        vm: &Vm<'m, F, M, H>,
        range: GpaRange,
        access: Access,
        mut go_on: impl FnMut() -> bool,
    ) -> PreFault {
        let geometry = vm.tree().geometry();
        let (granule, limit) = (geometry.page_size(), geometry.limit());
        let start = range.start().0;
        let result = |at: u64, stopped| {
            let rest = GpaRange::new(Gpa(at), range.end().0.saturating_sub(at));
            PreFault { done: at.min(range.end().0) - start, rest, stopped }
        };
        if (start | range.end().0) & (granule - 1) != 0 || range.end() > limit {
            return result(start, Some(PreFaultError::Range { granule, limit }));
        }
        if let Err(error) = vm.admit_hands(self) {
            return result(start, Some(PreFaultError::Fault(error.into())));
        }
        let mut at = start;
        let mut retries = 0;
        while at < range.end().0 {
            if at > start && !go_on() {
                return result(at, None);
            }
            match self.pre_fault_one(vm, Gpa(at), access) {
                Ok(Some(level)) => {
                    at = (at | (geometry.size(level) - 1)).saturating_add(1);
                    retries = 0;
                }
                Ok(None) if retries < RETRIES => {
                    retries += 1;
                    vm.machine().relax();
                }
                Ok(None) => return result(at, Some(PreFaultError::Busy)),
                Err(stopped) => return result(at, Some(stopped)),
            }
        }
        result(at, None)
    }

    /// The level of the leaf that maps `gpa` now; `None`: not yet, try again.
    fn pre_fault_one<F: Format, H: Host>(
        &mut self,
        vm: &Vm<'m, F, M, H>,
        gpa: Gpa,
        access: Access,
    ) -> Result<Option<Level>, PreFaultError> {
        let fault = Fault { gpa, access, kind: FaultKind::Translation };
        let purpose = Purpose { private: None, ahead: true };
        match self.map_one(vm, &fault, purpose).map_err(PreFaultError::Fault)? {
            Ok(level) => {
                self.statistics.ahead += 1;
                Ok(Some(level))
            }
            Err(Exit::Mmio(_)) => Err(PreFaultError::NoSlot),
            Err(_) => Ok(None),
        }
    }
}
