//! Guest memory: what a hypervisor does with second-level page tables.
//!
//! An embedder makes a [`Vm`] on its machine, tells it where the guest's memory is ([`Vm::create_slot`]) and who backs
//! it ([`Host`]), and hands it each fault of a vCPU ([`Vcpu::fault`]). It reads which pages were written
//! ([`Vm::enable_log`], [`Vm::dirty_log`], [`Vm::clear_dirty_log`]), and says when it takes pages back
//! ([`Vm::invalidate_begin`]).
//!
//! ```
//! use slat::Gpa;
//! use slat::format::arm::{K4, Stage2};
//! # use slat_model as machine;
//! use slat_vm::{
//!     Access, Exit, Fault, FaultKind, Host, HostError, HostPage, Hva, LogMode, SlotConfig, Vm, VmOptions,
//! };
//! # use std::sync::Arc;
//! # struct Memory(Arc<machine::HostMemory>);
//!
//! impl Host for Memory {
//!     fn page(&self, hva: Hva, _: Access) -> Result<HostPage, HostError> {
//!         let page = self.0.page(hva.0).ok_or(HostError::NotMapped)?;
//!         let output = slat::Hpa(page.hpa.0 & !(page.size - 1));
//!         Ok(HostPage { output, size: page.size, writable: true, device: false })
//!     }
//! }
//!
//! # let machine = machine::Model::builder().build()?;
//! # let host = Memory(machine.host_memory(4 << 20, machine::Backing::AnonymousThp)?);
//! // `machine` implements `slat::Machine`; `host` answers for 4 MiB.
//! let vm = Vm::new(&machine, host, Stage2::<K4>::new(40)?, 7, VmOptions::default())?;
//! let mut worker = vm.worker()?;
//! let ram = SlotConfig::new(Gpa(0x4000_0000), 4 << 20, Hva(0));
//! vm.create_slot(&mut worker, 0, ram)?;
//!
//! // On each vCPU's thread, whenever the guest faults:
//! let mut vcpu = vm.vcpu()?;
//! let fault = Fault { gpa: Gpa(0x4000_5008), access: Access::Write, kind: FaultKind::Translation };
//! match vcpu.fault(&vm, fault)? {
//!     Exit::Resume | Exit::Retry => { /* enter the guest again */ }
//!     Exit::Mmio(access) => println!("emulate {access:?}"),
//!     other => println!("tell the guest: {other:?}"),
//! }
//!
//! // On a thread that migrates the guest, while it runs:
//! vm.enable_log(&mut worker, 0, LogMode::Protect)?;
//! vcpu.fault(&vm, Fault { kind: FaultKind::Permission, ..fault })?;
//! let mut bitmap = vec![0; 1024 / 64];
//! assert_eq!(vm.dirty_log(&mut worker, 0, &mut bitmap)?, 1);
//! assert_eq!(bitmap[0], 1 << 5);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Who waits for whom
//! Faults wait for nobody but the host: there is no lock on their path, and two vCPUs write nothing in common but the
//! entry, and the word of the log, of a page that both want. What a worker does (collecting, splitting, taking pages
//! back) runs at the same time as faults and as other workers' operations; changes of slots wait for each other. A
//! worker waits for grace periods, each as long as the longest pin.
//!
//! # What else there is
//! Slots [move and change](Vm::change_slot); a second address space is a number in [`SlotId`]. A log is a
//! [bitmap](LogMode::Protect), a [ring](DirtyRing) for each vCPU, or the [dirty state of hardware](LogMode::Hardware), with
//! [what a monitor writes itself](MonitorLog). Blocks are split [ahead of faults](VmOptions::eager_split), by
//! [any number of threads](SplitJob), and come back by faults or [on request](Vm::collapse). The host takes pages back by
//! guest or [host address](Vm::invalidate_host_begin) and asks [which were used](Vm::clear_young). Memory is mapped
//! [round](VmOptions::fault_around) and [ahead of](Vcpu::pre_fault) faults, [for good](SlotConfig::pinned), or
//! [privately](Vm::set_private). [`Vm::tables`] says what all that costs.
//!
#![cfg_attr(not(test), no_std)]

extern crate alloc;

mod address;
mod around;
mod bitmap;
mod chunks;
mod collapse;
mod collect;
mod exit;
mod fast;
mod fault;
mod hands;
mod heap;
mod host;
mod invalidate;
mod leaf;
mod lock;
mod log;
mod lookup;
mod memslots;
mod monitor;
mod prefault;
mod private;
mod progress;
mod protect;
mod reset;
mod ring;
#[cfg(not(any(loom, shuttle)))]
mod sabotage;
#[cfg(any(loom, shuttle))]
pub mod sabotage;
mod shared;
mod slot;
mod slots;
mod split;
mod sync;
mod tables;
mod template;
mod transit;
mod unmap;
mod vcpu;
mod vm;
mod window;
mod worker;
mod young;

pub use address::{Hva, HvaRange};
pub use exit::{Abort, EntryError, Exit, Fault, FaultError, FaultKind, Mmio, ReadOnly, SpaceError};
pub use heap::OutOfMemory;
pub use host::{Access, Host, HostError, HostPage};
pub use invalidate::{Guard, InvalidateError};
pub use log::{LogError, LogMode};
pub use lookup::{LookUpError, Mapping};
pub use memslots::{Slot, SlotChange};
pub use monitor::MonitorLog;
#[cfg(feature = "vm-memory")]
pub use monitor::MonitorSlice;
pub use prefault::{PreFault, PreFaultError};
pub use private::PrivateError;
pub use ring::{DirtyPage, DirtyRing};
pub use slot::{SlotConfig, SlotError, SlotId};
pub use split::SplitJob;
pub use tables::Tables;
pub use vcpu::{Vcpu, VcpuStatistics};
pub use vm::{OtherMachine, VcpuError, Vm, VmError, VmOptions};
pub use worker::{Worker, WorkerStatistics};
