//! Which pages the guest touched first, in order: for the lab, which plays them again on its model.
//!
//! A line for each run of pages that were touched one after the other, upwards, in the same way.

use alloc::vec::Vec;
use core::fmt;

/// Pages that were touched upwards.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Run {
    first: u64,
    count: u64,
    write: bool,
}

/// All of them.
#[derive(Debug, Default)]
pub struct Touches(Vec<Run>);

impl Touches {
    /// The guest has touched this page.
    pub fn touch(&mut self, page: u64, write: bool) {
        match self.0.last_mut() {
            Some(run) if run.write == write && run.first + run.count == page => run.count += 1,
            _ => self.0.push(Run { first: page, count: 1, write }),
        }
    }

    /// In order.
    pub fn runs(&self) -> &[Run] {
        &self.0
    }
}

impl fmt::Display for Run {
    /// `first+count` and `w` or `r`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}+{}{}", self.first, self.count, if self.write { 'w' } else { 'r' })
    }
}

#[cfg(test)]
mod tests {
    use std::string::ToString;

    use super::*;

    #[test]
    fn pages_in_a_row_become_one_run_unless_the_access_differs() {
        let mut touches = Touches::default();
        for (page, write) in [(5, false), (6, false), (7, true), (8, true), (2, true)] {
            touches.touch(page, write);
        }
        let runs: Vec<_> = touches.runs().iter().map(ToString::to_string).collect();
        assert_eq!(runs, ["5+2r", "7+2w", "2+1w"]);
    }
}
