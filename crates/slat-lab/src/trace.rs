//! Which pages a guest touched, in order: what a run recorded, a file holds, or a generator made up.

mod file;
mod synthetic;

pub(crate) use file::boot;
pub(crate) use synthetic::app;

/// Touches of one guest.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Trace {
    /// Where it comes from, in words.
    pub(crate) origin: String,
    /// Bytes of a page.
    pub(crate) page: u64,
    /// Pages of the guest's memory.
    pub(crate) pages: u64,
    pub(crate) runs: Vec<Run>,
}

/// Pages that were touched one after the other, upwards.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Run {
    pub(crate) first: u64,
    /// At least one.
    pub(crate) count: u64,
    pub(crate) write: bool,
}

impl Run {
    /// The page after its last one.
    fn end(&self) -> u64 {
        self.first + self.count
    }
}

impl Trace {
    /// How many touches.
    pub(crate) fn touches(&self) -> u64 {
        self.runs.iter().map(|run| run.count).sum()
    }
}

/// Writes down what a guest touches.
#[derive(Debug, Default)]
pub(crate) struct Recorder {
    runs: Vec<Run>,
}

impl Recorder {
    /// The guest has touched this page.
    pub(crate) fn touch(&mut self, page: u64, write: bool) {
        match self.runs.last_mut() {
            Some(run) if run.write == write && run.end() == page => run.count += 1,
            _ => self.runs.push(Run { first: page, count: 1, write }),
        }
    }

    /// Everything, in order.
    pub(crate) fn into_runs(self) -> Vec<Run> {
        self.runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_in_a_row_become_one_run_unless_the_access_differs() {
        let mut recorder = Recorder::default();
        for (page, write) in [(5, false), (6, false), (7, true), (8, true), (8, true), (2, true)] {
            recorder.touch(page, write);
        }
        let run = |first, count, write| Run { first, count, write };
        let expected = [run(5, 2, false), run(7, 2, true), run(8, 1, true), run(2, 1, true)];
        assert_eq!(recorder.into_runs(), expected);
    }
}
