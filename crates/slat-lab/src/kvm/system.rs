//! Is there a KVM that can be used?

use kvm_bindings::KVM_API_VERSION;
use kvm_ioctls::Kvm;

use crate::failure::Failure;

/// Opens `/dev/kvm`.
///
/// # Errors
/// [`Failure::Missing`] with what to do about it.
pub(crate) fn open() -> Result<Kvm, Failure> {
    let kvm = Kvm::new().map_err(|error| Failure::Missing(why(error.errno())))?;
    let version = kvm.get_api_version();
    if version.unsigned_abs() == KVM_API_VERSION {
        return Ok(kvm);
    }
    Err(Failure::Missing(format!(
        "this host's KVM has version {version} of the interface; version {KVM_API_VERSION} is what there is since 2007"
    )))
}

fn why(errno: i32) -> String {
    match errno {
        libc::ENOENT => "no /dev/kvm: load kvm_intel or kvm_amd, and enable virtualization in the firmware, or in the \
                         hypervisor that this computer is a guest of"
            .to_owned(),
        libc::EACCES | libc::EPERM => {
            "/dev/kvm: no permission; join the group that owns it (often kvm), or run as root".to_owned()
        }
        libc::ENODEV | libc::ENXIO => {
            "/dev/kvm is there and no module behind it: load kvm_intel or kvm_amd".to_owned()
        }
        errno => format!("/dev/kvm: {}", std::io::Error::from_raw_os_error(errno)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_says_what_to_do() {
        assert!(why(libc::ENOENT).contains("load kvm_intel"));
        assert!(why(libc::EACCES).contains("join the group"));
        assert!(why(libc::ENODEV).contains("no module"));
        assert!(why(libc::EMFILE).starts_with("/dev/kvm: "));
    }
}
