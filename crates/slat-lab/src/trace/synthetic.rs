//! Traces that nobody recorded: pages that are touched upwards, which prefetch of what follows spares faults, among pages
//! that nothing beside is touched with. How many there are of each is all that decides the share of faults that is
//! spared, and was chosen so that it is what was published.

use super::{Recorder, Trace};
use crate::random::Dice;

const PAGE: u64 = 4096;
/// Pages of a window, and of a stretch of memory that is touched in one of the two ways.
const WINDOW: u64 = 8;
const STRETCH: u64 = 64;
const SEED: u64 = 1;

/// Pages of the guest's memory, whole stretches.
const PAGES: u64 = 1 << 17;
/// Stretches of a thousand that are touched upwards, page by page.
const UPWARDS: u64 = 28;
const WRITE_PERCENT: u32 = 50;

/// A guest that boots and runs an application: the same trace at every call.
pub(crate) fn app() -> Trace {
    let mut dice = Dice::new(SEED, 0);
    let mut stretches: Vec<u64> = (0..PAGES / STRETCH).collect();
    shuffle(&mut stretches, &mut dice);
    let upwards = stretches.len() as u64 * UPWARDS / 1000;
    let mut ways: Vec<bool> = (0..).map(|n| n < upwards).take(stretches.len()).collect();
    shuffle(&mut ways, &mut dice);
    let mut recorder = Recorder::default();
    for (stretch, upwards) in stretches.into_iter().zip(ways) {
        let first = stretch * STRETCH;
        let write = dice.happens(WRITE_PERCENT);
        if upwards {
            (first..first + STRETCH).for_each(|page| recorder.touch(page, write));
        } else {
            let mut windows: Vec<u64> = (0..STRETCH / WINDOW).collect();
            shuffle(&mut windows, &mut dice);
            for window in windows {
                recorder.touch(first + window * WINDOW + dice.below(WINDOW), write);
            }
        }
    }
    let origin = "synthetic app: made up, its share of upward touches fitted".to_owned();
    Trace { origin, page: PAGE, pages: PAGES, runs: recorder.into_runs() }
}

/// Each order as likely as the others.
fn shuffle<T>(all: &mut [T], dice: &mut Dice) {
    for last in (1..all.len()).rev() {
        all.swap(last, dice.below(last as u64 + 1) as usize);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_synthetic_trace_says_so_and_is_the_same_each_time() {
        let trace = app();
        assert!(trace.origin.contains("synthetic"));
        assert_eq!(trace, app());
        assert!(trace.runs.iter().all(|run| run.end() <= trace.pages));
    }
}
