//! Any command line makes sense, or is refused with a reason; it never panics.
#![no_main]

use libfuzzer_sys::fuzz_target;

// Arguments are separated by line feeds.
fuzz_target!(|line: &str| {
    let arguments = std::iter::once("slat").chain(line.split('\n'));
    if let Err(refusal) = slat_lab::parse(arguments) {
        assert!(!refusal.trim().is_empty());
    }
});
