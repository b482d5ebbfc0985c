//! How amounts of memory are written on the command line and in tables: `4096`, `64K`, `256M`, `4G`.

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};

const SUFFIXES: [(char, u32); 5] = [('B', 0), ('K', 10), ('M', 20), ('G', 30), ('T', 40)];

/// An amount of memory in bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Size(pub(crate) u64);

/// Why a text is no amount of memory.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub(crate) enum SizeError {
    #[error("write a whole number with an optional B, K, M, G or T, such as 256M or 4G")]
    Form,
    #[error("that is more than 64 bits can count")]
    TooLarge,
}

impl FromStr for Size {
    type Err = SizeError;

    /// A whole number of bytes, or of the unit that follows it: `K`, `M`, `G`, `T` are powers of 1024, in either case,
    /// with or without `iB` or `B`.
    fn from_str(text: &str) -> Result<Self, SizeError> {
        let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (digits, unit) = text.split_at(end);
        if digits.is_empty() {
            return Err(SizeError::Form);
        }
        let number: u64 = digits.parse().map_err(|_| SizeError::TooLarge)?;
        let shift = shift(unit).ok_or(SizeError::Form)?;
        let bytes = number.checked_mul(1 << shift).ok_or(SizeError::TooLarge)?;
        Ok(Self(bytes))
    }
}

/// log2 of a unit.
fn shift(unit: &str) -> Option<u32> {
    let Some(first) = unit.chars().next() else {
        return Some(0);
    };
    let (letter, shift) = SUFFIXES.into_iter().find(|(c, _)| c.eq_ignore_ascii_case(&first))?;
    let rest = &unit[letter.len_utf8()..];
    let plain = rest.is_empty();
    let spelled = rest.eq_ignore_ascii_case("ib") || rest.eq_ignore_ascii_case("b");
    (plain || (shift > 0 && spelled)).then_some(shift)
}

impl fmt::Display for Size {
    /// In the largest unit that divides it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = SUFFIXES.into_iter().skip(1).rev();
        for (letter, shift) in units {
            if self.0 != 0 && self.0.is_multiple_of(1 << shift) {
                return write!(f, "{}{letter}", self.0 >> shift);
            }
        }
        write!(f, "{}", self.0)
    }
}

impl Serialize for Size {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_the_kernel_tests_read_them() {
        let read = |text: &str| text.parse::<Size>().map(|size| size.0);
        assert_eq!(read("0"), Ok(0));
        assert_eq!(read("4096"), Ok(4096));
        assert_eq!(read("4096b"), Ok(4096));
        assert_eq!(read("64K"), Ok(64 << 10));
        assert_eq!(read("256M"), Ok(256 << 20));
        assert_eq!(read("4g"), Ok(4 << 30));
        assert_eq!(read("2MiB"), Ok(2 << 20));
        assert_eq!(read("1tb"), Ok(1 << 40));
    }

    #[test]
    fn anything_else_is_refused() {
        for text in ["", "M", "1.5G", "-1", "1 G", "1X", "1Gi", "1GG", "4bib", "0x10", "1ᴷ"] {
            assert_eq!(text.parse::<Size>(), Err(SizeError::Form), "{text}");
        }
        for text in ["18446744073709551616", "16777216T", "99999999999999999999999G"] {
            assert_eq!(text.parse::<Size>(), Err(SizeError::TooLarge), "{text}");
        }
    }

    #[test]
    fn sizes_are_shown_in_the_largest_unit_that_divides_them() {
        let shown = |bytes| Size(bytes).to_string();
        assert_eq!(shown(0), "0");
        assert_eq!(shown(4095), "4095");
        assert_eq!(shown(4096), "4K");
        assert_eq!(shown(3 << 29), "1536M");
        assert_eq!(shown(1 << 52), "4096T");
    }
}
