//! How much memory the machine needs for a guest.

use crate::config::GuestConfig;
use crate::failure::Failure;
use crate::layout::Layout;
use crate::size::Size;

/// For the hypervisor itself, its stacks, tables, dirty rings, and the programs of guests.
const BESIDE: u64 = 64 << 20;
/// Of the hypervisor's memory so many eighths are for guests and tables, and one for what it allocates.
const FRAMES: u64 = 7;

/// Memory in one piece.
///
/// # Errors
/// [`Failure::Usage`]: this computer has not so much.
pub(super) fn needed(layout: &Layout, guest: &GuestConfig) -> Result<Size, Failure> {
    // A piece can begin anywhere, and large pages cannot.
    let align = if guest.backing_page.0 > layout.page { guest.backing_page.0 } else { 0 };
    let tables = layout.host_size / 256;
    let frames = [align, tables, BESIDE].into_iter().try_fold(layout.host_size, u64::checked_add);
    let all = frames.and_then(|frames| (frames / FRAMES).checked_mul(FRAMES + 1));
    let all = all.and_then(|all| all.checked_next_multiple_of(1 << 20));
    match (all, slat_model::available()) {
        (Some(all), Some(available)) if layout.host_size <= available => Ok(Size(all)),
        (Some(all), None) => Ok(Size(all)),
        (_, available) => {
            let mib = |bytes: u64| bytes >> 20;
            let available = available
                .map_or_else(String::new, |there| format!(": {} MiB are available", mib(there)));
            Err(Failure::Usage(format!(
                "{} MiB of guest memory are more than this computer has{available}; use less memory or fewer vCPUs",
                mib(layout.host_size)
            )))
        }
    }
}
