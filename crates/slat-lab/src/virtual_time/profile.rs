//! What a machine's steps cost: a file of named numbers, each with its unit and where it comes from.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use slat_model::clock::{Costs, Time};

use super::walks::Prices;
use crate::failure::Failure;

const BUILT_IN: &[(&str, &str)] = &[
    ("arm-server-2022", include_str!("../../data/profiles/arm-server-2022.toml")),
    ("arm-server-2022-v5", include_str!("../../data/profiles/arm-server-2022-v5.toml")),
    ("thunderx2", include_str!("../../data/profiles/thunderx2.toml")),
    ("barrier-server-2024", include_str!("../../data/profiles/barrier-server-2024.toml")),
];

const TIMES: &[(&str, f64)] = &[("ns", 1.0), ("us", 1e3), ("ms", 1e6)];

/// One number of a profile.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Number {
    value: f64,
    unit: String,
    /// A measured value, a manual, an estimate, or the cell on which it was calibrated.
    origin: String,
}

/// A number as a profile has it.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Numbered {
    name: &'static str,
    value: f64,
    unit: String,
}

impl fmt::Display for Numbered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.name, self.value, self.unit)
    }
}

/// A machine.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Profile {
    pub(crate) name: String,
    pub(crate) summary: String,
    numbers: BTreeMap<String, Number>,
}

/// What a cell of a published table is to a profile.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Kind {
    Calibrated,
    Predicted,
    Fitted,
}

/// What faults cost.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Faults {
    /// What the engine's steps cost.
    pub(crate) costs: Costs,
    pub(crate) guest_access: Time,
    /// A fault without what the design does itself: exit, look-up in the host, entry.
    pub(crate) outside: Time,
    /// By how many per cent at most that is off.
    pub(crate) spread: u64,
    /// The engine's part of a fault that touches no entry.
    pub(crate) engine: Time,
    /// What a first touch of a large page takes beside the fault and the clearing.
    pub(crate) populate_2m: Time,
    /// Clearing 2 MiB if nobody else uses memory.
    pub(crate) clear_2m: Time,
    /// What a design with a lock does under it.
    pub(crate) lock_work: Time,
    /// What it does more when it shares the lock.
    pub(crate) shared_extra: Time,
    /// What more it takes under a lock that comes from another CPU, to the only one who waits.
    pub(crate) handover_short: Time,
    /// The same, to one of several.
    pub(crate) handover: Time,
    /// Cleaning 2 MiB from the caches.
    pub(crate) maintain_2m: Time,
}

impl Profile {
    /// The profile of this name, or in the file of this name.
    ///
    /// # Errors
    /// [`Failure::Usage`]: there is none, or what is wrong with it.
    pub(crate) fn load(name: &str) -> Result<Self, Failure> {
        let (text, what) = super::data("profile", name, BUILT_IN)?;
        Self::parse(&text).map_err(|why| Failure::Usage(format!("{what}: {why}")))
    }

    fn parse(text: &str) -> Result<Self, String> {
        let profile: Self = toml::from_str(text).map_err(|error| error.to_string())?;
        for (key, Number { value, origin, .. }) in &profile.numbers {
            if !value.is_finite() || *value < 0.0 {
                return Err(format!("{key} is {value}: it must be a number, not negative"));
            }
            if origin.is_empty() {
                return Err(format!("{key} does not say where it comes from"));
            }
        }
        Ok(profile)
    }

    fn number(&self, key: &str, units: &[(&str, f64)]) -> Result<f64, Failure> {
        let wrong = |why| Failure::Usage(format!("profile {}: {why}", self.name));
        let number = self.numbers.get(key);
        let number = number.ok_or_else(|| wrong(format!("the number {key} is missing")))?;
        let unit = units.iter().find(|(unit, _)| *unit == number.unit);
        let unit = unit.ok_or_else(|| wrong(format!("{key} in {}: not its unit", number.unit)))?;
        Ok(number.value * unit.1)
    }

    /// What it says of a number, if anything.
    pub(crate) fn said(&self, name: &'static str) -> Option<Numbered> {
        let number = self.numbers.get(name)?;
        Some(Numbered { name, value: number.value, unit: number.unit.clone() })
    }

    fn time(&self, key: &str) -> Result<Time, Failure> {
        self.number(key, TIMES).map(Time::from_ns)
    }

    /// What faults cost.
    ///
    /// # Errors
    /// [`Failure::Usage`]: the profile does not say, or what is wrong with it.
    pub(crate) fn faults(&self) -> Result<Faults, Failure> {
        let time = |key| self.time(key);
        let bandwidth = self.number("memory", &[("GB/s", 1.0)])?;
        if bandwidth == 0.0 {
            let why = format!("profile {}: memory must be more than 0 GB/s", self.name);
            return Err(Failure::Usage(why));
        }
        let transfer = time("transfer")?;
        let lines = |key| {
            let lines = self.number(key, &[("lines", 1.0)])?;
            Ok::<_, Failure>(Time::from_ns(transfer.as_ns() * lines))
        };
        let maintain_2m = time("maintain-2m")?;
        let costs = Costs {
            load: time("load")?,
            exchange: time("exchange")?,
            transfer,
            pin: time("pin")?,
            barrier: time("barrier")?,
            barrier_per_store: time("barrier-store")?,
            invalidate_local: time("tlbi-local")?,
            broadcast: time("tlbi-broadcast")?,
            broadcast_shared: time("tlbi-shared")?,
            allocate: time("table-allocate")?,
            clear_table: time("table-clear")?,
            clean_kib: Time(maintain_2m.0 / 2048),
            relax: time("barrier")?,
        };
        Ok(Faults {
            costs,
            guest_access: time("guest-access")?,
            outside: time("fault-outside")?,
            spread: self.number("fault-spread", &[("%", 1.0)])?.min(100.0) as u64,
            engine: time("fault-engine")?,
            populate_2m: time("populate-2m")?,
            clear_2m: Time::from_ns((2 << 20) as f64 / bandwidth),
            lock_work: time("lock-work")?,
            shared_extra: time("shared-extra")?,
            handover_short: lines("handover-short")?,
            handover: lines("handover-lines")?,
            maintain_2m,
        })
    }

    /// What the walks of the hypervisor's thread cost by a general walker, which is called for each entry.
    ///
    /// # Errors
    /// [`Failure::Usage`]: the profile does not say, or what is wrong with it.
    pub(crate) fn walks(&self) -> Result<Prices, Failure> {
        let visit = self.time("walk-visit")?;
        Ok(Prices {
            visit,
            protect: self.time("walk-protect")?,
            split: self.time("walk-split")?.since(visit),
            section: self.time("walk-section")?,
            barrier: self.time("walk-barrier")?,
        })
    }

    /// What the engine's steps cost where such walks are all that is known of the machine.
    ///
    /// # Errors
    /// As [`walks`](Self::walks).
    pub(crate) fn engine(&self) -> Result<Costs, Failure> {
        Ok(Costs {
            load: self.time("engine-load")?,
            exchange: self.time("engine-exchange")?,
            clear_table: self.time("engine-fill")?,
            pin: self.time("engine-pin")?,
            ..Costs::default()
        })
    }

    /// By how many per cent at most the costs of walks differ between runs.
    ///
    /// # Errors
    /// As [`walks`](Self::walks).
    pub(crate) fn walk_spread(&self) -> Result<f64, Failure> {
        self.number("walk-spread", &[("%", 1.0)])
    }

    /// Where a published cell comes from: numbers were adjusted to it, or it is predicted.
    pub(crate) fn kind_of(&self, cell: &str) -> Kind {
        let names = |how: &str, number: &Number| {
            let rest = number.origin.strip_prefix(how).and_then(|rest| rest.strip_prefix(cell));
            rest.is_some_and(|rest| !rest.starts_with(char::is_alphanumeric))
        };
        let any = |how: &str| self.numbers.values().any(|number| names(how, number));
        if any("calibrated on ") {
            Kind::Calibrated
        } else if any("fitted on ") {
            Kind::Fitted
        } else {
            Kind::Predicted
        }
    }

    /// The names of the built-in ones, with what they are.
    pub(crate) fn list() -> Result<Vec<Self>, Failure> {
        BUILT_IN.iter().map(|(name, _)| Self::load(name)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_built_in_profile_reads_and_is_calibrated_on_at_most_four_cells() {
        for (name, _) in BUILT_IN {
            let profile = Profile::load(name).unwrap();
            assert_eq!(&profile.name, name);
            assert!(profile.faults().is_ok() || profile.engine().is_ok(), "{name}");
            let calibrated =
                profile.numbers.values().filter(|n| n.origin.starts_with("calibrated on "));
            assert!(calibrated.count() <= 4, "{name}");
        }
    }

    #[test]
    fn only_the_cells_that_numbers_were_adjusted_to_are_not_predicted() {
        let profile = Profile::load("arm-server-2022").unwrap();
        let kind = |cell: &str| profile.kind_of(&format!("parallel-faults-rfc {cell}"));
        assert_eq!(kind("dirty-seconds.after at 1 vCPU"), Kind::Calibrated);
        assert_eq!(kind("dirty-seconds.before at 16 vCPUs"), Kind::Calibrated);
        assert_eq!(kind("dirty-seconds.before at 1 vCPU"), Kind::Predicted);
        assert_eq!(kind("populate-seconds.after at 4 vCPUs"), Kind::Predicted);
        assert_eq!(
            profile.kind_of("parallel-faults-v5 dirty-seconds.after at 1 vCPU"),
            Kind::Predicted
        );
    }

    #[test]
    fn what_is_wrong_with_a_profile_is_said() {
        let text = BUILT_IN[0].1;
        let wrong = |from: &str, to: &str| {
            let profile = Profile::parse(&text.replacen(from, to, 1));
            profile.and_then(|profile| profile.faults().map_err(|why| why.to_string())).unwrap_err()
        };
        assert!(wrong("transfer ", "transver ").contains("transfer is missing"));
        assert!(wrong("value = 57.5", "value = -1").contains("not negative"));
        assert!(wrong("unit = \"GB/s\"", "unit = \"ns\"").contains("not its unit"));
        assert!(wrong("value = 152.0", "value = 0").contains("more than 0"));
        assert!(
            wrong("origin = \"a store that hits the caches, rounded up\"", "origin = \"\"")
                .contains("where it comes from")
        );
    }
}
