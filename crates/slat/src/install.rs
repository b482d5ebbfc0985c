//! Installing one leaf: what the fault path asks of the tree.

use crate::entry::{EMPTY, LOCK_BIT};
use crate::lookup::Place;
use crate::machine::Machine;
use crate::rcu::bump;
use crate::{Error, Format, Gpa, Hpa, Level, Owner, Pin, Reserve, Template, Tree};

/// One leaf to install.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Leaf {
    /// The first guest-physical address it covers.
    pub gpa: Gpa,
    /// Its level: how large it is.
    pub level: Level,
    /// What it translates to.
    pub output: Hpa,
    /// What it permits.
    pub template: Template,
}

/// What [`Tree::install`] found and did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Installed {
    /// Nothing was there; the leaf is now.
    New,
    /// The leaf was there with less permission; it has all of it now.
    Relaxed,
    /// All of it was there already, by this leaf or a larger one: the fault was spurious or another vCPU was faster.
    Present,
    /// A leaf with another output address was there.
    Replaced {
        /// Whether hardware had marked the old leaf dirty: a log must hear of it.
        dirty: bool,
    },
    /// Smaller leaves were there.
    Collapsed {
        /// Whether hardware had marked any of them dirty: a log must hear of it.
        dirty: bool,
    },
}

impl<'m, F: Format, M: Machine> Tree<'m, F, M> {
    /// Makes `leaf` be there, with at least its permissions, and returns when every table walker can see it.
    ///
    /// A larger leaf in the way is split (its other parts keep their permission), smaller leaves in the way are
    /// collapsed, and a leaf with another output address is replaced, all by break-before-make. Where the entry is
    /// empty, nothing is invalidated; where permission was missing or nothing had to be done, this CPU's translation is
    /// (rule 9). The same leaf from two vCPUs at once is installed once. Costs one descent and one exchange.
    ///
    /// Do the cache maintenance of the page before, and check rules 7 and 10 in the same pin.
    ///
    /// # Errors
    /// [`Error::Retry`]: another thread is changing the entry, let the guest run again. [`Error::NeedTables`]: unpin,
    /// top up, check everything again. [`Error::Owned`]; [`Error::Backlog`]. [`Error::Level`]: the format has no such
    /// leaf, or tables stand more than one level deep where it should go: take a lower level. [`Error::OutOfRange`],
    /// [`Error::Misaligned`], [`Error::OutputTooLarge`]; [`Error::OtherMachine`], [`Error::OtherFormat`]. Nothing was changed then (a split may have been, which
    /// changes no translation).
    #[inline(always)]
    pub fn install(
        &self,
        pin: &Pin<'_, M>,
        reserve: &mut Reserve<'m, M>,
        leaf: &Leaf,
    ) -> Result<Installed, Error> {
        let &Leaf { gpa, level, output, template } = leaf;
        self.check_machine(pin.machine())?;
        if !self.format.leaf_allowed(level) {
            return Err(Error::Level(level));
        }
        self.check_template(template)?;
        let size = self.geometry().size(level);
        self.check_address(gpa, size)?;
        self.check_output(output, size, level)?;
        let place = self.descend(pin, gpa, level);
        let new = self.format.leaf(level, output, template.0);
        if place.entry == F::EMPTY
            && place.level == level
            && place.table.exchange(place.index, F::EMPTY, new).is_ok()
        {
            self.installed(pin, level);
            return Ok(Installed::New);
        }
        self.install_slowly(pin, reserve, leaf)
    }

    /// Installs pages from `gpa` on where nothing is, each with its output and permissions, as far as the table that
    /// holds the entry of `gpa` reaches. `None`, and where something is already, is left alone. Returns how many were
    /// installed; none if there is no table. Costs one descent, an exchange a page and one publish.
    ///
    /// # Errors
    /// [`Error::OutOfRange`], [`Error::Misaligned`], [`Error::OutputTooLarge`], [`Error::OtherMachine`],
    /// [`Error::OtherFormat`]; pages before the one that is refused were installed.
    pub fn fill(
        &self,
        pin: &Pin<'_, M>,
        gpa: Gpa,
        pages: &[Option<(Hpa, Template)>],
    ) -> Result<u64, Error> {
        self.check_machine(pin.machine())?;
        let size = self.geometry().page_size();
        self.check_address(gpa, size)?;
        let place = self.descend(pin, gpa, Level::LAST);
        if place.level != Level::LAST {
            return Ok(0);
        }
        let mut filled = 0;
        let mut result = Ok(());
        for (index, page) in (place.index..self.geometry().entries()).zip(pages) {
            let Some((output, template)) = *page else { continue };
            let checked = self.check_template(template);
            result = checked.and_then(|()| self.check_output(output, size, Level::LAST));
            if result.is_err() {
                break;
            }
            let new = self.format.leaf(Level::LAST, output, template.0);
            let empty = place.table.load(index) == F::EMPTY;
            filled += u64::from(empty && place.table.exchange(index, F::EMPTY, new).is_ok());
        }
        if filled > 0 {
            bump(&pin.counters().exchanged, filled);
            self.publish(pin.counters());
        }
        result.map(|()| filled)
    }

    fn installed(&self, pin: &Pin<'_, M>, level: Level) {
        let steps = self.geometry().start().height() - level.height() + 1;
        bump(&pin.counters().visited, steps.into());
        bump(&pin.counters().exchanged, 1);
        self.publish(pin.counters());
    }

    /// Whatever is not just an empty entry at the right level.
    #[cold]
    fn install_slowly(
        &self,
        pin: &Pin<'_, M>,
        reserve: &mut Reserve<'m, M>,
        leaf: &Leaf,
    ) -> Result<Installed, Error> {
        self.check_machine(reserve.machine())?;
        let new = self.format.leaf(leaf.level, leaf.output, leaf.template.0);
        loop {
            let place = self.descend(pin, leaf.gpa, leaf.level);
            let done = if place.entry == F::EMPTY && place.level == leaf.level {
                place.table.exchange(place.index, F::EMPTY, new).is_ok().then_some(Installed::New)
            } else {
                self.install_over(pin, reserve, leaf, &place)?
            };
            if let Some(done) = done {
                self.installed(pin, leaf.level);
                return Ok(done);
            }
        }
    }

    /// Everything but the empty entry at the right level. `None`: look again.
    fn install_over(
        &self,
        pin: &Pin<'_, M>,
        reserve: &mut Reserve<'m, M>,
        leaf: &Leaf,
        place: &Place<'_, M>,
    ) -> Result<Option<Installed>, Error> {
        let old = place.entry;
        if old & LOCK_BIT != 0 {
            bump(&pin.counters().retries, 1);
            return Err(Error::Retry);
        }
        if !F::is_valid(old) {
            return match Owner::of(old) {
                Some(owner) => Err(Error::Owned { at: leaf.gpa, owner }),
                None => self.install_below(pin, reserve, leaf, place),
            };
        }
        if F::is_table(old, place.level) {
            return self.install_over_table(pin, leaf, place);
        }
        self.install_over_leaf(pin, reserve, leaf, place)
    }

    /// The entry is empty above the leaf's level: one chain of tables, complete before it is linked.
    fn install_below(
        &self,
        pin: &Pin<'_, M>,
        reserve: &mut Reserve<'m, M>,
        leaf: &Leaf,
        place: &Place<'_, M>,
    ) -> Result<Option<Installed>, Error> {
        let geometry = self.geometry();
        let needed = (place.level.height() - leaf.level.height()) as usize;
        let enough = reserve.len() >= needed;
        let mask = geometry.entries() - 1;
        let mut new = self.format.leaf(leaf.level, leaf.output, leaf.template.0);
        let mut level = leaf.level;
        for _ in 0..needed {
            let next = if enough { reserve.take() } else { None };
            let base = next.ok_or(Error::NeedTables { at: leaf.gpa, tables: needed })?;
            let index = (leaf.gpa.0 >> geometry.shift(level)) as usize & mask;
            self.blank(base, 1);
            self.owned(base).settle(index, new);
            new = self.format.table(base);
            level = Level::new(level.number() - 1).unwrap_or(Level::TOP);
        }
        if place.table.exchange(place.index, F::EMPTY, new).is_ok() {
            bump(&pin.counters().linked, needed as u64);
            return Ok(Some(Installed::New));
        }
        let mut level = place.level.below();
        for _ in 0..needed {
            let base = self.format.next(new);
            let index = (leaf.gpa.0 >> geometry.shift(level)) as usize & mask;
            let entry = self.owned(base).entry(index);
            new = entry.read();
            self.owned(base).settle(index, EMPTY);
            if F::EMPTY == EMPTY {
                reserve.give(base);
            } else {
                self.take_apart(reserve, base, Level::LAST);
            }
            level = level.below();
        }
        Ok(None)
    }

    fn install_over_leaf(
        &self,
        pin: &Pin<'_, M>,
        reserve: &mut Reserve<'m, M>,
        leaf: &Leaf,
        place: &Place<'_, M>,
    ) -> Result<Option<Installed>, Error> {
        let &Place { table, index, level, entry: old, .. } = place;
        let geometry = self.geometry();
        let offset = leaf.gpa.0 & (geometry.size(level) - 1);
        let same = self.format.output(old, level).0 + offset == leaf.output.0;
        let relaxed = F::relaxed(old, leaf.template.0);
        if same && relaxed == old {
            self.invalidate_local(pin.counters(), leaf.gpa);
            return Ok(Some(Installed::Present));
        }
        if level < leaf.level {
            let entry = (index, old, level);
            return match self.split_entry(
                reserve,
                pin.counters(),
                table,
                entry,
                leaf.gpa,
                leaf.level,
            ) {
                // Published now: what comes next may be refused.
                Ok(_) => {
                    self.publish(pin.counters());
                    Ok(None)
                }
                Err(Error::Retry) => Ok(None),
                Err(error) => Err(error),
            };
        }
        if same {
            if table.exchange(index, old, relaxed).is_err() {
                return Ok(None);
            }
            self.invalidate_local(pin.counters(), leaf.gpa);
            return Ok(Some(Installed::Relaxed));
        }
        // Rule 3: two valid entries with different output addresses.
        if table.exchange(index, old, F::LOCKED).is_err() {
            return Ok(None);
        }
        self.invalidate(pin.counters(), self.leaf_at(leaf.gpa, level));
        table.settle(index, self.format.leaf(level, leaf.output, leaf.template.0));
        Ok(Some(Installed::Replaced { dirty: F::is_dirty(old) }))
    }
}
