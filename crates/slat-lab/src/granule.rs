//! Which granule the tables have, and which block sizes go with it.

use clap::ValueEnum;
use serde::Serialize;
use slat::format::arm::{Granule, K4, K16, K64, Stage2};
use slat::{Format, FormatError, Level};

use crate::size::Size;

/// The granule of the stage-2 tables: the host's page size.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize)]
pub(crate) enum GranuleSize {
    /// 4 KiB pages; blocks of 2 MiB and 1 GiB
    #[value(name = "4k", alias = "4K")]
    #[serde(rename = "4k")]
    K4,
    /// 16 KiB pages; blocks of 32 MiB
    #[value(name = "16k", alias = "16K")]
    #[serde(rename = "16k")]
    K16,
    /// 64 KiB pages; blocks of 512 MiB
    #[value(name = "64k", alias = "64K")]
    #[serde(rename = "64k")]
    K64,
}

impl GranuleSize {
    /// Bytes of a page.
    pub(crate) fn page_size(self) -> Size {
        Size(1 << self.shift())
    }

    /// Bytes that one whole table of pages covers: a transparent huge page, and what hugetlb gives by default.
    pub(crate) fn huge_page_size(self) -> Size {
        Size(1 << (2 * self.shift() - 3))
    }

    /// The sizes of a leaf above a page in tables for addresses of `bits` bits, ascending. A root too low for the
    /// larger blocks leaves them out.
    pub(crate) fn block_sizes(self, bits: u32) -> Vec<Size> {
        match self {
            Self::K4 => block_sizes::<K4>(bits),
            Self::K16 => block_sizes::<K16>(bits),
            Self::K64 => block_sizes::<K64>(bits),
        }
    }

    fn shift(self) -> u32 {
        match self {
            Self::K4 => K4::SHIFT,
            Self::K16 => K16::SHIFT,
            Self::K64 => K64::SHIFT,
        }
    }
}

/// The format for guest-physical addresses of `bits` bits: that of 52-bit addresses only where it is needed.
///
/// # Errors
/// Widths outside 32 to 52 bits.
pub(crate) fn format<G: Granule>(bits: u32) -> Result<Stage2<G>, FormatError> {
    if bits > 48 { Stage2::wide(bits) } else { Stage2::new(bits) }
}

fn block_sizes<G: Granule>(bits: u32) -> Vec<Size> {
    let Ok(format) = format::<G>(bits) else {
        return Vec::new();
    };
    let geometry = format.geometry();
    let levels = (geometry.start().number()..=2).rev().filter_map(Level::new);
    let blocks = levels.filter(|&level| format.leaf_allowed(level));
    blocks.map(|level| Size(geometry.size(level))).collect()
}

/// Sizes in a row, for messages.
pub(crate) fn list(sizes: &[Size]) -> String {
    let names: Vec<_> = sizes.iter().map(Size::to_string).collect();
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_granule_has_the_blocks_of_the_architecture() {
        let sizes = |granule: GranuleSize, bits| list(&granule.block_sizes(bits));
        for bits in [40, 48, 52] {
            assert_eq!(sizes(GranuleSize::K4, bits), "2M, 1G");
            assert_eq!(sizes(GranuleSize::K16, bits), "32M");
            assert_eq!(sizes(GranuleSize::K64, bits), "512M");
        }
        assert_eq!(sizes(GranuleSize::K4, 32), "2M");
    }

    #[test]
    fn the_smallest_block_is_the_huge_page() {
        for &granule in GranuleSize::value_variants() {
            assert_eq!(granule.block_sizes(40).first(), Some(&granule.huge_page_size()));
        }
    }
}
