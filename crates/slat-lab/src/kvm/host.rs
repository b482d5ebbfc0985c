//! Which host is this: its kernel, its CPU, and what the modules of KVM were told.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::report::HostFacts;

/// Where modules and their parameters are.
const MODULES: &str = "/sys/module";
/// Parameters that matter to memory, whichever module has them.
const PARAMETERS: [&str; 10] = [
    "eager_page_split",
    "ept",
    "eptad",
    "mmio_caching",
    "npt",
    "nx_huge_pages",
    "pml",
    "tdp_mmu",
    "unrestricted_guest",
    "vpid",
];

/// What there is to tell of this host.
pub(crate) fn facts() -> HostFacts {
    let (parameters, modules) = (parameters(), modules());
    let on = |name: &str| parameters.get(name).is_some_and(|value| value == "Y" || value == "1");
    let paging = paging(&modules, on);
    HostFacts {
        kernel: kernel(),
        cpu: cpu().unwrap_or_else(|| "unknown CPU".to_owned()),
        modules: modules.join(" "),
        paging,
        transparent_hugepage: transparent_hugepage(),
        parameters,
    }
}

/// How guest-physical addresses are translated, as far as modules and what is on tell.
fn paging(modules: &[String], on: impl Fn(&str) -> bool) -> &'static str {
    let serving: Vec<_> =
        modules.iter().map(String::as_str).filter(|&name| name != "kvm").collect();
    match serving[..] {
        ["kvm_intel"] if on("ept") => "EPT",
        ["kvm_amd"] if on("npt") => "nested paging",
        ["kvm_intel" | "kvm_amd" | "kvm_pvm"] => "shadow paging",
        // Which of them made the VM cannot be seen.
        _ => "unknown paging",
    }
}

/// Modules of KVM, built in or not.
pub(crate) fn modules() -> Vec<String> {
    let names = fs::read_dir(MODULES).into_iter().flatten().flatten();
    let names = names.filter_map(|entry| entry.file_name().into_string().ok());
    let mut names: Vec<_> = names.filter(|name| name.split('_').next() == Some("kvm")).collect();
    names.sort();
    names
}

/// Those of [`PARAMETERS`] that there are.
fn parameters() -> BTreeMap<String, String> {
    let all = modules().into_iter().flat_map(|module| all_parameters(&module));
    all.filter(|(name, _)| PARAMETERS.contains(&name.as_str())).collect()
}

/// All parameters of a module that can be read.
pub(crate) fn all_parameters(module: &str) -> BTreeMap<String, String> {
    let parameters = Path::new(MODULES).join(module).join("parameters");
    let entries = fs::read_dir(parameters).into_iter().flatten().flatten();
    let read = |entry: fs::DirEntry| {
        let value = fs::read_to_string(entry.path()).ok()?;
        Some((entry.file_name().into_string().ok()?, value.trim().to_owned()))
    };
    entries.filter_map(read).collect()
}

fn kernel() -> String {
    let word = |name: &str| fs::read_to_string(format!("/proc/sys/kernel/{name}")).ok();
    let release = word("osrelease").unwrap_or_default();
    format!("Linux {}", release.trim())
}

fn cpu() -> Option<String> {
    let text = fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    let name: Vec<_> = line.split_once(':')?.1.split_whitespace().collect();
    Some(name.join(" "))
}

/// Whom transparent huge pages are given to: the word in brackets.
fn transparent_hugepage() -> String {
    let text = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
    let text = text.unwrap_or_default();
    let chosen = text.split(['[', ']']).nth(1);
    chosen.unwrap_or("not there").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paging_is_named_only_if_one_module_serves() {
        let of = |names: &str, on: &[&str]| {
            let names: Vec<_> = names.split(' ').map(str::to_owned).collect();
            paging(&names, |name| on.contains(&name))
        };
        assert_eq!(of("kvm kvm_intel", &["ept"]), "EPT");
        assert_eq!(of("kvm kvm_amd", &["npt"]), "nested paging");
        assert_eq!(of("kvm kvm_intel", &[]), "shadow paging");
        assert_eq!(of("kvm kvm_pvm", &["ept"]), "shadow paging");
        assert_eq!(of("kvm kvm_intel kvm_pvm", &["ept"]), "unknown paging");
    }
}
