//! A guest: its memory, its VM, and what of the image runs in it.
#![expect(
    unsafe_code,
    reason = "the function that runs in the guest, and the memory that it shares with the hypervisor"
)]

use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::ops::Range;
use core::ptr;
use core::sync::atomic::{AtomicU16, Ordering};

use slat::{Gpa, GpaRange, Hpa};
use slat_metal::audit::Log;
use slat_metal::layout::Layout;
use slat_metal::options::Options;
use slat_metal::program::{GuestMemory, Mailbox, PAGE};
use slat_vm::{Hva, SlotConfig, Vm, VmOptions, Worker};
use spin::Mutex;

use crate::arch::{Arch, Here, MAX_CPUS, Start, Wanted};
use crate::crew::Post;
use crate::host::Memory;
use crate::machine::{METAL, Metal};
use crate::rings::Rings;
use crate::served::Served;

/// A VM of this hypervisor.
pub(crate) type MetalVm = Vm<'static, <Here as Arch>::Format, Metal, Memory>;

/// Guest-physical address of the program.
const PROGRAM: u64 = 0x4000_0000;
/// Guest-physical address of what each vCPU has for itself.
const PRIVATE: u64 = 0x5000_0000;
const STACK: u64 = 16 << 10;
/// Numbers of their memslots, which the workload's memory leaves free.
const PROGRAM_SLOT: u32 = 1 << 20;
const PRIVATE_SLOT: u32 = PROGRAM_SLOT + 1;

unsafe extern "C" {
    static __guest_start: u8;
    static __guest_end: u8;
}

/// Guest-physical memory, where the guest's own translation is off or one to one.
struct Physical;

impl GuestMemory for Physical {
    #[inline(always)]
    fn load(&self, gpa: u64) -> u64 {
        // SAFETY: runs in the guest, which owns all of its memory; what is not there is a fault for the hypervisor.
        unsafe { ptr::read_volatile(gpa as *const u64) }
    }

    #[inline(always)]
    fn store(&self, gpa: u64, value: u64) {
        // SAFETY: as in `load`.
        unsafe { ptr::write_volatile(gpa as *mut u64, value) }
    }
}

/// All that runs in a guest: follows orders, and calls the hypervisor after each. The linker puts it on pages of its own;
/// everything in it is inlined.
#[unsafe(link_section = ".guest")]
extern "C" fn program(mailbox: *const Mailbox) -> ! {
    loop {
        Here::signal();
        // SAFETY: the hypervisor passes the address of the vCPU's mailbox.
        unsafe { &*mailbox }.follow(&Physical);
    }
}

/// What a vCPU has for itself, in guest-physical memory and where that is in the host's.
pub(crate) struct Private {
    gpa: Gpa,
    hpa: Hpa,
    scratch: u64,
    size: u64,
}

impl Private {
    /// Mailbox, stack, what the architecture wants, and a word for each page of the vCPU's part.
    fn size(last_words: u64) -> u64 {
        PAGE + STACK + Here::SCRATCH + (last_words * 8).next_multiple_of(PAGE)
    }

    pub(crate) fn mailbox(&self) -> &'static Mailbox {
        // SAFETY: zeroed memory that was taken for it, mapped one to one for as long as the machine runs.
        unsafe { &*(self.hpa.0 as *const Mailbox) }
    }

    pub(crate) fn range(&self) -> Option<GpaRange> {
        GpaRange::new(self.gpa, self.size)
    }

    pub(crate) fn start(&self) -> Start {
        let entry = Gpa(PROGRAM + (program as *const () as u64 - image().start));
        let stack = Gpa(self.gpa.0 + PAGE + STACK);
        let scratch = (stack, Hpa(self.hpa.0 + PAGE + STACK));
        Start { entry, argument: self.gpa.0, stack, scratch }
    }

    fn last_words(&self) -> u64 {
        PAGE + STACK + self.scratch
    }

    /// Guest-physical address of the words in which it remembers what it has stored last.
    pub(crate) fn last(&self) -> u64 {
        self.gpa.0 + self.last_words()
    }

    /// What it has stored last in a page of its part.
    pub(crate) fn last_of(&self, index: u64) -> u64 {
        let at = self.hpa.0 + self.last_words() + index * 8;
        if at + 8 > self.hpa.0 + self.size {
            return 0;
        }
        // SAFETY: in the memory that was taken for it.
        unsafe { ptr::read_volatile(at as *const u64) }
    }
}

/// The pages of the image that are mapped into guests.
pub(crate) fn image() -> Range<u64> {
    &raw const __guest_start as u64..&raw const __guest_end as u64
}

/// A guest, and where its vCPUs and the first CPU meet.
pub(crate) struct Guest {
    pub(crate) vm: MetalVm,
    pub(crate) layout: Layout,
    pub(crate) options: Options,
    pub(crate) privates: Vec<Private>,
    pub(crate) posts: [Post; MAX_CPUS],
    pub(crate) rings: Mutex<Rings>,
}

impl Guest {
    /// Builds a guest with its memory.
    ///
    /// # Errors
    /// What cannot be had.
    pub(crate) fn new(equipment: Equipment<'_>) -> Result<Self, String> {
        let Equipment { options, layout, hardware_dirty, dirty_ring, served } = equipment;
        let wanted = Wanted {
            address_bits: options.ipa_bits,
            hardware_access: options.hardware_access,
            hardware_dirty,
        };
        let format = Here::format(wanted)?;
        let (privates, private) = privates(options, layout)?;
        let memory = (layout.size, options.backing);
        let memory = Memory::new(&METAL.frames, memory, [image(), private.clone()], served);
        let memory =
            memory.ok_or("not so much memory: give the machine more, or the guest less")?;
        let vm_options = VmOptions {
            eager_split: options.eager_split,
            coherent_instructions: Here::coherent_instructions(),
            coherent_data: Here::coherent_data(),
            fault_around: options.fault_around,
            dirty_ring,
            ..VmOptions::default()
        };
        let vm = Vm::new(&METAL, memory, format, next_identifier(), vm_options);
        let vm = vm.map_err(|error| error.to_string())?;
        let mut worker = vm.worker().map_err(|error| error.to_string())?;
        create_slots(&vm, &mut worker, layout, private)?;
        let log = Log::new(layout.slots, layout.slot_pages());
        let rings = Mutex::new(Rings { worker, rings: Vec::new(), log, open: 0, broken: 0 });
        let (layout, options) = (layout.clone(), *options);
        let posts = [const { Post::new() }; MAX_CPUS];
        Ok(Self { vm, layout, options, privates, posts, rings })
    }
}

/// What a guest is built from.
pub(crate) struct Equipment<'a> {
    pub(crate) options: &'a Options,
    pub(crate) layout: &'a Layout,
    /// Hardware keeps dirty state in the entries.
    pub(crate) hardware_dirty: bool,
    /// Entries of each vCPU's dirty ring.
    pub(crate) dirty_ring: Option<u32>,
    /// Who serves pages before the guest gets them.
    pub(crate) served: Option<Served>,
}

/// VMID or ASID of the next guest: one after the other, so that nothing cached for the one before is used.
fn next_identifier() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// What each vCPU has for itself, and all of it in the host.
fn privates(options: &Options, layout: &Layout) -> Result<(Vec<Private>, Range<u64>), String> {
    let pages = layout.part(0).end - layout.part(0).start;
    let size = Private::size(if options.check && !layout.overlaps() { pages } else { 0 });
    let all = size * u64::from(layout.vcpus);
    let first = METAL.frames.guest_memory(all, PAGE).ok_or("no memory for the guest's own")?;
    let private = |index| Private {
        gpa: Gpa(PRIVATE + index * size),
        hpa: Hpa(first.0 + index * size),
        scratch: Here::SCRATCH,
        size,
    };
    let privates: Vec<_> = (0..u64::from(layout.vcpus)).map(private).collect();
    for (index, private) in (0..).zip(&privates) {
        private.mailbox().begin(options.seed, index);
    }
    Ok((privates, first.0..first.0 + all))
}

/// The workload's memory in slots from 0, then what its vCPUs have for themselves, and the program.
fn create_slots(
    vm: &MetalVm,
    worker: &mut Worker<'static, Metal>,
    layout: &Layout,
    private: Range<u64>,
) -> Result<(), String> {
    let size = layout.slot_size();
    for id in 0..layout.slots {
        let offset = u64::from(id) * size;
        let slot = SlotConfig::new(Gpa(layout.gpa + offset), size, Hva(offset));
        vm.create_slot(worker, id, slot).map_err(|error| error.to_string())?;
    }
    let size = |range: &Range<u64>| range.end - range.start;
    let hva = |range: &Range<u64>| Memory::private(Hpa(range.start));
    let image = image();
    let program = SlotConfig::new(Gpa(PROGRAM), size(&image), hva(&image));
    let program = SlotConfig { read_only: true, ..program };
    let private = SlotConfig::new(Gpa(PRIVATE), size(&private), hva(&private));
    for (id, slot) in [(PROGRAM_SLOT, program), (PRIVATE_SLOT, private)] {
        vm.create_slot(worker, id, slot).map_err(|error| error.to_string())?;
    }
    Ok(())
}
