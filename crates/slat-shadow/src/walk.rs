//! The walk of a guest's own tables: what its CPU would do with an address (Intel SDM vol. 3, 5.5 to 5.8).

use slat::{Gpa, Level};
use slat_vm::Access;

use crate::guest::{GuestAccess, GuestMemory, PagingMode};
use crate::pte::{
    ACCESSED, ADDRESS, DIRTY, LARGE, NO_EXECUTE, PAGE_SHIFT, PRESENT, Rights, index, is_leaf,
    pages, shift,
};

/// The error code of a page fault (Intel SDM vol. 3, 5.7).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ErrorCode(pub u32);

impl ErrorCode {
    /// There is a translation, which does not permit the access.
    pub const PROTECTION: u32 = 1 << 0;
    /// A write.
    pub const WRITE: u32 = 1 << 1;
    /// By a user program.
    pub const USER: u32 = 1 << 2;
    /// A reserved bit of an entry is set.
    pub const RESERVED: u32 = 1 << 3;
    /// An instruction fetch; reported where the mode can forbid one.
    pub const FETCH: u32 = 1 << 4;

    fn new(mode: PagingMode, access: GuestAccess, why: u32) -> Self {
        let mut code = why;
        if access.kind == Access::Write {
            code |= Self::WRITE;
        }
        if access.user {
            code |= Self::USER;
        }
        if access.kind == Access::Execute && (mode.no_execute || mode.smep) {
            code |= Self::FETCH;
        }
        Self(code)
    }
}

/// Why a walk gives no page.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum WalkError {
    /// The guest's tables do not permit the access: its CPU takes a page fault with this code.
    PageFault(ErrorCode),
    /// A table of the guest cannot be reached below.
    Missing {
        /// The entry.
        gpa: Gpa,
        /// To note that it was used, rather than to read it.
        write: bool,
    },
    /// An entry changed during the walk.
    Changed,
}

/// One entry that a walk went through.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Step {
    /// Where it is.
    pub(crate) gpa: Gpa,
    /// What it said, after the walk has noted its use.
    pub(crate) entry: u64,
    /// What the entries above it permit.
    pub(crate) inherited: Rights,
}

/// The way to a page of the guest.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Walk {
    steps: [Step; 5],
    top: Level,
    /// The level of the entry that maps the page.
    pub(crate) leaf: Level,
    /// The guest frame behind the address, of 4096 bytes.
    pub(crate) frame: u64,
    /// What all entries together permit.
    pub(crate) rights: Rights,
    /// The page may be written only because the kernel may write to anything (`CR0.WP` is clear).
    pub(crate) unprotected: bool,
}

impl Walk {
    /// The step at `level`, which is between the top and the leaf.
    pub(crate) fn step(&self, level: Level) -> &Step {
        &self.steps[(level.number() - self.top.number()) as usize]
    }

    /// Whether the page's entry says that it was written to.
    pub(crate) fn is_dirty(&self) -> bool {
        self.step(self.leaf).entry & DIRTY != 0
    }
}

/// The bits of an entry that must be clear.
pub(crate) fn reserved(mode: PagingMode, entry: u64, level: Level) -> bool {
    let above = ADDRESS & !((1u64 << mode.physical_bits.clamp(36, 52)) - 1);
    let mut reserved = above;
    if !mode.no_execute {
        reserved |= NO_EXECUTE;
    }
    if level.height() > 2 {
        reserved |= LARGE;
    } else if level != Level::LAST && entry & LARGE != 0 {
        // Bit 12 is the memory type of a large page.
        reserved |= ((1 << shift(level)) - 1) & ADDRESS & !(1 << PAGE_SHIFT);
    }
    entry & reserved != 0
}

/// Whether a page with these rights permits the access.
pub(crate) fn permits(mode: PagingMode, access: GuestAccess, rights: Rights) -> bool {
    let user_page = rights.contains(Rights::USER);
    if access.user && !user_page {
        return false;
    }
    let kernel_to_user = !access.user && user_page;
    match access.kind {
        Access::Execute => rights.contains(Rights::EXECUTE) && !(kernel_to_user && mode.smep),
        _ if kernel_to_user && mode.smap && !access.user_data_allowed => false,
        Access::Read => true,
        Access::Write => rights.contains(Rights::WRITE) || !access.user && !mode.write_protect,
    }
}

/// Walks from the table at `root`, and notes in the entries that they were used, as a CPU would.
///
/// # Errors
/// [`WalkError`]. What was noted stays noted.
pub(crate) fn walk(
    memory: &impl GuestMemory,
    mode: PagingMode,
    root: u64,
    gva: u64,
    access: GuestAccess,
) -> Result<Walk, WalkError> {
    let top = mode.top();
    let fault = |why| WalkError::PageFault(ErrorCode::new(mode, access, why));
    let mut steps = [Step { gpa: Gpa(0), entry: 0, inherited: Rights::ALL }; 5];
    let mut table = root << PAGE_SHIFT;
    let mut rights = Rights::ALL;
    let mut level = top;
    for step in &mut steps {
        let gpa = Gpa(table + 8 * index(gva, level) as u64);
        let entry = memory.read(gpa).map_err(|_| WalkError::Missing { gpa, write: false })?;
        if entry & PRESENT == 0 {
            return Err(fault(0));
        }
        if reserved(mode, entry, level) {
            return Err(fault(ErrorCode::PROTECTION | ErrorCode::RESERVED));
        }
        *step = Step { gpa, entry, inherited: rights };
        rights = rights & Rights::of(entry);
        if is_leaf(entry, level) {
            break;
        }
        table = entry & ADDRESS;
        level = level.below();
    }
    let leaf = level;
    if !permits(mode, access, rights) {
        return Err(fault(ErrorCode::PROTECTION));
    }
    let mut walk = Walk { steps, top, leaf, frame: 0, rights, unprotected: false };
    walk.note(memory, access)?;
    let page = walk.step(leaf).entry & ADDRESS & !((1 << shift(leaf)) - 1);
    walk.frame = (page >> PAGE_SHIFT) + (gva >> PAGE_SHIFT & (pages(leaf) - 1));
    walk.unprotected = access.kind == Access::Write && !rights.contains(Rights::WRITE);
    Ok(walk)
}

impl Walk {
    /// Sets the accessed flag of every entry, and the dirty flag of the last for a write (5.8).
    fn note(&mut self, memory: &impl GuestMemory, access: GuestAccess) -> Result<(), WalkError> {
        let last = (self.leaf.number() - self.top.number()) as usize;
        for (n, step) in self.steps.iter_mut().enumerate().take(last + 1) {
            let dirty = if n == last && access.kind == Access::Write { DIRTY } else { 0 };
            let noted = step.entry | ACCESSED | dirty;
            if noted == step.entry {
                continue;
            }
            let gpa = step.gpa;
            match memory.exchange(gpa, step.entry, noted) {
                Ok(true) => step.entry = noted,
                Ok(false) => return Err(WalkError::Changed),
                Err(_) => return Err(WalkError::Missing { gpa, write: true }),
            }
        }
        Ok(())
    }
}
