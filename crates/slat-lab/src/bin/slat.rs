//! The `slat` command; what it does is in the library beside it.

use std::process::ExitCode;

fn main() -> ExitCode {
    slat_lab::main()
}
