//! Which ports and model-specific registers a guest uses without leaving: none (AMD APM vol. 2, 15.10 and 15.11).

/// The larger of the two maps, that of ports, is three pages. A bit that is set makes the guest leave.
#[repr(C, align(4096))]
struct Map([u8; 3 * 4096]);

static NOTHING: Map = Map([u8::MAX; 3 * 4096]);

/// Address of a map of either kind that permits nothing.
pub(super) fn nothing() -> u64 {
    &raw const NOTHING as u64
}
