//! `VTCR_EL2`: what the hardware must be told about a tree before it walks it (Arm ARM DDI 0487, D24.2.224).

use super::{Granule, Stage2};

const SL0_SHIFT: u32 = 6;
/// Inner write-back, read- and write-allocate.
const IRGN0_WRITE_BACK: u64 = 0b01 << 8;
/// Outer write-back, read- and write-allocate.
const ORGN0_WRITE_BACK: u64 = 0b01 << 10;
const SH0_INNER: u64 = 0b11 << 12;
const TG0_SHIFT: u32 = 14;
const PS_SHIFT: u32 = 16;
/// VMIDs of 16 bits.
const VS: u64 = 1 << 19;
const HA: u64 = 1 << 21;
const HD: u64 = 1 << 22;
const RES1: u64 = 1 << 31;
const DS: u64 = 1 << 32;
/// Start level -1, with SL0 zero.
const SL2: u64 = 1 << 33;

impl<G: Granule> Stage2<G> {
    /// The value of `VTCR_EL2` for trees of this format.
    ///
    /// Tables are walked as write-back, inner-shareable memory, and VMIDs have 16 bits: clear bit 19 on a CPU without
    /// FEAT_VMID16. No feature is on that this format was not built with.
    pub const fn vtcr(&self) -> u64 {
        let t0sz = 64 - self.geometry.address_bits() as u64;
        let start = match self.geometry.start().number() {
            -1 => SL2,
            level => ((G::SL0_LEVEL - level) as u64) << SL0_SHIFT,
        };
        let ps: u64 = match self.output_bits {
            32 => 0b000,
            36 => 0b001,
            40 => 0b010,
            42 => 0b011,
            44 => 0b100,
            48 => 0b101,
            _ => 0b110,
        };
        t0sz | start
            | IRGN0_WRITE_BACK
            | ORGN0_WRITE_BACK
            | SH0_INNER
            | G::TG0 << TG0_SHIFT
            | ps << PS_SHIFT
            | VS
            | if self.hardware_access { HA } else { 0 }
            | if self.hardware_dirty { HD } else { 0 }
            | RES1
            | if self.wide && G::LPA2 { DS } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{K4, K16, K64};
    use super::*;
    use crate::{Format, Level};

    /// A format can be a constant.
    const CONSTANT: Stage2<K4> = match Stage2::new(40) {
        Ok(format) => format,
        Err(_) => panic!(),
    };

    #[test]
    fn vtcr_is_what_xen_prints_at_boot() {
        let vtcr = |bits| Stage2::<K4>::new(bits).unwrap().with_output_bits(bits).unwrap().vtcr();
        // "40-bit IPA with 40-bit PA and 16-bit VMID, 3 levels with order-1 root".
        assert_eq!(vtcr(40), 0x800a_3558);
        // "44-bit IPA with 44-bit PA and 8-bit VMID, 4 levels with order-0 root".
        assert_eq!(vtcr(44) & !(1 << 19), 0x8004_3594);
    }

    #[test]
    fn vtcr_is_as_in_the_manual() {
        // Always: RES1, VS, SH0 inner shareable, ORGN0 and IRGN0 write-back write-allocate.
        let always = 1 << 31 | 1 << 19 | 0b11 << 12 | 0b01 << 10 | 0b01 << 8;
        let manual = |list: &[u64]| list.iter().fold(always, |sum, field| sum | field);
        let ps = |value: u64| value << 16;
        let tg0 = |value: u64| value << 14;
        let sl0 = |value: u64| value << 6;
        let t0sz = |value: u64| value;
        let (ds, sl2) = (1 << 32, 1 << 33);

        // Four levels without concatenation: 4K starts at level 0, SL0 0b10.
        let four = Stage2::<K4>::new(48).unwrap();
        assert_eq!(four.vtcr(), manual(&[ps(0b101), tg0(0b00), sl0(0b10), t0sz(16)]));
        // 34 bits: 16 tables at level 2, SL0 0b00.
        let small = Stage2::<K4>::new(34).unwrap().with_output_bits(36).unwrap();
        assert_eq!(small.vtcr(), manual(&[ps(0b001), tg0(0b00), sl0(0b00), t0sz(30)]));
        // 4K with DS: 16 tables at level 0, or one at level -1 by SL2.
        let wide = Stage2::<K4>::wide(52).unwrap();
        assert_eq!(wide.vtcr(), manual(&[ds, ps(0b110), tg0(0b00), sl0(0b10), t0sz(12)]));
        let top = wide.with_start_level(Level::TOP).unwrap();
        assert_eq!(top.vtcr(), manual(&[sl2, ds, ps(0b110), tg0(0b00), sl0(0b00), t0sz(12)]));
        // 16K: level 2 is 0b01, level 1 is 0b10, level 0 (with DS) is 0b11.
        let vtcr = |bits| Stage2::<K16>::new(bits).unwrap().vtcr();
        assert_eq!(vtcr(40), manual(&[ps(0b101), tg0(0b10), sl0(0b01), t0sz(24)]));
        assert_eq!(vtcr(48), manual(&[ps(0b101), tg0(0b10), sl0(0b10), t0sz(16)]));
        let wide = Stage2::<K16>::wide(52).unwrap();
        assert_eq!(wide.vtcr(), manual(&[ds, ps(0b110), tg0(0b10), sl0(0b11), t0sz(12)]));
        // 64K: the same levels; DS is RES0.
        let vtcr = |bits| Stage2::<K64>::new(bits).unwrap().vtcr();
        assert_eq!(vtcr(42), manual(&[ps(0b101), tg0(0b01), sl0(0b01), t0sz(22)]));
        assert_eq!(vtcr(48), manual(&[ps(0b101), tg0(0b01), sl0(0b10), t0sz(16)]));
        let wide = Stage2::<K64>::wide(52).unwrap();
        assert_eq!(wide.vtcr(), manual(&[ps(0b110), tg0(0b01), sl0(0b10), t0sz(12)]));
    }

    #[test]
    fn vtcr_names_the_output_width() {
        // As ID_AA64MMFR0_EL1.PARange, Table D8-5.
        for (range, bits) in [32, 36, 40, 42, 44, 48, 52].into_iter().enumerate() {
            let format = Stage2::<K64>::wide(32).unwrap().with_output_bits(bits).unwrap();
            assert_eq!(format.vtcr() >> 16 & 0b111, range as u64);
        }
    }

    #[test]
    fn vtcr_turns_on_the_hardware_updates_that_were_asked_for() {
        let (ha, hd) = (1 << 21, 1 << 22);
        let set = |format: Stage2<K4>| format.vtcr() & (ha | hd);
        assert_eq!(set(CONSTANT), 0);
        assert_eq!(set(CONSTANT.with_hardware_access(true)), ha);
        let dirty = CONSTANT.with_hardware_dirty(true);
        assert_eq!(set(dirty), ha | hd);
        assert_eq!(set(dirty.with_hardware_dirty(false)), ha);
        assert_eq!(set(dirty.with_hardware_access(false)), 0);
        assert!(!dirty.with_hardware_access(false).tracks_dirty());
    }
}
