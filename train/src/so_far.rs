//! What has become of a run's attempts so far.

use std::collections::{BTreeMap, BTreeSet};

use crate::result::TrainResult;

/// What one attempt leaves to the next, and to whoever stops the run.
#[derive(Debug, Default)]
pub(crate) struct SoFar {
    /// Attempts that have failed.
    pub failures: u32,
    pub ports_lost: u32,
    pub was_moved: bool,
    /// Nodes with something of earlier attempts that the next one may find.
    pub left: BTreeSet<u64>,
    /// How often ranks were launched: also after a move or a growth, which is no failure.
    pub launches: u32,
    /// With how many ranks the next launch is to be, if the last has ended to grow.
    pub grows_to: Option<u32>,
    /// How often in a row there were fewer than that.
    pub failed_growths: u32,
    /// The number of the newest attempt, from 1 on; 0 before the first.
    pub attempts: u32,
    /// How many ranks that had.
    pub ranks: u32,
    /// The last metrics that rank 0 has reported, in whichever attempt.
    pub metrics: BTreeMap<String, f64>,
}

impl SoFar {
    /// So many ranks have been placed, and are about to be launched.
    pub(crate) fn launch(&mut self, ranks: usize) {
        self.launches += 1;
        self.attempts = self.failures + 1;
        self.ranks = ranks as u32;
        if let Some(wanted) = self.grows_to.take() {
            self.failed_growths = if self.ranks < wanted { self.failed_growths + 1 } else { 0 };
        }
    }

    /// How far a run has come that was stopped, also between two attempts.
    pub(crate) fn tell(&mut self, result: &mut TrainResult) {
        (result.ranks, result.attempts) = (self.ranks, self.attempts);
        result.metrics = std::mem::take(&mut self.metrics);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_that_is_stopped_between_two_attempts_tells_of_the_last() {
        let mut so_far = SoFar::default();
        let mut result = TrainResult::default();
        so_far.tell(&mut result);
        assert_eq!((result.ranks, result.attempts), (0, 0), "nothing was placed");
        so_far.launch(4);
        so_far.metrics.insert("loss".into(), 0.5);
        so_far.failures += 1;
        so_far.tell(&mut result);
        assert_eq!((result.ranks, result.attempts, result.metrics["loss"]), (4, 1, 0.5));
        so_far.launch(2);
        assert_eq!((so_far.launches, so_far.attempts), (2, 2));
        // It grows, which is no failure.
        so_far.launch(3);
        assert_eq!((so_far.launches, so_far.attempts, so_far.ranks), (3, 2, 3));
    }

    #[test]
    fn growths_that_come_to_nothing_are_counted() {
        let mut so_far = SoFar::default();
        let mut grows_to = |wanted, ranks| {
            so_far.grows_to = wanted;
            so_far.launch(ranks);
            so_far.failed_growths
        };
        assert_eq!([grows_to(None, 2), grows_to(Some(3), 2), grows_to(Some(3), 2)], [0, 1, 2]);
        assert_eq!([grows_to(None, 1), grows_to(Some(2), 2)], [2, 0]);
    }
}
