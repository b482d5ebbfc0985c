//! What the check of `slat access-tracking` finds: flags are clear after a marking, set after an access, and cleared as
//! often as they were set.

use serde::Serialize;

use crate::arch::Tables;
use crate::check::Findings;
use crate::contents;
use crate::guest::Program;
use crate::layout::Layout;
use crate::stage::{Ground, Stage};

/// What was wrong.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Found {
    /// Guest pages that were looked at.
    pages: u64,
    /// Leaves that were young when all had just been marked idle.
    young_after_mark: u64,
    /// Guest pages that were idle, or not mapped, when all had just been used.
    idle_after_access: u64,
    /// Leaves that a marking has counted too many or too few.
    miscounted: u64,
    /// Translations that lead elsewhere than to the page.
    elsewhere: u64,
    /// Loads that did not return what a guest had stored there.
    wrong_loads: u64,
    /// Pages of host memory that do not hold what was stored last.
    misplaced: u64,
    /// Young leaves after the last access.
    #[serde(skip)]
    young: u64,
}

impl Found {
    pub(crate) fn new(layout: &Layout) -> Self {
        Self { pages: layout.guest_pages(), ..Self::default() }
    }

    /// Every page was used; `noticed` if every CPU had to look at the tables for it.
    pub(crate) fn after_access<T: Tables>(
        &mut self,
        stage: &Stage<'_, '_, T>,
        ground: Ground<'_>,
        noticed: bool,
    ) {
        let survey = stage.survey(ground, |offset, leaf| {
            let used = leaf.is_some_and(|leaf| leaf.young || !noticed);
            let guests = offset.is_multiple_of(ground.layout.guest_page);
            self.idle_after_access += u64::from(guests && !used);
        });
        self.elsewhere += survey.elsewhere;
        self.young = survey.young;
    }

    /// Everything was marked idle: `cleared` leaves were, and `young` are not.
    pub(crate) fn after_mark(&mut self, young: u64, cleared: u64) {
        self.young_after_mark += young;
        self.miscounted += self.young.abs_diff(cleared);
    }

    /// Looks at contents, when the guests have ended.
    pub(crate) fn finish(&mut self, ground: Ground<'_>, guests: &[Program]) {
        self.wrong_loads = contents::wrong_loads(guests);
        self.misplaced = contents::misplaced(ground.memory, ground.layout, guests);
    }
}

impl Findings for Found {
    const CLEAN: &'static str =
        "idle after each marking, used after each access, nothing misplaced";

    fn compared(&self) -> String {
        format!("{} pages", self.pages)
    }

    fn wrong(&self) -> Vec<(u64, &'static str)> {
        vec![
            (self.young_after_mark, "leaves were young when all had just been marked idle"),
            (self.idle_after_access, "pages were idle, or not mapped, when all had just been used"),
            (self.miscounted, "leaves were counted too many or too few when they were marked"),
            (self.elsewhere, "translations lead elsewhere than to the page"),
            (self.wrong_loads, "loads did not return what was stored last"),
            (self.misplaced, "pages of host memory do not hold what was stored last"),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_marking_clears_what_was_young_and_counts_it() {
        let mut found = Found { young: 5, ..Found::default() };
        found.after_mark(0, 5);
        assert!(found.wrong().iter().all(|(count, _)| *count == 0));
        found.after_mark(2, 4);
        assert_eq!((found.young_after_mark, found.miscounted), (2, 1));
    }
}
