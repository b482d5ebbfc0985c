//! Where guest memory lies, and whose it is.

use alloc::format;
use alloc::string::{String, ToString};
use core::ops::Range;

use crate::options::{Options, Workload};
use crate::program::{PAGE, PAGE_BITS};

/// Pages that `dirty-log-test` has besides, so that its memory does not end with a word of the bitmap.
const MORE_PAGES: u64 = 3;
/// Below are the program and what vCPUs have for themselves.
const LOWEST: u64 = 2 << 30;

/// The memory of a workload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// vCPUs.
    pub vcpus: u32,
    /// Where it begins.
    pub gpa: u64,
    /// Bytes.
    pub size: u64,
    /// Memslots of one size.
    pub slots: u32,
    /// Pages of each vCPU's part; all of it is every vCPU's where this is all of it.
    part: u64,
}

impl Layout {
    /// Of a guest with so many vCPUs.
    ///
    /// # Errors
    /// What does not fit.
    pub fn new(options: &Options, vcpus: u32) -> Result<Self, String> {
        let bytes = options.bytes.next_multiple_of(PAGE);
        let (size, part) = match options.workload {
            Workload::PageTable => {
                let size = bytes.next_multiple_of(options.backing);
                (size, size)
            }
            Workload::DirtyLogTest => {
                let size = bytes + MORE_PAGES * PAGE;
                (size, size)
            }
            Workload::DirtyLog | Workload::DemandPaging => {
                let size = bytes.checked_mul(vcpus.into()).ok_or("bytes: too much")?;
                (size, if options.overlap { size } else { bytes })
            }
        };
        let slots = if options.workload == Workload::DirtyLog { options.slots } else { 1 };
        if !size.is_multiple_of(u64::from(slots) * PAGE) {
            return Err(format!("slots={slots}: does not divide {} pages", size / PAGE));
        }
        if options.check && size / PAGE > 1 << PAGE_BITS {
            return Err("check=on: more pages than it can tell apart".to_string());
        }
        let end = 1_u64 << options.ipa_bits;
        let top = end.checked_sub(size.next_multiple_of(options.backing));
        let gpa = options.gpa.or(top).unwrap_or(0);
        let fits = gpa.checked_add(size).is_some_and(|last| last <= end);
        if gpa < LOWEST || !fits || !gpa.is_multiple_of(PAGE) {
            return Err(format!(
                "gpa={gpa:#x}: {size:#x} bytes of guest memory must lie on whole pages from {LOWEST:#x} to {end:#x}"
            ));
        }
        Ok(Self { vcpus, gpa, size, slots, part: part / PAGE })
    }

    /// All pages.
    pub fn pages(&self) -> u64 {
        self.size / PAGE
    }

    /// Whether every vCPU uses all of it.
    pub fn overlaps(&self) -> bool {
        self.vcpus > 1 && self.part == self.pages()
    }

    /// The pages that a vCPU uses.
    pub fn part(&self, index: u32) -> Range<u64> {
        let first = if self.overlaps() { 0 } else { u64::from(index) * self.part };
        first..first + self.part
    }

    /// Bytes of a memslot.
    pub fn slot_size(&self) -> u64 {
        self.size / u64::from(self.slots)
    }

    /// Pages of a memslot.
    pub fn slot_pages(&self) -> u64 {
        self.slot_size() / PAGE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(line: &str, vcpus: u32) -> Result<Layout, String> {
        Layout::new(&Options::parse(line).unwrap(), vcpus)
    }

    #[test]
    fn each_vcpu_has_its_part_unless_they_overlap() {
        let apart = layout("bytes=1M", 4).unwrap();
        assert_eq!((apart.gpa, apart.size), ((1 << 40) - (4 << 20), 4 << 20));
        assert_eq!((apart.part(3), apart.overlaps()), (768..1024, false));
        let overlapping = layout("bytes=1M overlap=on", 4).unwrap();
        assert_eq!((overlapping.part(3), overlapping.overlaps()), (0..1024, true));
        assert!(!layout("overlap=on", 1).unwrap().overlaps());
    }

    #[test]
    fn large_pages_begin_where_blocks_can() {
        assert_eq!(layout("bytes=3M backing=2m", 1).unwrap().gpa, (1 << 40) - (4 << 20));
        let shared = layout("workload=page-table bytes=3M backing=2m", 2).unwrap();
        assert_eq!((shared.size, shared.part(1)), (4 << 20, 0..1024));
        assert_eq!(layout("workload=dirty-log-test bytes=1M", 2).unwrap().pages(), 259);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        assert!(layout("bytes=1M slots=3", 1).unwrap_err().contains("slots=3"));
        assert!(layout("gpa=0x1000", 1).unwrap_err().contains("gpa=0x1000"));
        assert!(layout("gpa=0xffffffffff", 1).is_err());
        assert!(layout("bytes=8G ipa-bits=32", 1).is_err());
        assert!(layout("bytes=99999999G", 8).is_err());
    }
}
