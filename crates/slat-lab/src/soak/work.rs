//! What a worker does: everything that is no vCPU's, one thing after the other as they are drawn.

use slat::{GpaRange, Lookup};
use slat_model::Model;
use slat_vm::{Guard, Hva, HvaRange, InvalidateError, LogError, LookUpError, Worker};

use crate::random::Dice;
use crate::soak::config::Soaked;
use crate::soak::migration::Migration;
use crate::soak::place::{Behind, Kind, PRIVATE, Place, SHARED, State};
use crate::soak::round::Ground;

/// Pages of a range that the host moves at most.
const AT_ONCE: u64 = 8;

/// A thread that maintains guest memory.
pub(crate) struct Work<'r, 'v, 'm, T: Soaked> {
    ground: &'r Ground<'v, 'm, T>,
    worker: Worker<'m, Model>,
    dice: Dice,
}

/// What was wrong, or could not be done.
type Done = Result<(), String>;

/// Why an operation was refused that cannot be.
fn refused(what: &'static str) -> impl Fn(&dyn std::fmt::Display) -> String {
    move |why| format!("{what}: {why}")
}

/// An invalidation, unless a pinned slot has some of its pages.
fn unless_pinned<'v>(
    begun: Result<Guard<'v, Model>, InvalidateError>,
) -> Result<Option<Guard<'v, Model>>, String> {
    match begun {
        Ok(guard) => Ok(Some(guard)),
        Err(InvalidateError::Pinned { .. }) => Ok(None),
        Err(why) => Err(refused("an invalidation")(&why)),
    }
}

impl<'r, 'v, 'm, T: Soaked> Work<'r, 'v, 'm, T> {
    pub(crate) fn new(
        ground: &'r Ground<'v, 'm, T>,
        worker: Worker<'m, Model>,
        dice: Dice,
    ) -> Self {
        Self { ground, worker, dice }
    }

    /// One operation on one place. Those that another worker keeps from happening count too.
    ///
    /// # Errors
    /// What was wrong about it.
    pub(crate) fn step(&mut self) -> Done {
        if self.ground.is_ring_full() {
            self.ground.harvest(&mut self.worker)?;
        }
        let places = &self.ground.places;
        let place = &places[self.dice.below(places.len() as u64) as usize];
        match self.dice.below(100) {
            0..=29 => self.log(place),
            30..=54 => self.move_pages(place),
            55..=59 => self.gather(place),
            60..=67 => self.split(place),
            68..=72 => self.slot(place),
            73..=77 => self.change(place),
            78..=83 => self.age(place),
            84..=86 => self.trim(place),
            87..=89 => self.collapse(place),
            90..=92 => self.convert(place),
            93..=94 => self.look_at_pinned(place),
            _ => self.look_up(place),
        }
    }

    /// Enables the log of a slot, or collects from it, or disables it.
    fn log(&mut self, place: &Place) -> Done {
        let Self { ground, worker, dice } = self;
        let Some(mut state) = place.state() else { return Ok(()) };
        let (State::There(log), Some(behind)) = (&mut *state, place.behind()) else {
            return Ok(());
        };
        if behind.kind == Kind::Private {
            return Ok(());
        }
        match log {
            None => {
                let begun = Migration::begin(ground, worker, place, behind, dice);
                *log = Some(begun.map_err(|why| refused("enabling a log")(&why))?);
            }
            Some(_) if dice.happens(15) => {
                ground
                    .vm
                    .disable_log(worker, place.id)
                    .map_err(|why| refused("disabling a log")(&why))?;
                *log = None;
            }
            Some(migration) => {
                let lost = migration.round(ground, worker, place, dice, false);
                if let Some(page) = lost.map_err(|why| refused("collecting")(&why))? {
                    return Err(migration.lost(place, page));
                }
            }
        }
        Ok(())
    }

    /// The host moves some pages.
    fn move_pages(&mut self, place: &Place) -> Done {
        let (first, pages) = self.pages(place, AT_ONCE);
        let Self { ground, worker, dice } = self;
        let behind = place.first(dice.below(2));
        let Some(claim) = ground.vm.host().claim(behind + first, pages) else { return Ok(()) };
        let guard = if dice.happens(50) {
            ground.vm.invalidate_begin(worker, &place.ranges(first, pages))
        } else {
            let ranges = claim.hvas();
            ground.vm.invalidate_host_begin(worker, ranges.as_slice())
        };
        let Some(guard) = unless_pinned(guard)? else { return Ok(()) };
        claim.take();
        if dice.happens(20) {
            // Another one inside of this one, in which nothing moves.
            let ranges = place.ranges(dice.below(place.pages), AT_ONCE);
            let inner = ground.vm.invalidate_begin(worker, &ranges);
            drop(unless_pinned(inner)?);
        }
        claim.scatter(ground.vm.machine(), dice);
        claim.give();
        guard.end();
        Ok(())
    }

    /// The host makes a block whole again.
    fn gather(&mut self, place: &Place) -> Done {
        let Self { ground, worker, dice } = self;
        let behind = place.first(dice.below(2));
        let block = ground.block_pages();
        let first = dice.below(place.pages) / block * block;
        let pages = block.min(place.pages - first);
        let Some(claim) = ground.vm.host().claim(behind + first, pages) else { return Ok(()) };
        let ranges = claim.hvas();
        let guard = ground.vm.invalidate_host_begin(worker, ranges.as_slice());
        let Some(guard) = unless_pinned(guard)? else { return Ok(()) };
        claim.take();
        claim.gather(ground.vm.machine());
        claim.give();
        guard.end();
        Ok(())
    }

    /// Splits blocks.
    fn split(&mut self, place: &Place) -> Done {
        let Some(range) = self.range(place) else { return Ok(()) };
        let split = self.ground.vm.split(&mut self.worker, range);
        match split.map_err(|why| refused("a split")(&why))? {
            true => Ok(()),
            false => Err("a split ended early, and there is memory for tables".to_owned()),
        }
    }

    /// Deletes the slot, or creates it.
    fn slot(&mut self, place: &Place) -> Done {
        let Self { ground, worker, dice } = self;
        let Some(mut state) = place.state() else { return Ok(()) };
        match &*state {
            State::There(_) => {
                place.begin_change(None);
                let deleted = ground.vm.delete_slot(worker, place.id);
                deleted.map_err(|why| refused("deleting a slot")(&why))?;
                place.end_change(None);
                *state = State::Gone;
            }
            State::Gone => {
                let (window, spots) = (dice.below(2), 1 << dice.below(2));
                let kind = match dice.below(10) {
                    0..=1 => Kind::Pinned,
                    2..=4 => Kind::Private,
                    _ => Kind::Ordinary,
                };
                let read_only = kind == Kind::Ordinary && dice.happens(15);
                let to = Behind { window, spots, read_only, kind };
                if ground.create(worker, place, to)? {
                    *state = State::There(None);
                }
            }
        }
        Ok(())
    }

    /// Moves the slot, or makes it read-only or writable. Its log goes on.
    fn change(&mut self, place: &Place) -> Done {
        let Self { ground, worker, dice } = self;
        let Some(_state) = place.state() else { return Ok(()) };
        let Some(now) = place.behind() else { return Ok(()) };
        if now.kind == Kind::Private {
            return Ok(());
        }
        let to = if dice.happens(60) && now.kind != Kind::Pinned {
            Behind { spots: 3 ^ now.spots, ..now }
        } else {
            Behind { read_only: !now.read_only, ..now }
        };
        let config = place.begin_change(Some(to));
        let changed = ground.vm.change_slot(worker, place.id, config);
        changed.map_err(|why| refused("changing a slot")(&why))?;
        place.end_change(Some(to));
        Ok(())
    }

    /// Makes some pages private, or shared.
    fn convert(&mut self, place: &Place) -> Done {
        let Some(_state) = place.state() else { return Ok(()) };
        let now = place.behind().filter(|now| now.kind == Kind::Private);
        let Some(now) = now else { return Ok(()) };
        let (first, pages) = self.pages(place, place.pages);
        let Some(range) = place.range(now.spot(), first, pages) else { return Ok(()) };
        let private = self.dice.happens(50);
        place.set_kinds(first, pages, SHARED | PRIVATE);
        let converted = self.ground.vm.set_private(&mut self.worker, place.id, range, private);
        converted.map_err(|why| refused("a conversion")(&why))?;
        place.set_kinds(first, pages, if private { PRIVATE } else { SHARED });
        Ok(())
    }

    /// Every page of a pinned slot is mapped, whoever takes pages back meanwhile.
    ///
    /// # Errors
    /// Which one is not.
    pub(crate) fn look_at_pinned(&mut self, place: &Place) -> Done {
        let Some(_state) = place.state() else { return Ok(()) };
        let now = place.behind().filter(|now| now.kind == Kind::Pinned);
        let Some(now) = now else { return Ok(()) };
        for page in 0..place.pages {
            let gpa = place.gpa(now.spot(), page);
            let found = self.ground.vm.tree().look_up(&self.worker.participant().pin(), gpa);
            // An entry that is being changed is none that has vanished.
            if !matches!(found, Ok(Lookup::Mapped { .. }) | Err(slat::Error::Retry)) {
                return Err(format!("page {page} of the pinned slot {} has vanished", place.id));
            }
        }
        Ok(())
    }

    /// Puts blocks back in the place of pages.
    fn collapse(&mut self, place: &Place) -> Done {
        match self.ground.vm.collapse(&mut self.worker, place.id) {
            Ok(_) | Err(LogError::NoSlot | LogError::Enabled) => Ok(()),
            Err(error) => Err(refused("a collapse")(&error)),
        }
    }

    /// Counts young pages, and makes them old.
    fn age(&mut self, place: &Place) -> Done {
        let Some(range) = self.range(place) else { return Ok(()) };
        let (vm, worker) = (self.ground.vm, &mut self.worker);
        let first = Hva(place.first(self.dice.below(2)) * self.ground.page_size());
        let aged = match (self.dice.below(4), HvaRange::new(first, range.size())) {
            (0, _) => vm.test_young(worker, range),
            (1, Some(hvas)) => vm.clear_host_young(worker, hvas),
            _ => vm.clear_young(worker, range),
        };
        aged.map(|_| ()).map_err(|why| refused("aging")(&why))
    }

    /// Frees tables without entries, and those that wait to be freed.
    fn trim(&mut self, place: &Place) -> Done {
        let Some(range) = place.range(self.dice.below(2), 0, place.pages) else { return Ok(()) };
        let trimmed = self.ground.vm.trim(&mut self.worker, range);
        trimmed.map(|_| ()).map_err(|why| refused("trimming")(&why))
    }

    /// Looks up a page and what backs it.
    fn look_up(&mut self, place: &Place) -> Done {
        let (page, there) = (self.dice.below(place.pages), place.there());
        let spot = place.behind().map_or(0, Behind::spot);
        let host = self.ground.vm.host();
        let used = |output, _| {
            let mut pages = place.host_pages(place.behind()?, page);
            let is_it = |&page: &u64| host.place(page) == Some(output);
            Some(pages.find(is_it).map_or((false, false), |page| (host.is_taken(page), true)))
        };
        let found = self.ground.vm.look_up(self.worker.participant(), place.gpa(spot, page), used);
        match found {
            Ok(Some((false, true)) | None) | Err(LookUpError::NotMapped | LookUpError::Retry) => {
                Ok(())
            }
            // A slot that goes does not wait for who looks up its pages.
            Ok(_) if there.is_none() || place.there() != there => Ok(()),
            Ok(Some((taken, _))) => Err(format!(
                "page {page} of slot {} is looked up {}",
                place.id,
                if taken { "after the host has taken it back" } else { "where it is no more" }
            )),
            Err(error) => Err(refused("a look-up")(&error)),
        }
    }

    /// Some pages of a place, where its slot is, or one of the places where it may be.
    fn range(&mut self, place: &Place) -> Option<GpaRange> {
        let (first, pages) = self.pages(place, place.pages);
        let spot = place.behind().map_or_else(|| self.dice.below(2), Behind::spot);
        place.range(spot, first, pages)
    }

    /// Some pages of a place, at most so many.
    fn pages(&mut self, place: &Place, at_once: u64) -> (u64, u64) {
        let pages = 1 + self.dice.below(at_once.min(place.pages));
        (self.dice.below(place.pages - pages + 1), pages)
    }
}
