//! How large the leaf of a fault may be: what slot, host, log and format all allow.

use slat::{Format, Geometry, Gpa, GpaRange, Hpa, Level};

use crate::HostPage;
use crate::slot::Facts;

/// The translation that a fault wants, of which a leaf of any allowed level is a part.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    /// The faulting granule.
    pub(crate) gpa: Gpa,
    /// What backs it.
    pub(crate) output: Hpa,
    /// The largest leaf.
    pub(crate) level: Level,
}

impl Wanted {
    /// `None` if the host's page cannot be one: it must be a power of two, hold a granule, and be aligned.
    pub(crate) fn new<F: Format>(
        format: &F,
        facts: &Facts,
        gpa: Gpa,
        page: &HostPage,
    ) -> Option<Self> {
        let geometry = format.geometry();
        let granule = geometry.page_size();
        let aligned = page.output.0 & page.size.wrapping_sub(1) == 0;
        if !page.size.is_power_of_two() || page.size < granule || !aligned {
            return None;
        }
        let gpa = Gpa(gpa.0 & !(granule - 1));
        let output = Hpa(page.output.0 | facts.hva_of(gpa).0 & (page.size - 1));
        // Under a log every page is noticed by itself, and device registers are mapped as they were asked for.
        if facts.pages || page.device || page.size == granule {
            return Some(Self { gpa, output, level: Level::LAST });
        }
        let mut wanted = Self { gpa, output, level: geometry.start() };
        while wanted.level < Level::LAST && !wanted.allowed(format, facts, page) {
            wanted.level = wanted.level.below();
        }
        Some(wanted)
    }

    /// Whether a block of the wanted level may stand here.
    fn allowed<F: Format>(&self, format: &F, facts: &Facts, page: &HostPage) -> bool {
        let geometry = format.geometry();
        let size = geometry.size(self.level);
        let congruent = (self.gpa.0 ^ self.output.0) & (size - 1) == 0;
        // Not larger than the host's page: what follows it is somebody else's.
        let largest = facts.largest.min(facts.uniform);
        let fits = size <= page.size && size <= largest;
        let range = self.range(geometry);
        let inside = range.is_some_and(|range| {
            facts.range.start() <= range.start() && range.end() <= facts.range.end()
        });
        format.leaf_allowed(self.level) && fits && congruent && inside
    }

    /// What the leaf covers.
    #[inline]
    pub(crate) fn range(&self, geometry: &Geometry) -> Option<GpaRange> {
        let size = geometry.size(self.level);
        GpaRange::new(Gpa(self.gpa.0 & !(size - 1)), size)
    }

    /// Where the leaf's output begins.
    #[inline]
    pub(crate) fn leaf_output(&self, geometry: &Geometry) -> Hpa {
        Hpa(self.output.0 & !(geometry.size(self.level) - 1))
    }
}
