//! Whoever handles faults, a vCPU or a worker: its participant, its tables in hand, its ring, and what it has done.

use slat::{Machine, NoSlot, Participant, Reserve};

use crate::VcpuStatistics;
use crate::chunks::At;
use crate::ring::Ring;
use crate::shared::Shared;
use crate::window::Window;

#[derive(Debug)]
pub(crate) struct Hands<'m, M: Machine> {
    pub(crate) participant: Participant<'m, M>,
    pub(crate) reserve: Reserve<'m, M>,
    /// The VM that it is a vCPU of; a worker works for any.
    pub(crate) vm: Option<u64>,
    /// The address space that it is in.
    pub(crate) space: u16,
    /// Where the slot of the last fault was found.
    pub(crate) hit: At,
    /// Where it reports the pages that it makes writable; a worker has none.
    pub(crate) ring: Option<Shared<Ring>>,
    /// How far round a fault it maps.
    pub(crate) window: Window,
    pub(crate) statistics: VcpuStatistics,
}

impl<'m, M: Machine> Hands<'m, M> {
    pub(crate) fn new(machine: &'m M) -> Result<Self, NoSlot> {
        Ok(Self {
            participant: Participant::register(machine)?,
            reserve: Reserve::new(machine),
            vm: None,
            space: 0,
            hit: At::default(),
            ring: None,
            window: Window::default(),
            statistics: VcpuStatistics::default(),
        })
    }
}
