//! How a trace lies in a file: lines of text that say what it is, an empty line, then a number or two for each run of
//! pages. `docs/README.md` describes it.

use std::fs;
use std::path::Path;

use super::{Run, Trace};
use crate::failure::Failure;

const MAGIC: &str = "slat touches 1";
/// Bytes of the longest number.
const LONGEST: usize = 10;

/// What Debian's kernel touched as it booted on slat's hypervisor: `slat boot --backend metal --record`.
const BOOT: &[u8] = include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/data/boot.touches"));

/// What a guest touched that booted.
///
/// # Errors
/// None, unless the file that is part of the program was spoilt before it was built.
pub(crate) fn boot() -> Result<Trace, Failure> {
    parse(BOOT).map_err(|bad| Failure::Run(format!("the recorded boot: {bad}")))
}

/// Why a file is no trace.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
enum Bad {
    #[error("no trace of touches: the first line is not \"{MAGIC}\"")]
    Magic,
    #[error("its lines do not end with an empty one")]
    Endless,
    #[error("line \"{0}\": it knows origin, page, memory and touches, once each, with a value")]
    Line(String),
    #[error("there is no line \"{0}\"")]
    Missing(&'static str),
    #[error(
        "page {page}, memory {memory}: pages are powers of two from 4096, memory is whole pages"
    )]
    Memory { page: u64, memory: u64 },
    #[error("byte {0}: it ends in the middle of a run")]
    Short(usize),
    #[error("byte {0}: a number of more than 64 bits")]
    Long(usize),
    #[error("byte {at}: a run outside of the {pages} pages of the guest's memory")]
    Outside { at: usize, pages: u64 },
    #[error("it has {found} touches and says {said}: something is missing or was added")]
    Count { found: u128, said: u64 },
}

impl Trace {
    /// What a file holds.
    ///
    /// # Errors
    /// [`Failure::Usage`]: it cannot be read, or is no trace.
    pub(crate) fn load(path: &Path) -> Result<Self, Failure> {
        let bytes = fs::read(path);
        let bytes = bytes.map_err(|why| Failure::Usage(format!("{}: {why}", path.display())))?;
        parse(&bytes).map_err(|bad| Failure::Usage(format!("{}: {bad}", path.display())))
    }

    /// Writes it to a file.
    ///
    /// # Errors
    /// [`Failure::Output`].
    pub(crate) fn save(&self, path: &Path) -> Result<(), Failure> {
        Ok(fs::write(path, self.bytes())?)
    }

    fn bytes(&self) -> Vec<u8> {
        let Self { origin, page, pages, runs } = self;
        let origin = origin.replace(['\n', '\r'], " ");
        let (memory, touches) = (pages * page, self.touches());
        let head = format!(
            "{MAGIC}\norigin {origin}\npage {page}\nmemory {memory}\ntouches {touches}\n\n"
        );
        let mut bytes = head.into_bytes();
        let mut next = 0;
        for run in runs {
            let more = u64::from(run.count > 1);
            let way = run.first.wrapping_sub(next).cast_signed();
            // Near pages in either direction are small numbers.
            let zigzag = ((way << 1) ^ (way >> 63)).cast_unsigned();
            put(&mut bytes, zigzag << 2 | u64::from(run.write) << 1 | more);
            if run.count > 1 {
                put(&mut bytes, run.count - 2);
            }
            next = run.end();
        }
        bytes
    }
}

/// Seven bits a byte, the lowest first; the last byte has its top bit clear.
fn put(bytes: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

fn parse(bytes: &[u8]) -> Result<Trace, Bad> {
    let rest = bytes.strip_prefix(MAGIC.as_bytes()).and_then(|rest| rest.strip_prefix(b"\n"));
    let rest = rest.ok_or(Bad::Magic)?;
    let end = rest.windows(2).position(|pair| pair == b"\n\n").ok_or(Bad::Endless)?;
    let head = String::from_utf8_lossy(&rest[..end]);
    let (mut origin, mut page, mut memory, mut touches) = (None, None, None, None);
    for line in head.lines() {
        let bad = || Bad::Line(line.to_owned());
        let (key, value) = line.split_once(' ').ok_or_else(bad)?;
        let number = || value.parse::<u64>().map_err(|_| bad());
        let again = match key {
            "origin" => origin.replace(value.to_owned()).is_some(),
            "page" => page.replace(number()?).is_some(),
            "memory" => memory.replace(number()?).is_some(),
            "touches" => touches.replace(number()?).is_some(),
            _ => return Err(bad()),
        };
        if again {
            return Err(bad());
        }
    }
    let origin = origin.ok_or(Bad::Missing("origin"))?;
    let page = page.ok_or(Bad::Missing("page"))?;
    let memory = memory.ok_or(Bad::Missing("memory"))?;
    let said = touches.ok_or(Bad::Missing("touches"))?;
    if !page.is_power_of_two() || page < 4096 || memory == 0 || !memory.is_multiple_of(page) {
        return Err(Bad::Memory { page, memory });
    }
    let pages = memory / page;
    let at = bytes.len() - rest.len() + end + 2;
    let runs = Records { bytes, at }.runs(pages)?;
    let found = runs.iter().map(|run| u128::from(run.count)).sum();
    if found != u128::from(said) {
        return Err(Bad::Count { found, said });
    }
    Ok(Trace { origin, page, pages, runs })
}

struct Records<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Records<'_> {
    fn runs(mut self, pages: u64) -> Result<Vec<Run>, Bad> {
        let mut runs = Vec::new();
        let mut next = 0_u64;
        while self.at < self.bytes.len() {
            let at = self.at;
            let number = self.number()?;
            let count = if number & 1 == 1 { self.number()?.checked_add(2) } else { Some(1) };
            let zigzag = number >> 2;
            let way = (zigzag >> 1).cast_signed() ^ -(zigzag & 1).cast_signed();
            let first = next.checked_add_signed(way);
            let end = first.zip(count).and_then(|(first, count)| first.checked_add(count));
            let inside = end.filter(|end| *end <= pages);
            let (Some(first), Some(count), Some(end)) = (first, count, inside) else {
                return Err(Bad::Outside { at, pages });
            };
            runs.push(Run { first, count, write: number & 2 != 0 });
            next = end;
        }
        Ok(runs)
    }

    fn number(&mut self) -> Result<u64, Bad> {
        let start = self.at;
        let mut number = 0_u64;
        for place in 0..LONGEST {
            let byte = *self.bytes.get(self.at).ok_or(Bad::Short(start))?;
            self.at += 1;
            let bits = u64::from(byte & 0x7f);
            if place == LONGEST - 1 && bits > 1 {
                break;
            }
            number |= bits << (7 * place);
            if byte & 0x80 == 0 {
                return Ok(number);
            }
        }
        Err(Bad::Long(start))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace() -> Trace {
        let run = |first, count, write| Run { first, count, write };
        let runs = vec![run(0, 1, true), run(1000, 500, false), run(3, 2, true), run(3, 1, true)];
        Trace { origin: "a test".to_owned(), page: 4096, pages: 1500, runs }
    }

    fn with(head: &str, records: &[u8]) -> Result<Trace, Bad> {
        parse(&[head.as_bytes(), records].concat())
    }

    const HEAD: &str = "slat touches 1\norigin x\npage 4096\nmemory 8192\ntouches 1\n\n";

    #[test]
    fn the_recorded_boot_is_small_and_says_where_it_is_from() {
        let boot = boot().unwrap();
        assert!(boot.origin.starts_with("recorded: slat boot --backend metal"), "{}", boot.origin);
        assert!(boot.touches() > 10_000 && BOOT.len() < 300 << 10);
        let mut pages: Vec<_> = boot.runs.iter().flat_map(|run| run.first..run.end()).collect();
        pages.sort_unstable();
        // A page is touched for the first time once.
        assert!(pages.is_sorted_by(|page, next| page < next));
    }

    #[test]
    fn what_was_written_is_read() {
        assert_eq!(parse(&trace().bytes()), Ok(trace()));
    }

    #[test]
    fn every_file_that_was_cut_short_is_refused() {
        let bytes = trace().bytes();
        for end in 0..bytes.len() {
            assert!(parse(&bytes[..end]).is_err(), "{end}");
        }
    }

    #[test]
    fn no_flipped_bit_panics() {
        let bytes = trace().bytes();
        for bit in 0..bytes.len() * 8 {
            let mut bytes = bytes.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            if let Ok(trace) = parse(&bytes) {
                assert!(trace.runs.iter().all(|run| run.end() <= trace.pages));
            }
        }
    }

    #[test]
    fn a_file_that_is_no_trace_says_why() {
        assert_eq!(with("ELF", &[]), Err(Bad::Magic));
        assert_eq!(with("slat touches 1\npage 4096\n", &[]), Err(Bad::Endless));
        let head = |line: &str| HEAD.replace("page 4096", line);
        for line in ["page", "page 4K", "colour blue", "memory 8192"] {
            assert!(matches!(with(&head(line), &[0]), Err(Bad::Line(_))), "{line}");
        }
        assert_eq!(with(&HEAD.replace("page 4096\n", ""), &[0]), Err(Bad::Missing("page")));
        assert!(matches!(with(&head("page 512"), &[0]), Err(Bad::Memory { .. })));
        assert!(matches!(with(HEAD, &[0x80; 11]), Err(Bad::Long(_))));
        assert!(matches!(with(HEAD, &[0x80]), Err(Bad::Short(_))));
        // Below the first page, and beyond the last one.
        for records in [&[4_u8][..], &[16], &[1, 1]] {
            assert!(matches!(with(HEAD, records), Err(Bad::Outside { .. })), "{records:?}");
        }
        assert_eq!(with(HEAD, &[]), Err(Bad::Count { found: 0, said: 1 }));
        assert_eq!(with(HEAD, &[0, 0]), Err(Bad::Count { found: 2, said: 1 }));
        assert!(with(HEAD, &[0]).is_ok());
    }
}
