//! May this process have as many open files as its vCPUs take?

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::failure::Failure;

/// Files of a vCPU: itself, its statistics, and what its page faults come from.
const OF_VCPU: u64 = 3;
/// What there is besides.
const OTHERS: u64 = 32;

/// Raises the limit of open files as far as this process may.
///
/// # Errors
/// [`Failure::Missing`]: that is not far enough for so many vCPUs.
pub(crate) fn allow(vcpus: u32) -> Result<(), Failure> {
    let limit = getrlimit(Resource::Nofile);
    let needed = u64::from(vcpus) * OF_VCPU + OTHERS;
    let is_enough = |most: Option<u64>| most.is_none_or(|most| needed <= most);
    if is_enough(limit.current) {
        return Ok(());
    }
    let raised = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
    if is_enough(limit.maximum) && raised.is_ok() {
        return Ok(());
    }
    Err(Failure::Missing(format!(
        "{vcpus} vCPUs need up to {needed} open files, and this process may have {}; as root: ulimit -n {needed}",
        limit.maximum.or(limit.current).unwrap_or_default()
    )))
}
