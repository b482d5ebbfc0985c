//! Bytes are a machine and operations on guest memory, judged as in slat-vm's property tests.
#![no_main]

#[path = "../../crates/slat-vm/tests/reference/mod.rs"]
mod reference;

use std::env;

use libfuzzer_sys::fuzz_target;

use reference::judge;
use reference::operation::{Numbers, Operation, Setup};

/// As many operations as a run of libFuzzer should take.
const OPERATIONS: usize = 200;

struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn next(&mut self) -> u64 {
        let byte = self.0.split_off_first();
        byte.copied().unwrap_or(0).into()
    }
}

impl Numbers for Bytes<'_> {
    fn below(&mut self, bound: u64) -> u64 {
        let number = self.next();
        if bound <= 256 { number % bound } else { (number | self.next() << 8) % bound }
    }
}

fuzz_target!(|bytes: &[u8]| {
    let mut bytes = Bytes(bytes);
    let setup = Setup::choose(&mut bytes);
    let tell = env::var_os("SLAT_TELL").is_some();
    let mut operations = 0;
    judge::run(&setup, |reference| {
        operations += 1;
        let more = operations <= OPERATIONS && !bytes.0.is_empty();
        let operation = more.then(|| Operation::choose(reference, &mut bytes))?;
        if tell {
            eprintln!("{operation:x?}");
        }
        Some(operation)
    });
});
