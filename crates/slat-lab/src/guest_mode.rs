//! What kind of guest runs: the guest modes of the kernel's KVM tests on arm64, under the kernel's numbers and names.

use std::str::FromStr;

use serde::Serialize;

use crate::size::Size;

/// How wide a guest's addresses are and how large its pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct GuestMode {
    /// The number that `-m` takes, as in Linux 6.12. Numbers of other architectures' modes are missing.
    pub(crate) number: u32,
    /// The kernel's name without `VM_MODE_`.
    pub(crate) name: &'static str,
    /// Width of a guest-physical address.
    pub(crate) physical_bits: u32,
    /// Width of a guest-virtual address. The modelled guest runs with its own translation off, so it is only shown.
    pub(crate) virtual_bits: u32,
    /// Bytes of a guest page: the distance from one access to the next.
    pub(crate) page_size: Size,
}

const fn mode(number: u32, name: &'static str, bits: (u32, u32), kilobytes: u64) -> GuestMode {
    let (physical_bits, virtual_bits) = bits;
    GuestMode { number, name, physical_bits, virtual_bits, page_size: Size(kilobytes << 10) }
}

/// All of them, by number.
pub(crate) const GUEST_MODES: [GuestMode; 13] = [
    mode(0, "P52V48_4K", (52, 48), 4),
    mode(1, "P52V48_16K", (52, 48), 16),
    mode(2, "P52V48_64K", (52, 48), 64),
    mode(3, "P48V48_4K", (48, 48), 4),
    mode(4, "P48V48_16K", (48, 48), 16),
    mode(5, "P48V48_64K", (48, 48), 64),
    mode(6, "P40V48_4K", (40, 48), 4),
    mode(7, "P40V48_16K", (40, 48), 16),
    mode(8, "P40V48_64K", (40, 48), 64),
    mode(12, "P36V48_4K", (36, 48), 4),
    mode(13, "P36V48_16K", (36, 48), 16),
    mode(14, "P36V48_64K", (36, 48), 64),
    mode(15, "P36V47_16K", (36, 47), 16),
];

/// The mode that is taken where none is named.
pub(crate) const DEFAULT: &str = "P40V48_4K";

/// No mode has this number or name.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("no guest mode has this number or name; `-m help` lists them")]
pub(crate) struct UnknownMode;

impl FromStr for GuestMode {
    type Err = UnknownMode;

    /// By number, or by name in any case, with or without `VM_MODE_`.
    fn from_str(text: &str) -> Result<Self, UnknownMode> {
        let upper = text.to_ascii_uppercase();
        let name = upper.strip_prefix("VM_MODE_").unwrap_or(&upper);
        let number = text.parse().ok();
        let found = |mode: &GuestMode| mode.name == name || Some(mode.number) == number;
        GUEST_MODES.into_iter().find(found).ok_or(UnknownMode)
    }
}

/// One line for each mode, for `-m help`.
pub(crate) fn list() -> String {
    let mut lines = vec!["number  name        PA bits  VA bits  guest page".to_owned()];
    for GuestMode { number, name, physical_bits, virtual_bits, page_size } in GUEST_MODES {
        let default = if name == DEFAULT { "  (default)" } else { "" };
        lines.push(format!(
            "{number:>6}  {name:<10}  {physical_bits:>7}  {virtual_bits:>7}  {:>10}{default}",
            page_size.to_string(),
        ));
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mode_is_found_by_number_and_by_name() {
        for mode in GUEST_MODES {
            assert_eq!(mode.number.to_string().parse(), Ok(mode));
            assert_eq!(mode.name.parse(), Ok(mode));
            assert_eq!(mode.name.to_ascii_lowercase().parse(), Ok(mode));
            assert_eq!(format!("VM_MODE_{}", mode.name).parse(), Ok(mode));
        }
        assert!(DEFAULT.parse::<GuestMode>().is_ok());
    }

    #[test]
    fn names_say_what_the_mode_is() {
        for mode in GUEST_MODES {
            let said = format!("P{}V{}_{}", mode.physical_bits, mode.virtual_bits, mode.page_size);
            assert_eq!(mode.name, said);
        }
    }

    #[test]
    fn modes_of_other_architectures_are_unknown() {
        for text in ["9", "10", "11", "16", "-1", "", "PXXV48_4K", "P47V64_4K", "P40V48"] {
            assert_eq!(text.parse::<GuestMode>(), Err(UnknownMode), "{text}");
        }
    }
}
