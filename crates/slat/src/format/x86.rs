//! What EPT and NPT have in common: the shape of a tree, and where the address and the software bits are.

use super::Dirty;
use crate::{FormatError, Geometry, Level};

pub(super) const PAGE_SHIFT: u32 = 12;
const INDEX_BITS: u32 = PAGE_SHIFT - 3;
/// The widest address that an entry can hold.
pub(super) const MAX_BITS: u32 = 52;
/// What the top table of four resolves has at least one bit.
const MIN_BITS: u32 = PAGE_SHIFT + 3 * INDEX_BITS + 1;
const MIN_OUTPUT_BITS: u32 = 32;
pub(super) const ADDRESS: u64 = (1 << MAX_BITS) - (1 << PAGE_SHIFT);
/// Bits 55:52, which hardware ignores.
pub(super) const SOFTWARE_SHIFT: u32 = 52;

const fn level(number: i8) -> Level {
    match Level::new(number) {
        Some(level) => level,
        None => Level::LAST,
    }
}

/// The level of 1 GiB blocks.
pub(super) const GIGABYTE: Level = level(1);
/// The level of 2 MiB blocks.
pub(super) const MEGABYTES: Level = level(2);

/// Four levels, or five where four do not resolve the addresses. The root is one table.
pub(super) const fn geometry(address_bits: u32) -> Result<Geometry, FormatError> {
    let start = if address_bits > PAGE_SHIFT + 4 * INDEX_BITS { level(-1) } else { level(0) };
    match Geometry::new(PAGE_SHIFT, INDEX_BITS, address_bits, start) {
        Some(geometry) => Ok(geometry),
        None => Err(FormatError::AddressBits { bits: address_bits, min: MIN_BITS, max: MAX_BITS }),
    }
}

pub(super) const fn output_bits(bits: u32) -> Result<u32, FormatError> {
    if bits < MIN_OUTPUT_BITS || bits > MAX_BITS {
        return Err(FormatError::AddressBits { bits, min: MIN_OUTPUT_BITS, max: MAX_BITS });
    }
    Ok(bits)
}

/// Dirty state in words, from the bit that says that somebody asks for it and the flag itself.
pub(super) const fn dirty(template: u64, tracked: u64, dirty: u64) -> Dirty {
    match (template & tracked != 0, template & dirty != 0) {
        (false, _) => Dirty::Untracked,
        (true, false) => Dirty::Clean,
        (true, true) => Dirty::Dirty,
    }
}
