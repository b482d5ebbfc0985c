//! What an instruction does: barriers and TLB maintenance, with everything that the architecture leaves open decided
//! against the hypervisor (Arm ARM DDI 0487, D8.17 "TLB maintenance").
//!
//! - An invalidation takes effect when a barrier completes it, and not before.
//! - By IPA, only the stage-2 part goes; combined translations stay usable until an invalidation of combined
//!   translations that was issued after the first was complete.
//! - With a level hint, only leaf entries of that level go, and no table pointers.
//! - A barrier that completes an invalidation waits for accesses that use the old translation.

use slat::maintenance::Instruction;

use crate::checker::{Before, Violation};
use crate::counters::Kind;
use crate::model::Model;
use crate::thread::{self, Step, Thread};
use crate::tlb::{Span, Tlb};
use crate::x86::registers::EptRegisters;

/// An invalidation that was issued and is not complete.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Pending {
    what: What,
    /// The one CPU that it acts on; `None` for all.
    cpu: Option<usize>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum What {
    /// Stage-2 translations of some addresses of a VMID.
    Stage2 { vmid: u16, span: Span, level: Option<i8> },
    /// Combined translations of a VMID.
    Combined { vmid: u16 },
    /// Both stages, of one VMID or of all.
    Everything { vmid: Option<u16> },
}

/// Which CPUs an instruction reaches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Reach {
    All,
    This,
}

/// log2 of the bytes that an address in a `tlbi` operand counts.
fn page(address: u64, shift: u32, pages: u64) -> Span {
    Span::new(address >> shift << shift, pages << shift)
}

impl Model {
    /// The one entry point of instructions: whatever charges time for them does it here.
    pub(crate) fn step(&self, instruction: Instruction) {
        if self.checker.is_on() {
            thread::with(self.id, |thread| thread.note(Step::Instruction(instruction)));
        }
        match instruction {
            Instruction::DsbIshst => {
                self.tally.add(Kind::Publish);
                self.published(Reach::All);
            }
            Instruction::DsbNshst => self.published(Reach::This),
            Instruction::DsbIsh => {
                self.tally.add(Kind::Wait);
                self.published(Reach::All);
                self.complete(Reach::All);
            }
            Instruction::DsbNsh => {
                self.published(Reach::This);
                self.complete(Reach::This);
            }
            Instruction::Isb => {}
            Instruction::EnterContext(vttbr) => {
                thread::with(self.id, |thread| thread.contexts.push(vttbr));
            }
            Instruction::LeaveContext => {
                if thread::with(self.id, |thread| thread.contexts.pop()).is_none() {
                    self.raise(Violation::Context { what: "left a context that was not entered" });
                }
            }
            Instruction::TlbiIpas2e1is { ipa, page_shift, level } => {
                self.tally.add(Kind::ByIpa);
                let level = level.map(|level| level.number());
                self.stage2(Reach::All, page(ipa.0, page_shift, 1), level);
            }
            Instruction::TlbiRipas2e1is { ipa, page_shift, scale, num, level } => {
                self.tally.add(Kind::ByRange);
                let pages = (u64::from(num & 31) + 1) << (5 * u32::from(scale & 3) + 1);
                let level = level.map(|level| level.number());
                self.stage2(Reach::All, page(ipa.0, page_shift, pages), level);
            }
            Instruction::TlbiIpas2e1 { ipa, page_shift, level } => {
                self.tally.add(Kind::Local);
                let level = level.map(|level| level.number());
                self.stage2(Reach::This, page(ipa.0, page_shift, 1), level);
            }
            Instruction::TlbiVmalle1is => {
                self.tally.add(Kind::Combined);
                self.issue(Reach::All, |vmid| What::Combined { vmid });
            }
            Instruction::TlbiVmalle1 => self.issue(Reach::This, |vmid| What::Combined { vmid }),
            Instruction::TlbiVmalls12e1is => {
                self.tally.add(Kind::Everything);
                self.issue(Reach::All, |vmid| What::Everything { vmid: Some(vmid) });
            }
            Instruction::TlbiAlle1is => {
                self.tally.add(Kind::Everything);
                let what = What::Everything { vmid: None };
                self.pend(Reach::All, what);
            }
            Instruction::InveptSingle(eptp) => {
                let root = EptRegisters { eptp, mode_based: false }.table();
                let tag = self.tag_of_root(root);
                self.invalidate_here(Some(tag));
            }
            Instruction::InveptAll => self.invalidate_here(None),
            Instruction::FlushAsid(asid) => self.invalidate_here(Some(asid)),
            unknown => self.raise(Violation::UnknownInstruction { instruction: unknown }),
        }
    }

    /// x86: what is cached under a tag, or all, is gone from this CPU. A thread that runs on no CPU of the model has no TLB.
    fn invalidate_here(&self, tag: Option<u16>) {
        self.tally.add(Kind::Local);
        let Some(core) = thread::cpu(self.id).and_then(|cpu| self.cores.get(cpu)) else { return };
        let _order = self.checker.order();
        let mut tlb = core.tlb.lock();
        tlb.invalidate_all(tag, &mut |table| self.checker.release(self, table));
        core.invalidated(tag);
    }

    fn stage2(&self, reach: Reach, span: Span, level: Option<i8>) {
        self.issue(reach, |vmid| What::Stage2 { vmid, span, level });
    }

    /// Issues an invalidation for the VMID of the calling thread's context, or of the CPU that it runs on.
    fn issue(&self, reach: Reach, what: impl FnOnce(u16) -> What) {
        let entered = thread::with(self.id, |thread| thread.contexts.last().copied());
        let vttbr = entered.or_else(|| Some(self.cores.get(thread::cpu(self.id)?)?.vttbr()));
        match vttbr {
            Some(vttbr) => self.pend(reach, what((vttbr >> 48) as u16)),
            None => self.raise(Violation::Context { what: "invalidated without a context" }),
        }
    }

    fn pend(&self, reach: Reach, what: What) {
        let cpu = match reach {
            Reach::All => None,
            // A thread that runs on no CPU of the model has no TLB of its own.
            Reach::This => match thread::cpu(self.id) {
                Some(cpu) => Some(cpu),
                None => return,
            },
        };
        if self.checker.is_on() {
            self.check_published_before(Before::Invalidation { local: reach == Reach::This });
        }
        thread::with(self.id, |thread| add(thread, Pending { what, cpu }));
    }

    fn published(&self, reach: Reach) {
        if self.checker.is_on() {
            thread::with(self.id, |thread| match reach {
                Reach::All => thread.unpublished.clear(),
                Reach::This => {
                    thread.unpublished.values_mut().for_each(|store| store.locally = true)
                }
            });
        }
    }

    /// Completes what the calling thread has issued.
    fn complete(&self, reach: Reach) {
        let done: Vec<Pending> = thread::with(self.id, |thread| match reach {
            Reach::All => std::mem::take(&mut thread.pending),
            Reach::This => thread.pending.extract_if(.., |pending| pending.cpu.is_some()).collect(),
        });
        if done.is_empty() {
            return;
        }
        let _order = self.checker.order();
        for (index, core) in self.cores.iter().enumerate() {
            let here = |pending: &&Pending| pending.cpu.is_none_or(|cpu| cpu == index);
            if !done.iter().any(|pending| here(&pending)) {
                continue;
            }
            // Waits for the access that the CPU is making.
            let mut tlb = core.tlb.lock();
            let combined = |pending: &&Pending| matches!(pending.what, What::Combined { .. });
            // Nothing orders two invalidations before the same barrier: combined translations go before the stage-2
            // parts that they could be made of again.
            for pending in done.iter().filter(here).filter(combined) {
                self.apply(&mut tlb, pending.what);
            }
            for pending in done.iter().filter(here).filter(|pending| !combined(pending)) {
                self.apply(&mut tlb, pending.what);
            }
        }
    }

    fn apply(&self, tlb: &mut Tlb, what: What) {
        let mut dropped = |table| self.checker.release(self, table);
        match what {
            What::Stage2 { vmid, span, level } => {
                tlb.invalidate_stage2(vmid, span, level, &mut dropped)
            }
            What::Combined { vmid } => tlb.invalidate_combined(vmid),
            What::Everything { vmid } => tlb.invalidate_all(vmid, &mut dropped),
        }
    }
}

/// Adds an invalidation; neighbouring addresses become one.
fn add(thread: &mut Thread, pending: Pending) {
    if let Some(last) = thread.pending.last_mut()
        && last.cpu == pending.cpu
        && let What::Stage2 { vmid, span, level } = &mut last.what
        && let What::Stage2 { vmid: new_vmid, span: new, level: new_level } = pending.what
        && (*vmid, *level) == (new_vmid, new_level)
        && span.last.wrapping_add(1) == new.start
    {
        span.last = new.last;
        return;
    }
    thread.pending.push(pending);
}
