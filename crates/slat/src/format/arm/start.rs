//! Where a walk starts: the root's level, for the widths of addresses (Arm ARM DDI 0487, D8.1.10 and D8.2.2).

use super::{Granule, MIN_ADDRESS_BITS, NARROW, Stage2, WIDE};
use crate::{Format, FormatError, Geometry, Level};

impl<G: Granule> Stage2<G> {
    pub(super) const fn lowest_start(address_bits: u32) -> Result<Geometry, FormatError> {
        let mut number = 2;
        loop {
            let Some(start) = Level::new(number) else {
                return Err(FormatError::StartLevel(Level::TOP));
            };
            match Geometry::new(G::SHIFT, Self::INDEX_BITS, address_bits, start) {
                Some(geometry) => return Ok(geometry),
                None => number -= 1,
            }
        }
    }

    /// Output addresses of at most `bits` bits: what `ID_AA64MMFR0_EL1.PARange` says of the CPU. Rounded down to 32,
    /// 36, 40, 42, 44, 48 or 52, and to what the format has. Without this, the CPU is told a width that it may not have;
    /// Arm recommends against that (D8.1.7).
    ///
    /// # Errors
    /// [`FormatError::AddressBits`] if guest-physical addresses are wider; [`FormatError::StartLevel`] if a CPU with
    /// such addresses cannot start at the level that was chosen (Table D8-9).
    pub const fn with_output_bits(mut self, bits: u32) -> Result<Self, FormatError> {
        let limit = if self.wide { WIDE } else { NARROW };
        self.output_bits = match if bits < limit { bits } else { limit } {
            52.. => 52,
            48.. => 48,
            44.. => 44,
            42.. => 42,
            40.. => 40,
            36.. => 36,
            32.. => 32,
            _ => 0,
        };
        if self.geometry.address_bits() > self.output_bits {
            return Err(FormatError::AddressBits {
                bits: self.geometry.address_bits(),
                min: MIN_ADDRESS_BITS,
                max: self.output_bits,
            });
        }
        self.check_start()
    }

    /// The root at `start`, -1 to 2, instead of the level that [`new`](Self::new) chose: a higher one saves
    /// concatenated tables and costs every walk a step.
    ///
    /// # Errors
    /// [`FormatError::StartLevel`] if the level does not resolve the addresses, or not with 16 tables, or is below 2,
    /// or is one that the granule or the CPU does not start at (Table D8-9).
    pub const fn with_start_level(mut self, start: Level) -> Result<Self, FormatError> {
        let bits = self.geometry.address_bits();
        match Geometry::new(G::SHIFT, Self::INDEX_BITS, bits, start) {
            Some(geometry) => {
                self.geometry = geometry;
                self.check_start()
            }
            None => Err(FormatError::StartLevel(start)),
        }
    }

    const fn check_start(self) -> Result<Self, FormatError> {
        let start = self.geometry.start();
        let index = (start.number() + 1) as usize;
        if index < G::START_NEEDS.len() && G::START_NEEDS[index] <= self.output_bits {
            Ok(self)
        } else {
            Err(FormatError::StartLevel(start))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::super::{K4, K16, K64};
    use super::*;

    fn level(number: i8) -> Level {
        Level::new(number).unwrap()
    }

    fn levels() -> impl Iterator<Item = Level> {
        (-1..=3).map(level)
    }

    /// KVM's formula: as few levels as up to 16 concatenated tables allow, at least two; and the tables of the root.
    fn kvm_root(page_shift: u32, address_bits: u32) -> (i8, usize) {
        let levels = (address_bits - 4 - page_shift).div_ceil(page_shift - 3).max(2);
        let start = 4 - levels as i8;
        let above = (page_shift - 3) * levels + page_shift;
        (start, (((1u64 << address_bits) - 1) >> above) as usize + 1)
    }

    fn roots_are_as_kvm_makes_them<G: Granule>() {
        let compare = |g: &Geometry, address_bits| {
            assert_eq!((g.start().number(), g.root_tables()), kvm_root(G::SHIFT, address_bits));
            assert_eq!((g.address_bits(), g.page_shift()), (address_bits, G::SHIFT));
            assert_eq!(g.entries(), 1 << (G::SHIFT - 3));
        };
        for address_bits in 32..=52 {
            compare(Stage2::<G>::wide(address_bits).unwrap().geometry(), address_bits);
            match Stage2::<G>::new(address_bits) {
                Ok(format) => compare(format.geometry(), address_bits),
                Err(e) => {
                    assert!(address_bits > 48);
                    assert_eq!(
                        e,
                        FormatError::AddressBits { bits: address_bits, min: 32, max: 48 }
                    );
                }
            }
        }
        for address_bits in [0, 31, 53, u32::MAX] {
            assert!(
                Stage2::<G>::new(address_bits).is_err() && Stage2::<G>::wide(address_bits).is_err()
            );
        }
    }

    #[test]
    fn roots_of_every_address_width_are_as_kvm_makes_them() {
        roots_are_as_kvm_makes_them::<K4>();
        roots_are_as_kvm_makes_them::<K16>();
        roots_are_as_kvm_makes_them::<K64>();
        let two_levels = Stage2::<K64>::new(42).unwrap();
        assert_eq!(two_levels.geometry().start(), level(2));
        assert_eq!(two_levels.geometry().root_tables(), 1);
    }

    /// Tables D8-20 to D8-41: the values of T0SZ that a start level has, from 2 up.
    fn t0sz_of_start(page_shift: u32, start: i8) -> Range<u32> {
        match (page_shift, start) {
            (12, -1) => 12..16,
            (12, 0) => 12..25,
            (12, 1) => 21..34,
            (12, 2) => 30..43,
            (14, 0) => 12..17,
            (14, 1) => 13..28,
            (14, 2) => 24..39,
            (16, 1) => 12..22,
            (16, 2) => 18..35,
            _ => 0..0,
        }
    }

    /// Table D8-9: the smallest physical address width of a CPU that starts at this level.
    fn width_for_start(page_shift: u32, start: i8) -> u32 {
        match (page_shift, start) {
            (12, -1) | (14, 0) => 52,
            (12, 0) | (16, 1) => 44,
            (14, 1) => 42,
            _ => 32,
        }
    }

    fn starts_are_as_in_the_manual<G: Granule>() {
        let both = [(48, Stage2::<G>::new as fn(u32) -> _), (52, Stage2::wide)];
        for (limit, make) in both {
            for address_bits in 32..=limit {
                let format = make(address_bits).unwrap();
                for start in levels() {
                    let t0sz = t0sz_of_start(G::SHIFT, start.number());
                    let needs = width_for_start(G::SHIFT, start.number());
                    let exists = t0sz.contains(&(64 - address_bits));
                    let got = format.with_start_level(start);
                    assert_eq!(got.is_ok(), exists && needs <= limit, "{address_bits} {start:?}");
                    assert!(got.err().is_none_or(|e| e == FormatError::StartLevel(start)));
                    for width in [32, 36, 40, 42, 44, 48, 52] {
                        let fits = address_bits <= width.min(limit);
                        let on_cpu = got.is_ok_and(|f| f.with_output_bits(width).is_ok());
                        assert_eq!(on_cpu, got.is_ok() && fits && needs <= width);
                    }
                }
            }
        }
    }

    #[test]
    fn start_levels_are_those_of_the_manual() {
        starts_are_as_in_the_manual::<K4>();
        starts_are_as_in_the_manual::<K16>();
        starts_are_as_in_the_manual::<K64>();
    }

    #[test]
    fn output_width_is_what_cpu_and_format_both_have() {
        for (cpu, narrow, wide) in
            [(39, 36, 36), (40, 40, 40), (47, 44, 44), (51, 48, 48), (56, 48, 52)]
        {
            let bits = |f: Stage2<K64>| f.with_output_bits(cpu).unwrap().output_bits();
            assert_eq!(bits(Stage2::new(36).unwrap()), narrow);
            assert_eq!(bits(Stage2::wide(36).unwrap()), wide);
        }
        let format = Stage2::<K4>::new(40).unwrap();
        let error = |max| Err(FormatError::AddressBits { bits: 40, min: 32, max });
        assert_eq!(format.with_output_bits(39), error(36));
        assert_eq!(format.with_output_bits(31), error(0));
    }
}
