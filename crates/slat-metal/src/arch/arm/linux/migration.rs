//! What one more CPU does while the guest runs: it switches the dirty log on, keeps a copy of the guest's memory by what the
//! log reports, and switches it off again, over and over.
//!
//! No vCPU is stopped for it. Before every second collection all of memory is compared with the copy, and faults that are
//! under way are waited for: what had changed by then has been marked, so a page that differs and is not reported was written
//! without being logged.

use alloc::vec;
use alloc::vec::Vec;
use core::hint;

use slat_metal::linux::report::Migration;
use slat_vm::{LogError, LogMode, Worker};

use super::memory::Copy;
use super::{Guest, RAM_SLOT};
use crate::arch::{Arch, Here};
use crate::console;
use crate::machine::{METAL, Metal};

/// Collections of one round.
const PASSES: u32 = 4;
/// Between collections: back to back, invalidations starve the vCPUs.
const PAUSE_MS: u64 = 10;

struct Migrating {
    guest: &'static Guest,
    worker: Worker<'static, Metal>,
    copy: Copy,
    bitmap: Vec<u64>,
    /// Pages that were not as they had been copied.
    changed: Vec<u64>,
    found: Migration,
}

/// Round by round until the guest ends; what they came to is left in `guest.migration`.
pub(super) fn run(guest: &'static Guest) -> ! {
    let worker = match guest.vm.worker() {
        Ok(worker) => worker,
        Err(why) => console::fail(format_args!("no worker: {why}")),
    };
    let memory = guest.vm.host();
    let words = memory.pages().div_ceil(64) as usize;
    let Some(copy) = Copy::new(&METAL.frames, memory) else {
        console::fail(format_args!("bytes: the machine has no memory for a copy"));
    };
    let mut migrating = Migrating {
        guest,
        worker,
        copy,
        bitmap: vec![0; words],
        changed: vec![0; words],
        found: Migration::default(),
    };
    loop {
        let began = Here::ticks();
        // Whether the guest ends meanwhile or not, what was begun is compared.
        if let Err(why) = migrating.round() {
            console::fail(format_args!("dirty log: {why}"));
        }
        // As long without a log, so that the guest gets on, and has blocks.
        let took = Here::ticks() - began;
        if guest.is_over_within(took) {
            break;
        }
    }
    let Migrating { worker, found, .. } = migrating;
    guest.note_walks(worker.participant(), worker.statistics().collapsed);
    *guest.migration.lock() = Some(found);
    loop {
        hint::spin_loop();
    }
}

impl Migrating {
    fn round(&mut self) -> Result<(), LogError> {
        let (guest, worker) = (self.guest, &mut self.worker);
        // By turns: every page counts as written at first, or none does and all are copied here.
        let all_set = self.found.rounds % 2 == 1;
        let mode =
            if all_set { LogMode::Manual { initially_all_set: true } } else { LogMode::Protect };
        guest.vm.enable_log(worker, RAM_SLOT, mode)?;
        let memory = guest.vm.host();
        if !all_set {
            (0..memory.pages()).for_each(|page| self.copy.take(memory, page));
        }
        // A write that no collection has stays in the copy until something compares: every second one does, once all has
        // been copied.
        for pass in 0..PASSES {
            self.collect(mode, pass % 2 == 1)?;
            pause(PAUSE_MS);
        }
        guest.vm.disable_log(&mut self.worker, RAM_SLOT)?;
        guest.vm.collapse(&mut self.worker, RAM_SLOT)?;
        self.found.rounds += 1;
        Ok(())
    }

    /// Asks what was written, and copies it; compares before, where that is wanted.
    fn collect(&mut self, mode: LogMode, compare: bool) -> Result<(), LogError> {
        let vm = &self.guest.vm;
        let memory = vm.host();
        self.changed.fill(0);
        if compare {
            for page in 0..memory.pages() {
                let changed = !self.copy.holds(memory, page);
                self.changed[page as usize / 64] |= u64::from(changed) << (page % 64);
            }
            self.guest.wait_for_writes();
            self.found.compared += memory.pages();
        }
        self.found.dirty += vm.dirty_log(&mut self.worker, RAM_SLOT, &mut self.bitmap)?;
        if mode != LogMode::Protect {
            vm.clear_dirty_log(&mut self.worker, RAM_SLOT, 0, memory.pages(), &self.bitmap)?;
        }
        for (number, (&dirty, &changed)) in self.bitmap.iter().zip(&self.changed).enumerate() {
            self.found.changed += u64::from(changed.count_ones());
            self.found.lost += u64::from((changed & !dirty).count_ones());
            let mut left = dirty;
            while left != 0 {
                self.copy.take(memory, number as u64 * 64 + u64::from(left.trailing_zeros()));
                left &= left - 1;
            }
        }
        self.found.collections += 1;
        Ok(())
    }
}

fn pause(milliseconds: u64) {
    let until = Here::ticks() + Here::ticks_per_second() / 1000 * milliseconds;
    while Here::ticks() < until {
        hint::spin_loop();
    }
}
