//! A guest with tables of its own, the CPUs that run it on shadow tables, and the memory below it.
#![allow(dead_code, missing_docs, unreachable_pub, unsafe_code)]

use std::cell::{Cell, RefCell};

use slat::{Gpa, GpaRange, Hpa};
use slat_model::{LinearAccess, LongMode, LongModeCpu};
use slat_shadow::rmap::{Chains, ReverseMaps};
use slat_shadow::{
    Below, GuestAccess, GuestMemory, Missing, PagingMode, Root, Shadow, ShadowExit, ShadowOptions,
};
use slat_vm::Access;

#[path = "../../../slat/tests/machine/mod.rs"]
mod machine;
pub mod naive;

pub use machine::Heap;

pub const PAGE: u64 = 4096;
pub const P: u64 = 1;
pub const W: u64 = 2;
pub const U: u64 = 4;
pub const A: u64 = 1 << 5;
pub const D: u64 = 1 << 6;
pub const LARGE: u64 = 1 << 7;
pub const NX: u64 = 1 << 63;
pub const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
/// Where the guest's kernel reaches all of its memory.
pub const LINEAR: u64 = 0xffff_8000_0000_0000;
/// Host-physical addresses of the guest's memory, where it was not moved.
pub const HOST: u64 = 1 << 40;

/// The frame below one of the guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Backed {
    pub output: u64,
    pub writable: bool,
    /// Bytes of the block that it is mapped in.
    pub size: u64,
}

/// Guest memory in words, and a second level of single pages.
pub struct Memory {
    pub words: Vec<Cell<u64>>,
    pub backed: RefCell<Vec<Option<Backed>>>,
    /// Frames that were written to since the last collection.
    pub dirty: RefCell<Vec<bool>>,
    pub cpus: RefCell<Vec<LongModeCpu>>,
    pub flushes: Cell<usize>,
}

impl Memory {
    pub fn new(frames: usize, cpus: usize) -> Self {
        let backed =
            |frame| Some(Backed { output: HOST + frame * PAGE, writable: true, size: PAGE });
        Self {
            words: vec![Cell::new(0); frames * 512],
            backed: RefCell::new((0..frames as u64).map(backed).collect()),
            dirty: RefCell::new(vec![true; frames]),
            cpus: RefCell::new((0..cpus).map(|_| LongModeCpu::default()).collect()),
            flushes: Cell::new(0),
        }
    }

    pub fn word(&self, gpa: u64) -> &Cell<u64> {
        &self.words[(gpa / 8) as usize]
    }

    fn frames(&self) -> u64 {
        self.words.len() as u64 / 512
    }

    fn of(&self, gpa: Gpa) -> Option<Backed> {
        self.backed.borrow().get((gpa.0 / PAGE) as usize).copied().flatten()
    }

    /// A fault of the second level: the host backs the frame, and notes the write.
    pub fn handle(&self, gpa: Gpa, access: Access) {
        let frame = gpa.0 / PAGE;
        let mut backed = self.backed.borrow_mut();
        let place = &mut backed[frame as usize];
        let mut now =
            place.unwrap_or(Backed { output: HOST + frame * PAGE, writable: false, size: PAGE });
        if access == Access::Write {
            now.writable = true;
            self.dirty.borrow_mut()[frame as usize] = true;
        }
        *place = Some(now);
    }
}

impl GuestMemory for Memory {
    fn below(&self, gpa: Gpa) -> Option<Below> {
        let backed = self.of(gpa)?;
        let output = Hpa(backed.output + gpa.0 % PAGE);
        Some(Below { output, size: backed.size, writable: backed.writable, device: false })
    }

    fn read(&self, gpa: Gpa) -> Result<u64, Missing> {
        self.of(gpa).map(|_| self.word(gpa.0).get()).ok_or(Missing)
    }

    fn exchange(&self, gpa: Gpa, old: u64, new: u64) -> Result<bool, Missing> {
        self.of(gpa).filter(|backed| backed.writable).ok_or(Missing)?;
        assert!(self.dirty.borrow()[(gpa.0 / PAGE) as usize], "a write that no log has");
        let word = self.word(gpa.0);
        let same = word.get() == old;
        if same {
            word.set(new);
        }
        Ok(same)
    }

    fn flush(&self) {
        self.flushes.set(self.flushes.get() + 1);
        self.cpus.borrow_mut().iter_mut().for_each(LongModeCpu::flush);
    }
}

/// The guest, its shadow, and which root each CPU runs with.
pub struct Guest<'m, R: ReverseMaps = Chains> {
    pub machine: &'m Heap,
    pub memory: Memory,
    pub shadow: Shadow<'m, Heap, R>,
    pub roots: Vec<Option<(u64, Root)>>,
    pub mode: PagingMode,
}

pub const MODE: PagingMode = PagingMode { smap: false, smep: true, ..PagingMode::LONG };

/// How a guest's access ended.
pub type Outcome = Result<u64, u32>;

impl<'m, R: ReverseMaps> Guest<'m, R> {
    /// `frames` of memory, in one slot.
    pub fn new(machine: &'m Heap, frames: usize, cpus: usize, options: ShadowOptions) -> Self {
        let mut shadow = Shadow::with_reverse_maps(machine, options).unwrap();
        shadow.create_slot(range(0, frames as u64)).unwrap();
        let roots = (0..cpus).map(|_| None).collect();
        Self { machine, memory: Memory::new(frames, cpus), shadow, roots, mode: MODE }
    }

    /// A word of the guest's memory, as its loader writes it.
    pub fn poke(&mut self, gpa: u64, value: u64) {
        self.memory.word(gpa).set(value);
        self.shadow.written(&self.memory, GpaRange::new(Gpa(gpa), 8).unwrap());
    }

    /// The CPU loads `CR3`.
    pub fn load(&mut self, cpu: usize, cr3: u64) {
        let root = self.shadow.load_root(&self.memory, self.mode, cr3).unwrap();
        self.memory.cpus.borrow_mut()[cpu].flush();
        if let Some((_, old)) = self.roots[cpu].replace((cr3, root)) {
            self.shadow.drop_root(&self.memory, old).unwrap();
        }
    }

    /// `INVLPG`.
    pub fn invalidate(&mut self, cpu: usize, gva: u64) {
        let Some((_, root)) = &self.roots[cpu] else { return };
        self.shadow.invalidate_page(&self.memory, root, gva).unwrap();
        self.memory.cpus.borrow_mut()[cpu].invalidate(gva);
    }

    /// A CPU that has not run since: one more, with nothing cached.
    pub fn control(&self) -> LongMode {
        LongMode { five_level: self.mode.five_level, smep: self.mode.smep, smap: self.mode.smap }
    }

    /// The guest-physical address that the access reaches, or the error code of the guest's own fault. A write is of
    /// `value`, if there is one.
    pub fn access(
        &mut self,
        cpu: usize,
        gva: u64,
        access: GuestAccess,
        value: Option<u64>,
    ) -> Outcome {
        let linear = LinearAccess {
            write: access.kind == Access::Write,
            fetch: access.kind == Access::Execute,
            user: access.user,
        };
        let control = self.control();
        for _ in 0..40 {
            let (cr3, root) = self.roots[cpu].as_ref().expect("the CPU has loaded a root");
            let cr3 = *cr3;
            let tried = self.memory.cpus.borrow_mut()[cpu].access(
                self.machine,
                root.table(),
                control,
                gva,
                linear,
            );
            if let Ok(hpa) = tried {
                return Ok(self.reached(hpa, linear.write, value));
            }
            match self.shadow.fault(&self.memory, root, gva, access).unwrap() {
                ShadowExit::Resume | ShadowExit::Retry => {}
                ShadowExit::ReloadRoot => self.load(cpu, cr3),
                ShadowExit::PageFault(code) => return Err(code.0),
                // Device registers: emulated.
                ShadowExit::SecondLevel { gpa, .. } if gpa.0 / PAGE >= self.memory.frames() => {
                    return Ok(gpa.0);
                }
                ShadowExit::SecondLevel { gpa, access, .. } => self.memory.handle(gpa, access),
                ShadowExit::EmulateWrite { gpa } => {
                    let backed = self.memory.of(gpa).expect("it was looked up");
                    assert!(backed.writable);
                    let gpa = gpa.0 & !7;
                    if let Some(value) = value {
                        self.poke(gpa, value);
                    }
                    return Ok(gpa | gva & 7);
                }
                other => panic!("{other:?}"),
            }
        }
        panic!("the access to {gva:#x} never gets through");
    }

    /// The guest-physical address behind a host-physical one that a CPU uses now.
    fn reached(&mut self, hpa: Hpa, write: bool, value: Option<u64>) -> u64 {
        let page = hpa.0 & !(PAGE - 1);
        let backed = self.memory.backed.borrow();
        let frame = backed
            .iter()
            .position(|backed| backed.is_some_and(|backed| backed.output == page))
            .unwrap_or_else(|| panic!("{hpa} was taken back"));
        if write {
            assert!(
                backed[frame].unwrap().writable,
                "a write to {frame:#x}, which is read-only below"
            );
            assert!(self.memory.dirty.borrow()[frame], "a write to {frame:#x} that no log has");
        }
        let gpa = frame as u64 * PAGE + hpa.0 % PAGE;
        if write && let Some(value) = value {
            self.memory.word(gpa & !7).set(value);
        }
        gpa
    }

    /// The guest's kernel stores a word, through its linear map.
    pub fn store(&mut self, cpu: usize, gpa: u64, value: u64) {
        let kernel = GuestAccess::kernel(Access::Write);
        assert_eq!(self.access(cpu, LINEAR + gpa, kernel, Some(value)), Ok(gpa));
    }
}

impl<R: ReverseMaps> Drop for Guest<'_, R> {
    fn drop(&mut self) {
        for (_, root) in self.roots.drain(..).flatten() {
            self.shadow.drop_root(&self.memory, root).unwrap();
        }
    }
}

pub fn range(first: u64, pages: u64) -> GpaRange {
    GpaRange::new(Gpa(first * PAGE), pages * PAGE).unwrap()
}
