//! Look-up: what the tree says about one address; and the descent that every operation on one address begins with.

use crate::entry::LOCK_BIT;
use crate::machine::Machine;
use crate::rcu::bump;
use crate::table::Table;
use crate::walk::{At, Depth};
use crate::{Error, Format, Gpa, Hpa, Level, Owner, Pin, Template, Tree};

/// What stands at an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lookup {
    /// A leaf.
    Mapped {
        /// The host-physical address that the guest address translates to, offset included.
        output: Hpa,
        /// The level of the leaf: how large it is.
        level: Level,
        /// What it permits and remembers.
        template: Template,
    },
    /// Nothing, for as much as an entry at this level covers.
    Empty {
        /// The level of the empty entry.
        level: Level,
    },
    /// Nothing mapped, and somebody owns it.
    Owned {
        /// Who.
        owner: Owner,
        /// The level of the noted entry.
        level: Level,
    },
}

/// Where a descent ended: the first entry that is not a table, or the one at the level asked for.
pub(crate) struct Place<'p, M> {
    pub(crate) table: Table<'p, M>,
    pub(crate) index: usize,
    pub(crate) level: Level,
    pub(crate) entry: u64,
    /// log2 of what the entry covers.
    pub(crate) shift: u32,
}

impl<F: Format, M: Machine> Tree<'_, F, M> {
    /// Goes down towards `gpa`, no further than to `target`.
    #[inline(always)]
    pub(crate) fn descend<'p>(&self, pin: &'p Pin<'_, M>, gpa: Gpa, target: Level) -> Place<'p, M> {
        let root = self.root_table(pin);
        match self.geometry().start().number() {
            1 => self.down::<At<1>>(root, gpa, target, usize::MAX),
            0 => self.down::<At<0>>(root, gpa, target, usize::MAX),
            2 => self.down::<At<2>>(root, gpa, target, usize::MAX),
            -1 => self.down::<At<-1>>(root, gpa, target, usize::MAX),
            _ => self.down::<At<3>>(root, gpa, target, usize::MAX),
        }
    }

    /// The rest of a descent, from a table with entries at a level known at compile time.
    #[inline(always)]
    fn down<'p, D: Depth>(
        &self,
        table: Table<'p, M>,
        gpa: Gpa,
        target: Level,
        mask: usize,
    ) -> Place<'p, M> {
        let shift = F::PAGE_SHIFT + F::INDEX_BITS * D::LEVEL.height();
        let index = (gpa.0 >> shift) as usize & mask;
        let entry = table.load(index);
        if D::LEVEL == Level::LAST || D::LEVEL >= target || !F::is_table(entry, D::LEVEL) {
            return Place { table, index, level: D::LEVEL, entry, shift };
        }
        let child = self.child(table, entry);
        self.down::<D::Below>(child, gpa, target, (1 << F::INDEX_BITS) - 1)
    }

    /// What stands at `gpa`. The answer holds as long as the pin and rule 7 say: check for invalidations in progress in
    /// the same pin before the host page is used.
    ///
    /// # Errors
    /// [`Error::OutOfRange`]; [`Error::Retry`] if the entry is being changed: look again under a new pin.
    #[inline(always)]
    pub fn look_up(&self, pin: &Pin<'_, M>, gpa: Gpa) -> Result<Lookup, Error> {
        self.check_machine(pin.machine())?;
        self.check_address(gpa, 1)?;
        let Place { entry, level, shift, .. } = self.descend(pin, gpa, Level::LAST);
        if F::is_valid(entry) {
            let offset = gpa.0 & ((1 << shift) - 1);
            return Ok(Lookup::Mapped {
                output: Hpa(self.format.output(entry, level).0 | offset),
                level,
                template: Template(self.format.template_of(entry, level)),
            });
        }
        if entry & LOCK_BIT != 0 {
            bump(&pin.counters().retries, 1);
            return Err(Error::Retry);
        }
        Ok(match Owner::of(entry) {
            Some(owner) => Lookup::Owned { owner, level },
            None => Lookup::Empty { level },
        })
    }
}
