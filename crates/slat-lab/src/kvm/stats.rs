//! What KVM counts: the statistics that it gives by descriptor, of a VM and its vCPUs together.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use kvm_bindings::{
    KVM_STATS_TYPE_CUMULATIVE, KVM_STATS_TYPE_INSTANT, KVM_STATS_TYPE_MASK, KVM_STATS_TYPE_PEAK,
    kvm_stats_desc, kvm_stats_header,
};
use serde::Serialize;

use super::ioctl;
use super::vcpu::Vcpu;
use super::vm::Vm;
use crate::failure::Failure;
use crate::report::Counts;

/// How a statistic changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// It grows with what happens.
    Sum,
    /// It is what there is now.
    Now,
    /// It is the most that there was.
    Most,
}

/// What reports have of it, if the host counts that: name, title in a table, and whether the column is there also if it
/// has nothing but zeroes.
const REPORTED: &[(&str, &str, bool)] = &[
    ("pf_taken", "faults\ntaken", true),
    ("pf_fixed", "faults\nfixed", true),
    ("pf_fast", "faults\nfast", false),
    ("pf_emulate", "faults\nemulated", false),
    ("pf_spurious", "faults\nspurious", false),
    ("pf_guest", "faults\nguest's", false),
    ("pf_mmio_spte_created", "MMIO\nentries", false),
    ("exits", "\nexits", true),
    ("mmio_exits", "MMIO\nexits", false),
    ("signal_exits", "signal\nexits", false),
    ("remote_tlb_flush", "TLB\nflushes", true),
    ("tlb_flush", "vCPU TLB\nflushes", false),
    ("mmu_shadow_zapped", "shadow\nzapped", false),
    ("mmu_pte_write", "shadow\nwrites", false),
    ("mmu_recycled", "shadow\nrecycled", false),
    ("mmu_unsync", "shadow\nunsync", false),
    ("nx_lpage_splits", "NX\nsplits", false),
    ("max_mmu_rmap_size", "longest\nrmap", false),
    ("pages_4k", "pages\n4K", true),
    ("pages_2m", "pages\n2M", true),
    ("pages_1g", "pages\n1G", true),
];

/// What one descriptor tells.
#[derive(Debug)]
pub(crate) struct Source {
    file: File,
    /// Name, kind, and where it is in the file.
    statistics: Vec<(String, Kind, u64)>,
}

impl Source {
    /// # Errors
    /// The kernel's, or that it says what nobody understands.
    pub(crate) fn new(fd: OwnedFd) -> io::Result<Self> {
        let file = File::from(fd);
        let mut head = [0; size_of::<kvm_stats_header>()];
        file.read_exact_at(&mut head, 0)?;
        let word = |bytes: &[u8], at: usize| {
            u32::from_ne_bytes(std::array::from_fn(|byte| bytes[at + byte]))
        };
        let (name_size, count) = (word(&head, 4), word(&head, 8));
        let (descriptors, data) = (word(&head, 16), word(&head, 20));
        let size = size_of::<kvm_stats_desc>() + name_size as usize;
        let mut statistics = Vec::new();
        for number in 0..u64::from(count) {
            let mut bytes = vec![0; size];
            file.read_exact_at(&mut bytes, u64::from(descriptors) + number * size as u64)?;
            let name = &bytes[size_of::<kvm_stats_desc>()..];
            let name =
                String::from_utf8_lossy(name.split(|&byte| byte == 0).next().unwrap_or(name));
            let kind = match word(&bytes, 0) & KVM_STATS_TYPE_MASK {
                KVM_STATS_TYPE_CUMULATIVE => Kind::Sum,
                KVM_STATS_TYPE_INSTANT => Kind::Now,
                KVM_STATS_TYPE_PEAK => Kind::Most,
                _ => continue,
            };
            statistics.push((
                name.into_owned(),
                kind,
                u64::from(data) + u64::from(word(&bytes, 8)),
            ));
        }
        Ok(Self { file, statistics })
    }

    /// What it has, by name.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.statistics.iter().map(|(name, ..)| name.as_str())
    }
}

/// The statistics of a VM and its vCPUs.
#[derive(Debug)]
pub(crate) struct Statistics {
    sources: Vec<Source>,
}

impl Statistics {
    /// # Errors
    /// [`Failure::Run`].
    pub(crate) fn new(vm: &Vm, vcpus: &[Vcpu]) -> Result<Self, Failure> {
        let fds = std::iter::once(ioctl::stats_fd(vm.fd()))
            .chain(vcpus.iter().map(|vcpu| ioctl::stats_fd(vcpu.fd())));
        let sources: io::Result<Vec<_>> = fds.map(|fd| Source::new(fd?)).collect();
        let mut sources =
            sources.map_err(|error| Failure::Run(format!("KVM's statistics: {error}")))?;
        let reported = |name: &str| REPORTED.iter().any(|(known, ..)| *known == name);
        for source in &mut sources {
            source.statistics.retain(|(name, ..)| reported(name));
        }
        Ok(Self { sources })
    }

    /// What they are now.
    ///
    /// # Errors
    /// [`Failure::Run`].
    pub(crate) fn read(&self) -> Result<KvmCounts, Failure> {
        let mut counts = KvmCounts::default();
        for Source { file, statistics } in &self.sources {
            for (name, kind, at) in statistics {
                let mut bytes = [0; 8];
                file.read_exact_at(&mut bytes, *at)
                    .map_err(|error| Failure::Run(format!("KVM's statistics: {error}")))?;
                let all = counts.0.entry(name.clone()).or_insert((*kind, 0));
                let value = u64::from_ne_bytes(bytes);
                all.1 = if *kind == Kind::Most { all.1.max(value) } else { all.1 + value };
            }
        }
        Ok(counts)
    }
}

/// Statistics by name.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct KvmCounts(BTreeMap<String, (Kind, u64)>);

impl KvmCounts {
    /// What happened since `earlier`; of what there is, how much now.
    pub(crate) fn since(&self, earlier: &Self) -> Self {
        let of = |(name, &(kind, value)): (&String, &(Kind, u64))| {
            let before = if kind == Kind::Sum { earlier.get(name) } else { 0 };
            (name.clone(), (kind, value.saturating_sub(before)))
        };
        Self(self.0.iter().map(of).collect())
    }

    /// Adds what happened `later`; of what there is, how much then.
    pub(crate) fn add(&mut self, later: &Self) {
        for (name, &(kind, value)) in &later.0 {
            let all = self.0.entry(name.clone()).or_insert((kind, 0));
            all.1 = match kind {
                Kind::Sum => all.1 + value,
                Kind::Now => value,
                Kind::Most => all.1.max(value),
            };
        }
    }

    pub(crate) fn get(&self, name: &str) -> u64 {
        self.0.get(name).map_or(0, |&(_, value)| value)
    }

    /// The columns of a table whose rows come to this.
    fn columns(&self) -> impl Iterator<Item = &'static (&'static str, &'static str, bool)> {
        let shown =
            |of: &&(&str, &str, bool)| self.0.contains_key(of.0) && (of.2 || self.get(of.0) > 0);
        REPORTED.iter().filter(shown)
    }
}

impl Serialize for KvmCounts {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, (_, value))| (name, value)))
    }
}

impl Counts for KvmCounts {
    fn titles(total: &Self) -> Vec<String> {
        total.columns().map(|&(_, title, _)| title.to_owned()).collect()
    }

    fn cells(&self, total: &Self) -> Vec<u64> {
        total.columns().map(|&(name, ..)| self.get(name)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(values: &[(&str, Kind, u64)]) -> KvmCounts {
        let of = |&(name, kind, value): &(&str, Kind, u64)| (name.to_owned(), (kind, value));
        KvmCounts(values.iter().map(of).collect())
    }

    #[test]
    fn what_grows_is_told_by_phase_and_what_is_there_as_it_is() {
        let then = counts(&[("pf_taken", Kind::Sum, 5), ("pages_4k", Kind::Now, 70)]);
        let now = counts(&[("pf_taken", Kind::Sum, 12), ("pages_4k", Kind::Now, 64)]);
        let phase = now.since(&then);
        assert_eq!((phase.get("pf_taken"), phase.get("pages_4k")), (7, 64));
        let mut total = then.clone();
        total.add(&phase);
        assert_eq!((total.get("pf_taken"), total.get("pages_4k")), (12, 64));
    }

    #[test]
    fn a_table_has_columns_only_of_what_the_host_counts() {
        let total = counts(&[
            ("pf_taken", Kind::Sum, 0),
            ("pf_fast", Kind::Sum, 0),
            ("mmio_exits", Kind::Sum, 1),
        ]);
        assert_eq!(KvmCounts::titles(&total), ["faults\ntaken", "MMIO\nexits"]);
        assert_eq!(counts(&[]).cells(&total), [0, 0]);
    }
}
