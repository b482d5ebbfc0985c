//! How x86 hardware translates guest-physical addresses: Intel EPT (SDM vol. 3C, 29.3) and AMD nested paging (APM vol. 2,
//! 15.25), written from the manuals and not from the engine.

mod entry;
pub(crate) mod registers;

pub(crate) use entry::{EPT_ACCESSED, EPT_DIRTY, NPT_ACCESSED, NPT_DIRTY};
