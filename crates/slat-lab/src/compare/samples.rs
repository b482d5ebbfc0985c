//! What repetitions of a phase took, and how two sets of them differ.

use serde::Serialize;

use super::results::Side;

/// Repetitions of one phase.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Samples {
    seconds: Vec<f64>,
    of: Of,
}

/// What is repeated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Of {
    /// What differs between the iterations of a run is no deviation where there are other runs.
    Runs,
    Iterations,
}

/// What they come to.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub(super) struct Summary {
    pub(super) repetitions: usize,
    pub(super) mean_seconds: f64,
    /// None of one repetition.
    pub(super) sd_seconds: Option<f64>,
}

/// Per cent; `None` if A took no time, or for a deviation that is not known.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub(super) struct Change {
    pub(super) change_percent: Option<f64>,
    pub(super) sd_percent: Option<f64>,
    /// Whether the deviation is that of pairs.
    pub(super) paired: bool,
}

/// Phases of a side in the order in which they come first: under one name, or each iteration by itself.
pub(super) fn phases(side: &Side, by_iteration: bool) -> Vec<(String, Samples)> {
    // Of each phase, the seconds of its iterations run by run.
    let mut all: Vec<(String, Vec<Vec<f64>>)> = Vec::new();
    for (run, phases) in side.runs.iter().map(|run| &run.phases).enumerate() {
        for phase in phases {
            let name = match phase.iteration {
                Some(iteration) if by_iteration => format!("{} {iteration}", phase.name),
                _ => phase.name.clone(),
            };
            let known = all.iter().position(|(known, _)| *known == name);
            let index = known.unwrap_or_else(|| {
                all.push((name, vec![Vec::new(); side.runs.len()]));
                all.len() - 1
            });
            all[index].1[run].push(phase.seconds);
        }
    }
    all.into_iter().map(|(name, runs)| (name, Samples::new(runs))).collect()
}

impl Samples {
    fn new(mut runs: Vec<Vec<f64>>) -> Self {
        match runs.len() {
            1 => Self { seconds: runs.remove(0), of: Of::Iterations },
            _ => {
                let had = runs.iter().filter(|iterations| !iterations.is_empty());
                Self { seconds: had.map(|all| mean(all)).collect(), of: Of::Runs }
            }
        }
    }

    pub(super) fn summary(&self) -> Summary {
        let Self { seconds, .. } = self;
        let (mean_seconds, sd_seconds) = (mean(seconds), deviation(seconds));
        Summary { repetitions: seconds.len(), mean_seconds, sd_seconds }
    }

    /// From this to `other`.
    pub(super) fn change(&self, other: &Self) -> Change {
        let (a, b) = (self.summary(), other.summary());
        let paired = self.of == other.of && a.repetitions == b.repetitions;
        if a.mean_seconds == 0.0 {
            return Change { change_percent: None, sd_percent: None, paired };
        }
        let ratio = b.mean_seconds / a.mean_seconds;
        let sd = if paired {
            let pairs = self.seconds.iter().zip(&other.seconds);
            deviation(&pairs.map(|(a, b)| b / a).collect::<Vec<_>>())
        } else {
            let share = |of: Summary| of.sd_seconds.map(|sd| sd / of.mean_seconds);
            share(a).zip(share(b)).map(|(a, b)| ratio * a.hypot(b))
        };
        Change {
            change_percent: Some((ratio - 1.0) * 100.0),
            sd_percent: sd.map(|sd| sd * 100.0).filter(|sd| sd.is_finite()),
            paired,
        }
    }
}

fn mean(all: &[f64]) -> f64 {
    all.iter().sum::<f64>() / all.len() as f64
}

fn deviation(all: &[f64]) -> Option<f64> {
    let mean = mean(all);
    // Equal values have no deviation, not one of rounding.
    if all.len() > 1 && all.iter().all(|one| *one == all[0]) {
        return Some(0.0);
    }
    let squares: f64 = all.iter().map(|one| (one - mean).powi(2)).sum();
    (all.len() > 1).then(|| (squares / (all.len() - 1) as f64).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(seconds: &[f64]) -> Samples {
        Samples { seconds: seconds.to_vec(), of: Of::Runs }
    }

    #[test]
    fn a_mean_and_its_deviation_are_those_of_a_sample() {
        let summary = samples(&[2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0]).summary();
        assert_eq!((summary.repetitions, summary.mean_seconds), (8, 5.0));
        assert!((summary.sd_seconds.unwrap() - (32.0f64 / 7.0).sqrt()).abs() < 1e-12);
        assert_eq!(samples(&[3.0]).summary().sd_seconds, None);
    }

    #[test]
    fn runs_are_repetitions_and_iterations_are_where_there_is_one_run() {
        let several = Samples::new(vec![vec![1.0, 9.0], vec![2.0, 8.0], Vec::new()]);
        assert_eq!(several, Samples { seconds: vec![5.0, 5.0], of: Of::Runs });
        let one = Samples::new(vec![vec![1.0, 9.0]]);
        assert_eq!(one, Samples { seconds: vec![1.0, 9.0], of: Of::Iterations });
        assert!(!several.change(&one).paired && one.change(&one).paired);
    }

    #[test]
    fn what_differs_between_repetitions_on_both_sides_alike_is_no_deviation_of_pairs() {
        let change = samples(&[1.0, 2.0, 8.0]).change(&samples(&[0.5, 1.0, 4.0]));
        let expected = Change { change_percent: Some(-50.0), sd_percent: Some(0.0), paired: true };
        assert_eq!(change, expected);
    }

    #[test]
    fn without_pairs_the_deviations_of_both_sides_add_as_squares() {
        let change = samples(&[9.0, 11.0]).change(&samples(&[17.0, 20.0, 23.0]));
        assert!(!change.paired && (change.change_percent.unwrap() - 100.0).abs() < 1e-9);
        let (a, b) = (2.0f64.sqrt() / 10.0, 3.0 / 20.0);
        assert!((change.sd_percent.unwrap() - 200.0 * a.hypot(b)).abs() < 1e-9);
        assert_eq!(samples(&[1.0]).change(&samples(&[2.0, 3.0])).sd_percent, None);
    }

    #[test]
    fn nothing_is_a_change_of_no_time() {
        let change = samples(&[0.0, 0.0]).change(&samples(&[1.0, 1.0]));
        assert_eq!((change.change_percent, change.sd_percent), (None, None));
        let sometimes = samples(&[0.0, 2.0]).change(&samples(&[1.0, 1.0]));
        assert_eq!((sometimes.change_percent, sometimes.sd_percent), (Some(0.0), None));
    }
}
