//! The dice of one vCPU: the same seed gives the same guest, on any computer and in any version.

use rand_xoshiro::Xoshiro256PlusPlus;
use rand_xoshiro::rand_core::{Rng, SeedableRng};

/// A stream of random numbers.
#[derive(Clone, Debug)]
pub(crate) struct Dice(Xoshiro256PlusPlus);

impl Dice {
    /// The stream of vCPU `index` in a run with `seed`.
    pub(crate) fn new(seed: u64, index: u32) -> Self {
        Self(Xoshiro256PlusPlus::seed_from_u64(seed.wrapping_add(index.into())))
    }

    /// A number below `end`, each as likely as the others to one in 2^64; 0 if `end` is.
    #[inline]
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        ((u128::from(self.0.next_u64()) * u128::from(end)) >> 64) as u64
    }

    /// True `percent` times in a hundred; 0 and 100 need no dice.
    #[inline]
    pub(crate) fn happens(&mut self, percent: u32) -> bool {
        match percent {
            0 => false,
            100 => true,
            _ => self.below(100) < percent.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_numbers_and_vcpus_differ() {
        let first = |seed, index| Dice::new(seed, index).below(u64::MAX);
        assert_eq!(first(1, 0), first(1, 0));
        assert_ne!(first(1, 0), first(1, 1));
        // Recorded runs depend on it.
        assert_eq!(Dice::new(1, 0).below(1 << 20), 851_037);
    }

    #[test]
    fn percentages_are_kept() {
        let mut dice = Dice::new(7, 3);
        let hits = (0..100_000).filter(|_| dice.happens(30)).count();
        assert!((29_000..31_000).contains(&hits), "{hits}");
        assert!(!dice.happens(0) && dice.happens(100));
        assert!((0..1000).all(|_| dice.below(3) < 3));
        assert_eq!(dice.below(0), 0);
    }
}
