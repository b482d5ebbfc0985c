//! A sorted list in pieces: a changed copy shares with the old list all pieces but the one that changed.

use alloc::vec::Vec;

use crate::heap::{OutOfMemory, with_room};
use crate::shared::Shared;

/// The most elements of a piece.
const PIECE: usize = if cfg!(test) { 4 } else { 256 };

/// Where an element is: its piece and its place there. A guess, for a list that may have changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct At(u32, u32);

/// Elements in ascending order.
#[derive(Debug)]
pub(crate) struct Chunks<T> {
    /// None is empty.
    pieces: Vec<Shared<Vec<T>>>,
}

impl<T: Copy> Chunks<T> {
    pub(crate) const EMPTY: Self = Self { pieces: Vec::new() };

    /// The element there, if there is one.
    #[inline]
    pub(crate) fn get(&self, at: At) -> Option<&T> {
        self.pieces.get(at.0 as usize)?.get(at.1 as usize)
    }

    /// Where the first element is that `before` is not true of, in log time: it must be true of those up to there and of
    /// none after.
    pub(crate) fn first(&self, before: impl Fn(&T) -> bool) -> At {
        let has_more = |piece: &Shared<Vec<T>>| piece.last().is_some_and(&before);
        let piece = self.pieces.partition_point(has_more);
        let place = self.pieces.get(piece).map_or(0, |piece| piece.partition_point(before));
        At(piece as u32, place as u32)
    }

    /// Where the element before that place is.
    pub(crate) fn before(&self, at: At) -> Option<At> {
        match (at.0.checked_sub(1), at.1.checked_sub(1)) {
            (_, Some(place)) => Some(At(at.0, place)),
            (Some(piece), None) => {
                let len = self.pieces.get(piece as usize)?.len() as u32;
                Some(At(piece, len.checked_sub(1)?))
            }
            (None, None) => None,
        }
    }

    /// The same list.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub(crate) fn same(&self) -> Result<Self, OutOfMemory> {
        self.replaced(0, 0, [])
    }

    /// The elements from there on.
    pub(crate) fn from(&self, at: At) -> impl Iterator<Item = &T> {
        let pieces = self.pieces.iter().skip(at.0 as usize);
        pieces.flat_map(|piece| piece.iter()).skip(at.1 as usize)
    }

    /// All elements.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.from(At::default())
    }

    /// The same list without the element there, if there is one.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub(crate) fn without(&self, at: At) -> Result<Self, OutOfMemory> {
        let Some(piece) = self.pieces.get(at.0 as usize).filter(|_| self.get(at).is_some()) else {
            return self.same();
        };
        let mut rest = with_room(piece.len())?;
        let (left, right) = piece.split_at(at.1 as usize);
        rest.extend(left.iter().chain(&right[1..]));
        let rest = if rest.is_empty() { None } else { Some(rest) };
        self.replaced(at.0 as usize, 1, [rest, None])
    }

    /// The same list with `new` at that place.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub(crate) fn with(&self, at: At, new: T) -> Result<Self, OutOfMemory> {
        // Beyond the last piece means at its end.
        let last = self.pieces.len().saturating_sub(1);
        let index = (at.0 as usize).min(last);
        let old = self.pieces.get(index);
        let len = old.map_or(0, |piece| piece.len());
        let place = if at.0 as usize > last { len } else { (at.1 as usize).min(len) };
        let mut all = with_room(len + 1)?;
        if let Some(old) = old {
            all.extend(old.iter());
        }
        all.insert(place, new);
        let mut right = None;
        if all.len() > PIECE {
            let half = all.len() / 2;
            let mut second = with_room(all.len() - half)?;
            second.extend(all.drain(half..));
            right = Some(second);
        }
        self.replaced(index, usize::from(old.is_some()), [Some(all), right])
    }

    /// The same pieces, with others in the place of `count` from `index` on.
    fn replaced<const N: usize>(
        &self,
        index: usize,
        count: usize,
        others: [Option<Vec<T>>; N],
    ) -> Result<Self, OutOfMemory> {
        let mut pieces = with_room(self.pieces.len() + N)?;
        let index = index.min(self.pieces.len());
        pieces.extend(self.pieces.iter().take(index).cloned());
        for other in others.into_iter().flatten() {
            pieces.push(Shared::new(other)?);
        }
        pieces.extend(self.pieces.iter().skip(index + count).cloned());
        Ok(Self { pieces })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn elements_come_and_go_as_in_a_sorted_vector() {
        let (mut list, mut reference) = (Chunks::EMPTY, Vec::new());
        let mut random = 1_u64;
        for round in 0..2000 {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let value = (random >> 33) % 200;
            let at = list.first(|&other| other < value);
            let place = reference.partition_point(|&other| other < value);
            assert_eq!(list.get(at).copied(), reference.get(place).copied());
            let before = list.before(at).and_then(|at| list.get(at)).copied();
            assert_eq!(before, place.checked_sub(1).map(|place| reference[place]));
            let grows = round < 1000 || random & 1 << 20 == 0;
            match reference.get(place) {
                Some(&there) if there == value => {
                    list = list.without(at).unwrap();
                    reference.remove(place);
                }
                _ if grows => {
                    list = list.with(at, value).unwrap();
                    reference.insert(place, value);
                }
                _ => {}
            }
            assert_eq!(list.iter().copied().collect::<Vec<_>>(), reference);
            let at = list.first(|&other| other < 100);
            let place = reference.partition_point(|&other| other < 100);
            assert!(list.from(at).eq(&reference[place..]));
        }
        let gone = list.without(At(99, 0)).unwrap();
        assert!(gone.iter().eq(&reference));
    }
}
