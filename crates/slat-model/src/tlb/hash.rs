//! How frame numbers are hashed: one multiplication, since nobody chooses them in bad faith.

use std::hash::{BuildHasherDefault, Hasher};

/// Hashes `u64` keys.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct FrameHasher(u64);

pub(crate) type FrameHash = BuildHasherDefault<FrameHasher>;

impl Hasher for FrameHasher {
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(byte.into());
        }
    }

    #[inline(always)]
    fn write_u64(&mut self, n: u64) {
        // 2^64 / golden ratio, odd.
        self.0 = (self.0 ^ n).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    #[inline(always)]
    fn finish(&self) -> u64 {
        self.0 ^ (self.0 >> 32)
    }
}
