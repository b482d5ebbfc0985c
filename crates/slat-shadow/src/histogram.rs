//! How long reverse maps are.

use slat::Machine;

use crate::memory::SIZES;
use crate::rmap::ReverseMaps;
use crate::shadow::Shadow;

/// How many frames have how many mappings, for each page size: 4 KiB, 2 MiB, 1 GiB.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Histogram {
    /// By page size: frames with 0, 1, 2 to 3, 4 to 7, … 512 to 1023, and more mappings.
    pub frames: [[u64; Self::BUCKETS]; SIZES],
}

impl Histogram {
    /// Ranges of counts.
    pub const BUCKETS: usize = 12;

    /// The counts of range `bucket`: the first, and the last if there is one.
    pub const fn range(bucket: usize) -> (usize, Option<usize>) {
        match bucket {
            0 => (0, Some(0)),
            1..Self::BUCKETS => {
                let first = 1 << (bucket - 1);
                (first, if bucket + 1 < Self::BUCKETS { Some(2 * first - 1) } else { None })
            }
            _ => (usize::MAX, None),
        }
    }
}

impl<M: Machine, R: ReverseMaps> Shadow<'_, M, R> {
    /// How long the reverse maps are now. Costs a look at each.
    pub fn histogram(&self) -> Histogram {
        let mut histogram = Histogram::default();
        for area in self.areas.iter() {
            for (height, counts) in histogram.frames.iter_mut().enumerate() {
                for head in area.heads(height) {
                    let count = self.maps.count(head);
                    let bucket = count.checked_ilog2().map_or(0, |bits| bits as usize + 1);
                    counts[bucket.min(Histogram::BUCKETS - 1)] += 1;
                }
            }
        }
        histogram
    }
}
