//! What one CPU remembers of its walks. It never forgets by itself, and prefers what it remembers.

use slat::{Format, Gpa, Hpa, Level};

use crate::explorer::Life;
use crate::format::Tiny;

/// S2AP\[1\]: a write is permitted.
const PERMITS_WRITE: u64 = 1 << 7;
/// The other bit of [`Format::WRITE`]: hardware sets S2AP\[1\] at the first write.
const DBM: u64 = Tiny::WRITE & !PERMITS_WRITE;
/// XN\[1\]: no instruction is fetched.
#[cfg(shuttle)]
const EXECUTE_NEVER: u64 = 1 << 54;

/// A leaf as it was when it was walked to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cached {
    pub(crate) start: u64,
    pub(crate) size: u64,
    pub(crate) level: Level,
    pub(crate) output: Hpa,
    pub(crate) entry: u64,
    /// Where the entry stands.
    pub(crate) table: Hpa,
    pub(crate) index: usize,
}

impl Cached {
    fn covers(&self, gpa: Gpa) -> bool {
        (self.start..self.start + self.size).contains(&gpa.0)
    }

    /// Whether a write goes through.
    pub(crate) fn writes(&self) -> bool {
        self.entry & PERMITS_WRITE != 0
    }

    /// Whether an instruction is fetched.
    #[cfg(shuttle)]
    pub(crate) fn executes(&self) -> bool {
        self.entry & EXECUTE_NEVER == 0
    }

    /// Whether a write goes through as soon as hardware has noted it in the entry.
    pub(crate) fn writes_after_dirtying(&self) -> bool {
        self.entry & DBM != 0
    }

    /// The leaf after hardware has noted a write.
    pub(crate) fn dirtied(self) -> Self {
        Self { entry: self.entry | PERMITS_WRITE, ..self }
    }

    /// The host address of `gpa`.
    pub(crate) fn translate(&self, gpa: Gpa) -> Hpa {
        Hpa(self.output.0 + (gpa.0 - self.start))
    }
}

/// What an invalidation covers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cover {
    pub(crate) start: u64,
    pub(crate) size: u64,
    /// With a level hint, only leaves of that level need go (Arm ARM DDI 0487, D8.17, TTL).
    pub(crate) level: Option<Level>,
}

impl Cover {
    fn meets(&self, start: u64, size: u64) -> bool {
        start < self.start.saturating_add(self.size) && self.start < start + size
    }
}

/// The leaves and the table entries that a CPU has cached.
#[derive(Debug, Default)]
pub(crate) struct Tlb {
    leaves: Vec<Cached>,
    /// What was invalidated, each with a life that began then.
    gone: Vec<(Cached, Life)>,
    tables: Vec<(Level, u64, u64, Hpa)>,
}

impl Tlb {
    /// The leaf over `gpa` that was cached first.
    pub(crate) fn leaf(&self, gpa: Gpa) -> Option<Cached> {
        self.leaves.iter().find(|leaf| leaf.covers(gpa)).copied()
    }

    /// Caches a leaf, after those that are.
    pub(crate) fn add(&mut self, new: Cached) {
        if !self.leaves.iter().any(|old| (old.start, old.size) == (new.start, new.size)) {
            self.leaves.push(new);
        }
    }

    pub(crate) fn replace(&mut self, new: Cached) {
        self.forget(Gpa(new.start));
        self.leaves.push(new);
    }

    pub(crate) fn forget(&mut self, gpa: Gpa) {
        self.leaves.retain(|leaf| !leaf.covers(gpa));
    }

    /// The table that an entry at `level` over `gpa` pointed to.
    pub(crate) fn table(&self, level: Level, gpa: Gpa) -> Option<Hpa> {
        let over = |&&(at, start, size, _): &&(Level, u64, u64, Hpa)| {
            at == level && (start..start + size).contains(&gpa.0)
        };
        self.tables.iter().find(over).map(|&(.., table)| table)
    }

    pub(crate) fn remember(&mut self, level: Level, start: u64, size: u64, table: Hpa) {
        if self.table(level, Gpa(start)).is_none() {
            self.tables.push((level, start, size, table));
        }
    }

    /// Whether a leaf at `level` or above is cached over `gpa`.
    pub(crate) fn covers(&self, gpa: Gpa, level: Level) -> bool {
        self.leaf(gpa).is_some_and(|leaf| leaf.level <= level)
    }

    /// Whether two leaves for one address differ in more than a change without break-before-make may (Arm ARM DDI
    /// 0487, D8.16.1): permissions, and the size where the CPU tolerates that (FEAT_BBM level 2).
    pub(crate) fn conflicts(&self, new: &Cached, bbm_level: u8) -> bool {
        self.leaves.iter().any(|old| {
            let start = Gpa(old.start.max(new.start));
            let meet = old.covers(start) && new.covers(start);
            let size = old.level != new.level && bbm_level < 2;
            meet && (size || old.translate(start) != new.translate(start))
        })
    }

    /// Whether a leaf over `gpa` that is `bad` was invalidated by a thread that has not told the calling one since.
    pub(crate) fn may_still_cache(&self, gpa: Gpa, bad: impl Fn(&Cached) -> bool) -> bool {
        self.gone
            .iter()
            .filter(|(leaf, _)| leaf.covers(gpa) && bad(leaf))
            .any(|(_, since)| !since.used())
    }

    /// Whether a walk that begins with what is remembered comes to `table`.
    pub(crate) fn reaches(&self, table: Hpa) -> bool {
        self.tables.iter().any(|&(.., next)| next == table)
    }

    pub(crate) fn invalidate(&mut self, cover: &Cover) {
        let goes = |leaf: &mut Cached| {
            cover.meets(leaf.start, leaf.size)
                && cover.level.is_none_or(|level| level == leaf.level)
        };
        let gone = self.leaves.extract_if(.., goes);
        self.gone.extend(gone.map(|leaf| (leaf, Life::new())));
        self.tables
            .retain(|&(_, start, size, _)| !(cover.meets(start, size) && cover.level.is_none()));
    }
}
