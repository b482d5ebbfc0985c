//! What `--backend kvm` says where this program cannot drive a KVM.

use crate::failure::Failure;

/// Runs nothing.
///
/// # Errors
/// [`Failure::Missing`].
pub(crate) fn run<O>(_: &O) -> Result<(), Failure> {
    print_info()
}

/// Prints nothing.
///
/// # Errors
/// [`Failure::Missing`].
pub(crate) fn print_info() -> Result<(), Failure> {
    let why = "KVM: not yet on this kind of computer; Linux on x86-64 has it";
    Err(Failure::Missing(why.to_owned()))
}
