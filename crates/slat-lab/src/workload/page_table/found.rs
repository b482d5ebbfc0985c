//! What the check of `slat page-table` finds: leaves are as large as backing, log and stage say, and lead where the
//! pages are.

use serde::{Deserialize, Serialize};

use crate::check::Findings;
use crate::layout::Layout;
use crate::translations::{Survey, Translation};

use super::options::Config;

/// What must be true of the page at an offset, given the leaf that translates it.
pub(crate) type Judge = fn(&mut Found, u64, Option<&Translation>);

/// The tables after each stage, and what was wrong.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Found {
    pub(crate) created: Survey,
    pub(crate) updated: Survey,
    pub(crate) adjusted: Survey,
    /// Touched pages without a leaf, or whose leaf is not as large as it must be.
    wrong_leaves: u64,
    /// Translations that lead elsewhere than to the page.
    pub(crate) elsewhere: u64,
    /// Pages that were written and not in the log.
    pub(crate) lost: u64,
    /// Loads that did not return what a guest had stored there.
    pub(crate) wrong_loads: u64,
    /// Pages of host memory that do not hold what was stored.
    pub(crate) misplaced: u64,
    #[serde(skip)]
    expected: Expected,
}

/// Sizes in bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Expected {
    page: u64,
    /// A page of the backing.
    large: u64,
    /// The leaf that it can have.
    leaf: u64,
}

impl Found {
    pub(crate) fn new(layout: &Layout, config: &Config) -> Self {
        let backing = config.guest.backing;
        let large = config.guest.backing_page.0;
        let expected = Expected { page: layout.page, large, leaf: layout.leaf_size(backing).0 };
        Self { expected, ..Self::default() }
    }

    fn expect(&mut self, leaf: Option<&Translation>, size: u64) {
        let right = leaf.is_some_and(|leaf| leaf.leaf == size);
        self.wrong_leaves += u64::from(!right);
    }

    /// Each page of the backing was touched once, and is mapped as largely as can be.
    pub(crate) fn after_create(&mut self, offset: u64, leaf: Option<&Translation>) {
        if offset.is_multiple_of(self.expected.large) {
            self.expect(leaf, self.expected.leaf);
        }
    }

    /// What was written under the log is mapped by pages.
    pub(crate) fn after_update(&mut self, offset: u64, leaf: Option<&Translation>) {
        if offset.is_multiple_of(self.expected.large) {
            self.expect(leaf, self.expected.page);
        }
    }

    /// Everything is mapped as largely as can be, again.
    pub(crate) fn after_adjust(&mut self, _: u64, leaf: Option<&Translation>) {
        self.expect(leaf, self.expected.leaf);
    }
}

impl Findings for Found {
    const CLEAN: &'static str = "every leaf of its size, nothing lost, nothing misplaced";

    fn compared(&self) -> String {
        format!(
            "{} after create; {} after update; {} after adjust",
            self.created.sizes(),
            self.updated.sizes(),
            self.adjusted.sizes()
        )
    }

    fn wrong(&self) -> Vec<(u64, &'static str)> {
        vec![
            (self.wrong_leaves, "pages are not mapped by a leaf of the size that they must have"),
            (self.elsewhere, "translations lead elsewhere than to the page"),
            (self.lost, "pages were written and not in the log"),
            (self.wrong_loads, "loads did not return what was stored last"),
            (self.misplaced, "pages of host memory do not hold what was stored"),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::lay_out;

    fn found() -> Found {
        let layout = lay_out("-b 4M -s anonymous_thp");
        let expected = Expected { page: layout.page, large: 2 << 20, leaf: 2 << 20 };
        Found { expected, ..Found::default() }
    }

    fn judged(judge: Judge, offset: u64, leaf: Option<u64>) -> u64 {
        let leaf = leaf.map(|leaf| Translation { leaf, right: true, young: true });
        let mut found = found();
        judge(&mut found, offset, leaf.as_ref());
        found.wrong_leaves
    }

    #[test]
    fn a_large_page_begins_as_a_block_and_only_its_first_page_counts() {
        assert_eq!(judged(Found::after_create, 0, Some(2 << 20)), 0);
        assert_eq!(judged(Found::after_create, 2 << 20, Some(4096)), 1);
        assert_eq!(judged(Found::after_create, 2 << 20, None), 1);
        assert_eq!(judged(Found::after_create, 4096, None), 0);
    }

    #[test]
    fn what_is_written_under_a_log_is_a_page() {
        assert_eq!(judged(Found::after_update, 0, Some(4096)), 0);
        assert_eq!(judged(Found::after_update, 0, Some(2 << 20)), 1);
        assert_eq!(judged(Found::after_update, 0, None), 1);
    }

    #[test]
    fn in_the_end_every_page_is_in_a_block_again() {
        assert_eq!(judged(Found::after_adjust, 4096, Some(2 << 20)), 0);
        assert_eq!(judged(Found::after_adjust, 4096, Some(4096)), 1);
        assert_eq!(judged(Found::after_adjust, 4096, None), 1);
    }
}
