//! What the tables say about guest memory while no vCPU runs: how large its leaves are, and whether they lead where the
//! host has put the pages.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use slat::{Gpa, Lookup};

use crate::arch::Tables;
use crate::crew::Guest;
use crate::size::Size;
use crate::stage::{Ground, Stage};

/// The leaf that translates a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Translation {
    /// Bytes of the leaf.
    pub(crate) leaf: u64,
    /// Whether it leads to the host's page.
    pub(crate) right: bool,
    /// Its access flag.
    pub(crate) young: bool,
}

/// All of guest memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Survey {
    /// How many leaves of each size.
    #[serde(serialize_with = "by_size", deserialize_with = "from_sizes")]
    pub(crate) leaves: BTreeMap<u64, u64>,
    /// Pages of the host that no leaf translates.
    pub(crate) unmapped: u64,
    /// Pages whose leaf leads elsewhere.
    #[serde(skip)]
    pub(crate) elsewhere: u64,
    /// Leaves with the access flag.
    #[serde(skip)]
    pub(crate) young: u64,
}

impl Survey {
    /// Its leaves, as `512 x 4K, 3 x 2M`.
    pub(crate) fn sizes(&self) -> String {
        let leaves = self.leaves.iter().map(|(size, count)| format!("{count} x {}", Size(*size)));
        let leaves: Vec<_> = leaves.collect();
        if leaves.is_empty() { "nothing".to_owned() } else { leaves.join(", ") }
    }
}

/// Those of one size.
#[derive(Serialize, Deserialize)]
struct Leaves {
    size: u64,
    count: u64,
}

/// As a list, ascending, since sizes are numbers.
fn by_size<S: Serializer>(leaves: &BTreeMap<u64, u64>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(leaves.iter().map(|(&size, &count)| Leaves { size, count }))
}

fn from_sizes<'de, D: Deserializer<'de>>(from: D) -> Result<BTreeMap<u64, u64>, D::Error> {
    let leaves = Vec::<Leaves>::deserialize(from)?;
    Ok(leaves.into_iter().map(|Leaves { size, count }| (size, count)).collect())
}

impl<T: Tables, P: Guest> Stage<'_, '_, T, P> {
    /// The leaf at an offset from the start of guest memory; `None` if there is none.
    pub(crate) fn translation(&self, ground: Ground<'_>, offset: u64) -> Option<Translation> {
        let tree = self.vm.tree();
        let gpa = Gpa(ground.layout.gpa + offset);
        let found = tree.look_up(&self.worker.participant().pin(), gpa);
        let Ok(Lookup::Mapped { output, level, template }) = found else { return None };
        Some(Translation {
            leaf: tree.geometry().size(level),
            right: ground.memory.page(offset).is_some_and(|page| page.hpa == output),
            young: tree.attributes(template).accessed,
        })
    }

    /// Looks at every page of the host; `each` gets its offset and what translates it.
    pub(crate) fn survey(
        &self,
        ground: Ground<'_>,
        mut each: impl FnMut(u64, Option<&Translation>),
    ) -> Survey {
        let layout = ground.layout;
        let mut survey = Survey::default();
        for offset in (0..layout.size).step_by(layout.page as usize) {
            let found = self.translation(ground, offset);
            each(offset, found.as_ref());
            let Some(Translation { leaf, right, young }) = found else {
                survey.unmapped += 1;
                continue;
            };
            survey.elsewhere += u64::from(!right);
            if offset == 0 || (layout.gpa + offset).is_multiple_of(leaf) {
                *survey.leaves.entry(leaf).or_default() += 1;
                survey.young += u64::from(young);
            }
        }
        survey
    }
}
