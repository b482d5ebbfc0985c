//! A guest kernel small enough to be read: page tables of its own, processes that share memory copy-on-write.

use slat_shadow::rmap::ReverseMaps;

use crate::failure::Failure;
use crate::shadowed::Guest;

pub(super) const PAGE: u64 = 4096;
/// Where the kernel reaches all of its memory.
const LINEAR: u64 = 0xffff_8000_0000_0000;
/// Where the memory of a process begins.
const USER: u64 = 1 << 30;
const PRESENT: u64 = 1;
const WRITE: u64 = 2;
const USER_MODE: u64 = 4;
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
const LARGE: u64 = 1 << 7;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
/// Entries of a table that the kernel uses to say that a page is shared copy-on-write (ignored by hardware).
const COPY: u64 = 1 << 9;

/// The entry for a frame.
const fn frame_entry(frame: u64, bits: u64) -> u64 {
    (frame * PAGE) | bits
}

/// A process: the frames of its tables.
pub(super) struct Process {
    root: u64,
    pointers: u64,
    directory: u64,
    /// One table for 512 pages.
    tables: Vec<u64>,
    /// Frames of pages that are its alone.
    private: Vec<u64>,
}

/// Frames, and what the kernel maps for itself.
pub(super) struct Kernel {
    /// The first that was never used.
    fresh: u64,
    end: u64,
    spare: Vec<u64>,
    /// The table below the root that maps all memory.
    map: u64,
}

impl Kernel {
    /// Boots: the kernel's own tables, which a loader left in memory.
    pub(super) fn boot<R: ReverseMaps>(
        guest: &mut Guest<'_, '_, R>,
        bytes: u64,
        mut poke: impl FnMut(u64, u64),
    ) -> Result<Self, Failure> {
        // Frame 1 is the first root, 2 and 3 the linear map.
        let kernel = PRESENT | WRITE | ACCESSED | DIRTY;
        poke(PAGE + 256 * 8, frame_entry(2, kernel));
        poke(2 * PAGE, frame_entry(3, kernel));
        for block in 0..bytes.div_ceil(2 << 20).min(512) {
            poke(3 * PAGE + 8 * block, block << 21 | LARGE | kernel);
        }
        guest.load(PAGE)?;
        Ok(Self { fresh: 4, end: bytes / PAGE, spare: Vec::new(), map: 2 })
    }

    fn frame(&mut self) -> Result<u64, Failure> {
        if let Some(frame) = self.spare.pop() {
            return Ok(frame);
        }
        if self.fresh == self.end {
            return Err(Failure::Run("the guest has no memory left".to_owned()));
        }
        self.fresh += 1;
        Ok(self.fresh - 1)
    }

    /// The kernel stores an entry of a table.
    fn store<R: ReverseMaps>(
        guest: &mut Guest<'_, '_, R>,
        table: u64,
        index: u64,
        value: u64,
    ) -> Result<(), Failure> {
        let gva = LINEAR + table * PAGE + 8 * index;
        guest.write(gva, false, value)?.map_err(|_| panicked("a table is not mapped"))
    }

    fn load<R: ReverseMaps>(
        guest: &mut Guest<'_, '_, R>,
        table: u64,
        index: u64,
    ) -> Result<u64, Failure> {
        let gva = LINEAR + table * PAGE + 8 * index;
        guest.read(gva, false)?.map_err(|_| panicked("a table is not mapped"))
    }

    /// A process with empty tables for `pages` pages.
    fn process<R: ReverseMaps>(
        &mut self,
        guest: &mut Guest<'_, '_, R>,
        pages: u64,
    ) -> Result<Process, Failure> {
        let (root, pointers, directory) = (self.frame()?, self.frame()?, self.frame()?);
        let link = PRESENT | WRITE | USER_MODE;
        Self::store(guest, directory, 0, 0)?;
        let mut tables = Vec::new();
        for number in 0..pages.div_ceil(512) {
            let table = self.frame()?;
            Self::store(guest, directory, number, frame_entry(table, link))?;
            tables.push(table);
        }
        Self::store(guest, pointers, USER >> 30, frame_entry(directory, link))?;
        Self::store(guest, root, 0, frame_entry(pointers, link))?;
        Self::store(guest, root, 256, frame_entry(self.map, link & !USER_MODE))?;
        Ok(Process { root, pointers, directory, tables, private: Vec::new() })
    }

    /// The first process, with `pages` pages that it has written to.
    pub(super) fn first<R: ReverseMaps>(
        &mut self,
        guest: &mut Guest<'_, '_, R>,
        pages: u64,
    ) -> Result<Process, Failure> {
        let mut process = self.process(guest, pages)?;
        for page in 0..pages {
            let frame = self.frame()?;
            process.private.push(frame);
            let entry = frame_entry(frame, PRESENT | WRITE | USER_MODE);
            Self::store(guest, process.tables[page as usize / 512], page % 512, entry)?;
        }
        guest.load(process.root * PAGE)?;
        for page in 0..pages {
            self.user_write(guest, &mut process, page, content(page))?;
        }
        Ok(process)
    }

    /// A child that shares all memory of its parent, copy-on-write.
    pub(super) fn fork<R: ReverseMaps>(
        &mut self,
        guest: &mut Guest<'_, '_, R>,
        parent: &Process,
        pages: u64,
    ) -> Result<Process, Failure> {
        let child = self.process(guest, pages)?;
        for page in 0..pages {
            let (table, index) = (page as usize / 512, page % 512);
            let entry = Self::load(guest, parent.tables[table], index)?;
            let shared = entry & !WRITE | COPY;
            if shared != entry {
                Self::store(guest, parent.tables[table], index, shared)?;
            }
            Self::store(guest, child.tables[table], index, shared & !(ACCESSED | DIRTY))?;
        }
        // The parent's translations may still permit writes.
        guest.load(parent.root * PAGE)?;
        Ok(child)
    }

    /// The scheduler runs a process.
    pub(super) fn run<R: ReverseMaps>(
        &self,
        guest: &mut Guest<'_, '_, R>,
        process: &Process,
    ) -> Result<(), Failure> {
        guest.load(process.root * PAGE)
    }

    /// The process that runs reads the first word of a page.
    pub(super) fn user_read<R: ReverseMaps>(
        &self,
        guest: &mut Guest<'_, '_, R>,
        page: u64,
    ) -> Result<u64, Failure> {
        guest.read(USER + page * PAGE, true)?.map_err(|_| panicked("a page is not mapped"))
    }

    /// The process that runs writes the first word of a page; a page that it shares is copied first.
    pub(super) fn user_write<R: ReverseMaps>(
        &mut self,
        guest: &mut Guest<'_, '_, R>,
        process: &mut Process,
        page: u64,
        value: u64,
    ) -> Result<(), Failure> {
        let gva = USER + page * PAGE;
        if guest.write(gva, true, value)?.is_ok() {
            return Ok(());
        }
        let (table, index) = (process.tables[page as usize / 512], page % 512);
        let entry = Self::load(guest, table, index)?;
        if entry & COPY == 0 {
            return Err(panicked("a page that is not shared cannot be written"));
        }
        let copy = self.frame()?;
        process.private.push(copy);
        let word = guest.read(LINEAR + (entry & ADDRESS), false)?;
        let word = word.map_err(|_| panicked("a page is not in the linear map"))?;
        Self::store(guest, copy, 0, word)?;
        Self::store(guest, table, index, frame_entry(copy, PRESENT | WRITE | USER_MODE))?;
        guest.invalidate(gva)?;
        guest.write(gva, true, value)?.map_err(|_| panicked("a copied page cannot be written"))
    }

    /// Takes down a process that does not run.
    pub(super) fn reap<R: ReverseMaps>(
        &mut self,
        guest: &mut Guest<'_, '_, R>,
        process: Process,
        pages: u64,
    ) -> Result<(), Failure> {
        for page in 0..pages {
            Self::store(guest, process.tables[page as usize / 512], page % 512, 0)?;
        }
        for number in 0..process.tables.len() as u64 {
            Self::store(guest, process.directory, number, 0)?;
        }
        Self::store(guest, process.pointers, USER >> 30, 0)?;
        Self::store(guest, process.root, 0, 0)?;
        Self::store(guest, process.root, 256, 0)?;
        self.spare.extend(process.private);
        self.spare.extend(process.tables);
        self.spare.extend([process.directory, process.pointers, process.root]);
        Ok(())
    }
}

/// What the first process writes to its pages.
pub(super) const fn content(page: u64) -> u64 {
    page.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1
}

/// The guest kernel finds something that cannot be.
fn panicked(why: &str) -> Failure {
    Failure::Run(format!("the guest's kernel panicked: {why}"))
}
