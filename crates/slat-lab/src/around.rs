//! How far a fault maps round its page: windows as the engine has them, or as KVM left them before its windows were
//! completed.
//!
//! The guests that this is measured with need no memory of their own for each page: all of theirs lies over a few pages
//! of the host, so that gigabytes fit into this computer.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use serde::{Serialize, Serializer};
use slat_model::HostMemory;
use slat_vm::{Access, Host, HostError, HostPage, Hva, VmOptions};

use crate::backing::{Backing, Pages};
use crate::config::{self, GuestConfig};
use crate::failure::Failure;
use crate::guest_mode::{self, GuestMode};
use crate::layout::{Layout, Plan};
use crate::model::{self, ModelHost};
use crate::options::{MachineOptions, MemoryOptions, OrHelp};
use crate::size::Size;

/// Pages of a window where nobody says anything, and of KVM's.
const PAGES: u64 = 8;

/// log2 of the pages of the host.
const HOST_PAGES: u32 = 9;

/// How far a fault maps round its page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Around {
    /// All of an aligned window of so many pages.
    Pages(u32),
    /// All of a window that grows and shrinks with what its pages are worth, up to a whole table.
    Adaptive,
    /// Of an aligned window of eight, only what lies before a page that is mapped: what follows the last one is left.
    ClosedRuns,
}

/// Neither a number of pages nor a name.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("a window is a power of two of pages (1 is none), adaptive, or closed-runs")]
pub(crate) struct UnknownAround;

impl FromStr for Around {
    type Err = UnknownAround;

    fn from_str(text: &str) -> Result<Self, UnknownAround> {
        match text {
            "adaptive" => Ok(Self::Adaptive),
            "closed-runs" => Ok(Self::ClosedRuns),
            _ => match text.parse() {
                Ok(pages) if u32::is_power_of_two(pages) => Ok(Self::Pages(pages)),
                _ => Err(UnknownAround),
            },
        }
    }
}

impl fmt::Display for Around {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pages(pages) => pages.fmt(f),
            Self::Adaptive => f.write_str("adaptive"),
            Self::ClosedRuns => f.write_str("closed-runs"),
        }
    }
}

impl Serialize for Around {
    /// As on the command line.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Around {
    /// What the engine is told, with tables of so many entries.
    pub(crate) fn options(self, entries: u32, rest: VmOptions) -> VmOptions {
        match self {
            Self::Pages(fault_around) => VmOptions { fault_around, ..rest },
            Self::Adaptive => VmOptions { adaptive_around: Some(entries), ..rest },
            Self::ClosedRuns => VmOptions { fault_around: PAGES as u32, ..rest },
        }
    }

    /// A host whose `memory`, a power of two of bytes, lies under all of `size` bytes of guest memory again and again. It
    /// has every page at hand, and shows the engine those that this design maps.
    pub(crate) fn host(self, memory: &Arc<HostMemory>, size: u64, page: u64) -> ModelHost {
        let windows = size.div_ceil(page * PAGES);
        let mapped = (self == Self::ClosedRuns)
            .then(|| (0..windows).map(|_| AtomicU8::new(0)).collect::<Box<[_]>>());
        ModelHost::new(Mirror { memory: Arc::clone(memory), page, mapped })
    }
}

/// Lays memory out for guests that touch pages, `bytes` for each of so many vCPUs, over few pages of the host.
///
/// # Errors
/// [`Failure::Usage`] with what makes no sense.
pub(crate) fn settle(
    around: Around,
    machine: &MachineOptions,
    (vcpus, bytes): (u32, Size),
) -> Result<(Layout, GuestConfig), Failure> {
    if around == Around::Adaptive && !machine.hardware_access() {
        let why = "--fault-around adaptive: it goes by access flags that hardware sets; --hardware-access on has them";
        return Err(Failure::Usage(why.to_owned()));
    }
    let mode: GuestMode =
        guest_mode::DEFAULT.parse().map_err(|_| Failure::Usage("no guest mode".to_owned()))?;
    let backing = Backing { shared: false, pages: Pages::Base };
    let chosen = (OrHelp::Value(backing), OrHelp::Value(mode));
    let memory = MemoryOptions { vcpus, bytes, backing: chosen.0, mode: chosen.1 };
    let (mut layout, guest) =
        config::settle(&memory, machine, Plan::PLAIN, (backing, mode), false)?;
    layout.host_size = layout.page << HOST_PAGES;
    Ok((layout, guest))
}

/// Few pages behind many addresses.
#[derive(Debug)]
struct Mirror {
    memory: Arc<HostMemory>,
    page: u64,
    /// The pages of each window that were mapped, a bit each, where that decides what is shown.
    mapped: Option<Box<[AtomicU8]>>,
}

impl Mirror {
    fn behind(&self, hva: Hva) -> Result<HostPage, HostError> {
        model::page(&self.memory, Hva(hva.0 & (self.memory.size() - 1)))
    }

    /// The window of an address, and the place of its page there.
    fn place(&self, hva: Hva) -> (usize, u32) {
        let page = hva.0 / self.page;
        ((page / PAGES) as usize, (page % PAGES) as u32)
    }
}

impl Host for Mirror {
    fn page(&self, hva: Hva, _access: Access) -> Result<HostPage, HostError> {
        self.behind(hva)
    }

    /// Of closed runs a page belongs to one if a page behind it is mapped; that of the fault is, by now.
    fn present(&self, hva: Hva) -> Option<HostPage> {
        if let Some(mapped) = &self.mapped {
            let (window, place) = self.place(hva);
            let after = mapped.get(window)?.load(Ordering::Relaxed) >> place >> 1;
            if after == 0 {
                return None;
            }
        }
        self.behind(hva).ok()
    }

    fn accessed(&self, hva: Hva, _size: u64) {
        if let Some(mapped) = &self.mapped {
            let (window, place) = self.place(hva);
            if let Some(mapped) = mapped.get(window) {
                mapped.fetch_or(1 << place, Ordering::Relaxed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_powers_of_two_or_have_a_name() {
        for (text, around) in [
            ("1", Around::Pages(1)),
            ("512", Around::Pages(512)),
            ("adaptive", Around::Adaptive),
            ("closed-runs", Around::ClosedRuns),
        ] {
            assert_eq!(text.parse(), Ok(around));
            assert_eq!(around.to_string(), text);
        }
        for text in ["0", "3", "-8", "8K", "open"] {
            assert_eq!(text.parse::<Around>(), Err(UnknownAround));
        }
    }
}
