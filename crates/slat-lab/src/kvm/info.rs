//! `slat kvm-info`: what this host's KVM offers, in one page.

use std::fmt::{self, Write};
use std::fs;

use kvm_bindings::KVM_MAX_CPUID_ENTRIES;
use kvm_ioctls::Kvm;

use super::capability;
use super::stats::Source;
use super::{host, ioctl, system, vm};
use crate::failure::Failure;
use crate::output;
use crate::report::HostFacts;
use crate::size::Size;

/// Columns of a line.
const WIDTH: usize = 110;

/// Prints it.
///
/// # Errors
/// [`Failure::Missing`]: no KVM here. [`Failure::Output`].
pub(crate) fn print() -> Result<(), Failure> {
    let kvm = system::open()?;
    let mut page = String::new();
    page_of(&kvm, &mut page).map_err(|_| Failure::Run("no text".to_owned()))?;
    output::line(page.trim_end())
}

fn page_of(kvm: &Kvm, page: &mut String) -> fmt::Result {
    let HostFacts { kernel, cpu, paging, transparent_hugepage, .. } = host::facts();
    let bits = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).map(|cpuid| vm::address_bits(&cpuid));
    writeln!(page, "kernel            {kernel}")?;
    writeln!(page, "CPU               {cpu}")?;
    writeln!(page, "KVM               API version {}, {paging}", kvm.get_api_version())?;
    if let Ok(bits) = bits {
        writeln!(page, "addresses         {bits} bits guest-physical")?;
    }
    writeln!(page, "huge pages        transparent: {transparent_hugepage}; {}", pools())?;
    let userfaultfd = super::userfault::features();
    paragraph(page, "userfaultfd", userfaultfd.split(' ').map(str::to_owned))?;
    for module in host::modules() {
        let parameters = host::all_parameters(&module);
        let all = parameters.iter().map(|(name, value)| format!("{name}={value}"));
        paragraph(page, &format!("module {module}"), all)?;
    }
    writeln!(page, "\ncapability                     number       value")?;
    for capability in capability::ALL {
        let (number, value) = (capability.number(), capability.value(kvm));
        let value = if value == 0 { "-".to_owned() } else { value.to_string() };
        let name = capability.name();
        let name = name.strip_prefix("KVM_CAP_").unwrap_or(&name);
        writeln!(page, "{name:<30} {number:>6}  {value:>10}  {}", capability.what)?;
    }
    page.push('\n');
    if let Some((vm, vcpu)) = statistics(kvm) {
        paragraph(page, "VM statistics", vm.names().map(str::to_owned))?;
        paragraph(page, "vCPU statistics", vcpu.names().map(str::to_owned))?;
    }
    Ok(())
}

/// A title, and words in lines of one width.
fn paragraph(page: &mut String, title: &str, words: impl Iterator<Item = String>) -> fmt::Result {
    write!(page, "{title:<17}")?;
    let mut column = 17;
    for word in words {
        if column + 1 + word.len() > WIDTH {
            write!(page, "\n{:<17}", "")?;
            column = 17;
        }
        write!(page, " {word}")?;
        column += 1 + word.len();
    }
    page.push('\n');
    Ok(())
}

/// What there is to count, of a VM that is made for it.
fn statistics(kvm: &Kvm) -> Option<(Source, Source)> {
    let vm = kvm.create_vm().ok()?;
    let vcpu = vm.create_vcpu(0).ok()?;
    let of_vm = Source::new(ioctl::stats_fd(&vm).ok()?).ok()?;
    Some((of_vm, Source::new(ioctl::stats_fd(&vcpu).ok()?).ok()?))
}

/// How many hugetlb pages there are, by size.
fn pools() -> String {
    let pools = fs::read_dir("/sys/kernel/mm/hugepages").into_iter().flatten().flatten();
    let pool = |entry: fs::DirEntry| {
        let name = entry.file_name().into_string().ok()?;
        let kilobytes: u64 = name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
        let number = |name: &str| {
            let text = fs::read_to_string(entry.path().join(name)).ok()?;
            text.trim().parse::<u64>().ok()
        };
        Some((kilobytes, number("nr_hugepages")?, number("free_hugepages")?))
    };
    let mut pools: Vec<_> = pools.filter_map(pool).collect();
    pools.sort_unstable();
    if pools.is_empty() {
        return "no hugetlb".to_owned();
    }
    let pool = |&(kilobytes, all, free): &(u64, u64, u64)| {
        format!("hugetlb {}: {all}, {free} free", Size(kilobytes << 10))
    };
    pools.iter().map(pool).collect::<Vec<_>>().join("; ")
}
