//! The short way of a write fault: the page is mapped, and what keeps the guest from writing is the log alone.
//!
//! A leaf remembers whether its page may be written as far as the host is concerned. Then the host is not asked again:
//! one pin, in which the very leaf that was looked at is exchanged. If the host takes the page back, the leaf is gone or
//! goes after it was made writable, in any case before the host goes on (rule 7); if the slot changes, its version is
//! another (rule 10).

use slat::{Error, Execute, Format, Gpa, Installed, Level, Machine, RelaxedLeaf};

use crate::hands::Hands;
use crate::log::Mark;
use crate::sabotage::{Skip, skips};
use crate::template::{LeafKind, is_host_writable};
use crate::{Host, Hva, Vm};

/// How the short way ended.
pub(crate) enum Fast {
    /// The page of this host address is writable.
    Done(Installed, Hva),
    /// Another thread changes the entry.
    Retry,
    /// The long way has to be taken.
    No,
}

impl<'m, M: Machine> Hands<'m, M> {
    /// Makes the page writable if nothing but a log is in the way, and marks it.
    pub(crate) fn write_fast<F: Format, H: Host>(
        &mut self,
        vm: &Vm<'m, F, M, H>,
        gpa: Gpa,
    ) -> Fast {
        let pin = self.participant.pin();
        let Ok(map) = vm.slots.read(&pin) else { return Fast::No };
        let Some(version) = map.find(self.space, gpa, &mut self.hit) else { return Fast::No };
        // Without a log, the long way may put a block in the place of the pages that a log has left.
        let Some(log) = version.writes() else { return Fast::No };
        let mark = Mark::new(log, version, gpa, F::PAGE_SHIFT, &self.ring);
        if !mark.has_room() {
            return Fast::No;
        }
        let Some(tree) = vm.trees(self.space).first() else { return Fast::No };
        if skips(Skip::MarkLast) {
            mark.written(Installed::Relaxed);
        }
        let relaxed = tree.relax_leaf(&pin, gpa, |level, found| {
            // A block is split first, so that one write marks one page.
            let page = level == Level::LAST && is_host_writable(found);
            let execute = found.execute != Execute::No;
            let kind =
                LeafKind { write: true, host_writable: true, execute, ..LeafKind::default() };
            page.then(|| vm.template(kind))
        });
        let installed = match relaxed {
            Ok(RelaxedLeaf::Relaxed) => Installed::Relaxed,
            Ok(RelaxedLeaf::Present) => Installed::Present,
            Ok(RelaxedLeaf::Untouched) => return Fast::No,
            Err(Error::Retry) => return Fast::Retry,
            Err(_) => return Fast::No,
        };
        // Rule 8: after the entry is writable, in the same pin.
        let marked = !skips(Skip::MarkLast) && mark.written(installed);
        self.statistics.marked += u64::from(marked);
        let page = gpa.0 & !((1 << F::PAGE_SHIFT) - 1);
        let offset = page - version.range.start().0;
        Fast::Done(installed, Hva(version.config.hva.0 + offset))
    }
}
