//! What a fiber's time went into.

use super::Time;

/// Everything that time can go into, with its names in a report and in words.
macro_rules! causes {
    ($($(#[$doc:meta])* $cause:ident = $key:literal, $words:literal;)*) => {
        /// What takes time. Where something is used by one after the other, waiting for it is a cause of its own.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        pub enum Cause {
            $($(#[$doc])* $cause,)*
        }

        impl Cause {
            /// Each, in the order of a fault.
            pub const ALL: [Self; COUNT] = [$(Self::$cause),*];

            /// Its name in a report for machines.
            pub const fn key(self) -> &'static str {
                match self { $(Self::$cause => $key,)* }
            }

            /// Its name in a report for people.
            pub const fn words(self) -> &'static str {
                match self { $(Self::$cause => $words,)* }
            }
        }

        const COUNT: usize = [$($key),*].len();
    };
}

causes! {
    /// The guest's own accesses.
    Guest = "guest", "guest";
    /// Round a fault: exit, look-up in the host, entry.
    Outside = "outside", "exit, host look-up, entry";
    /// Writing the line of the host's memory-map lock, once it has come.
    HostLock = "host_lock", "host lock: line moves";
    /// Waiting for that line.
    HostLockWait = "host_lock_wait", "host lock: waiting for it";
    /// A first touch of a large page, beside clearing it.
    PageAllocate = "page_allocate", "large page: allocation";
    /// Clearing it, with all of memory's bandwidth.
    PageClear = "page_clear", "large page: clearing";
    /// What clearing takes longer because others use memory too.
    PageWait = "page_wait", "large page: sharing memory";
    /// Waiting for the MMU lock, or for the line of one that is shared.
    LockWait = "lock_wait", "MMU lock: waiting for it";
    /// What more a lock takes that comes from another CPU.
    HandOver = "hand_over", "MMU lock: hand-over";
    /// Moving the line of a lock that is shared.
    LockLine = "lock_line", "MMU lock: line moves";
    /// What is done under the MMU lock.
    LockWork = "lock_work", "MMU lock: work under it";
    /// What sharing it adds to that.
    SharedExtra = "shared_extra", "MMU lock: sharing it";
    /// Reference counts on tables.
    References = "references", "reference counts";
    /// Instructions of the engine that touch no entry.
    Engine = "engine", "engine: instructions";
    /// Pins.
    Pin = "pin", "engine: pins";
    /// Loading entries whose line this CPU has.
    Load = "load", "entries: loads";
    /// Exchanging or storing such entries.
    Exchange = "exchange", "entries: exchanges";
    /// Moving lines of entries from other CPUs.
    Line = "line", "entries: lines move";
    /// Waiting for lines that move between others.
    LineWait = "line_wait", "entries: waiting for lines";
    /// Barriers, and what publishes stores.
    Barrier = "barrier", "barriers";
    /// Invalidations on this CPU.
    InvalidateLocal = "invalidate_local", "invalidations: local";
    /// Broadcast invalidations: until they have ended.
    Broadcast = "broadcast", "invalidations: broadcast";
    /// What they occupy the interconnect for.
    Interconnect = "interconnect", "invalidations: interconnect";
    /// Waiting for the interconnect.
    InterconnectWait = "interconnect_wait", "invalidations: waiting for it";
    /// Allocating tables and giving them back.
    TableAllocate = "table_allocate", "tables: allocation";
    /// Clearing and filling tables.
    TableClear = "table_clear", "tables: clearing";
    /// Cleaning caches.
    Caches = "caches", "cache maintenance";
    /// Beginning a walk of a section, where a general walker is called for each entry.
    Section = "walk_section", "walk: beginning it";
    /// Visits of entries of such a walk in vain.
    Visit = "walk_visit", "walk: entries in vain";
    /// Entries that it write-protects.
    Protect = "walk_protect", "walk: entries protected";
    /// Entries of tables that it splits blocks into.
    Split = "walk_split", "walk: entries split";
    /// Barriers while it splits.
    WalkBarrier = "walk_barrier", "walk: barriers";
    /// Looks of a spin.
    Spin = "spin", "spins";
    /// Nothing to do until another fiber says so.
    Idle = "idle", "nothing to do, others work";
}

/// How long each cause took a fiber, and how often it came. A fiber's clock moves for a cause only, so that the sum is
/// what the clock has moved by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ledger {
    times: [Time; COUNT],
    counts: [u64; COUNT],
}

impl Default for Ledger {
    fn default() -> Self {
        Self { times: [Time(0); COUNT], counts: [0; COUNT] }
    }
}

impl Ledger {
    /// How long `cause` took.
    pub fn time(&self, cause: Cause) -> Time {
        self.times[cause as usize]
    }

    /// How often it took any time.
    pub fn count(&self, cause: Cause) -> u64 {
        self.counts[cause as usize]
    }

    /// How long all took together.
    pub fn total(&self) -> Time {
        self.times.iter().fold(Time(0), |sum, &time| sum.after(time))
    }

    /// What came since `earlier`, which this was once.
    pub fn since(&self, earlier: &Self) -> Self {
        let mut since = *self;
        for (time, before) in since.times.iter_mut().zip(earlier.times) {
            *time = time.since(before);
        }
        for (count, before) in since.counts.iter_mut().zip(earlier.counts) {
            *count = count.saturating_sub(before);
        }
        since
    }

    /// This and what another fiber's says.
    pub fn and(&self, other: &Self) -> Self {
        let mut both = *self;
        for (time, more) in both.times.iter_mut().zip(other.times) {
            *time = time.after(more);
        }
        for (count, more) in both.counts.iter_mut().zip(other.counts) {
            *count = count.saturating_add(more);
        }
        both
    }

    #[inline]
    pub(super) fn charge(&mut self, cause: Cause, time: Time) {
        if time != Time(0) {
            let (at, sum) = (cause as usize, self.times[cause as usize]);
            self.times[at] = sum.after(time);
            self.counts[at] += 1;
        }
    }
}
