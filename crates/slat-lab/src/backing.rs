//! What backs guest memory: the memory types of the kernel's KVM tests, under the kernel's names.

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};

use crate::granule::GranuleSize;
use crate::size::Size;

/// Sizes that hugetlb can be asked for.
const HUGE_SIZES: [(&str, u64); 13] = [
    ("16kb", 16 << 10),
    ("64kb", 64 << 10),
    ("512kb", 512 << 10),
    ("1mb", 1 << 20),
    ("2mb", 2 << 20),
    ("8mb", 8 << 20),
    ("16mb", 16 << 20),
    ("32mb", 32 << 20),
    ("256mb", 256 << 20),
    ("512mb", 512 << 20),
    ("1gb", 1 << 30),
    ("2gb", 2 << 30),
    ("16gb", 16 << 30),
];

/// Where guest memory comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Backing {
    /// Whether other processes could map it too.
    pub(crate) shared: bool,
    pub(crate) pages: Pages,
}

/// The pages that a backing is made of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Pages {
    /// Pages of one granule.
    Base,
    /// Transparent huge pages.
    Transparent,
    /// hugetlb pages of the size that one table of pages covers.
    Huge,
    /// hugetlb pages of another size.
    HugeOf(Size),
}

impl Backing {
    /// Bytes of a page of the backing, on a host with this granule.
    pub(crate) fn page_size(self, granule: GranuleSize) -> Size {
        match self.pages {
            Pages::Base => granule.page_size(),
            Pages::Transparent | Pages::Huge => granule.huge_page_size(),
            Pages::HugeOf(size) => size,
        }
    }

    /// The host memory of the model that it means.
    pub(crate) fn of_model(self, granule: GranuleSize) -> slat_model::Backing {
        let page_size = self.page_size(granule).0;
        match (self.pages, self.shared) {
            (Pages::Base, false) => slat_model::Backing::Anonymous,
            (Pages::Base, true) => slat_model::Backing::Shmem,
            (Pages::Transparent, _) => slat_model::Backing::AnonymousThp,
            (_, false) => slat_model::Backing::AnonymousHugetlb { page_size },
            (_, true) => slat_model::Backing::SharedHugetlb { page_size },
        }
    }
}

/// Every backing there is.
fn all() -> impl Iterator<Item = Backing> {
    let plain = [(false, Pages::Base), (false, Pages::Transparent), (true, Pages::Base)];
    let huge = |shared| {
        let sized = HUGE_SIZES.into_iter().map(|(_, size)| Pages::HugeOf(Size(size)));
        std::iter::once(Pages::Huge).chain(sized).map(move |pages| (shared, pages))
    };
    let all = plain.into_iter().chain(huge(false)).chain(huge(true));
    all.map(|(shared, pages)| Backing { shared, pages })
}

impl fmt::Display for Backing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let owner = if self.shared { "shared" } else { "anonymous" };
        match self.pages {
            Pages::Base if self.shared => f.write_str("shmem"),
            Pages::Base => f.write_str("anonymous"),
            Pages::Transparent => f.write_str("anonymous_thp"),
            Pages::Huge => write!(f, "{owner}_hugetlb"),
            Pages::HugeOf(size) => {
                match HUGE_SIZES.into_iter().find(|&(_, bytes)| bytes == size.0) {
                    Some((name, _)) => write!(f, "{owner}_hugetlb_{name}"),
                    None => write!(f, "{owner}_hugetlb_{size}"),
                }
            }
        }
    }
}

impl Serialize for Backing {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// No backing has this name.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("no memory type has this name; `-s help` lists them")]
pub(crate) struct UnknownBacking;

impl FromStr for Backing {
    type Err = UnknownBacking;

    fn from_str(text: &str) -> Result<Self, UnknownBacking> {
        all().find(|backing| backing.to_string() == text).ok_or(UnknownBacking)
    }
}

/// One line for each backing, for `-s help`.
pub(crate) fn list() -> String {
    let line = |backing: Backing| {
        let pages = match backing.pages {
            Pages::Base => "pages of one granule".to_owned(),
            Pages::Transparent | Pages::Huge => {
                "2M pages (32M with --granule 16k, 512M with 64k)".to_owned()
            }
            Pages::HugeOf(size) => format!("{size} pages"),
        };
        format!("{:<26}{pages}", backing.to_string())
    };
    let lines: Vec<_> = all().map(line).collect();
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_listed_name_is_understood() {
        for line in list().lines() {
            let name = line.split_whitespace().next().unwrap();
            assert_eq!(name.parse::<Backing>().unwrap().to_string(), name);
        }
    }

    #[test]
    fn the_names_that_people_use_are_there() {
        let page = |name: &str| name.parse::<Backing>().unwrap().page_size(GranuleSize::K4).0;
        assert_eq!(page("anonymous"), 4096);
        assert_eq!(page("shmem"), 4096);
        assert_eq!(page("anonymous_thp"), 2 << 20);
        assert_eq!(page("anonymous_hugetlb"), 2 << 20);
        assert_eq!(page("anonymous_hugetlb_2mb"), 2 << 20);
        assert_eq!(page("anonymous_hugetlb_1gb"), 1 << 30);
        assert_eq!(page("shared_hugetlb"), 2 << 20);
        assert_eq!(page("shared_hugetlb_1gb"), 1 << 30);
    }

    #[test]
    fn other_names_are_unknown() {
        for name in ["", "anon", "ANONYMOUS", "anonymous_hugetlb_3mb", "shared_thp", "hugetlb"] {
            assert_eq!(name.parse::<Backing>(), Err(UnknownBacking), "{name}");
        }
    }
}
