//! What an operation promised when it returned: that translations from before it began are gone, or let no write
//! through.

use slat::{GpaRange, Promise};

use crate::checker::{CachedLeaf, Until, Violation};
use crate::descriptor::Permissions;
use crate::model::Model;
use crate::thread::{self, Operation};
use crate::tlb::Span;

impl Model {
    /// An operation begins on this thread.
    pub(crate) fn begin(&self) {
        self.stop_if_broken();
        // Under the lock, a fill is wholly before the operation or wholly after.
        let fills = self.checker.order().map_or(0, |order| order.fills);
        thread::with(self.id, |thread| {
            thread.begun += u64::from(thread.operations.is_empty());
            thread.operations.push(Operation { fills, root: None });
        });
    }

    /// The operation that began last on this thread ends.
    pub(crate) fn end(&self, promise: Promise) {
        let (operation, depth, contexts) = thread::with(self.id, |thread| {
            (thread.operations.last().copied(), thread.operations.len(), thread.contexts.len())
        });
        let Some(operation) = operation else {
            return self
                .raise(Violation::Context { what: "an operation ended that had not begun" });
        };
        self.check_settled(Until::End);
        if depth == 1 {
            self.check_published_at_end(promise != Promise::Nothing);
            if contexts != 0 {
                thread::with(self.id, |thread| thread.contexts.clear());
                self.raise(Violation::Context { what: "an operation ended in its context" });
            }
        }
        self.check_promised(operation, promise);
        thread::with(self.id, |thread| thread.operations.pop());
    }

    fn check_promised(&self, operation: Operation, promise: Promise) {
        match promise {
            Promise::Nothing => {}
            Promise::Gone(range) | Promise::ReadOnly(range) => {
                self.check_range(operation, range, promise);
            }
            Promise::ReadOnlyPages { first, mask, page_size } => {
                for bit in (0..64).filter(|bit| mask & (1 << bit) != 0) {
                    let gpa = slat::Gpa(first.0.wrapping_add(bit * page_size));
                    if let Some(range) = GpaRange::new(gpa, page_size) {
                        self.check_range(operation, range, promise);
                    }
                }
            }
        }
    }

    fn check_range(&self, operation: Operation, range: GpaRange, promise: Promise) {
        // An operation that touched no table of a tree has met no translation of it.
        let Some(root) = operation.root else { return };
        let only_writable = !matches!(promise, Promise::Gone(_));
        let span = Span::new(range.start().0, range.size());
        let Some(_order) = self.checker.order() else { return };
        for (cpu, core) in self.cores.iter().enumerate() {
            let tlb = core.tlb.lock();
            let stale = tlb.spaces().iter().find_map(|space| {
                let stale = space.levels().find_map(|level| {
                    let found = space.any(level, span, |_, cached| {
                        cached.root == root.0
                            && cached.filled <= operation.fills
                            && (!only_writable || cached.permissions.has(Permissions::WRITE))
                    });
                    let (gpa, cached) = found?;
                    Some(CachedLeaf::leaf(gpa, 1 << space.shift(level), &cached))
                });
                stale.filter(|_| !self.excuses(core, space.vmid))
            });
            if let Some(cached) = stale {
                drop(tlb);
                return self.raise(Violation::StaleTranslation { cpu, cached, promise });
            }
        }
    }
}
