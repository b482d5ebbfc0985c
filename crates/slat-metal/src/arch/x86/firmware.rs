//! What the boot loader and the firmware say of the board: PVH's start info (Xen, `public/arch-x86/hvm/start_info.h`)
//! and ACPI's tables (ACPI specification 6.5, 5.2).
#![expect(unsafe_code, reason = "reads what was put into memory before us")]

use core::ffi::CStr;
use core::ops::Range;

use crate::arch::MAX_CPUS;

/// Every structure that is read lies below this, which is mapped.
const MAPPED: u64 = 512 << 30;
const LOW_MEMORY_END: u64 = 1 << 20;
const START_INFO_MAGIC: u32 = 0x336e_c578;
/// Type of a range of the memory map that is memory.
const MEMORY: u32 = 1;

/// The start info, for as long as nobody has written to memory that it lies in.
pub(super) struct StartInfo(u64);

/// What ACPI's tables say.
pub(super) struct Board {
    /// Local APIC identifiers of the CPUs that can be started, the first `cpus` of them.
    pub(super) apics: [u8; MAX_CPUS],
    pub(super) cpus: usize,
    /// Port of the power-management timer.
    pub(super) timer: u16,
    /// Port that turns the machine off.
    pub(super) control: u16,
}

/// What lies at an address, `None` if it cannot.
fn at<T: Number>(address: u64) -> Option<T> {
    if address == 0 || address > MAPPED - 8 {
        return None;
    }
    // SAFETY: it is mapped, and every pattern of bits is a number.
    Some(unsafe { (address as *const T).read_unaligned() })
}

trait Number: Copy {}
impl Number for u8 {}
impl Number for u16 {}
impl Number for u32 {}
impl Number for u64 {}

impl StartInfo {
    pub(super) fn new(address: u64) -> Option<Self> {
        let version: u32 = at(address + 4)?;
        // From version 1 on there is a memory map.
        (at::<u32>(address)? == START_INFO_MAGIC && version >= 1).then_some(Self(address))
    }

    pub(super) fn command_line(&self) -> Option<&'static str> {
        let address: u64 = at(self.0 + 24)?;
        if address == 0 || address >= LOW_MEMORY_END {
            return None;
        }
        // SAFETY: the boot loader has put a string there, in low memory, of which we use one page only.
        unsafe { CStr::from_ptr(address as *const _) }.to_str().ok()
    }

    /// The largest range of memory from `image_end` on.
    pub(super) fn largest_memory(&self, image_end: u64) -> Option<Range<u64>> {
        let (map, entries): (u64, u32) = (at(self.0 + 40)?, at(self.0 + 48)?);
        let ranges = (0..u64::from(entries)).filter_map(|index| {
            let entry = map + index * 24;
            let (start, size): (u64, u64) = (at(entry)?, at(entry + 8)?);
            let end = start.checked_add(size)?.min(MAPPED);
            (at::<u32>(entry + 16)? == MEMORY).then(|| start.max(image_end)..end)
        });
        ranges.filter(|range| !range.is_empty()).max_by_key(|range| range.end - range.start)
    }

    pub(super) fn board(&self) -> Option<Board> {
        let rsdp: u64 = at(self.0 + 32)?;
        let mut board = Board { apics: [0; MAX_CPUS], cpus: 0, timer: 0, control: 0 };
        each_table(rsdp, |name, table| match &name {
            b"FACP" => {
                board.control = at(table + 64)?;
                board.timer = at(table + 76)?;
                Some(())
            }
            b"APIC" => board.read_apics(table),
            _ => Some(()),
        })?;
        (board.cpus > 0 && board.timer != 0).then_some(board)
    }
}

impl Board {
    /// The processors of the "Multiple APIC Description Table" (ACPI, 5.2.12).
    fn read_apics(&mut self, table: u64) -> Option<()> {
        const PROCESSOR: u8 = 0;
        const ENABLED: u32 = 1;
        let end = table + u64::from(at::<u32>(table + 4)?);
        let mut entry = table + 44;
        while entry + 2 <= end {
            let (kind, size): (u8, u8) = (at(entry)?, at(entry + 1)?);
            if kind == PROCESSOR && at::<u32>(entry + 4)? & ENABLED != 0 && self.cpus < MAX_CPUS {
                self.apics[self.cpus] = at(entry + 3)?;
                self.cpus += 1;
            }
            entry += u64::from(size.max(2));
        }
        Some(())
    }
}

/// Calls `look` with the name and the address of every table.
fn each_table(rsdp: u64, mut look: impl FnMut([u8; 4], u64) -> Option<()>) -> Option<()> {
    let revision: u8 = at(rsdp + 15)?;
    let (root, wide) = match revision {
        0 => (at::<u32>(rsdp + 16)?.into(), false),
        _ => (at::<u64>(rsdp + 24)?, true),
    };
    let end = root + u64::from(at::<u32>(root + 4)?);
    let mut entry = root + 36;
    while entry < end {
        let table = if wide { at::<u64>(entry)? } else { at::<u32>(entry)?.into() };
        look(at::<u32>(table)?.to_le_bytes(), table)?;
        entry += if wide { 8 } else { 4 };
    }
    Some(())
}
