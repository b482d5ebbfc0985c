//! How a hypervisor is built, as far as that decides what its work costs: a file of choices.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::failure::Failure;
use crate::options::EagerSplit;
use crate::size::Size;

const BUILT_IN: &[(&str, &str)] = &[
    ("linux-5.18", include_str!("../../data/designs/linux-5.18.toml")),
    ("linux-5.18+parallel", include_str!("../../data/designs/linux-5.18+parallel.toml")),
    ("linux-6.11", include_str!("../../data/designs/linux-6.11.toml")),
    ("linux-6.12", include_str!("../../data/designs/linux-6.12.toml")),
    ("linux-skip-levels", include_str!("../../data/designs/linux-skip-levels.toml")),
    ("linux-child-skip", include_str!("../../data/designs/linux-child-skip.toml")),
    ("slat", include_str!("../../data/designs/slat.toml")),
];

/// A set of choices whose names in files and in tables are the same.
macro_rules! choice {
    ($(#[$doc:meta])* $name:ident { $($(#[$of:meta])* $variant:ident = $text:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, Serialize, ValueEnum)]
        pub(crate) enum $name {
            $($(#[$of])* #[serde(rename = $text)] #[value(name = $text)] $variant,)*
        }

        impl $name {
            pub(crate) fn name(self) -> &'static str {
                match self { $(Self::$variant => $text,)* }
            }
        }
    };
}

choice! {
    /// What faults do with the MMU lock.
    MmuLock {
        /// One at a time.
        Exclusive = "exclusive",
        /// All at once, and each writes the lock.
        Shared = "shared",
        /// There is none: the engine's own steps are charged.
        None = "none",
    }
}

choice! {
    /// When stores to entries are made visible while blocks are split.
    Barrier {
        /// After each.
        Entry = "per-entry",
        /// After each block.
        Block = "per-block",
        /// At the end.
        Walk = "per-walk",
    }
}

choice! {
    /// How a walk that splits passes over what is split.
    SkipLevels {
        /// It looks at each entry.
        Off = "off",
        /// It does not enter the last level.
        On = "on",
        /// It calls the visitor for each table, who says that it is not to be entered.
        Child = "child",
    }
}

choice! {
    /// Where new memory is cleaned from the data caches.
    Maintenance {
        /// While the lock is held.
        UnderLock = "under-lock",
        /// By all at once.
        Outside = "outside",
        /// Nowhere: the guest's attributes are forced.
        None = "none",
    }
}

choice! {
    /// Whether the host's memory-map lock is written twice by a fault that asks the host.
    HostLock {
        Kept = "kept",
        Gone = "gone",
    }
}

/// A design.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Design {
    pub(crate) name: String,
    pub(crate) summary: String,
    pub(crate) lock: MmuLock,
    /// A lock of its own for each so much guest memory, instead of one for all.
    #[serde(default, deserialize_with = "size")]
    pub(crate) lock_region: Option<Size>,
    /// How often a fault writes the line of a lock that it shares.
    #[serde(default = "twice")]
    pub(crate) lock_writes: u32,
    /// Reference counts that a fault changes beyond what the profile's fault does.
    #[serde(default)]
    pub(crate) reference_counts: u32,
    pub(crate) maintenance: Maintenance,
    pub(crate) barrier: Barrier,
    pub(crate) skip_levels: SkipLevels,
    #[serde(default = "off", deserialize_with = "eager_split")]
    pub(crate) eager_split: EagerSplit,
    #[serde(default = "kept")]
    pub(crate) host_lock: HostLock,
}

fn kept() -> HostLock {
    HostLock::Kept
}

fn twice() -> u32 {
    2
}

fn off() -> EagerSplit {
    EagerSplit::Off
}

fn parsed<'de, D, T>(from: D) -> Result<T, D::Error>
where
    D: serde::Deserializer<'de>,
    T: std::str::FromStr<Err: std::fmt::Display>,
{
    String::deserialize(from)?.parse().map_err(serde::de::Error::custom)
}

fn eager_split<'de, D: serde::Deserializer<'de>>(from: D) -> Result<EagerSplit, D::Error> {
    parsed(from)
}

fn size<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Option<Size>, D::Error> {
    match parsed(from)? {
        Size(0) => Err(serde::de::Error::custom("a region needs a size")),
        size => Ok(Some(size)),
    }
}

impl Design {
    /// The design of this name, or in the file of this name.
    ///
    /// # Errors
    /// [`Failure::Usage`]: there is none, or what is wrong with it.
    pub(crate) fn load(name: &str) -> Result<Self, Failure> {
        let (text, what) = super::data("design", name, BUILT_IN)?;
        let design: Self =
            toml::from_str(&text).map_err(|why| Failure::Usage(format!("{what}: {why}")))?;
        // A table shows a design by its name alone.
        if design.name != name && BUILT_IN.iter().any(|(known, _)| *known == design.name) {
            return Err(Failure::Usage(format!(
                "{what}: its name is {}, which is built in; give it another",
                design.name
            )));
        }
        Ok(design)
    }

    /// Those that are built in.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub(crate) fn list() -> Result<Vec<Self>, Failure> {
        BUILT_IN.iter().map(|(name, _)| Self::load(name)).collect()
    }
}
