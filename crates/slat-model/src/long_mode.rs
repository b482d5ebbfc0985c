//! A CPU in long mode that walks tables of four or five levels: what runs a guest whose tables are shadowed (Intel SDM
//! vol. 3, 5.5 to 5.10).
//!
//! Its TLB and paging-structure caches forget nothing by themselves, and it uses what they hold wherever a CPU may.

use std::collections::HashMap;

use slat::{Hpa, Machine};

const PRESENT: u64 = 1 << 0;
const WRITE: u64 = 1 << 1;
const USER: u64 = 1 << 2;
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
const LARGE: u64 = 1 << 7;
const NO_EXECUTE: u64 = 1 << 63;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// log2 of the bytes of a page.
const SHIFTS: [u32; 3] = [12, 21, 30];

/// An access by virtual address.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct LinearAccess {
    /// A store.
    pub write: bool,
    /// An instruction fetch.
    pub fetch: bool,
    /// By a user program.
    pub user: bool,
}

/// The control bits of the CPU; `CR0.WP` and `EFER.NXE` are set.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct LongMode {
    /// `CR4.LA57`.
    pub five_level: bool,
    /// `CR4.SMEP`.
    pub smep: bool,
    /// `CR4.SMAP`, with `EFLAGS.AC` clear.
    pub smap: bool,
}

/// A translation that the CPU may use.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Translation {
    /// Where the page begins.
    pub output: Hpa,
    /// log2 of its bytes.
    pub shift: u32,
    /// Stores are permitted.
    pub write: bool,
    /// User programs may use it.
    pub user: bool,
    /// Fetches are permitted.
    pub execute: bool,
    /// The dirty flag is known to be set.
    dirty: bool,
}

/// What entries above permit, and the table that they lead to.
#[derive(Clone, Copy, Debug)]
struct Link {
    table: Hpa,
    rights: u64,
}

/// The CPU.
#[derive(Debug, Default)]
pub struct LongModeCpu {
    /// By log2 of the page's bytes, and its number.
    translations: HashMap<(u32, u64), Translation>,
    /// By height and the address bits above it.
    links: HashMap<(u32, u64), Link>,
}

impl LongModeCpu {
    /// Where `gva` lies for this access, through the tables at `root`. Sets accessed and dirty flags.
    ///
    /// # Errors
    /// The error code of the page fault. What was cached for the address is gone then (Intel SDM vol. 3, 5.10.4.1).
    pub fn access<M: Machine>(
        &mut self,
        machine: &M,
        root: Hpa,
        mode: LongMode,
        gva: u64,
        access: LinearAccess,
    ) -> Result<Hpa, u32> {
        let cached = SHIFTS.iter().find_map(|&shift| self.translations.get(&(shift, gva >> shift)));
        let cached = cached.copied();
        // A store through a translation whose dirty flag is not known to be set walks again.
        let usable = cached.filter(|found| found.dirty || !access.write);
        let (found, present) = match usable {
            Some(found) => (Some(found), true),
            None => self.walk(machine, root, mode, gva, access),
        };
        match found.filter(|found| found.permits(mode, access)) {
            Some(found) => {
                self.translations.insert((found.shift, gva >> found.shift), found);
                Ok(Hpa(found.output.0 | gva & ((1 << found.shift) - 1)))
            }
            None => {
                self.invalidate(gva);
                Err(u32::from(present)
                    | u32::from(access.write) << 1
                    | u32::from(access.user) << 2
                    | u32::from(access.fetch) << 4)
            }
        }
    }

    /// Walks, and says whether every entry was present.
    fn walk<M: Machine>(
        &mut self,
        machine: &M,
        root: Hpa,
        mode: LongMode,
        gva: u64,
        access: LinearAccess,
    ) -> (Option<Translation>, bool) {
        let top = if mode.five_level { 4 } else { 3 };
        let mut link = Link { table: root, rights: WRITE | USER };
        let mut height = top;
        // The lowest table that is cached for the address.
        for below in 0..top {
            if let Some(&found) = self.links.get(&(below, gva >> (12 + 9 * (below + 1)))) {
                (link, height) = (found, below);
                break;
            }
        }
        'walk: loop {
            let shift = 12 + 9 * height;
            let index = (gva >> shift & 511) as usize;
            #[expect(unsafe_code, reason = "a CPU reads tables by physical address")]
            // SAFETY: the table was allocated from the machine and is reachable from a root in use, so it is not freed,
            // which is what is tested; it has 512 entries.
            let place = unsafe { machine.entries(link.table).add(index).as_ref() };
            let mut entry = place.read();
            if entry & PRESENT == 0 {
                return (None, false);
            }
            let rights = link.rights & entry & (WRITE | USER) | (link.rights | entry) & NO_EXECUTE;
            let leaf = height == 0 || entry & LARGE != 0;
            let translation = Translation {
                output: Hpa(entry & ADDRESS & !((1 << shift) - 1)),
                shift,
                write: rights & WRITE != 0,
                user: rights & USER != 0,
                execute: rights & NO_EXECUTE == 0,
                dirty: false,
            };
            if leaf && !translation.permits(mode, access) {
                return (Some(translation), true);
            }
            let noted = ACCESSED | if leaf && access.write { DIRTY } else { 0 };
            if entry & noted != noted {
                if place.update(entry, entry | noted).is_err() {
                    // Another CPU, or the hypervisor, was here: from the root again.
                    self.invalidate(gva);
                    (link, height) = (Link { table: root, rights: WRITE | USER }, top);
                    continue 'walk;
                }
                entry |= noted;
            }
            if leaf {
                let dirty = entry & DIRTY != 0;
                return (Some(Translation { dirty, ..translation }), true);
            }
            link = Link { table: Hpa(entry & ADDRESS), rights };
            self.links.insert((height - 1, gva >> shift), link);
            height -= 1;
        }
    }

    /// `INVLPG`, for all address spaces.
    pub fn invalidate(&mut self, gva: u64) {
        for shift in SHIFTS {
            self.translations.remove(&(shift, gva >> shift));
        }
        for height in 0..4 {
            self.links.remove(&(height, gva >> (12 + 9 * (height + 1))));
        }
    }

    /// Forgets everything.
    pub fn flush(&mut self) {
        self.translations.clear();
        self.links.clear();
    }

    /// Every translation that the CPU holds, by address.
    pub fn cached(&self) -> impl Iterator<Item = (u64, Translation)> + '_ {
        self.translations.iter().map(|(&(shift, page), &found)| (page << shift, found))
    }
}

impl Translation {
    fn permits(&self, mode: LongMode, access: LinearAccess) -> bool {
        let kernel_to_user = !access.user && self.user;
        !(access.user && !self.user
            || access.write && !self.write
            || access.fetch && (!self.execute || kernel_to_user && mode.smep)
            || !access.fetch && kernel_to_user && mode.smap)
    }
}
