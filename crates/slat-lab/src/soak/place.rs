//! A memslot's place among guest addresses, and what is behind it at every moment.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
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
    /// By page, the windows that may be behind it where it can be private: a bit for that of shared memory, one for that
    /// of private memory, and both while it is converted.
    kinds: Vec<AtomicU8>,
    /// Pages that dirty rings have reported and nobody has copied since, a bit each.
    reported: Vec<AtomicU64>,
    state: Mutex<State>,
}

/// What is special about a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Ordinary,
    Pinned,
    /// The other window of host addresses is its private memory.
    Private,
}

/// A page is shared, private, or either.
pub(crate) const SHARED: u8 = 1;
pub(crate) const PRIVATE: u8 = 2;

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
    pub(crate) kind: Kind,
}

impl Behind {
    /// A slot in the first window that a guest may write.
    pub(crate) fn ordinary() -> Self {
        Self { window: 0, spots: 1, read_only: false, kind: Kind::Ordinary }
    }

    /// The spot of a slot that does not change.
    pub(crate) fn spot(self) -> u64 {
        u64::from(self.spots.trailing_zeros())
    }

    /// Not zero: there is a spot.
    fn bits(self) -> u64 {
        let kind = match self.kind {
            Kind::Ordinary => 0,
            Kind::Pinned => 1,
            Kind::Private => 2,
        };
        self.spots | self.window << 8 | u64::from(self.read_only) << 16 | kind << 17
    }

    fn from_bits(bits: u64) -> Option<Self> {
        let (spots, window, read_only) = (bits & 0xff, bits >> 8 & 0xff, bits >> 16 & 1 != 0);
        let kind = match bits >> 17 {
            0 => Kind::Ordinary,
            1 => Kind::Pinned,
            _ => Kind::Private,
        };
        (spots != 0).then_some(Self { window, spots, read_only, kind })
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
            kinds: (0..config.pages).map(|_| AtomicU8::new(SHARED)).collect(),
            reported: (0..config.pages.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
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

    /// The page of host addresses behind a page of the slot that is shared.
    pub(crate) fn host_page(&self, behind: Behind, page: u64) -> u64 {
        self.first(behind.window) + page
    }

    /// The pages of host addresses that may be behind a page of the slot now: one, or two while it is converted.
    pub(crate) fn host_pages(&self, behind: Behind, page: u64) -> impl Iterator<Item = u64> {
        let kinds = match behind.kind {
            Kind::Private => self.kinds[page as usize].load(Ordering::SeqCst),
            _ => SHARED,
        };
        let shared = (kinds & SHARED != 0).then_some(behind.window);
        let private = (kinds & PRIVATE != 0).then_some(behind.window + 1);
        shared.into_iter().chain(private).map(move |window| self.first(window) + page)
    }

    /// Pages are of these kinds from now on.
    pub(crate) fn set_kinds(&self, first: u64, pages: u64, kinds: u8) {
        let pages = &self.kinds[first as usize..(first + pages) as usize];
        pages.iter().for_each(|kind| kind.store(kinds, Ordering::SeqCst));
    }

    /// A dirty ring has reported a page, and was reset since. Whether there is such a page.
    pub(crate) fn report(&self, page: u64) -> bool {
        let word = self.reported.get((page / 64) as usize).filter(|_| page < self.pages);
        word.map(|word| word.fetch_or(1 << (page % 64), Ordering::SeqCst)).is_some()
    }

    /// Takes what was reported.
    pub(crate) fn take_reported(&self) -> Vec<u64> {
        self.reported.iter().map(|word| word.swap(0, Ordering::SeqCst)).collect()
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
        let to = to.or(now).unwrap_or(Behind::ordinary());
        let either = now.map_or(to, |now| now.either(to));
        self.behind.store(either.bits(), Ordering::SeqCst);
        let hva = |window| Hva(self.first(window) * self.page_size);
        let size = self.pages * self.page_size;
        let config = SlotConfig::new(self.gpa(to.spot(), 0), size, hva(to.window));
        let private = (to.kind == Kind::Private).then(|| hva(to.window + 1));
        let pinned = to.kind == Kind::Pinned;
        SlotConfig { read_only: to.read_only, pinned, private, ..config }
    }

    /// The change has ended: no guest may reach anything else.
    pub(crate) fn end_change(&self, to: Option<Behind>) {
        self.behind.store(to.map_or(0, Behind::bits), Ordering::SeqCst);
        if to.is_some() {
            self.changes.fetch_add(1, Ordering::SeqCst);
        }
    }
}
