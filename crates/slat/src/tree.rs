//! A tree of tables: its root, its shape, and whose translations it makes.

use crate::machine::Machine;
use crate::{Format, Hpa};

/// One second-level address space.
#[derive(Debug)]
pub struct Tree<'m, F: Format, M: Machine> {
    pub(crate) machine: &'m M,
    pub(crate) format: F,
    pub(crate) root: Hpa,
}
