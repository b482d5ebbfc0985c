//! What was published, as `data/published.toml` has it.

use serde::Deserialize;

use crate::failure::Failure;

const TEXT: &str = include_str!("../../data/published.toml");

/// The tables that are reproduced.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Published {
    pub(crate) parallel_faults_rfc: Faults,
    pub(crate) parallel_faults_v5: Faults,
    pub(crate) skip_levels: SkipLevels,
    pub(crate) move_barrier: MoveBarrier,
    pub(crate) rmap_counter: RmapCounter,
    pub(crate) trailing_prefetch: TrailingPrefetch,
}

/// Seconds by vCPUs.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Faults {
    pub(crate) source: String,
    pub(crate) vcpus: Vec<u32>,
    pub(crate) dirty_seconds: Versions,
    pub(crate) populate_seconds: Versions,
}

/// Of the kernel before and after the series.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Versions {
    pub(crate) before: Vec<f64>,
    pub(crate) after: Vec<f64>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct SkipLevels {
    pub(crate) source: String,
    pub(crate) enable_percent: Backings,
    pub(crate) clear_percent: Backings,
}

/// By what memory is mapped with.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Backings {
    pub(crate) already_4k: Mean,
    pub(crate) thp: Mean,
    pub(crate) hugetlb_1g: Mean,
}

/// A change in per cent, and its standard deviation.
#[derive(Clone, Copy, PartialEq, Debug, Deserialize)]
pub(crate) struct Mean {
    pub(crate) value: f64,
    pub(crate) sd: f64,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct MoveBarrier {
    pub(crate) source: String,
    pub(crate) clear_dirty_log_percent: f64,
}

/// Times of one run, in a unit that the mail does not give.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct RmapCounter {
    pub(crate) source: String,
    pub(crate) setup: String,
    pub(crate) fork_time: ReverseMaps,
    pub(crate) fork_spread_percent: ReverseMaps,
    pub(crate) merged_source: String,
    pub(crate) merged_fork_time: ReverseMaps,
    pub(crate) merged_fork_spread_percent: ReverseMaps,
}

/// By how reverse maps are kept.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct ReverseMaps {
    pub(crate) slots_3: f64,
    pub(crate) slots_15: f64,
    pub(crate) slots_14_counter: f64,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct TrailingPrefetch {
    pub(crate) source: String,
    pub(crate) touch_6g: Touch,
    pub(crate) boot: Exits,
    pub(crate) app: Exits,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Touch {
    pub(crate) faults: Bound,
}

/// Faults before, and what there were less of after.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Bound {
    pub(crate) before: f64,
    pub(crate) after_less_than: f64,
}

#[derive(Clone, Copy, Debug, Deserialize)]
pub(crate) struct Exits {
    pub(crate) before: Stats,
    pub(crate) after: Stats,
}

/// Of what the kernel's perf tool prints for EPT violations, how many there were.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(crate) struct Stats {
    pub(crate) samples: f64,
}

impl Published {
    /// What is built in.
    ///
    /// # Errors
    /// [`Failure::Run`]: it does not have the shape above.
    pub(crate) fn load() -> Result<Self, Failure> {
        toml::from_str(TEXT).map_err(|why| Failure::Run(format!("published figures: {why}")))
    }
}
