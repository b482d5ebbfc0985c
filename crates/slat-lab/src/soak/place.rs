//! A memslot's place among guest addresses, and what is behind it at every moment.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use slat::{Gpa, GpaRange};
use slat_vm::{Hva, SlotConfig};

use crate::soak::config::Config;
use crate::soak::migration::Migration;

/// Windows of host addresses that a slot can have.
const WINDOWS: u64 = 2;
/// Where a slot can be among guest addresses.
const SPOTS: u64 = 2;

/// Where a slot is, or comes back to.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) id: u32,
    pub(crate) pages: u64,
    page_size: u64,
    /// The guest address at the first spot, and bytes from one spot to the next.
    gpa: (u64, u64),
    /// The first page of host addresses of the first window, and pages from one window to the next.
    window: (u64, u64),
    /// What may be reached, as bits of [`Behind`]; zero while nothing may.
    behind: AtomicU64,
    /// Beginnings and ends of changes of the slot: odd while it may not be there, or be something between two states.
    changes: AtomicU64,
    state: Mutex<State>,
}

/// What only one worker at a time does with a slot.
#[derive(Debug)]
pub(crate) enum State {
    Gone,
    There(Option<Migration>),
}

/// What is behind a slot. While the slot changes, it is what either state permits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Behind {
    /// Which window of host addresses.
    pub(crate) window: u64,
    /// The spots at which the slot may be, a bit each.
    pub(crate) spots: u64,
    pub(crate) read_only: bool,
}

impl Behind {
    /// The spot of a slot that does not change.
    pub(crate) fn spot(self) -> u64 {
        u64::from(self.spots.trailing_zeros())
    }

    /// Not zero: there is a spot.
    fn bits(self) -> u64 {
        self.spots | self.window << 8 | u64::from(self.read_only) << 16
    }

    fn from_bits(bits: u64) -> Option<Self> {
        let (spots, window, read_only) = (bits & 0xff, bits >> 8 & 0xff, bits >> 16 != 0);
        (spots != 0).then_some(Self { window, spots, read_only })
    }

    /// What this or the other permits.
    fn either(self, other: Self) -> Self {
        let (spots, read_only) = (self.spots | other.spots, self.read_only && other.read_only);
        Self { spots, read_only, ..self }
    }
}

impl Place {
    /// The `n`-th place of a round. Nothing is there.
    pub(crate) fn new(config: &Config, n: u32) -> Self {
        let (page_size, span) = (config.page_size(), config.span());
        let stride = span / page_size;
        Self {
            id: 10 + n,
            pages: config.pages,
            page_size,
            gpa: ((1 + SPOTS * u64::from(n)) * span + config.shift * page_size, span),
            window: (u64::from(n) * WINDOWS * stride, stride),
            behind: AtomicU64::new(0),
            changes: AtomicU64::new(1),
            state: Mutex::new(State::Gone),
        }
    }

    /// Bytes of host addresses that the places of a round have.
    pub(crate) fn host_size(config: &Config) -> u64 {
        u64::from(config.slots) * WINDOWS * config.span()
    }

    /// The guest address of a page of the slot at one of its spots.
    pub(crate) fn gpa(&self, spot: u64, page: u64) -> Gpa {
        Gpa(self.gpa.0 + spot % SPOTS * self.gpa.1 + page * self.page_size)
    }

    /// The guest addresses of some of its pages at one of its spots, cut where it ends; `None` if that leaves nothing.
    pub(crate) fn range(&self, spot: u64, first: u64, pages: u64) -> Option<GpaRange> {
        let pages = pages.min(self.pages.saturating_sub(first));
        GpaRange::new(self.gpa(spot, first), pages * self.page_size)
    }

    /// The same at every spot.
    pub(crate) fn ranges(&self, first: u64, pages: u64) -> Vec<GpaRange> {
        (0..SPOTS).filter_map(|spot| self.range(spot, first, pages)).collect()
    }

    /// What is behind it, if a guest may reach it.
    pub(crate) fn behind(&self) -> Option<Behind> {
        Behind::from_bits(self.behind.load(Ordering::SeqCst))
    }

    /// The page of host addresses behind a page of the slot.
    pub(crate) fn host_page(&self, behind: Behind, page: u64) -> u64 {
        self.first(behind.window) + page
    }

    /// The first page of host addresses of a window.
    pub(crate) fn first(&self, window: u64) -> u64 {
        self.window.0 + window % WINDOWS * self.window.1
    }

    /// A number that is the same again only if the slot was there all the time in between; `None` while it may not be.
    pub(crate) fn there(&self) -> Option<u64> {
        let changes = self.changes.load(Ordering::SeqCst);
        changes.is_multiple_of(2).then_some(changes)
    }

    /// The right to change the slot or its log, unless another worker has it.
    pub(crate) fn state(&self) -> Option<MutexGuard<'_, State>> {
        self.state.try_lock().ok()
    }

    /// A change of the slot begins, after which it will be `to`, or gone: what the VM is to make of it.
    pub(crate) fn begin_change(&self, to: Option<Behind>) -> SlotConfig {
        let now = self.behind();
        if now.is_some() {
            self.changes.fetch_add(1, Ordering::SeqCst);
        }
        let to = to.or(now).unwrap_or(Behind { window: 0, spots: 1, read_only: false });
        let either = now.map_or(to, |now| now.either(to));
        self.behind.store(either.bits(), Ordering::SeqCst);
        let (gpa, hva) = (self.gpa(to.spot(), 0), Hva(self.first(to.window) * self.page_size));
        let config = SlotConfig::new(gpa, self.pages * self.page_size, hva);
        SlotConfig { read_only: to.read_only, ..config }
    }

    /// The change has ended: no guest may reach anything else.
    pub(crate) fn end_change(&self, to: Option<Behind>) {
        self.behind.store(to.map_or(0, Behind::bits), Ordering::SeqCst);
        if to.is_some() {
            self.changes.fetch_add(1, Ordering::SeqCst);
        }
    }
}
