//! A machine made of software, for the engine of `slat` to run on: table memory, CPUs with TLBs, walk caches and a
//! hardware table walker, host memory, and a checker of the architecture's rules.
//!
//! Table memory is real memory. The table walker is written from the architecture manual and reads the very entries
//! that the engine writes, so a wrong bit is a wrong translation. Guests' accesses are real loads and stores into host
//! memory, so contents can be checked. TLBs and walk caches never forget by themselves and every invalidation takes
//! effect as late and on as little as the architecture allows: what works here does not depend on luck.
//!
//! Arm, Intel or AMD: [`Builder::architecture`]. On x86 a CPU's TLB is its own business. The checker knows that a vCPU outside
//! its gate may keep anything that it will invalidate before it enters, and watches that it does.
//!
//! ```
//! use slat::Gpa;
//! use slat_model::{Access, Backing, FaultKind, Model, Registers};
//! use slat::Machine;
//!
//! let model = Model::builder().cpus(2).build()?;
//! let memory = model.host_memory(4 << 20, Backing::Anonymous)?;
//! let root = model.allocate(2).expect("there is table memory");
//! // 40-bit addresses, 4K granule, start at level 1; VMID 7.
//! let registers = Registers { vttbr: root.0 | 7 << 48, vtcr: 0x800a_3558 };
//! let mut cpu = model.cpu(0, registers).expect("nobody has taken it");
//! let fault = cpu.read(Gpa(0x1000)).unwrap_err();
//! assert_eq!(fault.access, Access::Read);
//! assert!(matches!(fault.kind, FaultKind::Translation { level } if level.number() == 1));
//! assert_eq!(memory.page(0x1000).map(|page| page.size), Some(4096));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod arm;
mod available;
mod builder;
mod checker;
pub mod clock;
mod counters;
mod cpu;
mod descriptor;
mod execute;
mod host;
mod lock;
mod long_mode;
mod mapping;
mod model;
mod physical;
mod regime;
mod tables;
mod thread;
mod tlb;
mod walk;
mod x86;

pub use arm::registers::{Features, Registers};
pub use available::available;
pub use builder::{BuildError, Builder};
pub use checker::{Before, CachedLeaf, OnViolation, Reach, Report, Until, Violation};
pub use counters::Counters;
pub use cpu::{Access, Cpu, Fault, FaultKind, Translated};
pub use descriptor::MemoryType;
pub use host::{Backing, HostMemory, HostMemoryError, HostPage};
pub use long_mode::{LinearAccess, LongMode, LongModeCpu, Translation as LinearTranslation};
pub use model::Model;
pub use regime::{Architecture, Control, Modelled};
pub use thread::Step;
pub use x86::registers::{EptRegisters, NptRegisters};
