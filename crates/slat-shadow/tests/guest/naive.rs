//! What a CPU without TLB would do with the guest's own tables: the specification.

use slat_shadow::{GuestAccess, PagingMode};
use slat_vm::Access;

use super::{ADDRESS, LARGE, Memory, NX, Outcome, P, U, W};

/// The guest-physical address that the access reaches, or the error code.
pub fn walk(memory: &Memory, mode: PagingMode, cr3: u64, gva: u64, access: GuestAccess) -> Outcome {
    let write = access.kind == Access::Write;
    let fetch = access.kind == Access::Execute;
    let code = u32::from(write) << 1 | u32::from(access.user) << 2 | u32::from(fetch) << 4;
    let (mut table, mut write_ok, mut user_ok, mut fetch_ok) = (cr3 & ADDRESS, true, true, true);
    let top = if mode.five_level { 4 } else { 3 };
    for height in (0..=top).rev() {
        let shift = 12 + 9 * height;
        let entry = memory.word(table + (gva >> shift & 511) * 8).get();
        if entry & P == 0 {
            return Err(code);
        }
        let leaf = height == 0 || entry & LARGE != 0;
        let mut reserved = ADDRESS & !((1 << mode.physical_bits) - 1);
        if height > 2 {
            reserved |= LARGE;
        } else if height > 0 && leaf {
            reserved |= (1 << shift) - (1 << 13);
        }
        if entry & reserved != 0 {
            return Err(code | 1 | 8);
        }
        write_ok &= entry & W != 0;
        user_ok &= entry & U != 0;
        fetch_ok &= entry & NX == 0;
        if leaf {
            let forbidden = access.user && !user_ok
                || write && !write_ok && (access.user || mode.write_protect)
                || fetch && (!fetch_ok || mode.smep && user_ok && !access.user)
                || !fetch && mode.smap && user_ok && !access.user && !access.user_data_allowed;
            let size = 1 << shift;
            let page = entry & ADDRESS & !(size - 1);
            return if forbidden { Err(code | 1) } else { Ok(page | gva & (size - 1)) };
        }
        table = entry & ADDRESS;
    }
    unreachable!("the last level has only leaves")
}
