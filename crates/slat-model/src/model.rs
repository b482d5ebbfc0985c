//! The machine itself: what the engine is given, made of the parts of this crate.
#![expect(unsafe_code, reason = "implements `slat::Machine`, whose contract is about memory")]

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use slat::maintenance::Instruction;
use slat::{Entry, Event, Hpa, Machine, Slot};

use crate::arm::registers::Features;
use crate::builder::Builder;
use crate::checker::{Checker, Violation};
use crate::counters::{Counters, Kind, Tally};
use crate::cpu::Core;
use crate::host::{Backing, HostMemory, HostMemoryError};
use crate::physical::Physical;
use crate::regime::Architecture;
use crate::tables::Tables;
use crate::thread;

static MODELS: AtomicU64 = AtomicU64::new(1);

/// A machine made of software: table memory, CPUs with TLBs and table walkers, host memory, and a checker of rules.
///
/// It implements [`Machine`], so the engine runs on it as it runs on hardware; [`Model::cpu`] gives the CPUs on which
/// guests run. All of it can be shared by threads.
#[derive(Debug)]
pub struct Model {
    pub(crate) id: u64,
    pub(crate) page_shift: u32,
    pub(crate) architecture: Architecture,
    pub(crate) features: Features,
    pub(crate) tables: Tables,
    pub(crate) cores: Box<[Core]>,
    pub(crate) physical: Physical,
    pub(crate) checker: Checker,
    pub(crate) tally: Tally,
    /// Roots of EPT, each with a number to cache translations under.
    roots: Mutex<Vec<u64>>,
    pub(crate) slots: Box<[Slot]>,
    /// Bytes of host memory that there may be; without a limit, what was available when the first was added.
    memory_limit: OnceLock<u64>,
}

impl Model {
    /// Describes a machine.
    pub fn builder() -> Builder {
        Builder::default()
    }

    pub(crate) fn assemble(builder: &Builder, tables: Tables, physical: Physical) -> Self {
        Self {
            id: MODELS.fetch_add(1, Ordering::Relaxed),
            page_shift: builder.page_shift,
            architecture: builder.architecture,
            features: builder.features,
            checker: Checker::new(builder.checked, builder.on_violation, &tables),
            tables,
            cores: (0..builder.cpus).map(|_| Core::new(builder.page_shift)).collect(),
            physical,
            tally: Tally::default(),
            roots: Mutex::default(),
            slots: (0..builder.slots).map(|_| Slot::new()).collect(),
            memory_limit: builder.memory_limit.map_or_else(OnceLock::new, OnceLock::from),
        }
    }

    /// log2 of the granule: of a table, and of a base page of host memory.
    pub fn page_shift(&self) -> u32 {
        self.page_shift
    }

    /// Whose table walkers it has.
    pub fn architecture(&self) -> Architecture {
        self.architecture
    }

    /// What EPT translations from this root are cached under.
    pub(crate) fn tag_of_root(&self, root: u64) -> u16 {
        let mut roots = self.roots.lock().unwrap_or_else(PoisonError::into_inner);
        let known = roots.iter().position(|&known| known == root);
        known.unwrap_or_else(|| {
            roots.push(root);
            roots.len() - 1
        }) as u16
    }

    /// Whether nothing that this CPU has cached under a VMID can be used before it is invalidated there, since its vCPU is outside the
    /// guest: checked when the guest uses it. Called with the CPU's TLB locked.
    pub(crate) fn excuses(&self, core: &Core, vmid: u16) -> bool {
        self.architecture != Architecture::Arm && core.must_invalidate(&self.slots, vmid)
    }

    /// How many CPUs it has.
    pub fn cpus(&self) -> usize {
        self.cores.len()
    }

    /// Whether rules are checked.
    pub fn is_checked(&self) -> bool {
        self.checker.is_on()
    }

    /// Adds host memory: `size` bytes backed by pages as `backing` says, zeroed, which take real memory when they are
    /// first touched. It lives as long as the model.
    ///
    /// # Errors
    /// [`HostMemoryError::NotEnough`] if all host memory of the model would exceed its limit, or without a limit what
    /// this computer has available; the others for sizes that the backing does not have.
    pub fn host_memory(
        &self,
        size: u64,
        backing: Backing,
    ) -> Result<Arc<HostMemory>, HostMemoryError> {
        let extent = backing.extent(size, self.page_shift)?;
        let mut layout = self.physical.layout();
        let wanted = layout.bytes.saturating_add(size);
        let limit = || crate::available().unwrap_or(u64::MAX);
        let available = *self.memory_limit.get_or_init(limit);
        if wanted > available {
            return Err(HostMemoryError::NotEnough { wanted, available });
        }
        let room = self.physical.room(&layout, extent.span, extent.align);
        let first = room.ok_or(HostMemoryError::AddressSpace)?;
        let memory = Arc::new(HostMemory::new(backing, size, self.page_shift, first)?);
        self.physical.add(&mut layout, &memory);
        Ok(memory)
    }

    /// The word of host memory at `hpa`, rounded down to a multiple of 8; `None` where no memory is. Constant time.
    pub fn host_word(&self, hpa: Hpa) -> Option<&AtomicU64> {
        let place = self.physical.find(hpa)?;
        self.physical.memory(place.memory)?.word_at(place.offset)
    }

    /// A pointer to the byte of host memory at `hpa`; `None` where no memory is. Valid as long as the model; guests and
    /// the host access the memory in words, atomically.
    pub fn host_pointer(&self, hpa: Hpa) -> Option<NonNull<u8>> {
        let word = NonNull::from(self.host_word(hpa)?).cast::<u8>();
        // SAFETY: the address differs from that of its word by less than a word.
        Some(unsafe { word.add((hpa.0 & 7) as usize) })
    }

    /// The entry at `address` of table memory, allocated or not, rounded down to a multiple of 8; `None` elsewhere. For
    /// looking at trees, and for writing them by hand.
    ///
    /// # Safety
    /// The entry is not written through in a table that another owner has allocated, and not read either while its
    /// owner may store to it plainly: before the table is linked, or after it left the tree.
    pub unsafe fn entry(&self, address: Hpa) -> Option<&Entry> {
        self.tables.entry(address)
    }

    /// The next `n` allocations of tables succeed, every later one fails, until
    /// [`stop_failing`](Self::stop_failing): the `n`-th from now fails, counted from 0.
    pub fn fail_after(&self, n: u64) {
        self.tables.fail_after(Some(n));
    }

    /// Allocations fail only for lack of table memory again.
    pub fn stop_failing(&self) {
        self.tables.fail_after(None);
    }

    /// What the machine has done since it was made. Costs a look at every CPU; takes their TLB locks.
    pub fn counters(&self) -> Counters {
        let (tables_allocated, tables_freed) = self.tables.counts();
        let (walks, fills) = self.cores.iter().fold((0, 0), |(walks, fills), core| {
            let tlb = core.tlb.lock();
            (walks + tlb.walks, fills + tlb.fills)
        });
        Counters {
            publishes: self.tally.sum(Kind::Publish),
            by_ipa: self.tally.sum(Kind::ByIpa),
            by_range: self.tally.sum(Kind::ByRange),
            combined: self.tally.sum(Kind::Combined),
            everything: self.tally.sum(Kind::Everything),
            local: self.tally.sum(Kind::Local),
            waits: self.tally.sum(Kind::Wait),
            tables_allocated,
            tables_freed,
            tables_in_use: tables_allocated.saturating_sub(tables_freed),
            walks,
            fills,
        }
    }
}

// SAFETY: table memory is one mapping that lives as long as the model. `allocate` gives each table to one caller until
// it is freed; nothing else in this crate writes to allocated tables but the table walkers, through `Entry::update`.
unsafe impl Machine for Model {
    fn allocate(&self, tables: usize) -> Option<Hpa> {
        if !self.tables.may_take() {
            return None;
        }
        if self.checker.is_on() {
            return self.take_checked(tables).map(|first| self.tables.address(first));
        }
        let taken = self.tables.take(tables)?;
        if taken.recycled {
            // SAFETY: whoever freed the tables promised that nobody can reach them, and `take` gives them once.
            unsafe { self.tables.clear(taken.first, tables) }
        }
        Some(self.tables.address(taken.first))
    }

    unsafe fn free(&self, first: Hpa, tables: usize) {
        if self.checker.is_on() {
            return self.put_checked(first, tables);
        }
        match self.tables.number(first) {
            Some(number) => {
                self.tables.count_freed(tables);
                self.tables.put(number, tables);
            }
            None => self.raise(Violation::BadFree { first, tables }),
        }
    }

    #[inline]
    fn entries(&self, table: Hpa) -> NonNull<Entry> {
        match self.tables.first_entry(table) {
            Some(first) => first,
            None => panic!("{table} is not table memory"),
        }
    }

    #[inline]
    fn slots(&self) -> &[Slot] {
        &self.slots
    }

    fn execute(&self, instruction: Instruction) {
        self.step(instruction);
    }

    fn features(&self) -> slat::maintenance::Features {
        slat::maintenance::Features {
            tlb_range: self.features.tlb_range,
            ttl: self.features.ttl,
            bbm_level: if self.features.block_change { 2 } else { 0 },
        }
    }

    /// Spins, and now and then gives the time slice to another thread: there may be fewer processors than threads.
    fn relax(&self) {
        self.stop_if_broken();
        if thread::should_yield() {
            std::thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
    }

    #[inline]
    fn observe(&self, event: Event) {
        if self.checker.is_on() {
            self.check_event(event);
        }
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        thread::forget(self.id);
    }
}
