//! How many pages are idle when they are about to be marked so, and how many may be: the kernel's two limits.

use std::fmt;
use std::ops::AddAssign;

use serde::Serialize;

use crate::failure::Failure;
use crate::translations::Translation;

/// Guest pages before a marking.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub(crate) struct Idle {
    pub(crate) pages: u64,
    /// Pages without a translation, of which nobody can tell.
    pub(crate) unmapped: u64,
    /// Pages whose access flag was clear still, although a guest had used them.
    pub(crate) still_idle: u64,
    /// Leaves whose flag the marking has cleared.
    pub(crate) cleared: u64,
}

impl Idle {
    /// One more page.
    pub(crate) fn add(&mut self, translation: Option<&Translation>) {
        self.pages += 1;
        match translation {
            None => self.unmapped += 1,
            Some(Translation { young: false, .. }) => self.still_idle += 1,
            Some(_) => {}
        }
    }

    /// Fewer than one in a hundred pages of a vCPU may be unmapped.
    ///
    /// # Errors
    /// [`Failure::Run`].
    pub(crate) fn check_mapped(&self, vcpu: u32) -> Result<(), Failure> {
        let Self { pages, unmapped, .. } = self;
        if unmapped * 100 < *pages {
            return Ok(());
        }
        Err(Failure::Run(format!("vCPU {vcpu}: {unmapped} of {pages} pages have no translation")))
    }

    /// Fewer than one in ten may be idle still.
    ///
    /// # Errors
    /// How many are.
    pub(crate) fn check_used(&self, vcpu: u32) -> Result<(), String> {
        let Self { pages, still_idle, .. } = self;
        if still_idle * 10 < *pages {
            return Ok(());
        }
        Err(format!("vCPU {vcpu}: {still_idle} of {pages} pages are idle although they were used"))
    }
}

impl AddAssign for Idle {
    fn add_assign(&mut self, other: Self) {
        self.pages += other.pages;
        self.unmapped += other.unmapped;
        self.still_idle += other.still_idle;
        self.cleared += other.cleared;
    }
}

impl fmt::Display for Idle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pages, unmapped, still_idle, cleared } = self;
        write!(
            f,
            "{pages} pages, {unmapped} without a translation, {still_idle} idle still, {cleared} flags cleared"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn idle(pages: u64, unmapped: u64, still_idle: u64) -> Idle {
        Idle { pages, unmapped, still_idle, cleared: 0 }
    }

    #[test]
    fn a_page_is_unmapped_or_idle_or_used() {
        let mut idle = Idle::default();
        let leaf = Translation { leaf: 4096, right: true, young: true };
        idle.add(None);
        idle.add(Some(&leaf));
        idle.add(Some(&Translation { young: false, ..leaf }));
        assert_eq!(idle, self::idle(3, 1, 1));
    }

    #[test]
    fn less_than_one_per_cent_may_be_unmapped() {
        assert!(idle(1, 0, 0).check_mapped(0).is_ok());
        assert!(idle(1000, 9, 0).check_mapped(0).is_ok());
        let failure = idle(1000, 10, 0).check_mapped(3).unwrap_err();
        assert_eq!(failure.to_string(), "vCPU 3: 10 of 1000 pages have no translation");
    }

    #[test]
    fn less_than_ten_per_cent_may_be_idle_still() {
        assert!(idle(1, 0, 0).check_used(0).is_ok());
        assert!(idle(1000, 0, 99).check_used(0).is_ok());
        assert!(idle(1000, 0, 100).check_used(0).unwrap_err().contains("100 of 1000"));
    }
}
