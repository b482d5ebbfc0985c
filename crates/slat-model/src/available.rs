//! How much memory could this process still have? What the computer can give, or what its control groups leave.

use std::fs;
use std::path::Path;

/// Where control groups are mounted.
const GROUPS: &str = "/sys/fs/cgroup";

/// Files of a control group, by the version of the interface.
struct Interface {
    limit: &'static str,
    used: &'static str,
    /// Memory among what is used that the kernel takes back when it is needed, in `memory.stat`.
    cached: [&'static str; 2],
}

const FIRST: Interface = Interface {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    cached: ["total_active_file", "total_inactive_file"],
};
const SECOND: Interface = Interface {
    limit: "memory.max",
    used: "memory.current",
    cached: ["active_file", "inactive_file"],
};

/// Bytes of memory that this computer could still give to this process; `None` where it does not say.
pub fn available() -> Option<u64> {
    let computer = of_computer(&fs::read_to_string("/proc/meminfo").ok()?)?;
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    Some(groups.lines().filter_map(of_groups).fold(computer, u64::min))
}

fn of_computer(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kilobytes.checked_mul(1024)
}

/// The least that a group and those above it leave, given a line of `/proc/self/cgroup`.
fn of_groups(line: &str) -> Option<u64> {
    let (interface, hierarchy, group) = group(line)?;
    let root = Path::new(GROUPS).join(hierarchy);
    let read = |directory: &Path, name: &str| fs::read_to_string(directory.join(name));
    let left = |group: &Path| {
        let directory = root.join(group);
        let limit = read(&directory, interface.limit).ok()?;
        let used = read(&directory, interface.used).ok()?;
        left(&limit, &used, &read(&directory, "memory.stat").unwrap_or_default(), &interface)
    };
    Path::new(group.trim_start_matches('/')).ancestors().filter_map(left).min()
}

/// The interface, the hierarchy's directory and the group, if a line tells of memory.
fn group(line: &str) -> Option<(Interface, &'static str, &str)> {
    let (_, rest) = line.split_once(':')?;
    let (controllers, group) = rest.split_once(':')?;
    match controllers {
        "" => Some((SECOND, "", group)),
        _ if controllers.split(',').any(|one| one == "memory") => Some((FIRST, "memory", group)),
        _ => None,
    }
}

/// What a group leaves; `None` without a limit.
fn left(limit: &str, used: &str, stat: &str, interface: &Interface) -> Option<u64> {
    let number = |text: &str| text.trim().parse::<u64>().ok();
    let cached = |line: &str| {
        let (name, value) = line.split_once(' ')?;
        interface.cached.contains(&name).then(|| number(value)).flatten()
    };
    let kept = number(used)?.saturating_sub(stat.lines().filter_map(cached).sum());
    Some(number(limit)?.saturating_sub(kept))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_computer_says_what_it_can_give() {
        let text = "MemTotal:       16 kB\nMemAvailable:       12 kB\n";
        assert_eq!(of_computer(text), Some(12 << 10));
        assert_eq!(of_computer("MemTotal: 16 kB\n"), None);
    }

    #[test]
    fn a_group_leaves_its_limit_without_what_it_keeps() {
        let stat = "anon 5\nactive_file 10\ninactive_file 20\ntotal_active_file 1\n";
        assert_eq!(left("1000\n", "400\n", stat, &SECOND), Some(630));
        assert_eq!(left("1000\n", "400\n", stat, &FIRST), Some(601));
        assert_eq!(left("100\n", "400\n", "", &SECOND), Some(0));
        assert_eq!(left("max\n", "400\n", stat, &SECOND), None);
    }

    #[test]
    fn only_lines_of_memory_name_a_group() {
        let is =
            |line: &str| group(line).map(|(_, hierarchy, group)| (hierarchy, group.to_owned()));
        assert_eq!(is("0::/user.slice/a"), Some(("", "/user.slice/a".to_owned())));
        assert_eq!(is("4:cpu,memory:/a:b"), Some(("memory", "/a:b".to_owned())));
        assert_eq!(is("3:cpuset:/"), None);
        assert_eq!(is(""), None);
    }
}
