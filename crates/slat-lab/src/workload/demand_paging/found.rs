//! What the check of `slat demand-paging` finds: each page came once, with its contents, and only when it was asked for.

use std::sync::atomic::Ordering;

use serde::{Deserialize, Serialize};

use super::source;
use super::userfault::{Mode, Served, Userfault};
use crate::arch::Tables;
use crate::check::Findings;
use crate::contents;
use crate::guest::Program;
use crate::stage::{Ground, Stage};
use crate::translations::Translation;

/// What was wrong.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Found {
    /// Guest pages that were looked at.
    pages: u64,
    /// Pages that a guest has written and that were not served, or are not mapped.
    unserved: u64,
    /// Pages of the host that are mapped or served although no guest has touched any of the page that is served.
    unasked: u64,
    /// Pages that were served more than once, and requests that nobody has looked at.
    miscounted: u64,
    /// Translations that lead elsewhere than to the page.
    elsewhere: u64,
    /// Guest pages without the contents that the handler has copied.
    unfilled: u64,
    /// Loads that did not return what a guest had stored there.
    wrong_loads: u64,
    /// Pages of host memory that do not hold what was stored last.
    misplaced: u64,
}

impl Found {
    /// Looks at every page, when the guests have paused.
    pub(crate) fn look<T: Tables>(
        stage: &Stage<'_, '_, T>,
        ground: Ground<'_>,
        userfault: Option<&Userfault>,
        served_at_once: u64,
    ) -> Self {
        let layout = ground.layout;
        let mut found = Self { pages: layout.guest_pages(), ..Self::default() };
        let touched = |offset: u64| {
            let first = offset - offset % served_at_once;
            served_at_once >= layout.guest_page || first.is_multiple_of(layout.guest_page)
        };
        let survey = stage.survey(ground, |offset, leaf: Option<&Translation>| {
            let present = userfault.map(|userfault| userfault.is_present(offset));
            if offset.is_multiple_of(layout.guest_page) {
                found.unserved += u64::from(leaf.is_none() || present == Some(false));
            } else if !touched(offset) {
                found.unasked += u64::from(leaf.is_some() || present == Some(true));
            }
        });
        found.elsewhere = survey.elsewhere;
        found
    }

    /// Counts, when the handlers have ended: `present` pages have come.
    pub(crate) fn count(&mut self, done: Served, present: u64) {
        let Served { requests, served, duplicates } = done;
        self.miscounted = served.abs_diff(present) + requests.abs_diff(served + duplicates);
    }

    /// Looks at contents, when the guests have ended.
    pub(crate) fn finish(&mut self, ground: Ground<'_>, mode: Option<Mode>, guests: &[Program]) {
        let layout = ground.layout;
        self.wrong_loads = contents::wrong_loads(guests);
        self.misplaced = contents::misplaced(ground.memory, layout, guests);
        if mode.is_none() {
            return;
        }
        for page in 0..layout.guest_pages() {
            let word = ground.memory.word(page * layout.guest_page + source::MARK_OFFSET);
            let mark = word.map(|word| word.load(Ordering::Relaxed));
            self.unfilled += u64::from(mark != Some(source::mark(page)));
        }
    }
}

impl Findings for Found {
    const CLEAN: &'static str = "every page served once and filled, nothing misplaced";

    fn compared(&self) -> String {
        format!("{} pages", self.pages)
    }

    fn wrong(&self) -> Vec<(u64, &'static str)> {
        vec![
            (self.unserved, "pages were written and not served, or are not mapped"),
            (self.unasked, "pages are mapped or served that no guest has touched"),
            (self.miscounted, "pages were served more than once, or requests not at all"),
            (self.elsewhere, "translations lead elsewhere than to the page"),
            (self.unfilled, "pages do not have the contents that were copied"),
            (self.wrong_loads, "loads did not return what was stored last"),
            (self.misplaced, "pages of host memory do not hold what was stored last"),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_request_is_served_or_a_duplicate_and_each_page_served_once() {
        let miscounted = |(requests, served, duplicates), present| {
            let mut found = Found::default();
            found.count(Served { requests, served, duplicates }, present);
            found.miscounted
        };
        assert_eq!(miscounted((10, 8, 2), 8), 0);
        assert_eq!(miscounted((10, 8, 2), 7), 1);
        assert_eq!(miscounted((10, 7, 2), 7), 1);
    }
}
