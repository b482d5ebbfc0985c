//! Arm: publish and invalidate at EL2 (Arm ARM DDI 0487, D8.17 "TLB maintenance").
//!
//! # The sequence
//! `dsb ishst` completes the entries' stores; the tree's VMID is made current; invalidations by IPA remove what caches
//! stage 2 alone; `dsb ish` completes them, since a walk that began before could otherwise combine the old stage 2 with
//! stage 1 and cache the result after the next step; `tlbi vmalle1is` removes what caches both stages combined, which
//! invalidations by IPA need not touch (C5.5.14); `dsb ish` completes that, on every CPU, including the accesses that
//! used what is gone; `isb` does the same for this CPU's instruction fetch. It runs with preemption off: on another CPU
//! another VMID is current.
//!
//! # By address, or everything
//! Combined translations go in either case, so invalidating everything loses only what caches stage 2 alone. See
//! [`SINGLES`] and [`RANGE_PAGES`] for where the line is.

use crate::machine::Machine;
use crate::maintenance::{Context, Features, Instruction, Invalidation, Maintenance};
use crate::{Gpa, GpaRange, Hpa, Level};

/// How many invalidations by single IPA one sequence may hold before everything is invalidated instead.
///
/// Each is a message to every CPU of the domain. 64 is what one word of the dirty log asks for, the largest unit whose
/// pages operations invalidate apart; a table of pages (512 and more) costs more messages than refilling the stage-2
/// caches of a few vCPUs costs walks.
pub const SINGLES: u64 = 64;

/// How many granules one sequence may invalidate by range before everything is invalidated instead: what a single
/// `tlbi ripas2e1is` can cover, `32 << (5 * 3 + 1)` (8G of 4K granules). No TLB holds as much.
pub const RANGE_PAGES: u64 = 32 << 16;

/// Up to so many steps, single invalidations are used although there are ranges: a range begins at a multiple of 64K
/// and counts pairs, so an odd one takes as many instructions and removes neighbours too.
const FEW: u64 = 4;

/// The sequences of Armv8-A and later.
#[derive(Clone, Copy, Debug)]
pub struct Arm;

impl Maintenance for Arm {
    fn publish<M: Machine>(machine: &M) {
        machine.execute(Instruction::DsbIshst);
    }

    fn invalidate<M: Machine>(machine: &M, context: &Context, what: Invalidation) {
        machine.preemption(true);
        machine.execute(Instruction::DsbIshst);
        machine.execute(Instruction::EnterContext(context.root));
        let plan = Plan::new(machine.features(), context.page_shift, what);
        if plan.execute(machine) {
            machine.execute(Instruction::DsbIsh);
            machine.execute(Instruction::TlbiVmalle1is);
        } else {
            machine.execute(Instruction::TlbiVmalls12e1is);
        }
        machine.execute(Instruction::DsbIsh);
        machine.execute(Instruction::Isb);
        machine.execute(Instruction::LeaveContext);
        machine.preemption(false);
    }

    fn invalidate_local<M: Machine>(machine: &M, context: &Context, gpa: Gpa) {
        let page_shift = context.page_shift;
        machine.preemption(true);
        machine.execute(Instruction::DsbNshst);
        machine.execute(Instruction::EnterContext(context.root));
        machine.execute(Instruction::TlbiIpas2e1 { ipa: gpa, page_shift, level: None });
        machine.execute(Instruction::DsbNsh);
        machine.execute(Instruction::TlbiVmalle1);
        machine.execute(Instruction::DsbNsh);
        machine.execute(Instruction::Isb);
        machine.execute(Instruction::LeaveContext);
        machine.preemption(false);
    }

    /// `VTTBR_EL2`: VMID in bits 63:48, address bits 47:1 in place, address bits 51:48 in bits 5:2 where there are any
    /// (Arm ARM, D24.2 "VTTBR_EL2"). CnP is clear.
    fn root(table: Hpa, identifier: u16) -> u64 {
        (table.0 & 0xffff_ffff_fffe) | (table.0 >> 48 & 0xf) << 2 | u64::from(identifier) << 48
    }
}

impl Arm {
    /// Removes every EL1&0 translation of every VMID from every CPU, complete on return: what makes VMIDs usable for
    /// another tree.
    pub fn invalidate_all<M: Machine>(machine: &M) {
        machine.execute(Instruction::DsbIshst);
        machine.execute(Instruction::TlbiAlle1is);
        machine.execute(Instruction::DsbIsh);
        machine.execute(Instruction::Isb);
    }
}

/// What the by-address part of one sequence is made of.
enum Plan {
    /// `count` invalidations of one IPA each, `step` bytes apart. Where the leaf is a block, one IPA in it is enough:
    /// every piece in which a TLB cached the block goes too (D8.17, RTVTYQ).
    Singles { first: u64, count: u64, step: u64, page_shift: u32, level: Option<Level> },
    /// `pages` granules from `first`, by range.
    Range { first: u64, pages: u64, page_shift: u32, level: Option<Level> },
    /// No part by address.
    Everything,
}

impl Plan {
    fn new(features: Features, page_shift: u32, what: Invalidation) -> Self {
        let Some(range) = what.range.filter(|_| page_shift < 32) else { return Self::Everything };
        let level = what.level;
        let shift = level.and_then(|level| leaf_shift(page_shift, level)).unwrap_or(page_shift);
        let Some((first, count)) = steps(range, shift) else { return Self::Everything };
        // Without the feature the field is RES0.
        let level = level.filter(|_| features.ttl);
        if features.tlb_range && count > FEW && granule(page_shift) != 0 {
            // A range instruction can begin at multiples of 64K only when `VTCR_EL2.DS` is 1 (C5.5.22), so it always
            // does. If that widens the range there is no hint: leaves before it may be of another level.
            let lead = first & 0xffff;
            let pages = (count << (shift - page_shift)) + (lead >> page_shift);
            if pages <= RANGE_PAGES {
                let level = level.filter(|_| lead == 0);
                return Self::Range { first: first - lead, pages, page_shift, level };
            }
        }
        if count <= SINGLES {
            return Self::Singles { first, count, step: 1 << shift, page_shift, level };
        }
        Self::Everything
    }

    /// Executes the part; `false` if there is none.
    fn execute<M: Machine>(&self, machine: &M) -> bool {
        match *self {
            Self::Singles { first, count, step, page_shift, level } => {
                for n in 0..count {
                    let ipa = Gpa(first + n * step);
                    machine.execute(Instruction::TlbiIpas2e1is { ipa, page_shift, level });
                }
                true
            }
            Self::Range { first, pages, page_shift, level } => {
                by_range(machine, first, pages, page_shift, level);
                true
            }
            Self::Everything => false,
        }
    }
}

/// The fewest range instructions, largest scale first, and a single one for an odd last granule. Each begins at a
/// multiple of 64K and of the level's leaf size if the first does: a scale above 0 counts at least 64 granules, and
/// what is left for scale 0 is less than a block.
fn by_range<M: Machine>(
    machine: &M,
    first: u64,
    mut pages: u64,
    page_shift: u32,
    level: Option<Level>,
) {
    let mut ipa = first;
    for scale in (0..4u8).rev() {
        let units = pages >> (5 * scale + 1);
        if units > 0 {
            let num = units as u8 - 1;
            machine.execute(Instruction::TlbiRipas2e1is {
                ipa: Gpa(ipa),
                page_shift,
                scale,
                num,
                level,
            });
            let covered = units << (5 * scale + 1);
            ipa += covered << page_shift;
            pages -= covered;
        }
    }
    if pages > 0 {
        machine.execute(Instruction::TlbiIpas2e1is { ipa: Gpa(ipa), page_shift, level });
    }
}

/// Where the first step of `1 << shift` bytes that touches the range begins, and how many do. `None` for ranges that no
/// address register can hold.
fn steps(range: GpaRange, shift: u32) -> Option<(u64, u64)> {
    if range.end().0 > 1 << 56 {
        return None;
    }
    let first = range.start().0 >> shift;
    let last = (range.end().0 - 1) >> shift;
    Some((first << shift, last - first + 1))
}

/// log2 of the bytes of a leaf; `None` at levels that have none.
fn leaf_shift(page_shift: u32, level: Level) -> Option<u32> {
    let shift = page_shift + level.height() * page_shift.saturating_sub(3);
    if level >= Level::LAST || (level.number() >= 0 && shift < 56) { Some(shift) } else { None }
}

/// The code of a granule in the TG and TTL fields; 0 for sizes that the architecture has not.
const fn granule(page_shift: u32) -> u64 {
    match page_shift {
        12 => 0b01,
        14 => 0b10,
        16 => 0b11,
        _ => 0,
    }
}

/// The register operand of an invalidation by address; 0 for instructions that take none. For the Non-secure or Realm
/// IPA space: bit 63 (NS), which only Secure EL2 sets, is clear.
///
/// `ds` is `VTCR_EL2.DS` of the calling CPU, which decides how it reads the address of a range. Single addresses: IPA
/// bits 51:12 in bits 39:0, TTL in bits 47:44 (Arm ARM, C5.5.14). Ranges: BaseADDR in bits 36:0, TTL in 38:37, NUM in
/// 43:39, SCALE in 45:44, TG in 47:46 (C5.5.22).
#[inline]
pub const fn operand(instruction: Instruction, ds: bool) -> u64 {
    match instruction {
        Instruction::TlbiIpas2e1is { ipa, page_shift, level }
        | Instruction::TlbiIpas2e1 { ipa, page_shift, level } => {
            let number = match level {
                Some(level) => level.number(),
                None => -1,
            };
            // Level 0 has leaves with a 4K granule only (and FEAT_LPA2); codes that are reserved mean no hint.
            let hinted = number > 0 || (number == 0 && page_shift == 12);
            let ttl = if hinted && granule(page_shift) != 0 {
                granule(page_shift) << 2 | number as u64
            } else {
                0
            };
            ttl << 44 | (ipa.0 >> 12 & 0xff_ffff_ffff)
        }
        Instruction::TlbiRipas2e1is { ipa, page_shift, scale, num, level } => {
            let ttl = match level {
                Some(level) if level.number() > 0 => level.number() as u64,
                _ => 0,
            };
            let shift = if ds { 16 } else { page_shift };
            granule(page_shift) << 46
                | (scale as u64 & 3) << 44
                | (num as u64 & 31) << 39
                | ttl << 37
                | (ipa.0 >> shift & 0x1f_ffff_ffff)
        }
        _ => 0,
    }
}

#[cfg(target_arch = "aarch64")]
pub use hardware::execute;

#[cfg(target_arch = "aarch64")]
mod hardware {
    //! The instructions themselves.
    #![expect(unsafe_code, reason = "barriers and TLB maintenance are assembly")]

    use core::arch::asm;

    use super::operand;
    use crate::maintenance::Instruction;

    /// Executes one instruction on the calling CPU: the body of [`Machine::execute`](crate::Machine::execute) on Arm
    /// hardware. `host` is what `VTTBR_EL2` holds while the CPU is not in a guest, for
    /// [`LeaveContext`](Instruction::LeaveContext).
    ///
    /// Instructions of other architectures do nothing.
    ///
    /// # Safety
    /// The CPU is at EL2 with `HCR_EL2.{E2H, TGE}` other than {1, 1} (otherwise EL1 invalidations would act on the
    /// host's own translations: a host with both set clears TGE around the sequence). `VTCR_EL2` is that of the tree.
    /// `host` translates nothing that the guest's EL1 could be run with by mistake: nobody enters EL1 or EL0 without
    /// having written `VTTBR_EL2`, or `host` is the translation that is meant for it. FEAT_TLBIRANGE is there if
    /// [`Features::tlb_range`](crate::maintenance::Features::tlb_range) says so.
    #[inline(always)]
    pub unsafe fn execute(instruction: Instruction, host: u64) {
        /// One instruction without operands, ordered with all memory accesses around it.
        macro_rules! plain {
            ($($line:literal),+) => {
                // SAFETY: barriers and invalidations change no memory; the caller is at EL2.
                unsafe { asm!($($line),+, options(nostack, preserves_flags)) }
            };
        }
        /// The same with one register operand.
        macro_rules! with {
            ($value:expr, $($line:literal),+) => {
                // SAFETY: an invalidation changes no memory; `VTTBR_EL2` is used by EL1 and EL0 only, where the caller
                // promised that nothing runs meanwhile.
                unsafe { asm!($($line),+, in(reg) $value, options(nostack, preserves_flags)) }
            };
        }
        match instruction {
            Instruction::DsbIshst => plain!("dsb ishst"),
            Instruction::DsbIsh => plain!("dsb ish"),
            Instruction::DsbNshst => plain!("dsb nshst"),
            Instruction::DsbNsh => plain!("dsb nsh"),
            Instruction::Isb => plain!("isb"),
            Instruction::EnterContext(root) => with!(root, "msr vttbr_el2, {}", "isb"),
            Instruction::LeaveContext => with!(host, "msr vttbr_el2, {}", "isb"),
            Instruction::TlbiIpas2e1is { .. } => {
                with!(operand(instruction, false), "tlbi ipas2e1is, {}");
            }
            Instruction::TlbiIpas2e1 { .. } => {
                with!(operand(instruction, false), "tlbi ipas2e1, {}");
            }
            // `tlbi ripas2e1is`, by number: the mnemonic needs an architecture level of the assembler.
            Instruction::TlbiRipas2e1is { .. } => {
                with!(operand(instruction, ds()), "sys #4, c8, c0, #2, {}");
            }
            Instruction::TlbiVmalle1is => plain!("tlbi vmalle1is"),
            Instruction::TlbiVmalle1 => plain!("tlbi vmalle1"),
            Instruction::TlbiVmalls12e1is => plain!("tlbi vmalls12e1is"),
            Instruction::TlbiAlle1is => plain!("tlbi alle1is"),
            Instruction::InveptSingle(_) | Instruction::InveptAll | Instruction::FlushAsid(_) => {}
        }
    }

    /// `VTCR_EL2.DS`, bit 32.
    fn ds() -> bool {
        let vtcr: u64;
        // SAFETY: reading the register changes nothing; the caller of `execute` promised EL2.
        unsafe {
            asm!("mrs {}, vtcr_el2", out(reg) vtcr, options(nomem, nostack, preserves_flags));
        }
        vtcr >> 32 & 1 == 1
    }
}
